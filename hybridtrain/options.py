"""The settings of a pipeline, a loader and a `Trainer`, each in one frozen object.

`HybridModel(net, world, PipelineOptions(chunks=8))` and its short form `HybridModel(net, world,
chunks=8)` are the same. The fields are the config keys of the command line, which takes their
names, types, defaults and docstrings from here. Nothing here imports torch.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, TypeVar, cast

from hybridtrain.errors import (
    ConfigError,
    SplitError,
    argument,
    check_choice,
    did_you_mean,
    setting,
)
from hybridtrain.schedule import Placement, is_file, registered, schedule_names

SplitSpec = str | Sequence[int] | Sequence[str] | Sequence[Sequence[str]]
RecomputeSpec = str | Sequence[str] | Mapping[str, int]

Options = TypeVar("Options", bound=Any)
Init = TypeVar("Init", bound=Callable[..., None])

PRECISIONS = ("fp32", "bf16", "fp16")
BATCH_NORM_MODES = ("micro_batch", "deferred")
SHARD_MODES = ("none", "optimizer")
AUTO = "auto"
RECOMPUTE_MODES = ("never", "except_last", "always")

# Names that other libraries have for arguments of this one.
OTHER_NAMES = {
    **dict.fromkeys(["train_batch_size", "per_device_train_batch_size"], "batch_size"),
    **dict.fromkeys(["num_workers", "dataloader_num_workers"], "workers"),
    **dict.fromkeys(["max_epochs", "num_epochs", "num_train_epochs"], "epochs"),
    **dict.fromkeys(["max_steps", "num_steps", "num_train_steps"], "steps"),
    **dict.fromkeys(["gradient_accumulation_steps", "accumulate_grad_batches"], "accumulate"),
    **dict.fromkeys(["max_grad_norm", "grad_clip", "gradient_clip_val"], "clip_norm"),
    **dict.fromkeys(["logging_steps", "log_every_n_steps"], "log_every"),
    **dict.fromkeys(["eval_steps", "val_check_interval"], "eval_every"),
    **dict.fromkeys(["eval_on_start", "num_sanity_val_steps"], "eval_first"),
    **dict.fromkeys(["bf16", "fp16", "mixed_precision"], "precision"),
    **dict.fromkeys(["save_steps", "save_every"], "checkpoint_every_steps"),
    **dict.fromkeys(["save_total_limit", "max_to_keep"], "keep"),
    "gradient_checkpointing": "recompute",
    **dict.fromkeys(["microbatches", "num_microbatches"], "chunks"),
    **dict.fromkeys(["num_stages", "pipeline_parallel_size"], "nb_part"),
    **dict.fromkeys(["train_loader", "train_dataloader", "train_dataloaders"], "train"),
    **dict.fromkeys(["eval_loader", "val_loader", "valid_loader", "test_loader"], "evaluation"),
    **dict.fromkeys(["eval_dataloader", "val_dataloader", "val_dataloaders"], "evaluation"),
    **dict.fromkeys(["train_dataset", "train_data"], "train"),
    **dict.fromkeys(["eval_dataset", "val_dataset", "eval_data", "val_data"], "evaluation"),
    **dict.fromkeys(["scheduler", "lr_scheduler"], "lr_schedule"),
    **dict.fromkeys(["logger", "loggers", "trackers"], "callbacks"),
    **dict.fromkeys(["criterion", "loss"], "loss_fn"),
    "compute_metrics": "metrics",
    "monitor": "value",
    "save_top_k": "k",
    "dirpath": "directory",
}


@dataclass(frozen=True)
class PipelineOptions:
    """The cut of a model into stages, and how these run.

    Raises:
        ConfigError: a value is out of its range; the message names the argument.
        SplitError: `split` or `memory_weight` is not understood.
    """

    chunks: int = 1
    """Micro-batches that a batch is cut into along dim 0; fewer if it has fewer samples."""
    schedule: str = "1f1b"
    """The order of forwards and backwards: `1f1b`, `gpipe`; with backwards in two parts `zb-h1`,
    and with `stages_per_device=2` `zb-v`, `v-half` and `v-min`, whose activations take as much
    memory as with `1f1b`, half of it and a third; or a user-defined schedule, by its name or the
    path of its file (`.csv`, or a plan's `.yaml`)."""
    split: SplitSpec = "uniform"
    """The measure that the largest stage should be small in: `uniform` (number of layers), `size`
    (parameters), `time`, `memory` or `balanced` (what each layer is measured to cost); `manual`: as
    marked by `partition` and `set_partition`; the path of a plan (`.yaml`); or a list of layer
    counts, cut points, layer names or name patterns."""
    recompute: RecomputeSpec = "never"
    """Activations to recompute in the backward pass instead of storing them: none with `never`;
    whole stages with `always`, or for all micro-batches but the last with `except_last`;
    every kth layer with `{every: k}`; or a list of layer names."""
    stages_per_device: int = 1
    """Stages that each device runs; more than one interleaves 1F1B; `zb-h1` needs 1,
    and `zb-v`, `v-half` and `v-min` need 2."""
    max_inflight: int | None = None
    """Micro-batches that may be in flight at one time; None: the schedule decides."""
    batch_norm: str = "micro_batch"
    """The update of running statistics: at each `micro_batch`, as in the unsplit model under
    gradient accumulation, or `deferred` to once per step."""
    sync_batch_norm: bool = False
    """Normalise over the micro-batches of all replicas (GPUs only, as in PyTorch)."""
    precision: str = "fp32"
    """`fp32`, or `bf16` or `fp16` for autocast. `train_step` needs its `scale_loss` for fp16."""
    compile: bool = False
    """Compile each layer with `torch.compile`; those that draw random numbers, such as dropout, run
    uncompiled in training."""
    seed: int = 0
    """The seed of random layers such as dropout."""
    self_check: bool = True
    """Compare a small sample with the unsplit module before the first step of each kind of input
    (dtypes, numbers of dimensions, sizes of 0 and 1, training or evaluation), on copies of the
    model; a difference is an error."""
    find_unused_parameters: bool = False
    """As in DistributedDataParallel: allow steps in which a parameter gets no gradient."""
    broadcast_buffers: bool = True
    """As in DistributedDataParallel: every step begins with rank 0's buffers on all replicas. When
    off, running statistics are each replica's own until an evaluation."""
    shard: str = "none"
    """The tensors of which each replica keeps only a part: `none`, or the state of the `optimizer`,
    which must be a `ShardedOptimizer`. Without effect where there is one replica."""
    memory_weight: float = 0.2
    """For the split `balanced`: 0 balances time alone, 1 memory alone."""
    memory_limit_gib: float | Sequence[float] | None = None
    """GiB that a device may hold, for a split by measured costs and for keys that are `auto`;
    a list such as `[16, 48]`: one value per device of a pipeline; None: no limit, and for `auto`
    the memory of the device."""
    device_speeds: Sequence[float] | str | None = None
    """The relative speed of each device of a pipeline, such as `[1, 2]` if the second one is twice
    as fast: a split by layers, parameters or costs gives a slow device less work. `auto`: measure
    the devices when the model is built; None: all are equally fast."""
    default_partition: int | None = None
    """For the split `manual`: the stage of layers without a mark, or the nearest that their order
    allows; None: each needs one."""
    optimizer_tensors_per_param: int = 2
    """For a split by memory: tensors of a parameter's size that the optimizer keeps for it (AdamW
    keeps 2)."""

    @property
    def placement(self) -> Placement:
        """The layout of stages over the devices that the schedule needs."""
        return registered(self.schedule).placement

    def __post_init__(self) -> None:
        if not is_file(self.schedule):
            check_choice("schedule", self.schedule, schedule_names())
        check_choice("batch_norm", self.batch_norm, BATCH_NORM_MODES)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("shard", self.shard, SHARD_MODES)
        for name in ("chunks", "stages_per_device", "max_inflight"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(
                    f"{setting(name, value, repr)} must be a whole number of at least 1"
                )
        if not 0 <= self.memory_weight <= 1:
            raise SplitError(
                f"{setting('memory_weight', self.memory_weight)} must lie between 0 (time alone) "
                "and 1 (memory alone)"
            )
        _check_positive("memory_limit_gib", self.memory_limit_gib)
        if self.device_speeds != AUTO:
            if isinstance(self.device_speeds, int | float):
                raise ConfigError(
                    f"{setting('device_speeds', self.device_speeds)} must be a list with a speed "
                    f"for each device of a pipeline, or {AUTO!r}"
                )
            _check_positive("device_speeds", self.device_speeds)
        if (self.default_partition or 0) < 0:
            raise ConfigError(f"{argument('default_partition')} must be the index of a stage")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"{setting('seed', self.seed)} must fit in 64 bits")
        _check_split(self.split)
        _check_recompute(self.recompute)


def with_settings(options: Options, settings: Mapping[str, Any]) -> Options:
    """Returns a copy of the dataclass `options` with some fields changed.

    Raises:
        TypeError: there is no such field.
    """
    check_names(options, settings)
    return replace(options, **settings) if settings else options


def check_names(options: Any, settings: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """Checks that the dataclass `options`, or an instance of it, has fields of these names.

    Args:
        options: the dataclass.
        settings: by name.
        others: what may be meant too, arguments that are not fields.

    Raises:
        TypeError: there is no such field.
    """
    known = [one.name for one in fields(options)]
    for name in settings:
        if name not in known:
            raise TypeError(f"unknown setting {name}=: {_meant(name, [*known, *others])}")


def _meant(name: str, known: Sequence[str]) -> str:
    other = OTHER_NAMES.get(name)
    return f"did you mean {other!r}?" if other in known else did_you_mean(name, known, "settings")


def names_checked(init: Init) -> Init:
    """Decorates an `__init__`: an argument that it does not have is told with the nearest one."""
    known = list(inspect.signature(init).parameters)[1:]

    @wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise TypeError(
                    f"{type(self).__name__}: unknown setting {name}=: {_meant(name, known)}"
                )
        init(self, *args, **kwargs)

    return cast(Init, checked)


def check_batch_size(batch_size: Any) -> None:
    """Raises a ConfigError, if it is not a number of samples."""
    if type(batch_size) is not int or batch_size < 1:
        raise ConfigError(
            f"{setting('batch_size', batch_size)} must be a positive number of samples"
        )


@dataclass(frozen=True)
class LoaderOptions:
    """The settings of a loader of batches.

    Raises:
        ConfigError: a value is out of its range; the message names the argument.
    """

    workers: int = 0
    """Processes per replica that load batches ahead; 0: a thread of the training process."""
    drop_last: bool = False
    """Leave out a last training batch that is not full."""
    timeout_s: float = 120.0
    """Seconds after which a worker that does not answer is an error."""
    divided: bool = False
    """An iterable data set gives each replica and each worker its own samples; False: it gives all
    of them the same, and the loader divides them."""
    first_batches: int | None = None
    """Take the first so many batches of the data alone: with 1 a model should learn these by heart,
    or something is wrong; None: all."""
    collate: Callable[[Any], Any] | None = None
    """Makes a batch of a list of samples; None: torch's `default_collate`."""

    def __post_init__(self) -> None:
        if type(self.workers) is not int or self.workers < 0:
            raise ConfigError(
                f"{setting('workers', self.workers)} must be a number of processes, 0 or more"
            )
        if self.first_batches is not None and (
            type(self.first_batches) is not int or self.first_batches < 1
        ):
            raise ConfigError(
                f"{setting('first_batches', self.first_batches)} must be a number, 1 or more"
            )
        for name in ("drop_last", "divided"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{setting(name, getattr(self, name))} must be true or false")
        if type(self.timeout_s) not in (int, float) or self.timeout_s <= 0:
            raise ConfigError(
                f"{setting('timeout_s', self.timeout_s)} must be a positive number of seconds"
            )


def check_device_lists(options: PipelineOptions, nb_part: int) -> None:
    """Checks that lists with a value per device have one for each device of a pipeline.

    Raises:
        ConfigError: a list has another length.
    """
    for name in ("device_speeds", "memory_limit_gib"):
        values = getattr(options, name)
        if is_per_device(values) and len(values) != nb_part:
            raise ConfigError(
                f"{setting(name, list(values))} has {len(values)} values, and a pipeline has "
                f"{nb_part} devices: give one per device, or set {setting('nb_part', len(values))}"
            )


def is_per_device(values: Any) -> bool:
    """Returns whether the value of an option is a list with one value per device."""
    return isinstance(values, Sequence) and not isinstance(values, str)


def _check_positive(name: str, values: Any) -> None:
    """Raises a ConfigError unless `values` is None, a positive number or a list of these."""
    if values is None:
        return
    numbers = values if is_per_device(values) else [values]
    if not numbers:
        raise ConfigError(f"{setting(name, [])} must have a value per device of a pipeline")
    for number in numbers:
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not 0 < number < math.inf:
            shown = list(values) if is_per_device(values) else values
            raise ConfigError(f"{setting(name, shown, repr)}: {number!r} must be a positive number")


def _check_split(split: Any) -> None:
    def fits(item: Any) -> bool:
        inner = item if isinstance(item, list | tuple) else [item]
        return type(item) is int or all(isinstance(name, str) for name in inner)

    if not isinstance(split, str) and not (isinstance(split, Sequence) and all(map(fits, split))):
        raise SplitError(
            f"{setting('split', split, repr)}: use a name, the path of a plan, or a list of layer "
            "counts, cut points, layer names or name patterns"
        )


def _check_recompute(spec: Any) -> None:
    if isinstance(spec, str):
        if spec not in RECOMPUTE_MODES:
            raise ConfigError(
                f"{setting('recompute', spec)} is unknown: use {', '.join(RECOMPUTE_MODES)}, "
                "{every: k} or a list of layer names"
            )
    elif isinstance(spec, Mapping):
        every = spec.get("every")
        if set(spec) != {"every"} or type(every) is not int or every < 1:
            raise ConfigError(
                f"{setting('recompute', dict(spec))}: use {{every: k}} with k of 1 or more"
            )
    elif not isinstance(spec, Sequence):
        raise ConfigError(
            f"{setting('recompute', spec, repr)}: use a mode, {{every: k}} or a list of layer names"
        )


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WHOLE = (
    "steps",
    "epochs",
    "accumulate",
    "max_skipped",
    "log_every",
    "eval_every",
    "eval_every_epochs",
    "checkpoint_every_steps",
    "checkpoint_every_epochs",
    "timeline_every",
)
_POSITIVE = ("clip_norm", "loss_scale", "checkpoint_every_minutes")


@dataclass(frozen=True)
class TrainerOptions:
    """The length of a training run, and when to log, evaluate, save and stop.

    Each `..._every...` also takes place at the last step.

    Raises:
        ConfigError: a value is out of its range; the message names the argument.
    """

    steps: int | None = None
    """Optimizer steps in total; give this or `epochs`."""
    epochs: int | None = None
    """Passes over the data in total."""
    max_time: float | str | None = None
    """Time after which the run saves and stops, at the end of a step: seconds, or text such as
    `"01:30:00"`, `"1-12:00:00"` (with days) or `90m`; None: no limit. `fit` raises `Interrupted`
    then. An evaluation that a run starts or resumes with is completed even after that time."""
    accumulate: int = 1
    """Batches whose gradients an optimizer step adds up. A step does not reach into the next
    epoch."""
    clip_norm: float | None = None
    """Largest norm of the gradient, over all stages."""
    loss_scale: float | None = None
    """A fixed scale of the loss, for fp16; None: an adaptive one."""
    max_skipped: int | None = 10
    """Consecutive steps that may be skipped because the loss or a gradient is not finite; None: any
    number. One more is a `DivergedError`."""
    log_every: int = 10
    """Steps between two logged lines."""
    eval_every: int | None = None
    """Steps between two evaluations; None: only at the end."""
    eval_every_epochs: int | None = None
    """Epochs between two evaluations."""
    eval_first: bool = False
    """Evaluate before the first step too, at step 0. Otherwise one batch of the evaluation runs
    there, which counts for nothing, so that an error in a metric is found."""
    checkpoint_every_steps: int | None = None
    """Steps between two checkpoints; None: only at the end."""
    checkpoint_every_epochs: int | None = None
    """Epochs between two checkpoints."""
    checkpoint_every_minutes: float | None = None
    """Minutes of rank 0's clock between two checkpoints."""
    best: str | None = None
    """A value of the evaluation, `loss` or the name of a metric, whose best step is saved as well
    and never removed; None: none."""
    best_mode: str | None = None
    """`min` if the smallest value is best, `max` if the largest is; None: by the value: the loss
    and perplexity are best where they are smallest, accuracy where it is largest, and metrics of
    torchmetrics say it themselves."""
    timeline_every: int | None = None
    """Steps between two timelines of the stages; None: only at the end."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(
                f"give exactly one of {argument('steps')} and {argument('epochs')}, not "
                f"{setting('steps', self.steps)} and {setting('epochs', self.epochs)}"
            )
        for name in _WHOLE:
            value = getattr(self, name)
            if value is None and name not in ("accumulate", "log_every"):
                continue
            if type(value) is not int or value < 1:
                raise ConfigError(f"{setting(name, value)} must be a whole number of at least 1")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{setting(name, value)} must be positive")
        if type(self.eval_first) is not bool:
            raise ConfigError(f"{setting('eval_first', self.eval_first)} must be true or false")
        if self.best_mode is not None:
            check_choice("best_mode", self.best_mode, ("min", "max"))
        seconds(self.max_time)

    @property
    def max_seconds(self) -> float | None:
        """`max_time` in seconds."""
        return seconds(self.max_time)

    def total_steps(self, batches_per_epoch: int | None) -> int:
        """Returns the number of optimizer steps of the whole run.

        Raises:
            ConfigError: it is counted in `epochs`, and their length is not known.
        """
        if self.steps is not None:
            return self.steps
        if batches_per_epoch is None:
            raise ConfigError(
                f"{setting('epochs', self.epochs)} needs the length of the training data, which "
                f"has none (`__len__`): set {argument('steps')} in place of {argument('epochs')}"
            )
        return (self.epochs or 0) * -(-batches_per_epoch // self.accumulate)


def seconds(max_time: Any) -> float | None:
    """Returns the seconds of a time as `TrainerOptions.max_time` takes it.

    Raises:
        ConfigError: it cannot be read, or is not positive.
    """
    if max_time is None:
        return None
    text = str(max_time).strip()
    clock = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    amount = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([smhd]?)", text)
    if type(max_time) in (int, float):
        total = float(max_time)
    elif clock:
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        total = float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    elif amount:
        total = float(amount[1]) * _UNITS[amount[2] or "s"]
    else:
        total = 0.0
    if not 0 < total < math.inf:
        raise ConfigError(
            f"{setting('max_time', max_time)} must be a positive number of seconds, or a time such "
            f'as "01:30:00" (hours:minutes:seconds), "1-12:00:00" (days-...), "90m" or "1.5h"'
        )
    return total
