"""The kernel that computes `scaled_dot_product_attention`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hybridtrain.errors import ConfigError, setting

AUTO = "auto"

_KERNELS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def attention_kernel(kernel: str) -> AbstractContextManager[object]:
    """Returns a context in which all threads use this kernel; `auto` keeps the caller's.

    A backward uses the kernel of its forward, and needs no context.
    """
    return _UNCHANGED if kernel == AUTO else sdpa_kernel(_KERNELS[kernel])


def check_attention(kernel: str, devices: Sequence[torch.device], dtype: torch.dtype) -> None:
    """Checks that PyTorch has a kernel for this type on these devices, by running it.

    Raises:
        ConfigError: it has not; the message lists the kernels that it has.
    """
    if kernel == AUTO:
        return
    for device in dict.fromkeys(devices):
        if not _runs(kernel, device, dtype):
            others = [AUTO, *filter(partial(_runs, device=device, dtype=dtype), _KERNELS)]
            raise ConfigError(
                f"{setting('attention', kernel)}: PyTorch has no such kernel for {dtype} on "
                f"{device}; use {', '.join(others[:-1])} or {others[-1]}"
            )


def _runs(kernel: str, device: torch.device, dtype: torch.dtype) -> bool:
    tensor = torch.zeros(1, 1, 64, 64, dtype=dtype, device=device)
    with warnings.catch_warnings(), attention_kernel(kernel):
        warnings.simplefilter("ignore")  # the reasons
        try:
            scaled_dot_product_attention(tensor, tensor, tensor, is_causal=True)
        except RuntimeError:
            return False
    return True


_UNCHANGED = nullcontext()
