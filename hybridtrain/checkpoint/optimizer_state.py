"""The optimizer's state under the names of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import KeyPath, MappingKey

from hybridtrain.checkpoint.shared_files import Source
from hybridtrain.errors import CheckpointError
from hybridtrain.model import HybridModel
from hybridtrain.sharded_optimizer import ShardedOptimizer


def optimizer_by_name(model: HybridModel, optimizer: Optimizer | None) -> dict[str, Any]:
    """Returns `optimizer.state_dict()` with parameter names in place of numbers."""
    if optimizer is None:
        return {"state": {}, "param_groups": []}
    names = parameter_names(model, optimizer)
    state = optimizer.state_dict()
    return {
        # an empty parameter, which stands for none, may have a state too
        "state": {names[n]: entry for n, entry in state["state"].items() if names[n]},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"] if names[number]]}
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
    groups = optimizer_by_name(model, optimizer)["param_groups"]
    own = [sorted(group["params"]) for group in groups]
    elsewhere = {name for name, p in model.net.named_parameters() if p.is_meta}
    try:
        saved = [
            sorted(name for name in group["params"] if name not in elsewhere)
            for group in state["param_groups"]
        ]
        if not all(isinstance(entry, dict) for entry in state["state"].values()):
            raise TypeError("the state of a parameter is a dict")
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"the optimizer's state in {path} is damaged: {error!r}") from None
    if saved != own:
        raise CheckpointError(
            f"the optimizer in {path} has other groups of parameters than optimizer=: make it with "
            f"the same groups as before, or start a new run"
        )


def load_optimizer_by_name(
    model: HybridModel, optimizer: Optimizer, source: Source, state: Mapping[str, Any]
) -> None:
    """Loads a `state`, from `optimizer_by_name`, on every rank; a collective call.

    The hyperparameters (learning rate, weight decay, ...) stay those of `optimizer`, because the
    present run's settings are what the user wants now.
    """
    updated = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
    own = {id(p) for group in updated.param_groups for p in group["params"]}
    parameters = {name: p for name, p in model.named_parameters() if id(p) in own}

    def to_param_device(path: KeyPath, value: Tensor) -> Tensor:
        name, kind = (key.key for key in path[:2] if isinstance(key, MappingKey))
        if name not in parameters:
            return torch.empty(0)  # another process has or updates it
        parameter = parameters[name]
        if kind == "step":  # where PyTorch keeps it, so that `load_state_dict` does not copy it
            return value
        if value.shape == parameter.shape and value.stride() != parameter.stride():
            # in the parameter's memory format, as the optimizer had made it
            moment = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
            return moment.copy_(value)
        return value.to(parameter.device)

    moments = source.tree(state.get("state"), to_param_device)
    optimizer.load_state_dict(
        {
            "state": {
                number: moments[name]
                for number, name in enumerate(parameter_names(model, optimizer))
                if name in moments and name in parameters
            },
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )


def parameter_names(model: HybridModel, optimizer: Optimizer) -> list[str]:
    """Returns the name of each parameter of `optimizer`, in the numbering of its state.

    "" for the one that stands for none, in a process whose stages have nothing to train.
    """
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    # any other one than an empty one is a mistake
    return [name_of[id(p)] if p.numel() or id(p) in name_of else "" for p in trained]
