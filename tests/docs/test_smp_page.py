"""The script of docs/smp.md runs as the page says; its keys and smp-names.md are complete."""

import json
import re
from dataclasses import fields

from pages import ROOT, blocks
from support import aws, forked
from support.launch import environment
from support.small_data import write_mnist
from support.smp_names import CONFIG, LOSS_SCALE, NEW, REFUSED, SIGNATURES, VALUES

from hybridtrain.smp.config import NO_MEANING, SmpConfig
from hybridtrain.smp.config import REFUSED as REFUSED_KEYS

DOCS = ROOT / "docs"
PAGE = DOCS / "smp.md"


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


def test_the_page_has_the_names_that_a_test_calls_with_their_arguments_and_no_others():
    text = (DOCS / "smp-names.md").read_text()
    cells = "".join(re.findall(r"^\| (`.*?) \| ", text, re.M))
    found = dict(re.findall(r"`([\w.]+)(?:\((.*?)\))?`", cells))
    own = re.compile(r"^(StepOutput|DistributedModel|DistributedOptimizer)\.")
    names = {own.sub("", name): arguments.split() for name, arguments in SIGNATURES.items()}
    others = [*VALUES.split(), *REFUSED.split(), *NEW.split(), *LOSS_SCALE]
    known = {own.sub("", name) for name in others} | {
        word for each in names.values() for word in each
    }
    of_classes = {"DistributedModel", "DistributedOptimizer"}  # headings
    assert names.keys() - found.keys() == of_classes
    without_a_table = {"StepOutput", "smp_slice"}
    assert found.keys() - names.keys() - known == without_a_table
    for name, arguments in found.items():
        if name in names and arguments:
            assert set(arguments.split(", ")) <= set(names[name]), name


def test_the_page_has_every_key_of_the_configuration():
    text = PAGE.read_text()
    on_page = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \| ", text, re.M))))
    keys = {option.name for option in fields(SmpConfig)} - {"own"}
    assert keys | NO_MEANING.keys() | REFUSED_KEYS.keys() | CONFIG.keys() <= on_page


def test_the_page_names_the_examples_that_are_run():
    rows = re.findall(r"^\| .*?`(\w+)\.py` \|", PAGE.read_text(), re.M)
    files = {path.stem for path in aws.SCRIPTS.glob("*.py") if "smp.step" in path.read_text()}
    assert set(rows) == files | {"train_gptneo_simple"}
