"""The programs in examples/ run by the command that heads them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from cli_launch import environment
from pages import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
COMMANDS = [
    line
    for path in EXAMPLES
    for line in re.findall(r"^(?:python|torchrun) .*$", path.read_text(encoding="utf-8"), re.M)
]


def test_every_example_is_headed_by_the_command_that_runs_it() -> None:
    for path in EXAMPLES:
        assert f"python examples/{path.name}" in COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_an_example_runs_by_the_command_that_heads_it(command: str) -> None:
    if "transformers" in command and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    launcher, *words = shlex.split(command)
    module = ["-m", "torch.distributed.run"] if launcher == "torchrun" else []
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, *module, *words],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment({"PYTHONPATH": path}),
        cwd=Path.cwd(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
