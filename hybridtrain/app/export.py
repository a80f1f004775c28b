"""The trained weights as one safetensors file, for programs outside this project."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save

from hybridtrain.files import write_atomically
from hybridtrain.model import HybridModel


def export_model(model: HybridModel, path: Path) -> None:
    """Writes `model.state_dict()` to `path`.

    `net.load_state_dict(safetensors.torch.load_file(path))` reads it back.
    """
    tensors = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    # Through bytes: only the owner may read the files that safetensors' own save_file makes.
    write_atomically(path, save(tensors))
