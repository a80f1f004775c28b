"""The scripts of smp 1.x's documentation, with every division of the processes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from support import smp_reference
from support.launch import Cells

import hybridtrain.smp as smp
from hybridtrain.smp import runtime

MICROBATCHES = 4
FOLDER = Path(tempfile.gettempdir()) / f"smp-{os.environ.get('TORCHELASTIC_RUN_ID', 'single')}"

cells = Cells()


def start(world, **parameters):
    """Has the next `smp.init()` read these parameters, as a launcher's environment."""
    runtime._runtime = None
    os.environ["SM_HP_MP_PARAMETERS"] = json.dumps({"microbatches": MICROBATCHES, **parameters})


def check(world, kind, degree, **parameters):
    """Runs a script, and compares its losses and weights with those of the unsplit model."""
    start(world, pipeline_parallel_degree=degree, **parameters)
    folder = FOLDER / str(world.rank)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "data").exists():
        smp_reference.write_data(folder)
    found = []
    plain_mean = smp.StepOutput.reduce_mean
    smp.StepOutput.reduce_mean = lambda self: found.append(plain_mean(self)) or found[-1]
    try:
        variables = smp_reference.run(kind, folder)
    finally:
        smp.StepOutput.reduce_mean = plain_mean
    expected, net = smp_reference.plain_losses(folder, smp.dp_size(), MICROBATCHES)
    own = expected[smp.dp_rank()]
    assert len(found) == len(own) >= 2
    exact = smp.dp_size() <= 2  # the sum of more than two is in another order
    state, plain = variables["model"].state_dict(), net.state_dict()
    assert state.keys() == plain.keys()
    # running statistics are a replica's own until the next step
    same = plain if smp.dp_rank() == 0 else dict(net.named_parameters())
    pairs = [*zip(found, own, strict=True), *((state[name], plain[name]) for name in same)]
    for one, other in pairs:
        if exact:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert variables["model"].hybrid.plan.nb_part == degree
    if smp.pp_size() > 1:
        local = sum(p.numel() for p in variables["model"].local_parameters())
        assert 0 < local < sum(p.numel() for p in net.parameters())


def check_groups(world, **parameters):
    start(world, **parameters)
    smp.init()
    own = torch.tensor(2.0**world.rank)
    for name in ("world", "mp", "pp", "dp", "rdp", "tp"):
        group = getattr(smp, f"get_{name}_process_group")()
        members = (
            list(range(smp.size())) if name == "world" else getattr(smp, f"get_{name}_group")()
        )
        total = own.clone()
        torch.distributed.all_reduce(total, group=group)
        assert total == sum(2.0**rank for rank in members), name
        assert torch.distributed.get_process_group_ranks(group) == sorted(members), name
        assert getattr(smp, f"get_{name}_process_group")() is group


@cells.add("an all-reduce over each group is over its members alone, pipelines of two")
def _(world):
    check_groups(world, pipeline_parallel_degree=2)


@cells.add("an all-reduce over each group is over its members alone, one pipeline")
def _(world):
    check_groups(world, pipeline_parallel_degree=world.size)


@cells.add("an all-reduce over each group is over its members alone, all stages in a process")
def _(world):
    check_groups(world, pipeline_parallel_degree=2, hybridtrain={"engine": "local"})


def add(kind, degree, name="", thorough=False, **parameters):
    title = f"the {kind} script equals the unsplit model, degree {degree}{name}"

    @cells.add(title, thorough=thorough)
    def _(world):
        if world.size % degree == 0 or "hybridtrain" in parameters:
            check(world, kind, degree, **parameters)


MANUAL = {"auto_partition": False, "default_partition": 0}
add("auto", 1, thorough=True)
add("auto", 2, thorough=True)
add("auto", 4)
add("manual", 2, thorough=True, **MANUAL)
add("manual", 2, " spread", placement_strategy="spread", **MANUAL)
add("auto", 2, " in one process", hybridtrain={"engine": "local"})
add("auto", 2, ", simple", thorough=True, pipeline="simple")


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
