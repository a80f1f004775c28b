"""The trained weights as one safetensors file, for programs that know nothing of this project."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import save

from hybridtrain.model import HybridModel


def export_model(model: HybridModel, path: Path) -> None:
    """Writes `net.state_dict()` to `path`, whole or not at all.

    `net.load_state_dict(safetensors.torch.load_file(path))` reads it back.
    """
    tensors = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # through bytes: safetensors' own save_file makes files that their owner alone can read
    temporary.write_bytes(save(tensors))
    temporary.replace(path)
