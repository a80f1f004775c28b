"""Loss scaling in fp16 over replicas: all skip a step that overflows anywhere."""

import sys
import tempfile
from pathlib import Path

from support.compare import assert_same, assert_same_on_all_ranks
from support.engine import LOSS_SCALE, fp16_trainer
from support.launch import Cells

from hybridtrain.checkpoint.store import CheckpointStore

cells = Cells()

LOWERED = [LOSS_SCALE] * 2 + [LOSS_SCALE / 2] * 4


def assert_all_skip(world, ours, skipped, scales):
    ours.fit()
    everything = set(ours.monitor.weights[0])
    for step in range(1, 7):
        expected = set() if step == skipped else everything
        assert ours.monitor.moved(step) == expected, f"step {step}: {ours.monitor.moved(step)}"
        assert_same_on_all_ranks(world, ours.monitor.weights[step], f"step {step}")
    assert ours.monitor.of("train/loss_scale") == scales
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
        f"layer {_layer} of {_nb_part} stages, rank {_rank}"
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
        stream = ours.train.stream()
        third = [next(stream) for _ in range(3)][-1]
        stream.close()
        too_large = world.gather(third.inputs[:1])[rank]
        inputs = ours.train.dataset.tensors[0]
        inputs[(inputs == too_large).all(1)] = 1e30
        assert_all_skip(world, ours, 3, LOWERED)

    return check


for _rank in (0, 1):
    cells.add(f"a sample of one replica that is too large skips the step in all: rank {_rank}")(
        overflow_in_the_data(_rank)
    )


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
    scales = whole.monitor.of("train/loss_scale")
    assert world.gather(again.scaler.get_scale()) == [scales[3]] * 2
    again.fit()
    assert again.monitor.of("train/loss_scale") == scales[4:]
    assert_same(again.monitor.weights[6], whole.monitor.weights[6])


if __name__ == "__main__":
    cells.main(sys.argv[1])
