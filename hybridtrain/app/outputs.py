"""The file of the command `predict`: a model's outputs, sample by sample."""

from __future__ import annotations

import json
from dataclasses import is_dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hybridtrain.app.terminal import finite
from hybridtrain.errors import ConfigError
from hybridtrain.files import atomic_file
from hybridtrain.microbatch import batch_size


def check_output(path: str) -> None:
    """Refuses a file of another format.

    Raises:
        ConfigError: names the suffixes that are known.
    """
    if Path(path).suffix not in (".jsonl", ".npy"):
        raise ConfigError(f"output={path}: the suffix must be .jsonl or .npy")


def write_outputs(path: Path, outputs: Any) -> None:
    """Writes a model's outputs to a file, which appears whole.

    Args:
        path: with the suffix `.jsonl` for a line per sample, NaN and the infinities as null; with
            `.npy` for one array, of outputs that are one tensor.
        outputs: a pytree of tensors with the samples in dim 0; None: there are no samples.

    Raises:
        ConfigError: the format cannot hold them, or the file cannot be written.
    """
    # numpy has no bfloat16
    outputs = tree_map_only(
        Tensor, lambda t: t.float() if t.dtype is torch.bfloat16 else t, outputs
    )
    if path.suffix == ".npy" and not isinstance(outputs, Tensor):
        raise ConfigError(
            f"output={path} holds one tensor, and the model gives a {type(outputs).__name__}: use "
            f"the suffix .jsonl"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            if path.suffix == ".npy":
                np.save(file, outputs.numpy())
                return
            for sample in range(0 if outputs is None else batch_size(outputs)):
                values = tree_map_only(Tensor, itemgetter(sample), outputs)
                values = tree_map_only(Tensor, Tensor.tolist, values)
                values = vars(values) if is_dataclass(values) else values
                file.write((json.dumps(finite(values), allow_nan=False) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"output={path} cannot be written: {error.strerror}") from error
