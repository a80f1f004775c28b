"""A wheel of the project, installed without the checkout, in an empty folder."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.launch import SMALL, environment

from hybridtrain.cli.commands.table import COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hybridtrain"

DATA = ("configs", "recipes")  # packages of the wheel, which are folders beside the package here

# `python -m hybridtrain` without the import hook of an editable install of the checkout, which
# would fill in what a wheel lacks.
WITHOUT_THE_CHECKOUT = """
import runpy, sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "")]
import hybridtrain, hybridtrain.configs, hybridtrain.recipes
for module in (hybridtrain, hybridtrain.configs, hybridtrain.recipes):
    print(module.__file__, file=sys.stderr)
sys.argv[0] = "hybridtrain"
runpy.run_module("hybridtrain", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel is installed in."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("hybridtrain", "configs", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(source))
    (wheel,) = folder.glob("hybridtrain-*.whl")
    shutil.rmtree(source)
    pip("install", "--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel))
    return folder / "site"


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr


def run(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment({"PYTHONPATH": str(installed)}),
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_wheel_has_the_configs_and_recipes(installed: Path) -> None:
    shown = run(installed, "-c", WITHOUT_THE_CHECKOUT, "--cfg", "job", "recipe=digits")
    assert shown.stderr.splitlines() == [
        str(installed / "hybridtrain" / folder / "__init__.py")
        for folder in (".", "configs", "recipes")
    ]
    config = yaml.safe_load(shown.stdout)
    assert config["run_name"] == "digits"
    assert config["trainer"]["loss"] is None
    shipped = {
        str(path.relative_to(installed / "hybridtrain"))
        for path in (installed / "hybridtrain").rglob("*.yaml")
    }
    assert shipped == {
        str(path.relative_to(ROOT))
        for folder in ("configs", "recipes")
        for path in (ROOT / folder).rglob("*.yaml")
    } | {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.yaml")}  # of `new`


def test_the_wheel_has_all_modules(installed: Path) -> None:
    def modules(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in (folder / "hybridtrain").rglob("*.py")}

    assert modules(installed) - {f"hybridtrain/{kind}/__init__.py" for kind in DATA} == modules(
        ROOT
    )


@pytest.mark.thorough
def test_the_recipe_digits_trains_in_an_empty_folder_on_the_data_of_the_wheel(
    installed: Path,
) -> None:
    assert list(Path().iterdir()) == []
    trained = run(installed, "-c", WITHOUT_THE_CHECKOUT, *SMALL, "trainer.steps=2")
    assert str(installed) in trained.stderr
    assert "1 process x 2 stages" in trained.stderr
    assert json.loads(Path("outputs/digits/summary.json").read_text())["eval"]["samples"] == 355
    assert [path.name for path in Path().iterdir()] == ["outputs"]


def test_the_wheel_has_the_console_script_and_the_types(installed: Path) -> None:
    helped = run(installed, str(installed / "bin" / "hybridtrain"), "--help")
    recipes = ", ".join(sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")))
    assert f"recipe: {recipes}" in " ".join(helped.stdout.split())
    assert (installed / "hybridtrain" / "py.typed").is_file()
    for name in ("digits.md", "digits.csv.gz"):
        assert (installed / "hybridtrain" / "datasets" / name).is_file()


HELP_OF_EACH = """
from hybridtrain.cli.main import main
from hybridtrain.cli.commands.table import COMMANDS
for name, command in COMMANDS.items():
    command.load()
    assert main([name, "--help"]) == 0
"""


def test_each_command_of_the_wheel_is_there_and_has_help(installed: Path) -> None:
    hook = "\n".join(WITHOUT_THE_CHECKOUT.strip().splitlines()[:2])
    helped = run(installed, "-c", f"{hook}\n{HELP_OF_EACH}").stdout
    for name in COMMANDS:
        assert f"usage: hybridtrain {name}" in helped


def test_measure_machine_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    script = str(installed / "bin" / "hybridtrain")
    done = subprocess.run(
        [sys.executable, script, "measure-machine", "seconds=0"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment({"PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(tmp_path)}),
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hybridtrain" / "this-machine.yaml").read_text() in done.stdout


def test_the_version_is_written_in_one_place(installed: Path) -> None:
    asked = (
        "import hybridtrain, importlib.metadata as m; print(m.version('hybridtrain'), end=' '); "
    )
    shown = run(installed, "-c", asked + "print(hybridtrain.__version__)").stdout.split()
    assert len(set(shown)) == 1
    assert "version =" not in (ROOT / "pyproject.toml").read_text().split("[tool.")[0]
