"""The scripts of CI and of pre-commit: what they run, with a fake Python, pip, uv and tools."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import hybridtrain

ROOT = Path(__file__).parents[2]


def imports_of(script: Path) -> list[tuple[str, str]]:
    """Returns the module and the name of each import from the library or from other scripts."""
    return [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
        if node.module.split(".")[0] in ("hybridtrain", "scripts")
        for alias in node.names
    ]


SCRIPTS = [path for path in sorted((ROOT / "scripts").rglob("*.py")) if imports_of(path)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_script_imports_is_there(script: Path) -> None:
    """Most scripts run for minutes, so no test runs them."""
    for name, imported in imports_of(script):
        module = importlib.import_module(name)
        assert hasattr(module, imported) or importlib.util.find_spec(f"{name}.{imported}")


@pytest.mark.parametrize(
    "words", [["scripts/results_chat.py"], ["-m", "scripts.bench.unequal_devices"]], ids=" ".join
)
@pytest.mark.thorough
def test_a_script_explains_its_arguments(words: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, *words, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: ")


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def bash(script: Path, *arguments: object, **variables: object) -> subprocess.CompletedProcess[str]:
    """Runs a script as a user types it, with these environment variables alone."""
    return subprocess.run(
        ["bash", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", **{name: str(value) for name, value in variables.items()}},
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the scripts and the project file, and no environment."""
    folder = tmp_path / "clone"
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("*.py"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


class TestWheel:
    """scripts/wheel.sh."""

    @pytest.fixture
    def log(self, tmp_path: Path) -> Path:
        """The log of the fake programs: each line has a working directory and a command."""
        log = tmp_path / "log.txt"
        note = f'echo "$PWD: ${{0##*/}} $*" >>{log}'
        failing = '[ -z "${FAILING-}" ] || [ "$1" != "$FAILING" ]'
        program(tmp_path / "hybridtrain", f"{note}; {failing}")
        program(
            tmp_path / "python",
            f"""{note}
case "$*" in
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" {tmp_path}/hybridtrain "$3/bin" ;;
    *" wheel "*) touch "$8/hybridtrain-1-py3-none-any.whl"; (cd "$9"; find . -type f) >>{log} ;;
esac""",
        )
        return log

    def run(self, log: Path, *arguments: object, **variables: object) -> tuple[int, list[str]]:
        temporary = log.parent / "temporary"
        temporary.mkdir(exist_ok=True)
        python = log.parent / "python"
        done = bash(
            ROOT / "scripts/wheel.sh", *arguments, PYTHON=python, TMPDIR=temporary, **variables
        )
        assert list(temporary.iterdir()) == [], "nothing is left over"
        return done.returncode, log.read_text().splitlines()

    def test_a_wheel_of_the_files_that_git_knows_is_installed_and_tried(self, log: Path) -> None:
        code, lines = self.run(log, log.parent / "dist")
        assert code == 0
        assert [path.name for path in (log.parent / "dist").iterdir()] == [
            "hybridtrain-1-py3-none-any.whl"
        ]
        packed = {line[2:] for line in lines if line.startswith("./")}
        assert {"pyproject.toml", "hybridtrain/__init__.py", "recipes/digits.yaml"} <= packed
        assert not [name for name in packed if "__pycache__" in name or name.startswith("tests")]
        commands = [line.split(": ", 1) for line in lines if not line.startswith("./")]
        (install,) = (words for _, words in commands if " install " in words)
        assert install.endswith("/hybridtrain-1-py3-none-any.whl")
        tried = [(folder, words) for folder, words in commands if words.startswith("hybridtrain ")]
        assert all(folder.endswith("/empty") for folder, _ in tried), "outside the checkout"
        assert [words.split()[1] for _, words in tried] == [
            *("--version", "--help", "recipe=digits", "results", "evaluate"),
        ]

    @pytest.mark.parametrize("failing", ["--help", "results"])
    def test_a_command_that_fails_fails_the_script(self, failing: str, log: Path) -> None:
        code, lines = self.run(log, FAILING=failing)
        assert code != 0
        assert lines[-1].split(": ", 1)[1].split()[1] == failing


class TestOldest:
    """scripts/oldest.sh."""

    @pytest.mark.parametrize("status", [0, 3])
    def test_pytest_runs_with_the_lowest_direct_dependencies(
        self, status: int, clone: Path
    ) -> None:
        log = clone / "log.txt"
        program(
            clone / "python",
            f"""echo "$*" >>{log}
case "$*" in
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp {clone}/uv "$3/bin" ;;
    "-m pytest "*) exit {status} ;;
esac""",
        )
        program(
            clone / "uv",
            f"""echo "uv $*" >>{log}
while [ "$1" != --output-file ]; do shift; done
echo torch==2.11 >"$2\"""",
        )
        done = bash(clone / "scripts/oldest.sh", "tests/unit", "-x", PYTHON=clone / "python")
        assert done.returncode == status, done.stderr
        _, _, oldest, rest, install, tests = log.read_text().splitlines()
        assert "--resolution lowest-direct" in oldest
        assert "--constraint .venv-oldest/constraints.txt" in rest
        constraints = (clone / ".venv-oldest/constraints.txt").read_text()
        assert "torch==2.11" in constraints
        assert "--constraint .venv-oldest/all.txt -e .[text,dev]" in install
        assert tests.startswith("-m pytest")
        assert tests.endswith("tests/unit -x")
        assert "torch==2.11" in done.stdout


class TestHook:
    """scripts/hook.sh."""

    def test_the_active_environment_comes_first_then_the_projects_then_the_path(
        self, clone: Path, tmp_path: Path
    ) -> None:
        folders = {name: tmp_path / name for name in ("venv", "conda", "path")}
        places = {name: folder / "bin" for name, folder in folders.items()}
        places["path"], places["project"] = folders["path"], clone / ".venv/bin"
        for name, place in places.items():
            program(place / "ruff", f'echo "{name} $*"; exit 5')
        variables = {
            "PATH": f"{folders['path']}{os.pathsep}/usr/bin{os.pathsep}/bin",
            "VIRTUAL_ENV": folders["venv"],
            "CONDA_PREFIX": folders["conda"],
        }
        hook = clone / "scripts/hook.sh"
        for name in ("venv", "conda", "project", "path"):
            done = bash(hook, "ruff", "check", "a file.py", **variables)
            assert (done.returncode, done.stdout) == (5, f"{name} check a file.py\n")
            (places[name] / "ruff").unlink()
        done = bash(hook, "ruff", "check", **variables)
        assert done.returncode == 1
        assert "ruff is not installed: activate your environment" in done.stderr


class TestRelease:
    """scripts/release.sh and the workflows."""

    FILES = ("hybridtrain/__init__.py", "CITATION.cff", "CHANGELOG.md")

    @pytest.fixture
    def release(self, clone: Path) -> Path:
        """A clone with the files that name a version."""
        for name in self.FILES:
            (clone / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
        return clone

    def run(self, release: Path, tag: str) -> subprocess.CompletedProcess[str]:
        return bash(release / "scripts" / "release.sh", tag, "version")

    def test_the_version_of_the_package_can_be_tagged(self, release: Path) -> None:
        result = self.run(release, f"v{hybridtrain.__version__}")
        assert (result.returncode, result.stderr) == (0, "")

    @pytest.mark.parametrize("tag", ["", "v9.9.9", hybridtrain.__version__])
    def test_another_tag_is_refused(self, release: Path, tag: str) -> None:
        result = self.run(release, tag)
        assert result.returncode == 1
        assert repr(tag) in result.stderr

    @pytest.mark.parametrize("file", FILES)
    def test_a_file_with_another_version_is_refused_by_name(self, release: Path, file: str) -> None:
        version = hybridtrain.__version__
        path = release / file
        path.write_text(path.read_text().replace(version, "9.9.9"))
        result = self.run(release, f"v{version}")
        assert result.returncode == 1
        problem = f"the tag is 'v{version}'" if file.endswith(".py") else Path(file).name
        assert problem in result.stderr

    def test_an_unknown_step_is_refused_before_any_runs(self, release: Path) -> None:
        result = bash(release / "scripts" / "release.sh", "v9.9.9", "version", "publish")
        assert result.returncode == 2
        assert "there is no step 'publish': version, build, install, test" in result.stderr

    def test_the_wheel_is_tried_on_each_python_that_is_there_and_on_the_oldest_torch(
        self, release: Path
    ) -> None:
        log = release / "log.txt"
        program(release / "python3.11", "echo Python 3.11.9")
        program(
            release / "scripts" / "wheel.sh", f'echo "$PYTHON $WHEEL ${{WITH-}}" >>{log}; exit 0'
        )
        wheel = release / "dist" / "hybridtrain-1-py3-none-any.whl"
        wheel.parent.mkdir()
        wheel.touch()
        pythons = f"{release}/python3.11 no-python3.12"
        python = release / "python3.11"
        script = release / "scripts" / "release.sh"
        done = bash(script, "v1", "install", PYTHONS=pythons, PYTHON=python)
        assert done.returncode == 0, done.stderr
        newest, oldest = log.read_text().splitlines()
        assert newest == f"{python} dist/{wheel.name} "
        assert oldest == f"{python} dist/{wheel.name} torch==2.11.* torchvision==0.26.*"
        assert done.stdout.endswith("the wheel was not tried on: no-python3.12\n")

    @pytest.mark.parametrize(
        "workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda p: p.stem
    )
    def test_a_workflow_calls_scripts_that_exist(self, workflow: Path) -> None:
        jobs = yaml.safe_load(workflow.read_text())["jobs"]
        lines = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
        scripts = re.findall(r"\./(scripts/\S+)", "\n".join(lines))
        assert scripts
        assert all(os.access(ROOT / script, os.X_OK) for script in scripts)
