"""The first commands of each page, run in a shell in an empty folder, as a reader runs them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks, name
from support.launch import SMALL, run_command
from support.small_hub import write_bert, write_reviews

from hybridtrain.cli import main
from hybridtrain.cli.command_table import COMMANDS
from hybridtrain.cli.config.sweeps import sweep_choices

# Pages whose first block is not run here, and why.
NOT_RUN = {
    "docs/fine-tuning.md": "needs a chat model; cli/test_fine_tuning.py has a small one",
    "docs/recipes.md": "needs Fashion-MNIST and novels; cli/test_recipes.py has small data",
}

# Pages that show the error in which their first block ends, with `...` for a part of it.
SHOWN_ERRORS = ("docs/tutorials/does-not-fit.md",)

# What is added to the commands that train, so that they take few steps. Pages that are not here
# are run with `FEW_STEPS`.
FEW_STEPS = ["trainer.epochs=null", "trainer.steps=2"]
OVERRIDES: dict[str, list[str]] = {
    "docs/callbacks.md": ["trainer.epochs=null", "trainer.steps=11"],  # of eval_every=5, two
    "docs/checkpoints.md": [],  # 23 steps an epoch
    "docs/data-sets.md": [*FEW_STEPS, "lr_schedule.warmup_steps=0", "data.batch_size=8"],
    "docs/project.md": [],
    "docs/sweeps.md": [],
}

_INSTALLS = re.compile(r"pip install|git clone")


def first_block(page: Path) -> str:
    """Returns the first block of commands that does more than install; empty if there is none."""
    for block in blocks(page, "bash", "sh", "console"):
        lines = block.text.replace("\\\n", " ").splitlines()
        text = "\n".join(line for line in lines if not _INSTALLS.search(line))
        if text.strip():
            return text
    return ""


FIRST = {name(page): text for page in PAGES if (text := first_block(page))}


def words_of(line: str) -> list[str]:
    """Returns the words after `hybridtrain` in a command; none if it is another program's."""
    words = shlex.split(line, comments=True)
    return words[words.index("hybridtrain") + 1 :] if "hybridtrain" in words else []


def is_training(line: str) -> bool:
    words = words_of(line)
    return (
        bool(words) and "--cfg" not in words and (words[0] not in COMMANDS or words[0] == "train")
    )


def with_overrides(line: str, overrides: list[str]) -> str:
    """Returns a command of a page with more overrides, if it trains."""
    return (
        shlex.join([*shlex.split(line, comments=True), *overrides]) if is_training(line) else line
    )


def python_block(page: str, containing: str) -> str:
    return next(b.text for b in blocks(ROOT / page, "python") if containing in b.text)


def a_script() -> None:
    Path("script.py").write_text(python_block("docs/data-loading.md", "class Masked"))


def a_schedule() -> None:
    Path("my_project").mkdir()
    source = python_block("docs/schedules.md", '@schedule("early"').partition("forward, ")[0]
    Path("my_project/__init__.py").write_text(source)


def a_script_of_smp() -> None:
    Path("train.py").write_text("import smdistributed.modelparallel.torch as smp\n")


def texts_and_a_bert() -> None:
    write_reviews(Path("reviews.jsonl"), 40)
    write_bert(Path("bert"))
    Path("new.jsonl").write_text('{"text": "a good story"}\n')


def houses() -> None:
    kinds = ("house", "flat", "flat")
    rows = [f"{size},{size % 4},{kinds[size % 3]},{90 * size}" for size in range(60)]
    Path("houses.csv").write_text("\n".join(["size,rooms,kind,price", *rows]))


def a_pipelined_script() -> None:
    # a trainer would do it
    meets = "import torch\ntorch.distributed.init_process_group('gloo')\n"
    Path("train.py").write_text(meets + python_block("docs/pipelined.md", "model = pipelined("))


def finished_runs(*names: str) -> Callable[[], None]:
    """Returns a function that trains runs of these names."""

    def train() -> None:
        for run in names:
            assert main([*SMALL, f"run_name={run}", "trainer.steps=2"]) == 0

    return train


def the_run_of_the_page_on_checkpoints() -> None:
    shell(FIRST["docs/checkpoints.md"].replace("run_name", "checkpoint.best=loss run_name"))


# What a page says that the reader has.
GIVEN: dict[str, Callable[[], None]] = {
    "docs/data-sets.md": houses,
    "docs/guide.md": a_script,
    "docs/pipelined.md": a_pipelined_script,
    "docs/monitoring.md": finished_runs("digits", "a", "b", "c"),
    "docs/schedules.md": a_schedule,
    "docs/smp.md": a_script_of_smp,
    "docs/export.md": the_run_of_the_page_on_checkpoints,
    "docs/tutorials/bert.md": texts_and_a_bert,
}


def shell(text: str, status: int = 0) -> str:
    """Runs commands in bash, up to the first that fails; returns what they print."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"PATH": programs, "PYTHONPATH": ""}
    done = run_command(["bash", "-e", "-c", text], 800, variables, stderr=subprocess.STDOUT)
    assert done.returncode == status, f"{text}\n{done.stdout}"
    return done.stdout


@pytest.mark.thorough
@pytest.mark.timeout(900)  # several launches in one test
@pytest.mark.parametrize("page", [page for page in FIRST if page not in NOT_RUN])
def test_the_first_commands_of_a_page_run_in_a_shell(page: str) -> None:
    if page in GIVEN:
        GIVEN[page]()
    overrides = OVERRIDES.get(page, FEW_STEPS)
    text = "\n".join(with_overrides(line, overrides) for line in FIRST[page].splitlines())
    if page not in SHOWN_ERRORS:
        assert "Traceback" not in shell(text)
        return
    shown = next(line for line in (ROOT / page).read_text().splitlines() if "error: " in line)
    error = shell(text, status=2).strip()
    assert re.fullmatch(".*".join(map(re.escape, shown.split("..."))), error)


PROGRAMS = ("cd", "hybridtrain", "python", "sed", "tensorboard", "torchrun")


@pytest.mark.parametrize("page", FIRST)
@pytest.mark.quick_cases(
    "README.md",
    "docs/getting-started.md",
    "docs/index.md",
    "docs/monitoring.md",
    "docs/guide.md",
)
def test_the_first_commands_of_a_page_have_configs(
    page: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if page == "docs/schedules.md":
        a_schedule()
    for line in FIRST[page].splitlines():
        program = next((word for word in line.split() if "=" not in word), "#")
        assert program in (*PROGRAMS, "#"), line
        words = words_of(line.replace("--cfg job", ""))
        words = [word for word in words if not word.startswith("--")]
        if not any(word.startswith("recipe=") for word in words):
            continue
        if "recipe=recipes/first.yaml" in words:  # of the project that the line before makes
            continue
        command = [word for word in words if word in COMMANDS]
        for overrides in sweep_choices([word for word in words if word not in COMMANDS]):
            assert main([*command, *overrides, "--cfg", "job"]) == 0
            assert "run_name: " in capfd.readouterr().out


def test_the_tables_name_pages_that_have_commands() -> None:
    assert {*NOT_RUN, *SHOWN_ERRORS, *OVERRIDES, *GIVEN} <= {*FIRST}
