"""A project of one's own: `new`, what its pyproject.toml says, and plugins that are installed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cli_runs import fail

from hybridtrain.cli import main

SHORT = ["world.devices=cpu", "trainer.epochs=1"]


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    assert main(["new", "my_project"]) == 0
    monkeypatch.chdir("my_project")
    yield Path.cwd()
    for name in [name for name in sys.modules if name.startswith("my_project")]:
        del sys.modules[name]


@pytest.mark.thorough
def test_a_new_project_trains_evaluates_and_keeps_its_promise_by_its_own_commands(
    project: Path,
) -> None:
    assert main(["recipe=recipes/first.yaml", *SHORT]) == 0
    summary = json.loads((project / "outputs/first/summary.json").read_text())
    assert summary["eval"]["samples"] == 300
    assert main(["evaluate", "run_name=first"]) == 0
    Path("new.csv").write_text("0.1,0.2\n-0.3,0.4\n")
    assert main(["predict", "run_name=first", "data.predict_path=new.csv", "output=new.jsonl"]) == 0
    lines = [json.loads(line) for line in Path("new.jsonl").read_text().splitlines()]
    assert {line["class"] for line in lines} <= {"spiral 0", "spiral 1", "spiral 2"}
    assert len(lines) == 2
    assert main(["model=mlp", "data=spirals", "--cfg", "job"]) == 0
    own = subprocess.run([sys.executable, "-m", "pytest", "-q"], capture_output=True, text=True)
    assert own.returncode == 0, own.stdout


@pytest.mark.parametrize(
    ("override", "meant"),
    [("model.widht=3", "model.width"), ("model=mpl", "mlp")],
)
@pytest.mark.quick_cases(1)
def test_a_typo_gets_the_key_or_option_of_the_project(
    override: str, meant: str, project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = fail(capfd, "recipe=recipes/first.yaml", override)
    assert override.partition("=")[0] in said
    assert meant in said


def test_an_editor_knows_every_key_of_its_recipe_and_of_the_packages(project: Path) -> None:
    schema = json.loads((project / "schema.json").read_text())
    recipes = Path(__file__).parents[2] / "recipes"
    for recipe in [project / "recipes/first.yaml", *recipes.glob("*.yaml")]:
        for key, value in yaml.safe_load(recipe.read_text()).items():
            assert key in schema["properties"], recipe
            known = schema["properties"][key]
            if known.get("additionalProperties") is False:
                assert set(value) <= set(known["properties"]), recipe


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "usage: hybridtrain new <folder>"),
        (["my-project"], "my-project is not a valid"),
        (["."], "already exists"),
        (["mine.txt/mine"], "mine.txt/mine: Not a directory"),
        (["notes"], "notes: Not a directory"),
    ],
)
def test_what_cannot_be_a_project_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    Path("here").mkdir()
    monkeypatch.chdir("here")
    files = [Path("mine.txt"), Path("notes")]
    for file in files:
        file.touch()
    assert main(["new", *words]) != 0
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert sorted(Path().iterdir()) == files


MARK = b"\xef\xbb\xbf"  # a byte order mark


def test_files_of_editors_that_write_a_byte_order_mark_are_read(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table = project / "pyproject.toml"
    table.write_bytes(MARK + table.read_bytes().replace(b"\n", b"\r\n"))
    Path("mine.yaml").write_bytes(MARK + b"seed: 7\r\n\r\n")
    assert main(["--cfg", "job", "recipe=mine.yaml"]) == 0
    assert "seed: 7" in capfd.readouterr().out
    distribution = b'{"smdistributed": {"modelparallel": {"enabled": true}}}\r\n'
    Path("distribution.json").write_bytes(MARK + distribution)
    main(["smp-config", "distribution.json"])
    assert "is not JSON" not in capfd.readouterr().err


def test_the_folder_of_options_is_named_in_the_table(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = project / "pyproject.toml"
    table.write_text('[tool.hybridtrain]\nconfig_dir = "nowhere"\n')
    assert main(["model=mlp"]) != 0
    assert "nowhere" in capsys.readouterr().err
    table.write_text("[tool.hybridtrain]\nconfig_dir = 3\n")
    assert main(["model=mlp"]) != 0
    assert (
        "config_dir of [tool.hybridtrain] must be the path of a folder" in capsys.readouterr().err
    )


def test_a_plugin_that_is_installed_brings_options_and_may_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    info, options = site / "nets-1.0.dist-info", site / "nets" / "configs" / "model"
    for folder in (info, options):
        folder.mkdir(parents=True)
    (info / "METADATA").write_text("Name: nets\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hybridtrain.plugins]\nnets = nets\n")
    for package in (site / "nets", site / "nets" / "configs"):
        (package / "__init__.py").touch()
    (site / "nets" / "wide.py").write_text(
        "from torch import nn\n\n\ndef wide(width):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))\n"
    )
    (options / "wide.yaml").write_text("_target_: nets.wide.wide\nwidth: 32\n")
    monkeypatch.syspath_prepend(site)
    assert main(["recipe=digits", "model=wide", *SHORT]) == 0
    summary = json.loads(Path("outputs/digits/summary.json").read_text())
    assert sum(stage["parameters"] for stage in summary["stages"]) == 64 * 32 + 32 + 32 * 10 + 10


SCHEDULE = """
from hybridtrain.schedule import Action, Schedule, schedule


@schedule("alone")
def alone(devices, chunks, stages_per_device):
    lanes = [
        tuple(Action(kind, device, i) for i in range(chunks) for kind in "FB")
        for device in range(devices)
    ]
    return Schedule("alone", devices, chunks, tuple(lanes))
"""


@pytest.mark.thorough
def test_a_schedule_that_the_package_registers_is_chosen_by_its_name(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "my_project/order.py").write_text(SCHEDULE)
    words = ["recipe=recipes/first.yaml", *SHORT, "pipeline.nb_part=2", "pipeline.schedule=alone"]
    assert main(words) != 0
    said = capsys.readouterr().err
    assert "pipeline.schedule=alone is unknown" in said
    assert "my_project does not register it" in said
    for name in [name for name in sys.modules if name.startswith("my_project")]:
        del sys.modules[name]
    (project / "my_project/__init__.py").write_text("from my_project import order\n")
    assert main([*words, "run_name=alone"]) == 0
    assert "1 process x 2 stages, alone, 4 micro-batches" in capsys.readouterr().err
    assert main(["verify", *words]) == 0
    assert main(["plan", *words]) == 0
