"""A clone that is not installed: one line that says what to do."""

import os
import sys
from pathlib import Path

import pytest
from support.launch import single, torchrun

ROOT = Path(__file__).parents[2]

# run by every interpreter at its start
NOT_INSTALLED = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "")]
"""

WITHOUT_HYDRA = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hydra":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""


@pytest.mark.parametrize(
    ("start", "missing"), [(NOT_INSTALLED, "its recipes"), (WITHOUT_HYDRA, "hydra")]
)
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_clone_that_is_not_installed_says_so_in_one_line(
    start: str, missing: str, processes: int, tmp_path: Path
) -> None:
    os.symlink(ROOT / "hybridtrain", tmp_path / "hybridtrain")  # in the working directory
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(start)
    env = {"PYTHONPATH": str(tmp_path / "start")}
    words = ["recipe=digits"]
    done = single(words, env=env) if processes == 1 else torchrun(processes, words, env=env)
    said = (
        f"error: hybridtrain is not installed for {sys.executable} ({missing} cannot be imported): "
        f"run {sys.executable} -m pip install -e {tmp_path}\n"
    )
    assert done.stderr.count(said) == 1
    if processes == 1:
        assert (done.returncode, done.stderr) == (2, said)
