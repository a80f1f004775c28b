"""Two replicas of two processes each: `shard` changes where tensors are, and no number."""

import sys

import torch
from support.launch import Cells
from support.nets import CASES
from support.sharded import check_same

from hybridtrain import HybridModel, World
from hybridtrain.sharded_tensors import is_sharded

torch.set_num_threads(1)
cells = Cells()


def world_of(inner):
    return World.from_env(2, devices="cpu", timeout_s=30, engine="distributed", inner=inner)


RUNS = [
    ("optimizer", "linear", "pp", {"optimizer": "relative", "clip": 0.1}),
    ("optimizer", "tied_gpt", "dp", {"stages_per_device": 2}),
    ("full", "linear", "dp", {"optimizer": "momentum", "clip": 0.1}),
    ("full", "conv", "pp", {}),
    ("full", "tied_gpt", "pp", {"stages_per_device": 2, "accumulate": 2}),
    ("full", "dropout", "dp", {"checkpoint": "always"}),
]
for _shard, _name, _inner, _options in RUNS:

    @cells.add(f"shard={_shard} is exact: {_name}, inner={_inner}")
    def _(world, shard=_shard, name=_name, inner=_inner, options=_options):
        case = CASES[name]
        own = world_of(inner)
        # a batch is the same in all processes of a replica
        check_same(case.net(), own, shard, batch=case.batch, loss=case.loss, **options)


@cells.add("a model that was constructed in parts is sharded as a whole one")
def _(world):
    states = []
    for shard in ("none", "full"):
        torch.manual_seed(0)
        model = HybridModel.construct(CASES["linear"].make, world_of("pp"), shard=shard)
        assert any(map(is_sharded, model.parameters())) is (shard == "full")
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


if __name__ == "__main__":
    cells.main(sys.argv[1])
