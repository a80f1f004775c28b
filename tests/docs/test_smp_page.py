"""The script of docs/smp.md runs as the page says, with the commands of the page."""

import json
import re

from pages import ROOT, blocks
from support import forked
from support.launch import environment
from support.small_data import write_mnist

PAGE = ROOT / "docs" / "smp.md"


def test_the_script_of_the_page_runs_with_its_configurations(tmp_path, monkeypatch):
    (script,) = [block.text for block in blocks(PAGE, "py")]
    text = "".join(block.text for block in blocks(PAGE, "bash"))
    automatic, manual = map(json.loads, re.findall(r"SM_HP_MP_PARAMETERS='(\{.*?\})'", text, re.S))
    assert manual["auto_partition"] is False
    write_mnist(tmp_path / "data", n_train=200)
    folder = tmp_path / "script"
    folder.mkdir()
    (folder / "train.py").write_text(script)
    monkeypatch.chdir(folder)
    for parameters in (automatic, manual):
        monkeypatch.setenv("SM_HP_MP_PARAMETERS", json.dumps(parameters))
        (folder / "output.txt").unlink(missing_ok=True)
        script = [folder / "train.py", [str(folder)]]
        status, output = forked.run(2, *script, environment(), 300)
        assert status == 0, output
        assert "0 2." in output  # the first loss, of ten classes
