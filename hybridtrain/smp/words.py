"""The words of smp 1.x in the messages of the library below, which has others for the same things.

Functions of this package that call the library are under `in_smp_words`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from hybridtrain.errors import QUOTE_OR_ARGUMENT, reworded_errors
from hybridtrain.options import PipelineOptions
from hybridtrain.smp.config import OWN_KEY, OWN_KEYS, SCHEDULES

_KEYS = {
    **{name: f"{OWN_KEY}.{name}" for name in OWN_KEYS},
    **{option.name: f"{OWN_KEY}.{option.name}" for option in fields(PipelineOptions)},
    **{name: name for name in ("memory_weight", "default_partition")},
    "nb_part": "pipeline_parallel_degree",
    "chunks": "microbatches",
    "schedule": "pipeline",
    "max_inflight": "active_microbatches",
    "inner": "placement_strategy",
    "backend": "ddp_dist_backend",
}
"""The keys of the configuration, by the library's arguments."""

_WORDS = {
    **{rf"\bpipeline={ours}\b": f"pipeline={theirs}" for theirs, ours in SCHEDULES.items()},
    r"\bmicro-batch": "microbatch",
    r"\bMicro-batch": "Microbatch",
    r"\bstage(s?)\b": r"partition\1",
    r"\bworld\.replicas\b": "smp.dp_size()",
    r"\bworld\.replica\b": "smp.dp_rank()",
    r"\bworld\.rank\b": "smp.rank()",
    r"\bmodel\.train_step\([^)]*\)": "a function under @smp.step",
    r"(?<![\w.])HybridModel\b": "smp.DistributedModel",
}

_QUOTED = re.compile(r"""((?<!\w)(?:'[^'\n]*'|"[^"\n]*")(?!\w))""")


def smp_words(message: str) -> str:
    """Returns `message` with the keys and words of smp; quoted texts do not change."""

    def renamed(match: re.Match[str]) -> str:
        return f"{_KEYS.get(match[1], match[1])}={match[2]}" if match[1] else match[0]

    parts = _QUOTED.split(QUOTE_OR_ARGUMENT.sub(renamed, message))
    for ours, theirs in _WORDS.items():
        parts[::2] = [re.sub(ours, theirs, part) for part in parts[::2]]
    return "".join(parts)


@contextmanager
def in_smp_words() -> Iterator[None]:
    """Has errors that are raised inside speak of keys and words of smp."""
    with reworded_errors(lambda message, _: smp_words(message)):
        yield
