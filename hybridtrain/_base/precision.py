"""Autocast, and the thread-local state of PyTorch that worker threads inherit.

A new thread starts with autocast off and gradients on, regardless of its creator's settings. The
threads get the caller's modes and saved-tensor hooks as `torch_private.CallerModes`, and its
context variables as a copy of its context. They do not get the values of a `threading.local`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch

from hybridtrain._base.attention import AUTO, attention_kernel

AUTOCAST: dict[str, torch.dtype | None] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def forward_context(
    precision: str, attention: str, device_type: str
) -> AbstractContextManager[object]:
    """Returns the context of a forward: autocast, and the kernel of attention."""
    cast = autocast(precision, device_type)
    return cast if attention == AUTO else _both(cast, attention_kernel(attention))


@contextmanager
def _both(
    one: AbstractContextManager[object], other: AbstractContextManager[object]
) -> Iterator[None]:
    with one, other:
        yield


def autocast(precision: str, device_type: str) -> AbstractContextManager[object]:
    """Returns the autocast context of a forward; for fp32, the caller's autocast remains."""
    dtype = AUTOCAST[precision]
    if dtype is None:
        return _UNCHANGED
    # The cache of cast weights is one for all threads, see `ThreadState.autocast`.
    return torch.autocast(device_type, dtype=dtype, cache_enabled=False)


class ThreadState(NamedTuple):
    """Grad mode, inference mode and autocast of a thread."""

    grad: bool
    inference: bool
    autocast_dtypes: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def capture(cls) -> ThreadState:
        """Returns the state of the calling thread."""
        dtypes: tuple[tuple[str, torch.dtype], ...] = ()
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                dtypes = *dtypes, (device_type, torch.get_autocast_dtype(device_type))
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dtypes)

    def applied(self) -> AbstractContextManager[object]:
        """Returns a context for a whole step: this grad and inference mode, and no autocast."""
        is_same = torch.is_grad_enabled() == self.grad and not self.autocast_dtypes
        # Most often nothing differs, and contexts take longer than the comparison.
        if is_same and torch.is_inference_mode_enabled() == self.inference:
            return _UNCHANGED
        return self._applied()

    @contextmanager
    def _applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device_type, _ in self.autocast_dtypes:
                stack.enter_context(torch.autocast(device_type, enabled=False))
            yield

    def autocast(self) -> AbstractContextManager[object]:
        """Returns a context with this autocast, for a forward and the loss."""
        if not self.autocast_dtypes:
            return _UNCHANGED
        stack = ExitStack()
        for device_type, dtype in self.autocast_dtypes:
            # without the cache of cast weights: all threads share it, and a stage that leaves
            # autocast would clear it for the others, which would change the grouping of sums at
            # random
            stack.enter_context(torch.autocast(device_type, dtype, cache_enabled=False))
        return stack


_UNCHANGED = nullcontext()
