"""The outputs of micro-batches as the output of the batch, and the proof that they are that.

Tensors are concatenated along dim 0. A number, such as a loss, is a weighted sum: a mean over
samples, labels or anything else that can be counted, or a sum. Which one it is cannot be read from
a model's name, nor from its arguments: many models accept `num_items_in_batch`, and ignore it. So
it is measured, once for each kind of call, in evaluation mode:

    forward(batch)  =  w0 forward(first sample)  +  w1 forward(the other samples)

with weights by one of the `_RULES`. If the call has labels, all but a few are ignored in this
comparison, so that every rule gives other weights. Gradients of two or three samples are compared
in the same way. A number that follows no rule is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hybridtrain._base.microbatch import merge, output_place
from hybridtrain._base.values import leaves_of, named_leaves, same_constant
from hybridtrain.errors import BatchError, ConfigError, setting
from hybridtrain.head import concatenated
from hybridtrain.loss import IGNORED, count_of_output
from hybridtrain.piped.calls import ITEMS, Call

# Tolerances of a number, and of tensors, relative to the largest value. Another order of summation
# explains 1e-6; outputs in half precision are rounded.
_EXACT, _EXACT_IN_HALF = 1e-4, 2e-2
_SAME, _SAME_IN_HALF = 1e-2, 2e-1
_SAME_GRADIENT, _SAME_GRADIENT_IN_HALF = 1e-3, 5e-2

# `count(inputs)` of a micro-batch returns how much its number counts; None: it cannot be counted.
Count = Callable[[Any, int], int | float | Tensor | None]


def _labels(inputs: Any) -> Tensor | None:
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.dim():
        return None
    return labels


def _sum(inputs: Any, samples: int) -> int:
    return 1


def _samples(inputs: Any, samples: int) -> int:
    return samples


def _valid(inputs: Any, samples: int) -> Tensor | None:
    labels = _labels(inputs)
    return None if labels is None else (labels != IGNORED).sum()


def _shifted(inputs: Any, samples: int) -> Tensor | None:
    labels = _labels(inputs)
    return None if labels is None or labels.dim() < 2 else (labels[..., 1:] != IGNORED).sum()


def _attended(inputs: Any, samples: int) -> Tensor | None:
    labels = _labels(inputs)
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if labels is None or not isinstance(mask, Tensor) or mask.shape != labels.shape:
        return None
    return ((labels != IGNORED) & (mask == 1)).sum()


_RULES: dict[str, Count] = {
    "a sum": _sum,
    "a mean over the labels that are not -100": _valid,
    "a mean over the labels that are not -100, except the first of each sample": _shifted,
    "a mean over the labels that are neither -100 nor padding": _attended,
    "a mean over samples": _samples,
}


def rules_for(net: nn.Module) -> Mapping[str, Count]:
    """Returns the rules for the numbers of a model, by their names, in the order of preference.

    The first is what `hybridtrain.loss` reads from the source of a transformers model, if it knows
    it: that count refuses batches in which the loss averages over something else.
    """
    try:
        known = count_of_output(net)
    except ConfigError:
        return _RULES

    def of_source(inputs: Any, samples: int) -> int | float | Tensor | None:
        counted = ("labels", "start_positions")
        if not isinstance(inputs, Mapping) or all(inputs.get(name) is None for name in counted):
            return None
        return known({name: value for name, value in inputs.items() if name != ITEMS}, None)

    return {f"the mean that {type(net).__name__} takes": of_source, **_RULES}


@dataclass(frozen=True)
class Join:
    """How the outputs of a kind of call are joined.

    Attributes:
        spec: the structure of an output.
        rules: for each leaf that is a number, the name of its rule; None for all others.
        counts: the rules, by name.
    """

    spec: TreeSpec
    rules: Sequence[str | None]
    counts: Mapping[str, Count]

    def weights(self, parts: Sequence[Any], sizes: Sequence[int]) -> list[list[float] | None]:
        """Returns, for each leaf that is a number, its weight in each micro-batch.

        Args:
            parts: the inputs of the micro-batches.
            sizes: their numbers of samples.
        """
        by_rule = {
            rule: _weights(self.counts[rule], parts, sizes) for rule in set(self.rules) if rule
        }
        return [by_rule[rule] if rule else None for rule in self.rules]


def joined(
    spec: TreeSpec, columns: Sequence[Sequence[Any]], weights: Sequence[Sequence[float] | None]
) -> list[Any]:
    """Returns the leaves of the joined output.

    Args:
        spec: the structure of an output.
        columns: the leaves of each micro-batch's output.
        weights: for each leaf that is a number, its weights.
    """
    leaves: list[Any] = []
    for number, column in enumerate(zip(*columns, strict=True)):
        factors = weights[number]
        if len(column) == 1:
            leaves.append(column[0])
        elif factors is not None:
            total = _weighted_sum(column, factors)
            is_whole = not column[0].is_floating_point() and not column[0].is_complex()
            leaves.append(total.round().to(column[0].dtype) if is_whole else total)
        elif isinstance(column[0], Tensor) and column[0].dim():
            leaves.append(concatenated(column))
        else:
            outputs = [tree_unflatten(of_part, spec) for of_part in columns]
            leaves.append(tree_flatten(merge(outputs))[0][number])
    return leaves


def _weighted_sum(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Returns the sum of the values that have a weight: others may be NaN."""
    terms = [value for value, weight in zip(values, weights, strict=True) if weight]
    if not terms:
        return values[0] * 0
    factors = [weight for weight in weights if weight]
    if len(set(factors)) > 1:
        return torch.stack(torch._foreach_mul(terms, factors)).sum(0)
    total = torch.stack(terms)  # equal micro-batches: one product, not one for each of them
    return (total if factors[0] == 1 else total * factors[0]).sum(0)


def _weights(count: Count, parts: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """Returns the share of each micro-batch in a number that follows a rule."""
    if len(parts) == 1 or count is _sum:
        return [1.0] * len(parts)
    counts: list[Any] = [count(part, size) for part, size in zip(parts, sizes, strict=True)]
    if any(isinstance(number, Tensor) for number in counts):
        counts = torch.stack([torch.as_tensor(number) for number in counts]).tolist()
    numbers = [float(number) for number in counts]
    total = sum(numbers) or 1.0
    return [number / total for number in numbers]


class Runs(NamedTuple):
    """How `proved` runs the model, in evaluation mode.

    Attributes:
        output: returns the output for some inputs.
        gradient: returns some elements of the gradient of an output's leaf, by its number, for some
            inputs; None if the leaf has none.
    """

    output: Callable[[Any], Any]
    gradient: Callable[[int, Any], Tensor | None]


class _Parts:
    """Some samples of a batch, together and in two parts.

    Args:
        call: the call with the batch.
        samples: how many of its first samples.
        counts: the rules.

    Attributes:
        inputs: those of all samples, and of each part.
        sizes: the number of samples of each part.
        weights: the weights of the parts, by the name of the rule.
    """

    def __init__(self, call: Call, samples: int, counts: Mapping[str, Count]) -> None:
        self.sizes = [1, samples - 1]
        rest = [call.samples - samples] if samples < call.samples else []
        parts = call.cut([*self.sizes, *rest])[:2]
        self.inputs = [call.cut([samples, *rest])[0], *parts]
        self.weights: dict[str, list[float]] = {}
        for rule, count in counts.items():
            if all(count(x, size) is not None for x, size in zip(parts, self.sizes, strict=True)):
                self.weights[rule] = _weights(count, parts, self.sizes)

    def fitting(self, values: Sequence[Tensor], limit: float) -> list[str]:
        """Returns the rules by which parts add up to the whole, the best and similar ones.

        Args:
            values: for all samples and for each part, tensors of equal shape.
            limit: the largest relative error.
        """
        whole, *parts = values
        errors: dict[str, float] = {}
        for rule, weights in self.weights.items():
            terms = [w * v for w, v in zip(weights, parts, strict=True) if w]
            scale = max(float(term.norm()) for term in (whole, *terms)) or 1.0
            error = float((whole - torch.stack(terms).sum(0)).norm()) / scale if terms else math.inf
            errors[rule] = error if math.isfinite(error) else math.inf
        # rounding explains the rest of the error where the best rule has some of it
        limit = min(limit, max(10 * min(errors.values()), 1e-6))
        return [rule for rule, error in errors.items() if error <= limit]


def proved(call: Call, runs: Runs, counts: Mapping[str, Count]) -> Join:
    """Returns how to join the outputs of micro-batches; compares two parts with the batch.

    Args:
        call: a call of two samples or more.
        runs: the model.
        counts: the rules for its numbers.

    Raises:
        BatchError: the output of the batch is not that of its samples; the message names the leaf.
    """
    few = replace(call, inputs=_with_few_labels(call))
    try:
        batch = _Parts(few, call.samples, counts)
        whole, *outputs = map(runs.output, batch.inputs)
    except Exception:  # of a loss that takes all labels for classes
        few, batch = call, _Parts(call, call.samples, counts)
        whole, *outputs = map(runs.output, batch.inputs)
    leaves_of(whole)
    leaves, spec = tree_flatten(whole)
    columns = []
    for output in outputs:
        of_part, other_spec = tree_flatten(output)
        if other_spec != spec:
            raise BatchError(
                "the structure of the model's output depends on the number of samples "
                f"({_only_in_one(whole, output)}), so the outputs of micro-batches cannot be "
                f"joined. {_WAY_OUT}"
            )
        columns.append(of_part)
    is_half = any(_is_half(leaf) for leaf in leaves) or torch.is_autocast_enabled(
        _device_type(leaves)
    )
    # gradients of as few samples as tell the rules apart
    labels = _labels(call.inputs)
    least = 3 if labels is not None and labels.dim() == 1 else 2
    first = _Parts(few, min(least, call.samples), counts)
    rules: list[str | None] = []
    for number, (leaf, *of_parts) in enumerate(zip(leaves, *columns, strict=True)):
        rule, place = None, output_place(whole, number)
        if isinstance(leaf, Tensor) and not leaf.dim():
            values = [leaf, *of_parts]
            rule = _rule(batch, values, first, partial(runs.gradient, number), is_half, place)
        elif isinstance(leaf, Tensor):
            _check_same(leaf, of_parts, batch.sizes, is_half, place)
        elif not all(same_constant(leaf, other) for other in of_parts):
            raise BatchError(
                f"{place} is a {type(leaf).__name__} that depends on the samples, so the outputs "
                f"of micro-batches cannot be joined. {_WAY_OUT}"
            )
        rules.append(rule)
    return Join(spec, rules, counts)


def _only_in_one(output: Any, other: Any) -> str:
    """Returns the place of a leaf that one of two outputs does not have."""
    places, others = ([name for name, _ in named_leaves(o, "output")] for o in (output, other))
    return next((name for name in places if name not in others), None) or next(
        (name for name in others if name not in places), "containers of another kind"
    )


_WAY_OUT = (
    "Return a tensor with the samples in dim 0, assign a forward that leaves this output out "
    f"(model.forward = ...), or set {setting('chunks', 1)}"
)


def _rule(
    batch: _Parts,
    values: Sequence[Tensor],
    first: _Parts,
    gradient: Callable[[Any], Tensor | None],
    is_half: bool,
    place: str,
) -> str:
    """Returns the name of the rule that a number among the outputs follows.

    Args:
        batch: the batch.
        values: the number for the batch and for each part.
        first: its first samples, whose gradients are compared. They decide between rules that give
            the same number, such as for a classifier that is zero at its start, and find a term
            that hardly changes the number, such as the second loss of a router.
        gradient: returns the gradient of the number for some inputs.
        is_half: whether values are in half precision.
        place: the name of the number.

    Raises:
        BatchError: it follows none.
    """
    numbers = [value.detach().double().reshape(1) for value in values]
    fitting = batch.fitting(numbers, _EXACT_IN_HALF if is_half else _EXACT)
    gradients = [gradient(inputs) for inputs in first.inputs] if fitting else []
    if fitting and any(g is None for g in gradients):
        return fitting[0]  # nobody can train on it
    found = [g for g in gradients if g is not None]
    if found:
        limit = _SAME_GRADIENT_IN_HALF if is_half else _SAME_GRADIENT
        by_gradient = first.fitting(found, limit)
        fitting = [rule for rule in fitting if rule in by_gradient]
    if not fitting:
        of = " and ".join(f"{float(number):.7g}" for number in numbers[1:])
        raise BatchError(
            f"{place} of {sum(batch.sizes)} samples is {float(numbers[0]):.7g}, and {of} for the "
            f"first and for the other samples: by its value and its gradient, it is neither "
            f"{', nor '.join(batch.weights)}, so micro-batches would give a different gradient "
            "than the batch. Compute the loss outside of the model from outputs of its samples, "
            "disable additional terms of the loss (of a router, a z-loss), or set "
            f"{setting('chunks', 1)}"
        )
    alike = (
        parts.weights[rule] == parts.weights[fitting[0]]
        for rule in fitting
        for parts in (batch, first)
    )
    if not all(alike):
        raise BatchError(
            f"{place} may be {', or '.join(fitting)}: these samples do not show which. Compute the "
            "loss outside of the model from outputs of its samples, begin with a batch whose "
            f"samples have other labels, or set {setting('chunks', 1)}"
        )
    return fitting[0]


def _check_same(
    whole: Tensor, of_parts: Sequence[Tensor], sizes: Sequence[int], is_half: bool, place: str
) -> None:
    """Checks that a tensor of the batch is the concatenation of those of the parts.

    Raises:
        BatchError: it is not.
    """
    total = sum(sizes)
    fits = all(
        part.dim() == whole.dim()
        and part.shape[1:] == whole.shape[1:]
        and len(part) * total == len(whole) * size
        for part, size in zip(of_parts, sizes, strict=True)
    )
    if fits and whole.is_floating_point():
        # what is infinite, such as a masked score, is not compared
        together = torch.cat(list(of_parts)).float().nan_to_num(0, 0, 0)
        values = whole.float().nan_to_num(0, 0, 0)
        limit = _SAME_IN_HALF if is_half else _SAME
        if values.numel():
            apart, scale = float((values - together).abs().max()), float(values.abs().max())
            fits = apart <= limit * scale + 1e-6
        problem = "its values for some samples depend on the others"
    else:
        shapes = ", ".join(str(tuple(t.shape)) for t in (whole, *of_parts))
        problem = f"the shapes are {shapes} for {total}, 1 and {total - 1} samples"
    if not fits:
        raise BatchError(
            f"{place} is not the concatenation of the outputs of micro-batches: {problem}. "
            f"{_WAY_OUT}; wrap an argument that all samples share, such as a mask of shape (time, "
            "time), in hybridtrain.shared(...)"
        )


def _with_few_labels(call: Call) -> Any:
    """Returns the inputs with so few labels that all rules differ.

    The first sample keeps its last label; the second its first, one in the middle and its last.
    """
    labels = _labels(call.inputs)
    if labels is None:
        return call.inputs
    if not labels.numel() or (labels.dim() > 1 and labels.shape[1] < 4):
        return call.inputs
    known = labels.max()  # above -100, if any is
    if int(known) == IGNORED:
        return call.inputs
    if labels.dim() == 1:
        few = torch.where(labels == IGNORED, known, labels)
        if len(few) > 2:
            few[1] = IGNORED
    else:
        few = torch.full_like(labels, IGNORED)
        few[0, -1] = few[1, 0] = few[1, labels.shape[1] // 2] = few[1, -1] = known
    return {**call.inputs, "labels": few}


def _is_half(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype.itemsize < 4


def _device_type(leaves: Sequence[Any]) -> str:
    return next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
