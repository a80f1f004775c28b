"""`verify` says whether a pipeline computes what the module computes, and where it does not."""

import copy
import itertools
import re
import threading
import types

import numpy as np
import pytest
import torch
from support.cases import thinned
from support.compare import cpu_world, hybrid, square_loss
from support.nets import CASES, WIDTH, TanhLinear, classification, conv_net, floats, mlp
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from hybridtrain import HybridModel
from hybridtrain.errors import ConfigError, UserError
from hybridtrain.loss import MeanLoss, SumLoss
from hybridtrain.verification import STATE, WHOLE_BATCH, verify

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

RUNS = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe", "recompute": "always"},
    {"schedule": "zb-h1", "precision": "bf16"},
    {"schedule": "zb-v", "stages_per_device": 2, "nb_part": 2},
    {"schedule": "v-half", "stages_per_device": 2, "nb_part": 2},
    {"schedule": "v-min", "stages_per_device": 2, "nb_part": 2, "recompute": "except_last"},
]


@pytest.mark.parametrize(
    ("name", "run"),
    thinned(list(itertools.product(CASES, RUNS)), 3),
    ids=lambda value: value if isinstance(value, str) else value["schedule"],
)
@pytest.mark.quick_cases(2)
def test_a_pipeline_is_found_to_be_exact(name, run):
    case = CASES[name]
    net = case.net()
    if "stages_per_device" in run and len(net) < 4:
        pytest.skip("has fewer than four layers")
    model = hybrid(net, **{"nb_part": 3, **run})
    found = model.verify(*case.batch(10, 3), case.loss)
    assert found.exact, found
    apart = {kind for kind, compared in found.kinds.items() if compared.largest}
    # stages that share a parameter add its gradient up in another order
    assert apart <= {WHOLE_BATCH, *(["gradient"] if name == "tied_gpt" else [])}, found


def test_dropout_is_compared_with_the_plain_module_bit_for_bit():
    case = CASES["dropout"]
    model = hybrid(case.net(), 3)
    found = model.verify(*case.batch(10, 3), case.loss)
    assert found.kinds["output in training"].largest == 0
    assert found.kinds["gradient"].largest == 0


class Elsewhere(TanhLinear):
    """Computes something else in one of its copies."""

    wrong = False

    def forward(self, x):
        return super().forward(x) * (1.25 if self.wrong else 1.0)


def test_the_first_layer_whose_output_differs_is_named():
    net = nn.Sequential(*[Elsewhere() for _ in range(6)])
    plain = copy.deepcopy(net)
    model = hybrid(net, 3)
    net[2].wrong = net[4].wrong = True
    found = model.verify(floats(8), floats(8, seed=1), F.mse_loss, reference=plain)
    assert not found.exact
    assert found.first == "2"
    assert "NOT EXACT" in str(found)
    assert "first layer with a different output is 2" in str(found)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(TanhLinear() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + x
        return x


class WithBody(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = Body(), TanhLinear()

    def forward(self, x):
        return self.head(self.body(x))


def test_the_first_layer_that_differs_is_named_inside_of_a_module_that_was_traced_through():
    net = WithBody()
    plain = copy.deepcopy(net)
    model = hybrid(net, 3)
    plain.body.layers[2].linear.register_forward_hook(lambda *values: values[-1] * 1.25)
    found = model.verify(floats(8), floats(8, seed=1), F.mse_loss, reference=plain)
    assert not found.exact
    assert found.first == "body.layers.2.linear"


def test_weights_of_16_bits_are_compared_as_such():
    net = nn.Sequential(*[TanhLinear() for _ in range(4)]).bfloat16()
    model = hybrid(net, 2)
    inputs, targets = (floats(7, seed=seed).bfloat16() for seed in (0, 1))
    found = model.verify(inputs, targets, F.mse_loss, reference=copy.deepcopy(net))
    assert found.exact, found


class WrongBackward(TanhLinear):
    """Is right in the forward, and has a gradient of its own in one of its copies."""

    wrong = False

    def forward(self, x):
        y = super().forward(x)
        return y + (y - y.detach()) if self.wrong else y


def test_a_gradient_that_differs_is_named_with_its_parameter():
    net = nn.Sequential(*[WrongBackward() for _ in range(4)])
    plain = copy.deepcopy(net)
    model = hybrid(net, 2)
    net[1].wrong = True
    found = model.verify(floats(8), floats(8, seed=1), F.mse_loss, reference=plain)
    assert found.differs == ["gradient"]
    assert found.kinds["gradient"].where in [
        f"{i}.linear.{kind}" for i in (0, 1) for kind in ("weight", "bias")
    ]
    assert found.first is None


def test_a_loss_that_is_no_mean_over_samples_is_found_with_both_numbers():
    weight = torch.tensor([1.0, 5.0, 0.2])

    class Weighted(nn.Module):
        def forward(self, output, targets):
            return F.cross_entropy(output, targets, weight=weight)

    model = hybrid(mlp(), 2)
    inputs, targets = classification(10)
    found = model.verify(inputs, targets, Weighted(), times=1)
    assert found.differs == [WHOLE_BATCH]
    whole = float(F.cross_entropy(model.eval()(inputs), targets, weight=weight))
    assert f"{whole:.7g}" in found.kinds[WHOLE_BATCH].where
    assert "MeanLoss(loss_fn, count)" in str(found)
    counted = MeanLoss(Weighted(), lambda _, targets: weight[targets].sum())
    assert model.verify(inputs, targets, counted).exact


def test_a_sum_with_its_count_is_exact():
    loss = SumLoss(
        lambda output, targets: F.cross_entropy(output, targets, reduction="sum"),
        lambda _, targets: (targets != -100).sum(),
    )
    inputs, targets = classification(10)
    targets[:5] = -100
    assert hybrid(mlp(), 2).verify(inputs, targets, loss).exact


def test_what_construction_has_changed_is_found():
    net = mlp()
    plain = copy.deepcopy(net)
    model = hybrid(net, 2)
    with torch.no_grad():
        net[0].weight[0, 0] += 1
    found = model.verify(*classification(8), F.cross_entropy, reference=plain)
    assert STATE in found.differs
    assert found.kinds[STATE].where == "0.weight"


def test_the_model_is_afterwards_as_before():
    net = conv_net()
    model = hybrid(net, 2)
    batch = CASES["conv"].batch(9, 1)
    model.train_step(*batch, F.cross_entropy)
    net[4].eval()
    state = copy.deepcopy(model.state_dict())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    step, modes = model.rng.step, [module.training for module in net.modules()]
    assert model.verify(*batch, F.cross_entropy).exact
    assert model.rng.step == step
    assert [module.training for module in net.modules()] == modes
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, gradients[name]), name


def test_a_module_that_the_user_keeps_in_evaluation_stays_there():
    net = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model = hybrid(net, 2, chunks=2)
    net[1].eval()
    assert model.verify(floats(8), None, square_loss).exact


def test_an_error_of_the_unsplit_module_alone_says_so():
    plain = copy.deepcopy(net := mlp())
    model = hybrid(net, 2)
    plain[3] = nn.Linear(3, 3)
    with pytest.raises(RuntimeError) as caught:
        model.verify(*classification(8), F.cross_entropy, reference=plain)
    assert any("in the unsplit module" in note for note in caught.value.__notes__)


class Draws(TanhLinear):
    """Draws in one of its copies only."""

    draws = False

    def forward(self, x):
        return super().forward(x) + (torch.rand(1) * 0 if self.draws else 0)


@pytest.mark.parametrize("where", ["stages", "unsplit"])
def test_a_different_number_of_draws_is_one_line(where):
    net = nn.Sequential(Draws(), TanhLinear(), Draws())
    plain = copy.deepcopy(net)
    model = hybrid(net, 2)
    # of the stages, one draws once; of the unsplit module, then, both
    net[0].draws = plain[0].draws = True
    (net if where == "stages" else plain)[2].draws = True
    with pytest.raises(UserError, match="draws"):
        model.verify(floats(8), floats(8, seed=1), F.mse_loss, reference=plain)


def test_several_batches_are_compared_one_after_the_other():
    case = CASES["stateful"]
    model = hybrid(case.net(), 2)
    found = verify(model, [case.batch(10, seed) for seed in range(4)], case.loss)
    assert found.exact
    assert found.kinds["loss of the step"].tensors == 4


def test_an_engine_over_processes_asks_for_the_whole_model(monkeypatch):
    model = HybridModel(mlp(), cpu_world(2))
    monkeypatch.setattr(model.world, "processes_per_replica", 2)
    with pytest.raises(ConfigError, match="pass reference="):
        verify(model, [classification(8)], F.cross_entropy)


def in_a_stage():
    """Whether a pipeline runs this: the unsplit module runs in the main thread."""
    return threading.current_thread() is not threading.main_thread()


class Faulty(TanhLinear):
    """Gives `wrong` of its output where it runs in a stage."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong

    def forward(self, x):
        y = super().forward(x)
        return self.wrong(y) if in_a_stage() else y


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (lambda y: y * float("nan"), lambda y: y * 0),
        (lambda y: y * float("inf"), lambda y: y * 3e38),
        (lambda y: y.masked_fill(y > 0, float("nan")), lambda y: y),
    ],
    ids=["NaN for 0", "infinity for a large number", "some NaN"],
)
def test_numbers_that_are_not_finite_equal_themselves_alone(wrong, right):
    net = nn.Sequential(TanhLinear(), Faulty(wrong))
    net[1].register_forward_hook(lambda module, args, y: y if in_a_stage() else right(y))
    found = hybrid(net, 2).verify(floats(8), None, square_loss)
    assert "output in training" in found.differs
    assert "output in evaluation" in found.differs


def test_nan_in_the_same_places_is_the_same_result():
    net = nn.Sequential(TanhLinear(), TanhLinear())
    model = hybrid(net, 2)
    inputs = floats(8)
    inputs[3] = float("nan")
    assert model.verify(inputs, None, square_loss).exact


class SmallScale(nn.Module):
    """A branch whose gradients are a tiny share of the largest, as a layer scale makes them."""

    def __init__(self):
        super().__init__()
        self.branch, self.wrong = WrongBackward(), False

    def forward(self, x):
        return x + 1e-9 * self.branch(x)


def test_a_small_gradient_is_compared_on_its_own_scale():
    net = nn.Sequential(TanhLinear(), SmallScale(), TanhLinear(), TanhLinear())
    plain = copy.deepcopy(net)
    model = hybrid(net, 2)
    net[1].branch.wrong = True
    found = model.verify(floats(8), floats(8, seed=1), F.mse_loss, reference=plain)
    assert found.differs == ["gradient"]
    assert "1.branch.linear" in found.kinds["gradient"].where


def test_a_loss_that_is_another_mean_in_training_alone_is_found():
    net = mlp()

    def loss(output, targets):
        losses = F.cross_entropy(output, targets, reduction="none")
        return losses[targets > 0].mean() if net.training else losses.mean()

    inputs, targets = classification(10)
    targets[:4] = 0
    found = hybrid(net, 2).verify(inputs, targets, loss)
    assert found.differs == [WHOLE_BATCH]


def test_outputs_that_are_no_tensors_are_compared():
    class Count(TanhLinear):
        def forward(self, x):
            inside = in_a_stage()
            return {"y": super().forward(x), "k": 3.0 if inside else 5.0}

    net = nn.Sequential(TanhLinear(), Count())
    found = hybrid(net, 2).verify(floats(8), None, lambda output, _: output["y"].mean())
    assert "output in training" in found.differs


class WithoutEquality:
    """Is compared by what it holds."""

    def __init__(self, content):
        self.content = content
        self.itself = self


class WithSlots:
    __slots__ = ("content",)

    def __init__(self, content):
        self.content = content


def raises(*_):
    raise ValueError("ambiguous")


def test_losses_of_both_signs_that_nearly_cancel_differ_by_rounding_only():
    torch.manual_seed(459)  # the mean of these losses is small beside each of them
    net = nn.Sequential(TanhLinear(), TanhLinear())
    assert hybrid(net, 2).verify(floats(8), None, lambda output, _: output.mean()).exact


RefusesEquality = type("RefusesEquality", (), {"__eq__": raises, "__hash__": None})


class Returns(TanhLinear):
    """Returns something else in a stage than in the unsplit module."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        inside = in_a_stage()
        return {"y": super().forward(x), "k": self.make(3 if inside else 5)}


@pytest.mark.parametrize(
    "make",
    [
        WithoutEquality,
        WithSlots,
        np.ones,
        np.float32,
        lambda number: [{number}],
        lambda number: types.SimpleNamespace(a=[number]),
    ],
    ids=["attributes", "slots", "shape of an array", "scalar", "set", "namespace"],
)
@pytest.mark.quick_cases(2)
def test_an_output_of_any_type_that_has_a_comparison_is_compared(make):
    net = nn.Sequential(TanhLinear(), Returns(make))
    found = hybrid(net, 2).verify(floats(8), None, lambda output, _: output["y"].mean())
    assert "output in training" in found.differs
    assert not found.not_compared

    same = nn.Sequential(TanhLinear(), Returns(lambda _: make(5)))
    found = hybrid(same, 2).verify(floats(8), None, lambda output, _: output["y"].mean())
    assert found.exact
    assert not found.not_compared


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda number: iter([number]), "list_iterator"),
        (lambda number: lambda: number, "function"),
        (lambda _: threading.Lock(), "lock"),
        (lambda _: RefusesEquality(), "RefusesEquality"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.quick_cases(2)
def test_an_output_whose_type_has_no_comparison_is_reported_as_not_compared(make, kind, caplog):
    net = nn.Sequential(TanhLinear(), Returns(make))
    model = hybrid(net, 2)
    loss = lambda output, _: output["y"].mean()  # noqa: E731
    found = model.verify(floats(8), None, loss)
    assert found.exact
    assert found.not_compared == [
        f"{kind} in output in evaluation",
        f"{kind} in output in training",
    ]
    assert re.search(rf"Not compared.*: {kind} in", str(found))

    with caplog.at_level("INFO", "hybridtrain"):
        model.train_step(floats(8), None, loss)
        model.train_step(floats(6), None, loss)
    assert caplog.text.count(f"did not compare {kind} in output") == 1


class Sampling(TanhLinear):
    """Draws in evaluation too, as a variational autoencoder does."""

    def forward(self, x):
        y = super().forward(x)
        return y + torch.randn_like(y)


def own_generator():
    generator = torch.Generator().manual_seed(1)

    class Draws(TanhLinear):
        def forward(self, x):
            return super().forward(x) + torch.rand((), generator=generator)

    return Draws()


def counting():
    runs = [0]

    class Counts(TanhLinear):
        def forward(self, x):
            runs[0] += 1
            return super().forward(x) * runs[0]

    return Counts()


class Moving(TanhLinear):
    """Moves a buffer in evaluation."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        y = super().forward(x) + self.mean.clone()
        if not self.training:
            self.mean.mul_(0.9).add_(x.mean(0))
        return y


class Observing(TanhLinear):
    """Has a buffer that its first forward resizes, as an observer of quantisation has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.empty(0))

    def forward(self, x):
        if not self.low.numel():
            self.low.resize_(WIDTH).fill_(float("inf"))
        self.low.copy_(torch.minimum(self.low, x.detach().amin(0)))
        return super().forward(x)


def hooked():
    layer = TanhLinear()
    layer.linear.weight.register_hook(lambda gradient: gradient * 2)
    return layer


def normed():
    layer = TanhLinear()
    torch.nn.utils.weight_norm(layer.linear)
    return layer


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    "layer",
    [Sampling, own_generator, counting, Moving, Observing, hooked, normed],
    ids=lambda layer: layer.__name__,
)
@pytest.mark.quick_cases(2)
def test_layers_with_a_state_of_their_own_are_found_to_be_exact(layer):
    net = nn.Sequential(TanhLinear(), layer(), TanhLinear())
    model = hybrid(net, 2)
    found = model.verify(floats(8), None, square_loss)
    assert found.exact, found
    assert found.kinds["output in evaluation"].largest == 0


def test_state_that_only_other_weights_show_is_found():
    class Momentum(nn.Module):
        """Updates a copy of its weights, twice in a stage."""

        def __init__(self):
            super().__init__()
            self.q, self.k = TanhLinear(), TanhLinear()
            self.k.load_state_dict(self.q.state_dict())
            self.k.requires_grad_(False)

        def forward(self, x):
            inside = in_a_stage()
            for q, k in zip(self.q.parameters(), self.k.parameters(), strict=True):
                for _ in range(1 + inside):
                    k.data.mul_(0.9).add_(q.data, alpha=0.1)
            return self.q(x) + self.k(x)

    found = hybrid(nn.Sequential(TanhLinear(), Momentum()), 2).verify(floats(8), None, square_loss)
    assert not found.exact


def test_the_model_is_as_before_after_an_error_too():
    class Fails(Observing):
        fails = False

        def forward(self, x):
            if self.fails and not self.training:
                raise RuntimeError("in an evaluation")
            return super().forward(x)

    net = nn.Sequential(TanhLinear(), Fails())
    model = hybrid(net, 2)
    weights, calls = copy.deepcopy(net.state_dict()), []
    net[1].register_forward_hook(lambda *values: calls.append(len(calls)))
    net[1].fails = True
    with pytest.raises(RuntimeError, match="in an evaluation"):
        model.verify(floats(8), None, square_loss)
    assert net.training
    assert calls == []
    for name, value in net.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert all(p.grad is None for p in net.parameters())


def test_outputs_whose_type_has_no_names_for_its_parts_are_compared():
    Output = register_without_keys()  # noqa: N806

    class Gives(TanhLinear):
        def forward(self, x):
            return Output(super().forward(x))

    net = nn.Sequential(TanhLinear(), Gives())
    found = hybrid(net, 2).verify(floats(8), None, lambda output, _: output.sample.mean())
    assert found.exact


def register_without_keys():
    """Returns a type that pytree functions enter without names, as the outputs of diffusers."""

    class Output:
        def __init__(self, sample):
            self.sample = sample

    pytree.register_pytree_node(
        Output, lambda output: ([output.sample], None), lambda values, _: Output(*values)
    )
    return Output
