"""The settings of a pipeline, a loader and a `Trainer`, each a frozen dataclass.

`HybridModel(net, world, chunks=8)` is short for `HybridModel(net, world,
PipelineOptions(chunks=8))`. The command line takes the names, types, defaults and docstrings of its
config keys from these fields. This module does not import torch.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, TypeVar, cast

from hybridtrain._base.plain_numbers import plain_numbers
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

ENGINES = ("local", "distributed")
PRECISIONS = ("fp32", "bf16", "fp16")
BATCH_NORM_MODES = ("micro_batch", "deferred")
SHARD_MODES = ("none", "optimizer")
HEADS = ("auto", "fused", "plain")
ATTENTION_KERNELS = ("auto", "math", "efficient", "flash", "cudnn")
AUTO = "auto"
OFFLOAD_MODES = ("none", "inputs", "all")
RECOMPUTE_MODES = ("never", "except_last", "always")

OptimizerState = float | Callable[[Any], Mapping[str, int]]
"""The size of an optimizer's state; see `PipelineOptions.optimizer_tensors_per_param`."""


# Names that other libraries use for this library's arguments.
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
    """The split of a model into stages, and the way to run them.

    Raises:
        ConfigError: a value is out of range; the message names the argument.
        SplitError: `split` or `memory_weight` is invalid.
    """

    chunks: int = 1
    """Micro-batches to split a batch into, along dim 0; fewer if the batch has fewer samples."""
    schedule: str = "1f1b"
    """The order of forwards and backwards: `1f1b` or `gpipe`; `zb-h1`, which splits the backward
    pass in two; with `stages_per_device=2`, `zb-v`, `v-half` and `v-min`, whose activations take as
    much memory as with `1f1b`, half and a third of it; or a user-defined schedule, by its name or
    the path of its file (`.csv`, or a plan's `.yaml`)."""
    split: SplitSpec = "uniform"
    """The quantity to balance across stages: `uniform` (number of layers), `size` (bytes of
    weights, gradients and optimizer state), or measured `time`, `memory` or both (`balanced`).
    `manual`: the stages set by `partition` and `set_partition`. Otherwise the path of a plan
    (`.yaml`), or a list of layer counts, cut points, layer names or name patterns."""
    recompute: RecomputeSpec = "never"
    """Activations to recompute in the backward pass instead of storing them: `never`; `always`
    (all layers); `except_last` (all layers, for all micro-batches but the last); every kth layer
    with `{every: k}`; or a list of layer names."""
    offload: str = "none"
    """The activations to copy to host memory after a forward, and back before its backward: `none`;
    the `inputs` of recomputed layers; or `all`, so that about two micro-batches stay on each
    device. The results are the same."""
    stages_per_device: int = 1
    """Stages per device; more than one interleaves 1F1B. `zb-h1` needs 1; `zb-v`, `v-half` and
    `v-min` need 2."""
    max_inflight: int | None = None
    """Maximum number of micro-batches in flight; None: the schedule decides."""
    batch_norm: str = "micro_batch"
    """The time to update running statistics: after every `micro_batch`, as in the unsplit model
    with gradient accumulation, or once per step (`deferred`)."""
    sync_batch_norm: bool = False
    """Normalize over the micro-batches of all replicas (GPUs only, as in PyTorch)."""
    precision: str = "fp32"
    """`fp32`, or `bf16` or `fp16` for autocast. With fp16, pass `scale_loss` to `train_step`."""
    attention: str = "auto"
    """The kernel of `scaled_dot_product_attention`: `math`, `efficient`, `flash` or `cudnn`;
    `auto`: PyTorch chooses one for each call. They round differently; a kernel that the device or
    the inputs do not allow is an error."""
    head: str = "auto"
    """The cross-entropy after a last `nn.Linear`: `fused` computes it in chunks, without the logits
    and their gradient in memory, and differs from PyTorch by the rounding of float32; `plain` as
    PyTorch does; `auto`: fused with 65,536 outputs or more."""
    compile: bool = False
    """Compile each layer with `torch.compile`; layers that draw random numbers, such as dropout,
    run uncompiled in training."""
    seed: int = 0
    """The seed of random layers such as dropout."""
    self_check: bool = True
    """Compare a small sample with the unsplit module, on copies of the model: before the first step
    of each kind of input (dtypes, numbers of dimensions, sizes of 0 and 1, training or evaluation)
    and again at powers of two; with `engine=distributed`, once with the example inputs. A
    difference raises an error."""
    find_unused_parameters: bool = False
    """As in DistributedDataParallel: allow steps in which some parameters get no gradient."""
    broadcast_buffers: bool = True
    """As in DistributedDataParallel: copy rank 0's buffers to all replicas before every step. If
    False, each replica keeps its own running statistics until an evaluation."""
    shard: str = "none"
    """The tensors to shard over the replicas: `none`, or the state of the `optimizer`, which must
    be a `ShardedOptimizer`. No effect with a single replica."""
    memory_weight: float = 0.2
    """For the split `balanced`: 0 balances time only, 1 memory only."""
    memory_limit_gib: float | Sequence[float] | None = None
    """GiB that a device may use, for splits by measured cost and for keys set to `auto`; a list
    such as `[16, 48]` has one value per device of a pipeline; None: no limit for splits, and the
    device's memory for `auto`."""
    device_speeds: Sequence[float] | str | None = None
    """The relative speed of each device of a pipeline, such as `[1, 2]` if the second is twice as
    fast: splits by layers, parameters or costs give a slow device less work. `auto`: measure the
    devices when the model is built; None: all devices are equally fast."""
    default_partition: int | None = None
    """For the split `manual`: the stage of unmarked layers (or the nearest stage that keeps the
    layers in order); None: every layer needs a mark."""
    optimizer_tensors_per_param: OptimizerState = 2
    """For splits by memory: the size of the optimizer's state, as a number of tensors of each
    parameter's size (2 for AdamW); or a function that returns the bytes of state by parameter name
    for a module, such as `partial(hybridtrain.step.state_bytes, make=...)`."""

    @property
    def placement(self) -> Placement:
        """The placement of stages on devices that the schedule requires."""
        return registered(self.schedule).placement

    def __post_init__(self) -> None:
        _take_plain_numbers(self)
        if not is_file(self.schedule):
            check_choice("schedule", self.schedule, schedule_names())
        check_choice("batch_norm", self.batch_norm, BATCH_NORM_MODES)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("attention", self.attention, ATTENTION_KERNELS)
        check_choice("shard", self.shard, SHARD_MODES)
        check_choice("offload", self.offload, OFFLOAD_MODES)
        check_choice("head", self.head, HEADS)
        for name in ("chunks", "stages_per_device", "max_inflight"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(
                    f"{setting(name, value, repr)} must be a whole number of at least 1"
                )
        if not 0 <= self.memory_weight <= 1:
            raise SplitError(
                f"{setting('memory_weight', self.memory_weight)} must be between 0 (time only) and "
                "1 (memory only)"
            )
        no_limit = f" ({setting('memory_limit_gib', None)}: no limit)"
        _check_positive("memory_limit_gib", self.memory_limit_gib, no_limit)
        if self.device_speeds != AUTO:
            if isinstance(self.device_speeds, int | float | str):
                raise ConfigError(
                    f"{setting('device_speeds', self.device_speeds)} must be a list with a speed "
                    f"for each device of a pipeline, or {AUTO!r}"
                )
            _check_positive("device_speeds", self.device_speeds, f", or use {AUTO!r}")
        if (self.default_partition or 0) < 0:
            raise ConfigError(f"{argument('default_partition')} must be a stage index (0, 1, ...)")
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"{setting('seed', self.seed)} must fit in 64 bits")
        _check_split(self.split)
        _check_recompute(self.recompute)
        if self.offload == "inputs" and self.recompute == "never":
            raise ConfigError(
                f"{setting('offload', 'inputs')} moves the inputs of recomputed layers, and with "
                f"{setting('recompute', 'never')} there are none: set {argument('recompute')}, or "
                f"{setting('offload', 'all')}"
            )


def _take_plain_numbers(options: Any) -> None:
    """Replaces NumPy's numbers in the fields of a frozen dataclass."""
    for option in fields(options):
        object.__setattr__(options, option.name, plain_numbers(getattr(options, option.name)))


def with_settings(options: Options, settings: Mapping[str, Any]) -> Options:
    """Returns a copy of the dataclass `options` with some fields changed.

    Raises:
        TypeError: the dataclass does not have such a field.
    """
    check_names(options, settings)
    return replace(options, **settings) if settings else options


def check_names(options: Any, settings: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """Checks that every name in `settings` is a field of the dataclass `options`.

    Args:
        options: the dataclass or an instance of it.
        settings: the values by name.
        others: names of further arguments to suggest for a typo.

    Raises:
        TypeError: a name is not a field.
    """
    names = [option.name for option in fields(options)]
    for name in settings:
        if name not in names:
            raise TypeError(f"unknown setting {name}=: {_meant(name, [*names, *others])}")


def _meant(name: str, names: Sequence[str]) -> str:
    other = OTHER_NAMES.get(name)
    return f"did you mean {other!r}?" if other in names else did_you_mean(name, names, "settings")


def names_checked(init: Init) -> Init:
    """Decorates an `__init__` to raise a TypeError with a suggestion for an unknown argument."""
    names = list(inspect.signature(init).parameters)[1:]

    @wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in names:
                raise TypeError(
                    f"{type(self).__name__}: unknown setting {name}=: {_meant(name, names)}"
                )
        init(self, *args, **kwargs)

    return cast(Init, checked)


def check_batch_size(batch_size: Any) -> None:
    """Raises a ConfigError if `batch_size` is not a positive number of samples."""
    batch_size = plain_numbers(batch_size)
    if type(batch_size) is not int or batch_size < 1:
        raise ConfigError(
            f"{setting('batch_size', batch_size)} must be a whole number of samples, at least 1"
        )


@dataclass(frozen=True)
class LoaderOptions:
    """The settings of a data loader.

    Raises:
        ConfigError: a value is out of range; the message names the argument.
    """

    workers: int = 0
    """Worker processes per replica that prefetch batches; 0: a thread of the training process."""
    drop_last: bool = False
    """Drop the last training batch if it is incomplete."""
    timeout_s: float = 120.0
    """Seconds to wait for a worker before raising an error."""
    divided: bool = False
    """True if an iterable data set shards itself over replicas and workers; False: every worker
    reads all samples, and the loader shards them."""
    first_batches: int | None = None
    """Train on the first batches only, this many of them, for debugging: with 1, a working model
    overfits them; None: all batches."""
    group_by_length: bool = False
    """Make training batches of samples of similar length, so that less is padded. The data set
    needs a method `lengths()`, as `data=datasets` and `data=chat` without packing have; the order
    still depends only on the seed, the epoch and the batch size."""
    collate: Callable[[Any], Any] | None = None
    """Collates a list of samples into a batch; None: torch's `default_collate`."""

    def __post_init__(self) -> None:
        _take_plain_numbers(self)
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
        for name in ("drop_last", "divided", "group_by_length"):
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


def _check_positive(name: str, values: Any, instead: str) -> None:
    """Raises a ConfigError unless `values` is None, a positive number or a list of these.

    Args:
        name: the option.
        values: its value.
        instead: what else the option may be, for the message.
    """
    if values is None:
        return
    numbers = values if is_per_device(values) else [values]
    if not numbers:
        raise ConfigError(f"{setting(name, [])} must have a value per device of a pipeline")
    for number in numbers:
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not 0 < number < math.inf:
            shown = list(values) if is_per_device(values) else values
            raise ConfigError(
                f"{setting(name, shown, repr)}: {number!r} must be a positive number{instead}"
            )


def _check_split(split: Any) -> None:
    def fits(item: Any) -> bool:
        inner = item if isinstance(item, list | tuple) else [item]
        return type(item) is int or all(isinstance(name, str) for name in inner)

    if not isinstance(split, str) and not (isinstance(split, Sequence) and all(map(fits, split))):
        raise SplitError(
            f"{setting('split', split, repr)}: use a name, the path of a plan, or a list of layer "
            "counts, cut points, layer names or name patterns"
        )


def offloads_nothing(options: PipelineOptions, nb_part: int, schedules: bool = True) -> str:
    """Returns the message for an `offload` that has no effect.

    Args:
        options: the options.
        nb_part: the devices of a pipeline.
        schedules: whether the option `schedule` decides on the order of actions.
    """
    order = f"{setting('schedule', options.schedule)}, " if schedules else ""
    other = f"{setting('schedule', 'gpipe')} and " if schedules else ""
    return (
        f"{setting('offload', options.offload)} moves nothing with {order}"
        f"{setting('nb_part', nb_part)} and {setting('chunks', options.chunks)}: no device would "
        f"hold fewer micro-batches. Set {setting('offload', 'none')}, or have more of them in "
        f"flight, for example with {other}{setting('chunks', max(8, options.chunks))}"
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

    Actions with an `..._every...` interval also run at the last step.

    Raises:
        ConfigError: a value is out of range; the message names the argument.
    """

    steps: int | None = None
    """Total number of optimizer steps; set either this or `epochs`."""
    epochs: int | None = None
    """Total number of passes over the data."""
    max_time: float | str | None = None
    """Time limit, after which the run saves and stops at the end of a step: seconds, or text such
    as `"01:30:00"`, `"1-12:00:00"` (with days) or `90m`; None: no limit. `fit` then raises
    `Interrupted`. An evaluation at the start of a run or after resuming always completes."""
    accumulate: int = 1
    """Batches per optimizer step, for gradient accumulation. A step never spans two epochs."""
    clip_norm: float | None = None
    """Maximum norm of the gradient, over all stages."""
    loss_scale: float | None = None
    """Fixed loss scale for fp16; None: an adaptive scale."""
    max_skipped: int | None = 10
    """Number of consecutive steps that may be skipped because of a loss or gradient that is not
    finite; one more raises `DivergedError`. None: no limit."""
    log_every: int = 10
    """Steps between log lines."""
    eval_every: int | None = None
    """Steps between evaluations; None: only at the end."""
    eval_every_epochs: int | None = None
    """Epochs between evaluations."""
    eval_first: bool = False
    """Evaluate before the first step too, as step 0. If False, a single evaluation batch runs
    before training, only to find errors in metrics early."""
    checkpoint_every_steps: int | None = None
    """Steps between checkpoints; None: only at the end."""
    checkpoint_every_epochs: int | None = None
    """Epochs between checkpoints."""
    checkpoint_every_minutes: float | None = None
    """Minutes between checkpoints, by rank 0's clock."""
    best: str | None = None
    """The evaluation result to track, `loss` or the name of a metric. The checkpoint of its best
    step is saved as well and never deleted. None: off."""
    best_mode: str | None = None
    """`min` if lower values of `best` are better, `max` if higher; None: inferred: `min` for the
    loss and perplexity, `max` for accuracy, and as declared by metrics of torchmetrics."""
    timeline_every: int | None = None
    """Steps between recorded timelines of the stages; None: only at the end."""

    def __post_init__(self) -> None:
        _take_plain_numbers(self)
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
            ConfigError: the run is counted in `epochs`, and the length of the data is unknown.
        """
        if self.steps is not None:
            return self.steps
        if batches_per_epoch is None:
            raise ConfigError(
                f"{setting('epochs', self.epochs)} needs the length of the training data, which "
                f"has no `__len__`: set {argument('steps')} instead of {argument('epochs')}"
            )
        return (self.epochs or 0) * -(-batches_per_epoch // self.accumulate)


def seconds(max_time: Any) -> float | None:
    """Converts a `TrainerOptions.max_time` to seconds.

    Raises:
        ConfigError: it cannot be parsed, or is not positive.
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
