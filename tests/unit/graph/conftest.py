"""The tests of the tracer run all stages in one process, traced as with `engine="distributed"`."""

import pytest


@pytest.fixture(autouse=True)
def all_traced(traced):
    """Every test of this folder is `traced`."""
