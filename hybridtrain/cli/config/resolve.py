"""The settings of one command: those of the run, with the command line's on top.

A run directory has the config that its run began with. A command on that run takes its config as
the base, not the recipe's or the defaults: whoever trained with `data.max_len=64` and evaluates
with the recipe alone would otherwise get the numbers of another data set. Every difference is
listed; one that makes another model or other data ends the command.

    overrides  -> `settle` ->  Settings  -> `leave_out_leftovers` -> `agreed` ->  rank 0's Config
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hybridtrain._base.text_table import Block, in_one_line
from hybridtrain.cli.commands.table import check_changes
from hybridtrain.cli.config import targets as instantiate
from hybridtrain.cli.config.compose import (
    compose_settings,
    from_environment,
    given_keys,
    given_recipe,
    masked,
    parse_overrides,
    read_overrides,
    to_config,
    to_tree,
)
from hybridtrain.cli.config.schema import (
    AUTO,
    GROUP_KEYS,
    LOADER_KEYS,
    OPEN_GROUPS,
    Config,
    check_run_name,
    groups,
    is_own,
    rename_old_keys,
    with_auto_replaced,
)
from hybridtrain.errors import ConfigError

if TYPE_CHECKING:
    from hybridtrain.world import World

# These belong to the command and not to the run.
OF_THE_COMMAND = (
    "recipe",
    "run_name",
    "output_dir",
    "resume",
    "allow_targets",
    "allow_changes",
    "init_from",
    "ema",
    "output",
    "generate",
    "format",
    "push_to",
)

# How a run is computed, watched and kept; all else decides what is learnt.
_WITHOUT_EFFECT = (
    "world.",
    "monitor.",
    "submit.",
    "search.",
    "checkpoint.",
    "pipeline.",
    "hardware",
    "trainer.log_every",
    "trainer.eval_every",
    "trainer.compile",
    "trainer.max_time",
    "trainer.max_skipped",
)
_WITH_EFFECT = ("pipeline.batch_norm", "pipeline.sync_batch_norm")
# Other samples to evaluate on, for which a run need not be another one.
_EVALUATED = ("data.eval_path", "data.eval_split")
_PLACE_OF_DATA = (
    "data.root",
    "data.download",
    "data.workers",
    "data.timeout_s",
    "data.predict_path",
)


_MISSING = "(not set)"  # the value of a key that is not there


@dataclass(frozen=True)
class Change:
    """A key whose value differs between the config of a run and another one."""

    key: str
    of_run: Any
    other: Any

    @property
    def is_identity(self) -> bool:
        """True if it makes another model, other data, or other random numbers."""
        if self.key.startswith("data."):
            places = (*_PLACE_OF_DATA, *(f"data.{name}" for name in LOADER_KEYS))
            return self.key not in places
        return self.key.startswith("model.") or self.key == "seed"

    @property
    def has_effect(self) -> bool:
        """True if a run from the beginning would have learnt something else."""
        if self.key.startswith(_WITH_EFFECT):
            return True
        return not self.key.startswith((*_WITHOUT_EFFECT, *_PLACE_OF_DATA))


def in_words(changes: Sequence[Change]) -> str:
    """Returns changes as "model.nhead=4, not 2, and data.max_len=64, not 256"."""
    words = [f"{c.key}={_shown(c.of_run)}, not {_shown(c.other)}" for c in _shortened(changes)]
    return "; ".join(words[:4]) + (f"; and {len(words) - 4} more" if len(words) > 4 else "")


def table(head: str, changes: Sequence[Change], pair: str) -> Block:
    """Returns `head` and a line for each change, its two values in the places of `pair`."""
    shown = _shortened(changes)
    width = max(len(change.key) for change in shown)
    lines = [
        f"  {change.key:<{width}}  {pair.format(_shown(change.of_run), _shown(change.other))}"
        for change in shown
    ]
    return Block("\n".join(map(in_one_line, [f"{head}:", *lines])))


def _shortened(changes: Sequence[Change]) -> Sequence[Change]:
    """Leaves out the arguments of a group whose `_target_` is another: they must differ."""
    targets = {c.key.rpartition(".")[0] for c in changes if c.key.endswith("._target_")}
    return [
        c for c in changes if c.key.endswith("._target_") or c.key.partition(".")[0] not in targets
    ]


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def differences(of_run: Config, other: Config) -> Iterator[Change]:
    """Yields every key that is not the same, with values that may be shown."""
    trees = to_tree(of_run), to_tree(other)
    before, after = (dict(_flat(masked(tree))) for tree in trees)
    raw_before, raw_after = (dict(_flat(tree)) for tree in trees)
    for key in dict.fromkeys([*before, *after]):
        if key.partition(".")[0] in OF_THE_COMMAND:
            continue
        one, two = raw_before.get(key, _MISSING), raw_after.get(key, _MISSING)
        nothing = (None, _MISSING)  # a null argument and none at all are the same
        if key == "data.classes" and two in nothing:
            continue  # the run has written the names that it found
        if one != two and not (one in nothing and two in nothing):
            yield Change(key, before.get(key, _MISSING), after.get(key, _MISSING))


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value and (not key or "." not in key):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


# What the config of a run has, of whatever version; the groups after these have good defaults.
_GROUPS = (*OPEN_GROUPS, "pipeline", "world", "trainer", "checkpoint")

# What an option that is chosen is composed with, beside its group and the recipe.
_TRUST = ("allow_targets", "hydra.", "push_to", "output=")

_NAMING = ("recipe", "run_name", "output_dir", "resume", "allow_targets", "push_to", "output")


@dataclass
class Settings:
    """The values and overrides of one command.

    Attributes:
        config: the values to use.
        overrides: the command line's.
        texts: by path, interpolations of environment variables, which are written in the place of
            their values.
        leftovers: see `Composition`.
        of_run: the config of the run, where that was the base.
        changes: what the command line changes in the config of the run.
        kept: what the recipe on the command line says otherwise than the run.
        notes: lines for the log.
        config_dir: of the command line, a folder with more groups and options.
        quiet: the terminal shows warnings, errors and the result only.
        dry_run: nothing of the run is kept, so no tracker reports it, except on the terminal.
    """

    config: Config
    overrides: list[str]
    texts: dict[tuple[str | int, ...], str] = field(default_factory=dict)
    leftovers: dict[str, list[str]] = field(default_factory=dict)
    of_run: Config | None = None
    changes: list[Change] = field(default_factory=list)
    kept: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    config_dir: str | None = None
    quiet: bool = False
    dry_run: bool = False


def settle(
    command: str,
    overrides: Sequence[str],
    config_dir: str | None = None,
    run_name: str | None = None,
) -> Settings:
    """Returns the settings of `command` with `overrides`.

    Args:
        command: such as train, evaluate or export.
        overrides: the command line's.
        config_dir: a folder with more groups and options.
        run_name: in a sweep, the name of this run.

    Raises:
        ConfigError: an override is wrong, or would make another run of the one that is there.
    """
    keys = given_keys(overrides)
    # The other overrides may be about keys that only the run's config has.
    named = compose_settings(naming_overrides(overrides), config_dir)
    if run_name is not None:
        named.config.run_name = run_name
    else:
        name_run(command, named.config, keys)
    check_run_name(str(named.config.run_name))
    run = Path(named.config.output_dir) / str(named.config.run_name)
    if "/" in str(named.config.run_name) and (run.parent / "config.yaml").exists():
        raise ConfigError(f"run_name={named.config.run_name}: {run.parent} is a run, not a group")
    try:
        from hybridtrain.checkpoint import CheckpointStore  # which imports torch

        begun = bool(CheckpointStore(run / "checkpoints").steps())
    except OSError as error:  # a name that is too long, say
        raise ConfigError(
            f"cannot read the run directory {run}: {error.strerror}; set run_name= or output_dir="
        ) from error
    saved = _read(run / "config.yaml")
    if saved is None or (command == "train" and not begun and "recipe" in keys):
        given = compose_settings(overrides, config_dir)
        given.config.run_name = str(named.config.run_name)
        given.config.output_dir = named.config.output_dir
        texts = from_environment(given.tree)
        return Settings(
            given.config, list(overrides), texts, given.leftovers, config_dir=config_dir
        )
    if "recipe" in keys:
        _check_recipe(named.recipe, _recipe_of_run(saved, run), run)
    if command != "export":  # which runs no code of the run's
        _refuse_untrusted_code(saved, run, keys)
    settings = _on_top_of(saved, run, overrides, config_dir)
    settings.config.run_name = named.config.run_name
    settings.config.output_dir = named.config.output_dir
    if command == "train" and not begun and settings.of_run is not None:
        for key in {"resume", "init_from"} - set(keys):  # it has not got further than its start
            setattr(settings.config, key, getattr(settings.of_run, key))
    if command == "train" and begun and "init_from" in {key.partition(".")[0] for key in keys}:
        _refuse_other_weights(run, settings)
    changed = {change.key: _shown(change.of_run) for change in settings.changes}
    began = settings.of_run.init_from if settings.of_run is not None else None
    if "init_from" in keys and settings.config.init_from != began:
        changed["init_from"] = _shown(began)
    check_changes(command, changed)
    if begun and not settings.config.allow_changes:
        other_samples = _EVALUATED if command in ("evaluate", "predict") else ()
        _refuse_another_identity(run, [c for c in settings.changes if c.key not in other_samples])
    if "recipe" in keys and not _is_file(str(named.recipe), run / "config.yaml"):
        kept = differences(settings.config, named.config)
        settings.kept = [c for c in kept if not {c.key, c.key.partition(".")[0]} & set(keys)]
    settings.notes += _listed(settings, run)
    return settings


def _refuse_other_weights(run: Path, settings: Settings) -> None:
    """Refuses an `init_from` that a run with checkpoints would ignore."""
    from hybridtrain.checkpoint import parse_init_from  # imports torch

    given = settings.config.init_from
    began = settings.of_run.init_from if settings.of_run is not None else None
    if parse_init_from(given) != parse_init_from(began):
        start = "without init_from=" if began is None else f"from init_from={began}"
        raise ConfigError(
            f"init_from={given}: the run {run} has begun {start}, and goes on from its own "
            f"checkpoints; to begin with other weights, set another run_name="
        )


def _refuse_untrusted_code(saved: Mapping[str, Any], run: Path, keys: Sequence[str]) -> None:
    """Refuses a run with code of packages that the command line does not allow."""
    allowed = _config_of_run(saved, run).allow_targets
    if allowed and "allow_targets" not in keys:
        packages = ",".join(allowed)
        raise ConfigError(
            f"{run} is a run with code of {packages}: if you trust it, say so with "
            f"allow_targets=[{packages}] on the command line"
        )


def _on_top_of(
    saved: dict[str, Any], run: Path, overrides: Sequence[str], config_dir: str | None
) -> Settings:
    """Returns the config of the run with `overrides` on top of it."""
    of_run = _config_of_run(saved, run)
    recipe = _recipe_of_run(saved, run)
    keys = given_keys(overrides)
    base = {
        name: saved.get(name, value)  # with its interpolations
        if name in OPEN_GROUPS
        else value
        for name, value in to_tree(of_run).items()
        if name not in OF_THE_COMMAND
    }
    others = [o for o, key in zip(overrides, keys, strict=True) if key != "recipe"]
    given = compose_settings(others, config_dir, base=base)
    tree, leftovers = dict(given.tree), dict(given.leftovers)
    # An option that is chosen has the recipe's keys on top, as when the run began.
    for group, values in given.tree.items():
        if group in keys and isinstance(values, Mapping):
            of_group = [o for o, k in zip(overrides, keys, strict=True) if k.split(".")[0] == group]
            if recipe is not None:
                of_group.insert(0, f"recipe={recipe}")
            of_group += [o for o, k in zip(overrides, keys, strict=True) if k.startswith(_TRUST)]
            chosen = compose_settings(of_group, config_dir)
            tree[group] = chosen.tree[group]
            leftovers |= {name: found for name, found in chosen.leftovers.items() if name == group}
    _put_overrides(base, tree, others)
    base |= {name: tree[name] for name in OF_THE_COMMAND if name in tree}
    base["recipe"] = recipe
    try:
        config = to_config(base)
    except OmegaConfBaseException as error:
        raise _wrong_value(run, error) from error
    # what was chosen when the run began, so that its steps stay the same
    config.pipeline = with_auto_replaced(config.pipeline, of_run.pipeline)
    if config.data.get("batch_size") == AUTO:
        config.data["batch_size"] = of_run.data["batch_size"]
    if "classes" in config.data and "data.classes" not in keys:
        config.data["classes"] = config.data["classes"] or of_run.data.get("classes")
    leftovers = {
        group: [key for key in getattr(config, group) if key in names]
        for group, names in leftovers.items()
    }
    return Settings(
        config,
        list(overrides),
        from_environment(base),
        leftovers,
        of_run,
        list(differences(of_run, config)),
        config_dir=config_dir,
    )


def _refuse_another_identity(run: Path, changes: Iterable[Change]) -> None:
    others = [change for change in changes if change.is_identity]
    if others:
        raise ConfigError(
            f"{run} is a run with {in_words(others)}: leave that out to use the run unchanged, set "
            f"another run_name= to begin another run, or allow it with allow_changes=true"
        )


def _listed(settings: Settings, run: Path) -> list[str]:
    """Returns a block of lines for each kind of difference."""
    notes: list[str] = []
    if settings.changes:
        head = f"settings are those of {run}/config.yaml, except for"
        notes.append(table(head, settings.changes, "{} -> {}"))
    if settings.kept:
        recipe = settings.config.recipe
        head = f"kept as in {run}/config.yaml, although the recipe {recipe} differs"
        notes.append(table(head, settings.kept, "{}  (recipe: {})"))
    return notes


def _put_overrides(
    base: dict[str, Any], given: Mapping[str, Any], overrides: Sequence[str]
) -> None:
    """Sets in `base` what `overrides` set in the tree `given`."""
    for override in parse_overrides(overrides):
        key = override.key_or_group
        if key.startswith("hydra") or key == "recipe":
            continue
        *above, leaf = key.split(".")
        here: Any = base
        there: Any = given
        for name in above:
            here = here.setdefault(name, {}) if isinstance(here, dict) else {}
            there = there.get(name) if isinstance(there, Mapping) else None
        if not override.is_delete() and isinstance(there, Mapping) and leaf in there:
            here[leaf] = copy.deepcopy(there[leaf])
        elif isinstance(here, dict):
            here.pop(leaf, None)


def _read(path: Path) -> dict[str, Any] | None:
    """Returns the config in the file, with interpolations as text; None: there is no file."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is not a config: restore it, or set another run_name=")
    rename_old_keys(tree)
    return {str(key): value for key, value in tree.items()}


def _config_of_run(saved: Mapping[str, Any], run: Path) -> Config:
    """Returns the config of a run, also of one that another version has begun."""
    missing = [name for name in _GROUPS if not isinstance(saved.get(name), dict)]
    missing += [f"{name}._target_" for name in OPEN_GROUPS if "_target_" not in saved.get(name, {})]
    if missing:
        raise ConfigError(
            f"{run}/config.yaml has no {missing[0]}: it was emptied or cut short; restore it, or "
            f"set another run_name="
        )
    known = dict(saved)
    for name, group in groups().items():
        if isinstance(known.get(name), dict):
            names = {key.name for key in fields(group)}  # type: ignore[arg-type]
            known[name] = {k: v for k, v in known[name].items() if k in names or is_own(v)}
    known = {key: value for key, value in known.items() if key in get_type_hints(Config)}
    try:
        return to_config(known)
    except OmegaConfBaseException as error:
        raise _wrong_value(run, error) from error


def _wrong_value(run: Path, error: OmegaConfBaseException) -> ConfigError:
    return ConfigError(f"{run}/config.yaml: {str(error).strip().splitlines()[0]}")


def _recipe_of_run(saved: Mapping[str, Any], run: Path) -> str | None:
    if "recipe" in saved:
        recipe = saved["recipe"]
        return None if recipe is None else str(recipe)
    return given_recipe(read_overrides(run))  # a run of version 0.1


def _check_recipe(given: str | None, of_run: str | None, run: Path) -> None:
    """Refuses the recipe of another run; the run's own config.yaml is a recipe too."""
    if given == of_run or (given is not None and _is_file(given, run / "config.yaml")):
        return
    if given is not None and of_run is not None and _is_file(given, Path(of_run)):
        return
    of = f"of recipe={of_run}" if of_run else "without a recipe"
    raise ConfigError(
        f"{run} is a run {of}, not of recipe={given}: set another run_name=, or leave recipe= out "
        f"to use the run unchanged"
    )


def _is_file(one: str, other: Path) -> bool:
    return Path(one).resolve() == other.resolve()


def naming_overrides(overrides: Sequence[str]) -> list[str]:
    """Returns those overrides that say which run a command is about."""
    keys = given_keys(overrides)
    naming = [key in _NAMING or key.startswith("hydra.") for key in keys]
    return list(compress(overrides, naming))


def name_run(command: str, config: Config, keys: Sequence[str]) -> None:
    """Makes the run of the checkpoint that `resume` names the run of a command that names no other.

    Args:
        command: such as evaluate.
        config: whose `run_name` and `output_dir` are set.
        keys: of the command line.
    """
    if command not in ("evaluate", "predict", "export") or {"recipe", "run_name"} & set(keys):
        return
    if config.resume in (None, "auto", "last", "best"):
        return
    folder = Path(str(config.resume))
    for run in (folder, folder.parent, folder.parent.parent):
        if (run / "config.yaml").is_file() and (run / "checkpoints").is_dir():
            config.run_name, config.output_dir = run.name, str(run.parent)
            return


def leave_out_leftovers(settings: Settings) -> None:
    """Removes the keys that were written for a `_target_` that has been replaced; notes each.

    Raises:
        ConfigError: a target is not allowed or does not exist.
    """
    allow = settings.config.allow_targets
    for group, leftovers in settings.leftovers.items():
        values: dict[str, Any] = getattr(settings.config, group)
        kept = (*LOADER_KEYS, *GROUP_KEYS, "warmup_steps")
        if "warmup_steps" in leftovers and (warmup := values.get("warmup_steps")):
            settings.notes.append(
                f"{group}.warmup_steps={warmup} is kept, in front of {values['_target_']}: to "
                f"leave it out, set {group}.warmup_steps=0"
            )
        names = [name for name in leftovers if name not in kept]
        for name in instantiate.not_taken(group, values, names, allow):
            if (value := values.pop(name, None)) is not None:
                settings.notes.append(
                    f"{group}.{name}={value} is left out: {values['_target_']} does not take it"
                )


def agreed(config: Config, world: World) -> Config:
    """Returns rank 0's config, which has seen the run directory; a collective call.

    Raises:
        ConfigError: a setting that was needed to join the processes is another one here or there.
    """
    configs = world.gather(config)
    for rank, other in enumerate(configs):
        one, two = (
            {"pipeline.nb_part": c.pipeline.nb_part}
            | {f"world.{key}": value for key, value in asdict(c.world).items()}
            for c in (configs[0], other)
        )
        for key in one:
            if one[key] != two[key]:
                raise ConfigError(
                    f"{key} is {one[key]} on rank 0 and {two[key]} on rank {rank}, which does not "
                    f"see the run directory: say {key}= on the command line"
                )
    return configs[0]
