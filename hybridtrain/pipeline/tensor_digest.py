"""A digest of a tensor's bits, on its device.

`torch.hash_tensor`, an XOR of the words, requires PyTorch 2.14, and pairs of equal words cancel in
it. Here each word is multiplied by an odd factor that depends on its position, so that exchanged
words change the digest.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements that are widened to 64 bits at a time: on a CPU so few that they stay in its cache, and
# that the C library does not keep much memory.
_PIECE_ON_CPU, _PIECE_ON_GPU = 1 << 16, 1 << 20


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor | None:
    """Returns the digest, of shape (1,) or longer; does not wait for the device.

    None if the tensor has no dense memory: it is sparse, nested or on the meta device.
    """
    if tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided:
        return None
    try:
        value = tensor.detach().resolve_conj().resolve_neg()
        if value.is_quantized:  # a view of it as integers keeps a quantizer that reads wrong memory
            value = value.int_repr()
        if value.is_complex():
            value = torch.view_as_real(value)
        words = value.contiguous().view(-1).view(_INTEGERS[value.element_size()])
        size = _PIECE_ON_CPU if words.device.type == "cpu" else _PIECE_ON_GPU
        ends = 2 * min(len(words), size)
        # Odd, so that the product with a word loses none of its bits modulo 2**64.
        factors = torch.arange(1, ends, 2, device=words.device) * 0x9E3779B1 | 1
        parts = words.split(size)
        return torch.stack([(part.to(torch.int64) * factors[: len(part)]).sum() for part in parts])
    except (RuntimeError, NotImplementedError, KeyError, TypeError):
        return None  # it wraps other tensors
