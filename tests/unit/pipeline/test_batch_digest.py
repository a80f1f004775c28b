"""The digest by which processes compare their batches, for any tensor that a batch may have."""

import pytest
import torch

from hybridtrain.pipeline import batch_digest

TENSORS = {
    "whole": torch.arange(12.0).view(3, 4),
    "one number of a column": torch.arange(12.0).view(3, 4)[1:2, 2],
    "a column": torch.arange(12.0).view(3, 4)[:, 1],
    "0-dim": torch.tensor(3.0),
    "bfloat16": torch.ones(5, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j])[1:].conj(),
    "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag[:1],
    "expanded": torch.tensor([[2.0]]).expand(1, 4),
    "larger than what is compared": torch.arange(1000),
    "with a gradient": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_equal_tensors_have_one_digest_and_others_another(kind):
    tensor = TENSORS[kind]
    copy = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    other = copy.logical_not() if copy.dtype == torch.bool else copy + 1
    assert batch_digest(tensor) == batch_digest(copy)
    assert batch_digest(tensor) != batch_digest(other)


def test_an_empty_tensor_counts_by_its_shape_and_type():
    digests = [torch.empty(0, 3), torch.empty(3, 0), torch.empty(0, 3, dtype=torch.int64)]
    assert len(set(map(batch_digest, digests))) == 3
