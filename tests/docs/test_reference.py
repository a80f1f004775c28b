"""The API reference has the public names of the library."""

from __future__ import annotations

import pkgutil
import re

import pytest
from pages import ROOT

import hybridtrain
import hybridtrain.planning

TARGETS = [
    target
    for page in sorted((ROOT / "docs" / "api").glob("*.md"))
    for target in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.M)
]


@pytest.mark.parametrize("package", [hybridtrain, hybridtrain.planning], ids=lambda p: p.__name__)
def test_the_reference_has_every_public_name_of_a_package(package: object) -> None:
    internal = {"Planner", "PlannedLayers"}  # the two halves of `plan`, for HybridModel
    documented = [pkgutil.resolve_name(target) for target in TARGETS]
    for name in set(package.__all__) - internal:
        assert any(getattr(package, name) is found for found in documented), name


def test_every_name_of_the_reference_has_a_docstring() -> None:
    for target in TARGETS:
        assert pkgutil.resolve_name(target).__doc__, target
