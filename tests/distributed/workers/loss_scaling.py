"""Steps that all replicas skip alike, and stop after: overflows in fp16, NaN, signals."""

import math
import os
import signal
import sys
import tempfile
from pathlib import Path

from support.compare import assert_same, assert_same_on_all_ranks
from support.engine import LOSS_SCALE, fp16_trainer
from support.launch import Cells
from support.training import data, rich_net, trainer

from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.errors import DivergedError, Interrupted
from hybridtrain.loss import cross_entropy
from hybridtrain.step.non_finite import non_finite_names

cells = Cells()

LOWERED = [LOSS_SCALE] * 2 + [LOSS_SCALE / 2] * 4


def assert_all_skip(world, ours, skipped, scales):
    ours.fit()
    everything = set(ours.recorder.weights[0])
    for step in range(1, 7):
        expected = set() if step == skipped else everything
        assert ours.recorder.moved(step) == expected, f"step {step}: {ours.recorder.moved(step)}"
        assert_same_on_all_ranks(world, ours.recorder.weights[step], f"step {step}")
    assert ours.recorder.of("train/loss_scale") == scales
    assert world.gather(ours.scaler.get_scale()) == [scales[-1]] * 2


def overflow_in_a_stage(nb_part, layer, rank, **options):
    def check(world):
        at = (3,) if world.rank == rank else ()
        ours = fp16_trainer(nb_part, at=at, layer=layer, **options)
        assert_all_skip(world, ours, 3, LOWERED)

    return check


for _nb_part, _layer, _rank in [(1, 1, 0), (2, 0, 0), (2, 3, 1), (4, 0, 1), (4, 2, 0)]:
    cells.add(
        f"an overflow in one stage of one replica skips the step in all: "
        f"layer {_layer} of {_nb_part} stages, rank {_rank}",
        thorough=(_nb_part, _layer) != (2, 3),
    )(overflow_in_a_stage(_nb_part, _layer, _rank))
cells.add("an overflow in the first of two accumulated batches of one replica skips the step")(
    overflow_in_a_stage(2, 1, 1, accumulate=2)
)
cells.add("an overflow under clipping skips the step in all")(
    overflow_in_a_stage(2, 1, 0, clip_norm=0.1)
)


def overflow_in_the_data(rank):
    def check(world):
        ours = fp16_trainer()
        stream = ours.train.at_start().stream()
        third = [next(stream) for _ in range(3)][-1]
        stream.close()
        too_large = world.gather(third.inputs[:1])[rank]
        inputs = ours.train.dataset.tensors[0]
        inputs[(inputs == too_large).all(1)] = 1e30
        assert_all_skip(world, ours, 3, LOWERED)

    return check


for _rank in (0, 1):
    cells.add(
        f"a sample of one replica that is too large skips the step in all: rank {_rank}",
        thorough=_rank == 0,
    )(overflow_in_the_data(_rank))


@cells.add("a fixed scale stays on all ranks when one skips")
def _fixed(world):
    at = (3,) if world.rank else ()
    ours = fp16_trainer(at=at, layer=1, scale=256.0, loss_scale=256.0, growth=1)
    assert_all_skip(world, ours, 3, [256.0] * 6)


@cells.add("the scale comes back from the checkpoint on all ranks")
def _scale_comes_back(world):
    folder = Path(world.broadcast(tempfile.mkdtemp()))
    at = (3,) if world.rank else ()
    options = {"at": at, "layer": 1, "growth": 2}
    whole = fp16_trainer(**options)
    whole.fit()
    fp16_trainer(steps=4, store=CheckpointStore(folder), **options).fit()
    world.gather(None)  # rank 0 has written it
    again = fp16_trainer(scale=4.0 + world.rank, **options)
    again.resume(folder / "step_00000004")
    scales = whole.recorder.of("train/loss_scale")
    assert world.gather(again.scaler.get_scale()) == [scales[3]] * 2
    again.fit()
    assert again.recorder.of("train/loss_scale") == scales[4:]
    assert_same(again.recorder.weights[6], whole.recorder.weights[6])


# Not a number, on one rank only.
def raised(kind, function):
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def small(**options):
    """A trainer with batch norms and dropout on 4 batches of 8 samples."""
    return trainer(rich_net(), data=data(32), batch_size=8, **options)


def sample_of(world, ours, step, rank):
    """Returns the inputs of a data set, and which of them `rank` has in `step`."""
    stream = ours.train.at_start().stream()
    batch = [next(stream) for _ in range(step)][-1]
    stream.close()
    theirs = world.gather(batch.inputs[:1])[rank]
    inputs = ours.train.dataset.tensors[0]
    return inputs, (inputs == theirs).all(1)


def nan_in_the_data(rank, **options):
    def check(world):
        ours = small(steps=3, **options)
        inputs, where = sample_of(world, ours, 2, rank)
        inputs[where] = math.nan
        assert world.gather(ours.fit()["skipped_steps"]) == [1, 1]
        state = ours.model.state_dict()
        assert not non_finite_names(state)
        assert_same_on_all_ranks(world, dict(ours.model.named_parameters()), "weights")
        assert math.isfinite(ours.recorder.values[3, "train/loss"])

    return check


for _rank in (0, 1):
    cells.add(
        f"NaN in one replica's data skips the step in all, weights stay finite: {_rank}",
        thorough=_rank == 0,
    )(nan_in_the_data(_rank))
cells.add("NaN in one replica's data skips the step in all under clipping", thorough=True)(
    nan_in_the_data(1, clip_norm=0.1)
)


@cells.add("a loss that is NaN on one replica, beside finite derivatives, skips the step in all")
def _nan_loss(world):
    ours = small(steps=3)

    def loss_fn(output, targets):
        bad = world.rank == 1 and ours.step == 1
        return cross_entropy(output, targets) + (math.nan if bad else 0.0)

    ours.loss_fn = loss_fn
    assert world.gather(ours.fit()["skipped_steps"]) == [1, 1]
    assert_same_on_all_ranks(world, dict(ours.model.named_parameters()), "weights")


@cells.add("a run that diverges on one replica ends on all, with the rank and the checkpoint")
def _diverges(world):
    folder = Path(world.broadcast(tempfile.mkdtemp()))
    options = {"checkpoint_every_steps": 1, "max_skipped": 2, "store": CheckpointStore(folder)}
    ours = small(steps=12, **options)
    ours.total_steps = 2
    ours.fit()
    ours.total_steps = 12
    if world.rank == 1:
        ours.train.dataset.tensors[0].fill_(math.nan)
    messages = world.gather(raised(DivergedError, ours.fit))
    assert messages[0] == messages[1]
    assert "Origin in step 3: the inputs of the batch" in messages[0]
    assert "(rank 1)" in messages[0]
    assert str(folder / "step_00000002") in messages[0]
    assert ours.store.steps() == [1, 2]


@cells.add("weights that are not finite on one replica end the run on all before they are saved")
def _weights(world):
    folder = Path(world.broadcast(tempfile.mkdtemp()))
    ours = small(steps=2, store=CheckpointStore(folder))

    def spoil(optimizer, args, kwargs):
        if world.rank == 1 and ours.step == 1:
            ours.model.net[7].weight.data[0, 0] = math.nan

    ours.optimizer.register_step_post_hook(spoil)
    messages = world.gather(raised(DivergedError, ours.fit))
    assert "7.weight is not finite at step 2" in messages[0] == messages[1]
    assert not ours.store.steps()


@cells.add("a signal to one rank stops all at the same step, in an evaluation too")
def _stops(world):
    folder = Path(world.broadcast(tempfile.mkdtemp()))
    for step in (2, 4):  # an evaluation is due at 4
        store = CheckpointStore(folder / str(step))
        ours = small(eval_every=4, store=store)

        def forward(module, args, ours=ours, step=step):
            done = ours.step + (step == 2)  # in training, during step 2
            if world.rank == 1 and done == step and module.training == (step == 2):
                os.kill(os.getpid(), signal.SIGTERM)

        ours.model.net[0].register_forward_pre_hook(forward)
        messages = world.gather(raised(Interrupted, ours.fit))
        stopped = 3 if step == 2 else 4  # the others have begun step 2 when it comes
        assert messages[0] == messages[1]
        assert f"interrupted at step {stopped} of 9 by SIGTERM: saved" in messages[0]
        assert world.gather(ours.step) == [stopped] * 2
        assert (4, "eval/loss") not in ours.recorder.values
        if world.is_main:
            assert store.steps() == [stopped]


@cells.add("minutes are counted by rank 0's clock")
def _minutes(world):
    folder = Path(world.broadcast(tempfile.mkdtemp()))
    ours = small(steps=3, store=CheckpointStore(folder))

    def want_save(run, samples):
        if world.rank == 0 and run.step == 1:
            ours._interruptions._flags.set("save")

    ours.recorder.on_step = want_save
    ours.fit()
    if world.is_main:
        assert ours.store.steps() == [2, 3]


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
