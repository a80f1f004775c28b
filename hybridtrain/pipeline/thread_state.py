"""The thread-local state of PyTorch that a forward depends on, carried into the worker threads.

A new thread starts with autocast off and gradients on, whatever its creator has set. Other
thread-local modes of the caller's, such as `saved_tensors_hooks`, do not reach the threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ThreadState:
    """Grad mode, inference mode and autocast, as one thread has them."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def capture(cls) -> ThreadState:
        """What the calling thread has now."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (device_type, torch.get_autocast_dtype(device_type))
                for device_type in ("cpu", "cuda")
                if torch.is_autocast_enabled(device_type)
            ),
        )

    def entered(self) -> AbstractContextManager[object]:
        """Sets grad and inference mode in this thread, for all that a step does."""
        same = torch.is_grad_enabled() == self.grad
        if same and torch.is_inference_mode_enabled() == self.inference:
            return nullcontext()
        return self._entered()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
            yield

    def forward(self) -> AbstractContextManager[object]:
        """Sets autocast in this thread, for a forward alone: a backward runs without it."""
        if not self.autocast:
            return nullcontext()
        stack = ExitStack()
        for device_type, dtype in self.autocast:
            # without the cache of cast weights: it is one for all threads, and one stage's exit
            # would empty it under another, so that sums would be grouped by chance
            stack.enter_context(torch.autocast(device_type, dtype, cache_enabled=False))
        return stack
