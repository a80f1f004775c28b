"""`scripts/quickstart.sh` in a copy of the project, with a fake Python, pip and nvidia-smi."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# Writes down its calls of pip; answers the scripts' questions with the files `without_*`.
PYTHON = """#!/bin/bash
clone={clone}
case "$*" in
    --version) echo "Python 3.12.1" ;;
    "-m venv .venv")
        mkdir -p .venv/bin
        cp "$0" .venv/bin/python
        cp $clone/torchrun .venv/bin ;;
    "-m pip "*) echo "$*" >>$clone/pip.txt; [ ! -e $clone/without_pip ] ;;
    *version_info*) [ ! -e $clone/without_version ] ;;
    *urllib.request*) [ ! -e $clone/without_network ] ;;
    *"import torch, torchvision"*) [ ! -e $clone/without_torch ] ;;
    *summary.json*) echo "0.9667" ;;
    *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""
TORCHRUN = '#!/bin/bash\necho "$*" >>{clone}/torchrun.txt\n'
NVIDIA_SMI = "#!/bin/bash\n[ ! -e {clone}/without_gpu ]\n"


@dataclass(frozen=True)
class Clone:
    """A copy of the project, on a machine that lacks what `lacks` names."""

    folder: Path

    def lacks(self, *names: str) -> None:
        for path in self.folder.glob("without_*"):
            path.unlink()
        for name in names:
            (self.folder / f"without_{name}").touch()

    def quickstart(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {key: value for key, value in os.environ.items() if key != "PYTHON"}
        path = os.pathsep.join([str(self.folder / "bin"), "/usr/bin", "/bin"])
        return subprocess.run(
            ["bash", self.folder / "scripts/quickstart.sh", *arguments],
            env={**env, "PATH": path},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def installed(self) -> list[str]:
        """Returns what pip was asked to install since the last call, without its fixed options."""
        file = self.folder / "pip.txt"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [line.removeprefix("-m pip install --disable-pip-version-check ") for line in lines]

    def launched(self) -> list[str]:
        file = self.folder / "torchrun.txt"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "scripts").mkdir()
    for name in ("quickstart.sh", "environment.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    stand_ins = {"bin/python3": PYTHON, "bin/nvidia-smi": NVIDIA_SMI, "torchrun": TORCHRUN}
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(text.replace("{clone}", str(tmp_path)))
        (tmp_path / name).chmod(0o755)
    return Clone(tmp_path)


FROM_CPU_INDEX = f"--index-url {CPU_INDEX} torch>=2.11 torchvision"


@pytest.mark.parametrize(
    ("lacks", "installed"),
    [
        (["gpu", "torch"], [FROM_CPU_INDEX, "-e ."]),
        (["torch"], ["-e ."]),  # a GPU needs the builds of the ordinary index
        (["gpu"], ["-e ."]),  # what is installed is not replaced
        (["gpu", "torch", "network"], ["-e ."]),  # as behind a mirror of the ordinary index
    ],
    ids=lambda value: "+".join(value),
)
def test_the_cpu_builds_of_pytorch_are_installed_where_there_is_no_gpu_and_no_pytorch(
    clone: Clone, lacks: list[str], installed: list[str]
) -> None:
    clone.lacks(*lacks)
    done = clone.quickstart()
    assert done.returncode == 0, done.stderr
    assert clone.installed() == installed


def test_the_quickstart_trains_the_recipe_with_what_it_is_given_and_says_how_good_it_is(
    clone: Clone,
) -> None:
    done = clone.quickstart("trainer.epochs=3", "optim.lr=0.1")
    assert done.returncode == 0, done.stderr
    command = "--standalone --nproc-per-node 2 -m hybridtrain recipe=digits"
    assert clone.launched() == [f"{command} trainer.epochs=3 optim.lr=0.1"]
    assert "0.9667" in done.stdout


def test_a_second_quickstart_installs_nothing_unless_the_project_file_has_changed(
    clone: Clone,
) -> None:
    for changed, installed in ((False, ["-e ."]), (False, []), (True, ["-e ."])):
        if changed:
            with (clone.folder / "pyproject.toml").open("a") as file:
                file.write("\n# another requirement\n")
        assert clone.quickstart().returncode == 0
        assert clone.installed() == installed


@pytest.mark.parametrize("missing", [["pip"], ["pip", "gpu", "torch"]], ids="+".join)
def test_an_installation_that_fails_ends_the_quickstart_and_is_tried_again(
    clone: Clone, missing: list[str]
) -> None:
    clone.lacks(*missing)
    assert clone.quickstart().returncode != 0
    assert len(clone.installed()) == 1
    assert clone.launched() == []
    clone.lacks()
    assert clone.quickstart().returncode == 0
    assert clone.installed() == ["-e ."]


def test_a_python_that_does_not_fit_is_one_clear_line(clone: Clone) -> None:
    (clone.folder / "bin/python3.11").symlink_to("python3")
    for version in ("3.12", "3.13"):
        (clone.folder / f"bin/python{version}").symlink_to("python3")
    clone.lacks("version")
    done = clone.quickstart()
    assert done.returncode == 1
    assert done.stderr == "error: Python 3.11, 3.12 or 3.13 is needed; set PYTHON to one\n"
    assert clone.installed() == []
