"""A plan: where a model is cut, and the costs of its layers, as data and as an editable file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from hybridtrain._base.files import check_replaceable, write_atomically
from hybridtrain._base.text_table import text_table, with_unit
from hybridtrain.errors import SplitError, argument, closest, setting
from hybridtrain.options import RecomputeSpec
from hybridtrain.partitioning.costs import LayerCost
from hybridtrain.partitioning.objective import StageCost, stage_costs
from hybridtrain.partitioning.recompute import recomputes_stages

_HEADER = """\
# Where a model is cut into stages, and what its layers cost for one micro-batch.
# To reuse this cut: split=<path of this file>
# You may move layers between the end of a stage and the beginning of the next one. The key `expand`
# (modules that are cut inside) is read too; the costs are for information only.
# To run the `actions` in the order given here, one line per device, edited or not:
# schedule=<path of this file>. F3@1 is the forward of micro-batch 3 on stage 1, B a backward, I its
# part for the gradient of the stage's input and W its part for the gradients of the weights.
"""


def _new_plan() -> str:
    return f"make a new plan with {setting('split', 'time')}"


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan.

    Attributes:
        device: the name of its device, local to its process.
        process: the index in the replica of the process that owns it.
        in_flight: the peak number of micro-batches in flight.
        layers: the costs of its layers, in order, on the first device of the pipeline.
        speed: the speed of its device relative to the first one.
        on_device: the most of them with activations on the device, if others are offloaded; 0: all.
    """

    device: str
    process: int
    in_flight: int
    layers: list[LayerCost]
    speed: float = 1.0
    on_device: int = 0


@dataclass(frozen=True, repr=False)
class Plan:
    """The stages of a model, their costs, and their owners.

    Attributes:
        model: the class name of the model.
        split: the option of `PipelineOptions`, or `by hand` for a list.
        schedule: the option of `PipelineOptions`.
        chunks: the option of `PipelineOptions`.
        nb_part: devices per pipeline.
        stages_per_device: the option of `PipelineOptions`.
        checkpoint: the option of `PipelineOptions`.
        expand: the names of modules that are cut inside.
        costs_from: `measured`, `estimated`, `counted` (parameters only) or `given` by the caller.
        stages: the stages in the order of the pipeline.
        actions: the order of each device's actions, see `hybridtrain.schedule.files`; empty in a
            file without it.
    """

    model: str
    split: str
    schedule: str
    chunks: int
    nb_part: int
    stages_per_device: int
    recompute: RecomputeSpec
    expand: list[str]
    costs_from: str
    stages: list[StagePlan]
    actions: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        stages = ", ".join(f"{len(stage.layers)} on {stage.device}" for stage in self.stages)
        return (
            f"Plan({self.model}, split={self.split!r}, "
            f"schedule={self.schedule!r}, chunks={self.chunks}, "
            f"costs_from={self.costs_from!r}, layers=[{stages}])"
        )

    def __str__(self) -> str:
        return table(self)

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
        """For each stage, the peak number of micro-batches in flight."""
        return [stage.in_flight for stage in self.stages]

    @property
    def on_device(self) -> list[int]:
        """For each stage, the most micro-batches with activations on its device."""
        return [stage.on_device or stage.in_flight for stage in self.stages]

    def stage_costs(self) -> list[StageCost]:
        """Returns the cost of each stage on its device, from the costs of its layers."""
        recomputes = recomputes_stages(self.recompute)
        return stage_costs(self.costs, self.counts, self.on_device, recomputes, self.speeds)

    @property
    def speeds(self) -> list[float]:
        """The speed of each stage's device relative to the first device of the pipeline."""
        return [stage.speed for stage in self.stages]

    def to_yaml(self) -> str:
        """Returns the plan as YAML with one line per layer, which `read` can parse."""
        content = asdict(self)
        content["recompute"] = _plain(self.recompute)
        actions = {"actions": content.pop("actions")}
        for stage in content["stages"]:
            for name in ("speed", "on_device"):
                if stage[name] == getattr(StagePlan, name):
                    del stage[name]
            for cost in stage["layers"]:
                cost |= {k: round(v, 3) for k, v in cost.items() if isinstance(v, float)}
                for name in ("later_bytes", "kept_bytes"):
                    if not cost[name]:
                        del cost[name]
        form: dict[str, Any] = {"sort_keys": False, "width": 2**31, "allow_unicode": True}
        # None: write only nodes without a nested list or mapping on one line
        text: str = yaml.safe_dump(content, default_flow_style=None, **form)
        text += yaml.safe_dump(actions, default_flow_style=False, **form)
        return _HEADER + text

    def write(self, path: str | PathLike[str]) -> None:
        """Writes the plan to a file that `read` reads.

        Raises:
            ConfigError: the file exists and is not a plan.
        """
        check_replaceable(Path(path), lambda head: b"stages:" in head, "a plan")
        write_atomically(Path(path), self.to_yaml())

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Plan:
        """Reads a plan from a file.

        Raises:
            SplitError: the file does not exist, or it is not a plan.
        """
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise SplitError(
                f"{argument('split')}: cannot read {path}: {error.strerror}"
            ) from error
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise SplitError(f"{argument('split')}: {path} is not a YAML file: {reason}") from error
        plan: Plan = _parsed(cls, content, str(path))
        return plan


def _plain(recompute: RecomputeSpec) -> Any:
    """Returns `recompute` as plain YAML types."""
    if isinstance(recompute, str):
        return recompute
    return dict(recompute) if isinstance(recompute, Mapping) else list(recompute)


_TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    str: ((str,), "a string (in quotes)"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    RecomputeSpec: ((str, list, dict), "a mode, {every: k} or a list of layer names"),
}


# Keys that are missing in plans of earlier versions, or have their defaults.
_OPTIONAL = ("actions", "speed", "on_device", "later_bytes", "kept_bytes")


def _parsed(kind: Any, value: Any, place: str) -> Any:
    """Converts `value` from a YAML file to `kind`; a mapping may have further keys."""
    if get_origin(kind) is list:
        if not isinstance(value, list):
            raise SplitError(f"{argument('split')}: {place}={value!r} must be a list")
        return [_parsed(get_args(kind)[0], item, f"{place}[{i}]") for i, item in enumerate(value)]
    if kind in _TYPES:
        types, type_text = _TYPES[kind]
        if type(value) not in types:
            raise SplitError(f"{argument('split')}: {place}={value!r} must be {type_text}")
        return value
    kinds = get_type_hints(kind)
    if not isinstance(value, Mapping):
        keys = ", ".join(kinds)
        raise SplitError(
            f"{argument('split')}: {place} must have the keys {keys} of a plan; {_new_plan()}"
        )
    values = {}
    for name, kind_of_value in kinds.items():
        if name not in value:
            if name in _OPTIONAL:
                continue
            raise SplitError(f"{argument('split')}: {place} lacks the key {name!r}; {_new_plan()}")
        values[name] = _parsed(kind_of_value, value[name], f"{place}: {name}")
    return kind(**values)


def counts_for(plan: Plan, names: Sequence[str], stages: int) -> list[int]:
    """Returns the number of layers of each stage, for a model with the layers `names`.

    A plan file may have finer or coarser layers in places, such as `encoder` and `encoder.norm`. It
    fits if each stage begins with a layer of both.

    Raises:
        SplitError: the plan has other layers, or a different number of stages.
    """
    planned = [cost.name for cost in plan.costs]
    advice = _new_plan()
    if len(plan.stages) == stages and _are_of_one_model(planned, names):
        begins = [part[0] for part in plan.layer_names[1:] if part]
        positions = [0, *(names.index(name) for name in begins if name in names), len(names)]
        counts = [end - start for start, end in pairwise(positions)]
        if len(counts) == stages and min(counts) > 0:
            return counts
    if twice := [name for i, name in enumerate(planned) if name in planned[:i]]:
        wrong, advice = f"the plan lists layer {twice[0]!r} twice", "delete one"
    elif unknown := [name for name in planned if name not in names]:
        close = closest(unknown[0], names)
        hint = f" (did you mean {close!r}?)" if close else ""
        wrong = f"the model has no layer {unknown[0]!r} of the plan{hint}"
    elif lacking := [name for name in names if name not in planned]:
        wrong = f"the plan lacks the model's layer {lacking[0]!r}"
    elif moved := [pair for pair in zip(planned, names, strict=True) if len(set(pair)) > 1]:
        wrong = f"the plan has layer {moved[0][0]!r} where the model has {moved[0][1]!r}"
        advice = f"put the plan's layers into the model's order, or {_new_plan()}"
    elif len(plan.stages) != stages:
        wrong = f"the plan has {len(plan.stages)} stages, but {stages} are requested"
        settings = (
            f"{setting('nb_part', plan.nb_part)} and "
            f"{setting('stages_per_device', plan.stages_per_device)}"
        )
        advice = f"set {settings} as in the plan, or {_new_plan()}"
    elif empty := [number for number, count in enumerate(plan.counts) if not count]:
        wrong = f"stage {empty[0]} has no layers"
    else:
        return plan.counts
    raise SplitError(
        f"{argument('split')}: {wrong} (the plan was made for a {plan.model}): {advice}"
    )


def _are_of_one_model(names: Sequence[str], others: Sequence[str]) -> bool:
    """Returns whether each name is among the others, contains one of them, or is inside one."""

    def fits(name: str, others: Sequence[str]) -> bool:
        return any(f"{a}.".startswith(f"{b}.") for o in others for a, b in ((name, o), (o, name)))

    return (
        set(names) != set(others)
        and len(set(names)) == len(names)
        and all(name in others or fits(name, others) for name in names)
        and all(name in names or fits(name, names) for name in others)
    )


def table(plan: Plan) -> str:
    """Returns the stages of `plan` as text, with one line per stage.

    Times are for one micro-batch; a stage's share of the time includes transfers over its cuts. If
    the plan has no times, it shows the share of the parameters, and the memory of weights,
    gradients and optimizer state.
    """
    stages = plan.stage_costs()
    timed = any(stage.time_ms for stage in stages)
    whole = sum(stage.time_ms if timed else stage.parameters for stage in stages) or 1
    lines: list[dict[str, str]] = []
    for index, (cost, names) in enumerate(zip(stages, plan.layer_names, strict=True)):
        line = {"stage": f"{index}", "layers": f"{len(names)}"}
        line["parameters"] = f"{cost.parameters:,}"
        memory = with_unit(cost.memory_bytes)
        share = f"{(cost.time_ms if timed else cost.parameters) / whole:.0%}"
        if timed:
            times = {"forward ms": cost.forward_ms, "backward ms": cost.backward_ms}
            line |= {name: f"{ms:.3f}" for name, ms in times.items()}
            line |= {"memory": memory, "share of time": share}
        else:
            line |= {"weights + state": memory, "share of parameters": share}
        ends = dict.fromkeys([names[0], names[-1]])
        if len(set(plan.speeds)) > 1:
            line["speed"] = f"{plan.speeds[index]:.3g}"
        line |= {"device": plan.stages[index].device, "from ... to": " ... ".join(ends)}
        lines.append(line)
    cells = [list(lines[0]), *(list(line.values()) for line in lines)]
    text = text_table(cells, right_aligned=len(cells[0]) - 2)
    if plan.split in ("size", "time", "balanced"):
        times = {cost.name: cost.forward_ms + cost.backward_ms for cost in plan.costs}
        sizes = times if timed else {cost.name: cost.parameters for cost in plan.costs}
        largest = max(sizes, key=sizes.__getitem__)
        part = sizes[largest] / (sum(sizes.values()) or 1)
        if part * sum(plan.speeds) / max(plan.speeds) >= 1.01:  # less than that is noise
            share_text = f"{part:.0%} of the {'step' if timed else 'parameters'}"
            text.append(
                f"layer {largest} alone takes {share_text}: no cut can make its stage smaller"
            )
    return "\n".join(text)
