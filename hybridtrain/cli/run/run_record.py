"""What a checkpoint records for later commands, so that they need neither loss nor training data.

`state.json` of each checkpoint has `dataset` (`run_data.record_of`) and:

loss      `has_class_targets`, and `class_weights`, which `auto` counts in the training data
inputs    the dtypes and shapes of a batch's inputs, for formats of `export` that run the model
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridtrain.checkpoint import read_manifest, read_tree
from hybridtrain.cli.config.schema import Config
from hybridtrain.cli.run.components import build_loss
from hybridtrain.cli.run.context import RunContext
from hybridtrain.cli.run.run_data import record_of
from hybridtrain.loss import resolve


def record_of_run(context: RunContext) -> dict[str, Any]:
    """Returns the record of a run, in JSON types."""
    weights = context.class_weights
    return {
        "dataset": record_of(context.data),
        "loss": {
            "has_class_targets": resolve(context.options.loss_fn).has_class_targets,
            "class_weights": None if weights is None else weights.tolist(),
        },
        "inputs": formats_of(context.example_inputs),
    }


def _recorded(checkpoint: Path, name: str) -> Any:
    """Returns an entry of a checkpoint's record; None: an earlier release saved it."""
    return read_tree(checkpoint, "state", read_manifest(checkpoint)["files"]).get(name)


def recorded_class_weights(checkpoint: Path) -> list[float] | None:
    """Returns the class weights of the training loss, or None."""
    weights: list[float] | None = (_recorded(checkpoint, "loss") or {}).get("class_weights")
    return weights


def had_class_targets(checkpoint: Path, config: Config) -> bool:
    """Returns whether the training loss took classes as targets."""
    recorded = (_recorded(checkpoint, "loss") or {}).get("has_class_targets")
    if recorded is None:  # saved by an earlier release
        return resolve(build_loss(config)).has_class_targets
    return bool(recorded)


def recorded_inputs(checkpoint: Path, samples: int) -> Any:
    """Returns inputs in the format of the training batches, or None."""
    formats = _recorded(checkpoint, "inputs")
    return None if formats is None else inputs_of(formats, samples)


def formats_of(inputs: Any) -> Any:
    """Returns the dtypes and shapes of inputs in JSON types; None: they have other objects.

    A tensor is `{"dtype": ..., "shape": ...}`, and containers are `{"dict": ...}`, `{"list": ...}`
    and `{"tuple": ...}`.
    """
    if isinstance(inputs, Tensor):
        return {"dtype": str(inputs.dtype).removeprefix("torch."), "shape": list(inputs.shape)}
    if type(inputs) is dict and all(isinstance(name, str) for name in inputs):
        parts = {name: formats_of(part) for name, part in inputs.items()}
        return None if None in parts.values() else {"dict": parts}
    if type(inputs) in (list, tuple):
        listed = [formats_of(part) for part in inputs]
        return None if None in listed else {type(inputs).__name__: listed}
    return None


def inputs_of(formats: Any, samples: int) -> Any:
    """Returns inputs of these formats with a different number of samples.

    Integers are 1, because 0 is padding in an attention mask; all other values are 0.
    """
    if "shape" in formats:
        dtype = getattr(torch, formats["dtype"])
        is_integer = not dtype.is_floating_point and dtype is not torch.bool
        return torch.full([samples, *formats["shape"][1:]], int(is_integer), dtype=dtype)
    if "dict" in formats:
        return {name: inputs_of(part, samples) for name, part in formats["dict"].items()}
    ((kind, parts),) = formats.items()
    listed = [inputs_of(part, samples) for part in parts]
    return tuple(listed) if kind == "tuple" else listed
