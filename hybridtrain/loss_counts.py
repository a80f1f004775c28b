"""Counts of what losses average over: the known ones of PyTorch, and those that say it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtrain import losses
from hybridtrain.errors import BatchError, ConfigError, UserError
from hybridtrain.losses import IGNORED, LossFn, MeanLoss, SumLoss
from hybridtrain.microbatch import leaves_of, split
from hybridtrain.output_loss import count_of_output

Loss = SumLoss | MeanLoss | LossFn


@dataclass(frozen=True)
class TargetCount:
    """The denominator of PyTorch's cross-entropy and nll with `reduction="mean"`.

    That is the number of targets other than `ignore_index`, or the sum of their class weights. For
    targets that are probabilities, which cannot be ignored, it is the number of samples.

    Args:
        ignore_index: the target that does not count.
        weight: a weight for each class, of shape (C); None: 1 each.
    """

    ignore_index: int = IGNORED
    weight: Tensor | None = None
    _weights: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, inputs: Any, targets: Any) -> Tensor | int:
        """Returns the count of a batch, a 0-dim tensor unless all targets count."""
        if not isinstance(targets, Tensor):
            raise BatchError(
                f"cross_entropy and nll need targets= that are a tensor, not "
                f"{type(targets).__name__}"
            )
        if targets.is_floating_point():
            if targets.dim() < 2:
                raise BatchError(
                    f"cross_entropy and nll need targets= that are classes, of dtype int64 "
                    f"(targets.long()), not {str(targets.dtype).removeprefix('torch.')} of shape "
                    f"{tuple(targets.shape)}; probabilities have the classes in dim 1"
                )
            return targets.numel() // targets.shape[1]
        valid = targets != self.ignore_index
        if self.weight is None:
            return valid.sum()
        counted = targets.masked_fill(~valid, 0)
        weights = self._weight_on(targets).index_select(0, counted.flatten())
        return (weights * valid.flatten()).sum()

    def of_parts(self, targets: Any, sizes: Sequence[int]) -> list[Any]:
        """Returns the count of each micro-batch of `targets`."""
        if (
            isinstance(targets, Tensor)
            and not targets.is_floating_point()
            and targets.is_cpu
            and targets.numel()
            and self.weight is None
            and self.ignore_index < 0
            and int(targets.min()) >= 0  # all count: one pass in place of one for each part
        ):
            each = targets.numel() // len(targets)
            return [size * each for size in sizes]
        return [self(None, part) for part in split(targets, sizes)]

    def _weight_on(self, targets: Tensor) -> Tensor:
        """Returns the class weights beside the targets, copied again only when they change."""
        weight = self.weight
        assert weight is not None
        if weight.device == targets.device:
            return weight.detach().double()
        version = weight._version
        if version not in self._weights:
            self._weights.clear()
            self._weights[version] = weight.detach().double().to(targets.device)
        return self._weights[version]


_BY_TARGETS = (F.cross_entropy, F.nll_loss, losses.cross_entropy, losses.nll)


def with_count(loss_fn: Any, net: nn.Module | None = None) -> Loss:
    """Returns `loss_fn` as a `SumLoss` or a `MeanLoss` if its count is known, else unchanged.

    Known are losses with a method `count`, `cross_entropy` and `nll` of PyTorch and of
    `hybridtrain.losses`, `nn.CrossEntropyLoss` and `nn.NLLLoss` and what is derived from them with
    the same forward; also in a `functools.partial` and under `torch.compile`.
    `losses.model_output` is counted as `net`, a model of transformers, computes it.

    Raises:
        ConfigError: a loss of PyTorch with `reduction="sum"` or `"none"`, or `model_output` of a
            model whose rule is unknown.
    """
    if isinstance(loss_fn, SumLoss | MeanLoss):
        return loss_fn
    if callable(getattr(loss_fn, "count", None)):
        return SumLoss(loss_fn, loss_fn.count)
    if loss_fn is losses.model_output and net is not None:
        return MeanLoss(loss_fn, count_of_output(net))
    function, settings = _unwrapped(loss_fn)
    if settings.get("reduction") in ("sum", "none"):
        raise ConfigError(
            f'loss_fn={name_of(function)} with reduction="{settings["reduction"]}": leave it at '
            f'"mean", or say what the sum is divided by: '
            f"SumLoss(loss_fn, lambda inputs, targets: targets.numel())"
        )
    if any(function is known for known in _BY_TARGETS):
        return MeanLoss(
            loss_fn, TargetCount(settings.get("ignore_index", IGNORED), settings.get("weight"))
        )
    plain: LossFn = loss_fn
    return plain


_TORCH_LOSSES = nn.modules.loss.__name__
_CALLS = "forward", "__call__"


def _unwrapped(loss_fn: Any) -> tuple[Any, Mapping[str, Any]]:
    """Returns the function or the class of PyTorch that `loss_fn` is a form of, and its settings.

    It is looked for in `functools.partial`, under `torch.compile`, and among the bases of a class
    that keeps their forward. A loss of the user is returned unchanged, with the settings of its
    `partial`.
    """
    settings: dict[str, Any] = {}
    while True:
        if isinstance(loss_fn, functools.partial):
            args, named = loss_fn.args, loss_fn.keywords
            try:
                given = inspect.signature(loss_fn.func).bind_partial(*args, **named).arguments
            except (TypeError, ValueError):
                given = named
            settings, loss_fn = {**given, **settings}, loss_fn.func
        elif isinstance(loss_fn, nn.Module) and "_orig_mod" in loss_fn._modules:
            loss_fn = loss_fn._modules["_orig_mod"]
        elif _is_compiled(loss_fn):
            loss_fn = inspect.unwrap(loss_fn)
        else:
            break
    kinds: tuple[Any, ...] = type(loss_fn).__mro__
    base = next((kind for kind in kinds if kind.__module__ == _TORCH_LOSSES), None)
    if base is None or any(getattr(kinds[0], n) is not getattr(base, n) for n in _CALLS):
        return loss_fn, settings
    if issubclass(base, nn.CrossEntropyLoss | nn.NLLLoss):
        base = F.cross_entropy  # which has the same count
    return base, {**vars(loss_fn), **dict(loss_fn.named_buffers()), **settings}


def _is_compiled(function: Any) -> bool:
    """Returns whether `function` is the result of `torch.compile`, and not a decorator's of it."""
    own = getattr(function, "_torchdynamo_orig_callable", None)
    return own is not None and getattr(function, "__wrapped__", None) is own


def is_known(loss_fn: Any) -> bool:
    """Returns whether `loss_fn` is a loss of PyTorch or of `hybridtrain.losses`, in any form."""
    function, _ = _unwrapped(loss_fn)
    name = getattr(function, "__name__", "")
    if isinstance(function, type):
        return function.__module__ == _TORCH_LOSSES
    if function is losses.model_output:  # what it is a mean over is up to the model
        return False
    return any(getattr(home, name, None) is function for home in (F, losses))


def function_of(loss_fn: Any) -> Any:
    """Returns the function in a `SumLoss` or `MeanLoss`; any other loss unchanged."""
    if isinstance(loss_fn, SumLoss):
        return loss_fn.loss_sum
    return loss_fn.loss_mean if isinstance(loss_fn, MeanLoss) else loss_fn


def name_of(loss_fn: Any) -> str:
    """Returns the name of a loss, for an error message."""
    named = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    return str(getattr(named, "__name__", type(named).__name__))


def has_count(loss: Loss) -> bool:
    """Returns whether `loss`, a result of `with_count`, has a count."""
    return isinstance(loss, (SumLoss, MeanLoss))


def has_class_targets(loss_fn: LossFn) -> bool:
    """Returns whether `loss_fn` is a cross-entropy or nll, whose targets are classes."""
    loss = with_count(loss_fn)
    return isinstance(loss, MeanLoss) and isinstance(loss.count, TargetCount)


def refuse_ignored(loss_fn: LossFn, inputs: Any, targets: Any) -> None:
    """Refuses labels of -100 for a loss that does not say what it averages over.

    Looks at the integer tensors of the targets, or without targets at `inputs["labels"]`; on the
    CPU alone, so that no step waits for a GPU.

    Raises:
        BatchError: there are such labels, and `loss_fn` would be weighted by samples.
    """
    labels = targets
    if targets is None and isinstance(inputs, Mapping):
        labels = inputs.get("labels")
    if not any(map(_ignores, leaves_of(labels))) or is_known(loss_fn):
        return  # for other losses of PyTorch and ours -100 is a number like others
    raise BatchError(
        f"the labels contain {IGNORED}, and loss_fn={name_of(loss_fn)} does not say what it "
        f"averages over: its micro-batches, batches and replicas would be weighted by their "
        f"samples. Pass PyTorch's cross_entropy or nll_loss, losses.model_output for output.loss "
        f"of transformers, or MeanLoss(loss_fn, count) with "
        f"count(inputs, targets)=(targets != {IGNORED}).sum(), or len(targets) for a mean over "
        f"samples"
    )


def _ignores(labels: Any) -> bool:
    if not isinstance(labels, Tensor) or not labels.is_cpu or not labels.numel():
        return False
    if labels.is_floating_point() or labels.is_complex():
        return False
    return int(labels.min()) == IGNORED


def checked_loss(loss: object) -> Tensor:
    """Returns `loss`, the result of a loss function.

    Raises:
        BatchError: it is not a 0-dim tensor.
        UserError: it was computed from parameters that this process does not have.
    """
    if isinstance(loss, Tensor) and loss.is_meta:
        raise UserError(
            "loss_fn reads parameters or buffers of the model that another process has: with "
            "engine=distributed it can use the output and the targets alone (for an L2 penalty, "
            "weight_decay= of the optimizer), or set engine=local"
        )
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    if isinstance(loss, tuple) and len(loss) == 2:
        raise BatchError(
            "loss_fn must return a 0-dim tensor, not a tuple: the count has to be known before "
            "the backward, so pass SumLoss(loss_sum, count) with loss_sum(output, targets) and "
            "count(inputs, targets)"
        )
    shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
    raise BatchError(f"loss_fn must return a 0-dim tensor, the mean, not {shown}")


def zero_of(output: Any) -> Tensor:
    """Returns 0, from which a backward gives zeros to all that `output` was computed from."""
    tensors = [
        leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    # without an output's own loss, whose backward may divide by 0
    tensors = [tensor for tensor in tensors if tensor.dim()] or tensors
    if not tensors:
        return torch.zeros(())
    return torch.stack([t.reshape(-1)[:0].sum().float() for t in tensors]).sum()
