"""States of the whole model and of one process's part: smp 1.x's `state_dict` and its local kin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtrain.smp.communication import allgather
from hybridtrain.smp.ranks import CommGroup

PARTIAL = "_smp_is_partial"
"""The key that says that a state is of one process's stages."""


def whole_model_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the model's state that `state` is, or is this process's part of.

    With a part it is a collective call of the pipeline.
    """
    if not state.get(PARTIAL, False):
        return {name: value for name, value in state.items() if name != PARTIAL}
    parts = allgather(dict(state), CommGroup.MP_GROUP)
    return {name: value for part in parts for name, value in part.items() if name != PARTIAL}


def whole_optimizer_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the optimizer's state that `state` is, or is this process's part of; as above."""
    if not state.get(PARTIAL, False):
        return {**state, "state": dict(state["state"])}
    parts = allgather(dict(state), CommGroup.MP_GROUP)
    return _with_entries_of(parts)


def joined(parts: list[Any]) -> Any:
    """Returns one object of those that the processes of a pipeline have saved.

    Partial states in it become whole; of anything else the first one counts.
    """
    first = parts[0]
    if not isinstance(first, Mapping):
        return first
    if not first.get(PARTIAL, False):
        return {name: joined([part[name] for part in parts]) for name in first}
    if "param_groups" in first:
        return _with_entries_of(parts)
    return {name: value for part in parts for name, value in part.items() if name != PARTIAL}


def _with_entries_of(parts: list[Any]) -> dict[str, Any]:
    """Returns the first part, whole: with the entries of all."""
    entries = {number: entry for part in parts for number, entry in part["state"].items()}
    rest = {name: value for name, value in parts[0].items() if name != PARTIAL}
    return {**rest, "state": entries}
