"""Which layers go to which stage, as the user says."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hybridtrain.errors import SplitError
from hybridtrain.graph.layer import Layer
from hybridtrain.planning.by_hand import counts_by_patterns

SplitSpec = str | Sequence[int] | Sequence[str] | Sequence[Sequence[str]]


def check_split(split: Any) -> None:
    """Makes sure that `split` is a text or a list of such items as `split_layers` takes.

    Raises:
        SplitError: it is not.
    """

    def fits(item: Any) -> bool:
        inner = item if isinstance(item, list | tuple) else [item]
        return type(item) is int or all(isinstance(name, str) for name in inner)

    if not isinstance(split, str) and not (isinstance(split, Sequence) and all(map(fits, split))):
        raise SplitError(
            f"pipeline.split={split!r}: use a name, the path of a plan, or a list of layer counts, "
            f"cut points, layer names or name patterns"
        )


def split_layers(layers: Sequence[Layer], stages: int, split: SplitSpec) -> list[int]:
    """How many layers each stage gets, as the user says.

    Args:
        layers: the chain.
        stages: how many stages.
        split: one of

            - a list of `stages` integers: the number of layers of each stage
            - a list of `stages - 1` integers: for each stage but the first, the index of the
              layer that it begins with
            - a list of `stages - 1` names: for each stage but the first, the layer that it
              begins with; a name may also be a group of layers (`blocks` for `blocks.0`)
            - a list of `stages` name patterns, or lists of them: see `counts_by_patterns`

    Raises:
        SplitError: it does not fit the layers; says why and what would.
    """
    n = len(layers)
    given: list[Any] = list(split)
    if stages == 1 and not given:
        return [n]
    numbers = [item for item in given if isinstance(item, int) and not isinstance(item, bool)]
    if len(numbers) == len(given) == stages:
        if sum(numbers) != n or min(numbers) < 1:
            raise SplitError(
                f"pipeline.split={given}: layer counts must be positive and add up to the model's "
                f"{n} layers; these add up to {sum(numbers)}"
            )
        return numbers
    if len(numbers) == len(given) == stages - 1:
        return _between(numbers, n, given)
    if all(isinstance(item, str) for item in given) and len(given) == stages - 1:
        return _between([_index(layers, str(name)) for name in given], n, given)
    if len(given) == stages and all(isinstance(item, str | list | tuple) for item in given):
        return counts_by_patterns(layers, stages, given)
    raise SplitError(
        f"pipeline.split={given} does not describe {stages} stages: give {stages} layer counts, "
        f"{stages - 1} cut point{'s' * (stages != 2)} (indices or names of the layers that begin "
        f"a stage), or {stages} name patterns"
    )


def _between(cuts: Sequence[int], n: int, spec: Sequence[object]) -> list[int]:
    bounds = [0, *cuts, n]
    counts = [end - start for start, end in pairwise(bounds)]
    if min(counts) < 1:
        raise SplitError(
            f"pipeline.split={list(spec)}: cut points must rise and lie between 1 and {n - 1}, so "
            f"that no stage is empty (layer 0 begins stage 0 anyway)"
        )
    return counts


def _index(layers: Sequence[Layer], name: str) -> int:
    for index, layer in enumerate(layers):
        if layer.name == name or layer.name.startswith(f"{name}."):
            return index
    names = [layer.name for layer in layers]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"the layers are: {', '.join(names)}"
    raise SplitError(f"pipeline.split: there is no layer {name!r}; {hint}")
