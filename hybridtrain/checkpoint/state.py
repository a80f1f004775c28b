"""What a checkpoint holds, under the user's own names, so that any split can load it.

    step_00000100/
        model.pt       net.state_dict(), on the CPU; net.load_state_dict(torch.load(...)) takes it
        optimizer.pt   the optimizer's state by parameter name, not by number
        state.json     where the run is: step, epoch, row, draws, loss scale
        manifest.json  sizes and checksums of the above (see `store`)

Rank 0 alone reads and writes. The other replicas get its state over the process group, so that no
file system need be shared. A state is loaded tensor by tensor, from a file that is mapped into
memory: there is never a second copy of the model or of the moments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import (
    KeyPath,
    MappingKey,
    tree_flatten_with_path,
    tree_map_only,
    tree_unflatten,
)

from hybridtrain.checkpoint.store import verify
from hybridtrain.errors import CheckpointError
from hybridtrain.model import HybridModel
from hybridtrain.world import World

Writer = Callable[[BinaryIO], None]


def writers(
    model: HybridModel,
    optimizer: Optimizer,
    run: Mapping[str, Any],
) -> dict[str, Writer]:
    """The files of a checkpoint, each with the function that writes it.

    Args:
        model: whose parameters and buffers are kept.
        optimizer: over the parameters of `model`.
        run: what else is to come back, in plain JSON types.
    """

    def write_model(file: BinaryIO) -> None:
        torch.save(_on_cpu(model.state_dict()), file)

    def write_optimizer(file: BinaryIO) -> None:
        torch.save(_on_cpu(optimizer_by_name(model, optimizer)), file)

    def write_state(file: BinaryIO) -> None:
        state = {**run, "draws_step": model.rng.step, "torch": torch.__version__}
        file.write(json.dumps(state, indent=1).encode())

    return {"model.pt": write_model, "optimizer.pt": write_optimizer, "state.json": write_state}


def restore(
    path: Path,
    model: HybridModel,
    optimizer: Optimizer | None = None,
) -> dict[str, Any]:
    """Loads the checkpoint at `path` into what is given; all replicas call it.

    Returns:
        what `writers` was given as `run`.

    Raises:
        CheckpointError: it is missing or damaged, or is of another model; names the tensor.
    """
    world = model.world

    def read() -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
        verify(path)
        weights = _map(path / "model.pt")
        check_fits(path, weights, model.state_dict())
        moments = {}
        if optimizer is not None:
            moments = _map(path / "optimizer.pt")
            check_groups(path, model, optimizer, moments)
        return weights, moments, json.loads((path / "state.json").read_text())

    weights, moments, state = world.on_main(read) or ({}, {}, {})
    state = world.broadcast(state)
    _load_weights(model, weights)
    if optimizer is not None:
        load_optimizer_by_name(model, optimizer, moments)
    model.rng.step = state["draws_step"]
    return state


def check_fits(path: Path, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Makes sure that `weights` are those of the model whose state is `own`.

    Raises:
        CheckpointError: names the first tensors that are missing, too many or of another shape.
    """
    problems = [f"it lacks {name}" for name in own if name not in weights]
    problems += [f"the model has no {name}" for name in weights if name not in own]
    problems += [
        f"{name} is {list(weights[name].shape)} there and {list(own[name].shape)} in the model"
        for name in own
        if name in weights and weights[name].shape != own[name].shape
    ]
    if problems:
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" * (len(problems) > 3))
        raise CheckpointError(
            f"the checkpoint {path} is of another model: {shown}. Train with the model it was made "
            f"with, or choose another run_name"
        )


def optimizer_by_name(model: HybridModel, optimizer: Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` with the user's parameter names in place of numbers."""
    names = _names(model, optimizer)
    state = optimizer.state_dict()
    return {
        "state": {names[number]: entry for number, entry in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def check_groups(
    path: Path, model: HybridModel, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Makes sure that `state`, of `optimizer_by_name`, has the parameters of `optimizer`.

    Raises:
        CheckpointError: its groups of parameters are others.
    """
    numbers = {name: number for number, name in enumerate(_names(model, optimizer))}
    own = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    saved = [[numbers.get(name, -1) for name in group["params"]] for group in state["param_groups"]]
    if saved != own:
        raise CheckpointError(
            f"the optimizer in {path} has other groups of parameters than the one of this run: "
            f"keep optim as it was, or choose another run_name"
        )


def load_optimizer_by_name(
    model: HybridModel, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Takes over what rank 0's `optimizer_by_name` gave: the moments, by name.

    The hyperparameters (learning rate, weight decay, ...) stay those of `optimizer`: where a config
    and a checkpoint differ, the config is what the user wants now.
    """
    parameters = dict(model.named_parameters())

    def place(path: KeyPath, value: Tensor) -> Tensor:
        name, kind = (key.key for key in path[:2] if isinstance(key, MappingKey))
        # where PyTorch keeps them: `load_state_dict` then takes them as they are
        return value if kind == "step" else value.to(parameters[name].device)

    moments = _from_main(model.world, state.get("state"), place)
    optimizer.load_state_dict(
        {
            "state": {
                number: moments[name]
                for number, name in enumerate(_names(model, optimizer))
                if name in moments
            },
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )


def _names(model: HybridModel, optimizer: Optimizer) -> list[str]:
    """The name of each of the optimizer's parameters, in its own numbering."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _on_cpu(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), tree)


def _map(path: Path) -> Any:
    """What `torch.save` wrote; its tensors are read when they are used, and hold no memory."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


@torch.no_grad()
def _load_weights(model: HybridModel, weights: Mapping[str, Tensor]) -> None:
    """Rank 0 loads `weights`, and the others take over what it then has."""
    world = model.world
    world.on_main(lambda: model.load_state_dict(weights))
    if world.size == 1:
        return
    for tensor in model.state_dict().values():
        sent = tensor.cpu().contiguous()  # itself, if it is so
        world.broadcast_tensor(sent)
        if sent is not tensor and not world.is_main:
            tensor.copy_(sent)
    if not world.is_main:
        model.load_state_dict(model.state_dict())  # for the modules that do more than to copy


def _from_main(world: World, tree: Any, place: Callable[[KeyPath, Tensor], Tensor]) -> Any:
    """Rank 0's pytree on every rank, its tensors one by one: copied, and put where they belong."""
    leaves, spec = tree_flatten_with_path(tree if world.is_main else [])
    kinds = [
        (path, (leaf.shape, torch.empty_like(leaf, device="meta").stride(), leaf.dtype))
        if isinstance(leaf, Tensor)
        else (path, leaf)
        for path, leaf in leaves
    ]
    is_tensor = [isinstance(leaf, Tensor) for _, leaf in leaves]
    kinds, is_tensor, spec = world.broadcast((kinds, is_tensor, spec))
    received = []
    for index, ((path, kind), tensor) in enumerate(zip(kinds, is_tensor, strict=True)):
        if not tensor:
            received.append(kind)
            continue
        size, stride, dtype = kind
        value = torch.empty_strided(size, stride, dtype=dtype)
        if world.is_main:
            value.copy_(leaves[index][1])
        world.broadcast_tensor(value.as_strided((value.numel(),), (1,)))  # as it is in memory
        received.append(place(path, value))
    return tree_unflatten(received, spec)
