"""The programs in examples/ run by the command that heads them."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys

import pytest
from pages import ROOT
from support.cases import thorough
from support.launch import torchrun_script

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
COMMANDS = [
    line
    for path in EXAMPLES
    for line in re.findall(r"^(?:python|torchrun) .*$", path.read_text(encoding="utf-8"), re.M)
]


def test_every_example_is_headed_by_the_command_that_runs_it() -> None:
    for path in EXAMPLES:
        assert f"python examples/{path.name}" in COMMANDS


SLOW = [line for line in COMMANDS if "transformers" in line or "torchrun" in line]


@pytest.mark.parametrize(
    "command", [*(line for line in COMMANDS if line not in SLOW), *thorough(SLOW)]
)
@pytest.mark.quick_cases("python examples/plan_in_a_notebook.py", "python examples/train_step.py")
def test_an_example_runs_by_the_command_that_heads_it(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "transformers" in command:
        pytest.importorskip("transformers")
    launcher, *words = shlex.split(command)
    script = str(ROOT / words[-1])
    if launcher == "torchrun":
        assert words[:-1] == ["--standalone", "--nproc-per-node", "2"]
        printed = torchrun_script(2, script)
    elif "smp" in command:  # which changes functions of PyTorch for the life of its process
        printed = subprocess.run(
            [sys.executable, script], check=True, capture_output=True, text=True, timeout=300
        ).stdout
    else:  # in this process, where torch has been imported
        assert len(words) == 1
        monkeypatch.setattr(sys, "argv", [script])
        runpy.run_path(script, run_name="__main__")
        printed = capsys.readouterr().out
    assert printed.strip()
