"""What decides the bits of a result on a device, so that a run can be repeated bitwise.

`repeat_results` sets it for this process where a setting decides. GPU models and libraries also
decide: `facts_of_bits` lists them, for a comparison over the ranks.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

_log = logging.getLogger(__name__)

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def repeat_results(repeat: bool) -> None:
    """Makes PyTorch compute in this process with deterministic algorithms only, or ends that.

    Call it before the first matrix product on a GPU: cuBLAS reads its workspace's size there, and
    repeats its results with a fixed one only. The environment may have set it.
    """
    torch.use_deterministic_algorithms(repeat)
    if not repeat:
        return
    # A value of the user's wins.
    if _CUBLAS not in os.environ:
        os.environ[_CUBLAS] = ":4096:8"
        if torch.cuda.is_initialized():
            _log.warning(
                "this process has used its GPU before: if it has multiplied matrices, results "
                "cannot be repeated bitwise; create the World first, or set %s=:4096:8 for "
                "the process",
                _CUBLAS,
            )
    # uninitialized memory decides no bits of a correct program, and filling it takes time
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False  # chooses kernels by their time


def facts_of_bits(device: torch.device) -> dict[str, str]:
    """Returns what must be equal on all ranks for equal bits, with names for messages.

    Args:
        device: a device of this process, which stands for all of them.
    """
    facts = {"the version of PyTorch": str(torch.__version__)}
    if device.type != "cuda":
        return facts | {
            "the CPU's instruction set": torch.backends.cpu.get_cpu_capability(),
            "the precision of fp32 matrix products": _precision(torch.backends.mkldnn, "matmul"),
        }
    properties, matmul = torch.cuda.get_device_properties(device), torch.backends.cuda.matmul
    sums = (
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_accumulation,
    )
    return facts | {
        # a GPU that is divided, or limited by MPS, has fewer multiprocessors
        "the GPU": f"{properties.name}, {properties.multi_processor_count} multiprocessors",
        "the version of CUDA": str(torch.version.cuda or torch.version.hip),
        "the version of cuDNN": str(torch.backends.cudnn.version()),
        "the version of Triton": _version("triton"),
        "the implementation of FlashAttention": str(_flash_attention() or "PyTorch's"),
        "the precision of fp32 matrix products": _precision(torch.backends.cuda, "matmul"),
        "the precision of fp32 convolutions": _precision(torch.backends.cudnn, "conv"),
        "reduced-precision sums in torch.backends.cuda.matmul": str(sums),
        "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE", "unset"),
        _CUBLAS: os.environ.get(_CUBLAS, "unset"),
    }


def _flash_attention() -> str | None:
    """Returns the implementation, such as FA3, that a script has activated; None: PyTorch's."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return None if current is None else current()


def _precision(backend: Any, operation: str) -> str:
    # unlike `allow_tf32`, it can always be read
    precision: str = getattr(backend, operation).fp32_precision
    return "ieee" if precision == "none" else precision


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
