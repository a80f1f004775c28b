"""A wheel of the project, installed into an environment outside the checkout."""

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from support.launch import SMALL, environment

from hybridtrain.cli.command_table import COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hybridtrain"

SOURCE = ("hybridtrain", "configs", "recipes", "pyproject.toml", "setup.py", "README.md", "LICENSE")
DATA = ("configs", "recipes")  # packages of the wheel, which are folders beside the package here


def isolation() -> list[str]:
    """Returns the option against an environment from the network, where setuptools is here."""
    try:
        return ["--no-build-isolation"] * (int(version("setuptools").partition(".")[0]) >= 77)
    except PackageNotFoundError:
        return []


class Environment(NamedTuple):
    """A virtual environment: its programs, and the folder that packages are installed in."""

    programs: Path
    packages: Path


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel, and with the dependencies of this one."""
    pytest.importorskip("pip", reason="the wheel is built and installed by pip")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCE:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, source / name)
    pip("wheel", "--no-deps", *isolation(), "--wheel-dir", str(folder), str(source))
    (wheel,) = folder.glob("hybridtrain-*.whl")
    shutil.rmtree(source)

    root = folder / "environment"
    venv.create(root, symlinks=True)
    paths = sysconfig.get_paths("venv", {"base": str(root), "platbase": str(root)})
    env = Environment(Path(paths["scripts"]), Path(paths["purelib"]))
    # Python reads no .pth files in a folder that a .pth file adds, so the checkout, if it is
    # installed there in editable mode, is not importable
    shared = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (env.packages / "dependencies.pth").write_text("\n".join(shared) + "\n")
    python = str(env.programs / "python")
    pip("--python", python, "install", "--no-deps", "--no-index", "--ignore-installed", str(wheel))
    return env


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=outside_the_checkout())
    assert done.returncode == 0, done.stdout + done.stderr


def outside_the_checkout(extra: dict[str, str] | None = None) -> dict[str, str]:
    return {**environment(), "PYTHONPATH": "", "PYTHONSAFEPATH": "1", **(extra or {})}


def run(
    installed: Environment, program: str, *arguments: str, extra: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program of the environment in the current folder, which is empty at first."""
    done = subprocess.run(
        [str(installed.programs / program), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=outside_the_checkout(extra),
    )
    assert done.returncode == 0, done.stderr
    return done


def files(folder: Path) -> set[str]:
    """Returns the files below `folder` that are not made by Python."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("recipe", ["Containerfile", "hybridtrain.def"])
def test_a_recipe_for_a_container_copies_what_the_package_is_built_from(recipe: str) -> None:
    text = (ROOT / "container" / recipe).read_text()
    lines = [line.split() for line in text.splitlines() if "/opt/hybridtrain" in line]
    copied = {word for words in lines for word in words}
    assert set(SOURCE) <= copied


@pytest.mark.thorough
def test_the_wheel_and_not_the_checkout_is_imported(installed: Environment) -> None:
    names = "hybridtrain, hybridtrain.configs, hybridtrain.recipes"
    code = f"import {names}\nfor module in ({names}): print(module.__file__)"
    assert run(installed, "python", "-c", code).stdout.splitlines() == [
        str(installed.packages / "hybridtrain" / folder / "__init__.py")
        for folder in (".", "configs", "recipes")
    ]


def test_the_wheel_has_every_file_of_the_package_the_configs_and_the_recipes(
    installed: Environment,
) -> None:
    expected = files(PACKAGE)
    for folder in DATA:
        expected |= {f"{folder}/{name}" for name in files(ROOT / folder)}
    assert files(installed.packages / "hybridtrain") == expected


def test_the_wheel_has_nothing_outside_the_package(installed: Environment) -> None:
    own = {path.name.partition("-")[0] for path in installed.packages.iterdir()}
    assert own - {"__pycache__", "dependencies.pth"} == {"hybridtrain"}


def test_the_wheel_composes_a_config(installed: Environment) -> None:
    shown = run(installed, "hybridtrain", "--cfg", "job", "recipe=digits")
    config = yaml.safe_load(shown.stdout)
    assert config["run_name"] == "digits"
    assert config["trainer"]["loss"] is None


@pytest.mark.thorough
def test_the_wheel_trains_lists_and_evaluates_digits_in_an_empty_folder(
    installed: Environment,
) -> None:
    assert list(Path().iterdir()) == []
    trained = run(installed, "hybridtrain", *SMALL, "trainer.steps=2")
    assert "1 process x 2 stages" in trained.stderr
    assert [path.name for path in Path().iterdir()] == ["outputs"]
    summary = json.loads(Path("outputs/digits/summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["eval"]["samples"] == 355

    assert "digits" in run(installed, "hybridtrain", "results", "digits").stdout
    evaluated = run(installed, "hybridtrain", "evaluate", "run_name=digits", "world.devices=cpu")
    assert json.loads(evaluated.stdout)["loss"] == summary["eval"]["loss"]


def test_the_console_script_lists_the_recipes(installed: Environment) -> None:
    helped = run(installed, "hybridtrain", "--help")
    recipes = ", ".join(sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")))
    assert f"recipe: {recipes}" in " ".join(helped.stdout.split())


HELP_OF_EACH = """
from hybridtrain.cli import main
from hybridtrain.cli.command_table import COMMANDS
for name, command in COMMANDS.items():
    command.load()
    assert main([name, "--help"]) == 0
"""


@pytest.mark.thorough
def test_each_command_of_the_wheel_is_there_and_has_help(installed: Environment) -> None:
    helped = run(installed, "python", "-c", HELP_OF_EACH).stdout
    for name in COMMANDS:
        assert f"usage: hybridtrain {name}" in helped


@pytest.mark.thorough
def test_measure_machine_runs_from_the_wheel(installed: Environment, tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    done = run(installed, "hybridtrain", "measure-machine", "seconds=0", extra=cache)
    assert (tmp_path / "hybridtrain" / "this-machine.yaml").read_text() in done.stdout


def test_the_version_is_written_in_one_place(installed: Environment) -> None:
    asked = (
        "import hybridtrain, importlib.metadata as m; print(m.version('hybridtrain'), end=' '); "
    )
    shown = run(installed, "python", "-c", asked + "print(hybridtrain.__version__)").stdout.split()
    assert len(set(shown)) == 1
    assert "version =" not in (ROOT / "pyproject.toml").read_text().split("[tool.")[0]
