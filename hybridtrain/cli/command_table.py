"""The table of commands: the function of each, its help, its flags and the keys that it reads.

A command is a module of its name in `commands/`, and one entry of `COMMANDS`, its only
registration. `main` dispatches by the table; `--help`, the errors about keys and the tests read it.
It imports neither torch nor Hydra, so that help is shown at once.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridtrain.errors import ConfigError, closest


@dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        function: where it is, as `module:name`.
        usage: the words after the command's name.
        summary: one line, for the list of commands.
        text: what the command does, for its `--help`.
        examples: command lines.
        keys: the keys and groups that it reads and some other commands do not. Its help has the
            keys of the first, if that is a group.
        of_run: of the keys that describe a run, those that it may change; None: all of them.
        flags: those of `FLAGS` that it takes.
        takes: `settings`: the function is called with the `Settings` of a run, and returns the
            values of a row in the table of a sweep. `overrides`: with the overrides, the folder
            of `--config-dir`, and its other flags as keyword arguments, such as `dry_run=True`; it
            returns an exit code. `words`: with the words after the name, which are not overrides;
            it returns an exit code.
    """

    function: str
    usage: str
    summary: str
    text: str
    examples: tuple[str, ...]
    keys: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    takes: str = "settings"
    of_run: tuple[str, ...] | None = None

    def load(self) -> Callable[..., Any]:
        """Returns the function; its module may import torch."""
        function: Callable[..., Any] = pkgutil.resolve_name(self.function)
        return function


FLAGS = {
    "--multirun": "one run for each combination of values, as in optim.lr=1e-3,1e-2 (-m)",
    "--dry-run": "try it without leaving anything behind",
    "--check": "check the whole job here, every rank, and send nothing",
    "--quiet": "print warnings, errors and the result only (-q); the run's log has everything",
    "--cfg job": "print the config that the command would use, with comments, and stop",
    "--config-dir DIR": "add a folder with your options",
}

_COMMON = ("--cfg job", "--config-dir DIR")
_OF_RUNS = ("--multirun", "--quiet", *_COMMON)
_OVERRIDES = "[key=value ...]"
_ON_A_RUN = "run_name=NAME [key=value ...]"
_AUTO = ("hardware",)  # the machine that `auto` keys are chosen for
_TRAINER = ("loss", "metrics", "deterministic", "tf32", "precision", "compile")
_OF_AN_EVALUATION = (
    *("model", "data", "pipeline", "world", "seed"),
    *(f"trainer.{name}" for name in _TRAINER),
)
_CHECKPOINT = (
    "It reads the run's best checkpoint if checkpoint.best= was set, else the newest; resume=last "
    "is the newest, resume=PATH any other. The run's own config is the base, so run_name= is "
    "enough."
)

COMMANDS = {
    "train": Command(
        "hybridtrain.cli.commands.train:train",
        _OVERRIDES,
        "train a model, or resume a run that was interrupted",
        "Trains the model of a recipe, or of the keys you set, and writes checkpoints, metrics and "
        "logs to outputs/<run_name>/. The same command resumes a run that was interrupted. "
        "`train` may be left out when keys are given.",
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
        "show how the model is cut into stages, or price a run for a cluster",
        "Cuts the model as a run would, prints the stages and writes plan.yaml to the run "
        "directory. With hardware= it predicts time and memory there, and prints the fastest "
        "layouts and the command that trains with the first.",
        (
            "hybridtrain plan recipe=digits pipeline.split=time",
            "hybridtrain plan recipe=gpt_text_files hardware=h100 hardware.nodes=2",
        ),
        _AUTO,
        ("--multirun", *_COMMON),
    ),
    "verify": Command(
        "hybridtrain.cli.commands.verify:verify",
        _OVERRIDES,
        "check that the pipeline computes what the unsplit model does",
        "Trains a few steps from the first weights, as a pipeline and as the unsplit model, and "
        "compares losses, gradients, weights and an evaluation. Exit code 1: they differ.",
        ("hybridtrain verify recipe=digits pipeline.nb_part=4",),
        _AUTO,
        ("--multirun", *_COMMON),
    ),
    "evaluate": Command(
        "hybridtrain.cli.commands.evaluate:evaluate",
        _ON_A_RUN,
        "compute the loss and the metrics of a trained run",
        "Evaluates a run on its evaluation split and prints one line of JSON. " + _CHECKPOINT,
        ("hybridtrain evaluate run_name=digits",),
        ("resume", "ema"),
        _OF_RUNS,
        of_run=_OF_AN_EVALUATION,
    ),
    "predict": Command(
        "hybridtrain.cli.commands.predict:predict",
        _ON_A_RUN,
        "write the class and the probabilities, or the model's outputs, of samples",
        "Writes a line for each sample of the evaluation split, or of data.predict_path=: a folder "
        "of images, a file of texts without labels, or - for standard input (a text, a JSON object "
        "or the path of an image per line). A line has the sample's number, its path or text, and "
        "its class and probabilities; the model's outputs where classes have no names. "
        + _CHECKPOINT,
        (
            "hybridtrain predict run_name=digits",
            "hybridtrain predict run_name=pets data.predict_path=new_photos output=new.jsonl",
            "echo 'a fine film' | hybridtrain predict run_name=reviews data.predict_path=-",
        ),
        ("resume", "ema", "output"),
        _OF_RUNS,
        of_run=_OF_AN_EVALUATION,
    ),
    "export": Command(
        "hybridtrain.cli.commands.export:export",
        _ON_A_RUN,
        "write the weights of a run in a format that other programs load",
        "Writes a checkpoint's weights to export/ in the run directory. " + _CHECKPOINT,
        (
            "hybridtrain export run_name=digits",
            "hybridtrain export run_name=bert format=transformers",
        ),
        ("resume", "ema", "format", "push_to"),
        _OF_RUNS,
        of_run=("model", "data"),
    ),
    "find-lr": Command(
        "hybridtrain.cli.commands.find_lr:find_lr",
        _OVERRIDES,
        "find a learning rate, by how the loss falls while the rate rises",
        "Trains up to 100 steps from the run's first weights, with a learning rate that rises from "
        "1e-7 to 10, and prints the rate at which the loss falls fastest. Nothing is saved.",
        ("hybridtrain find-lr recipe=digits",),
        _AUTO,
        _OF_RUNS,
    ),
    "search": Command(
        "hybridtrain.cli.commands.search:search",
        _OVERRIDES,
        "search for the best settings with Optuna",
        "Trains search.trials= runs with settings that Optuna chooses from the values and "
        "intervals you give, and prints the best. The same command continues a study.",
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
        "send a run to Slurm, or print what starts it elsewhere",
        "Checks a run here and sends it to Slurm as a job that saves and requeues itself before "
        "its time limit. submit.to=torchrun and submit.to=kubernetes print what starts the run. "
        "--dry-run prints the script. --check checks all parts of the job here, as `hybridtrain "
        "check` does, and exits with code 2 if there is a problem.",
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
        "stages, the order of every rank and the memory, and prints a line for each. It starts no "
        "process and writes nothing. submit.nodes= and submit.gpus_per_node= describe a machine "
        "other than this one. Exit code 2: there is a problem.",
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
        "print a table of runs, and the best of them",
        "Prints the settings in which runs differ and what they reached. A folder is that of a "
        "run, of a sweep, or one with these in it. sort=-accuracy puts the largest first; "
        "trainer.epochs=2 and 'loss<0.5' choose runs.",
        ("hybridtrain results digits-lr sort=-accuracy 'loss<0.5' output=results.md",),
        takes="words",
    ),
    "report": Command(
        "hybridtrain.cli.commands.report:report",
        "RUN_OR_FOLDER... [output=FILE.html]",
        "write a page with the curves, the timeline and the settings of runs",
        "Writes one HTML file that opens without a network: of one run, or of several next to "
        "each other. It prints the path of the page.",
        ("hybridtrain report digits", "hybridtrain report digits-lr output=lr.html"),
        takes="words",
    ),
    "new": Command(
        "hybridtrain.cli.commands.new:new",
        "FOLDER",
        "make a small project that works, for your model and data",
        "Writes a project with a model, a data set, a recipe and a test, and prints what to run. "
        "The folder's name becomes the name of its Python package.",
        ("hybridtrain new my_project",),
        takes="words",
    ),
    "smp-config": Command(
        "hybridtrain.cli.commands.smp_config:smp_config",
        "FILE.json [--instance-count N]",
        "translate a SageMaker `distribution` into a torchrun command",
        "Reads the `distribution` argument of a SageMaker estimator and prints the command that "
        "starts the same processes, and what each key means here.",
        ("hybridtrain smp-config distribution.json --instance-count 2",),
        takes="words",
    ),
    "measure-machine": Command(
        "hybridtrain.cli.commands.measure_machine:measure_machine",
        "[seconds=SECONDS]",
        "measure this machine once, for predictions of a run's time",
        "Measures this machine's speed for about a minute and keeps the result for "
        "hardware=this-machine and for the prediction that a run prints. seconds= is the time of "
        "each measurement, 3 by default.",
        ("hybridtrain measure-machine", "hybridtrain plan recipe=digits hardware=this-machine"),
        takes="words",
    ),
}

NOT_OF_EVERY_COMMAND = frozenset(key for command in COMMANDS.values() for key in command.keys)
"""The keys and groups that some commands do not read; all others describe a run."""


def check_keys(name: str, keys: Sequence[str], by_hand: bool = True) -> None:
    """Refuses keys that a command does not read.

    `submit.*` goes along with the jobs that `submit` sends, so that the run's config has it.

    Args:
        name: of the command.
        keys: of its overrides, without `+` and `~`.
        by_hand: the command is not started by a launcher.

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
        hint = f"did you mean {close}=?" if close else f"its own keys are {listed(command.keys)}"
        raise ConfigError(
            f"{name} does not read {key}=, which is a key of {listed(readers)}: {hint}; "
            f"`hybridtrain {name} --help` explains them"
        )


def check_changes(name: str, changes: Mapping[str, Any]) -> None:
    """Refuses changes of a run's config that have no effect on a command.

    Args:
        name: of the command.
        changes: the keys of the run that the command line changes, with the run's values.

    Raises:
        ConfigError: names the key, and the value that the run has.
    """
    of_run = COMMANDS[name].of_run
    for key, value in changes.items():
        whole = (key, *(key.rsplit(".", count)[0] for count in range(1, key.count(".") + 1)))
        if of_run is not None and not set(whole) & set(of_run):
            raise ConfigError(
                f"{name} does not read {key}=, which has no effect on it (the run has {value}): "
                f"leave it out. The keys of the run that it reads are {listed(of_run)}"
            )


def listed(words: Sequence[str]) -> str:
    """Returns words as "a, b and c"."""
    return " and ".join([*([", ".join(words[:-1])] if words[1:] else []), *words[-1:]])
