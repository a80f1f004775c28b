"""The tests of the tracer run all stages in one process, traced as with `engine="distributed"`."""

import pytest

from hybridtrain import World


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    monkeypatch.setattr(World, "runs_forward", False)
