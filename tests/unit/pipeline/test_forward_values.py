"""`engine="local"`: views, hooks, inner gradients, autocast and later changes over a cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.forward_nets import CHUNKS, ROWS, Net, batch, pipeline, plain_step
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hybridtrain.errors import ConfigError, NotExactError, SplitError

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

OPTIONS: list[dict[str, Any]] = [{}, {"schedule": "zb-h1"}, {"nb_part": 3}, {"recompute": "always"}]


def check_exact(
    net: nn.Module, change: Callable[[Any], object] | None = None, **options: Any
) -> None:
    """Trains three steps, with a change after the first, and the same in plain PyTorch."""
    reference = copy.deepcopy(net)
    model = pipeline(net, **options)
    for number in range(3):
        if number == 1 and change is not None:
            change(net)
            change(reference)
        model.train_step(*batch(), F.mse_loss)
        plain_step(reference, *batch())
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected[name].grad), name


class BaseChangedBeforeTheCut(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        view = h[:, :4]
        h.mul_(1.5)
        return self.d(self.middle(h)) + torch.cat([view, view], 1)


class ViewOfViews(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        view = h.view(-1)[:8].unsqueeze(0).transpose(0, 1).t()
        h.mul_(1.5)
        return self.d(self.middle(h)) + view


class ViewChangedBeforeTheCut(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        h[:, :4].mul_(2)
        row = h[0]
        h[:, 2:].add_(1)
        return self.d(self.middle(h)) + h + row


class ViewsOfOneChange(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        first, second = h[:, :4], h[:, 4:]
        first.add_(1)
        second.mul_(2)
        return self.d(self.middle(h)) + torch.cat([second, first], 1)


class ChangedAfterTheCut(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        y = self.middle(h * 1)
        h.mul_(2)
        row = h[0]
        return self.d(y) + h + row


VIEWS = [
    BaseChangedBeforeTheCut, ViewOfViews, ViewChangedBeforeTheCut, ViewsOfOneChange,
    ChangedAfterTheCut,
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.quick_cases(8)
def test_views_of_values_that_change_in_place_are_exact(
    kind: type[Net], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    check_exact(kind(), **options)


class ViewFirstUsedTwoStagesLater(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        row = h[0]
        y = self.b(h * 1).tanh()
        h.mul_(2)
        return self.d(self.c(y).tanh()) + h + row


def test_a_change_that_a_view_of_an_earlier_stage_does_not_see_is_refused() -> None:
    torch.manual_seed(0)
    model = pipeline(ViewFirstUsedTwoStagesLater(), split=[1, 1, 2], nb_part=3, self_check=False)
    with pytest.raises(SplitError, match="through another view"):
        model.train_step(*batch(), F.mse_loss)
    check_exact(ViewFirstUsedTwoStagesLater(), split=[3, 1])  # the advice: cut elsewhere


class HookOnAnEarlierValue(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        y = self.c(self.b(h) + h).tanh()
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return self.d(y) + h


class HookAfterAChange(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        y = self.middle(h * 1)
        h.mul_(2)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return self.d(y) + h


class HookOnANode(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        y = self.c(self.b(h) + h).tanh()
        if h.grad_fn is not None:
            h.grad_fn.register_prehook(lambda gradients: (gradients[0].clamp(-1e-3, 1e-3),))
        return self.d(y) + h


class HookInALayer(Net):
    """A layer sets a hook on its argument, which other stages use too."""

    class Layer(nn.Module):
        retains = False

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8) / 3)

        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
                x.register_hook(torch.zeros_like).remove()
                if self.retains:
                    x.retain_grad()
            return x @ self.weight

    def prepare(self) -> None:
        self.c = self.Layer()

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x)).tanh()
        twice = h * 2
        return self.d(self.c(h).tanh() + h) + twice + h


def test_a_layer_that_retains_the_gradient_of_an_argument_is_refused() -> None:
    net = HookInALayer()
    net.c.retains = True
    with pytest.raises(SplitError, match=r"retain_grad\(\) of an argument"):
        pipeline(net, self_check=False).train_step(*batch(), F.mse_loss)
    check_exact(net, self_check=False, split=[1, 3])  # the value is made in the layer's stage


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
@pytest.mark.parametrize(
    "kind", [HookOnAnEarlierValue, HookAfterAChange, HookOnANode, HookInALayer]
)
@pytest.mark.quick_cases(6)
def test_hooks_of_a_later_stage_see_and_change_the_whole_gradient(
    kind: type[Net], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    check_exact(kind(), self_check=False, **options)


def test_a_gradient_that_a_later_stage_retains_is_whole() -> None:
    class Retains(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).tanh()
            y = self.c(self.b(h) + h).tanh()
            h.retain_grad()
            values.append(h)
            return self.d(y) + h

    values: list[Tensor] = []
    torch.manual_seed(0)
    net = Retains()
    reference = copy.deepcopy(net)
    model = pipeline(net, self_check=False)
    model.train_step(*batch(), F.mse_loss)  # finds where the model may be cut, too
    values.clear()
    model.train_step(*batch(), F.mse_loss)
    gradients = [value.grad for value in values]
    values.clear()
    plain_step(reference, *batch())
    assert all(map(torch.equal, gradients, [value.grad for value in values]))


def test_a_hook_on_a_parameter_of_an_earlier_stage_is_refused() -> None:
    class Hooks(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.middle(self.a(x))
            self.a.weight.register_hook(lambda gradient: gradient * 2)
            return self.d(y)

    with pytest.raises(SplitError, match=r"hook on 'a.weight' in stage 1.*belongs to stage 0"):
        pipeline(Hooks(), self_check=False).train_step(*batch(), F.mse_loss)
    net = Net()
    net.a.weight.register_hook(lambda gradient: gradient * 2)  # the advice
    model = pipeline(net)
    model.train_step(*batch(), F.mse_loss)


class InAnotherThread(torch.autograd.Function):
    """Its backward computes in another thread, as all backwards on a GPU do."""

    pool = ThreadPoolExecutor(1)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return InAnotherThread.pool.submit(lambda: 2 * x * gradient).result()


def _count_nodes(count: int) -> None:
    value = torch.ones((), requires_grad=True)
    for _ in range(count):
        value.clone()


@pytest.mark.parametrize("nodes", [0, 100_000], ids=["young thread", "old thread"])
def test_a_gradient_inside_a_stage_is_exact_whichever_thread_computes_it(nodes: int) -> None:
    class Inner(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.middle(self.a(x))
            energy = InAnotherThread.apply(x).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return self.d(x + force * 0.5) + force

    InAnotherThread.pool = ThreadPoolExecutor(1)
    InAnotherThread.pool.submit(_count_nodes, nodes).result()
    for options in OPTIONS[:3]:
        torch.manual_seed(0)
        check_exact(Inner(), self_check=False, **options)


class OwnAutocast(Net):
    cached = True

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=self.cached):
            return self.use(self.d(self.middle(self.a(x)))).float()

    def use(self, x: Tensor) -> Tensor:
        return x


class TiesUnderAutocast(OwnAutocast):
    def prepare(self) -> None:
        self.d.weight = self.a.weight


class UsesAWeightUnderAutocast(OwnAutocast):
    def use(self, x: Tensor) -> Tensor:
        return x @ self.a.weight


@pytest.mark.parametrize("kind", [TiesUnderAutocast, UsesAWeightUnderAutocast])
def test_a_weight_that_an_autocast_of_the_forward_casts_in_two_stages_is_refused_with_the_way_out(
    kind: type[OwnAutocast],
) -> None:
    torch.manual_seed(0)
    with pytest.raises(NotExactError, match=r"a\.weight differs.*pass cache_enabled=False to"):
        pipeline(kind()).train_step(*batch(), F.mse_loss)
    net = kind()
    net.cached = False
    check_exact(net)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_an_autocast_of_the_forward_is_exact(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    check_exact(OwnAutocast(), **options)


def _compile(net: Net) -> None:
    for layer in net.children():
        layer.compile(backend="eager")


def _replace_forwards(net: Net) -> None:
    for module in (net, net.c):
        forward = module.forward
        module.forward = lambda x, forward=forward: forward(x) * 1.5  # type: ignore[method-assign]


@pytest.mark.parametrize("options", [{}, {"recompute": "always"}, {"nb_part": 1}], ids=str)
@pytest.mark.parametrize("change", [_compile, _replace_forwards])
def test_layers_may_be_compiled_and_forwards_replaced_between_steps(
    change: Callable[[Net], None], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    check_exact(Net(), change, **options)


def test_layers_compiled_between_steps_still_run_in_their_stages() -> None:
    stages: list[str] = []

    class Notes(Net):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.middle(self.a(x))
            if self.fails:
                raise ArithmeticError("between the layers")
            return self.d(x)

    torch.manual_seed(0)
    net = Notes()
    model = pipeline(net, self_check=False)
    model.train_step(*batch(), F.mse_loss)
    _compile(net)
    net.fails = True
    with pytest.raises(ArithmeticError) as caught:
        model.train_step(*batch(), F.mse_loss)
    stages += caught.value.__notes__
    assert "on stage 1 (c to d)" in "\n".join(stages)


def test_a_container_of_layers_that_is_compiled_later_is_refused() -> None:
    model = pipeline(Net())
    model.train_step(*batch(), F.mse_loss)
    model.net.compile(backend="eager")
    with pytest.raises(ConfigError, match=r"Net has been compiled, .* compile its layers"):
        model.train_step(*batch(), F.mse_loss)


def test_an_adapter_added_later_is_refused_and_trained_by_a_new_model() -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    from hybridtrain.loss import model_output

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=96,
    )  # fmt: skip
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    net = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    ids = torch.randint(3, 90, (ROWS, 12))
    inputs = {"input_ids": ids, "labels": ids.clone()}
    pipeline(net, example_inputs=inputs, split="size").train_step(inputs, None, model_output)
    net.add_adapter("other", lora)
    net.set_adapter("other")
    model = pipeline(net, example_inputs=inputs, split="size")
    reference = copy.deepcopy(net)
    for _ in range(2):
        model.train_step(inputs, None, model_output)
        for part in ids.tensor_split(CHUNKS):
            loss = reference(input_ids=part, labels=part).loss
            loss.backward(torch.full_like(loss, len(part) / ROWS))
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert any("lora_A.other" in name for name in gradients)
    for name, parameter in model.named_parameters():
        if name in gradients and "other" in name:
            assert torch.equal(parameter.grad, gradients[name]), name


class Doubles(TorchFunctionMode):
    """Doubles what linear layers return, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **kwargs or {})
        if func is F.linear:
            self.count += 1
            output = output * 2
        return output


class ModeOverACut(Net):
    def middle(self, x: Tensor) -> Tensor:
        with Doubles() as mode:
            x = self.c(self.b(x).tanh()).tanh()
        assert mode.count == 2  # and ends here, so that `d` is not doubled
        return x


class DeviceOverACut(Net):
    def middle(self, x: Tensor) -> Tensor:
        with torch.device("cpu"):
            return self.c(self.b(x).tanh() + torch.ones(8)).tanh()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [ModeOverACut, DeviceOverACut])
@pytest.mark.quick_cases(5)
def test_a_mode_that_the_forward_enters_before_a_cut_ends_where_the_forward_leaves_it(
    kind: type[Net], options: dict[str, Any]
) -> None:
    check_exact(kind(), **options)
