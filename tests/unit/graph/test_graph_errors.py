"""A model or a batch that cannot be traced is refused in one message that says what to do."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.traced import (
    WIDTH,
    Shapes,
    TwoInputs,
    assert_same,
    hybrid,
    linear,
    loss_of,
    samples,
)
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from hybridtrain import HybridModel, World, shared
from hybridtrain.errors import BatchError, ConfigError, SplitError
from hybridtrain.graph import CallSignature, ChainBuilder
from hybridtrain.graph.exporter import SizeChecks

pytestmark = pytest.mark.usefixtures("seeded")


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x):
        x = self.first(x)
        if x.sum() > 0:
            x = x * 2
        return self.second(x)


def test_control_flow_in_the_models_own_forward_is_named_with_its_line():
    message = (
        r"Decides cannot be traced.*test_graph_errors\.py:\d+: `if x\.sum\(\) > 0:`.*"
        r"into the forward of a separate nn\.Module"
    )
    with pytest.raises(SplitError, match=message):
        hybrid(Decides(), 2, example_inputs=samples())
    assert_same(Decides(), samples(), 1, example_inputs=samples())


class AnyInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = linear()

    def forward(self, *inputs):
        return self.first(sum(inputs))


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (Shapes, r"Shapes\.forward has optional arguments \(mask\)"),
        (AnyInputs, r"AnyInputs\.forward has \*args"),
        (Decides, r"torch\.fx cannot trace Decides \(.*test_graph_errors\.py:\d+: `if x\.sum"),
    ],
)
def test_a_model_that_is_traced_with_a_batch_asks_for_example_inputs_and_says_why(net, why):
    with pytest.raises(ConfigError, match=f"{why}.*pass example_inputs=<the inputs of a batch>"):
        hybrid(net(), 2)


def test_a_batch_with_other_inputs_than_the_model_was_traced_with_is_refused():
    model = hybrid(TwoInputs(), 2, example_inputs=(samples(0), samples(1)))
    message = "TwoInputs was traced with left, right, but this batch passes left, right, mask: .*in"
    with pytest.raises(BatchError, match=message):
        model({"left": samples(0), "right": samples(1), "mask": samples(2)})
    for wrong in (samples(), (samples(),) * 5, {"left": samples(), "rihgt": samples()}):
        with pytest.raises(BatchError, match=r"cannot call TwoInputs\.forward\(left, right"):
            model(wrong)
    inputs = {"left": samples(0), "right": samples(1), "scale": 0.5}
    model = hybrid(TwoInputs(), 2, example_inputs=inputs)
    with pytest.raises(BatchError, match=r"traced with scale=0\.5, .* scale=2"):
        model(inputs | {"scale": 2})


class Ignores(nn.Module):
    """Has an argument that is no tensor when it is traced."""

    def __init__(self):
        super().__init__()
        self.first, self.last = linear(), linear()

    def forward(self, x, extra=None):
        h = self.first(x)
        return self.last(h)


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from([0.5, math.nan, "a", "bc"]),
    st.sampled_from([2, 3]).map(np.arange), st.just(np.array([1.0, math.nan])),
    st.just(np.array(["x", "y"])),
)  # fmt: skip
CONSTANTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    ),
    max_leaves=4,
)


def described(value):
    """A text that differs for values that differ; 1, 1.0 and True are equal."""
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.tolist()}"
    if isinstance(value, dict):
        return str({key: described(value[key]) for key in sorted(value)})
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} {[described(each) for each in value]}"
    return repr(float(value)) if isinstance(value, bool | int | float) else repr(value)


@settings(max_examples=30, deadline=None)
@given(CONSTANTS, CONSTANTS)
def test_arguments_that_are_no_tensors_are_compared_whatever_they_are(traced, other):
    net = Ignores()
    signature, _ = CallSignature.of_inputs(net, {"x": samples(0), "extra": traced})
    signature.graph_inputs({"x": samples(1), "extra": copy.deepcopy(traced)})
    inputs = {"x": samples(1), "extra": other}
    if described(traced) == described(other):
        signature.graph_inputs(inputs)
        return
    with pytest.raises(BatchError, match="Ignores was traced with extra=") as error:
        signature.graph_inputs(inputs)
    assert len(str(error.value)) < 500


def test_a_tensor_in_place_of_another_value_is_shown_by_its_shape():
    net = Ignores()
    model = hybrid(net, 2, example_inputs={"x": samples(0), "extra": None})
    with pytest.raises(BatchError, match=r"extra=None, .* extra=a tensor of shape \(\d+,"):
        model({"x": samples(0), "extra": samples(1)})
    array = {"x": samples(0), "extra": shared(np.arange(4))}
    model = hybrid(Ignores(), 2, example_inputs=array)
    model({"x": samples(1), "extra": shared(np.arange(4))})
    with pytest.raises(BatchError, match=r"passes extra=an array of shape \(5,\)"):
        model({"x": samples(1), "extra": shared(np.arange(5))})


class Carrier:
    def __init__(self, tensor):
        self.tensor = tensor


def test_an_object_that_may_hide_tensors_does_not_cross_a_cut():
    class Puts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            return Carrier(self.linear(x))

    class Takes(nn.Module):
        def forward(self, carrier):
            return carrier.tensor * 2

    net = nn.Sequential(Puts(), Takes())
    with pytest.raises(SplitError, match="layer '0' passes a Carrier to a later stage "):
        hybrid(net, 2).train_step(samples(), None, loss_of)
    hybrid(net, 1).train_step(samples(), None, loss_of)


def two_layers():
    return nn.Sequential(linear(), linear())


@pytest.mark.parametrize(
    ("wrap", "what"),
    [
        (
            lambda: nn.DataParallel(two_layers()),
            r"DataParallel.*net\.module",
        ),
        (lambda: torch.compile(two_layers()), r"compiled as a whole.*compile=True"),
    ],
)
@pytest.mark.quick_cases(1)
def test_a_wrapped_model_is_refused_in_one_short_line(wrap, what):
    with pytest.raises(ConfigError, match=what) as caught:
        hybrid(wrap(), 2, example_inputs=samples())
    assert len(str(caught.value)) < 200


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_model_is_one_layer_and_no_more():
    net = torch.jit.trace(TwoInputs(), (samples(0), samples(1)))
    inputs = samples(0), samples(1)
    hybrid(net, 1).train_step(inputs, None, loss_of)
    with pytest.raises(SplitError, match=r"it is a TorchScript module"):
        hybrid(net, 2, example_inputs=inputs)


def test_lazy_modules_get_their_shapes_from_example_inputs():
    def net():
        return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 2))

    with pytest.raises(ConfigError, match=r"0\.weight is lazy.*pass example_inputs="):
        hybrid(net(), 2)
    lazy = net()
    model = hybrid(lazy, 2, example_inputs=samples())
    assert lazy.training
    assert not lazy[1].running_mean.any()
    whole = copy.deepcopy(lazy)
    out = model(samples())
    whole.train()
    assert torch.equal(out, torch.cat([whole(part) for part in samples().split([3, 2, 2])]))


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
    assert_same(Packs(), inputs, 3, example_inputs=inputs)


class AsksTorchScript(nn.Module):
    """As the U-nets of MONAI."""

    def __init__(self):
        super().__init__()
        self.up, self.both = linear(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, skipped):
        x = self.up(x)
        if torch.jit.isinstance(skipped, torch.Tensor):
            return self.both(torch.cat([x, skipped], 1))
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up, self.head = linear(), AsksTorchScript(), nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = self.down(x)
        return self.head(self.up(x.relu(), x))


def test_a_branch_on_the_type_of_a_value_is_not_chosen_while_tracing():
    assert_same(Net(), samples(), 2, example_inputs=samples())


class ReadsATable(nn.Module):
    """Reads a buffer of a submodule that is called whole, as relative position biases are."""

    def __init__(self):
        super().__init__()
        self.inner, self.big = Decides(), nn.Sequential(*(linear() for _ in range(6)))
        self.inner.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x):
        return self.big(self.inner(x)) + self.inner.table


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.part, self.last = linear(), ReadsATable(), linear()

    def forward(self, x):
        return self.last(self.part(self.first(x)))


@pytest.mark.thorough
def test_a_module_that_cannot_be_expanded_further_is_left_whole():
    chain = ChainBuilder(Around(), samples()).chain({"part", "part.inner"})
    assert "part" in [layer.name for layer in chain.layers]
    assert "reads 'table'" in chain.unexpanded["part"]
    assert_same(Around(), samples(), 2, example_inputs=samples())


def test_a_condition_on_sizes_that_divides_by_zero_is_reported_as_other_sizes():
    class DividesByRows(nn.Module):
        def forward(self, inputs):
            assert 12 // len(inputs) == 3

    checks = SizeChecks("Net", DividesByRows(), [])
    message = r"Net depends on sizes: it was traced for other sizes \(.*by zero\), .*micro-batch"
    with pytest.raises(BatchError, match=message):
        checks(torch.zeros(0, 2))


@pytest.mark.parametrize("split", ["time", "memory", "balanced"])
def test_a_split_that_measures_asks_for_example_inputs(split):
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(ConfigError, match=r"split='.*example_inputs=<the inputs of a batch>"):
        HybridModel(net, World.from_env(nb_part=2, devices="cpu"), split=split)
