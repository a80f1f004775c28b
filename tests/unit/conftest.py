"""What several test modules of this folder need."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def one_intra_op_thread() -> Iterator[None]:
    """Sums in one order, whatever the machine: bit for bit comparable."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
