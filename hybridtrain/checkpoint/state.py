"""What a checkpoint holds, under the user's own names, so that any split can load it.

    step_00000100/
        model.pt       net.state_dict(), on the CPU; net.load_state_dict(torch.load(...)) takes it
        optimizer.pt   the optimizer's state by parameter name, not by number
        state.json     where the run is: step, epoch, row, draws, loss scale
        manifest.json  sizes and checksums of the above (see `store`)

Rank 0 alone reads and writes. The other replicas get its state over the process group, so that no
file system need be shared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

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
        state = {**run, "draws_step": model.draws.step, "torch": torch.__version__}
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
        weights = torch.load(path / "model.pt", map_location="cpu", weights_only=True)
        check_fits(path, weights, model.state_dict())
        state = json.loads((path / "state.json").read_text())
        if optimizer is None:
            return weights, {}, state
        moments = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
        return weights, moments, state

    weights, moments, state = _from_main(world, world.on_main(read))
    model.load_state_dict(weights)
    if optimizer is not None:
        load_optimizer_by_name(path, model, optimizer, moments)
    model.draws.step = state["draws_step"]
    return state  # type: ignore[no-any-return]


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


def load_optimizer_by_name(
    path: Path, model: HybridModel, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Takes over what `optimizer_by_name` gave: the moments, by name.

    The hyperparameters (learning rate, weight decay, ...) stay those of `optimizer`: where a config
    and a checkpoint differ, the config is what the user wants now.

    Raises:
        CheckpointError: the groups of parameters are not those of `optimizer`.
    """
    numbers = {name: number for number, name in enumerate(_names(model, optimizer))}
    own = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    saved = [[numbers.get(name, -1) for name in group["params"]] for group in state["param_groups"]]
    if saved != own:
        raise CheckpointError(
            f"the optimizer in {path} has other groups of parameters than the one of this run: "
            f"keep optim as it was, or choose another run_name"
        )
    optimizer.load_state_dict(
        {
            "state": {numbers[name]: entry for name, entry in state["state"].items()},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )


def _names(model: HybridModel, optimizer: Optimizer) -> list[str]:
    """The name of each of the optimizer's parameters, in its own numbering."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _on_cpu(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), tree)


def _from_main(world: World, tree: Any) -> Any:
    """Rank 0's pytree on every rank, its tensors one by one."""
    if world.size == 1:
        return tree
    leaves, spec = tree_flatten(tree if world.is_main else [])
    kinds = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    kinds, is_tensor, spec = world.broadcast((kinds, is_tensor, spec))
    received = []
    for index, (kind, tensor) in enumerate(zip(kinds, is_tensor, strict=True)):
        if not tensor:
            received.append(kind)
            continue
        value = leaves[index].contiguous() if world.is_main else torch.empty(kind[0], dtype=kind[1])
        world.broadcast_tensor(value)
        received.append(value)
    return tree_unflatten(received, spec)
