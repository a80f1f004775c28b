"""Two replicas of one process each: `shard` changes where tensors are, and no number."""

import copy
import sys

import pytest
import torch
from support.compare import assert_same
from support.engine import Overflow
from support.launch import Cells
from support.nets import CASES
from support.sharded import OPTIMIZERS, check_same, make_optimizer
from support.training import Recorder, data, rich_net
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel, ShardedOptimizer, Trainer, World
from hybridtrain.data import EvalLoader, TrainLoader
from hybridtrain.errors import ConfigError, UserError
from hybridtrain.loop import predict
from hybridtrain.loss import accuracy, cross_entropy
from hybridtrain.pipeline import check_replicas
from hybridtrain.step import CombinedOptimizer

torch.set_num_threads(1)
cells = Cells()


def world_of(nb_part):
    return World.from_env(nb_part, devices="cpu", timeout_s=30)


def add_case(shard, name, nb_part=1, optimizer="adamw", thorough=False, **options):
    more = "".join(f", {key}={value}" for key, value in options.items())

    @cells.add(
        f"shard={shard} is exact: {name}, {nb_part} stages, {optimizer}{more}", thorough=thorough
    )
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
    more = _optimizer in ("adamw", "relative", "adamw8bit")
    add_case("optimizer", "linear", nb_part=2, optimizer=_optimizer, thorough=more)
add_case("optimizer", "conv", optimizer="momentum", clip=0.1)
add_case("optimizer", "tied_gpt", nb_part=2, recompute="always", thorough=True)
add_case("optimizer", "dropout", accumulate=2, stages_per_device=2, thorough=True)


def freeze_and_free(step, model, optimizer):
    """Freezes two parameters in the second step, and frees them in the third."""
    for number in (0, 3):
        list(model.net.parameters())[number].requires_grad_(step != 1)


def zero_in_the_middle(step, model, optimizer):
    """Drops gradients that were not averaged."""
    inputs, targets = CASES["linear"].batch(5, 50 * step + model.world.data_parallel_rank)
    model.train_step(inputs, targets, CASES["linear"].loss, sync=False)
    optimizer.zero_grad(set_to_none=step != 1)


def keep_gradients(step, model, optimizer):
    """Has the step add to gradients that were averaged already."""
    inputs, targets = CASES["linear"].batch(5, 50 * step + model.world.data_parallel_rank)
    model.train_step(inputs, targets, CASES["linear"].loss)


for _before in (freeze_and_free, zero_in_the_middle, keep_gradients):

    @cells.add(f"shard=optimizer is exact: {_before.__doc__}")
    def _(world, before=_before):
        case = CASES["linear"]
        check_same(
            case.net(),
            world_of(2),
            "optimizer",
            batch=case.batch,
            loss=case.loss,
            before_step=before,
            optimizer="momentum",
        )


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
    inputs, targets = CASES["linear"].batch(6, 10 * seed + model.world.data_parallel_rank)
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


@cells.add(
    "each replica keeps the state of its parameters alone, also of several optimizers",
    thorough=True,
)
def _(world):
    model = HybridModel(tower(), world_of(1), shard="optimizer")

    def several(params):
        of_rate = [torch.optim.Adagrad(params[:2]), torch.optim.SGD(params[2:], 0.1, momentum=0.9)]
        return CombinedOptimizer(of_rate)  # Adagrad makes its state in the constructor

    optimizer = ShardedOptimizer(model, several)
    step_of(model, optimizer)
    numbers = world.gather(sorted(optimizer.state_dict()["state"]))
    assert sorted(numbers[0] + numbers[1]) == list(range(5)), numbers


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
    with pytest.raises(ConfigError, match=r"ShardedOptimizer\(model, lambda params: Adam"):
        Trainer(sharded, adam, CASES["linear"].loss, [], steps=1)
    with pytest.raises(ConfigError, match="ShardedOptimizer needs shard=optimizer"):
        ShardedOptimizer(plain, torch.optim.Adam)
    with pytest.raises(ConfigError, match="closure"):
        ShardedOptimizer(sharded, torch.optim.Adam).step(lambda: 0.0)


def momentum(model):
    return make_optimizer(model, "momentum")


class Trouble(torch.nn.Linear):
    """Raises in the last micro-batch of the second step."""

    calls = 0

    def forward(self, inputs):
        Trouble.calls += 1
        if Trouble.calls == 8:
            raise ArithmeticError("boom")
        return super().forward(inputs)


@cells.add("after a step that failed on all replicas the next one is exact", thorough=True)
def _(world):
    found = []
    for shard in ("none", "optimizer"):
        Trouble.calls = 0
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(6, 8), Trouble(8, 4), torch.nn.Linear(4, 3))
        model = HybridModel(net, world_of(1), shard=shard, chunks=4)
        optimizer = momentum(model)
        step_of(model, optimizer)
        with pytest.raises(ArithmeticError, match="boom"):
            step_of(model, optimizer, 1)
        optimizer.zero_grad()
        step_of(model, optimizer, 2)
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert_same(found[1], found[0])


class Branches(torch.nn.Module):
    """Uses one of two layers, and never a third; `which` is another one on each replica."""

    def __init__(self, which):
        super().__init__()
        self.which = which
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 3) for _ in range(3))

    def forward(self, inputs):
        return self.layers[self.which](inputs)


@cells.add("a parameter without a gradient is named")
def _(world):
    net = torch.nn.Sequential(torch.nn.Linear(6, 6), Branches(0))
    model = HybridModel(net, world_of(1), split=[2])
    inputs, targets = CASES["linear"].batch(6, world.rank)
    with pytest.raises(UserError, match=r"no gradient.*1\.layers\.1\.weight"):
        model.train_step(inputs, targets, CASES["linear"].loss)


def run_of(world, shard, net, steps=6, at=(), **options):
    """The history of a Trainer's run, with evaluation, and its weights."""
    model = HybridModel(
        copy.deepcopy(net),
        world_of(2),
        shard=shard,
        chunks=2,
        precision=options.pop("precision", "fp32"),
    )
    optimizer = make_optimizer(model, options.pop("optimizer", "adamw"))
    recorder = Recorder()
    ours = Trainer(
        model,
        optimizer,
        cross_entropy,
        TrainLoader(data(), 10, model.world, seed=1),
        lr_schedule=torch.optim.lr_scheduler.StepLR(optimizer, 2),
        evaluation=EvalLoader(data(11, seed=9), 4, model.world),
        metrics={"accuracy": accuracy()},
        callbacks=[recorder],
        log_every=1,
        eval_every=2,
        steps=steps,
        **options,
    )
    step = recorder.on_step

    def count(run, samples):
        step(run, samples)
        for part in model.modules():
            if isinstance(part, Overflow):
                part.step = run.step + 1
                part.at = at

    recorder.on_step = count
    summary = ours.fit()
    names = ("train_loss", "skipped_steps", "overflow_steps", "eval")
    values = {**recorder.reproducible(), **{name: summary[name] for name in names}}
    values["parameters"] = [stage["parameters"] for stage in summary["stages"]]
    values = {name: str(value) for name, value in values.items()}  # NaN is no number
    return values, {name: value.clone() for name, value in model.state_dict().items()}


@cells.add("a run of a Trainer is the same: accumulation, clipping, evaluation")
def _(world):
    expected, weights = run_of(world, "none", rich_net(), accumulate=2, clip_norm=0.5)
    found, ours = run_of(world, "optimizer", rich_net(), accumulate=2, clip_norm=0.5)
    assert_same(found, expected)
    assert_same(ours, weights)


@cells.add("a schedule-free optimizer is switched on all replicas together", thorough=True)
def _(world):
    expected, weights = run_of(world, "none", rich_net(), optimizer="schedule-free")
    found, ours = run_of(world, "optimizer", rich_net(), optimizer="schedule-free")
    assert_same(found, expected)
    assert_same(ours, weights)


@cells.add("a step that overflows on one replica is skipped in all, and the scale follows")
def _(world):
    torch.manual_seed(0)
    net = torch.nn.Sequential(Overflow(), torch.nn.Tanh(), Overflow(), torch.nn.Linear(6, 3))
    at = (3,) if world.rank else ()
    runs = []
    for shard in ("none", "optimizer"):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        runs.append(run_of(world, shard, net, at=at, precision="fp16", scaler=scaler))
        assert runs[-1][0]["overflow_steps"] == "1"
        assert world.gather(scaler.get_scale()) == [512.0] * 2
        assert_same(runs[-1][0], runs[0][0], shard)
        assert_same(runs[-1][1], runs[0][1], shard)


@cells.add(
    "a step with NaN on one replica is skipped in all, and its place is named", thorough=True
)
def _(world):
    torch.manual_seed(0)
    net = torch.nn.Sequential(Overflow(), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    at = (3,) if world.rank else ()
    expected = run_of(world, "none", net, at=at, clip_norm=1.0)
    assert expected[0]["skipped_steps"] == "1"
    found = run_of(world, "optimizer", net, at=at, clip_norm=1.0)
    assert_same(found[0], expected[0])
    assert_same(found[1], expected[1])


def _net():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(6, 6) for _ in range(4)])


def _train(model, world, **options):
    generator = torch.Generator().manual_seed(world.rank)
    inputs, targets = torch.randn(2, 4, 6, generator=generator).unbind()
    model.train_step(inputs, targets, torch.nn.functional.mse_loss, **options)


@cells.add("predictions of replicas with different numbers of batches are complete")
def _(world):
    model = HybridModel(_net(), world)
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    found = predict(model, EvalLoader(TensorDataset(inputs, inputs), 2, world))
    torch.testing.assert_close(found, _net()(inputs).detach())


@cells.add("a parameter that is frozen between backward and step stays equal on all replicas")
def _(world):
    model = HybridModel(_net(), world, shard="optimizer")
    optimizer = ShardedOptimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    _train(model, world)
    model.net[0].requires_grad_(False)
    optimizer.step()
    check_replicas(model.net, world)


@cells.add("parameters that are frozen at first are spread over the replicas too", thorough=True)
def _(world):
    net = _net()
    net[:3].requires_grad_(False)
    model = HybridModel(net, world, shard="optimizer")
    optimizer = ShardedOptimizer(model, torch.optim.AdamW)
    net.requires_grad_(True)
    _train(model, world)
    optimizer.step()
    own = sum(entry["exp_avg"].numel() for entry in optimizer.state.values())
    assert 0.3 < own / sum(parameter.numel() for parameter in net.parameters()) < 0.7


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
