"""The autocast context of a precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

AUTOCAST: dict[str, torch.dtype | None] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def autocast(precision: str, device_type: str) -> AbstractContextManager[object]:
    """Returns the context that a forward runs in; for fp32 the caller's own autocast, if any."""
    dtype = AUTOCAST[precision]
    if dtype is None:
        return nullcontext()
    return torch.autocast(device_type, dtype=dtype, cache_enabled=False)
