"""Flags and generators that PyTorch keeps for a whole process, and a step's body may change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda

from hybridtrain.world import World

_FLAGS: dict[str, tuple[Any, Any]] = {
    "anomaly detection": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    ),
    "deterministic algorithms": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "cudnn.enabled": (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    "cudnn.benchmark": (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    "cudnn.deterministic": (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    "sdpa_kernel (flash)": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "sdpa_kernel (efficient)": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "sdpa_kernel (math)": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "sdpa_kernel (cudnn)": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
}


def flags() -> dict[str, Any]:
    """Returns the flags that context managers of PyTorch change for all threads, by name."""
    return {name: get() for name, (get, _) in _FLAGS.items()}


def set_flags(values: dict[str, Any]) -> None:
    """Sets the flags that are not as in `values`."""
    for name, value in values.items():
        get, put = _FLAGS[name]
        if get() != value:
            put(value)


def random_states(world: World) -> list[Tensor]:
    """Returns the states of the generators that a script draws from: the CPU's, and its GPU's."""
    states = [torch.get_rng_state()]
    if world.devices[0].type == "cuda":
        states.append(torch.cuda.get_rng_state(world.devices[0]))
    return states


def set_random_states(world: World, states: Sequence[Tensor]) -> None:
    """Sets the generators to what `random_states` has returned in any process."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, world.devices[0])
