"""An import of bitsandbytes that downloads no code.

On CPUs with AVX512-BF16, its import downloads a kernel for generation, which is not used here, from
the Hub if the package `kernels` is installed, and warns if it is not.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_kernel_downloads() -> Iterator[None]:
    """Hides the package `kernels` in the block, unless it is already imported."""
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    blocked, quiet = "kernels" not in sys.modules, log.disabled
    if blocked:
        sys.modules["kernels"] = None  # type: ignore[assignment]
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = quiet
        if blocked:
            del sys.modules["kernels"]
