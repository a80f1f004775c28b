"""Fixtures for every folder."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def one_intra_op_thread() -> Iterator[None]:
    """Adds up in one order on any machine, for bitwise comparisons.

    The threads of stages have fewer intra-op threads than the main thread, and their number decides
    in which order a kernel adds up.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
