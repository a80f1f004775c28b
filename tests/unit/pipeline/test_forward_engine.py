"""`engine="local"`: the model's own forward runs, exactly, or is refused with the reason."""

from __future__ import annotations

import collections
import copy
import gc
import pickle
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.forward_nets import CHUNKS, ROWS, Net, batch, pipeline, plain_step
from torch import Tensor, nn

from hybridtrain import HybridModel
from hybridtrain.errors import NotExactError, SplitError, UserError

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class SkipConnection(Net):
    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x).tanh()
        return self.d(self.c(self.b(first).tanh()).tanh()) + first


class LocalList(Net):
    def forward(self, x: Tensor) -> Tensor:
        features = [self.a(x).tanh()]
        features.append(self.b(features[-1]).tanh())
        features.append(self.c(features[-1]).tanh())
        return self.d(features[-1]) + sum(feature.mean() for feature in features)


class ParametersBetweenLayers(Net):
    def prepare(self) -> None:
        self.scale = nn.Parameter(torch.full((8,), 1.5))
        self.scales = nn.ParameterList(nn.Parameter(torch.full((8,), 0.5 + i)) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x).tanh() * self.scales[0]).tanh() * self.scale
        return self.d(self.c(x).tanh() * self.scales[1]) * self.scale * self.scales[2]


class TiedWeights(Net):
    def prepare(self) -> None:
        self.d.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.a.weight


class DictOutput(Net):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.a(x).tanh()
        return {"first": first, "out": self.d(self.c(self.b(first)).tanh())}


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class FunctionBetweenLayers(Net):
    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x).tanh()
        return self.d(self.c(self.b(first).tanh()).tanh()) + Square.apply(first)


class BatchNorms(Net):
    def prepare(self) -> None:
        self.norm, self.other = nn.BatchNorm1d(8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.other(self.c(self.b(self.norm(self.a(x))).tanh())))


class CounterInOneStage(Net):
    def prepare(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.d(self.c(self.b(self.a(x) * self.calls).tanh()).tanh())


class Vmap(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.vmap(self.c)(self.b(self.a(x).tanh()).tanh()))


class CaughtError(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x).tanh()).tanh()
        try:
            self.c(x[:, :3])  # a wrong shape
        except RuntimeError:
            x = x * 2
        return self.d(self.c(x).tanh())


EXACT = [
    Net, SkipConnection, LocalList, ParametersBetweenLayers, TiedWeights, DictOutput,
    FunctionBetweenLayers, BatchNorms, CounterInOneStage, Vmap, CaughtError,
]  # fmt: skip


def loss_of(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output["out"] if isinstance(output, dict) else output, target)


def check_equal(model: HybridModel, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (expected[name].grad is None), name
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, expected[name].grad), name
    for name, buffer in reference.named_buffers():
        assert torch.equal(model.net.get_buffer(name), buffer), name


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kind", EXACT)
def test_gradients_equal_plain_pytorch_bit_for_bit(
    kind: type[Net], stages: int, schedule: str
) -> None:
    torch.manual_seed(0)
    net = kind()
    reference = copy.deepcopy(net)
    model = pipeline(net, stages, schedule=schedule)
    x, y = batch()
    for _ in range(3):  # the first steps of a kind look inside layers, later ones do not
        model.train_step(x, y, loss_of)
        plain_step(reference, x, y, loss_of)
    check_equal(model, reference)


@pytest.mark.parametrize("recompute", ["always", "except_last", {"every": 2}])
@pytest.mark.parametrize("kind", [SkipConnection, TiedWeights, ParametersBetweenLayers, BatchNorms])
def test_recomputed_layers_equal_plain_pytorch(kind: type[Net], recompute: Any) -> None:
    torch.manual_seed(0)
    net = kind()
    reference = copy.deepcopy(net)
    model = pipeline(net, recompute=recompute)
    x, y = batch()
    for _ in range(2):
        model.train_step(x, y, loss_of)
        plain_step(reference, x, y, loss_of)
    check_equal(model, reference)


class GrowsACache(Net):
    """Its layers append to an object that they all get, as transformers' layers do."""

    class Cache:
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, cache: GrowsACache.Cache) -> Tensor:
            cache.seen.append(x)
            return self.linear(x) * len(cache.seen)

    def prepare(self) -> None:
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        cache = self.Cache()
        for layer in self.layers:
            x = layer(x, cache).tanh()
        return self.d(self.c(self.b(self.a(x))))


def test_a_recomputed_layer_gets_objects_as_they_were() -> None:
    torch.manual_seed(0)
    net = GrowsACache()
    reference = copy.deepcopy(net)
    split = [
        *(f"layers.{n}" for n in (2,)),
    ]
    model = pipeline(net, recompute="always", split=split)
    x, y = batch()
    model.train_step(x, y, loss_of)
    plain_step(reference, x, y, loss_of)
    check_equal(model, reference)


@pytest.mark.parametrize("container", [dict, collections.OrderedDict])
def test_a_layer_may_add_to_a_container_that_it_gets(container: Any) -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, cache: Any) -> Tensor:
            cache["seen"].append(x)
            return self.linear(torch.stack(cache["seen"]).sum(0)).tanh()

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Adds() for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            cache = container(seen=[])
            for layer in self.layers:
                x = layer(x, cache)
            return x

    torch.manual_seed(0)
    net = Caching()
    reference = copy.deepcopy(net)
    for recompute in ("never", "always"):
        model = pipeline(net, 3, recompute=recompute)
        model.train_step(*batch(), loss_of)
        plain_step(reference, *batch(), loss_of)
    check_equal(model, reference)


def test_a_step_that_was_refused_is_refused_again() -> None:
    model = pipeline(AttributeAcrossStages())
    for _ in range(2):
        with pytest.raises(NotExactError, match="its forward changes aux"):
            model.train_step(*batch(), loss_of)


def test_values_that_a_forward_reads_may_change_between_steps() -> None:
    class Reads(Net):
        def prepare(self) -> None:
            self.factor, self.settings = 1.0, {"power": 1}

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(self.a(x).tanh()) ** self.settings["power"]
            x = x if self.a.weight.requires_grad else x.detach()
            return self.d(self.c(x).tanh()) * self.factor

    torch.manual_seed(0)
    net = Reads()
    reference = copy.deepcopy(net)
    model = pipeline(net)
    x, y = batch()
    for change in range(4):
        for module in (net, reference):
            module.factor = 1.0 + change
            module.settings["power"] = 1 + change % 2
            module.a.requires_grad_(change < 2)
        model.train_step(x, y, loss_of)
        plain_step(reference, x, y, loss_of)
    check_equal(model, reference)


class AttributeAcrossStages(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).tanh()
        self.aux = x.mean()
        return self.d(self.c(self.b(x).tanh()).tanh()) * self.aux


class CounterAcrossStages(Net):
    def prepare(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class CollectsInAList(Net):
    def prepare(self) -> None:
        self.features: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.features.clear()
        x = self.a(x).tanh()
        self.features.append(x)
        x = self.b(x).tanh()
        self.features.append(x)
        return self.d(self.c(x).tanh()) + sum(feature.mean() for feature in self.features)


class LeavesAnAttributeLater(Net):
    """As `AttributeAcrossStages`, but only once a training has set `uses_aux`."""

    uses_aux = False

    def middle(self, x: Tensor) -> Tensor:
        if not self.uses_aux:
            return super().middle(x)
        self.aux = x.mean()
        return super().middle(x) * (1 + self.aux)


def test_state_that_becomes_another_micro_batchs_in_a_later_step_is_refused() -> None:
    net = LeavesAnAttributeLater()
    model = pipeline(net)
    for _ in range(3):
        model.train_step(*batch(), F.mse_loss)
    net.uses_aux = True
    with pytest.raises(NotExactError, match=r"its forward changes aux\b"):
        model.train_step(*batch(), F.mse_loss)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (AttributeAcrossStages, "aux"),
        (CounterAcrossStages, "calls"),
        (CollectsInAList, "features"),
    ],
)
def test_state_that_would_be_another_micro_batchs_is_refused_by_name(
    kind: type[Net], state: str, schedule: str
) -> None:
    model = pipeline(kind(), schedule=schedule)
    with pytest.raises(NotExactError, match=rf"its forward changes {state}\b"):
        model.train_step(*batch(), loss_of)


def test_state_across_stages_is_exact_if_its_code_is_in_one_stage() -> None:
    # the advice of the error
    torch.manual_seed(0)
    net = AttributeAcrossStages()
    reference = copy.deepcopy(net)
    model = pipeline(nn.Sequential(nn.Linear(8, 8), net), split=[1, 1])
    plain = nn.Sequential(copy.deepcopy(model.net[0]), reference)
    x, y = batch()
    model.train_step(x, y, loss_of)
    plain_step(plain, x, y, loss_of)
    check_equal(model, plain)


def _own_seed(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return x @ torch.randn(8, 8)


def _own_generator(x: Tensor) -> Tensor:
    return x @ torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


class FixedProjection(Net):
    project: Callable[[Tensor], Tensor] = staticmethod(_own_seed)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.project(x))


def test_a_forward_that_seeds_is_refused_and_one_with_its_own_generator_is_exact() -> None:
    with pytest.raises(UserError, match="sets the state of the random generator"):
        pipeline(FixedProjection()).train_step(*batch(), loss_of)
    net = FixedProjection()
    net.project = _own_generator
    reference = copy.deepcopy(net)
    model = pipeline(net)
    model.train_step(*batch(), loss_of)
    plain_step(reference, *batch(), loss_of)
    check_equal(model, reference)


def test_draws_between_and_in_layers_do_not_depend_on_the_split() -> None:
    class Drops(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(self.a(F.dropout(x, 0.3)).tanh(), 0.3)
            return self.d(F.dropout(self.c(F.dropout(self.b(x).tanh(), 0.3)).tanh(), 0.3))

    losses, gradients = [], []
    for stages, options in [
        (1, {}), (2, {}), (3, {"schedule": "zb-h1"}), (2, {"recompute": "always"}),
    ]:  # fmt: skip
        torch.manual_seed(0)
        model = pipeline(Drops(), stages, **options)
        losses.append(model.train_step(*batch(), loss_of).loss)
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    for others in gradients[1:]:
        assert all(map(torch.equal, others, gradients[0]))


def test_a_gradient_over_a_cut_is_refused_and_exact_in_one_stage() -> None:
    class Force(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            energy = super().forward(x).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    with pytest.raises(SplitError, match="computes a gradient across a stage boundary"):
        pipeline(Force()).train_step(*batch(), loss_of)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), Force())
    reference = copy.deepcopy(net)
    model = pipeline(net, split=[1, 1])
    model.train_step(*batch(), loss_of)
    plain_step(reference, *batch(), loss_of)
    check_equal(model, reference)


def test_an_error_names_layer_micro_batch_and_stage_and_the_next_step_runs() -> None:
    class Fails(Net):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(self.a(x).tanh())
            return self.d(self.c(x[:, :5] if self.fails else x).tanh())

    torch.manual_seed(0)
    net = Fails()
    reference = copy.deepcopy(net)
    model = pipeline(net, self_check=False)
    model.train_step(*batch(), loss_of)
    model.zero_grad()
    net.fails = True
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        model.train_step(*batch(), loss_of)
    notes = "\n".join(caught.value.__notes__)
    assert "in layer 'c'" in notes
    assert "of micro-batch 0 on stage 1 (c to d)" in notes
    net.fails = False
    model.zero_grad()
    model.train_step(*batch(), loss_of)
    plain_step(reference, *batch(), loss_of)
    check_equal(model, reference)


def test_evaluation_equals_the_module() -> None:
    torch.manual_seed(0)
    net = BatchNorms()
    model = pipeline(net, 3).eval()
    x, _ = batch()
    with torch.no_grad():
        assert torch.equal(model(x), torch.cat([net(part) for part in x.tensor_split(CHUNKS)]))


def test_a_copy_or_a_pickle_of_a_layer_is_separate_from_the_pipeline() -> None:
    torch.manual_seed(0)
    plain = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    net = nn.Sequential(plain, nn.Tanh(), nn.Linear(8, 8))
    state = {name: value.clone() for name, value in net.state_dict().items()}
    pipeline(net)
    for _ in range(3):
        copy.deepcopy(net)[0](batch()[0])
    pickle.loads(pickle.dumps(net[2]))(batch()[0])
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


def test_submodules_may_be_called_outside_of_the_pipeline() -> None:
    net = Net()
    expected = net.a(batch()[0])
    model = pipeline(net)
    assert torch.equal(net.a(batch()[0]), expected)
    assert torch.equal(copy.deepcopy(model.net).a(batch()[0]), expected)


def transformers_models() -> dict[str, Callable[[], nn.Module]]:
    transformers = pytest.importorskip("transformers")
    small = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    }  # fmt: skip

    def causal(name: str, **extra: Any) -> Callable[[], nn.Module]:
        config = getattr(transformers, f"{name}Config")
        return lambda: getattr(transformers, f"{name}ForCausalLM")(config(**small, **extra))

    def t5() -> nn.Module:
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=32, d_ff=64, num_layers=3, num_heads=4, d_kv=8, vocab_size=96,
                dropout_rate=0, decoder_start_token_id=0, pad_token_id=0,
            )
        )  # fmt: skip

    def lora() -> nn.Module:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        return peft.get_peft_model(causal("Llama")(), config)

    return {
        "llama": causal("Llama"),
        "lora": lora,
        "t5": t5,
        "qwen2": causal("Qwen2"),
        "qwen3": causal("Qwen3", head_dim=8),
        "mistral": causal("Mistral"),
        "gemma": causal("Gemma", head_dim=8),
        "phi3": causal("Phi3", pad_token_id=0),
        "mixtral": causal("Mixtral", num_local_experts=4),
    }


@pytest.mark.parametrize(
    ("schedule", "recompute"), [("1f1b", "never"), ("zb-h1", "never"), ("1f1b", "always")]
)
@pytest.mark.parametrize(
    "name",
    ["llama", "lora", "t5", "qwen2", "qwen3", "mistral", "gemma", "phi3", "mixtral"],
)
@pytest.mark.quick_cases("llama-1f1b-always", "lora-zb-h1-never", "t5-1f1b-never")
def test_transformers_models_with_their_default_settings_are_exact(
    name: str, schedule: str, recompute: str
) -> None:
    from hybridtrain.loss import model_output

    torch.manual_seed(0)
    net = transformers_models()[name]()
    reference = copy.deepcopy(net)
    ids = torch.randint(3, 90, (ROWS, 12))
    mask = torch.ones_like(ids)
    mask[1, 8:] = mask[5, 5:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}
    options = {"schedule": schedule, "recompute": recompute, "split": "size"}
    model = pipeline(net, example_inputs=inputs, **options)
    for _ in range(2):
        model.train_step(inputs, None, model_output)
        for part in zip(*(value.tensor_split(CHUNKS) for value in inputs.values()), strict=True):
            loss = reference(**dict(zip(inputs, part, strict=True))).loss
            loss.backward(torch.full_like(loss, len(part[0]) / ROWS))
    check_equal(model, reference)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_step_is_alive_after_it(fails: bool) -> None:
    activations: list[weakref.ref[Tensor]] = []

    class Probe(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.b(self.a(x).tanh()).tanh()
            activations.append(weakref.ref(x))
            x = self.c(x).tanh()
            activations.append(weakref.ref(x))
            return self.d(x)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if fails and len(activations) > CHUNKS:
            raise ArithmeticError("in the loss")
        return F.mse_loss(output, target)

    model = pipeline(Probe(), self_check=False)
    gc.collect()
    gc.disable()  # without the collector: no circle of references holds activations
    try:
        if fails:
            with pytest.raises(ArithmeticError):
                model.train_step(*batch(), loss)
        else:
            model.train_step(*batch(), loss)
        for _ in range(500):  # threads let go of a step right after they have reported its end
            if not any(activation() is not None for activation in activations):
                break
            time.sleep(0.01)
        assert not any(activation() is not None for activation in activations)
    finally:
        gc.enable()


def test_the_comparison_computes_with_the_intra_op_threads_of_a_stage() -> None:
    seen: set[int] = set()

    class Counts(Net):
        def forward(self, x: Tensor) -> Tensor:
            seen.add(torch.get_num_threads())
            return super().forward(x)

    torch.set_num_threads(4)  # the fixture of this file puts one back
    pipeline(Counts(), 2).train_step(*batch(), loss_of)
    assert seen - {4} == {2}  # 4 where the calls of layers are observed
