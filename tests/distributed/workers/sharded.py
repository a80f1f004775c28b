"""Two replicas of one process each: `shard` changes where tensors are, and no number."""

import copy
import sys

import pytest
import torch
from support.compare import assert_same
from support.launch import Cells
from support.nets import CASES
from support.sharded import OPTIMIZERS, check_same

from hybridtrain import HybridModel, ShardedOptimizer, Trainer, World
from hybridtrain.errors import ConfigError

torch.set_num_threads(1)
cells = Cells()


def world_of(nb_part):
    return World.from_env(nb_part, devices="cpu", timeout_s=30)


def add_case(shard, name, nb_part=1, optimizer="adamw", **options):
    more = "".join(f", {key}={value}" for key, value in options.items())

    @cells.add(f"shard={shard} is exact: {name}, {nb_part} stages, {optimizer}{more}")
    def _(world):
        case = CASES[name]
        check_same(
            case.net(),
            world_of(nb_part),
            shard,
            batch=case.batch,
            loss=case.loss,
            optimizer=optimizer,
            **options,
        )


for _optimizer in OPTIMIZERS:
    add_case("optimizer", "linear", nb_part=2, optimizer=_optimizer)
add_case("optimizer", "conv", optimizer="momentum", clip=0.1)
add_case("optimizer", "tied_gpt", nb_part=2, checkpoint="always")
add_case("optimizer", "dropout", accumulate=2, stages_per_device=2)

FULL = [
    ("linear", 1, {"optimizer": "momentum"}),
    ("linear", 2, {"clip": 0.1}),
    ("conv", 2, {"optimizer": "momentum"}),
    ("tied_gpt", 2, {"stages_per_device": 2, "checkpoint": "always"}),
    ("transformer", 2, {"checkpoint": "except_last", "clip": 0.1}),
    ("dropout", 1, {"accumulate": 2, "checkpoint": {"every": 2}}),
    ("stateful", 1, {}),
    ("u_net", 2, {"chunks": 7}),
]
for _name, _nb_part, _options in FULL:
    add_case("full", _name, nb_part=_nb_part, **_options)


def tower():
    """Five parameters of different sizes."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8),
        torch.nn.Tanh(),
        torch.nn.Linear(8, 4),
        torch.nn.Linear(4, 3, bias=False),
    )


def step_of(model, optimizer, seed=0):
    inputs, targets = CASES["linear"].batch(6, 10 * seed + model.world.replica)
    model.train_step(inputs, targets, CASES["linear"].loss)
    optimizer.step()
    optimizer.zero_grad()


def with_groups(params):
    params = list(params)
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.5}]
    return torch.optim.AdamW(groups, lr=0.02)


@cells.add("each replica keeps the state of its parameters alone, about half of the bytes")
def _(world):
    model = HybridModel(tower(), world_of(1), shard="optimizer")
    optimizer = ShardedOptimizer(model, with_groups)
    step_of(model, optimizer)
    numbers = world.gather(sorted(optimizer.state_dict()["state"]))
    assert sorted(numbers[0] + numbers[1]) == list(range(5)), numbers
    moments = sum(e["exp_avg"].nbytes for e in optimizer.state.values())
    whole = sum(p.nbytes for p in model.parameters())
    assert 0.45 * whole < moments < 0.55 * whole
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]
    groups = optimizer.state_dict()["param_groups"]
    assert [group["params"] for group in groups] == [[0, 1], [2, 3, 4]]


@cells.add("groups, their hyperparameters and a schedule count as without shards")
def _(world):
    weights = []
    for shard in ("none", "optimizer"):
        model = HybridModel(tower(), world_of(1), shard=shard)
        if shard == "none":
            optimizer = with_groups(model.parameters())
        else:
            optimizer = ShardedOptimizer(model, with_groups)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(3):
            step_of(model, optimizer, step)
            schedule.step()
            optimizer.param_groups[1]["weight_decay"] = 0.1
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
    assert_same(weights[1], weights[0])


@cells.add("the state is loaded from that of all parameters, and from this replica's")
def _(world):
    model = HybridModel(tower(), world_of(1), shard="optimizer")
    optimizer = ShardedOptimizer(model, with_groups)
    step_of(model, optimizer)
    own = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    everything = {"param_groups": own["param_groups"], "state": {}}
    for state in world.gather(own["state"]):
        everything["state"] |= state
    step_of(model, optimizer, 1)
    expected = copy.deepcopy(model.state_dict())
    for state in (own, everything):
        model.load_state_dict(weights)
        again = ShardedOptimizer(model, with_groups)
        again.param_groups[0]["lr"] = 5.0  # the state's counts
        again.load_state_dict(state)
        assert again.state_dict()["state"].keys() == own["state"].keys()
        step_of(model, again, 1)
        assert_same(model.state_dict(), expected)
    with pytest.raises(ValueError, match="parameter group"):
        again.load_state_dict({"state": {}, "param_groups": own["param_groups"][:1]})


@cells.add("a group that is added later is trained, and leaves the state where it was")
def _(world):
    weights = []
    for shard in ("none", "optimizer"):
        model = HybridModel(tower(), world_of(1), shard=shard)
        first, rest = list(model.parameters())[:3], list(model.parameters())[3:]
        if shard == "none":
            optimizer = torch.optim.AdamW(first, lr=0.02)
        else:
            optimizer = ShardedOptimizer(model, lambda p: torch.optim.AdamW(p, lr=0.02), first)
        step_of(model, optimizer)
        optimizer.add_param_group({"params": rest, "lr": 0.1})
        step_of(model, optimizer, 1)
        step_of(model, optimizer, 2)
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
    assert_same(weights[1], weights[0])


@cells.add("an optimizer that does not fit shard= is refused in one line")
def _(world):
    sharded = HybridModel(tower(), world_of(1), shard="optimizer")
    plain = HybridModel(tower(), world_of(1))
    adam = torch.optim.Adam(sharded.parameters())
    with pytest.raises(ConfigError, match="ShardedOptimizer\\(model, lambda params: Adam"):
        Trainer(sharded, adam, CASES["linear"].loss, [], steps=1)
    with pytest.raises(ConfigError, match="is for shard=optimizer"):
        ShardedOptimizer(plain, torch.optim.Adam)
    with pytest.raises(ConfigError, match="no closure"):
        ShardedOptimizer(sharded, torch.optim.Adam).step(lambda: 0.0)


if __name__ == "__main__":
    cells.main(sys.argv[1])
