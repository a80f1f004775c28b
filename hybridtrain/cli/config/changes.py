"""The differences between a run's config and another one, and their effect on the run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from hybridtrain._base.text_table import Block, in_one_line
from hybridtrain.cli.config.schema import LOADER_KEYS, Config
from hybridtrain.cli.config.secrets import masked
from hybridtrain.cli.config.tree import to_tree

# These belong to the command, not to the run.
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
    "format",
    "push_to",
)

# Keys for how a run is executed, monitored and saved; all others affect the trained weights.
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
    "trainer.attention",
    "trainer.compile",
    "trainer.max_time",
    "trainer.max_skipped",
)
_WITH_EFFECT = ("pipeline.batch_norm", "pipeline.sync_batch_norm")
# Keys that select other samples to evaluate on, which does not require a new run.
EVALUATED = ("data.eval_path", "data.eval_split")
_PLACE_OF_DATA = (
    "data.root",
    "data.download",
    "data.workers",
    "data.timeout_s",
    "data.predict_path",
)

_MISSING = "(not set)"  # the value of a missing key


@dataclass(frozen=True)
class Change:
    """A key with different values in the config of a run and another config."""

    key: str
    of_run: Any
    other: Any

    @property
    def is_new(self) -> bool:
        """True if the run has no such key."""
        return bool(self.of_run == _MISSING)

    @property
    def is_identity(self) -> bool:
        """True if it changes the model, the data, or the random numbers."""
        if self.key.startswith("data."):
            places = (*_PLACE_OF_DATA, *(f"data.{name}" for name in LOADER_KEYS))
            return self.key not in places
        return self.key.startswith("model.") or self.key == "seed"

    @property
    def has_effect(self) -> bool:
        """True if training from the start would give other weights."""
        if self.key.startswith(_WITH_EFFECT):
            return True
        return not self.key.startswith((*_WITHOUT_EFFECT, *_PLACE_OF_DATA))


def differences(of_run: Config, other: Config) -> Iterator[Change]:
    """Yields every key that differs, with secrets masked in the values."""
    trees = to_tree(of_run), to_tree(other)
    before, after = (dict(_flat(masked(tree))) for tree in trees)
    raw_before, raw_after = (dict(_flat(tree)) for tree in trees)
    for key in dict.fromkeys([*before, *after]):
        if key.partition(".")[0] in OF_THE_COMMAND:
            continue
        one, two = raw_before.get(key, _MISSING), raw_after.get(key, _MISSING)
        nothing = (None, _MISSING)  # a null argument equals a missing one
        if key == "data.classes" and two in nothing:
            continue  # the run wrote the class names of its data
        if one != two and not (one in nothing and two in nothing):
            yield Change(key, before.get(key, _MISSING), after.get(key, _MISSING))


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value and (not key or "." not in key):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def in_words(changes: Sequence[Change]) -> str:
    """Returns changes as "model.nhead=4, not 2; data.max_len=64, not 256"."""
    words = [f"{c.key}={as_yaml(c.of_run)}, not {as_yaml(c.other)}" for c in _shortened(changes)]
    return "; ".join(words[:4]) + (f"; and {len(words) - 4} more" if len(words) > 4 else "")


def changes_table(head: str, changes: Sequence[Change], pair: str) -> Block:
    """Returns `head` and a line for each change, with both values formatted by `pair`."""
    shown = _shortened(changes)
    width = max(len(change.key) for change in shown)
    lines = [
        f"  {change.key:<{width}}  {pair.format(as_yaml(change.of_run), as_yaml(change.other))}"
        for change in shown
    ]
    return Block("\n".join(map(in_one_line, [f"{head}:", *lines])))


def _shortened(changes: Sequence[Change]) -> Sequence[Change]:
    """Leaves out the arguments of a group if its `_target_` differs: they then differ too."""
    targets = {c.key.rpartition(".")[0] for c in changes if c.key.endswith("._target_")}
    return [
        c for c in changes if c.key.endswith("._target_") or c.key.partition(".")[0] not in targets
    ]


def as_yaml(value: Any) -> str:
    """Returns a value in the notation of YAML and the command line."""
    if value is None:
        return "null"
    if isinstance(value, Mapping | list):
        text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf)
        return text.strip()
    return str(value).lower() if isinstance(value, bool) else str(value)
