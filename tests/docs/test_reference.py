"""The API reference has the public names of the library."""

from __future__ import annotations

import pkgutil
import re

from pages import ROOT

import hybridtrain

TARGETS = [
    target
    for page in sorted((ROOT / "docs" / "api").glob("*.md"))
    for target in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.M)
]


def test_the_reference_has_every_public_name() -> None:
    documented = [pkgutil.resolve_name(target) for target in TARGETS]
    for name in hybridtrain.__all__:
        assert any(getattr(hybridtrain, name) is found for found in documented), name


def test_every_name_of_the_reference_has_a_docstring() -> None:
    for target in TARGETS:
        assert pkgutil.resolve_name(target).__doc__, target
