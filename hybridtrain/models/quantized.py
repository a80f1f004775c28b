"""Linear layers with frozen weights in 4 or 8 bits, as the base of an adapter.

    weight [out, in]  ->  packed: uint8, two values (nf4) or one (int8) per byte
                          absmax: float32, the largest magnitude in each block of 64 values
                          code:   float32, the 256 values that int8 stands for

bitsandbytes has the operators. Its modules are not used: they keep scales in attributes of a
parameter, which constructors, copies, moves and checkpoints of a part of a model would have to know
about, and on some CPUs an evaluation repacks their weights, after which they pass on no gradients.

The tensors are frozen parameters instead of buffers, because only buffers may change in a step: the
trainer copies them before each step, DistributedDataParallel sends them to the other replicas, and
a checkpoint of an adapter saves them.

Source: T. Dettmers et al., QLoRA, 2023 (arXiv:2305.14314). NF4 has the quantiles of a normal
distribution; int8 has equal distances, whose error for such weights is smaller than that of
bitsandbytes' dynamic map (0.6% against 0.9% of the norm).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybridtrain._base.construction import computed_from, has_values
from hybridtrain._base.kernel_downloads import without_kernel_downloads
from hybridtrain._base.output_layer import head_modules
from hybridtrain.errors import ConfigError, argument, check_choice, closest, setting

KINDS = ("nf4", "int8")
"""The formats of quantized weights."""

BLOCK = 64
"""The number of values with a common scale."""

_PIECE = 1 << 20
_without_dequantizing: ContextVar[bool] = ContextVar("_without_dequantizing", default=False)


class _Form(NamedTuple):
    """What the stored tensors of a weight stand for."""

    kind: str
    shape: tuple[int, ...]

    def quantized(self, weight: Tensor) -> list[Tensor]:
        """Returns `packed` and `absmax`, and for int8 `code`."""
        ops = _operators()
        # in pieces of whole blocks, because on a CPU bitsandbytes needs 20 bytes per value
        pieces = weight.reshape(-1).split(_PIECE)
        if self.kind == "nf4":
            parts = [ops.quantize_4bit(piece, BLOCK, self.kind, torch.uint8) for piece in pieces]
            return [*map(torch.cat, zip(*parts, strict=True))]
        code = torch.linspace(-1, 1, 255, device=weight.device)
        code = torch.cat([code, code.new_ones(1)])  # 0 is a value, so their number is odd
        parts = [ops.quantize_blockwise(piece, code, BLOCK) for piece in pieces]
        packed, absmax = map(torch.cat, zip(*parts, strict=True))
        return [packed.view(self.shape), absmax, code]

    def empty(self, device: torch.device | str) -> list[Tensor]:
        """Returns tensors of zeros in place of those of `quantized`.

        bitsandbytes' own operators on the meta device would load PyTorch's compiler.
        """
        values = math.prod(self.shape)
        packed = (-(-values // 2), 1) if self.kind == "nf4" else self.shape
        tensors = [
            torch.zeros(packed, dtype=torch.uint8, device=device),
            torch.zeros(-(-values // BLOCK), device=device, dtype=torch.float32),
        ]
        if self.kind == "int8":
            tensors.append(torch.zeros(256, device=device, dtype=torch.float32))
        return tensors

    def dequantized(self, dtype: torch.dtype, stored: Sequence[Tensor]) -> Tensor:
        """Returns the weight."""
        # a compiler cannot trace the import
        ops = torch.ops.bitsandbytes if torch.compiler.is_compiling() else _operators()
        if self.kind == "nf4":
            weight = ops.dequantize_4bit(*stored, BLOCK, self.kind, self.shape, dtype)
        else:
            weight = ops.dequantize_blockwise(*stored, BLOCK, dtype)
        assert isinstance(weight, Tensor)
        return weight


class _Product(torch.autograd.Function):
    """The product with a quantized weight, which is dequantized again for the backward.

    PyTorch's own product would keep the dequantized weight of every layer until the backward.
    """

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, form: _Form, *stored: Tensor) -> Tensor:
        return F.linear(x, form.dequantized(x.dtype, stored), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, ctx.form, *stored = inputs
        ctx.save_for_backward(*stored)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_input, of_bias, *rest = ctx.needs_input_grad
        return (
            grad @ ctx.form.dequantized(grad.dtype, ctx.saved_tensors) if of_input else None,
            grad.reshape(-1, grad.shape[-1]).sum(0) if of_bias else None,
            *(None for _ in rest),
        )


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen weight in 4 or 8 bits.

    It computes in the dtype of its input. `load_state_dict` accepts the stored tensors, or a plain
    `weight`, which it quantizes. In place of a `Conv1D` of transformers, a linear layer with a
    weight of shape [in, out], it is a linear layer as any other to an adapter.

    Args:
        layer: the `nn.Linear` or `Conv1D` to replace; its bias is kept.
        kind: one of `KINDS`.
        device: if the weight has no values: the device of the stored tensors, which a later load
            fills; None: they have no values either.

    Attributes:
        kind: as passed.
        dtype: the dtype of the plain weight.
        packed: the quantized values.
        absmax: the scale of each block.
    """

    packed: nn.Parameter
    absmax: nn.Parameter
    is_all_in_parameters = True  # see `packed_weight`

    def __init__(
        self, layer: nn.Module, kind: str = "nf4", device: torch.device | None = None
    ) -> None:
        nn.Module.__init__(self)
        assert isinstance(layer.weight, Tensor)
        bias: Any = layer.bias
        self._replaced = type(layer)
        weight = self._in_order(layer.weight.detach())
        self.out_features, self.in_features = weight.shape
        self.kind, self.dtype = kind, weight.dtype
        if has_values(weight):
            values = self._form.quantized(weight)
        else:
            values = self._form.empty((device if weight.is_meta else None) or "meta")
        for name, value in zip(self.stored, values, strict=True):
            parameter = nn.Parameter(value, requires_grad=False)
            computed_from(parameter, layer.weight)
            self.register_parameter(name, parameter)
        self.register_parameter("bias", bias)
        self.training = layer.training

    @property
    def stored(self) -> tuple[str, ...]:
        """The names of the tensors that take the place of `weight`."""
        return ("packed", "absmax") if self.kind == "nf4" else ("packed", "absmax", "code")

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A dequantized copy of the weight; changes of it have no effect."""
        if _without_dequantizing.get():
            return self._in_order(self.placeholder)
        return self._form.dequantized(self.dtype, self._stored())

    @property
    def placeholder(self) -> Tensor:
        """A tensor like the weight of the replaced layer, with memory for one element.

        It is a meta tensor if another process has the values.
        """
        one = torch.zeros((), dtype=self.dtype, device=self.packed.device)
        return self._in_order(one.expand(self._form.shape))

    @torch.no_grad()
    def load_weight(self, weight: Tensor) -> None:
        """Replaces the values by a weight of the replaced layer; no effect in another process."""
        if self.packed.is_meta:
            return
        weight = self._in_order(weight.to(self.packed.device, self.dtype))
        for parameter, value in zip(self._stored(), self._form.quantized(weight), strict=True):
            parameter.copy_(value)

    def plain(self) -> nn.Linear:
        """Returns a plain layer with the dequantized weight."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(self.weight, requires_grad=False)
        layer.register_parameter("bias", self.bias)
        return layer.train(self.training)

    def as_replaced(self, layer: nn.Linear) -> nn.Module:
        """Returns a linear layer as a module of the class that this one has replaced."""
        if not _is_conv1d(self._replaced):
            return layer
        with torch.device("meta"):
            replaced = self._replaced(self.out_features, self.in_features)
        weight = self._in_order(layer.weight.detach()).contiguous()
        replaced.weight = nn.Parameter(weight, requires_grad=False)
        replaced.bias = layer.bias
        return replaced

    def forward(self, x: Tensor) -> Tensor:
        """Returns the product with the dequantized weight, plus the bias."""
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y: Tensor = _Product.apply(x, bias, self._form, *self._stored())
        return y

    def extra_repr(self) -> str:
        """Returns the sizes and the kind."""
        return f"{super().extra_repr()}, kind={self.kind}"

    @property
    def _form(self) -> _Form:
        return _Form(self.kind, (self.out_features, self.in_features))

    def _stored(self) -> list[nn.Parameter]:
        return [getattr(self, name) for name in self.stored]

    def _in_order(self, weight: Tensor) -> Tensor:
        """Returns a weight of the replaced layer as that of a linear one, and the other way."""
        return weight.t() if _is_conv1d(self._replaced) else weight

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedLinear:
        exact = {name: getattr(self, name).data for name in self.stored}
        super()._apply(fn, recurse)
        for name, value in exact.items():  # `half()` and `to(dtype)` would round the scales
            parameter = getattr(self, name)
            if parameter.dtype != value.dtype:
                self.dtype = parameter.dtype
                parameter.data = value.to(parameter.device)
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        state = dict(state_dict)
        weight = state.pop(f"{prefix}weight", None)
        if weight is not None:
            if weight.shape != self.placeholder.shape:
                errors = args[-1]
                errors.append(
                    f"size mismatch for {prefix}weight: {list(weight.shape)} in the state dict, "
                    f"{list(self.placeholder.shape)} in the model."
                )
            else:
                self.load_weight(weight)
            state |= {f"{prefix}{name}": getattr(self, name) for name in self.stored}
        super()._load_from_state_dict(state, prefix, *args)


def quantize(net: nn.Module, kind: str = "nf4", keep: Sequence[str] | None = None) -> nn.Module:
    """Returns `net` with its linear layers in 4 or 8 bits, as the base of an adapter.

    Call it before `lora`. Embeddings, the head, weights that several modules share, layers with an
    odd number of inputs, and parameters of other modules, such as stacked experts, stay as they
    are. The head is what a model of transformers has outside of its `base_model`, or else the last
    linear layer. Layers are replaced one after the other, so only one exists in both forms. Weights
    on the meta device in a model with other values become zeros, which `init_from` replaces.

    Args:
        net: a model of transformers, or any other; it is modified.
        kind: nf4 or int8.
        keep: names, or suffixes of names, of further layers that stay as they are.

    Raises:
        ConfigError: bitsandbytes is not installed, or no layer has the name, or none can be
            quantized.
    """
    check_choice("kind", kind, KINDS)
    _operators()
    names = [keep] if isinstance(keep, str) else [*(keep or ())]
    layers: dict[str, Any] = {n: layer for n, layer in net.named_modules() if is_linear(layer)}
    for name in names:
        if not any(_matches(layer, [name]) for layer in layers):
            close = closest(name, {layer.rpartition(".")[2] for layer in layers})
            raise ConfigError(
                f"{setting('keep', name)}: a {type(net).__name__} has no such linear layer"
                + (f"; did you mean {close!r}?" if close else "")
            )
    head = {id(module) for module in head_modules(net) or [*layers.values()][-1:]}
    shared = _shared(net)
    chosen = [
        name
        for name, layer in layers.items()
        if (type(layer) is nn.Linear or _is_conv1d(type(layer)))
        and not (id(layer) in head or id(layer.weight) in shared or _matches(name, names))
        and (layer.nx if _is_conv1d(type(layer)) else layer.in_features) % 2 == 0
    ]
    if not chosen:
        raise ConfigError(
            f"{setting('quantize', kind)}: a {type(net).__name__} has no linear layer to quantize "
            f"besides its head: remove {argument('quantize')}"
        )
    device = next((p.device for p in net.parameters() if not p.is_meta), None)
    for name in chosen:
        layer = layers.pop(name)
        net.set_submodule(name, QuantizedLinear(layer, kind, device))
    return net


@contextmanager
def without_dequantizing() -> Iterator[None]:
    """Lets `weight` be `placeholder` in the block, for code that looks at its format alone.

    To dequantize every layer once would fragment the memory of the process.
    """
    token = _without_dequantizing.set(True)
    try:
        yield
    finally:
        _without_dequantizing.reset(token)


def quantized_weights(net: nn.Module) -> dict[str, QuantizedLinear]:
    """Returns the quantized layers of `net`, by the names that their plain weights would have."""
    return {
        f"{name}.weight": module
        for name, module in net.named_modules()
        if isinstance(module, QuantizedLinear)
    }


def stored_names(layers: Mapping[str, QuantizedLinear], names: Iterable[str]) -> list[str]:
    """Returns `names` with the stored tensors in place of quantized weights.

    Args:
        layers: from `quantized_weights`.
        names: names of tensors of the model.
    """
    stored = {
        name: [f"{name.removesuffix('weight')}{part}" for part in layer.stored]
        for name, layer in layers.items()
    }
    return [part for name in names for part in stored.get(name, [name])]


def describe_quantization(net: nn.Module) -> str:
    """Returns the kind and number of the quantized layers, or "" if there are none."""
    kinds = [layer.kind for layer in quantized_weights(net).values()]
    return f"{kinds[0]}, {len(kinds)} layers" if kinds else ""


def describe_plain_weights(net: nn.Module) -> str:
    """Returns, in words, which share of the frozen weights is not quantized.

    Shares are of the bytes of the plain model. The text is empty if no layer is quantized, or all
    frozen weights are.
    """
    layers = quantized_weights(net).values()
    if not layers:
        return ""
    plain = {
        id(parameter): (type(module).__name__, parameter.nbytes)
        for module in net.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and not parameter.requires_grad
        if not (isinstance(module, QuantizedLinear) and name in module.stored)
    }
    if not plain:
        return ""
    by_class = Counter[str]()
    for name, size in plain.values():
        by_class[name] += size
    total = by_class.total() + sum(layer.placeholder.nbytes for layer in layers)
    shares = [f"{name} {size / total:.0%}" for name, size in by_class.most_common(3)]
    return (
        f"{setting('quantize', next(iter(layers)).kind)}: {len(layers)} layers; "
        f"{by_class.total() / total:.0%} of the bytes of the frozen weights stay as they were "
        f"({', '.join(shares)}), because only linear layers besides the head are quantized"
    )


def _shared(net: nn.Module) -> set[int]:
    """Returns the ids of the parameters that more than one module has."""
    found: set[int] = set()
    owners: dict[int, nn.Module] = {}
    for module in net.modules():
        for parameter in module._parameters.values():
            if parameter is not None and owners.setdefault(id(parameter), module) is not module:
                found.add(id(parameter))
    return found


def is_linear(module: nn.Module) -> bool:
    """Returns whether a module is an `nn.Linear`, or a `Conv1D` of transformers, as in GPT-2."""
    return isinstance(module, nn.Linear) or _is_conv1d(type(module))


def _is_conv1d(kind: type[nn.Module]) -> bool:
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _matches(name: str, endings: Iterable[str]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


@cache
def _operators() -> Any:
    """Returns the operators of bitsandbytes.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        with without_kernel_downloads():
            import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{argument('quantize')} needs bitsandbytes: pip install 'hybridtrain[bnb]' ({error})"
        ) from error
    return torch.ops.bitsandbytes
