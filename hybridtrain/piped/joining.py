"""The outputs of micro-batches as the output of the batch, and the proof that they are that.

Tensors are concatenated along dim 0. A number, such as a loss, is a weighted sum: a mean over
samples, labels or anything else that can be counted, or a sum. Which one it is cannot be read from
a model's name, nor from its arguments: many models accept `num_items_in_batch`, and ignore it. So
it is measured for each kind of call, in evaluation mode:

    forward(batch)  =  w0 forward(first sample)  +  w1 forward(the other samples)

with weights by each of many rules (`shares`). If the call has labels, all but a few are ignored in
this comparison, so that every rule gives other weights. Gradients of two or three samples are
compared in the same way. A number that follows no rule is refused.

Several rules may fit: a mean over what a mask selects and a mean over samples, as long as the mask
selects all. All of them are kept. Once a batch comes in which they give different weights, some of
its micro-batches are compared in the same way (`narrowed`), and the rules that fit remain. In calls
1, 2, 4, 8 and so on, two micro-batches are compared even if one rule is left.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hybridtrain._base.accelerator import accelerator_of
from hybridtrain._base.microbatch import merge, output_place
from hybridtrain._base.text_table import counted
from hybridtrain._base.values import leaves_of, named_leaves, same_constant
from hybridtrain.errors import BatchError, setting
from hybridtrain.head import concatenated
from hybridtrain.loss import IGNORED
from hybridtrain.piped.calls import Call
from hybridtrain.piped.shares import (
    CutBatch,
    OfSource,
    Rules,
    Shares,
    apart,
    labels_of,
    shares_by,
)

log = logging.getLogger("hybridtrain")

# Tolerances of a number, and of tensors, relative to the largest value. Another order of summation
# explains 1e-6; outputs in half precision are rounded.
_EXACT, _EXACT_IN_HALF = 1e-4, 2e-2
_SAME, _SAME_IN_HALF = 1e-2, 2e-1
_SAME_GRADIENT, _SAME_GRADIENT_IN_HALF = 1e-3, 5e-2

# Rounding explains a relative error up to this, even if another rule fits better by chance.
_ROUNDING, _ROUNDING_IN_HALF = 1e-5, 2e-2
# A larger relative error in a later batch shows that the number follows another rule.
_OTHER_RULE = 0.1
# Smaller losses are rounded too much to compare.
_TINY = 1e-4
# Shares of micro-batches by two rules that differ by less are equal.
_EQUAL_SHARES = 1e-6
# Where the shares differ by less, only some calls compare.
_ALIKE = 1e-3


@dataclass(frozen=True)
class Join:
    """How the outputs of a kind of call are joined.

    Attributes:
        spec: the structure of an output.
        rules: for each leaf that is a number, the names of the rules that it may follow, the
            preferred one first; None for all others.
        trained: the indices of the numbers that have a gradient.
        counts: the rules, by name.
        unclear: how much shares of micro-batches differed at most where a comparison left several
            rules, by the index of the leaf.
    """

    spec: TreeSpec
    rules: Sequence[Sequence[str] | None]
    trained: frozenset[int]
    counts: Rules
    unclear: Mapping[int, float] = field(default_factory=dict)

    def shares(self, batch: CutBatch) -> Shares:
        """Returns the share of each micro-batch in a number, by each rule that fits the inputs."""
        names = dict.fromkeys(chain.from_iterable(filter(None, self.rules)))
        return shares_by({name: self.counts[name] for name in names}, batch)

    def weights(self, shares: Shares) -> list[list[float] | None]:
        """Returns, for each leaf that is a number, its weight in each micro-batch.

        Raises:
            BatchError: no rule of a number can be applied to this batch.
        """
        weights: list[list[float] | None] = []
        for rules in self.rules:
            by_rule = None if rules is None else [shares[rule] for rule in rules if rule in shares]
            if by_rule == []:
                raise BatchError(
                    f"a number among the outputs is {', or '.join(rules or ())}, which cannot be "
                    "counted in this batch: pass finite values, and arguments of the same shapes "
                    f"as before, or set {setting('chunks', 1)}"
                )
            weights.append(by_rule[0] if by_rule else None)
        return weights

    def may_narrow(self, shares: Shares, is_due: bool) -> bool:
        """Returns whether micro-batches of this batch are to be compared, see `narrowed`."""
        numbers = [number for number, rules in enumerate(self.rules) if rules]
        return any(is_due or self.is_unclear(shares, number) for number in numbers)

    def is_unclear(self, shares: Shares, number: int) -> bool:
        """Returns whether this batch may tell apart the rules of a number."""
        difference = apart(self._shares_of(shares, number))
        if difference < _EQUAL_SHARES:
            return False
        if number in self.trained and difference > _ALIKE:
            return True
        return difference > 2 * self.unclear.get(number, 0.0)

    def _shares_of(self, shares: Shares, number: int) -> list[list[float]]:
        return [shares[rule] for rule in self.rules[number] or () if rule in shares]


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
        start: the first of the samples.
        sizes: the number of samples of each part.
        rules: the rules.

    Attributes:
        inputs: those of all samples, and of each part.
        sizes: as passed.
        weights: the weights of the parts, by the name of the rule.
    """

    def __init__(self, call: Call, start: int, sizes: Sequence[int], rules: Rules) -> None:
        self.sizes = sizes
        rest = call.samples - start - sum(sizes)

        def pieces(sizes: Sequence[int]) -> list[Any]:
            cut = call.cut([size for size in (start, *sizes, rest) if size])
            return cut[bool(start) :][: len(sizes)]

        (whole,), parts = pieces([sum(sizes)]), pieces(sizes)
        self.inputs = [whole, *parts]
        self.weights = shares_by(rules, CutBatch(whole, parts, sizes))

    def fitting(self, values: Sequence[Tensor], limit: float) -> list[str]:
        """Returns the rules by which parts add up to the whole, the best and similar ones.

        Args:
            values: for all samples and for each part, tensors of equal shape.
            limit: the largest relative error.
        """
        errors = self.errors(values)
        # rounding explains the rest of the error where the best rule has some of it
        limit = min(limit, max(10 * min(errors.values(), default=math.inf), _ROUNDING))
        return [rule for rule, error in errors.items() if error <= limit]

    def errors(self, values: Sequence[Tensor]) -> dict[str, float]:
        """Returns the relative error of each rule; the values as in `fitting`."""
        whole, *parts = values
        errors: dict[str, float] = {}
        for rule, weights in self.weights.items():
            terms = [w * v for w, v in zip(weights, parts, strict=True) if w]
            scale = max(float(term.norm()) for term in (whole, *terms)) or 1.0
            error = float((whole - torch.stack(terms).sum(0)).norm()) / scale if terms else math.inf
            errors[rule] = error if math.isfinite(error) else math.inf
        return errors

    def tells_apart(self, rules: Sequence[str]) -> bool:
        """Returns whether the weights of the parts differ between the rules."""
        weights = [self.weights[rule] for rule in rules if rule in self.weights]
        return apart(weights) > _EQUAL_SHARES


def proved(call: Call, runs: Runs, rules: Rules) -> Join:
    """Returns how to join the outputs of micro-batches; compares two parts with the batch.

    Args:
        call: a call of two samples or more.
        runs: the model.
        rules: the rules for its numbers.

    Raises:
        BatchError: the output of the batch is not that of its samples; the message names the leaf.
    """
    is_known = any(isinstance(rule, OfSource) for rule in rules.values())
    few, halves = replace(call, inputs=_with_few_labels(call, is_known)), (1, call.samples - 1)
    try:
        batch = _Parts(few, 0, halves, rules)
        whole, *outputs = map(runs.output, batch.inputs)
    except Exception:  # of a loss that takes all labels for classes
        few, batch = call, _Parts(call, 0, halves, rules)
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
    is_half = _is_in_half(leaves)
    # gradients of as few samples as tell the rules apart
    labels = labels_of(call.inputs)
    least = 3 if labels is not None and labels.dim() == 1 else 2
    first = _Parts(few, 0, (1, min(least, call.samples) - 1), rules)
    of_leaves: list[Sequence[str] | None] = []
    trained: set[int] = set()
    for number, (leaf, *of_parts) in enumerate(zip(leaves, *columns, strict=True)):
        names, place = None, output_place(whole, number)
        if isinstance(leaf, Tensor) and not leaf.dim():
            values = [leaf, *of_parts]
            names, has_gradient = _fitting(
                batch, values, first, partial(runs.gradient, number), is_half, place
            )
            trained |= {number} if has_gradient else set()
        elif isinstance(leaf, Tensor):
            _check_same(leaf, of_parts, batch.sizes, is_half, place)
        elif not all(same_constant(leaf, other) for other in of_parts):
            raise BatchError(
                f"{place} is a {type(leaf).__name__} that depends on the samples, so the outputs "
                f"of micro-batches cannot be joined. {_WAY_OUT}"
            )
        of_leaves.append(names)
    return Join(spec, of_leaves, frozenset(trained), rules)


def narrowed(join: Join, call: Call, runs: Runs, shares: Shares, is_due: bool) -> Join:
    """Returns the join without rules that do not fit this batch.

    Compares some of its micro-batches if rules give different weights, or if `is_due`.

    Args:
        join: how outputs have been joined so far.
        call: a call with two micro-batches or more.
        runs: the model.
        shares: the shares of the micro-batches, from `join.shares`.
        is_due: compare two micro-batches where only one rule is left, too.

    Raises:
        BatchError: a number follows none of its rules in this batch.
    """
    rules, unclear = list(join.rules), dict(join.unclear)
    outputs: dict[tuple[int, ...], list[Any]] = {}
    for number, names in enumerate(join.rules):
        if names is None or not (is_due or join.is_unclear(shares, number)):
            continue
        applicable = [name for name in names if name in shares]
        if not applicable:
            continue  # `weights` will say so
        for start, sizes in _telling_apart(call.sizes, [shares[name] for name in applicable]):
            parts = _Parts(call, start, sizes, {name: join.counts[name] for name in applicable})
            if (start, *sizes) not in outputs:
                outputs[start, *sizes] = list(map(runs.output, parts.inputs))
            columns = [tree_flatten(output) for output in outputs[start, *sizes]]
            if any(spec != join.spec for _, spec in columns):
                break  # the call itself will see it
            values = [leaves[number].detach().double().reshape(1) for leaves, _ in columns]
            if not bool(values[0].isfinite()):
                continue  # such as the mean of micro-batches that count nothing
            gradient = partial(runs.gradient, number) if number in join.trained else None
            left = _left(parts, values, gradient, _is_in_half(columns[0][0]))
            if not left:
                place = output_place(outputs[start, *sizes][0], number)
                raise _no_rule(parts, values, place)
            rules[number] = [name for name in names if name in left or name not in applicable]
            unclear[number] = apart([shares[name] for name in left])
            if number not in join.unclear and unclear[number] > _ALIKE:
                log.info(
                    "%s does not show yet what it is a mean of (it is %.3g): until it does, each "
                    "call compares some micro-batches",
                    output_place(outputs[start, *sizes][0], number), float(values[0]),
                )  # fmt: skip
            break
    return replace(join, rules=rules, unclear=unclear)


def _left(
    parts: _Parts,
    values: Sequence[Tensor],
    gradient: Callable[[Any], Tensor | None] | None,
    is_half: bool,
) -> list[str]:
    """Returns the rules that a number of a later batch may follow; empty if another one holds."""
    if float(values[0].abs()) < _TINY:
        return list(parts.weights)
    errors = parts.errors(values)
    best = min(errors.values(), default=math.inf)
    # by now the number may be small, and its rounding large
    limit = max(10 * best, _ROUNDING_IN_HALF if is_half else _ROUNDING)
    left = [rule for rule, error in errors.items() if error <= limit]
    if gradient is not None and (best > _EXACT or parts.tells_apart(left)):
        gradients = [gradient(inputs) for inputs in parts.inputs]
        found = [g for g in gradients if g is not None]
        if len(found) == len(gradients) and bool(found[0].any()):
            errors = parts.errors(found)
            best = min(errors.values())
            by_gradient = parts.fitting(found, _OTHER_RULE)
            left = [rule for rule in left if rule in by_gradient] or by_gradient
    return left if best <= _OTHER_RULE else []


def _telling_apart(
    sizes: Sequence[int], shares: Sequence[Sequence[float]]
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yields samples in two parts whose shares differ between the rules, the best first.

    Two micro-batches if possible, because a whole batch needs more memory; the whole batch last.

    Args:
        sizes: the number of samples of each micro-batch.
        shares: for each rule, the share of each micro-batch.

    Yields:
        the first sample, and the number of samples of each part.
    """
    starts = [*accumulate(sizes, initial=0)]

    def difference(first: int, middle: int, end: int) -> float:
        parts = []
        for of_rule in shares:
            one, both = sum(of_rule[first:middle]), sum(of_rule[first:end])
            # a sum has the share 1 in each
            parts.append([one / both if both and both <= 1 + _EQUAL_SHARES else one])
        return apart(parts)

    count = len(sizes)
    pairs = sorted(range(count - 1), key=lambda k: -difference(k, k + 1, k + 2))
    for k in pairs[:2]:
        yield starts[k], (sizes[k], sizes[k + 1])
    middle = max(range(1, count), key=lambda k: difference(0, k, count))
    yield 0, (starts[middle], starts[-1] - starts[middle])


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


def _fitting(
    batch: _Parts,
    values: Sequence[Tensor],
    first: _Parts,
    gradient: Callable[[Any], Tensor | None],
    is_half: bool,
    place: str,
) -> tuple[list[str], bool]:
    """Returns the names of the rules that a number follows, and whether it has a gradient.

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
    if not bool(numbers[0].isfinite()):  # such as a mean over nothing: a later batch will show it
        return list(batch.weights), True
    fitting = batch.fitting(numbers, _EXACT_IN_HALF if is_half else _EXACT)
    gradients = [gradient(inputs) for inputs in first.inputs] if fitting else []
    found = [g for g in gradients if g is not None]
    if fitting and len(found) < len(gradients):
        return fitting, False  # nobody can train on it
    if found:
        limit = _SAME_GRADIENT_IN_HALF if is_half else _SAME_GRADIENT
        by_gradient = first.fitting(found, limit)
        fitting = [rule for rule in fitting if rule in by_gradient]
    if not fitting:
        raise _no_rule(batch, numbers, place)
    return fitting, True


def _no_rule(parts: _Parts, numbers: Sequence[Tensor], place: str) -> BatchError:
    of = " and ".join(f"{float(number):.7g}" for number in numbers[1:])
    first, *others = parts.sizes
    return BatchError(
        f"{place} of {sum(parts.sizes)} samples is {float(numbers[0]):.7g}, and {of} for "
        f"{counted(first, 'sample')} and for the other {sum(others)}: by its value and its "
        "gradient, it is neither a sum, nor a mean over samples or over labels that are not "
        f"{IGNORED}, nor over what another argument selects, so micro-batches would give a "
        "different gradient than the batch. Compute the loss outside of the model from outputs of "
        "its samples, disable additional terms of the loss (of a router, a z-loss), or set "
        f"{setting('chunks', 1)}"
    )


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
    if fits and not (whole.is_floating_point() or whole.is_complex()):
        # of equal scores, an argmax may take another one for another number of samples
        together = torch.cat(list(of_parts))
        different = int((whole != together).sum())
        fits = different <= 1 + (_SAME_IN_HALF if is_half else 5 * _SAME) * whole.numel()
        problem = "its values for some samples depend on the others"
    elif fits and whole.is_floating_point():
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


def _with_few_labels(call: Call, is_known: bool) -> Any:
    """Returns the inputs with so few labels that all rules differ.

    The first sample keeps its last label; the second its first, one in the middle and its last.

    Args:
        call: the call.
        is_known: whether the model is known to ignore labels of -100.
    """
    labels = labels_of(call.inputs)
    if labels is None:
        return call.inputs
    if not labels.numel() or (labels.dim() > 1 and labels.shape[1] < 4):
        return call.inputs
    known = labels.max()  # above -100, if any is
    if int(known) == IGNORED:
        return call.inputs
    # On a GPU, a label that the loss takes for a class ends the process.
    on_host = accelerator_of(labels.device) is None
    if not (is_known or on_host or bool((labels == IGNORED).any())):
        return call.inputs
    if labels.dim() == 1:
        few = torch.where(labels == IGNORED, known, labels)
        if len(few) > 2:
            few[1] = IGNORED
    else:
        few = torch.full_like(labels, IGNORED)
        few[0, -1] = few[1, 0] = few[1, labels.shape[1] // 2] = few[1, -1] = known
    return {**call.inputs, "labels": few}


def _is_in_half(leaves: Sequence[Any]) -> bool:
    """Returns whether an output is in half precision, or was computed in it."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    device = tensors[0].device.type if tensors else "cpu"
    return torch.is_autocast_enabled(device) or any(
        tensor.is_floating_point() and tensor.dtype.itemsize < 4 for tensor in tensors
    )
