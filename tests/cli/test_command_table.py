"""Each command of the table, typed by a user in an empty folder: what it does, and its help."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from cli_runs import fail
from support.launch import SMALL, environment

from hybridtrain.cli import main
from hybridtrain.cli.command_table import (
    COMMANDS,
    FLAGS,
    NOT_OF_EVERY_COMMAND,
    check_changes,
)
from hybridtrain.cli.commands.help import help_of
from hybridtrain.cli.config.changes import OF_THE_COMMAND
from hybridtrain.cli.config.compose import compose_config
from hybridtrain.cli.config.schema import Config
from hybridtrain.cli.config.tree import flat_keys
from hybridtrain.errors import ConfigError

SCRIPT = Path(sys.executable).with_name("hybridtrain")

# What a user types after the name of the command, in a folder with the run `digits`, and a part of
# the answer.
TYPED = {
    "train": ([*SMALL, "run_name=digits", "trainer.steps=6"], "the run is complete at step 6"),
    "plan": ([*SMALL, "run_name=planned"], "wrote outputs/planned/plan.yaml"),
    "verify": ([*SMALL, "run_name=other", "pipeline.nb_part=2"], "exact"),
    "evaluate": (["run_name=digits"], '"samples": 355'),
    "predict": (["run_name=digits", "output=here.jsonl"], '"file": "here.jsonl"'),
    "export": (["run_name=digits", "format=torch"], "export/step_00000006.pth"),
    "find-lr": ([*SMALL, "run_name=other"], '"lr": '),
    "search": (
        [*SMALL, "trainer.steps=1", "optim.lr=0.1,0.2", "search.trials=1"],
        "digits-search/trial_000",
    ),
    "submit": (["recipe=digits", "submit.nodes=2", "--dry-run"], "#SBATCH --nodes=2"),
    "check": (["recipe=digits", "submit=2x8"], "no problems found"),
    "results": (["digits"], "accuracy"),
    "report": (["digits", "output=page.html"], "page.html"),
    "new": (["my_project"], "my_project"),
    "smp-config": (["distribution.json"], "torchrun"),
    "measure-machine": (["seconds=0"], "flops_per_s"),
}


# Runs the console script in a process for each command, forked from one that has imported PyTorch.
DRIVER = """
import json, os, runpy, sys
import torch, hybridtrain.loop.trainer

for line in sys.stdin:
    folder, output, words = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

Typed = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    cache = {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    with subprocess.Popen(
        [sys.executable, "-P", "-c", DRIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(cache),
    ) as process:
        yield process


@pytest.fixture
def typed(driver: subprocess.Popen[str], tmp_path: Path) -> Typed:
    """Types a command; returns its exit code and its output."""

    def run(*words: str) -> tuple[int, str]:
        assert driver.stdin is not None
        assert driver.stdout is not None
        output = tmp_path / "output.txt"
        print(json.dumps([str(Path.cwd()), str(output), [str(SCRIPT), *words]]), file=driver.stdin)
        driver.stdin.flush()
        return int(driver.stdout.readline()), output.read_text()

    return run


def test_every_command_has_a_line_that_a_user_types() -> None:
    assert set(TYPED) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.quick_cases("train", "results", "new", "smp-config")
def test_each_command_runs_as_a_user_types_it(command: str, typed: Typed, copied: Path) -> None:
    smp = {"parameters": {"partitions": 2, "ddp": True}, "enabled": True}
    distribution = {"smdistributed": {"modelparallel": smp}}
    distribution |= {"mpi": {"enabled": True, "processes_per_host": 4}}  # type: ignore[dict-item]
    Path("distribution.json").write_text(json.dumps(distribution))
    words, answer = TYPED[command]
    code, said = typed(command, *words)
    assert code == 0, said
    assert "Traceback" not in said
    assert answer in said


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_explains_it_its_keys_and_flags_with_an_example(
    command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    said = capfd.readouterr().out
    entry = COMMANDS[command]
    assert said.startswith(f"usage: hybridtrain {command}")
    for key in entry.keys:
        assert re.search(rf"^  {key}(\.\w+)?=\n {{6}}\S", said, re.M)
    for flag in entry.flags:
        assert f"  {flag} " in said
    assert entry.examples[0] in said
    assert all(re.search(rf"\bhybridtrain {command}\b", e) for e in entry.examples[:1]) or (
        command == "train"
    )
    assert not Path("outputs").exists()


def test_the_examples_of_the_help_are_command_lines_that_are_understood() -> None:
    for name, command in COMMANDS.items():
        for example in command.examples:
            words = example.replace("'", "").split()
            assert "hybridtrain" in words
            assert command.takes == "words" or any(
                word.startswith(("recipe=", "run_name=")) for word in words
            ), f"{name}: {example}"


def test_hybridtrain_alone_shows_the_help_and_trains_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    said = capfd.readouterr()
    assert all(re.search(rf"^  {name} ", said.out, re.M) for name in COMMANDS)
    assert "recipe: bert_classifier" in said.out
    assert said.err == ""
    assert list(Path().iterdir()) == []


def test_the_keys_of_the_table_are_keys_of_the_config() -> None:
    assert {field.name for field in fields(Config)} >= NOT_OF_EVERY_COMMAND
    known = {*flat_keys(vars(compose_config(["recipe=digits"]))), *NOT_OF_EVERY_COMMAND}
    trainer = {f"trainer.{name}" for name in vars(compose_config([]).trainer)}
    for command in COMMANDS.values():
        assert set(command.of_run or ()) <= known | trainer
        assert set(command.flags) <= set(FLAGS)
    # what belongs to a command and not to the run is read by all commands or by those that say so
    for_all = {"recipe", "run_name", "output_dir", "allow_targets", "allow_changes", "init_from"}
    assert set(OF_THE_COMMAND) <= NOT_OF_EVERY_COMMAND | for_all


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "output=x.npy"], "export does not read output= (predict "),
        (["evaluate", "format=torch"], "evaluate does not read format= (export "),
        (["train", "ema=false"], "train does not read ema= (evaluate, predict and "),
        (["predict", "+push_to=me/it"], "predict does not read push_to= (export "),
        (["submit.nodes=2"], "train does not read submit.nodes= (submit "),
        (["plan", "search.trials=3"], "plan does not read search.trials= (search "),
        (["verify", "resume=best"], "verify does not read resume= (train, evaluate, "),
        (["evaluate", "submit=2x8"], "evaluate does not read submit= (submit "),
        (["evaluate", "optim.lr=5"], "optim.lr= has no effect on evaluate "),
        (["evaluate", "trainer.steps=9"], "trainer.steps= has no effect on evaluate "),
        (["predict", "init_from=x"], "init_from= has no effect on predict "),
        (["export", "trainer.precision=bf16"], "trainer.precision= has no effect on export "),
        (
            ["search", "--quiet"],
            "--quiet works with train, evaluate, predict, export, find-lr, not with search",
        ),
    ],
)
@pytest.mark.quick_cases(2)
def test_a_key_that_a_command_does_not_read_is_an_error(
    words: list[str], message: str, copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fail(capfd, *words, "run_name=digits").startswith(f"error: {message}")
    assert not (copied / "export").exists()


def test_the_command_line_of_a_run_may_be_repeated_with_another_command(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", *SMALL]) == 0
    assert '"file"' in capfd.readouterr().out


@pytest.mark.parametrize("name", [name for name, each in COMMANDS.items() if each.of_run])
def test_the_help_names_the_keys_of_a_run_that_a_command_reads_and_no_others(name: str) -> None:
    said = " ".join(help_of(name).split())
    assert "trainer.steps" not in said
    with pytest.raises(ConfigError, match=rf"trainer\.steps= .* {name} "):
        check_changes(name, {"trainer.steps": 5})
    for key in COMMANDS[name].of_run or ():
        assert key in said
        check_changes(name, {key: 5})
