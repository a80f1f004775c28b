"""A plan: where a model is cut and what its layers cost, as data and as an editable YAML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from hybridtrain.errors import SplitError, closest
from hybridtrain.files import write_atomically
from hybridtrain.options import CheckpointSpec
from hybridtrain.planning.costs import LayerCost
from hybridtrain.planning.objective import (
    MEASURED_SPLITS,
    StageCost,
    recomputes_stages,
    stage_costs,
)
from hybridtrain.text_table import text_table, with_unit

_HEADER = """\
# Where a model is cut into stages, and what its layers cost for one micro-batch.
# To cut it like this again: split=<path of this file>
# Layers may be moved from the end of a stage to the beginning of the next one, and back. Of the
# rest only `expand` (modules that are cut inside) is read.
"""

_NEW_PLAN = "make a new plan with split=time"


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan.

    Attributes:
        device: where it is, a name local to its process.
        process: which of the replica's processes owns it, counted from 0.
        in_flight: the most micro-batches that it keeps alive at one time.
        layers: the costs of its layers, in order.
    """

    device: str
    process: int
    in_flight: int
    layers: list[LayerCost]


@dataclass(frozen=True, repr=False)
class Plan:
    """A model in stages, what they cost, and who owns them.

    Attributes:
        model: the class of the model.
        split: what was asked for, such as `time`; `by hand` for a list.
        schedule: the name of the schedule.
        chunks: micro-batches per step.
        nb_part: devices of the pipeline.
        stages_per_device: stages on each device.
        checkpoint: activation checkpointing, as in `PipelineOptions`.
        expand: the modules that are cut inside, by name.
        costs_from: `measured`, `estimated`, `counted` (parameters only) or `given` by the caller.
        stages: the stages in the order of the pipeline.
    """

    model: str
    split: str
    schedule: str
    chunks: int
    nb_part: int
    stages_per_device: int
    checkpoint: CheckpointSpec
    expand: list[str]
    costs_from: str
    stages: list[StagePlan]

    def __repr__(self) -> str:
        stages = ", ".join(f"{len(stage.layers)} on {stage.device}" for stage in self.stages)
        return (
            f"Plan({self.model}, split={self.split!r}, schedule={self.schedule!r}, "
            f"chunks={self.chunks}, costs_from={self.costs_from!r}, layers=[{stages}])"
        )

    @property
    def costs(self) -> list[LayerCost]:
        """The costs of all layers, in order."""
        return [cost for stage in self.stages for cost in stage.layers]

    @property
    def counts(self) -> list[int]:
        """The number of layers of each stage."""
        return [len(stage.layers) for stage in self.stages]

    @property
    def layer_names(self) -> list[list[str]]:
        """The names of the layers of each stage."""
        return [[cost.name for cost in stage.layers] for stage in self.stages]

    @property
    def in_flight(self) -> list[int]:
        """The most micro-batches that each stage keeps alive at one time."""
        return [stage.in_flight for stage in self.stages]

    def stage_costs(self) -> list[StageCost]:
        """Returns what each stage costs, by the costs of its layers."""
        return stage_costs(
            self.costs, self.counts, self.in_flight, recomputes_stages(self.checkpoint)
        )

    def to_yaml(self) -> str:
        """Returns the content of a file that `read` reads, with one line per layer."""
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        if not isinstance(self.checkpoint, str | Mapping):
            content["checkpoint"] = list(self.checkpoint)
        content["stages"] = [
            vars(stage) | {"layers": [_rounded(cost) for cost in stage.layers]}
            for stage in self.stages
        ]
        # with None, only what contains no list or mapping is written on one line
        text = yaml.safe_dump(
            content, sort_keys=False, default_flow_style=None, width=2**31, allow_unicode=True
        )
        return _HEADER + text

    def write(self, path: str | PathLike[str]) -> None:
        """Writes a file that `read` reads."""
        write_atomically(Path(path), self.to_yaml())

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Plan:
        """Reads what `write` wrote, also by earlier versions.

        Raises:
            SplitError: there is no such file, or it is not a plan.
        """
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise SplitError(f"split=: cannot read {path}: {error.strerror}") from error
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            why = " ".join(str(error).split())
            raise SplitError(f"split=: {path} is not a YAML file: {why}") from error
        return cls(**_values(cls, content, f"{path}"))


def _rounded(cost: LayerCost) -> dict[str, Any]:
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(cost).items()}


# Earlier versions' keys, and what a file of theirs means that lacks one.
_FORMER_KEYS = {"expand": "deeper", "in_flight": "held"}
_DEFAULTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "process": lambda _: 0,
    "checkpoint": lambda plan: "always" if plan.get("recomputes") else "never",
    "costs_from": lambda plan: "measured" if plan.get("split") in MEASURED_SPLITS else "counted",
}

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a text (in quotes)"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "CheckpointSpec": ((str, list, dict), "a mode, {every: k} or a list of layer names"),
}


def _values(kind: type[Any], given: Any, where: str) -> dict[str, Any]:
    """Returns the fields of the dataclass `kind` from `given`, which may hold other keys too."""
    names = [field.name for field in fields(kind)]
    if not isinstance(given, Mapping):
        raise SplitError(
            f"split=: {where} is not a part of a plan, which has the keys {', '.join(names)}; "
            f"{_NEW_PLAN}"
        )
    values: dict[str, Any] = {}
    for field in fields(kind):
        name = field.name
        key = name if name in given else _FORMER_KEYS.get(name, name)
        if key not in given and name not in _DEFAULTS:
            raise SplitError(f"split=: {where} lacks the key {name!r}; {_NEW_PLAN}")
        value = given[key] if key in given else _DEFAULTS[name](given)
        values[name] = _value(str(field.type), value, name, where)
    return values


def _value(kind: str, value: Any, name: str, where: str) -> Any:
    if not kind.startswith("list["):
        types, said = _TYPES[kind]
        if type(value) not in types:
            raise SplitError(f"split=: {where}: {name}={value!r} must be {said}")
        return value
    if not isinstance(value, list):
        raise SplitError(f"split=: {where}: {name}={value!r} must be a list")
    if name == "expand":
        return [_value("str", item, f"expand[{i}]", where) for i, item in enumerate(value)]
    if name == "layers":
        if not value:
            raise SplitError(f"split=: {where} has no layers")
        return [
            LayerCost(**_values(LayerCost, item, f"{where}, layer {i}"))
            for i, item in enumerate(value)
        ]
    return [
        StagePlan(**_values(StagePlan, item, f"{where}, stage {i}")) for i, item in enumerate(value)
    ]


def counts_for(plan: Plan, names: Sequence[str], stages: int) -> list[int]:
    """Returns how many layers each stage gets in a model whose layers are `names`.

    Raises:
        SplitError: the plan is for other layers, or for another number of stages.
    """
    planned = [cost.name for cost in plan.costs]
    for number, name in enumerate(planned):
        if name in planned[:number]:
            raise SplitError(f"split=: layer {name!r} stands twice in the plan")
    for name in planned:
        if name not in names:
            close = closest(name, names)
            hint = f" (did you mean {close!r}?)" if close else ""
            raise SplitError(
                f"split=: the model has no layer {name!r} of the plan{hint}, which was made for a "
                f"{plan.model}: {_NEW_PLAN}"
            )
    for name in names:
        if name not in planned:
            raise SplitError(
                f"split=: the plan, made for a {plan.model}, lacks the model's layer {name!r}: "
                f"{_NEW_PLAN}"
            )
    for ours, theirs in zip(names, planned, strict=True):
        if ours != theirs:
            raise SplitError(
                f"split=: the plan has layer {theirs!r} where the model has {ours!r}: put the "
                f"plan's layers into the model's order, or {_NEW_PLAN}"
            )
    if len(plan.stages) != stages:
        raise SplitError(
            f"split=: the plan has {len(plan.stages)} stages, and {stages} are asked for: set "
            f"nb_part={plan.nb_part} and stages_per_device={plan.stages_per_device} as in the "
            f"plan, or {_NEW_PLAN}"
        )
    return plan.counts


def table(plan: Plan) -> str:
    """Returns the stages of `plan` as text, one row each.

    Times are of one micro-batch; a stage's share of the time includes what crosses its cuts. Where
    no times are known, the share is of the parameters, and the memory is that of the weights, their
    gradients and the optimizer's state.
    """
    stages = plan.stage_costs()
    timed = any(stage.time_ms for stage in stages)
    times = ["forward ms", "backward ms", "memory"] if timed else ["weights + state"]
    share = "share of time" if timed else "share of parameters"
    rows = [["stage", "layers", "parameters", *times, share, "device", "from ... to"]]
    parameters = sum(stage.parameters for stage in stages) or 1
    for index, (stage, layers) in enumerate(zip(stages, plan.layer_names, strict=True)):
        rows.append(
            [
                str(index),
                str(len(layers)),
                f"{stage.parameters:,}",
                *([f"{stage.forward_ms:.3f}", f"{stage.backward_ms:.3f}"] if timed else []),
                with_unit(stage.memory_bytes),
                f"{stage.share if timed else stage.parameters / parameters:.0%}",
                plan.stages[index].device,
                layers[0] if len(layers) == 1 else f"{layers[0]} ... {layers[-1]}",
            ]
        )
    lines = text_table(rows, right_aligned=len(rows[0]) - 2)
    return "\n".join([*lines, *_largest_layer(plan, timed)])


def _largest_layer(plan: Plan, timed: bool) -> list[str]:
    """Returns a line on the largest layer if a better cut is impossible because of it."""
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
    return [f"layer {largest} alone is {share:.0%} of the {whole}: no cut makes its stage smaller"]
