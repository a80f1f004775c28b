"""The command `search`: tunes settings with Optuna, one run per trial.

    <output_dir>/digits-search/
        trial_000/              a run, named digits-search/trial_000
        study.db                the study: the trials and their results

A trial runs the command `train` in its own processes, so that it may use torchrun, and a crash ends
only that trial. The evaluations in its `metrics.jsonl` decide whether to stop it early. Several
searches may work on one study. An interrupted search continues with its trial.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from hybridtrain._base.files import json_lines, read_json, reading
from hybridtrain._base.text_table import in_one_line
from hybridtrain.cli.config.changes import OF_THE_COMMAND
from hybridtrain.cli.config.compose import compose_settings
from hybridtrain.cli.config.overrides import given_keys, hydra_quoted, parse_overrides
from hybridtrain.cli.config.places import check_places, is_searched
from hybridtrain.cli.config.run_name import check_run_name, shortened
from hybridtrain.cli.config.schema import Config, SearchConfig
from hybridtrain.cli.run.lock import RunLock
from hybridtrain.cli.run.run_table import best_run, lines_of, runs_of, table_of
from hybridtrain.errors import ConfigError, DivergedError, Interrupted, UserError

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage

_POLL_S = 0.2
_MOST_FAILURES = 3
"""If this many trials fail in a row, the cause is not in their settings."""
_INTERRUPTED = "the search was interrupted; rerun the same command to continue"


def search(overrides: Sequence[str], config_dir: str | None = None) -> int:
    """Tries settings until the study has `search.trials`; returns the exit code.

    Args:
        overrides: the overrides of the command line; keys with several values or an interval are
            searched, in addition to `search.space`.
        config_dir: a folder with more groups and options.

    Raises:
        ConfigError: a setting is wrong, there is nothing to search, or Optuna is missing.
        UserError: several consecutive trials failed.
        Interrupted: a signal stopped the search; the same command continues it.
    """
    optuna = _optuna()
    parsed = parse_overrides(overrides)
    fixed = [str(each.input_line) for each in parsed if not each.is_sweep_override()]
    composed = compose_settings(fixed, config_dir)
    config, options = composed.config, composed.config.search
    for name in ("search", "train"):  # a trial checks places in its own run directory
        check_places(name, config, fixed, composed.files, of_run=False)
    space = _space([each for each in parsed if each.is_sweep_override()], options)
    metric, mode = _criterion(config)
    # A run_name may be group/name, and the names of trials have two parts as well.
    check_run_name(str(config.run_name))
    folder = Path(config.output_dir) / shortened(f"{config.run_name}-search".replace("/", "-"))
    folder.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=_storage(options.storage, folder),
        study_name=folder.name,
        direction="maximize" if mode == "max" else "minimize",
        sampler=_SAMPLERS[options.sampler](),
        pruner=_PRUNERS[options.pruner or "none"](),
        load_if_exists=True,
    )
    _refuse_another_study(study, space, metric, mode)
    group = [] if config.monitor.group else [f"monitor.group={hydra_quoted(folder.name)}"]
    of_run = ("search", "search.", "run_name")
    words = [
        word
        for key, word in zip(given_keys(fixed), fixed, strict=True)
        if not key.startswith(of_run)
    ]
    command = [*_launcher(options.launcher), "train", *words, *group]
    if config_dir is not None:
        command += ["--config-dir", config_dir]
    failures = 0
    with _signals() as received:
        for trial in _trials(study, space, options.trials, folder):
            name = _name(trial.number)
            values = [f"{key}={value}" for key, value in trial.params.items()]
            said = f"{name} of {options.trials} trials: {' '.join(values)}"
            print(said, file=sys.stderr, flush=True)
            own = [*command, *values, f"run_name={hydra_quoted(f'{folder.name}/{name}')}"]
            received.is_in_trial = True
            ended = _train(own, folder / name, trial, metric, received)
            received.is_in_trial = False
            if received.number is not None:  # it came after the trial's last step
                raise Interrupted(_INTERRUPTED)
            failures = 0 if ended else failures + 1
            if failures == _MOST_FAILURES:
                raise UserError(
                    f"{failures} consecutive trials have failed, the last with {shlex.join(own)}: "
                    "fix that error and rerun the same command"
                )
    runs = runs_of([str(folder)])
    print(table_of(lines_of(runs)), flush=True)
    if best := best_run(runs, "-" * (mode == "max") + metric, config_dir):
        print(best, file=sys.stderr, flush=True)
    return 0


# Here, text from a recipe or a study becomes part of a command line. Text from files never grants
# permissions: it may set what a run computes, but not what code it runs, where it writes or how it
# starts (`cli.config.places`).
_NEVER_SEARCHED = (*OF_THE_COMMAND, "hydra", "search", "submit")


def _check_searched(override: Override) -> None:
    """Raises a ConfigError for a key that is not a setting of a run."""
    key, value = str(override.input_line).partition("=")[0], override.value()
    values = value.list if isinstance(value, ChoiceSweep) else []
    if (
        not re.fullmatch(r"[A-Za-z_][\w.-]*", key)
        or key.split(".")[0] in _NEVER_SEARCHED
        or not all(is_searched(key, inner) for inner in (None, *values))
    ):
        raise ConfigError(
            f"{key!r} cannot be searched: trials may differ only in keys that change training"
        )


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("hybridtrain search needs Optuna: pip install optuna") from error
    return optuna


def _tpe() -> Any:
    from optuna.samplers import TPESampler

    return TPESampler(constant_liar=True)  # for several searches on one study at the same time


def _random() -> Any:
    from optuna.samplers import RandomSampler

    return RandomSampler()


def _median() -> Any:
    from optuna.pruners import MedianPruner

    return MedianPruner()


def _hyperband() -> Any:
    from optuna.pruners import HyperbandPruner

    return HyperbandPruner()


def _none() -> Any:
    from optuna.pruners import NopPruner

    return NopPruner()


_SAMPLERS = {"tpe": _tpe, "random": _random}
_PRUNERS = {"median": _median, "hyperband": _hyperband, "none": _none}


def _space(swept: Sequence[Override], options: SearchConfig) -> dict[str, BaseDistribution]:
    """Returns the search space, by key; a key on the command line replaces the recipe's.

    Raises:
        ConfigError: the space is empty or invalid.
    """
    words = [*parse_overrides(options.space), *swept]
    for word in words:
        _check_searched(word)
    space = {str(each.get_key_element()): _distribution(each) for each in words}
    if not space:
        raise ConfigError(
            "there is nothing to search: give a key several values, as in pipeline.chunks=4,8, or "
            "an interval, as in 'optim.lr=tag(log,interval(1e-4,1e-1))', or set search.space in "
            "the recipe"
        )
    return space


def _distribution(override: Override) -> BaseDistribution:
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    value = override.value()
    try:
        if isinstance(value, IntervalSweep):
            kind = IntDistribution if isinstance(value.start, int) else FloatDistribution
            return kind(value.start, value.end, log="log" in value.tags)
        if isinstance(value, RangeSweep):
            return CategoricalDistribution([str(each) for each in value.range()])
        if isinstance(value, ChoiceSweep):
            return CategoricalDistribution(list(override.sweep_string_iterator()))
    except ValueError as error:
        raise ConfigError(f"{override.input_line}: {error}") from error
    raise ConfigError(
        f"{override.input_line} is not a search space: write values, a,b or "
        "choice(a,b), range(1,4), interval(0.1,0.9), int(interval(1,8)) or "
        "tag(log,interval(1e-4,1e-1))"
    )


def _criterion(config: Config) -> tuple[str, str]:
    """Returns the evaluation value to optimize, and `min` or `max`."""
    from hybridtrain.cli.run.components import direction_of  # with torch

    options, checkpoint = config.search, config.checkpoint
    metric, mode = options.metric or checkpoint.best or "loss", options.mode
    if mode is None and options.metric in (None, checkpoint.best):
        mode = checkpoint.best_mode
    metrics, allow = config.trainer.metrics, config.allow_targets
    return metric, direction_of("search.mode", metric, mode, metrics, allow)


def _refuse_another_study(
    study: Study, space: Mapping[str, BaseDistribution], metric: str, mode: str
) -> None:
    """Raises a ConfigError if the existing study has another objective or other choices."""
    from optuna.distributions import check_distribution_compatibility

    direction = study.direction.name.lower()
    old_metric = study.user_attrs.get("metric", metric)
    if (direction, old_metric) != (f"{mode}imize", metric):
        words = {"minimize": "smallest", "maximize": "largest"}
        raise ConfigError(
            f"the study {study.study_name} searches for the {words[direction]} {old_metric}, not "
            f"the {words[f'{mode}imize']} {metric}: set another run_name="
        )
    study.set_user_attr("metric", metric)
    for trial in study.get_trials(deepcopy=False):
        for key, earlier in trial.distributions.items():
            try:
                check_distribution_compatibility(earlier, space.get(key, earlier))
            except ValueError as error:
                raise ConfigError(
                    f"{key}: the study {study.study_name} started with {earlier} and cannot "
                    f"continue with {space[key]}: set another run_name="
                ) from error


def _storage(text: str | None, folder: Path) -> str | BaseStorage:
    """Returns the storage of a study: an SQLite database, a journal, or a database by URL."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if text not in (None, "journal"):
        return str(text)
    file = folder / ("study.db" if text is None else "study.log")
    if file.is_symlink():
        raise ConfigError(
            f"{file} is a link, which may lead to a file of another program: remove it, or set "
            f"search.storage= to the URL of a database"
        )
    if text is None:
        return f"sqlite:///{file.resolve()}"
    return JournalStorage(JournalFileBackend(str(file)))


def _launcher(text: str | None) -> list[str]:
    return [sys.executable, "-m", "hybridtrain"] if text is None else shlex.split(text)


def _name(number: int) -> str:
    return f"trial_{number:03d}"


def _trials(
    study: Study, space: Mapping[str, BaseDistribution], most: int, folder: Path
) -> Iterator[Trial]:
    """Yields the trials for this search to train, first those that another search left unfinished.

    During a trial it holds a lock in `<folder>/claims`, because the study lists the trial of a dead
    search as running forever.
    """
    from optuna.trial import Trial, TrialState

    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    # A trial that lacks a value is being created by another search. A trial with another key, or a
    # value outside the space, does not belong to this search: studies may come from strangers.
    left = {trial.number for trial in running if _is_in(space, trial.params)}
    while left or len(study.get_trials(deepcopy=False)) < most:
        _refuse_enqueued(study, space)
        number = left.pop() if left else study.ask(dict(space)).number
        lock = RunLock(folder / "claims" / _name(number))
        lock.folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except UserError:  # another search works on it
            continue
        try:
            trial = study.get_trials(deepcopy=False)[number]
            if trial.state is TrialState.RUNNING:
                yield Trial(study, trial._trial_id)
        finally:
            lock.release()


def _refuse_enqueued(study: Study, space: Mapping[str, BaseDistribution]) -> None:
    """Raises a ConfigError for a waiting trial with a key or value outside the space."""
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        values = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
        choices = {key: space[key] for key in values if key in space}
        if not _is_in(choices, values):
            raise ConfigError(
                f"the study {study.study_name} has an enqueued trial, number {trial.number}, with "
                f"{in_one_line(str(values))}, which is not in the search space: enqueue only keys "
                f"and values in the space, or set another run_name="
            )


def _is_in(space: Mapping[str, BaseDistribution], values: Mapping[str, Any]) -> bool:
    """Returns whether `values` are a point of the search space."""
    from optuna.distributions import CategoricalDistribution

    if values.keys() != space.keys():
        return False
    for key, distribution in space.items():
        if isinstance(distribution, CategoricalDistribution):
            if values[key] not in distribution.choices:
                return False
        elif not isinstance(values[key], int | float) or not (
            distribution.low <= values[key] <= distribution.high  # type: ignore[attr-defined]
        ):
            return False
    return True


def _train(
    command: Sequence[str], run: Path, trial: Trial, metric: str, received: Received
) -> bool:
    """Trains, reports the result to the study, and returns it in a word.

    Raises:
        ConfigError: the run's evaluation does not have the value to optimize.
        Interrupted: a signal stopped it.
    """
    from optuna.trial import TrialState

    study, pruned = trial.study, False
    # Its own session, so that Ctrl-C reaches it only once, through this process.
    with subprocess.Popen(command, start_new_session=True) as process:
        received.pass_on_to(process)
        reported = set(study.get_trials(deepcopy=False)[trial.number].intermediate_values)
        while True:
            with_end = process.poll() is not None
            for step, value in _evaluations(run, metric):
                if step in reported:
                    continue
                reported.add(step)
                trial.report(value, step)
                if trial.should_prune() and not pruned and not with_end:
                    pruned = True
                    process.terminate()
            if with_end:
                break
            try:
                process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
        received.pass_on_to(None)
    code = process.returncode
    if code == 0:
        with reading(run / "summary.json"):
            values = read_json(run / "summary.json")["eval"] or {}
        if metric not in values:
            raise ConfigError(
                f"search.metric={metric}: the evaluations of {run} have only {', '.join(values)}"
            )
        study.tell(trial, values[metric])
        return True
    if received.number is not None or (code == Interrupted.exit_code and not pruned):
        raise Interrupted(_INTERRUPTED)
    if pruned or code == DivergedError.exit_code:
        study.tell(trial, state=TrialState.PRUNED)
        outcome = "was stopped early: other trials were better" if pruned else "diverged"
        print(f"{run.name} {outcome}", file=sys.stderr, flush=True)
        return True
    study.tell(trial, state=TrialState.FAIL)
    return False


def _evaluations(run: Path, metric: str) -> Iterator[tuple[int, float]]:
    """Yields the step and value of each evaluation so far."""
    for line in json_lines(run / "metrics.jsonl"):
        if isinstance(line.get(f"eval/{metric}"), int | float):
            yield int(line["step"]), float(line[f"eval/{metric}"])


class Received:
    """The signal that this process received and forwards to its trial."""

    number: int | None = None
    is_in_trial: bool = False
    _process: subprocess.Popen[bytes] | None = None
    _unsent: int | None = None

    def __call__(self, number: int, frame: object) -> None:
        """Forwards the signal; without a trial, ends the search."""
        self.number = self._unsent = number
        if not self.is_in_trial:
            raise Interrupted(_INTERRUPTED)
        self._pass_on()

    def pass_on_to(self, process: subprocess.Popen[bytes] | None) -> None:
        """Forwards signals to `process` from now on, including one received before it started."""
        self._process = process
        self._pass_on()

    def _pass_on(self) -> None:
        if self._process is not None and self._unsent is not None:
            number, self._unsent = self._unsent, None
            if self._process.poll() is None:
                self._process.send_signal(number)


@contextmanager
def _signals() -> Iterator[Received]:
    received = Received()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, received) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
