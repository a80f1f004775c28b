import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launch import logging_as_before


@pytest.fixture(autouse=True)
def as_a_reader_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """No launcher and an empty working directory; what a run does to the process is undone."""
    for key in list(os.environ):
        if key.startswith(("SLURM_", "TORCHELASTIC_")) or key in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(key)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with logging_as_before():
        yield
    for name in [name for name in sys.modules if name.startswith("my_project")]:
        del sys.modules[name]
