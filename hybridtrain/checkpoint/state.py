"""The content of a checkpoint, under the user's own names, so that any split can load it.

    step_00000100/
        model.pt       net.state_dict(), on the CPU; net.load_state_dict(torch.load(...)) takes it
        optimizer.pt   the optimizer's state by parameter name, not by number
        state.json     the progress of the run: step, epoch, sample, random state, loss scale
        manifest.json  sizes and checksums of the above (see `store`)

Only rank 0 reads and writes. The other processes receive the state over the process group, so the
file system need not be shared. A state is loaded tensor by tensor from a memory-mapped file, so
there is never a second copy of the model or of the optimizer's state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import KeyPath, MappingKey, tree_map_only, tree_map_with_path

from hybridtrain.checkpoint.store import verify
from hybridtrain.errors import CheckpointError
from hybridtrain.model import HybridModel
from hybridtrain.world import World

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

Writer = Callable[[BinaryIO], object]


def writers(
    model: HybridModel, optimizer: Optimizer, states: Mapping[str, Stateful]
) -> dict[str, Writer]:
    """Returns the names of a checkpoint's files, each with the function that writes it.

    Args:
        model: whose parameters, buffers and random state are saved.
        optimizer: over the parameters of `model`.
        states: what else is saved in `state.json`: JSON's types, under keys that no other has.

    Raises:
        ValueError: two of `states` use the same key.
    """
    # `draws_step` is what the random numbers of layers such as dropout are drawn for
    saved: dict[str, Any] = {"torch": torch.__version__, "draws_step": model.rng.step}
    for name, entry in states.items():
        own = entry.state_dict()
        if own.keys() & saved.keys():
            raise ValueError(f"{name} saves {own.keys() & saved.keys()}, as another state does")
        saved |= own
    return {
        "model.pt": lambda file: torch.save(_on_cpu(model.state_dict()), file),
        "optimizer.pt": lambda file: torch.save(_on_cpu(optimizer_by_name(model, optimizer)), file),
        "state.json": lambda file: file.write(json.dumps(saved, indent=1).encode()),
    }


def restore(
    path: Path,
    model: HybridModel,
    optimizer: Optimizer | None = None,
    states: Mapping[str, Stateful] = MappingProxyType({}),
) -> dict[str, Any]:
    """Loads the checkpoint at `path` into what is given; a collective call.

    Returns:
        all of `state.json`.

    Raises:
        CheckpointError: it is missing or damaged, or is of another model; names the tensor.
    """
    world = model.world

    def read() -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
        verify(path)
        weights = _mapped(path / "model.pt")
        check_fits(path, weights, model.state_dict())
        moments = {}
        if optimizer is not None:
            moments = _mapped(path / "optimizer.pt")
            check_groups(path, model, optimizer, moments)
        return weights, moments, json.loads((path / "state.json").read_text())

    weights, moments, saved = world.on_main(read) or ({}, {}, {})
    saved = world.broadcast(saved)
    _load_weights(model, weights)
    if optimizer is not None:
        load_optimizer_by_name(model, optimizer, moments)
    for entry in states.values():
        entry.load_state_dict(saved)
    model.rng.step = saved["draws_step"]
    return saved


def check_fits(path: Path, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Checks that `weights` fit the model whose state is `own`.

    Raises:
        CheckpointError: names the first tensors that are missing, unknown or of another shape.
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
            f"the checkpoint {path} is of another model: {shown}. Train the model it was made "
            f"with, or start a new run"
        )


def optimizer_by_name(model: HybridModel, optimizer: Optimizer) -> dict[str, Any]:
    """Returns `optimizer.state_dict()` with parameter names in place of numbers."""
    names = parameter_names(model, optimizer)
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
    """Checks that `state`, from `optimizer_by_name`, has the parameter groups of `optimizer`.

    Raises:
        CheckpointError: it has others.
    """
    numbers = {name: number for number, name in enumerate(parameter_names(model, optimizer))}
    own = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    saved = [[numbers.get(name, -1) for name in group["params"]] for group in state["param_groups"]]
    if saved != own:
        raise CheckpointError(
            f"the optimizer in {path} has other groups of parameters than optimizer=: make it with "
            f"the same groups as before, or start a new run"
        )


def load_optimizer_by_name(
    model: HybridModel, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Loads rank 0's `state`, from `optimizer_by_name`, on every rank; a collective call.

    The hyperparameters (learning rate, weight decay, ...) stay those of `optimizer`, because the
    present run's settings are what the user wants now.
    """
    parameters = dict(model.named_parameters())

    def to_param_device(path: KeyPath, value: Tensor) -> Tensor:
        name, kind = (key.key for key in path[:2] if isinstance(key, MappingKey))
        # where PyTorch keeps it, so that `load_state_dict` does not copy it
        return value if kind == "step" else value.to(parameters[name].device)

    moments = _from_main(model.world, state.get("state"), to_param_device)
    optimizer.load_state_dict(
        {
            "state": {
                number: moments[name]
                for number, name in enumerate(parameter_names(model, optimizer))
                if name in moments
            },
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )


def parameter_names(model: HybridModel, optimizer: Optimizer) -> list[str]:
    """Returns the name of each parameter of `optimizer`, in the numbering of its state."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _on_cpu(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), tree)


def _mapped(path: Path) -> Any:
    """Loads a file of `torch.save` with memory-mapped tensors, which are read when used."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


@torch.no_grad()
def _load_weights(model: HybridModel, weights: Mapping[str, Tensor]) -> None:
    """Loads `weights` on rank 0, then copies its state to the other ranks."""
    world = model.world
    world.on_main(lambda: model.load_state_dict(weights))
    if world.size == 1:
        return
    for tensor in model.state_dict().values():
        sent = tensor.cpu().contiguous()  # no copy of a contiguous CPU tensor
        world.broadcast_tensor(sent)
        if sent is not tensor and not world.is_main:
            tensor.copy_(sent)
    if not world.is_main:
        model.load_state_dict(model.state_dict())  # for modules with load hooks


def _from_main(world: World, tree: Any, move: Callable[[KeyPath, Tensor], Tensor]) -> Any:
    """Broadcasts rank 0's pytree; its tensors are copied one by one, then `move`d."""
    kinds = world.broadcast(
        tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), tree)
    )

    def receive(path: KeyPath, kind: Any, *mains: Any) -> Any:
        if not isinstance(kind, Tensor):
            return kind
        value = torch.empty_like(kind, device="cpu")
        if world.is_main:
            value.copy_(*mains)
        world.broadcast_tensor(value.as_strided((value.numel(),), (1,)))  # in memory order
        return move(path, value)

    return tree_map_with_path(receive, kinds, *([tree] if world.is_main else []))
