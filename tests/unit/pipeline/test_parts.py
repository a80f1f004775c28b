"""`engine="distributed"`: each process runs the forward, but only the layers of its own stages.

All processes are threads of this one here, see `support.parts`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy.random
import pytest
import torch
import torch.nn.functional as F
from support.forward_nets import CHUNKS, Net, batch, pipeline, plain_step
from support.nets import GPUGenerator
from support.parts import Parts
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from hybridtrain._base.skip import pop, stash
from hybridtrain.errors import SplitError

pytestmark = pytest.mark.usefixtures("seeded")


def assert_same_gradients(
    found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        mine = found[name]
        assert (mine is None) == (gradient is None), name
        assert mine is None or gradient is None or torch.equal(mine, gradient), name


def gradients_of(net: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def assert_plain(
    net: nn.Module, stages: int = 3, inputs: Any = None, loss: Any = F.mse_loss, **options: Any
) -> Parts:
    """Two steps over processes have the gradients of plain PyTorch, bit for bit."""
    x, y = batch()
    inputs = x if inputs is None else inputs
    plain = copy.deepcopy(net)
    parts = Parts(net, stages, inputs, checks=True, chunks=CHUNKS, **options)
    for _ in range(2):
        parts.step(inputs, y, loss)
        columns = [*(inputs if isinstance(inputs, tuple) else (inputs,)), y]
        for *part, target in zip(*(value.tensor_split(CHUNKS) for value in columns), strict=True):
            (loss(plain(*part), target) * (len(target) / len(y))).backward()
    assert_same_gradients(parts.gradients(), gradients_of(plain))
    return parts


# Values that a stage would lack


class Leaves(nn.Linear):
    """Leaves a value in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.left = x.mean()
        return super().forward(x)


class UsesTheAttribute(Net):
    def prepare(self) -> None:
        self.a = Leaves(8, 8)

    def middle(self, x: Tensor) -> Tensor:
        return self.c(self.b(x) * self.a.left)


class Appends(nn.Linear):
    """Appends a value to a list."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.values: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.values.append(x.mean())
        return super().forward(x)


class UsesTheList(Net):
    def prepare(self) -> None:
        self.a = Appends()

    def middle(self, x: Tensor) -> Tensor:
        return self.c(self.b(x) * self.a.values.pop())


class ReturnsAnObject(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(value=super().forward(x))


class UsesTheObject(Net):
    def prepare(self) -> None:
        self.b = ReturnsAnObject(8, 8)

    def middle(self, x: Tensor) -> Tensor:
        return self.c(self.b(x).value.tanh())


@pytest.mark.parametrize("kind", [UsesTheAttribute, UsesTheList, UsesTheObject])
def test_a_value_that_a_layer_leaves_otherwise_than_by_its_output_is_refused(
    kind: type[Net],
) -> None:
    parts = Parts(kind(), 2, batch()[0])
    expected = "a value leaves a layer other than in its output.*in a tuple, a dict or a dataclass"
    with pytest.raises(SplitError, match=expected):
        parts.step(*batch())


class TakesTurns(Net):
    """Its forward depends on how often it has run."""

    def prepare(self) -> None:
        self.runs = 0

    def middle(self, x: Tensor) -> Tensor:
        self.runs += 1
        x = self.b(x)
        return self.c(x * 2 if self.runs % 2 else x)


class ComputesWhatItDoesNotUse(TakesTurns):
    def middle(self, x: Tensor) -> Tensor:
        self.runs += 1
        x = self.b(x)
        if self.runs % 2:
            x * 2
        return self.c(x)


@pytest.mark.parametrize("kind", [TakesTurns, ComputesWhatItDoesNotUse])
def test_a_forward_that_takes_another_path_than_in_its_rehearsal_is_refused(
    kind: type[Net],
) -> None:
    parts = Parts(kind(), 2, batch()[0], split=["c"])
    with pytest.raises(SplitError, match="takes a different path than in its rehearsal"):
        parts.step(*batch())


class DrawsByPython(Net):
    """Draws a factor, by Python or NumPy."""

    draw: ClassVar[Callable[[], float]]

    def middle(self, x: Tensor) -> Tensor:
        return self.c(self.b(x) * type(self).draw())


class DrawsInALayer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (random.random() > -1)


@pytest.mark.parametrize(
    ("module", "name"),
    [(random, "random"), (numpy.random, "sample")],  # a method of the generator, and a function
    ids=["random", "numpy"],
)
def test_a_number_that_each_process_would_draw_by_itself_between_layers_is_refused(
    module: Any, name: str
) -> None:
    DrawsByPython.draw = lambda: getattr(module, name)()
    before = getattr(module, name)
    parts = Parts(DrawsByPython(), 2, batch()[0], split=["c"])
    with pytest.raises(SplitError, match=rf"{module.__name__}.{name} between layers.*torch.rand"):
        parts.step(*batch())
    assert getattr(module, name) == before  # as it was for all other code
    DrawsByPython.draw = lambda: float(torch.ones(()))
    net = DrawsByPython()
    net.b = DrawsInALayer(8, 8)  # its own process alone runs it
    Parts(net, 2, batch()[0], split=["c"]).step(*batch())


class Noted(nn.Module):
    """Notes the type of what it gets."""

    seen: ClassVar[list[type]] = []

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        Noted.seen.append(type(x))
        return self.linear(self.norm(x))


def test_of_equal_layers_with_equal_inputs_one_is_rehearsed() -> None:
    net = nn.Sequential(*(Noted() for _ in range(6)))
    parts = Parts(net, 2, batch()[0], chunks=1, split="uniform")
    Noted.seen.clear()
    parts.step(*batch())
    assert Noted.seen.count(FakeTensor) == 2  # the first input needs no gradient
    assert Noted.seen.count(Tensor) == 6


class Fails(nn.Linear):
    """Fails from some time on."""

    now: ClassVar[bool] = False

    def forward(self, x: Tensor) -> Tensor:
        if Fails.now:
            raise ArithmeticError("boom")
        return super().forward(x)


def test_an_error_in_a_rehearsal_names_the_layer_the_stage_and_the_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = Net()
    net.c = Fails(8, 8)
    parts = Parts(net, 2, batch()[0], split=["c"])
    monkeypatch.setattr(Fails, "now", True)
    with pytest.raises(ArithmeticError, match="boom") as raised:
        parts.step(*batch())
    layer, where = raised.value.__notes__
    assert layer.startswith("in layer 'c', with the input float32[")
    assert where == "in the forward of micro-batch 0 on stage 1, on tensors without values"


class Configured(Net):
    """Its code asks a config and a list, which a caller may change between steps."""

    def prepare(self) -> None:
        self.config, self.factors = SimpleNamespace(adds=False), [1.0]

    def middle(self, x: Tensor) -> Tensor:
        x = self.b(x) * self.factors[-1]
        return self.c(x + x.mean() if self.config.adds else x)


@pytest.mark.parametrize(
    "change", [lambda net: setattr(net.config, "adds", True), lambda net: net.factors.append(2.0)]
)
def test_a_forward_is_rehearsed_as_the_model_is_then(change: Callable[[Any], Any]) -> None:
    x, y = batch()
    net = Configured()
    plain = copy.deepcopy(net)
    parts = Parts(net, 2, x, chunks=CHUNKS, split=["c"])
    for rows in (len(x), CHUNKS):  # another kind of micro-batch, of one sample
        parts.step(x[:rows], y[:rows])
        for *part, target in zip(*(v[:rows].tensor_split(CHUNKS) for v in (x, y)), strict=True):
            (F.mse_loss(plain(*part), target) * (len(target) / rows)).backward()
        for model in (*parts.nets, plain):
            change(model)
    assert_same_gradients(parts.gradients(), gradients_of(plain))


class ChangesUnderAnotherName(Net):
    def middle(self, x: Tensor) -> Tensor:
        first = x[:, :4]
        y = self.c(self.b(x))
        x.mul_(2)
        return y + torch.cat([first, first], 1)


def test_a_change_of_a_value_that_another_stage_has_under_another_name_is_refused() -> None:
    net = ChangesUnderAnotherName()
    parts = Parts(net, 2, batch()[0], split=["c"])
    with pytest.raises(SplitError, match=r"changed in place, and stage 1 uses it under another"):
        parts.step(*batch())
    whole = copy.deepcopy(net)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain_step(whole, *batch())  # plain PyTorch refuses it as well


class ChangesItsOwn(Net):
    """The same change of a value that both stages know by one name."""

    def middle(self, x: Tensor) -> Tensor:
        x = x * 1
        x.mul_(2)
        return self.c(self.b(x)) + x


@pytest.mark.parametrize("split", [["b"], ["c"], ["d"]], ids=str)
def test_a_change_before_the_border_crosses_with_the_value(split: list[str]) -> None:
    assert_plain(ChangesItsOwn(), 2, split=split)


# What a layer returns, and what may change between steps


class WithFactor(nn.Linear):
    factor: Any = 0.5

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).tanh(), self.factor


class UsesFactor(Net):
    def prepare(self) -> None:
        self.b = WithFactor(8, 8)

    def middle(self, x: Tensor) -> Tensor:
        y, factor = self.b(x)
        y = self.c(y)
        return y if factor is None else y * factor


@pytest.mark.parametrize("later", [0.7, None], ids=str)
def test_a_layer_that_returns_something_else_in_a_later_step_is_refused(later: Any) -> None:
    net = UsesFactor()
    parts = Parts(net, 2, batch()[0], checks=True, split=["c"])
    parts.step(*batch())
    for part in parts.nets:
        part.b.factor = later
    with pytest.raises(SplitError, match=r"layer 'b' returns something else .* use engine=local"):
        parts.step(*batch())


class ChangesIds(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids.add_(1))


class UsesIdsLater(Net):
    def prepare(self) -> None:
        self.b, self.c = ChangesIds(12, 8), nn.Embedding(12, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.d(self.a(x).tanh() + self.b(ids) + self.c(ids))


def test_an_integer_input_that_a_layer_changes_in_place_is_refused() -> None:
    x, _ = batch()
    ids = torch.arange(len(x))
    with pytest.raises(SplitError, match=r"changes an integer input .* change a copy \(\.clone"):
        Parts(UsesIdsLater(), 2, (x, ids), checks=True, split=["c"])
    assert torch.equal(ids, torch.arange(len(x)))


class AveragesLater(Net):
    average: Tensor

    def prepare(self) -> None:
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)  # type: ignore[operator, union-attr]
        return super().forward(x)

    def middle(self, x: Tensor) -> Tensor:
        x = super().middle(x)
        self.average.mul_(0.9).add_(x.detach().mean(0))
        return x


class CountsSteps(AveragesLater):
    def middle(self, x: Tensor) -> Tensor:
        return Net.middle(self, x)


def test_a_buffer_of_no_layer_that_a_later_stage_changes_is_refused() -> None:
    with pytest.raises(SplitError, match=r"buffer 'average' after the first stage.*move it into"):
        Parts(AveragesLater(), 2, batch()[0], checks=True, split=["c"])
    parts = assert_plain(CountsSteps(), 2, split=["c"])
    assert parts.nets[0].steps == 2 * CHUNKS


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        y, _ = self.attention(z, z, z, need_weights=False)
        return x + y


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(Attends(), layer, copy.deepcopy(layer), Attends(), nn.Linear(8, 8))


@pytest.mark.parametrize("over_processes", [False, True])
def test_an_evaluation_of_attention_is_that_of_every_split(over_processes: bool) -> None:
    """Attention of PyTorch takes a faster path in evaluation, which a cut would change."""
    net, x = transformer().eval(), torch.randn(6, 4, 8)
    with torch.no_grad():
        if over_processes:
            Parts(net, 2, x, checks=True, split=[2, 3])  # compares an evaluation, too
            return
        outputs = [
            pipeline(copy.deepcopy(net), n, example_inputs=x, chunks=2, split=split)(x)
            for n, split in ((1, [5]), (2, [2, 3]), (3, [1, 2, 2]))
        ]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    torch.testing.assert_close(outputs[0], net(x), rtol=1e-5, atol=1e-6)


class Sparse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu().to_sparse()


class Dense(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to_dense()


def test_a_value_that_cannot_be_sent_is_refused_before_the_first_step() -> None:
    net = nn.Sequential(nn.Linear(8, 8), Sparse(), Dense(), nn.Linear(8, 8))
    with pytest.raises(SplitError, match=r"cannot send a tensor of torch\.sparse_coo .* cut else"):
        Parts(net, 2, batch()[0], checks=True, split=[2, 2])
    assert_plain(net, 2, split=[3, 1])  # "cut elsewhere"


# Layers that need values


class Routes(nn.Linear):
    """Sends each sample to one of two weights, as a router of experts does."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        chosen = y[:, 0] > 0
        if chosen.sum().item() < 0:
            raise AssertionError
        out = torch.zeros_like(y)
        for rows in (chosen.nonzero()[:, 0], (~chosen).nonzero()[:, 0]):
            out = out.index_add(0, rows, y[rows].tanh())
        return out


@pytest.mark.parametrize("place", ["a", "b", "d"])
def test_a_layer_that_needs_values_is_rehearsed_on_zeros(place: str) -> None:
    net = Net()
    setattr(net, place, Routes(8, 8))
    assert_plain(net)


# Draws


class DrawsBetweenLayers(Net):
    def middle(self, x: Tensor) -> Tensor:
        x = F.dropout(self.b(F.dropout(x, 0.3)), 0.3)
        x = self.c(x) * torch.rand(8) + torch.randn(len(x), 1)
        return F.dropout(x, 0.3)


class DrawsInLayers(Net):
    def prepare(self) -> None:
        self.b, self.c = nn.Sequential(self.b, nn.Dropout(0.3)), nn.Sequential(nn.Dropout(), self.c)

    def middle(self, x: Tensor) -> Tensor:
        return torch.rand(8) * self.c(F.dropout(self.b(x), 0.2))


@pytest.mark.parametrize("options", [{}, {"schedule": "zb-h1"}, {"recompute": "always"}], ids=str)
@pytest.mark.parametrize("kind", [DrawsBetweenLayers, DrawsInLayers])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.quick_cases(6)
def test_draws_are_those_of_one_stage(
    kind: type[Net], stages: int, options: dict[str, Any]
) -> None:
    net = kind()
    parts = Parts(net, stages, batch()[0], checks=True, **options)
    one = pipeline(net, 1)
    for _ in range(2):
        parts.step(*batch())
        one.train_step(*batch(), F.mse_loss)
    assert_same_gradients(parts.gradients(), gradients_of(net))


class DrawingBlock(nn.Module):
    """A unit that a split opens: its parts count their draws together."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q, self.r = (Dropping(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.p(F.dropout(x, 0.3)), 0.3)
        return F.dropout(self.r(F.dropout(self.q(x), 0.3)), 0.3)


class Dropping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3)


class WithBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = DrawingBlock()
        self.rest = nn.ModuleList(nn.Linear(8, 8) for _ in range(30))  # so that the block is small

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.block(x), 0.1)
        for layer in self.rest:
            x = layer(x)
        return x


@pytest.mark.parametrize("split", [["block.q"], ["block.r"], ["block.q", "block.r"]], ids=str)
def test_draws_inside_a_unit_that_is_cut_are_those_of_one_stage(split: list[str]) -> None:
    net = WithBlock()
    parts = Parts(net, len(split) + 1, batch()[0], split=split)
    one = pipeline(net, 1)
    for _ in range(2):
        parts.step(*batch())
        one.train_step(*batch(), F.mse_loss)
    assert_same_gradients(parts.gradients(), gradients_of(net))


# Inputs


class Embeds(Net):
    """Code between its layers uses both inputs, and notes what they are."""

    def prepare(self) -> None:
        self.embed = nn.Embedding(5, 8)
        self.notes: list[tuple[int, str, str]] = []

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.b(self.a(x)) + self.embed(ids)
        self.notes.append((self.part, type(x).__name__, type(ids).__name__))
        if ids.max() > 3:
            y = y * 2
        return self.d(self.c(y) * (ids > 1)[:, None] + x)

    part = -1


def test_integer_inputs_reach_all_processes_and_floating_point_ones_the_first_alone() -> None:
    x, y = batch()
    ids = torch.arange(len(x)) % 5
    parts = assert_plain(Embeds(), 2, (x, ids), split=["c"])
    for number, net in enumerate(parts.nets):
        net.part = number  # type: ignore[assignment]
        net.notes.clear()  # type: ignore[operator, union-attr]
    parts.step((x, ids), y)
    assert {note for net in parts.nets for note in net.notes} == {  # type: ignore[union-attr]
        (0, "Tensor", "Tensor"),
        (1, "FakeTensor", "Tensor"),
    }


# Values of other kinds


@dataclass
class Answer:
    value: Tensor
    hidden: tuple[Tensor, ...]


class Pair(NamedTuple):
    value: Tensor
    extra: Tensor


class Returns(Net):
    def __init__(self, made: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return self.made(self.d(self.c(self.b(y))), y, x)


OUTPUTS: dict[str, tuple[Callable[..., Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda z, y, x: (z, y), lambda out: out[0] + out[1]),
    "dict": (lambda z, y, x: {"z": z, "list": [y, x]}, lambda out: out["z"] + out["list"][0]),
    "namedtuple": (lambda z, y, x: Pair(z, y), lambda out: out.value * out.extra),
    "dataclass": (lambda z, y, x: Answer(z, (y, x)), lambda out: out.value + out.hidden[0]),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_may_have_values_of_every_stage(kind: str) -> None:
    made, used = OUTPUTS[kind]
    assert_plain(Returns(made), loss=lambda output, target: F.mse_loss(used(output), target))


@dataclass
class Package:
    value: Tensor
    hidden: tuple[Tensor, ...]


@dataclass
class Further:
    value: Tensor
    hidden: tuple[Tensor, ...]


class Packs(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return Package(super().forward(x), (x, x * 2))


class Unpacks(nn.Linear):
    def forward(self, answer: Any) -> Tensor:
        return super().forward(answer.value) * answer.hidden[1] + answer.hidden[0]


class Wraps(Net):
    """Code between layers makes an object for a layer, too."""

    def prepare(self) -> None:
        self.b, self.c, self.d = Packs(8, 8), Unpacks(8, 8), Unpacks(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.b(self.a(x))
        y = self.c(packed)
        return self.d(Further(y, (packed.hidden[0], y)))


@pytest.mark.parametrize("split", [["b"], ["c"], ["d"]], ids=str)
def test_a_dataclass_may_cross_a_border(split: list[str]) -> None:
    assert_plain(Wraps(), 2, split=split)


class Stashes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        stash("kept", x)
        return super().forward(x)


class Pops(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + pop("kept")


def test_a_stashed_value_that_no_layer_declares_does_not_cross_and_says_how_to() -> None:
    net = Net()
    net.a, net.d = Stashes(8, 8), Pops(8, 8)
    parts = Parts(net, 2, batch()[0])
    with pytest.raises(KeyError, match=r"`stashes`.*`pops`"):
        parts.step(*batch())


# Random numbers of devices


def test_each_process_leaves_the_generator_of_its_device_as_it_was() -> None:
    parts = Parts(Net(), 3, batch()[0])
    generators = [GPUGenerator() for _ in parts.rngs]
    for rng, generator in zip(parts.rngs, generators, strict=True):
        generator.set_offset(8)
        rng.own_generator = cycle([generator]).__next__  # type: ignore[assignment]
    parts.step(*batch())
    assert [(g.initial_seed(), g.get_offset()) for g in generators] == [(0, 8)] * 3


# Kinds of micro-batches


class AsksForSizes(Net):
    def middle(self, x: Tensor) -> Tensor:
        x = self.b(x)
        for number in range(len(x)):
            x = x + number
        return self.c(x * 3) if x.shape[0] == 1 else self.c(x).tanh() - x.mean(0)


def test_micro_batches_of_other_sizes_take_their_own_way_through_the_forward() -> None:
    net, plain = AsksForSizes(), AsksForSizes()
    plain.load_state_dict(net.state_dict())
    parts = Parts(net, 3, batch()[0])
    for rows in (7, 6, 3, 5, 7):  # micro-batches of 3, 2 and 1 samples
        x, y = (value[:rows] for value in batch())
        parts.step(x, y)
        plain_step(plain, x, y)
    assert_same_gradients(parts.gradients(), gradients_of(plain))


class Mixes(nn.Module):
    """Notes the sizes of the tensors without values that it gets."""

    rehearsed: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))  # no modules, which would be the layers

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if isinstance(x, FakeTensor) and type(x.shape[1]) is int:
            Mixes.rehearsed.append(x.shape[1])
        return F.dropout(self.mixed(x, mask).tanh(), 0.3)

    def mixed(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = (x @ x.mT).masked_fill(~mask[:, None], -1e9).softmax(-1)
        return F.linear(scores @ x, self.weight)


class Pads(Mixes):
    """Takes another path for long texts."""

    def mixed(self, x: Tensor, mask: Tensor) -> Tensor:
        if x.shape[1] > 6:
            x = F.pad(x, (0, 0, 0, 2))[:, :-2].mT.contiguous().mT
        return super().mixed(x, mask)


class AsksForValues(Mixes):
    def mixed(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().mixed(x, mask) * float(x.abs().max())


class Texts(nn.Module):
    def __init__(self, layer: type[Mixes]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), layer(), layer()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.a(x)
        mask = mask & (mask.sum(1) > 1)[:, None]
        return self.c(self.b(x, mask) + x.mean(1, keepdim=True), mask)


@pytest.mark.parametrize(
    ("layer", "rehearsed"),
    [(Mixes, [3, 4, 5]), (Pads, [3, 4, 5, 8, 9, 7]), (AsksForValues, [3, 4, 5, 8, 9, 6, 7, 2])],
)
def test_texts_of_ever_new_lengths_have_the_gradients_of_one_stage(
    layer: type[Mixes], rehearsed: list[int]
) -> None:
    net = Texts(layer)
    parts: Parts | None = None
    for length in (3, 4, 5, 8, 9, 6, 7, 2):
        x, y = torch.randn(4, length, 8), torch.randn(4, length, 8)
        mask = torch.arange(length) < torch.tensor([[length], [length - 1], [2], [2]])
        if parts is None:
            parts = Parts(net, 2, (x, mask), chunks=1, split=["c"])
            one = pipeline(net, 1, chunks=1, example_inputs=(x, mask))
            Mixes.rehearsed.clear()
        parts.step((x, mask), y)
        one.train_step((x, mask), y, F.mse_loss)
    assert_same_gradients(parts.gradients(), gradients_of(net))
    assert list(dict.fromkeys(Mixes.rehearsed)) == rehearsed


class HidesAQuestion(Mixes):
    """Asks about a length so that a run with symbols does not notice."""

    def mixed(self, x: Tensor, mask: Tensor) -> Tensor:
        y = super().mixed(x, mask)
        return y[:, :1] if type(x.shape[1]) is int and x.shape[1] > 5 else y


def test_a_layer_that_differs_from_its_formulas_is_refused() -> None:
    batches = [(torch.randn(4, n, 8), torch.ones(4, n) > 0) for n in (3, 4, 5, 6)]
    parts = Parts(Texts(HidesAQuestion), 2, batches[0], chunks=1, split=["c"])
    for inputs in batches[:3]:
        parts.step(inputs, inputs[0])
    with pytest.raises(SplitError, match="returns something else than in its rehearsal"):
        parts.step(batches[3], batches[3][0])
