"""The heights of the API with two processes: two replicas, and two stages in two processes."""

import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from support.heights import NAMES, Small, losses_of
from support.launch import Cells
from support.training import assert_same, data, plain_net
from torch.utils.data import DataLoader, IterableDataset

from hybridtrain import EvalLoader, HybridModel, Loader, Session, Trainer, World
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.errors import UserError
from hybridtrain.loop.callbacks import EMA, Freeze, GradientNorms
from hybridtrain.loss import cross_entropy

cells = Cells()


class Stream(IterableDataset):
    def __iter__(self):
        yield from ((torch.ones(6), number) for number in range(9))


@cells.add("the three heights have the same losses, with two replicas of two stages", thorough=True)
def _heights(world):
    os.environ["HYBRIDTRAIN_NB_PART"] = "2"
    close, World.close = World.close, lambda self: None  # the processes have more to do
    try:
        losses = [losses_of(name) for name in NAMES]
    finally:
        World.close = close
    assert len(losses[0]) == 23
    assert losses[1] == losses[0]
    assert losses[2] == losses[0]


@cells.add("every sample counts once, also where a batch has fewer samples than replicas")
def _once(world):
    small = Small(World.from_env(nb_part=2, devices="cpu"))
    expected = data(11, seed=9)  # in batches of 4, 4 and 3
    assert torch.equal(small.gathered()[0], expected.tensors[1])
    session = Session(world=world)
    # 5 samples: the last batch has one, for two replicas
    one = session.prepare(torch.nn.Linear(6, 3), DataLoader(data(5), batch_size=4))
    found = torch.cat([session.gather_for_metrics(targets) for _, targets in one[1]])
    assert torch.equal(found, data(5).tensors[1])
    stream = session.prepare(DataLoader(Stream(), batch_size=4))
    found = torch.cat([session.gather_for_metrics(targets) for _, targets in stream])
    assert found.tolist() == list(range(9))
    seen = [
        target
        for loader in [Loader(data(21), 4, world, seed=1)]
        for _, targets in loader
        for target in targets[: loader.current.samples].tolist()
    ]
    everything = [x for part in world.gather(seen) for x in part]
    assert sorted(everything) == sorted(data(21).tensors[1].tolist())


@cells.add("a session of two replicas resumes in mid-epoch")
def _resume(world):
    def small():
        return Small(World.from_env(nb_part=1, devices="cpu"), accumulate=2, batch_size=8)

    whole, first = small().fit(5), small().fit(2)
    with tempfile.TemporaryDirectory() as folder:
        folder = world.broadcast(folder)
        first.session.save_state(folder)
        again = small()
        again.session.load_state(folder)
        world.gather(None)
    again.fit(5)
    assert_same(again.state(), whole.state(), "weights and buffers")
    assert again.losses == whole.losses[2:]


@cells.add("a session saves no replicas that are apart")
def _apart(world):
    small = Small(World.from_env(nb_part=1, devices="cpu"), batch_size=8).fit(2)
    if world.rank:
        next(small.model.parameters()).data[0] += 1.0
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(world.broadcast(folder))
        with pytest.raises(UserError, match=r"0\.weight of rank 1 differs from replica 0's"):
            small.session.save(folder)
        assert not list(folder.glob("step_*"))
        world.gather(None)


@cells.add("a session with stages in two processes is that of one process")
def _over_processes(world):
    apart = Small(World.from_env(nb_part=2, devices="cpu", engine="distributed")).fit(4)
    # one replica as well: each process trains all of it, alone
    alone = Small(World(devices=(torch.device("cpu"),) * 2)).fit(4)
    assert_same(apart.state(), alone.state(), "weights and buffers")
    assert apart.losses == alone.losses
    for ours, theirs in zip(apart.gathered(), alone.gathered(), strict=True):
        assert torch.equal(ours, theirs)


@cells.add("callbacks and predictions with stages in two processes are those of one process")
def _callbacks(world):
    def run(of, store=None, steps=6, path=None):
        model = HybridModel(plain_net(), of, chunks=2)
        losses = {}
        callbacks = [EMA(0.9), GradientNorms(), Freeze("0.*", until=2), _Record(losses)]
        trainer = Trainer(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.02),
            cross_entropy,
            Loader(data(22), 4, of, seed=1),
            steps=steps,
            log_every=1,
            callbacks=callbacks,
            store=store,
        )
        if path is not None:
            trainer.resume(path)
        trainer.fit()
        outputs = trainer.predict(EvalLoader(data(11, seed=9), 4, of))
        return callbacks[0].state_dict()["average"], losses, outputs

    both = World.from_env(nb_part=2, devices="cpu", engine="distributed")
    average, logged, outputs = run(both)
    expected, of_one, theirs = run(World(devices=(torch.device("cpu"),) * 2))
    assert_same(average, expected, "average")
    assert torch.equal(outputs, theirs)
    assert logged.keys() == of_one.keys()
    for key, value in logged.items():
        assert abs(value - of_one[key]) < 1e-6 * max(1, abs(value)), key
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(world.broadcast(folder)))
        run(both, store, steps=3)
        newest = world.broadcast(world.on_main(store.newest))
        again, _, resumed = run(both, steps=6, path=newest)
        world.gather(None)
    assert_same(again, expected, "average of the resumed run")
    assert torch.equal(resumed, theirs)


class _Record(GradientNorms):
    def __init__(self, into):
        super().__init__()
        self._into = into

    def on_log(self, trainer, values):
        super().on_log(trainer, values)
        for name, value in values.items():
            if name.startswith(("grad_norm", "train/loss", "train/grad_norm")):
                self._into[trainer.step, name] = value


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
