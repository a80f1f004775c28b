"""States of the whole model and of one process's part: smp 1.x's `state_dict` and its local kin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrain.smp.communication import allgather
from hybridtrain.smp.ranks import CommGroup

PARTIAL = "_smp_is_partial"
"""The key that says that a state is of one process's stages."""


def whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state of the whole model, or of its optimizer, that `state` is, or is a part of.

    With this process's part it is a collective call of the pipeline.
    """
    if not state.get(PARTIAL, False):
        return {name: value for name, value in state.items() if name != PARTIAL}
    return dict(joined(allgather(dict(state), CommGroup.MP_GROUP)))


def joined(parts: list[Any]) -> Any:
    """Returns one object of those that the processes of a pipeline have saved.

    Partial states in it become whole; of anything else the first one counts.
    """
    first = parts[0]
    if not isinstance(first, Mapping):
        return first
    if not first.get(PARTIAL, False):
        return {name: joined([part[name] for part in parts]) for name in first}
    if "param_groups" in first:  # an optimizer's: its groups are of the whole model
        rest = {name: value for name, value in first.items() if name != PARTIAL}
        return {**rest, "state": {n: entry for part in parts for n, entry in part["state"].items()}}
    return {name: value for part in parts for name, value in part.items() if name != PARTIAL}
