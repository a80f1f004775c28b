"""The weights of a model in the files of a checkpoint: reading, checking, loading."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridtrain.checkpoint.json_tree import unpack
from hybridtrain.checkpoint.read import CheckpointReader
from hybridtrain.checkpoint.tensor_files import read_tensors, without_aliases
from hybridtrain.errors import CheckpointError, phrase
from hybridtrain.model import HybridModel
from hybridtrain.models.quantized import quantized_weights, stored_names

# the last part of torch's name for get_extra_state()
EXTRA_STATE = "_extra_state"


def read_weights(path: Path, files: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the model's tensors in the checkpoint at `path`, memory-mapped, and other state.

    Args:
        path: the directory of the checkpoint, already verified.
        files: the files listed in its manifest.
    """
    extra = read_tree(path, "model_extra", files) if "model_extra.json" in files else {}
    return read_tensors(path, "model", files), extra


def evaluated_average(path: Path, files: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the averaged weights that a run evaluates with, by parameter name.

    They are the state of a callback such as `EMA`; empty if the run evaluates its plain weights.

    Args:
        path: the checkpoint, already verified.
        files: the files listed in its manifest.
    """
    states = read_tree(path, "callbacks", files) if "callbacks.json" in files else {}
    for state in states.values():
        if isinstance(state, Mapping) and {"average", "updates", "evaluates"} <= state.keys():
            return dict(state["average"]) if state["evaluates"] else {}
    return {}


def with_average(weights: Mapping[str, Tensor], average: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns `weights` with parameters replaced by `average`, under all names of tied ones."""
    aliases = without_aliases(weights)[1] if average else {}
    first = {name: aliases.get(name, name) for name in weights}
    moved = {first[name]: value.to(weights[name].dtype) for name, value in average.items()}
    return {name: moved.get(first[name], value) for name, value in weights.items()}


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors of a module's state dict, and its other entries."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def check_fits(path: Path, weights: Mapping[str, Any], model_state: Mapping[str, Any]) -> None:
    """Checks that `weights` match the model with the state `model_state`.

    Raises:
        CheckpointError: names the first tensors that are missing or unexpected, or whose shape
            differs.
    """
    problems = [f"it lacks {name}" for name in model_state if name not in weights]
    problems += [f"the model has no {name}" for name in weights if name not in model_state]
    problems += [
        f"{name} is {_shape(weights[name])} in the checkpoint and {_shape(model_state[name])} in "
        "the model"
        for name in model_state
        if name in weights
        and _shape(weights[name]) != _shape(model_state[name])
        # a module's extra state may have any shape
        and not name.endswith(EXTRA_STATE)
    ]
    if problems:
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" * (len(problems) > 3))
        raise CheckpointError(
            f"the checkpoint {path} belongs to another model: {shown}. Train the model that saved "
            f"it, or {phrase('start a new run')}"
        )


def read_tree(path: Path, name: str, files: Mapping[str, Any]) -> Any:
    """Returns the tree that `pack` stored under `name`; its tensors are memory-mapped.

    Args:
        path: the directory of the checkpoint.
        name: the stem of the files, such as `optimizer`.
        files: the files listed in its manifest.

    Raises:
        CheckpointError: it cannot be read.
    """
    has_tensors = {f"{name}.safetensors", f"{name}.safetensors.index.json"} & files.keys()
    tensors = read_tensors(path, name, files) if has_tensors else {}
    file = path / f"{name}.json"
    try:
        if file.name not in files:
            raise ValueError("the manifest does not list it")
        return unpack(json.loads(file.read_bytes()), tensors)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None


def _shape(value: Any) -> list[int] | None:
    return list(value.shape) if isinstance(value, Tensor) else None


@torch.no_grad()
def load_weights(
    model: HybridModel,
    reader: CheckpointReader,
    weights: Mapping[str, Tensor],
    extra: Mapping[str, Any],
) -> None:
    """Loads `weights` and other state on every rank; a collective call.

    Args:
        model: its parameters and buffers are overwritten. Each plain weight of a quantized layer is
            quantized when it is read.
        reader: provides each process with the values.
        weights: from `reader.read`, completed by the model's tensors that stay.
        extra: non-tensor state from `reader.read`.
    """
    others = {name: value for name, value in weights.items() if name.endswith(EXTRA_STATE)}
    # copies, because a module may keep the objects it receives
    received = reader.tree({**extra, **others})
    state = model.net.state_dict()
    layers = quantized_weights(model.net)
    replaced = set(stored_names(layers, weights.keys() & layers.keys()))
    weights = {name: value for name, value in weights.items() if name not in replaced}
    local_weights = {name: value for name, value in weights.items() if not value.is_meta}
    has_files = reader.shared or model.world.is_main
    if has_files:
        # Processes with files read them directly; the others get each tensor below.
        model.load_state_dict({**weights, **received})
    placeholders = {name: layer.placeholder for name, layer in layers.items()}
    # Collective for each tensor, in the same order on all processes.
    for name, whole in reader.sent(local_weights, {**state, **placeholders}, received):
        if name in layers:
            layers[name].load_weight(whole)
        else:
            state[name].copy_(whole)
    if not has_files:
        model.load_state_dict({**state, **received})  # for modules with load hooks
