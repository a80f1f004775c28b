"""A plan: where a model was cut and why, as a file that a person can read, change and use again."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from hybridtrain.errors import SplitError
from hybridtrain.planning.costs import LayerCost
from hybridtrain.planning.objective import stage_costs
from hybridtrain.text_table import text_table

_HEADER = """\
# Where a model is cut into stages, and what its layers cost for one micro-batch.
# To cut it here again: pipeline.split=<path of this file>
# Layers may be moved from the end of a stage to the beginning of the next, and back; of the rest
# only `expand` (modules that are cut inside) is read.
"""

_NEW_PLAN = "make a new plan with pipeline.split=time"

# the keys of a file, and their types
_PLAN = {
    "model": str,
    "split": str,
    "schedule": str,
    "chunks": int,
    "nb_part": int,
    "stages_per_device": int,
    "recomputes": bool,
    "expand": list,
    "stages": list,
}
_STAGE = {"device": str, "in_flight": int, "layers": list}
_LAYER = get_type_hints(LayerCost)
_SAID = {
    bool: "true or false",
    str: "a text (in quotes)",
    int: "a whole number",
    float: "a number",
    list: "a list",
}


@dataclass(frozen=True)
class Plan:
    """A model in stages, and what they cost.

    TraceGuards:
        model: the class of the model.
        split: what was asked for, such as `time`.
        schedule: the schedule it is for.
        chunks: micro-batches a step.
        nb_part: devices of the pipeline.
        stages_per_device: stages on each.
        recomputes: whether stages are computed once more instead of kept.
        expand: the modules that were cut inside, by name.
        stages: the costs of each stage's layers.
        in_flight: for each stage, how many micro-batches it keeps alive at most.
        devices: for each stage, where it is.
    """

    model: str
    split: str
    schedule: str
    chunks: int
    nb_part: int
    stages_per_device: int
    recomputes: bool
    expand: list[str]
    stages: list[list[LayerCost]]
    in_flight: list[int]
    devices: list[str]

    @property
    def costs(self) -> list[LayerCost]:
        """Of all layers, in order."""
        return [cost for stage in self.stages for cost in stage]

    @property
    def counts(self) -> list[int]:
        """How many layers each stage has."""
        return [len(stage) for stage in self.stages]

    def to_yaml(self) -> str:
        """The content of a file that `read` reads, with a line for each layer."""
        content = {key: getattr(self, key) for key in _PLAN}
        content["stages"] = [
            {"device": device, "in_flight": in_flight, "layers": [_rounded(cost) for cost in stage]}
            for device, in_flight, stage in zip(
                self.devices, self.in_flight, self.stages, strict=True
            )
        ]
        # with None, only what contains no list or mapping is written on one line
        text = yaml.safe_dump(
            content, sort_keys=False, default_flow_style=None, width=2**31, allow_unicode=True
        )
        return _HEADER + text

    def write(self, path: str | PathLike[str]) -> None:
        """Writes a file that `read` reads."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Plan:
        """What `write` wrote.

        Raises:
            SplitError: there is no such file, or it is no plan.
        """
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise SplitError(f"pipeline.split: cannot read {path}: {error.strerror}") from error
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            why = " ".join(str(error).split())
            raise SplitError(f"pipeline.split: {path} is no YAML file: {why}") from error
        head = _checked(content, _PLAN, f"{path}")
        for name in head["expand"]:
            if not isinstance(name, str):
                raise SplitError(
                    f"pipeline.split: {path}: expand has {name!r}, not a module's name"
                )
        stages = [
            _checked(stage, _STAGE, f"{path}, stage {index}")
            for index, stage in enumerate(head["stages"])
        ]
        layers = [
            [
                LayerCost(**_checked(layer, _LAYER, f"{path}, stage {index}, layer {number}"))
                for number, layer in enumerate(stage["layers"])
            ]
            for index, stage in enumerate(stages)
        ]
        for index, stage in enumerate(layers):
            if not stage:
                raise SplitError(f"pipeline.split: {path}, stage {index} has no layers")
        return cls(
            **head
            | {
                "stages": layers,
                "in_flight": [stage["in_flight"] for stage in stages],
                "devices": [stage["device"] for stage in stages],
            }
        )


def _rounded(cost: LayerCost) -> dict[str, Any]:
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(cost).items()}


def _checked(given: Any, keys: Mapping[str, type], where: str) -> dict[str, Any]:
    """The values of `keys` in `given`, which others may be in too."""
    if not isinstance(given, Mapping):
        raise SplitError(
            f"pipeline.split: {where} is no part of a plan, which has the keys "
            f"{', '.join(keys)}; {_NEW_PLAN}"
        )
    for key, kind in keys.items():
        if key not in given:
            raise SplitError(f"pipeline.split: {where} lacks the key {key!r}; {_NEW_PLAN}")
        fits = type(given[key]) in ((int, float) if kind is float else (kind,))
        if not fits:
            raise SplitError(f"pipeline.split: {where}: {key}={given[key]!r} must be {_SAID[kind]}")
    return {key: given[key] for key in keys}


def counts_for(plan: Plan, names: Sequence[str], stages: int) -> list[int]:
    """How many layers each stage gets in a model whose layers are `names`.

    Raises:
        SplitError: the plan is for other layers, or for another number of stages.
    """
    planned = [cost.name for cost in plan.costs]
    for number, name in enumerate(planned):
        if name in planned[:number]:
            raise SplitError(f"pipeline.split: layer {name!r} stands twice in the plan")
    for name in planned:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise SplitError(
                f"pipeline.split: the model has no layer {name!r} of the plan{hint}, which was "
                f"made for a {plan.model}: {_NEW_PLAN}"
            )
    for name in names:
        if name not in planned:
            raise SplitError(
                f"pipeline.split: the plan, made for a {plan.model}, lacks the model's layer "
                f"{name!r}: {_NEW_PLAN}"
            )
    for ours, theirs in zip(names, planned, strict=True):
        if ours != theirs:
            raise SplitError(
                f"pipeline.split: the plan has layer {theirs!r} where the model has {ours!r}: put "
                f"the plan's layers into the model's order, or {_NEW_PLAN}"
            )
    if len(plan.stages) != stages:
        raise SplitError(
            f"pipeline.split: the plan has {len(plan.stages)} stages, and {stages} are asked for: "
            f"set pipeline.nb_part={plan.nb_part} and pipeline.stages_per_device="
            f"{plan.stages_per_device} as in the plan, or {_NEW_PLAN}"
        )
    return plan.counts


def table(plan: Plan) -> str:
    """The stages of `plan` as text, one row each.

    Times are of one micro-batch; the share of the step also counts what crosses the cuts. Where
    nothing was timed the share is of the parameters, and there is only the memory of the weights
    with their gradients and the optimizer's state.
    """
    stages = stage_costs(plan.costs, plan.counts, plan.in_flight, plan.recomputes)
    timed = any(stage.time_ms for stage in stages)
    times = ["forward ms", "backward ms", "memory"] if timed else ["weights + state"]
    share = "of the time" if timed else "of all"
    rows = [["stage", "layers", "parameters", *times, share, "device", "from ... to"]]
    parameters = sum(stage.parameters for stage in stages) or 1
    for index, (stage, layers) in enumerate(zip(stages, plan.stages, strict=True)):
        first, last = layers[0].name, layers[-1].name
        rows.append(
            [
                str(index),
                str(len(layers)),
                f"{stage.parameters:,}",
                *([f"{stage.forward_ms:.3f}", f"{stage.backward_ms:.3f}"] if timed else []),
                _size(stage.memory_bytes),
                f"{stage.share if timed else stage.parameters / parameters:.0%}",
                plan.devices[index],
                first if first == last else f"{first} ... {last}",
            ]
        )
    return "\n".join([*text_table(rows, numbers=len(rows[0]) - 2), *_too_large(plan, timed)])


def _too_large(plan: Plan, timed: bool) -> list[str]:
    """A line on the largest layer if it is larger than the mean stage, and that was minded."""
    if plan.split not in ("size", "time", "balanced"):
        return []
    sizes = {
        cost.name: cost.forward_ms + cost.backward_ms if timed else cost.parameters
        for cost in plan.costs
    }
    largest = max(sizes, key=sizes.__getitem__)
    share = sizes[largest] / (sum(sizes.values()) or 1)
    if share * len(plan.stages) < 1.01:  # less than that is noise
        return []
    whole = "step" if timed else "parameters"
    return [
        f"layer {largest} alone is {share:.0%} of the {whole}: no cut makes its stage smaller "
        f"than that"
    ]


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes / 2**10:.1f} KiB"
