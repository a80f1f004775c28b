"""Two replicas of two processes each: `shard` changes where tensors are, and no number."""

import sys

import torch
from support.launch import Cells
from support.nets import CASES
from support.sharded import check_same

from hybridtrain import World

torch.set_num_threads(1)
cells = Cells()


def world_of(inner):
    return World.from_env(2, devices="cpu", timeout_s=30, engine="distributed", inner=inner)


RUNS = [
    ("optimizer", "linear", "pp", {"optimizer": "relative", "clip": 0.1}),
    ("optimizer", "tied_gpt", "dp", {"stages_per_device": 2}),
    ("optimizer", "conv", "pp", {"optimizer": "momentum", "accumulate": 2}),
]
for _shard, _name, _inner, _options in RUNS:

    @cells.add(f"shard={_shard} is exact: {_name}, inner={_inner}", thorough=_name != "linear")
    def _(world, shard=_shard, name=_name, inner=_inner, options=_options):
        case = CASES[name]
        own = world_of(inner)
        # a batch is the same in all processes of a replica
        check_same(case.net(), own, shard, batch=case.batch, loss=case.loss, **options)


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
