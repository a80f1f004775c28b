"""A schedule of one's own on the command line, as a user types it: export, edit a line, run."""

import sys
from pathlib import Path

import pytest
import yaml
from support.launch import SMALL, run_command

SCRIPT = str(Path(sys.executable).with_name("hybridtrain"))


@pytest.mark.thorough
def test_an_exported_schedule_with_an_edited_line_is_run_and_exact(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape = [*SMALL, "pipeline.nb_part=2", "pipeline.split=uniform"]
    done = run_command([SCRIPT, "plan", *shape, "run_name=exported"], 300, None)
    assert done.returncode == 0, done.stderr
    plan = Path("outputs/exported/plan.yaml")
    assert f"pipeline.schedule={plan}" in done.stderr

    before, after = "F0@0 F1@0 B0@0 F2@0", "F0@0 F1@0 F2@0 B0@0"
    mine = Path("mine.yaml")
    mine.write_text(plan.read_text().replace(before, after))
    assert mine.read_text() != plan.read_text()
    done = run_command([SCRIPT, "verify", *shape, f"pipeline.schedule={mine}"], 300, None)
    assert done.returncode == 0, done.stderr
    done = run_command([SCRIPT, *shape, f"pipeline.schedule={mine}", "run_name=mine"], 300, None)
    assert done.returncode == 0, done.stderr
    ran = yaml.safe_load(Path("outputs/mine/plan.yaml").read_text())
    assert ran["schedule"] == "mine.yaml"
    assert after in ran["actions"][0]
