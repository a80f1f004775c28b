"""The table of commands: each command's function, help, flags and keys.

A command is a module in `commands/` and an entry of `COMMANDS`, its only registration. `main`
dispatches by the table; `--help`, key errors and tests read it. This module imports neither torch
nor Hydra, so that help appears immediately.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridtrain.errors import ConfigError, closest

PARTS = (
    "model",
    "loss",
    "metrics",
    "callbacks",
    "optimizer",
    "training data",
    "evaluation data",
    "tokenizer",
)
"""The parts of a run. A command builds and reads only those in its `parts`."""


@dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        function: its location, as `module:name`.
        usage: the words after the command's name.
        summary: one line, for the list of commands.
        text: the description in its `--help`.
        examples: command lines.
        keys: the keys and groups that this command reads and some others do not. Its help lists the
            keys of the first one if it is a group.
        parts: the parts of a run that the command builds or reads. A data set is read as a whole
            if it has no other way to read one of its splits.
        of_run: the keys of a run that the command can override; None: all.
        flags: the names in `FLAGS` that it accepts.
        takes: the function's arguments. `settings`: the `Settings` of a run; the function returns
            the values of a row in a sweep's table. `overrides`: the overrides, the folder of
            `--config-dir`, and the other flags as keyword arguments, such as `dry_run=True`; the
            function returns an exit code. `words`: the words after the name, which are not
            overrides; the function returns an exit code.
    """

    function: str
    usage: str
    summary: str
    text: str
    examples: tuple[str, ...]
    keys: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    takes: str = "settings"
    parts: tuple[str, ...] = PARTS
    of_run: tuple[str, ...] | None = None

    def load(self) -> Callable[..., Any]:
        """Returns the function; its module may import torch."""
        function: Callable[..., Any] = pkgutil.resolve_name(self.function)
        return function


FLAGS = {
    "--multirun": "run each combination of values, as in optim.lr=1e-3,1e-2 (-m)",
    "--dry-run": "try the command without leaving anything behind",
    "--check": "check the whole job here, on every rank, without submitting it",
    "--quiet": "print only warnings, errors and the result (-q); the log file has everything",
    "--cfg job": "print the command's config with comments, and exit",
    "--config-dir DIR": "add a folder with your own config groups and recipes",
}

_COMMON = ("--cfg job", "--config-dir DIR")
_OF_RUNS = ("--multirun", "--quiet", *_COMMON)
_OVERRIDES = "[key=value ...]"
_ON_A_RUN = "run_name=NAME [key=value ...]"
_AUTO = ("hardware",)  # the machine for which `auto` chooses values
_NUMERICS = ("deterministic", "tf32", "precision", "attention", "compile")
_OF_A_FORWARD = (
    *("model", "data", "pipeline", "world", "seed"),
    *(f"trainer.{name}" for name in _NUMERICS),
)
_SPLITS = ("training data", "evaluation data")
_CHECKPOINT = (
    "By default, reads the run's best checkpoint if checkpoint.best= was set, else the newest; "
    "resume=last selects the newest, resume=PATH any other. Takes all other settings from the run "
    "itself, so run_name= is enough."
)

COMMANDS = {
    "train": Command(
        "hybridtrain.cli.commands.train:train",
        _OVERRIDES,
        "train a model, or resume an interrupted run",
        "Trains a model described by a recipe or by keys, and writes checkpoints, metrics and logs "
        "to outputs/<run_name>/. The same command resumes an interrupted run. The word `train` can "
        "be omitted if keys follow.",
        (
            "hybridtrain recipe=digits",
            "hybridtrain recipe=digits optim.lr=1e-3,1e-2 --multirun",
            "torchrun --standalone --nproc-per-node 2 -m hybridtrain recipe=digits",
        ),
        ("resume", *_AUTO),
        ("--multirun", "--dry-run", "--quiet", *_COMMON),
    ),
    "plan": Command(
        "hybridtrain.cli.commands.plan:plan",
        _OVERRIDES,
        "show how the model is split into stages, or predict a run on a cluster",
        "Splits the model as a run would, prints the stages and writes plan.yaml to the run "
        "directory. With hardware=, predicts time and memory on that machine, and prints the "
        "fastest layouts and the command that trains with the best one.",
        (
            "hybridtrain plan recipe=digits pipeline.split=time",
            "hybridtrain plan recipe=gpt_text_files hardware=h100 hardware.nodes=2",
        ),
        _AUTO,
        ("--multirun", *_COMMON),
        parts=("model", "loss", "optimizer", *_SPLITS, "tokenizer"),
    ),
    "verify": Command(
        "hybridtrain.cli.commands.verify:verify",
        _OVERRIDES,
        "check that the pipeline matches the unsplit model",
        "Trains a few steps from the initial weights, as a pipeline and as the unsplit model, and "
        "compares losses, gradients, weights and an evaluation. Exits with code 1 if they differ.",
        ("hybridtrain verify recipe=digits pipeline.nb_part=4",),
        _AUTO,
        ("--multirun", *_COMMON),
        parts=("model", "loss", *_SPLITS, "tokenizer"),
    ),
    "evaluate": Command(
        "hybridtrain.cli.commands.evaluate:evaluate",
        _ON_A_RUN,
        "compute the loss and metrics of a trained run",
        "Evaluates a run on its evaluation split and prints one line of JSON. " + _CHECKPOINT,
        ("hybridtrain evaluate run_name=digits",),
        ("resume", "ema"),
        _OF_RUNS,
        parts=("model", "loss", "metrics", "evaluation data", "tokenizer"),
        of_run=(*_OF_A_FORWARD, "trainer.loss", "trainer.metrics"),
    ),
    "predict": Command(
        "hybridtrain.cli.commands.predict:predict",
        _ON_A_RUN,
        "write predictions for samples: class and probabilities, or the model's outputs",
        "Writes a line for each sample of the evaluation split, or of data.predict_path=: a folder "
        "of images, a file of unlabelled texts, or - for standard input (a text, a JSON object or "
        "an image path per line). Each line has the sample's number, its path or text, and its "
        "class and probabilities, or the model's outputs if classes have no names. " + _CHECKPOINT,
        (
            "hybridtrain predict run_name=digits",
            "hybridtrain predict run_name=pets data.predict_path=new_photos output=new.jsonl",
            "echo 'a fine film' | hybridtrain predict run_name=reviews data.predict_path=-",
        ),
        ("resume", "ema", "output"),
        _OF_RUNS,
        parts=("model", "evaluation data", "tokenizer"),
        of_run=_OF_A_FORWARD,
    ),
    "export": Command(
        "hybridtrain.cli.commands.export:export",
        _ON_A_RUN,
        "write a run's weights in a format that other programs can load",
        "Writes a checkpoint's weights to export/ in the run directory. " + _CHECKPOINT,
        (
            "hybridtrain export run_name=digits",
            "hybridtrain export run_name=bert format=transformers",
        ),
        ("resume", "ema", "format", "push_to"),
        _OF_RUNS,
        parts=("model", "tokenizer"),
        of_run=("model", "data"),
    ),
    "find-lr": Command(
        "hybridtrain.cli.commands.find_lr:find_lr",
        _OVERRIDES,
        "find a learning rate with a range test",
        "Trains up to 100 steps from the run's initial weights while the learning rate rises from "
        "1e-7 to 10, and prints the rate at which the loss falls fastest. Saves nothing.",
        ("hybridtrain find-lr recipe=digits",),
        _AUTO,
        _OF_RUNS,
        parts=("model", "loss", "optimizer", *_SPLITS, "tokenizer"),
    ),
    "search": Command(
        "hybridtrain.cli.commands.search:search",
        _OVERRIDES,
        "tune settings with Optuna",
        "Trains search.trials= runs with settings that Optuna chooses from the values and "
        "intervals you give, and prints the best run. The same command continues the study.",
        (
            "hybridtrain search recipe=digits 'optim.lr=tag(log,interval(1e-4,1e-1))' "
            "pipeline.chunks=4,8 search.trials=10",
        ),
        ("search", *_AUTO),
        _COMMON,
        "overrides",
    ),
    "submit": Command(
        "hybridtrain.cli.commands.submit:submit",
        _OVERRIDES,
        "submit a run to Slurm, or print a torchrun command or Kubernetes manifest",
        "Checks a run here and submits it to Slurm as a job that saves and requeues itself before "
        "its time limit. submit.to=torchrun and submit.to=kubernetes print the command or manifest "
        "that starts the run. --dry-run prints the script. --check runs the checks of `hybridtrain "
        "check` on the job, and exits with code 2 if it finds a problem.",
        (
            "hybridtrain submit recipe=digits submit.nodes=2 submit.gpus_per_node=4 submit.time=4h",
            "hybridtrain submit recipe=digits submit.to=torchrun",
            "hybridtrain submit recipe=digits submit=2x8 --check",
        ),
        ("submit", "resume", *_AUTO),
        ("--multirun", "--dry-run", "--check", *_COMMON),
        "overrides",
    ),
    "check": Command(
        "hybridtrain.cli.commands.check:check",
        _OVERRIDES,
        "check a whole run, every rank, on one CPU before it starts",
        "Checks the config, the data, the checkpoint, the model, the plan, the messages between "
        "stages, the schedule of every rank and the memory, and prints a line for each. Starts no "
        "processes and writes nothing. submit.nodes= and submit.gpus_per_node= describe another "
        "machine. Exits with code 2 if it finds a problem.",
        (
            "hybridtrain check recipe=digits",
            "hybridtrain check recipe=python_source_gpt submit=2x8 hardware=h100",
        ),
        ("submit", "resume", *_AUTO),
        _COMMON,
        "overrides",
    ),
    "results": Command(
        "hybridtrain.cli.commands.results:results",
        "RUN_OR_FOLDER... [sort=[-]COLUMN] [COLUMN=VALUE ...] [output=FILE.csv|.md]",
        "print a table of runs and the best one",
        "Prints the settings in which runs differ, and their results. A folder can be a run, a "
        "sweep, or contain some. sort=-accuracy puts the largest first; trainer.epochs=2 and "
        "'loss<0.5' select runs.",
        ("hybridtrain results digits-lr sort=-accuracy 'loss<0.5' output=results.md",),
        takes="words",
    ),
    "report": Command(
        "hybridtrain.cli.commands.report:report",
        "RUN_OR_FOLDER... [output=FILE.html]",
        "write an HTML report with curves, timeline and settings of runs",
        "Writes one self-contained HTML file that shows one run or compares several, and prints "
        "its path.",
        ("hybridtrain report digits", "hybridtrain report digits-lr output=lr.html"),
        takes="words",
    ),
    "new": Command(
        "hybridtrain.cli.commands.new:new",
        "FOLDER",
        "create a small working project for your model and data",
        "Creates a project with a model, a data set, a recipe and a test, and prints the next "
        "commands. The folder's name becomes the name of its Python package.",
        ("hybridtrain new my_project",),
        takes="words",
    ),
    "smp-config": Command(
        "hybridtrain.cli.commands.smp_config:smp_config",
        "FILE.json [--instance-count N]",
        "translate a SageMaker `distribution` into a torchrun command",
        "Reads the `distribution` argument of a SageMaker estimator, prints the command that "
        "starts the same processes, and explains each key.",
        ("hybridtrain smp-config distribution.json --instance-count 2",),
        takes="words",
    ),
    "measure-machine": Command(
        "hybridtrain.cli.commands.measure_machine:measure_machine",
        "[seconds=SECONDS]",
        "measure this machine once, for predictions of step time",
        "Measures this machine's speed for about a minute and stores the result for "
        "hardware=this-machine and for the prediction that a run prints. seconds= sets the "
        "duration of each measurement (default 3).",
        ("hybridtrain measure-machine", "hybridtrain plan recipe=digits hardware=this-machine"),
        takes="words",
    ),
}

NOT_OF_EVERY_COMMAND = frozenset(key for command in COMMANDS.values() for key in command.keys)
"""The keys and groups that some commands ignore; all others describe a run."""


def check_keys(name: str, keys: Sequence[str], by_hand: bool = True) -> None:
    """Rejects keys that a command does not read.

    Jobs sent by `submit` keep their `submit.*` keys, so that they appear in the run's config.

    Args:
        name: the command.
        keys: the keys of its overrides, without `+` and `~`.
        by_hand: a user, not a launcher, started the command.

    Raises:
        ConfigError: names the commands that read the key, and the keys of this one.
    """
    command = COMMANDS[name]
    for key in keys:
        top = key.partition(".")[0].partition("@")[0]
        if top not in NOT_OF_EVERY_COMMAND or top in command.keys:
            continue
        if top == "submit" and name == "train" and not by_hand:
            continue
        readers = [other for other, entry in COMMANDS.items() if top in entry.keys]
        close = closest(top, command.keys)
        hint = (
            f"did you mean {close}=?" if close else f"remove it, or run `hybridtrain {readers[0]}`"
        )
        reading = f"{listed(readers)} read{'s' * (len(readers) == 1)} it"
        raise ConfigError(
            f"{name} does not read {key}= ({reading}): {hint}; see `hybridtrain {name} --help`"
        )


def check_changes(name: str, changes: Mapping[str, Any]) -> None:
    """Rejects changes to a run's config that have no effect on a command.

    Args:
        name: the command.
        changes: the keys of the run that the command line changes, with the run's values.

    Raises:
        ConfigError: names the key and the run's value.
    """
    of_run = COMMANDS[name].of_run
    for key, value in changes.items():
        whole = (key, *(key.rsplit(".", count)[0] for count in range(1, key.count(".") + 1)))
        if of_run is not None and not set(whole) & set(of_run):
            raise ConfigError(
                f"{key}= has no effect on {name} (the run has {value}): remove it. {name} reads "
                f"these keys of the run: {listed(of_run)}"
            )


def listed(words: Sequence[str]) -> str:
    """Returns words as "a, b and c"."""
    return " and ".join([*([", ".join(words[:-1])] if words[1:] else []), *words[-1:]])
