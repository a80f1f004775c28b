"""A `Config` from the command line's overrides, by Hydra, and back to YAML.

`compose_settings` composes; a mistake in an override or a file is one line that says what was
probably meant (`explain`). `to_yaml` writes a config to a run directory, and `config_text` shows it
with the comments of its files.

Secrets are neither written nor shown. A key such as `token: ${oc.env:MY_TOKEN}` has its value while
a run lives; `config.yaml` has the text between the quotes, which is resolved again when it is read.
What looks like a secret by its name is shown as `***`.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from importlib.resources import files
from itertools import compress
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_module
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from omegaconf.resolvers import oc
from yaml import YAMLError

from hybridtrain._base.files import reading
from hybridtrain.cli.config.schema import (
    OPEN_GROUPS,
    RARE,
    Config,
    HardwareConfig,
    flat_keys,
    is_own,
    rename_old_keys,
    shortened,
    text_keys,
    with_new_keys,
)
from hybridtrain.cli.config.targets import unknown_key
from hybridtrain.errors import ConfigError, closest, did_you_mean

MASK = "***"

# Whole words of a key: `hub_token` and `api_key`, but neither `tokenizer` nor `monkey`.
_SECRET_KEY = re.compile(
    r"(?:^|_)(?:token|password|passwd|secret|credentials?|(?:api|access|secret|private)_?key)$",
    re.IGNORECASE,
)
_ENVIRONMENT = "oc.env"


def to_config(tree: Mapping[str, Any]) -> Config:
    """Resolves the interpolations of `tree` and returns its values as a `Config`.

    Raises:
        OmegaConfBaseException: a key is unknown, or a value is of a wrong type.
    """
    plain = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(dict(tree)), resolve=True))
    own = {}
    if isinstance(monitors := plain.get("monitor"), dict):
        own = {name: value for name, value in monitors.items() if is_own(value)}
        plain["monitor"] = {name: monitors[name] for name in monitors if name not in own}
    config = cast(Config, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), plain)))
    vars(config.monitor).update(own)
    return config


def to_tree(config: Config) -> dict[str, Any]:
    """Returns `config` as plain dicts."""
    tree = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(config)))
    return {**tree, "monitor": copy.deepcopy(vars(config.monitor))}


def from_environment(tree: Mapping[str, Any]) -> dict[tuple[str | int, ...], str]:
    """Returns, by path, the interpolations whose value depends on an environment variable.

    Also those that take such a value over from another key: each is resolved a second time with
    other environment variables, and compared.
    """
    config = OmegaConf.create(dict(tree))
    texts = {path: text for path, text in _leaves(tree) if isinstance(text, str) and "${" in text}
    if not any(_ENVIRONMENT in text for text in texts.values()):
        return {}
    now = {path: _resolved(config, path) for path in texts}
    OmegaConf.register_new_resolver(_ENVIRONMENT, lambda *_: "another value", replace=True)
    try:
        others = {path: _resolved(config, path) for path in texts}
    finally:
        OmegaConf.register_new_resolver(_ENVIRONMENT, oc.env, replace=True)
    return {path: text for path, text in texts.items() if now[path] != others[path]}


def masked(value: Any, name: str = "") -> Any:
    """Returns a copy of `value` in which the values of keys that look like secrets are `***`."""
    if isinstance(value, Mapping):
        return {key: masked(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, name) for inner in value]
    if isinstance(value, str) and value and _SECRET_KEY.search(name) and "${" not in value:
        return MASK
    return value


def put(tree: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Sets the value at `path` of nested dicts and lists, if it is still there."""
    *above, leaf = path
    try:
        for key in above:
            tree = tree[key]
        tree[leaf]
    except (KeyError, IndexError, TypeError):
        return
    tree[leaf] = value


def _leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, value


def _resolved(config: Any, path: tuple[str | int, ...]) -> Any:
    """Returns the value at `path`; an object that equals no other if it cannot be resolved."""
    try:
        for key in path:
            config = config[key]
    except OmegaConfBaseException:
        return object()
    return config


def to_yaml(
    config: Config, texts: Mapping[tuple[str | int, ...], str] = {}, mask: bool = False
) -> str:
    """Returns a config as written to the run directory.

    Args:
        config: with its interpolations resolved.
        texts: by path, interpolations to write in the place of the values (`from_environment`).
        mask: for people: without what looks like a secret.
    """
    tree = to_tree(config)
    for path, text in texts.items():
        put(tree, path, text)
    if mask:
        tree = masked(tree)
    return OmegaConf.to_yaml(OmegaConf.create(tree))


_KEY = re.compile(r"^( *)(\w+):")


def config_text(composition: Composition, resolve: bool = False, package: str | None = None) -> str:
    """Returns a config as YAML, each key with the comment of the file that it comes from.

    Args:
        composition: what to show.
        resolve: with the values of interpolations.
        package: show only this group.
    """
    tree: Any = composition.tree
    if resolve:
        tree = to_tree(composition.config)
    comments = dict(_comments(tree))
    tree, left_out = _without_rare(masked(tree))
    if package is not None:
        if package not in tree:
            raise ConfigError(f"--package {package}: there is no such group")
        tree = {package: tree[package]}
    group, lines = "", []
    for line in OmegaConf.to_yaml(OmegaConf.create(tree)).splitlines():
        comment = None
        if (key := _KEY.match(line)) and len(key[1]) in (0, 2):
            group = key[2] if not key[1] else group
            comment = comments.get(key[2] if not key[1] else f"{group}.{key[2]}")
        lines.append(f"{line}  # {comment}" if comment else line)
    if package is None:
        lines.append(f"# rare keys, at their defaults: {', '.join(left_out)}")
    return "\n".join(lines)


def _without_rare(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the tree without rare keys that have their defaults, and these keys."""
    defaults = to_tree(Config(hardware=HardwareConfig()))
    left_out = [
        f"{group}.{key}"
        for group, keys in RARE.items()
        for key in keys
        if tree.get(group) and tree[group].get(key) == defaults[group][key]
    ]
    shown = {
        group: {key: value for key, value in values.items() if f"{group}.{key}" not in left_out}
        if group in RARE and values
        else values
        for group, values in tree.items()
    }
    return shown, left_out


def _comments(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the comment of each key: out of the schema, and the files of the open groups."""
    folder = files("hybridtrain.configs")
    for name, entry in json.loads((folder / "schema.json").read_text())["properties"].items():
        for key, inner in {"": entry, **entry.get("properties", {})}.items():
            text: str = inner.get("description", "")
            yield f"{name}.{key}".rstrip("."), text.partition(". ")[0]
    for group in OPEN_GROUPS:
        target = f"_target_: {(tree.get(group) or {}).get('_target_')}\n"
        for option in (folder / group).iterdir():
            text = option.read_text() if option.name.endswith(".yaml") else ""
            if target in text:
                for key, comment in re.findall(r"^(\w+): .*? # (.*)$", text, re.M):
                    yield f"{group}.{key}", comment


THIS_MACHINE = "this-machine"


def measured_file() -> Path:
    """Returns where `measure-machine` writes, and `hardware=this-machine` is read from."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hybridtrain" / f"{THIS_MACHINE}.yaml"


CONFIG_MODULE = "hybridtrain.configs"

# The name of a run's config among the recipes.
_BASE = "config_of_the_run"

# The only setting of Hydra's own that has a meaning here.
_SEARCH_PATH = "hydra.searchpath"


@dataclass(frozen=True)
class Composition:
    """A composed config, and where its values come from.

    Attributes:
        config: the values.
        tree: the same as plain dicts, with interpolations (`${...}`) as their text.
        recipe: the recipe as it was given: a name, a path, or None.
        leftovers: by group, keys that come from a group's option or recipe, while the `_target_`
            that they are for was replaced.
    """

    config: Config
    tree: dict[str, Any]
    recipe: str | None = None
    leftovers: dict[str, list[str]] = field(default_factory=dict)


def register() -> None:
    """Registers the schema and the recipes with Hydra.

    Hydra would not find the recipes, which are not in a folder of the configs: each file is stored
    as an option of the group `recipe`, at the root of the config. Files of an earlier command in
    this process are left out.
    """
    store = ConfigStore.instance()
    schema = OmegaConf.structured(Config)
    # for the user's own trackers; `to_config` refuses what is none
    OmegaConf.set_struct(schema.monitor, False)
    store.store(name="schema", node=schema)
    store.repo["recipe"] = _Recipes(
        (file.name, ConfigNode(file.name, file, "recipe", "_global_", provider=None))
        for file in files("hybridtrain.recipes").iterdir()
        if file.name.endswith(".yaml")
    )


class _Recipes(dict[str, ConfigNode]):
    """Recipes by their files' names, of which only one that is taken is parsed."""

    def __getitem__(self, name: str) -> ConfigNode:
        recipe = super().__getitem__(name)
        if not isinstance(recipe.node, DictConfig):
            recipe.node = _parsed(recipe.node.read_text())
        return recipe


def compose_config(overrides: Sequence[str], config_dir: str | None = None) -> Config:
    """Returns the config of `compose_settings`."""
    return compose_settings(with_new_keys(overrides), config_dir).config


def compose_settings(
    overrides: Sequence[str],
    config_dir: str | None = None,
    base: Mapping[str, Any] | None = None,
) -> Composition:
    """Composes the config of a run.

    Args:
        overrides: Hydra overrides. `recipe=path/to/file.yaml` takes that file as the recipe.
        config_dir: a folder with more groups and options.
        base: the config of a run, in the place of a recipe.

    Raises:
        ConfigError: one line that names the key or option, and the one that was probably meant.
    """
    register()
    recipe = given_recipe(overrides)
    wanted = [register_file(override) for override in with_texts(overrides)]
    if base is not None:
        # an option that is chosen replaces the group as a whole
        kept = {name: values for name, values in base.items() if name not in given_keys(overrides)}
        _store("recipe", _BASE, OmegaConf.to_yaml(OmegaConf.create(kept)))
        # the command that began the run may be called again, with what it added and removed
        again = [f"+{o}" if re.match(r"\+[\w]+\.", o) else o for o in wanted]
        known = set(flat_keys(kept))
        wanted = [o for o in again if not (o.startswith("~") and "." in o and o[1:] not in known)]
        wanted.insert(0, f"recipe={_BASE}")
    # Hydra cannot delete a key that is null.
    deleted = [o[1:] for o in wanted if o.startswith("~") and "." in o and "=" not in o]
    wanted = [override for override in wanted if override[1:] not in deleted or override[0] != "~"]
    if config_dir is not None:
        wanted = _with_search_path(wanted, config_dir)
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        try:
            composed = compose("config", overrides=wanted, return_hydra_config=True)
            choices = dict(composed.hydra.runtime.choices)
            OmegaConf.set_struct(composed, False)
            del composed["hydra"]
            tree = cast(dict[str, Any], OmegaConf.to_container(composed))
            for key in deleted:
                _delete(tree, key)
            # Merged into the schema again: `+key` and untyped files pass Hydra's own check.
            tree["recipe"] = recipe or tree.get("recipe")
            tree["run_name"] = tree.get("run_name") or default_run_name(recipe)
            _let_one_length_replace_the_other(tree.get("trainer"), given_keys(overrides))
            config = to_config(tree)
        # OmegaConf asserts that a group which gets a value is not null
        except (HydraException, OmegaConfBaseException, ValueError, AssertionError) as error:
            raise ConfigError(explain(error, wanted)) from error
    if config.allow_targets and "allow_targets" not in given_keys(overrides):
        raise ConfigError(
            f"the recipe asks to run code of {', '.join(config.allow_targets)}: if you trust it, "
            f"say so with allow_targets=[{','.join(config.allow_targets)}] on the command line"
        )
    if config.push_to and "push_to" not in given_keys(overrides):
        raise ConfigError(
            f"the recipe asks to send the model to {config.push_to!r}: if you want that, say so "
            f"with push_to={config.push_to} on the command line"
        )
    if config.output and "output" not in given_keys(overrides):
        raise ConfigError(
            f"the recipe asks to write the predictions to {config.output!r}: if you want that, say "
            f"so with output={hydra_quoted(str(config.output))} on the command line"
        )
    return Composition(config, tree, recipe, _leftovers(tree, overrides, choices.get("recipe")))


def _let_one_length_replace_the_other(trainer: Any, given: Sequence[str]) -> None:
    """Has `trainer.steps=100` replace the `trainer.epochs` of a recipe, and the other way round."""
    lengths = ("steps", "epochs")
    own = [name for name in lengths if f"trainer.{name}" in given]
    if len(own) == 1 and isinstance(trainer, MutableMapping) and trainer.get(own[0]) is not None:
        trainer.update({name: None for name in lengths if name != own[0]})


def default_run_name(recipe: str | None) -> str:
    """Returns the name of a run of `recipe` that has no other: `recs/a/base.yaml` is `recs-a-base`.

    A path below the working directory is taken from there, any other from the root.
    """
    if recipe is None:
        return "run"
    path = Path(recipe)
    if path.suffix not in (".yaml", ".yml"):
        return shortened(recipe.replace("/", "-"))
    full, here = path.resolve(), Path.cwd().resolve()
    relative = full.relative_to(here) if full.is_relative_to(here) else full.relative_to("/")
    return shortened("-".join(relative.with_suffix("").parts))


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Returns Hydra's reading of `overrides`.

    Raises:
        ConfigError: one of them cannot be read.
    """
    try:
        parsed: list[Override] = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(_unreadable(overrides) or " ".join(str(error).split())) from error
    return parsed


def with_texts(overrides: Sequence[str]) -> list[str]:
    """Returns overrides in which the values of text keys are texts: `run_name=1e3`, not 1000.0.

    Overrides that cannot be read stay unchanged.
    """
    return [
        _with_text(o) if o.partition("=")[0].lstrip("+") in text_keys() else o for o in overrides
    ]


def _with_text(override: str) -> str:
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return override
    key, _, text = override.partition("=")
    value, texts = parsed.value(), [text]
    values = [value]
    if isinstance(value, ChoiceSweep) and value.simple_form:
        values, texts = value.list, text.split(",")
    if len(values) != len(texts) or not any(isinstance(v, int | float) for v in values):
        return override
    quoted = [
        f"'{t.strip()}'" if isinstance(v, int | float) else t
        for v, t in zip(values, texts, strict=True)
    ]
    return f"{key}={','.join(quoted)}"


def given_keys(overrides: Sequence[str]) -> list[str]:
    """Returns the keys and groups that `overrides` set, without their `+`, `++` and `~`."""
    return [override.partition("=")[0].lstrip("+~") for override in overrides]


def with_later(earlier: Sequence[str], later: Sequence[str]) -> list[str]:
    """Returns the overrides of two commands, without those whose key or group `later` sets."""
    keys = given_keys(later)
    kept = [not any(f"{k}.".startswith(f"{key}.") for key in keys) for k in given_keys(earlier)]
    return [*compress(earlier, kept), *later]


def read_overrides(run: Path) -> list[str]:
    """Returns what the `overrides.yaml` of a run has; nothing if there is no such file.

    Raises:
        DataError: it cannot be read.
    """
    path = run / "overrides.yaml"
    with reading(path):
        try:
            found = OmegaConf.to_container(OmegaConf.load(path))
        except FileNotFoundError:
            return []
        if not isinstance(found, list):
            raise TypeError("it is not a list")
    return with_new_keys([str(word) for word in found])


def given_recipe(overrides: Sequence[str]) -> str | None:
    """Returns the recipe that `overrides` name, as it is written there."""
    for override in overrides:
        key, _, value = override.partition("=")
        if key.lstrip("+") == "recipe" and value not in ("", "null"):
            return value
    return None


def sweep_choices(overrides: Sequence[str], config_dir: str | None = None) -> list[list[str]]:
    """Returns the overrides of each run of a sweep such as `optim.lr=1e-3,1e-2`.

    Raises:
        ConfigError: an override cannot be read or swept over.
    """
    register()
    search_path = [o for o in overrides if o.lstrip("+").startswith(_SEARCH_PATH)]
    if config_dir is not None:
        search_path = _with_search_path(search_path, config_dir)
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        try:
            compose("config", overrides=search_path, return_hydra_config=True)
            loader = GlobalHydra.instance().config_loader()
            parser = OverridesParser.create(config_loader=loader)
            parsed = parser.parse_overrides(with_texts(overrides))
            for override in parsed:
                key, glob = override.key_or_group, override.value()
                if isinstance(glob, Glob) and not glob.filter(loader.get_group_options(key)):
                    raise ConfigError(
                        f"{override.input_line}: glob() chooses among the options of a group "
                        f"(optim=glob(*)), and none of {key} fits; list the values: "
                        f"{key}=value1,value2"
                    )
                if override.is_interval_sweep():
                    raise ConfigError(
                        f"{override.input_line}: interval() is for a search, and a sweep runs "
                        f"every value: list them, {key}=1e-4,1e-3, or write {key}=range(1,4)"
                    )
                if str(override.input_line).endswith("="):
                    raise ConfigError(
                        f"{override.input_line} has no value: write {key}=null, or a list of "
                        f"values, {key}=value1,value2"
                    )
            # Not through hydra.main: within its jobs no further config can be composed.
            return [list(choice) for choice in BasicSweeper.split_arguments(parsed, None)[0]]
        except HydraException as error:
            line = _unreadable(overrides) or " ".join(str(error).split())
            raise ConfigError(line) from error


def register_file(override: str) -> str:
    """Registers the file of `recipe=path/to/file.yaml` and returns `recipe=file`; or of `hardware`.

    Any other override is returned unchanged.

    Raises:
        ConfigError: the file cannot be read or is not YAML, a cluster is a list or mapping, or this
            machine has not been measured.
    """
    key, _, value = override.partition("=")
    group = key.lstrip("+")
    if group == "hardware" and value.startswith(("[", "{")):
        raise ConfigError(
            f"hardware={value} must be the name of a machine, or the path of a YAML file with its "
            f"keys; single ones are set as hardware.nodes=2"
        )
    path = Path(value)
    if group == "hardware" and value == THIS_MACHINE:
        path = measured_file()
        if not path.exists():
            raise ConfigError(
                "hardware=this-machine: this machine has not been measured yet; "
                "`hybridtrain measure-machine` does it in a minute"
            )
    if group not in ("recipe", "hardware") or path.suffix not in (".yaml", ".yml"):
        return override
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{override}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{override}: it is not UTF-8 text") from error
    # a preset of the same name would win
    name = path.stem if group == "recipe" else f"{path.stem}-file"
    _store(group, name, text, override)
    return f"{key}={name}"


def _store(group: str, name: str, text: str, override: str = "") -> None:
    """Stores YAML as an option of a group with Hydra; a recipe is one of the root."""
    package = "_global_" if group == "recipe" else group
    node = _parsed(text, override)
    ConfigStore.instance().store(group=group, name=name, package=package, node=node)


def _parsed(text: str, override: str = "") -> DictConfig:
    """Returns the content of an option's file."""
    try:
        node = OmegaConf.create(text)
    except YAMLError as error:
        raise ConfigError(f"{override} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{override} must be a mapping of keys to values")
    rename_old_keys(node)
    return node


def _with_search_path(overrides: Sequence[str], config_dir: str) -> list[str]:
    """Returns `overrides` with `config_dir` in the search path, after what they put there."""
    folder = Path(config_dir)
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {config_dir}: there is no such folder")
    paths: list[str] = []
    for override in parse_overrides([o for o in overrides if _SEARCH_PATH in o]):
        value = override.value()
        paths += [str(path) for path in value] if isinstance(value, list) else [str(value)]
    paths.append(f"file://{folder.resolve()}")
    others = [override for override in overrides if _SEARCH_PATH not in override]
    return [*others, f"{_SEARCH_PATH}=[{','.join(repr(path) for path in paths)}]"]


def _delete(tree: dict[str, Any], key: str) -> None:
    parent: Any = tree
    *above, leaf = key.split(".")
    for name in above:
        parent = parent.get(name) if isinstance(parent, dict) else None
    if not isinstance(parent, dict) or leaf not in parent:
        raise ConfigError(unknown_key(key, list(flat_keys(tree))))
    del parent[leaf]


def _leftovers(
    tree: Mapping[str, Any], overrides: Sequence[str], recipe: str | None
) -> dict[str, list[str]]:
    """Returns the keys of each open group that were not written for its `_target_`."""
    of_recipe: Mapping[str, Any] = {}
    if recipe is not None:
        store = ConfigStore.instance()
        if f"{recipe}.yaml" in store.repo["recipe"]:
            found = store.load(f"recipe/{recipe}.yaml").node
            of_recipe = cast(dict[str, Any], OmegaConf.to_container(found))
    keys = given_keys(overrides)
    leftovers = {}
    for group in OPEN_GROUPS:
        given = {key.split(".")[1] for key in keys if key.startswith(f"{group}.")}
        in_recipe = of_recipe.get(group)
        if group in keys and isinstance(in_recipe, dict) and "_target_" not in given:
            # keys that the recipe has for the option that was replaced
            leftovers[group] = [key for key in in_recipe if key not in given]
            continue
        if "_target_" not in given:
            if not isinstance(in_recipe, dict) or "_target_" not in in_recipe or group in keys:
                continue
            given |= set(in_recipe)
        leftovers[group] = [key for key in tree.get(group) or {} if key not in given]
    return leftovers


def explain(error: Exception, overrides: Sequence[str]) -> str:
    """Returns one line that says what Hydra or OmegaConf found, and how to fix it."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for cause in causes:
        if isinstance(cause, MissingConfigException):
            group, _, chosen = (cause.missing_cfg_file or "").lstrip("/").rpartition("/")
            known = GlobalHydra.instance().config_loader().get_group_options(group)
            return f"{group}={chosen} is unknown: {did_you_mean(chosen, known)}"
    machine = [override for override in overrides if override.startswith("cluster.")]
    if machine and "NoneType" in str(error):  # the group is null
        return f"{machine[0]} changes a machine, but none is named: add hardware=h100, say"
    return (
        _wrong_override(error, overrides)
        or _unknown_group(error)
        or _unknown_key(causes, overrides)
        or _wrong_value(causes)
        or " ".join(str(error).split())
    )


def _wrong_override(error: Exception, overrides: Sequence[str]) -> str | None:
    """Looks for an override that cannot be read, or gives a group a value."""
    loader = GlobalHydra.instance().config_loader()
    for override in overrides:
        if unreadable := _unreadable([override]):
            return unreadable
        key, _, value = override.partition("=")
        if not key:
            return f"cannot read the override {override!r}: there is no key before the ="
        if key.startswith("+") and key.lstrip("+") in _groups():
            return f"{override}: {key.lstrip('+')} exists already; write {override.lstrip('+')}"
        options = loader.get_group_options(key)
        if type(error) is ValueError and options and value not in options:  # a number, say
            return f"{override} is unknown: {did_you_mean(value, options)}"
    return None


def _unreadable(overrides: Sequence[str]) -> str | None:
    """Returns what is wrong with the first override that Hydra's grammar does not have."""
    for override in overrides:
        try:
            OverridesParser.create().parse_override(override)
        except HydraException as error:
            return f"cannot read the override {override!r}: {_first_line(error)}{_quoted(override)}"
    return None


def hydra_quoted(text: str) -> str:
    """Returns `text` as a value that Hydra reads as a string, whatever is in it."""
    is_value = text.lower() in ("null", "true", "false", "nan", "inf")
    if re.fullmatch(r"[A-Za-z][\w./-]*", text, re.ASCII) and not is_value:
        return text
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", text) + "'"


def _quoted(override: str) -> str:
    """Returns how a text, or a list of texts, with signs that mean something to Hydra is written.

    It is empty where quotes around the value do not make an override of it.
    """
    key, sign, value = override.partition("=")
    forms = [f"{key}={hydra_quoted(value)}"]
    if listed := re.fullmatch(r"\[([^\[\]\"']+)\]", value):
        texts = ", ".join(f'"{text.strip()}"' for text in listed[1].split(","))
        forms.insert(0, f"{key}=[{texts}]")
    for form in forms if sign and value else ():
        with suppress(HydraException):
            OverridesParser.create().parse_override(form)
            return f"; texts with spaces or signs need quotes: {shell_quoted(form)}"
    return ""


def shell_quoted(word: str) -> str:
    """Returns a word as a shell takes it, in double quotes where it has single ones."""
    if "'" in word and not set('"$`\\!') & set(word):
        return f'"{word}"'
    return shlex.quote(word)


def _unknown_group(error: Exception) -> str | None:
    if unknown := re.search(r"In '(.+)': Could not override '([^@']+)", str(error)):
        groups = GlobalHydra.instance().config_loader().list_groups("")
        close = closest(unknown[2].removeprefix("recipe/"), groups)
        hint = f"; did you mean 'override /{close}'?" if close else ""
        return f"{unknown[1]}: there is no group {unknown[2]} in the defaults list{hint}"
    return None


def _unknown_key(causes: Sequence[BaseException], overrides: Sequence[str]) -> str | None:
    known = _known_keys(overrides)
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~").partition("@")[0]
        if not key or not known or key in known or key.startswith("hydra."):
            continue
        open_group = key.partition(".")[0] in OPEN_GROUPS and "." in key
        if open_group and override.startswith("+"):
            continue  # the target's own argument, which is right to be added
        hint = ""
        if open_group and not override.startswith("~"):
            hint = f"; if your own function takes it, write +{override}"
        return unknown_key(key, known) + hint
    for cause in causes:
        if isinstance(cause, ConfigKeyError) and cause.full_key:
            return unknown_key(cause.full_key, known)
    return None


def _wrong_value(causes: Sequence[BaseException]) -> str | None:
    for cause in causes:
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            return f"{cause.full_key}: {_first_line(cause)}"
    return None


def _known_keys(overrides: Sequence[str]) -> list[str]:
    """Returns the config's keys and groups, composed from the overrides that choose options."""
    groups = [group for group in _groups() if group != "schema"]
    choices = [o for o in overrides if o.partition("=")[0].lstrip("+") in groups]
    try:
        composed = compose("config", overrides=choices)
        to_config(cast(dict[str, Any], OmegaConf.to_container(composed)))
    except (HydraException, OmegaConfBaseException):
        composed = compose("config")
    tree = OmegaConf.to_container(composed)
    return [*flat_keys(cast(dict[str, Any], tree)), "recipe"]


def _groups() -> list[str]:
    return [*(f.name for f in fields(Config)), "recipe"]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
