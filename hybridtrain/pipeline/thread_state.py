"""The thread-local state of PyTorch that a forward depends on, carried into the worker threads.

A new thread starts with autocast off and gradients on, whatever its creator has set. Other
thread-local modes of the caller, such as `saved_tensors_hooks`, do not reach the threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class ThreadState:
    """Grad mode, inference mode and autocast of a thread."""

    grad: bool
    inference: bool
    autocast_dtypes: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def capture(cls) -> ThreadState:
        """Returns the state of the calling thread."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast_dtypes=tuple(
                (device_type, torch.get_autocast_dtype(device_type))
                for device_type in ("cpu", "cuda")
                if torch.is_autocast_enabled(device_type)
            ),
        )

    def applied(self) -> AbstractContextManager[object]:
        """Returns a context with this grad and inference mode and no autocast, for a whole step."""
        if ThreadState.capture() == replace(self, autocast_dtypes=()):
            return nullcontext()
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
        """Returns a context with this autocast, for a forward alone: a backward runs without."""
        if not self.autocast_dtypes:
            return nullcontext()
        stack = ExitStack()
        for device_type, dtype in self.autocast_dtypes:
            # without the cache of cast weights: all threads share it, and one stage that leaves
            # autocast would empty it under another, so that sums would be grouped at random
            stack.enter_context(torch.autocast(device_type, dtype, cache_enabled=False))
        return stack
