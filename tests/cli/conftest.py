import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launch import SMALL, logging_as_before

from hybridtrain.cli import main


@pytest.fixture(autouse=True)
def as_a_user_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher, an empty working directory; what a run does to the process is undone."""
    for key in list(os.environ):
        if key.startswith(("SLURM_", "TORCHELASTIC_")) or key in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(key)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hybridtrain"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with logging_as_before():
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an uninterrupted run of six steps; tests only read it."""
    outputs = tmp_path_factory.mktemp("outputs")
    with pytest.MonkeyPatch.context() as patch, logging_as_before():
        for key in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
            patch.delenv(key, raising=False)
        assert main([*SMALL, f"output_dir={outputs}"]) == 0
    return outputs / "digits"


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run in outputs/digits, where the same command line looks for it."""
    return Path(shutil.copytree(finished, tmp_path / "outputs" / "digits"))
