"""How much each micro-batch counts in a number of the batch, such as a loss, by each of many rules.

A rule counts something in the inputs of a micro-batch: its samples, the labels that are not -100,
what a mask selects. `joining` finds out which of them a number follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hybridtrain._base.accelerator import put
from hybridtrain._base.values import named_leaves
from hybridtrain.errors import ConfigError
from hybridtrain.loss import IGNORED, CountFn, count_of_output
from hybridtrain.piped.calls import ITEMS, Call

_HOST = torch.device("cpu")

# `count(inputs, samples)` of a micro-batch returns how much its number counts; None: it cannot be
# counted.
Count = Callable[[Any, int], int | float | Tensor | None]
Rules = Mapping[str, "Count | _Selected"]


def labels_of(inputs: Any) -> Tensor | None:
    """Returns the argument `labels` if it has classes; None for any other."""
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.dim():
        return None
    return labels


def _sum(inputs: Any, samples: int) -> int:
    return 1


def _samples(inputs: Any, samples: int) -> int:
    return samples


def _attended(inputs: Any, samples: int) -> Tensor | None:
    labels = labels_of(inputs)
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if labels is None or not isinstance(mask, Tensor) or mask.shape != labels.shape:
        return None
    return ((labels != IGNORED) & (mask == 1)).sum()


@dataclass(frozen=True)
class OfSource:
    """The count that the source of a transformers model states.

    Attributes:
        known: `known(inputs, targets)` returns it.
    """

    known: CountFn

    def __call__(self, inputs: Any, samples: int) -> int | float | Tensor | None:
        """Returns the count of a micro-batch; None without labels."""
        targets = ("labels", "start_positions")
        if not isinstance(inputs, Mapping) or all(inputs.get(name) is None for name in targets):
            return None
        return self.known({name: x for name, x in inputs.items() if name != ITEMS}, None)


class _Selected(NamedTuple):
    """A rule that counts what an argument selects.

    Attributes:
        number: the index of the tensor among the tensors of the inputs.
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

    return {f"the mean that {type(net).__name__} takes": OfSource(known), **rules}


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


def shares_by(rules: Rules, batch: CutBatch) -> Shares:
    """Returns the share of each micro-batch by each rule that can be applied.

    It waits for a device at most twice, however many rules there are.
    """
    whole, parts, sizes = batch
    tensors = [leaf for leaf in tree_leaves(whole) if isinstance(leaf, Tensor)]
    # An argument without values as low as a rule ignores needs no counting: most have none.
    lowest = _columns(
        {
            rule.number: tensors[rule.number].min().reshape(1)
            for rule in rules.values()
            if isinstance(rule, _Selected)
            and rule.other_than is not None
            and tensors[rule.number].numel()
        }
    )
    waiting: dict[str, Tensor] = {}
    counts: dict[str, Sequence[float]] = {}
    for name, rule in rules.items():
        if isinstance(rule, _Selected):
            (low,) = lowest.get(rule.number, (-math.inf,))
            if rule.other_than is not None and low > rule.other_than:
                counts[name] = sizes
            else:
                waiting[name] = rule.of_samples(tensors[rule.number])
            continue
        of_parts = [rule(part, size) for part, size in zip(parts, sizes, strict=True)]
        if any(isinstance(number, Tensor) for number in of_parts):
            waiting[name] = torch.stack([torch.as_tensor(n).double() for n in of_parts])
        elif None not in of_parts:
            counts[name] = of_parts  # type: ignore[assignment]
    for name, column in _columns(waiting).items():
        if isinstance(rules[name], _Selected):  # by sample
            ends = accumulate(sizes, initial=0)
            column = [sum(column[start:end]) for start, end in pairwise(ends)]
        counts[name] = column
    shares: dict[str, list[float]] = {}
    for name, numbers in counts.items():
        if rules[name] is _sum:
            shares[name] = [1.0] * len(sizes)
        elif math.isfinite(total := sum(numbers)):
            shares[name] = [number / (total or 1.0) for number in numbers]
    return shares


def _columns(tensors: Mapping[Any, Tensor]) -> dict[Any, list[float]]:
    """Returns 1-dim tensors as lists of numbers; waits once for each device."""
    columns: dict[Any, list[float]] = {}
    of_device: dict[torch.device, list[Any]] = {}
    for key, tensor in tensors.items():
        of_device.setdefault(tensor.device, []).append(key)
    for keys in of_device.values():
        together = put(torch.cat([tensors[key].double() for key in keys]), _HOST).tolist()
        ends = accumulate((len(tensors[key]) for key in keys), initial=0)
        columns |= {key: together[a:b] for key, (a, b) in zip(keys, pairwise(ends), strict=True)}
    return columns


def apart(shares: Sequence[Sequence[float]]) -> float:
    """Returns by how much the shares of a micro-batch differ at most."""
    return max((max(column) - min(column) for column in zip(*shares, strict=True)), default=0.0)
