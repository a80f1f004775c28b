"""Pipelines over two processes: the exactness matrix, and the same results as in one process."""

import copy
import math
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from pathlib import Path

import pytest
import torch
from support.compare import plain_step
from support.engine import LOSS_SCALE, fp16_trainer
from support.launch import Cells
from support.matrix import FIRST, check_cell
from support.matrix import cells as matrix_cells
from support.nets import (
    CASES,
    CLASSES,
    TanhLinear,
    classification,
    floats,
    nested_net,
    pytree_net,
    skip_chain,
    stateful_net,
    tied_gpt,
    token_loss,
    tokens,
)
from support.slow import check_rows, trained
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel, World, shared
from hybridtrain._base.torch_private import get_default_store
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.checkpoint import restore_checkpoint as restore
from hybridtrain.checkpoint import save_checkpoint as save
from hybridtrain.data import EvalLoader
from hybridtrain.errors import BatchError, ConfigError, WorldError
from hybridtrain.loop import evaluate
from hybridtrain.loss import Accuracy, cross_entropy
from hybridtrain.pipeline import read_timelines, timeline
from hybridtrain.pipeline.message_wire import MessageWire
from hybridtrain.schedule import Account
from hybridtrain.step import StepInProgress
from hybridtrain.step.non_finite import find_origin

torch.set_num_threads(1)
cells = Cells()

# `matrix_cells.py` has every value of every axis.
QUICK = ("linear", "stateful")

for number, cell in enumerate({replace(cell, nb_part=2): None for cell in matrix_cells()}):

    @cells.add(str(cell), thorough=number >= FIRST or cell.case not in QUICK)
    def _(world, cell=cell):
        check_cell(cell, engine="distributed")


def both(make, **options):
    """The same model over the two processes, and in one stage in each of them."""
    torch.manual_seed(0)
    net = make()
    across = World.from_env(2, "cpu", timeout_s=30, engine="distributed")
    alone = {**options, "stages_per_device": 1, "split": "uniform"}
    alone = HybridModel(copy.deepcopy(net), World(), **alone)
    return HybridModel(net, across, **options), alone


for _name in ("dropout", "conv", "tied_gpt", "masked_lm"):

    @cells.add(
        f"verify compares each process's stages with the unsplit module: {_name}",
        thorough=_name != "conv",
    )
    def _(world, name=_name):
        case = CASES[name]
        torch.manual_seed(0)
        net = case.net()
        plain, other = copy.deepcopy(net), copy.deepcopy(net)
        across = World.from_env(2, "cpu", timeout_s=30, engine="distributed")
        model = HybridModel(net, across, chunks=4, recompute="except_last")
        batch = case.batch(10, 1)
        found = model.verify(*batch, case.loss, reference=plain)
        assert found.exact, found
        assert found.kinds["gradient"].tensors == 3 * len(list(other.named_parameters()))
        with torch.no_grad():  # of the first stage, which is in one of the processes
            next(other.parameters()).mul_(1.5)
        found = model.verify(*batch, case.loss, reference=other)
        assert "gradient" in found.differs
        assert " on rank " in str(found)
        assert len(set(world.gather(str(found)))) == 1


@cells.add("a process that has done its part of a step does not wait until the others have")
def _(world):
    model, _ = both(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), chunks=2)
    store = get_default_store()
    for step in range(3):
        key = f"rank 0 is done {step}"
        x, y = floats(2, 3, seed=step), torch.tensor([0, 1])

        def last_part(output, targets, key=key):
            if targets[0] == 1:  # all inputs have arrived
                store.wait([key], timedelta(seconds=20))
            return output

        model.map_outputs(x, y, last_part)
        if world.rank == 0:
            store.set(key, "")


def assert_equal_steps(ours, alone, batch, loss_fn, steps=3, rows=(7, 10, 3), **close):
    """Losses, gradients, norms, weights and buffers are equal after each step, bit for bit."""

    def same(mine, theirs):
        if close:
            torch.testing.assert_close(mine, theirs, **close)
        else:
            assert torch.equal(mine, theirs)

    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in (ours, alone)]
    for step in range(steps):
        inputs, targets = batch(rows[step % len(rows)], step)
        results = [model.train_step(inputs, targets, loss_fn) for model in (ours, alone)]
        if ours.owns_output:
            same(results[0].loss, results[1].loss)
        expected = dict(alone.named_parameters())
        for name, parameter in ours.named_parameters():
            assert (parameter.grad is None) == (expected[name].grad is None), name
            if parameter.grad is not None:
                same(parameter.grad, expected[name].grad)
        norms = [model.clip_grad_norm_(0.1) for model in (ours, alone)]
        same(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = ours.state_dict()
    assert list(state) == list(alone.state_dict())
    for name, value in alone.state_dict().items():
        same(state[name], value)


def add_equal(name, make, batch, loss_fn, close=None, thorough=False, **options):
    @cells.add(name, thorough=thorough)
    def _(world):
        assert_equal_steps(*both(make, chunks=3, **options), batch, loss_fn, **(close or {}))


def pytree_batch(rows, seed):
    x, y = classification(rows, seed)
    return {"a": x, "pair": (y[:, None], None), "scale": torch.tensor(2.0)}, y


add_equal(
    "dicts, None, numbers, masks and a tensor twice", nested_net, classification, F.cross_entropy
)


class Spread(nn.Linear):
    """Its output in several dtypes."""

    def forward(self, x):
        y = super().forward(x)
        small = (100 * y).to(torch.int8)
        return y, torch.complex(y, y.sin()), y > 0, y.bfloat16(), y.double(), small


class Gather(nn.Linear):
    """Uses all outputs of `Spread`."""

    def forward(self, values):
        y, numbers, mask, coarse, fine, small = values
        rest = (numbers * numbers.conj()).real + numbers.imag + coarse.float() * small
        return super().forward(torch.where(mask, y, rest) + fine.float())


add_equal(
    "complex and other dtypes between the processes",
    lambda: nn.Sequential(Spread(6, 8), Gather(8, CLASSES)),
    classification,
    F.cross_entropy,
)
add_equal("inputs that are a pytree", pytree_net, pytree_batch, F.cross_entropy)
for _v in (1, 2, 4):
    add_equal(
        f"a value that skips all stages, {_v} a process",
        lambda: nn.Sequential(*skip_chain(0, 7), nn.Linear(6, CLASSES)),
        classification,
        F.cross_entropy,
        thorough=_v != 2,
        stages_per_device=_v,
    )
for _recompute in ("never", "always"):
    add_equal(
        f"layers with state, recomputed {_recompute}",
        stateful_net,
        classification,
        F.cross_entropy,
        thorough=_recompute == "never",
        recompute=_recompute,
    )
add_equal(
    "a tied weight in both processes",
    lambda: tied_gpt(uses=3),
    tokens,
    token_loss,
    close={"rtol": 1e-5, "atol": 1e-6},
    stages_per_device=2,
)
add_equal(
    "a tied weight with a sparse gradient in one process and a dense one in the other",
    lambda: tied_gpt(sparse=True),
    tokens,
    token_loss,
    close={"rtol": 1e-5, "atol": 1e-6},
)
for _tied in (False, True):
    add_equal(
        f"a loss without logits, with a {'tied' if _tied else 'separate'} weight",
        lambda tied=_tied: tied_gpt(tied=tied),
        tokens,
        token_loss,
        close={"rtol": 1e-5, "atol": 1e-6} if _tied else None,
        thorough=not _tied,
        head="fused",
        schedule="zb-h1",
    )
add_equal("a frozen tied weight", lambda: tied_gpt(frozen=True), tokens, token_loss, thorough=True)


class Block(nn.Module):
    """Cut in its middle, its second part goes on with the draws of the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = TanhLinear(), TanhLinear()

    def forward(self, x):
        x = F.dropout(self.first(x), 0.3, self.training)
        x = x + torch.rand_like(x) * 0.1
        return F.dropout(self.second(x), 0.3, self.training)


class AsksForSizes(nn.Module):
    """Takes another way for one sample, for odd widths, and for several rows."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        first = h = self.layers[0](x)
        if isinstance(h, torch.Tensor) and x.shape[0] == 1:
            h = h * 3
        for layer in self.layers[1:]:
            h = layer(h).tanh()
        if x.shape[0] % 2:
            h = h + first
        return self.head(h + torch.ones(1, 6).expand(len(x), -1))


class Unit(Enum):
    METRES = 1.0
    FEET = 3.28


class TakesInputsLate(nn.Module):
    """Its last stage uses what only the first process has read."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x, one, other, unit):
        h = self.last(self.first(x).tanh())
        return h * unit.value + one - other / 2


def units(rows, seed):
    """Batches of one form, in which the unit changes, and one tensor is there once or twice."""
    x, y = classification(8, seed)
    one = torch.arange(CLASSES)
    other = one if seed % 3 == 0 else one.roll(1)
    unit = Unit.FEET if seed % 2 else Unit.METRES
    return {"x": x, "one": shared(one), "other": shared(other), "unit": unit}, y


@cells.add("inputs that the last process uses are those of the step")
def _late_inputs(world):
    ours, alone = both(TakesInputsLate, chunks=2, example_inputs=units(8, 0)[0])
    assert_equal_steps(ours, alone, units, F.cross_entropy, steps=7)


@cells.add("an input of the first stage stays in its process")
def _inputs_stay(world):
    sent = []
    send = MessageWire.send

    def noting(wire, to, message):
        sent.append([len(values) for values in message])
        send(wire, to, message)

    ours, _ = both(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, CLASSES)), chunks=2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MessageWire, "send", noting)
        for x in (floats(4, 6), floats(4, 6).requires_grad_()):
            ours.train_step(x, torch.tensor([0, 1, 2, 0]), F.cross_entropy)
    assert sent == [[1]] * 4


@cells.add("both processes choose the same variant for micro-batches of other sizes", thorough=True)
def _(world):
    across = World.from_env(2, "cpu", timeout_s=30, engine="distributed")
    options = {"chunks": 3, "stages_per_device": 2, "example_inputs": classification(6, 0)[0]}
    torch.manual_seed(0)
    whole = AsksForSizes()
    check_variants(HybridModel(copy.deepcopy(whole), across, **options), whole)
    torch.manual_seed(0)  # each process makes its own part alone
    check_variants(HybridModel.construct(AsksForSizes, across, **options), whole, (7, 3))


def check_variants(model, whole, sizes=(6, 7, 4, 3, 7)):
    for rows in sizes:
        inputs, targets = classification(rows, rows)
        model.zero_grad()
        whole.zero_grad()
        model.train_step(inputs, targets, F.cross_entropy)
        plain_step(whole, inputs, targets, F.cross_entropy, chunks=3)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, whole.get_parameter(name).grad), (rows, name)


add_equal(
    "a block with draws that is cut in its middle",
    lambda: nn.Sequential(Block(), nn.Linear(6, CLASSES)),
    classification,
    F.cross_entropy,
    split=["0.second"],
    example_inputs=classification(5, 0)[0],
)


@cells.add("evaluation, training and other batch sizes by turns", thorough=True)
def _turns(world):
    ours, alone = both(CASES["dropout"].net, chunks=4)

    batch = CASES["dropout"].batch
    for turn in range(2):
        assert_equal_steps(ours, alone, batch, F.cross_entropy, steps=2)
        for model in (ours, alone):
            model.eval()
        for rows in (9, 2):
            inputs, _ = batch(rows, 100 + turn)
            output, expected = ours(inputs), alone(inputs)
            assert (output is not None) == ours.owns_output
            if ours.owns_output:
                assert torch.equal(output, expected)
        for model in (ours, alone):
            model.train()


@cells.add("parameters that are frozen and freed between steps")
def _frozen(world):
    ours, alone = both(lambda: nn.Sequential(*[TanhLinear() for _ in range(4)], nn.Linear(6, 3)))
    for frozen in ((), (0, 1, 2, 3), (1, 3), ()):
        for model in (ours, alone):
            for index, layer in enumerate(model.net):
                layer.requires_grad_(index not in frozen)
        assert_equal_steps(ours, alone, classification, F.cross_entropy, steps=2)


@cells.add("a process whose stage has no parameters")
def _no_parameters(world):
    ours, alone = both(
        lambda: nn.Sequential(nn.Linear(6, CLASSES), nn.Tanh(), nn.Softplus()), split=[1, 2]
    )
    assert_equal_steps(ours, alone, classification, F.cross_entropy)


@cells.add("activations wait outside of the devices of two processes")
def _offload(world):
    inputs, targets = floats(256, 64, seed=0), floats(256, 64, seed=1)
    ours, alone = both(
        lambda: nn.Sequential(*(TanhLinear(64) for _ in range(4))),
        **{"chunks": 8, "schedule": "gpipe", "self_check": False, "offload": "all"},
    )
    for model in (ours, alone):
        model.train_step(inputs, targets, F.mse_loss)
    whole = dict(alone.named_parameters())
    assert all(torch.equal(p.grad, whole[name].grad) for name, p in ours.named_parameters())
    (stage,) = ours.stages
    # of 8 micro-batches: two tensors of two layers, and in the second stage what it has received
    assert stage.offload.most_on_device <= 3 * 3 * 32 * 64 * 4
    assert stage.offload.memory.host.most_nbytes >= 6 * 2 * 32 * 64 * 4


@cells.add("each process has the memory of its own stages only")
def _memory(world):
    ours, _ = both(lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]))
    elements = sum(p.numel() for p in ours.net.parameters() if not p.is_meta)
    assert elements == 2 * (64 * 64 + 64)
    assert [name for name, _ in ours.named_parameters()] == (
        ["0.weight", "0.bias", "1.weight", "1.bias"]
        if world.rank == 0
        else ["2.weight", "2.bias", "3.weight", "3.bias"]
    )


@cells.add("the timeline has the actions of both processes, a forward before the one it feeds")
def _timeline(world):
    ours, _ = both(lambda: nn.Sequential(*[TanhLinear() for _ in range(4)]), chunks=4)
    inputs, _ = classification(8)
    ours.train_step(inputs, None, lambda output, _: output.square().mean())
    result = ours.train_step(inputs, None, lambda output, _: output.square().mean(), timeline=True)
    lanes = result.timeline.spans()
    assert [len(lane) for lane in lanes] == [8, 8]
    ends = {span.action: span.end for lane in lanes for span in lane}
    starts = {span.action: span.start for lane in lanes for span in lane}
    for action, start in starts.items():
        if action.kind == "F" and action.stage == 1:
            assert start >= ends[action._replace(stage=0)]
        if action.kind == "B" and action.stage == 0:
            assert start >= ends[action._replace(stage=1)]


@cells.add("the account of a step has a device of each process, and its own slow stage")
def _account(world):
    trainer = trained((1e-4, 2e-3), 2, engine="distributed")
    check_rows(trainer, [(0, 0), (0, 1)])
    first, second = trainer.account["devices"]
    assert max(Account._fields, key=first.__getitem__) == "imbalance"
    assert max(Account._fields, key=second.__getitem__) == "backward"


@cells.add("lanes of processes with different clocks count from one start")
def _clocks(world):
    """As on two nodes: rank 1's clock is ahead, and it begins the step after rank 0 has."""
    ours, _ = both(lambda: nn.Sequential(*[TanhLinear() for _ in range(4)]), chunks=4)
    inputs, _ = classification(8)
    loss = lambda output, _: output.square().mean()  # noqa: E731
    ours.train_step(inputs, None, loss)
    store, key = get_default_store(), "clocks: rank 0 runs"
    handles = []
    if world.rank == 0:
        handles.append(ours.net[0].register_forward_pre_hook(lambda *_: store.set(key, "")))
    with pytest.MonkeyPatch.context() as patch:
        own_now = lambda ahead=1000.0 * world.rank: time.perf_counter() + ahead  # noqa: E731
        patch.setattr(timeline, "now", own_now)
        patch.setattr(timeline, "clock_name", lambda: f"clock {world.rank}")
        if world.rank == 1:
            store.wait([key])
            time.sleep(1)
        timelines = [ours.train_step(inputs, None, loss, timeline=True).timeline for _ in range(2)]
        asked = []
        for each in timelines:
            counted = lambda ask=each._peers.seconds_ahead: asked.append(1) or ask()  # noqa: E731
            each._peers = replace(each._peers, seconds_ahead=counted)
        read_timelines(timelines)
    for handle in handles:
        handle.remove()
    (first, *_), (second, *_) = timelines[0].spans()
    assert 0 <= first.start < 100
    assert first.start + 0.5 < second.start < 100
    assert len(asked) == 1  # for both batches of the step


@cells.add("an overflow in one stage skips the step in both processes", thorough=True)
def _overflow(world):
    for layer in (0, 3):
        across = World.from_env(2, "cpu", timeout_s=30, engine="distributed")
        ours = fp16_trainer(at=(3,), layer=layer, world=across)
        ours.fit()
        own = {name for name, _ in ours.model.named_parameters()}
        for step in range(1, 7):
            moved = ours.recorder.moved(step) & own
            assert moved == (set() if step == 3 else own), f"step {step}"
        assert world.gather(ours.scaler.get_scale()) == [LOSS_SCALE / 2] * 2


@cells.add("a replaced layer is one line in all processes of a pipeline")
def _replaced(world):
    ours, alone = both(lambda: nn.Sequential(*[TanhLinear() for _ in range(4)], nn.Linear(6, 3)))
    assert_equal_steps(ours, alone, classification, F.cross_entropy, steps=1)
    ours.net[3] = TanhLinear()
    with pytest.raises(ConfigError, match=r"^3 was replaced .*make a new HybridModel"):
        ours.train_step(*classification(10, 0), F.cross_entropy)


@cells.add("padded labels count once in all processes of a pipeline")
def _padded(world):
    def batch(rows, seed):
        inputs, targets = classification(rows, seed)
        return inputs, targets.masked_fill(torch.arange(rows) % 3 == 0, -100)

    make = lambda: nn.Sequential(TanhLinear(), nn.Linear(6, CLASSES))  # noqa: E731
    assert_equal_steps(*both(make, chunks=3), batch, cross_entropy)


@cells.add("different batches of one pipeline are refused, in the first step and later")
def _batches(world):
    refused = pytest.raises(BatchError, match=r"ranks 0, 1 .*different batches")
    for rows in (4, 4 + world.rank):
        ours, _ = both(lambda: nn.Sequential(TanhLinear(), nn.Linear(6, CLASSES)))
        with refused:
            ours.train_step(*classification(rows, seed=world.rank), F.cross_entropy)
    ours.train_step(*classification(4), F.cross_entropy)
    train, forward = lambda b: ours.train_step(*b, F.cross_entropy), lambda b: ours(b[0])
    for call in (train, forward):
        call(classification(4))
        with refused:
            call(classification(4, seed=world.rank))


@cells.add("a layer and a loss may change the batch in place, in every step")
def _in_place(world):
    def loss(output, target):
        return (output - target.mul_(2)).square().mean()

    def measure(output, target):
        return loss(output, target).item()

    ours, _ = both(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6), TanhLinear()))
    for step in range(3):
        train, measured, run = ((floats(8, 6, seed=step + i), floats(8, 6)) for i in range(3))
        ours.train_step(*train, loss)
        ours.map_outputs(*measured, measure)
        ours(run[0])


@cells.add("an evaluation that one process stops ends in both after the same batch")
def _stopped_evaluation(world):
    ours, _ = both(lambda: nn.Sequential(TanhLinear(), nn.Linear(6, CLASSES)))
    loader = EvalLoader(TensorDataset(*classification(20)), 4, ours.world)
    asked = []

    def stop():
        asked.append(True)
        return world.rank == 0 and len(asked) == 2

    result = evaluate(ours, loader, F.cross_entropy, {"accuracy": Accuracy()}, stop)
    assert result["samples"] == 8
    assert 0 <= result["accuracy"] <= 1


class WithState(TanhLinear):
    """Has a state that is not a tensor, or is one, and is no parameter or buffer."""

    def __init__(self, as_tensor):
        super().__init__()
        self.runs, self.as_tensor = 0, as_tensor

    def forward(self, x):
        self.runs += 1
        return super().forward(x)

    def get_extra_state(self):
        return torch.tensor([self.runs]) if self.as_tensor else {"runs": self.runs}

    def set_extra_state(self, state):
        self.runs = int(state[0]) if self.as_tensor else state["runs"]


@cells.add("other states of modules are those of the process that runs them")
def _extra_state(world):
    ours, _ = both(lambda: nn.Sequential(*[WithState(i % 2) for i in range(4)]), chunks=3)
    for _ in range(2):
        ours.train_step(classification(6)[0], None, lambda output, _: output.square().mean())
    state = ours.state_dict()
    found = [state[f"{i}._extra_state"] for i in range(4)]
    assert [int(x[0] if isinstance(x, torch.Tensor) else x["runs"]) for x in found] == [6] * 4


def rank_0s(world, value):
    return world.broadcast(value)


@cells.add("a checkpoint of a model with a frozen stage loads into any split")
def _frozen_stage(world):
    for frozen in (0, 1):
        ours, alone = both(lambda: nn.Sequential(TanhLinear(), nn.Linear(6, CLASSES)))
        for model in (ours, alone):
            model.net[frozen].requires_grad_(False)

        def optimizer_of(model):
            trained = [p for p in model.parameters() if p.requires_grad]
            return torch.optim.AdamW(trained or [nn.Parameter(torch.empty(0))], lr=0.1)

        optimizers = [optimizer_of(model) for model in (ours, alone)]
        ours.train_step(*classification(4), F.cross_entropy)
        optimizers[0].step()
        with tempfile.TemporaryDirectory() as name:
            store = CheckpointStore(Path(rank_0s(world, name)) / "checkpoints")
            path = save(store, 1, ours, optimizers[0], {})
            state = ours.state_dict()
            if world.rank == 0:
                restore(path, alone, optimizers[1])
                assert all(torch.equal(state[k], v) for k, v in alone.state_dict().items())
                assert len(optimizers[1].state) == 2
            for parameter in ours.parameters():
                parameter.data.zero_()
            restore(path, ours, optimizers[0])
            assert all(torch.equal(state[k], v) for k, v in ours.state_dict().items())
            world.gather(None)


@cells.add("a step that is not finite is named, also where a layer is tied to another process")
def _not_finite(world):
    ours, _ = both(lambda: tied_gpt())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name == "1.linear.weight":
                parameter[0, 0] = math.nan
    inputs, targets = tokens(4)
    trained = StepInProgress(1, [(inputs, targets)], token_loss, ours.rng.step)
    ours.train_step(inputs, targets, token_loss)
    where = find_origin(ours, trained, token_loss)
    assert "stage 0, layer '1.linear': its parameter 'weight' is not finite" in where
    assert where == rank_0s(world, where)


@cells.add("processes that have met can be divided into pipelines of another length")
def _divided(world):
    met = World.from_env(1, "cpu", timeout_s=30, engine="distributed")
    assert (met.data_parallel_size, met.data_parallel_rank, met.pipeline_group) == (
        2,
        world.rank,
        None,
    )
    across = met.divided(2, "cpu")
    assert (across.nb_part, across.data_parallel_size, across.pipeline_rank) == (2, 1, world.rank)
    model = HybridModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), across, chunks=2)
    assert model.owns_output is (world.rank == 1)
    model.train_step(torch.ones(4, 2), None, lambda output, _: output.mean())
    with pytest.raises(WorldError, match=r"2 processes .*nb_part=3"):
        met.divided(3, "cpu")


@cells.add("numbers of processes that do not fit are refused")
def _refused(world):
    with pytest.raises(WorldError, match=r"2 processes .*nb_part=3"):
        World.from_env(3, "cpu", engine="distributed")
    with pytest.raises(WorldError, match=r"inner=tp is unknown: .*pp.*dp"):
        World.from_env(2, "cpu", engine="distributed", inner="tp")


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
