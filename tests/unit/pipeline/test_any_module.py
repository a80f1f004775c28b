"""Any module can be cut where it calls its submodules, and then computes what it did whole."""

import copy
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from support.in_stages import (
    CHUNKS,
    SAMPLES,
    WIDTH,
    Body,
    Shapes,
    TwoInputs,
    Wrapped,
    assert_same,
    hybrid,
    linear,
    loss_of,
    names,
    samples,
    sequences,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from hybridtrain import HybridModel, World
from hybridtrain.errors import SplitError
from hybridtrain.graph import works_in_place
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import Planner, StageOwners, observed_chain
from hybridtrain.pipeline import own_values

pytestmark = pytest.mark.usefixtures("seeded")


class Residual(nn.Module):
    """Values that skip submodules, one of them in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.last = (linear() for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.act(self.first(x))
        z = self.norm(self.second(y))
        z += y
        w = self.third(self.act(z))
        return self.last(w + x) * y.mean() + z


class Outputs(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.second = linear(), linear()

    def forward(self, x):
        y = self.first(x)
        z = self.second(y.tanh())
        return {
            "tuple": lambda: (z, y),
            "dict": lambda: {"value": z, "list": [y, x]},
            "dataclass": lambda: Answer(value=z, hidden=(y, x)),
            "namedtuple": lambda: Pair(z, y),
            "scalar": lambda: (z, z.mean()),
        }[self.kind]()


class Auxiliary(nn.Module):
    """As GoogLeNet: a second output, of other layers, in training only."""

    def __init__(self):
        super().__init__()
        self.first, self.side, self.second = linear(), linear(), linear()

    def forward(self, x):
        x = self.first(x)
        side = self.side(x) if self.training else None
        x = self.second(x)
        return Pair(x, side) if self.training else x


class OwnTensors(nn.Module):
    """Parameters and buffers of the model itself, used in several places."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH))
        self.plain = torch.randn(WIDTH)
        self.first, self.second, self.third = linear(), linear(), linear()

    def forward(self, x):
        y = self.first(x) * self.scale + self.shift
        z = self.second(y) + torch.ones(x.shape[0], 1) * self.scale
        return self.third(z * self.plain) * self.scale - self.shift


class Without(nn.Module):
    """A model that calls no submodule."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return x @ self.weight


@dataclass
class Answer:
    value: Tensor
    hidden: tuple[Tensor, ...]


class Pair(NamedTuple):
    value: Tensor
    extra: Tensor


@pytest.mark.parametrize("recompute", ["never", "always", {"every": 2}], ids=str)
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.quick_cases(1)
def test_values_that_skip_stages_arrive_and_so_do_their_gradients(stages, recompute):
    assert_same(Residual(), samples(), stages, recompute=recompute)


@pytest.mark.parametrize("cut", range(1, 7))
@pytest.mark.quick_cases(1)
def test_every_cut_trains_as_the_whole_does(cut):
    assert_same(Residual(), samples(), 2, split=[cut, 7 - cut])


@pytest.mark.parametrize(
    "inputs",
    [
        (samples(0), samples(1)),
        {"left": samples(0), "right": samples(1)},
        {"right": samples(1), "left": samples(0), "mask": samples(2), "scale": 0.5},
    ],
    ids=["positions", "keywords", "more keywords"],
)
@pytest.mark.quick_cases(1)
def test_several_inputs_are_given_by_position_or_by_keyword(inputs):
    assert_same(TwoInputs(), inputs, 2, example_inputs=inputs)


def test_keywords_may_come_in_any_order():
    given = {"left": samples(0), "right": samples(1)}
    model = hybrid(TwoInputs(), 2, example_inputs=given)
    assert torch.equal(model(given), model(dict(reversed(given.items()))))
    assert torch.equal(model(given), model((samples(0), samples(1))))


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass", "namedtuple", "scalar"])
@pytest.mark.quick_cases(2)
def test_outputs_keep_their_structure(kind):
    assert_same(Outputs(kind), samples(), 2)


def test_outputs_that_exist_in_training_only_are_returned_in_training_only():
    assert_same(Auxiliary(), samples(), 2, split=["second"])


def test_the_models_own_parameters_and_buffers_can_be_used_in_every_stage():
    net = OwnTensors()
    expected = copy.deepcopy(net)
    for part in samples().split([3, 2, 2]):
        (loss_of(expected(part)) * len(part) / SAMPLES).backward()
    hybrid(net, 3).train_step(samples(), None, loss_of)
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        # the gradients of the stages' uses of `scale` are added up stage by stage
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-8)


def test_a_model_without_submodules_is_one_layer():
    assert_same(Without(), samples(), 1)
    message = "a model of 1 layer cannot be cut into 2 stages.*cut where it calls submodules"
    with pytest.raises(SplitError, match=message):
        hybrid(Without(), 2)


class Times(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return torch.tanh(x @ self.weight)


class OwnList(nn.Module):
    """Uses its parameters in its own forward, or in submodules."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls
        self.parts = nn.ModuleList([Times() for _ in range(6)])
        self.weights = nn.ParameterList([torch.randn(8, 8) for _ in range(6)])

    def forward(self, x):
        if self.calls:
            for part in self.parts:
                x = part(x)
        else:
            for weight in self.weights:
                x = torch.tanh(x @ weight)
        return x


def test_parameters_in_the_models_own_forward_are_cut_once_they_are_in_submodules():
    with pytest.raises(SplitError, match=r"call more submodules\. .*its own forward uses param"):
        hybrid(OwnList(calls=False), 2, example_inputs=torch.zeros(3, 8))
    model = hybrid(OwnList(calls=True), 2, example_inputs=torch.zeros(3, 8))
    assert [len(stage.layers) for stage in model.stages] == [3, 3]


@pytest.mark.parametrize(
    "split",
    [["b"], ["c"], ["b.second"], ["c.drop"], ["b.second", "c.second"], ["b.drop", "c", "rest.5"]],
    ids=str,
)
@pytest.mark.quick_cases(1)
def test_dropout_does_not_depend_on_how_deep_the_model_is_cut(split):
    net = Wrapped()
    whole = copy.deepcopy(net)
    options = {"chunks": CHUNKS, "seed": 3}
    model = HybridModel(net, World.from_env(nb_part=len(split) + 1), split=split, **options)
    one = HybridModel(whole, World.from_env(nb_part=1), **options)
    for _ in range(3):
        losses = [m.train_step(samples(), None, loss_of).loss for m in (model, one)]
        assert torch.equal(*losses)
    for ours, theirs in zip(net.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    model.eval()
    one.eval()
    assert torch.equal(model(samples()), one(samples()))


def test_a_loss_in_another_thread_gets_the_output_of_a_single_stage():
    def in_another_thread(output, _):
        return loss_of(own_values(output), None)

    net, losses = Wrapped(), []
    for loss in (loss_of, in_another_thread):
        model = HybridModel(copy.deepcopy(net), World.from_env(nb_part=1), chunks=CHUNKS, seed=3)
        losses.append(model.train_step(samples(), None, loss).loss)
    assert torch.equal(*losses)


def test_a_buffer_of_the_model_that_is_not_persistent_stays_so():
    net = Body(lambda net, x: net.c(net.b(net.a(x))) + net.table)
    net.register_buffer("table", torch.ones(WIDTH), persistent=False)
    assert_same(net, samples(), 3)
    assert "table" not in net.state_dict()


def test_a_parameter_and_a_tensor_that_occurs_twice_may_cross_a_cut():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            y = self.linear(x)
            return y, self.linear.weight, y

    class Uses(nn.Module):
        def forward(self, values):
            y, weight, again = values
            return (y.exp() @ weight) * again + again.tanh()

    assert_same(nn.Sequential(Twice(), Uses()), samples(), 2)


def test_a_dataclass_may_cross_a_cut():
    @dataclass
    class Package:
        value: Tensor
        note: str

    class Puts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            return Package(self.linear(x), "note")

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, package):
            return self.linear(package.value)

    assert_same(nn.Sequential(Puts(), Takes()), samples(), 2)


def test_a_sequential_is_cut_between_its_elements_and_any_other_model_between_its_calls():
    nested = nn.Sequential(linear(), nn.Sequential(nn.ReLU(), linear()))
    chain = observed_chain(nested, samples())
    assert [layer.name for layer in chain.layers] == ["0", "1.0", "1.1"]
    chain = observed_chain(Wrapped(), samples())
    assert [layer.name for layer in chain.layers][:4] == ["a", "b", "c", "rest.0"]
    options = PipelineOptions(split=["c.second"])
    planner = Planner(Wrapped(), options, samples(), StageOwners.of_cpus(2))
    finer = planner.layers_of(planner.plan())
    found = [layer.name for stage in finer.stages for layer in stage]
    assert found[:6] == ["a", "b", "c.first", "c.drop", "c.second", "c.drop@2"]
    assert finer.units[:7] == [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (3, 0)]


def test_making_stages_leaves_the_models_attributes_and_modes_unchanged():
    net = OwnTensors()
    net.second.eval()
    attributes = {name: set(vars(part)) for name, part in net.named_modules()}
    hybrid(net, 3)
    for name, part in net.named_modules():
        assert set(vars(part)) - {"_compiled_call_impl"} == attributes[name]
    assert [part.training for part in net.modules()] == [True, True, False, True]


def test_a_parameter_that_no_layer_uses_keeps_its_value_and_its_name():
    net = Body(lambda net, x: net.c(net.a(x)))
    net.unused = nn.Parameter(torch.randn(3))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    model = hybrid(net, 2)
    model.train_step(samples(), None, loss_of)
    assert list(model.state_dict()) == list(before)
    assert torch.equal(net.unused, before["unused"])
    assert torch.equal(net.b.weight, before["b.weight"])


def test_a_sequential_needs_no_example_inputs_even_if_its_layers_have_optional_arguments():
    chain = observed_chain(nn.Sequential(linear(), nn.TransformerEncoderLayer(WIDTH, 1)), None)
    assert [layer.name for layer in chain.layers] == ["0", "1"]


def test_a_layer_that_changes_its_input_is_known_by_its_inplace_flag():
    assert works_in_place(nn.Sequential(linear(), nn.ReLU(inplace=True)))
    assert not works_in_place(nn.Sequential(linear(), nn.ReLU()))


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
@pytest.mark.quick_cases(1)
def test_a_model_may_be_created_and_called_without_gradients_before_it_is_trained(grad):
    net = Shapes()
    with grad():
        model = hybrid(net, 2, example_inputs=sequences())
        model(sequences())
    model.train_step(sequences(), None, loss_of)
    assert net.first.weight.grad is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_submodule_is_a_layer():
    net = Body(lambda net, x: net.c(net.b(net.a(x))))
    net.b = torch.jit.trace(linear(), samples())
    model = hybrid(net, 2)
    assert names(model) == ["a", "b", "c"]
    model.train_step(samples(), None, loss_of)
    found = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    for part in samples().split([3, 2, 2]):
        (loss_of(net(part)) * (len(part) / SAMPLES)).backward()
    for parameter, gradient in zip(net.parameters(), found, strict=True):
        assert torch.equal(parameter.grad, gradient)


class Pack(nn.Module):
    def forward(self, x, lengths):
        return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


class Pad(nn.Module):
    def forward(self, packed):
        return pad_packed_sequence(packed, batch_first=True, total_length=5)[0]


class Packs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pack, self.pad, self.head = linear(), Pack(), Pad(), linear()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x, lengths):
        y, _ = self.lstm(self.pack(self.embed(x), lengths))
        return self.head(self.pad(y))


def test_packed_sequences_may_go_from_stage_to_stage():
    inputs = {"x": torch.randn(7, 5, WIDTH), "lengths": torch.tensor([5, 4, 3, 5, 2, 5, 1])}
    assert_same(Packs(), inputs, 3)
