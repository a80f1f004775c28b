"""The outputs of micro-batches as the output of the batch, and the proof that they are that.

Tensors are concatenated along dim 0. A number, such as a loss, is a weighted sum: a mean over
samples, labels or anything else that can be counted, or a sum. Which one it is cannot be read from
a model's name, nor from its arguments: many models accept `num_items_in_batch`, and ignore it. So
it is measured for each kind of call, in evaluation mode:

    forward(batch)  =  w0 forward(first sample)  +  w1 forward(the other samples)

with weights by each of the rules (`rules_for`). If the call has labels, all but a few are ignored
in this comparison, so that every rule gives other weights. Gradients of two or three samples are
compared in the same way. A number that follows no rule is refused.

Several rules may fit: a mean over what a mask selects and a mean over samples, as long as the mask
selects all. All of them are kept. Once a batch comes in which they give different weights, some of
its micro-batches are compared in the same way (`narrowed`), and the rules that fit remain. In calls
1, 2, 4, 8 and so on, two micro-batches are compared even if one rule is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from hybridtrain._base.microbatch import merge, output_place
from hybridtrain._base.text_table import counted
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

# What another rule than those tried makes of a number of a later batch, and what rounding does not.
_OTHER_RULE = 0.1
# Smaller losses are rounded too much to compare.
_TINY = 1e-4
# Shares of micro-batches by two rules that differ by less are equal.
_EQUAL_SHARES = 1e-6
# Where the shares differ by less, only some calls compare.
_ALIKE = 1e-3

# `count(inputs, samples)` of a micro-batch returns how much its number counts; None: it cannot be
# counted.
Count = Callable[[Any, int], int | float | Tensor | None]
Rules = Mapping[str, "Count | _Selected"]


def _labels(inputs: Any) -> Tensor | None:
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.dim():
        return None
    return labels


def _sum(inputs: Any, samples: int) -> int:
    return 1


def _samples(inputs: Any, samples: int) -> int:
    return samples


def _attended(inputs: Any, samples: int) -> Tensor | None:
    labels = _labels(inputs)
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if labels is None or not isinstance(mask, Tensor) or mask.shape != labels.shape:
        return None
    return ((labels != IGNORED) & (mask == 1)).sum()


class _Selected(NamedTuple):
    """A rule that counts what an argument selects.

    Attributes:
        number: the index of the tensor among those of the inputs.
        other_than: the value of entries that do not count; None: entries are weights, as in a mask.
        shifted: without the first entry of each sample, as a causal language model does.
    """

    number: int
    other_than: int | None
    shifted: bool

    def of_samples(self, tensor: Tensor) -> Tensor:
        """Returns the count of each sample, of shape (samples,)."""
        entries = tensor[..., 1:] if self.shifted else tensor
        if self.other_than is not None:
            entries = entries != self.other_than
        return entries.reshape(len(tensor), -1).sum(1, dtype=torch.float64)


def _rules_of_arguments(net: nn.Module, call: Call) -> dict[str, _Selected]:
    """Returns the rules that count entries of arguments: labels, masks and weights of any name."""
    padding = getattr(getattr(net, "config", None), "pad_token_id", None)
    ignored = dict.fromkeys((IGNORED, -1, *([padding] if type(padding) is int else ()), 0))
    (whole,) = call.cut([call.samples])
    named = [(place, leaf) for place, leaf in named_leaves(whole) if isinstance(leaf, Tensor)]
    rules: dict[str, _Selected] = {}
    for number, (place, tensor) in enumerate(named):
        if not tensor.dim() or len(tensor) != call.samples or tensor.is_complex():
            continue
        is_weight = tensor.is_floating_point() or tensor.dtype is torch.bool
        values: Sequence[int | None] = (None,) if is_weight else tuple(ignored)
        name = place.strip("[]'") or "argument"
        for shifted in (False, True) if tensor.dim() > 1 else (False,):
            rest = ", except the first of each sample" if shifted else ""
            for value in values:
                chosen = f"what {name} selects" if value is None else f"{name} other than {value}"
                rules[f"a mean over {chosen}{rest}"] = _Selected(number, value, shifted)
    return rules


def rules_for(net: nn.Module, call: Call) -> Rules:
    """Returns the rules for the numbers of a model, by their names, in the order of preference.

    The first is what `hybridtrain.loss` reads from the source of a transformers model, if it knows
    it: that count refuses batches in which the loss averages over something else.
    """
    rules: dict[str, Count | _Selected] = {
        **_rules_of_arguments(net, call),
        "a mean over the labels that are neither -100 nor padding": _attended,
        "a mean over samples": _samples,
        "a sum": _sum,
    }
    try:
        known = count_of_output(net)
    except ConfigError:
        return rules

    def of_source(inputs: Any, samples: int) -> int | float | Tensor | None:
        counted = ("labels", "start_positions")
        if not isinstance(inputs, Mapping) or all(inputs.get(name) is None for name in counted):
            return None
        return known({name: value for name, value in inputs.items() if name != ITEMS}, None)

    return {f"the mean that {type(net).__name__} takes": of_source, **rules}


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
        return _shares({name: self.counts[name] for name in names}, batch)

    def weights(self, shares: Shares) -> list[list[float] | None]:
        """Returns, for each leaf that is a number, its weight in each micro-batch."""
        return [
            None if rules is None else next(shares[rule] for rule in rules if rule in shares)
            for rules in self.rules
        ]

    def may_narrow(self, shares: Shares, is_due: bool) -> bool:
        """Returns whether micro-batches of this batch are to be compared, see `narrowed`."""
        numbers = [number for number, rules in enumerate(self.rules) if rules]
        return any(is_due or self.is_unclear(shares, number) for number in numbers)

    def is_unclear(self, shares: Shares, number: int) -> bool:
        """Returns whether this batch may tell apart the rules of a number."""
        apart = _apart(self._of(shares, number))
        if apart < _EQUAL_SHARES:
            return False
        if number in self.trained and apart > _ALIKE:
            return True
        return apart > 2 * self.unclear.get(number, 0.0)

    def _of(self, shares: Shares, number: int) -> list[list[float]]:
        return [shares[rule] for rule in self.rules[number] or () if rule in shares]


class CutBatch(NamedTuple):
    """A batch, and its micro-batches.

    Attributes:
        whole: the inputs of the batch.
        parts: the inputs of each micro-batch.
        sizes: the number of samples of each micro-batch.
    """

    whole: Any
    parts: Sequence[Any]
    sizes: Sequence[int]


Shares = Mapping[str, list[float]]


def _shares(rules: Rules, batch: CutBatch) -> Shares:
    """Returns the share of each micro-batch by each rule that can be applied.

    It waits for a device at most twice, however many rules there are.
    """
    whole, parts, sizes = batch
    tensors = [leaf for leaf in tree_leaves(whole) if isinstance(leaf, Tensor)]
    # An argument without values as low as a rule ignores needs no counting: most have none.
    low = _numbers({
        rule.number: tensors[rule.number].min()
        for rule in rules.values()
        if isinstance(rule, _Selected) and tensors[rule.number].numel()
    })  # fmt: skip
    waiting: dict[str, Tensor] = {}
    counts: dict[str, Sequence[float]] = {}
    for name, rule in rules.items():
        if isinstance(rule, _Selected):
            ignores = rule.other_than
            if ignores is not None and low.get(rule.number, 0) > ignores:
                counts[name] = sizes
            else:
                waiting[name] = rule.of_samples(tensors[rule.number])
            continue
        of_parts = [rule(part, size) for part, size in zip(parts, sizes, strict=True)]
        if any(isinstance(number, Tensor) for number in of_parts):
            waiting[name] = torch.stack([torch.as_tensor(n).double() for n in of_parts])
        elif None not in of_parts:
            counts[name] = of_parts  # type: ignore[assignment]
    for name, found in _columns(waiting).items():
        if isinstance(rules[name], _Selected):  # by sample
            ends = accumulate(sizes, initial=0)
            found = [sum(found[start:end]) for start, end in pairwise(ends)]
        counts[name] = found
    shares: dict[str, list[float]] = {}
    for name, numbers in counts.items():
        if rules[name] is _sum:
            shares[name] = [1.0] * len(sizes)
        elif all(number >= 0 for number in numbers) and math.isfinite(total := sum(numbers)):
            shares[name] = [number / (total or 1.0) for number in numbers]
    return shares


def _numbers(tensors: Mapping[int, Tensor]) -> dict[int, float]:
    """Returns 0-dim tensors as numbers; waits once for each device."""
    return {key: values[0] for key, values in _columns(
        {key: tensor.reshape(1) for key, tensor in tensors.items()}
    ).items()}  # fmt: skip


def _columns(tensors: Mapping[Any, Tensor]) -> dict[Any, list[float]]:
    """Returns 1-dim tensors as lists of numbers; waits once for each device."""
    columns: dict[Any, list[float]] = {}
    of_device: dict[torch.device, list[Any]] = {}
    for key, tensor in tensors.items():
        of_device.setdefault(tensor.device, []).append(key)
    for keys in of_device.values():
        together = torch.cat([tensors[key].double() for key in keys]).tolist()
        ends = accumulate((len(tensors[key]) for key in keys), initial=0)
        columns |= {key: together[a:b] for key, (a, b) in zip(keys, pairwise(ends), strict=True)}
    return columns


def _apart(shares: Sequence[Sequence[float]]) -> float:
    """Returns by how much the shares of a micro-batch differ at most."""
    return max((max(column) - min(column) for column in zip(*shares, strict=True)), default=0.0)


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
        around = [start], [call.samples - start - sum(sizes)]

        def pieces(sizes: Sequence[int]) -> list[Any]:
            before, after = (size for (size,) in around)
            cut = call.cut([size for size in (before, *sizes, after) if size])
            return cut[bool(before) :][: len(sizes)]

        (whole,), parts = pieces([sum(sizes)]), pieces(sizes)
        self.inputs = [whole, *parts]
        self.weights = _shares(rules, CutBatch(whole, parts, sizes))

    def fitting(self, values: Sequence[Tensor], limit: float) -> list[str]:
        """Returns the rules by which parts add up to the whole, the best and similar ones.

        Args:
            values: for all samples and for each part, tensors of equal shape.
            limit: the largest relative error.
        """
        errors = self.errors(values)
        # rounding explains the rest of the error where the best rule has some of it
        limit = min(limit, max(10 * min(errors.values(), default=math.inf), 1e-6))
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
        return _apart(weights) > _EQUAL_SHARES


def proved(call: Call, runs: Runs, rules: Rules) -> Join:
    """Returns how to join the outputs of micro-batches; compares two parts with the batch.

    Args:
        call: a call of two samples or more.
        runs: the model.
        rules: the rules for its numbers.

    Raises:
        BatchError: the output of the batch is not that of its samples; the message names the leaf.
    """
    few, halves = replace(call, inputs=_with_few_labels(call)), (1, call.samples - 1)
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
    is_half = any(_is_half(leaf) for leaf in leaves) or torch.is_autocast_enabled(
        _device_type(leaves)
    )
    # gradients of as few samples as tell the rules apart
    labels = _labels(call.inputs)
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
        shares: those of the micro-batches, by `join.shares`.
        is_due: compare two micro-batches where only one rule is left, too.

    Raises:
        BatchError: a number follows none of its rules in this batch.
    """
    rules, unclear = list(join.rules), dict(join.unclear)
    outputs: dict[tuple[int, ...], list[Any]] = {}
    for number, names in enumerate(join.rules):
        if names is None or not (is_due or join.is_unclear(shares, number)):
            continue
        known = [name for name in names if name in shares]
        for start, sizes in _telling_apart(call.sizes, [shares[name] for name in known]):
            parts = _Parts(call, start, sizes, {name: join.counts[name] for name in known})
            if (start, *sizes) not in outputs:
                outputs[start, *sizes] = list(map(runs.output, parts.inputs))
            columns = [tree_flatten(output) for output in outputs[start, *sizes]]
            if any(spec != join.spec for _, spec in columns):
                break  # the call itself will see it
            values = [leaves[number].detach().double().reshape(1) for leaves, _ in columns]
            if not all(bool(value.isfinite()) for value in values[:1]):
                continue  # such as the mean of micro-batches that count nothing
            left = _left(parts, values, partial(runs.gradient, number), number in join.trained)
            if not left:
                place = output_place(outputs[start, *sizes][0], number)
                raise _no_rule(parts, values, place)
            rules[number] = [name for name in names if name in left or name not in known]
            unclear[number] = _apart([shares[name] for name in left])
            break
    return replace(join, rules=rules, unclear=unclear)


def _left(
    parts: _Parts,
    values: Sequence[Tensor],
    gradient: Callable[[Any], Tensor | None],
    is_trained: bool,
) -> list[str]:
    """Returns the rules that a number of a later batch may follow; empty if another one holds."""
    if float(values[0].abs()) < _TINY:
        return list(parts.weights)
    errors = parts.errors(values)
    best = min(errors.values(), default=math.inf)
    # by now the number may be small, and its rounding large
    left = [rule for rule, error in errors.items() if error <= max(10 * best, 1e-6)]
    if is_trained and (best > _EXACT or parts.tells_apart(left)):
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

    def apart(first: int, middle: int, end: int) -> float:
        parts = []
        for of_rule in shares:
            one, both = sum(of_rule[first:middle]), sum(of_rule[first:end])
            # a sum has the share 1 in each
            parts.append([one / both if both and both <= 1 + _EQUAL_SHARES else one])
        return _apart(parts)

    count = len(sizes)
    pairs = sorted(range(count - 1), key=lambda k: -apart(k, k + 1, k + 2))
    for k in pairs[:2]:
        yield starts[k], (sizes[k], sizes[k + 1])
    middle = max(range(1, count), key=lambda k: apart(0, k, count))
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
