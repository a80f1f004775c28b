"""The price of a run before it runs: for the keys that are `auto`, and beside what is measured.

`pipeline.nb_part`, `pipeline.chunks` and `pipeline.schedule` may be `auto`. They are chosen at the
start of a run, by the predicted time of a step. A run that goes on keeps what was chosen when it
began, so that its steps stay the same: its config has these values.

A price needs the rates of a machine (`machine_of_run`): those of the key `hardware`, or those that
the command `measure-machine` has found here.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import nn

from hybridtrain._base.construction import construct_on_meta, default_generators, rewind
from hybridtrain._base.files import write_atomically
from hybridtrain._base.hardware import GIB, Hardware, host_memory
from hybridtrain._base.microbatch import batch_size, chunk_sizes
from hybridtrain._base.microbatch import split as split_batch
from hybridtrain._base.text_table import counted, with_unit
from hybridtrain.cli.config.compose import THIS_MACHINE, measured_file
from hybridtrain.cli.config.resolve import Settings
from hybridtrain.cli.config.schema import (
    AUTO,
    Config,
    HardwareConfig,
    PipelineConfig,
    auto_keys,
    with_auto_replaced,
)
from hybridtrain.cli.run.components import build_loss, build_model
from hybridtrain.data import (
    Batch,
    DataSplits,
    batches_in,
    example_batch,
    first_samples,
    largest_batch,
    length_of,
)
from hybridtrain.errors import ConfigError, SplitError
from hybridtrain.graph import Layer
from hybridtrain.launch import detect
from hybridtrain.loop import Callback, Mfu
from hybridtrain.loss import LossFn, resolve
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import (
    CostTable,
    LayerCost,
    LossOfStep,
    Plan,
    Planner,
    count_layers,
    recompute_policy,
)
from hybridtrain.price import (
    Choices,
    Layout,
    Prediction,
    Price,
    StepWork,
    divisors,
    find_layouts,
    model_costs,
    predict_step,
    proposed,
    why_not_priced,
)
from hybridtrain.schedule import SCHEDULES, Placement, place_of
from hybridtrain.world import World

if TYPE_CHECKING:
    from hybridtrain.cli.run.build import RunContext, RunOptions
    from hybridtrain.loop import Trainer

# Samples of a micro-batch that layers are looked at with, and that are loaded to time the data.
_SAMPLES = 16


def hardware_of(config: HardwareConfig) -> Hardware:
    """Returns the machine of a config.

    Raises:
        ConfigError: a value is out of its range.
    """
    return Hardware(**{name: value for name, value in vars(config).items() if name != "costs"})


def hardware_of_run(config: Config, device: torch.device, devices: int) -> Hardware:
    """Returns the machine of a config, or this one, with as many devices as a run has.

    This one has the rates that `measure-machine` found, if it has been called here.

    Args:
        config: the run.
        device: one of its devices.
        devices: how many it has, in all pipelines.

    Raises:
        ConfigError: a value is out of its range, or what was measured cannot be read.
    """
    if config.hardware is not None:
        hardware = hardware_of(config.hardware)
    elif (known := this_machine()) is not None and known.device == device.type:
        hardware = known
    elif device.type == "cuda":
        gib = torch.cuda.get_device_properties(device).total_memory / GIB
        hardware = Hardware(memory_gib=gib)
    else:
        hardware = Hardware(device="cpu", reserved_gib=0.0)
    if device.type == "cpu" and config.hardware is None:  # all devices share the host's memory
        gib = host_memory() / GIB
        hardware = replace(hardware, memory_gib=gib / devices)
    hardware = with_limit(hardware, config)
    nodes, rest = divmod(devices, hardware.devices_per_node)
    if config.hardware is None or rest:
        return replace(hardware, nodes=1, devices_per_node=devices)
    return replace(hardware, nodes=nodes)


def with_limit(hardware: Hardware, config: Config) -> Hardware:
    """Returns the machine with devices of `pipeline.memory_limit_gib`, where that is set."""
    limit = config.pipeline.memory_limit_gib
    return hardware if limit is None else replace(hardware, memory_gib=limit, reserved_gib=0.0)


def this_machine() -> Hardware | None:
    """Returns this machine as `measure-machine` found it; None: it was not called here.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = measured_file()
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    names = {each.name for each in fields(Hardware)}
    return Hardware(**{name: value for name, value in dict(found).items() if name in names})


@dataclass(frozen=True)
class RunModel:
    """The parts of a run that a price needs.

    Attributes:
        net: the model without values.
        inputs: of a micro-batch that layers are looked at with.
        load_ms: of a sample.
        loss: on the targets of that micro-batch.
    """

    net: nn.Module
    inputs: Any
    load_ms: float
    loss: LossOfStep

    def work(self, config: Config, tensors: int) -> StepWork:
        """Returns the work of a step, with so many tensors of the optimizer for a parameter."""
        batch = Batch(self.inputs, None, 1, 1)
        return StepWork(
            config.data["batch_size"],
            config.trainer.accumulate,
            tensors,
            self.load_ms,
            batch.tokens,
        )


def batches_of(config: Config, data: DataSplits, options: RunOptions) -> int | None:
    """Returns the batches of an epoch; None: the data set does not tell."""
    samples = length_of(data.train)
    if samples is None:
        return None
    size = config.data["batch_size"]
    return batches_in(first_samples(samples, size, options.loader), size, options.loader)


def model_of_run(config: Config, data: DataSplits) -> RunModel:
    """Returns the model of a run, without values, and a batch of its data.

    Raises:
        ConfigError: a batch has one sample.
    """
    count = min(_SAMPLES, config.data["batch_size"])
    if count < 2:
        raise ConfigError("data.batch_size=1 leaves nothing to plan: it needs at least 2 samples")
    example_batch(data.train, count, data.collate)  # the first time opens files
    begin = time.perf_counter()
    example = example_batch(data.train, count, data.collate)
    load_ms = (time.perf_counter() - begin) / count * 1e3
    inputs, targets = largest_batch(data.train, count, data.collate, example)

    net = construct_on_meta(lambda: build_model(config, data))
    loss = LossOfStep(resolve(build_loss(config), net).function, targets)
    return RunModel(net, inputs, load_ms, loss)


_log = logging.getLogger(__name__)

# What chooses the number of stages by itself; a list, a plan or marks give it.
_SPLITS = ("uniform", "size", "time", "memory", "balanced")


def without_auto(settings: Settings) -> Config:
    """Returns the config with defaults in the place of `auto`.

    Raises:
        ConfigError: `pipeline.nb_part` is `auto`, and another key decides it.
    """
    config = settings.config
    defaults = PipelineConfig()
    if config.pipeline.nb_part == AUTO:
        split, devices = config.pipeline.split, config.world.devices
        if split not in _SPLITS:
            raise ConfigError(
                f"pipeline.nb_part=auto chooses the number of stages, and pipeline.split={split} "
                f"gives it: set pipeline.nb_part= to that number, or pipeline.split=balanced"
            )
        if isinstance(devices, list):
            raise ConfigError(
                f"pipeline.nb_part=auto chooses the number of devices, and world.devices={devices} "
                f"gives it: set pipeline.nb_part= to that number, or world.devices=cuda"
            )
    if (keys := auto_keys(config.pipeline)) and config.data.get("batch_size") == AUTO:
        raise ConfigError(
            f"data.batch_size=auto and pipeline.{keys[0]}=auto depend on each other: give one "
            f"of them a number"
        )
    if config.data.get("batch_size") == AUTO:  # until `chosen` knows better
        config = replace(config, data={**config.data, "batch_size": _SAMPLES})
    return replace(config, pipeline=with_auto_replaced(config.pipeline, defaults))


def chosen(
    settings: Settings, config: Config, data: DataSplits, world: World, tensors: int
) -> Config:
    """Returns `config` with the fastest values for the keys that are `auto`.

    Rank 0 chooses, and says what and why in one line; a collective call if a key is `auto`.

    Args:
        settings: of the command, where keys are `auto`.
        config: with values in their place.
        data: of the run.
        world: its processes.
        tensors: as `StepWork.optimizer_tensors_per_param`.

    Raises:
        ConfigError, SplitError: there is nothing to choose from; see `find_layouts`.
    """
    keys = auto_keys(settings.config.pipeline)
    if not keys:
        return config
    sizes = _pipeline_sizes(config, world) if "nb_part" in keys else [world.nb_part]
    values = world.broadcast(
        world.on_main(lambda: _choose(keys, sizes, config, data, world, tensors))
    )
    assert values is not None
    return replace(config, pipeline=replace(config.pipeline, **values))


def with_largest_batch(
    config: Config, data: DataSplits, world: World, options: RunOptions
) -> Config:
    """Returns `config` with the largest batch that should fit; a collective call.

    Rank 0 doubles the samples of a micro-batch, from one on, while the memory of a step as the run
    cuts the model fits and the training split has as many, and says so in one line.

    Raises:
        ConfigError: the memory of a device is not known, or the run's memory is not predicted.
        SplitError: one sample per micro-batch does not fit.
    """
    size = world.broadcast(world.on_main(lambda: _largest_batch(config, data, world, options)))
    return replace(config, data={**config.data, "batch_size": size})


def _largest_batch(config: Config, data: DataSplits, world: World, options: RunOptions) -> int:
    device, pipeline = world.devices[0], options.pipeline
    if (reason := why_not_priced(pipeline)) is not None:
        raise ConfigError(f"data.batch_size=auto: {reason}: set a number of samples")
    known = config.hardware is not None or config.pipeline.memory_limit_gib is not None
    if device.type not in ("cpu", "cuda") and not known:
        raise ConfigError(
            f"data.batch_size=auto: the memory of {device} is not known: set "
            f"pipeline.memory_limit_gib="
        )
    hardware = hardware_of_run(config, device, world.nb_part * world.replicas)
    net = construct_on_meta(lambda: build_model(config, data))
    loss_fn = resolve(options.loss_fn, net).function
    least, most = world.replicas * pipeline.chunks, length_of(data.train)
    size, fits, told = least, 0, "the training split has no more"
    while size <= (most or size):
        share = size // world.replicas
        example = example_batch(data.train, share, data.collate)
        planner = Planner(net, pipeline, example[0], world.stage_owners, costs="estimated")
        stages = planner.layers_of(planner.plan()).stages
        with _without_errors_of_fake_tensors():
            found = _predict(config, world, pipeline, data, stages, example, size, loss_fn)
        assert found.memory_bytes is not None
        fullest = max(found.memory_bytes)
        if fullest > hardware.usable_bytes:
            told = f"{size} would take {with_unit(fullest)}"
            break
        fits, memory, size = size, fullest, 2 * size
    usable = with_unit(round(hardware.usable_bytes))
    if not fits:
        raise SplitError(
            f"data.batch_size=auto: {told} of the {usable} that may be used"
            if size <= (most or size)
            else f"data.batch_size=auto: a sample for each of {least} micro-batches is more than "
            f"the {most} of the training split: lower pipeline.chunks="
        )
    _log.info(
        "data.batch_size=%d: %s per micro-batch, %s of %s predicted per device; %s",
        fits,
        counted(fits // least, "sample"),
        with_unit(memory),
        usable,
        told,
    )
    return fits


def _pipeline_sizes(config: Config, world: World) -> list[int]:
    """Returns the numbers of devices that a pipeline may have; a collective call.

    All processes of a pipeline share them with `engine=distributed`; otherwise each process may
    use an equal share of its node's, and a divisor of that.
    """
    if world.engine == "distributed":
        return divisors(world.size)
    launch = detect(os.environ)
    if world.devices[0].type == "cuda":
        there = torch.cuda.device_count()
        if launch.local_size * there <= launch.node_gpus:  # Slurm shows each task its own alone
            there *= launch.local_size
    elif config.hardware is not None and config.hardware.device == "cpu":
        there = config.hardware.devices_per_node
    else:
        there = len(os.sched_getaffinity(0))
    return divisors(min(world.gather(max(1, there // launch.local_size))))


def _choose(
    keys: list[str],
    sizes: list[int],
    config: Config,
    data: DataSplits,
    world: World,
    tensors: int,
) -> dict[str, Any]:
    """Returns the fastest values of `keys`, with pipelines of one of `sizes` devices."""
    run = model_of_run(config, data)
    distributed = world.engine == "distributed"
    device = world.devices[0]

    @cache
    def costs(sharing: int) -> CostTable:
        return model_costs(
            run.net,
            run.inputs,
            hardware_of_run(config, device, world.size),
            costs=config.hardware.costs if config.hardware is not None else "measured",
            precision=config.trainer.precision,
            tf32=config.trainer.tf32,
            sharing=sharing,
            loss=run.loss,
        )

    found: list[tuple[Price, str]] = []
    problems: list[ConfigError | SplitError] = []
    for nb_part in sizes:
        replicas = world.size // nb_part if distributed else world.size
        share = -(-config.data["batch_size"] // replicas)
        work = StepWork(share * replicas, config.trainer.accumulate, tensors, run.load_ms)
        hardware = hardware_of_run(config, device, nb_part * replicas)
        # CPU stages of a process share its threads
        sharing = 1 if distributed or device.type == "cuda" else nb_part
        choices = _choices(keys, nb_part, share, config)
        try:
            table = costs(sharing)
            prices = find_layouts(table, hardware, work, choices)
            found += [(one, table.costs_from) for one in prices]
        except (ConfigError, SplitError) as error:
            problems.append(error)
    if not found:
        auto = ", ".join(f"pipeline.{key}=auto" for key in keys)
        raise type(problems[0])(f"{auto}: {problems[0]}") from problems[0]
    found.sort(key=lambda one: one[0].step_ms)
    best = proposed([one for one, _ in found])
    costs_from = next(source for one, source in found if one is best)
    values = {key: getattr(best.layout, key) for key in keys}
    others = [one for one, _ in found if one.step_ms > best.step_ms]
    _log.info("%s", _why(values, best, others, costs_from))
    return values


def _choices(keys: list[str], nb_part: int, share: int, config: Config) -> Choices:
    """Returns what a search may choose from; `share` is a replica's part of a batch."""
    pipeline = config.pipeline
    return Choices(
        nb_part=[nb_part],
        engine=[config.world.engine],
        chunks=None if "chunks" in keys else [min(pipeline.chunks, share)],
        schedule=SCHEDULES if "schedule" in keys else [pipeline.schedule],
        stages_per_device=[pipeline.stages_per_device],
        # single layers cost about what whole stages do
        recompute=[pipeline.recompute if isinstance(pipeline.recompute, str) else "always"],
        shard=[config.world.shard],
    )


def _why(values: dict[str, Any], best: Price, others: list[Price], costs_from: str) -> str:
    """Returns what was chosen, and what it is better than, in one line."""
    told = ", ".join(f"pipeline.{key}={value}" for key, value in values.items())
    why = (
        f"{told}: {best.step_ms:.1f} ms per step, predicted from {costs_from} costs; "
        f"idle {best.bubble:.0%}, {best.peak_bytes / GIB:.2f} GiB per device"
    )
    if others:
        other = ", ".join(f"{key}={getattr(others[0].layout, key)}" for key in values)
        why += f"; the next best has {others[0].step_ms:.1f} ms ({other})"
    return why


def predict_run(context: RunContext) -> Prediction:
    """Returns what a step of the run should take, before it runs; rank 0 alone needs it.

    From the costs that were measured for the split, or else from FLOPs and bytes. Nothing that goes
    wrong here ends the run.
    """
    if (reason := why_not_priced(context.model.options)) is not None:
        return Prediction(reason=reason)
    try:
        with _without_errors_of_fake_tensors():
            return _prediction_of(context)
    except Exception as error:  # of the user's layers too, which run on fake tensors
        _log.debug("no prediction", exc_info=True)
        told = str(error).partition("\n")[0]
        return Prediction(reason=f"{type(error).__name__}: {told}")


def _prediction_of(context: RunContext) -> Prediction:
    model, samples = context.model, context.config.data["batch_size"]
    if there := length_of(context.data.train):
        samples = min(samples, there)  # a data set that is smaller is one batch
    return _predict(
        context.config,
        context.world,
        model.options,
        context.data,
        model.planned.stages,
        (context.example_inputs, context.example_targets),
        samples,
        model.resolve_loss(context.options.loss_fn).function,
        _measured_costs(context),
    )


def _predict(
    config: Config,
    world: World,
    options: PipelineOptions,
    data: DataSplits,
    stages: Sequence[Sequence[Layer]],
    example: tuple[Any, Any],
    samples: int,
    loss_fn: LossFn,
    measured: Sequence[LayerCost] | None = None,
) -> Prediction:
    """Predicts a step with batches of `samples`, of which `example` is a replica's share."""
    sizes = chunk_sizes(-(-samples // world.replicas), options.chunks)
    layout = Layout(
        nb_part=world.nb_part,
        replicas=world.replicas,
        engine=world.engine,
        chunks=len(sizes),
        schedule=options.schedule,
        stages_per_device=options.stages_per_device,
        recompute=options.recompute if isinstance(options.recompute, str) else "layers",
        shard=options.shard if world.replicas > 1 else "none",
    )
    names = [layer.name for stage in stages for layer in stage]
    first = tuple(split_batch(each, sizes)[0] for each in example)
    draws = default_generators()
    inputs, targets = largest_batch(data.train, sizes[0], data.collate, first)
    rewind(draws)  # transforms may draw
    return predict_step(
        stages,
        inputs,
        hardware_of_run(config, world.devices[0], world.nb_part * world.replicas),
        StepWork(samples, config.trainer.accumulate, options.optimizer_tensors_per_param),
        layout,
        measured,
        precision=options.precision,
        tf32=config.trainer.tf32,
        loss=LossOfStep(loss_fn, targets),
        recomputed=recompute_policy(options.recompute, names).layers,
    )


def _measured_costs(context: RunContext) -> list[LayerCost] | None:
    """Returns the plan's costs if they were measured for micro-batches like those of the run."""
    plan = context.model.plan
    split = context.model.options.split
    if plan.costs_from != "measured":
        return None
    if isinstance(split, str) and split.endswith((".yaml", ".yml")):  # of another run, or before
        batch_has_changed = any(c.key == "data.batch_size" for c in context.settings.changes)
        if batch_has_changed or Plan.read(split).chunks != plan.chunks:
            return None
    return plan.costs


class _MfuByTokens(Mfu):
    """Logs the MFU of batches that may differ in length, by the FLOPs per token."""

    def on_log(self, trainer: Trainer, values: dict[str, float]) -> None:
        """Adds the utilization."""
        tokens = {"train/samples_per_second": values.get("train/tokens_per_second", 0.0)}
        super().on_log(trainer, tokens)
        values["train/mfu"] = tokens["train/mfu"]


def utilization(context: RunContext) -> list[Callback]:
    """Returns what logs the MFU of a run with a `hardware`, on rank 0; elsewhere nothing.

    The FLOPs are counted on fake tensors, for the first micro-batch, and those of a backward are
    twice the forward's. Where samples have a length, they count per token, since batches that are
    padded to their longest sample differ in it. Nothing that goes wrong here ends the run.
    """
    hardware, options = context.config.hardware, context.model.options
    if hardware is None or not context.world.is_main:
        return []
    device, tf32 = context.world.devices[0].type, context.config.trainer.tf32
    precision = "tf32" if tf32 and options.precision == "fp32" else options.precision
    peak = hardware_of(hardware).flops_per_s.get(precision)
    reason = None
    if hardware.device != device:
        reason = f"hardware.device={hardware.device}, and the run is on {device}"
    elif peak is None:
        reason = f"set hardware.flops_per_s.{precision}="
    else:
        sizes = chunk_sizes(batch_size(context.example_inputs), options.chunks)
        microbatch = split_batch(context.example_inputs, sizes)[0]
        layers = [layer for stage in context.model.planned.stages for layer in stage]
        try:
            with _without_errors_of_fake_tensors():
                counted = count_layers(layers, microbatch, options.precision)
            flops = 3 * sum(each.forward.flops for each in counted)
            if tokens := Batch(microbatch, None, sizes[0], sizes[0]).tokens:
                return [_MfuByTokens(flops / tokens, peak)]
            return [Mfu(flops / sizes[0], peak)]
        except Exception as error:  # of the user's layers, which run on fake tensors
            _log.debug("no FLOPs", exc_info=True)
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    _log.info("train/mfu is not logged: %s", reason)
    return []


@contextmanager
def _without_errors_of_fake_tensors() -> Iterator[None]:
    """Keeps the log of fake tensors still: the error of a layer is told when it runs."""
    fake_tensors = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled = fake_tensors.disabled
    fake_tensors.disabled = True
    try:
        yield
    finally:
        fake_tensors.disabled = was_disabled


def beside_measured(
    prediction: Prediction, summary: Mapping[str, Any], placement: Placement = "loop"
) -> dict[str, Any]:
    """Returns `predicted` and `measured` with the same keys, for `summary.json`."""
    measured = {
        "step_ms": summary["step_ms"]["p50"],
        "bubble": summary["bubble_fraction"],
        "memory_bytes": _by_device(summary, placement),
    }
    return {"predicted": asdict(prediction), "measured": measured}


def _by_device(summary: Mapping[str, Any], placement: Placement) -> list[int]:
    """Returns the peak bytes of each device.

    Of CPU stages the bytes are counted, and those of a device add up; of a GPU all its stages have
    the peak of the allocator.
    """
    together = max if summary["device_memory"] else sum
    peaks = [stage["peak_memory_bytes"] for stage in summary["stages"]]
    nb_part = summary["world"]["nb_part"]
    by_device: list[list[int]] = [[] for _ in range(nb_part)]
    for stage, peak in enumerate(peaks):
        by_device[place_of(stage, nb_part, placement)].append(peak)
    return [together(own) for own in by_device]


def prediction_in_words(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    """Returns both in one line."""
    parts = []
    pairs = {key: (predicted[key], measured[key]) for key in measured}
    if None not in (steps := pairs["step_ms"]):
        parts.append("predicted {:.1f} ms, measured {:.1f} ms per step".format(*steps))
    if None not in (bubbles := pairs["bubble"]):
        parts.append("idle {:.0%} predicted, {:.0%} measured".format(*bubbles))
    if None not in (memory := pairs["memory_bytes"]):
        fullest = max(range(len(memory[1])), key=memory[1].__getitem__)
        one, other = (with_unit(each[fullest]) for each in memory)
        parts.append(f"memory of device {fullest}: {one} predicted, {other} measured")
    if predicted["costs_from"] is not None:
        parts.append(f"from {predicted['costs_from']} costs")
    if predicted["reason"] is not None:
        missing = "no prediction" if not parts else "no prediction of the time"
        parts.append(f"{missing}: {predicted['reason']}")
    return "; ".join(parts)


_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SECONDS = 3.0  # of each measurement
_MOST_RUNS = 50


def measure_machine(words: Sequence[str] = ()) -> int:
    """Measures this machine and writes what `hardware=this-machine` reads; returns the exit code.

    Rates are those that are reached, so that the shares of them are 1. Links between nodes cannot
    be measured on one: `hardware.network_bytes_per_s=` sets them.

    Args:
        words: of the command line: `seconds=` of each measurement.

    Raises:
        ConfigError: there are other words on the command line, or the file cannot be written.
    """
    seconds = _SECONDS
    for word in words:
        number = re.fullmatch(r"seconds=(\d+\.?\d*|\.\d+)", word)
        if number is None:
            raise ConfigError(
                f"measure-machine takes seconds= (of each measurement) only, not {word!r}"
            )
        seconds = float(number[1])
    found = measured(seconds)
    Hardware(**{name: value for name, value in found.items() if name != "costs"})  # checks it
    path = measured_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        header = f"# {platform.node()}, torch {torch.__version__}: measured by measure-machine\n"
        write_atomically(path, header + yaml.safe_dump(found, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; set XDG_CACHE_HOME") from error
    print(path.read_text(encoding="utf-8"), end="")
    print(f"# in {path}; to use it: hybridtrain plan hardware={THIS_MACHINE} ...")
    return 0


def measured(seconds: float = _SECONDS) -> dict[str, Any]:
    """Returns the keys of `hardware` for this machine; a CPU core is a device where no GPU is."""
    gpus = torch.cuda.device_count()
    device = torch.device("cuda:0" if gpus else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if gpus else 1)
    try:
        size = 4096 if gpus else 512
        flops = {}
        for name, dtype in _PRECISIONS.items():
            if not gpus and name == "fp16":
                continue  # CPUs without instructions for it are a hundred times slower
            one = torch.ones(size, size, dtype=dtype, device=device)
            product = partial(torch.mm, one, one)
            flops[name] = 2 * size**3 / _seconds(product, device, seconds)
        block = torch.zeros((2**30 if gpus else 2**26) // 4, device=device)
        copy = _seconds(lambda: block.clone(), device, seconds)
        few = torch.zeros(1, device=device)
        operator = _seconds(lambda: [few.neg() for _ in range(100)], device, seconds) / 100
        memory = (
            torch.cuda.mem_get_info(0)[1] if gpus else host_memory() // max(1, os.cpu_count() or 1)
        )
        link = 2 * block.nbytes / copy / 2
        if gpus > 1:
            link = block.nbytes / _seconds(lambda: block.to("cuda:1"), device, seconds)
    finally:
        torch.set_num_threads(threads)
    return {
        "costs": "measured",
        "device": device.type,
        "nodes": 1,
        "devices_per_node": gpus or os.cpu_count() or 1,
        "memory_gib": round(memory / GIB, 2),
        "reserved_gib": 1.0 if gpus else 0.0,
        "flops_per_s": {name: float(f"{rate:.3g}") for name, rate in flops.items()},
        "flops_reached": 1.0,
        "memory_bytes_per_s": float(f"{2 * block.nbytes / copy:.3g}"),
        "bandwidth_reached": 1.0,
        "node_bytes_per_s": float(f"{link:.3g}"),
        "operator_s": float(f"{operator:.3g}"),
    }


def _seconds(run: Callable[[], object], device: torch.device, budget: float) -> float:
    """Returns the median time of a run, after one that warms up."""
    times: list[float] = []
    begin = perf_counter()
    while len(times) < 2 or (len(times) <= _MOST_RUNS and perf_counter() - begin < budget):
        start = perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - start)
    return median(times[1:])
