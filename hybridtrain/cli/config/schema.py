"""The keys of a config: one dataclass per group.

Most keys are settings of the library: a group takes them from the option classes (`takes`), which
define their names, types, defaults and docstrings. The other keys exist on the command line only;
their docstrings are here.

Hydra composes YAML files and overrides, and the result is merged into these classes, so a typo or a
wrong type in any file or override is an error. `model`, `data`, `optim` and
`lr_schedule` name a `_target_`; their other keys are its arguments and are checked against its
signature (see `hybridtrain.cli.config.targets`). This module imports neither torch nor Hydra.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args, get_type_hints

from hybridtrain._base.hardware import Hardware
from hybridtrain.errors import ConfigError, check_choice
from hybridtrain.observe import TRACKERS
from hybridtrain.options import LoaderOptions, PipelineOptions, TrainerOptions

LOADER_OPTIONS = tuple(option.name for option in fields(LoaderOptions) if option.name != "collate")
"""The keys of `data` that are fields of `LoaderOptions`."""


OPEN_GROUPS = ("model", "data", "optim", "lr_schedule")
"""The groups with the arguments of a `_target_` as keys."""


GROUP_KEYS = ("groups", "layer_decay")
"""The keys of `optim` that make parameter groups; the others are arguments of the optimizer."""


WARMUP_KEYS = ("warmup_steps", "warmup_share")
"""The keys of `lr_schedule` that set the warm-up; the others are arguments of the schedule."""


WRAPPER_KEYS = ("quantize", "lora")
"""The keys of `model` that wrap the model (`hybridtrain.models.WRAPPERS`); the others are arguments
of the `_target_`."""


LOADER_KEYS = ("batch_size", *LOADER_OPTIONS)
"""The keys of `data` that the loader takes; the others are arguments of the data set."""


AUTO = "auto"
"""The value with which a run chooses a key at its start, by predicted step time."""


AUTO_KEYS = ("nb_part", "chunks", "schedule")
"""The keys of `pipeline` that may be `auto`."""


class Group:
    """A group of keys, some of them taken from option classes.

    Attributes:
        taken: for each option class (`takes`), the keys by field name.
        texts: descriptions of the keys that have no docstring.
    """

    taken: ClassVar[dict[type, dict[str, str]]] = {}
    texts: ClassVar[dict[str, str]] = {}

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


Class = TypeVar("Class", bound=type[Group])


def takes(
    options: type, *names: str, but: tuple[str, ...] = (), prefix: str = ""
) -> Callable[[Class], Class]:
    """Decorates a group that takes keys, with types and defaults, from a dataclass of options.

    A key that the group defines itself overrides the option. A type that OmegaConf does not support
    becomes `Any`; the option class then checks the value.

    Args:
        options: the dataclass.
        names: fields to take; none: all of them.
        but: fields to leave out.
        prefix: removed from the field names.
    """

    def decorate(group: Class) -> Class:
        hints, keys = get_type_hints(options), {}
        for option in fields(options):
            if option.name in but or (names and option.name not in names):
                continue
            key = keys[option.name] = option.name.removeprefix(prefix)
            if key not in group.__annotations__:
                group.__annotations__[key] = _known_type(hints[option.name])
                factory: Any = option.default_factory
                made_anew = factory is not MISSING
                setattr(group, key, field(default_factory=factory) if made_anew else option.default)
        group.taken = {**group.taken, options: keys}
        return group

    return decorate


def has_trackers(group: Class) -> Class:
    """Decorates a group with a key for each registered tracker: true, false or its arguments."""
    group.__annotations__ = {**dict.fromkeys(TRACKERS, Any), **group.__annotations__}
    for name, tracker in TRACKERS.items():
        setattr(group, name, tracker.on)
    group.texts = {name: tracker.text for name, tracker in TRACKERS.items()}
    return group


def _known_type(hint: Any) -> Any:
    """Returns the type for OmegaConf."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    if hint == Mapping[str, float]:
        return dict[str, float]
    return hint if len(kinds) == 1 and kinds[0] in (bool, int, float, str) else Any


_OF_WORLD = ("broadcast_buffers", "find_unused_parameters", "shard")


_OF_TRAINER = ("precision", "attention", "compile")


_OF_RUN = ("seed", "optimizer_tensors_per_param")  # a top-level key; read from the optimizer


_OF_CHECKPOINT = tuple(
    option.name
    for option in fields(TrainerOptions)
    if option.name.startswith(("checkpoint_", "best"))
)


@dataclass
@takes(PipelineOptions, but=(*_OF_WORLD, *_OF_TRAINER, *_OF_RUN))
class PipelineConfig(Group):
    """One replica's pipeline."""

    nb_part: Any = 1
    """Devices per pipeline, each with `stages_per_device` stages: all in one process, or one
    process each with `engine=distributed`; `auto`: the number with the shortest predicted step."""
    chunks: Any = PipelineOptions.chunks
    """Micro-batches per replica's batch, fewer if the batch has fewer samples; `auto`: the number
    with the shortest predicted step."""
    schedule: str = PipelineOptions.schedule
    """...; or `auto`: the schedule with the shortest predicted step that fits into memory, chosen
    together with `stages_per_device`, `recompute` and `chunks` unless they are set."""


@dataclass
@takes(PipelineOptions, *_OF_WORLD)
class WorldConfig(Group):
    """The processes and their devices."""

    engine: str = "local"
    """How processes run the stages of a replica: `local`, one process with all devices;
    `distributed`, `pipeline.nb_part` processes with one device each."""
    inner: str = "pp"
    """With `distributed`, the processes that get consecutive ranks: `pp`, the stages of one
    pipeline, which keeps pipelines within a node; `dp`, the replicas of one stage."""
    replicas: int | None = None
    """The number of replicas that share a batch, each with its own samples and random numbers;
    null: one per process, or per pipeline with `distributed`. With a number, the run is bitwise the
    same on fewer processes, each of which then runs several replicas."""
    replica_shares: Any = None
    """The relative share of a batch for each replica, such as `[1,2]` for a slow and a fast one;
    null: equal shares. Cannot be combined with `replicas`."""
    backend: str | None = None
    """`gloo` or `nccl`; null: nccl on GPUs, gloo on CPUs."""
    devices: Any = None
    """null: the GPUs, or the CPU on machines without GPUs (an error if the launcher assigned GPUs);
    `auto`: the GPUs if there are enough, else the CPU; `cpu`; `cuda`; or a list such as
    `[cuda:0,cuda:1]`."""
    share_gpus: bool = False
    """Allow several processes to use one GPU over NCCL, to test a run on a machine with fewer GPUs
    than processes; its speed means nothing."""
    timeout_s: float = 600.0
    """The timeout of a collective, in seconds."""
    stall_s: float | None = 300.0
    """Seconds without progress after which the run ends and names the process that the others wait
    for; null: never. The first steps may take four times as long, a save ten times."""


@dataclass
@takes(PipelineOptions, *_OF_TRAINER)
@takes(TrainerOptions, but=(*_OF_CHECKPOINT, "timeline_every"))
class TrainerConfig(Group):
    """The training loop."""

    deterministic: bool = False
    """Repeat results bitwise, also after a resume: use deterministic algorithms only; an
    operation without one raises an error. Sets `CUBLAS_WORKSPACE_CONFIG` unless the environment
    does. On GPUs, `world.replicas` implies it."""
    tf32: bool = False
    """Use TF32 for fp32 matrix products and convolutions on GPUs."""
    loss: Any = None
    """`cross_entropy`, `nll`, `bce`, `mse`; `model_output` for the model's own `output.loss`; or a
    mapping such as `{_target_: torch.nn.MultiMarginLoss, margin: 0.5}`. null: the loss for the
    model's output: `cross_entropy` for logits, `nll` for log-probabilities, `bce` for multi-label
    logits, `mse` for regression."""
    label_smoothing: float = 0.0
    """Label smoothing for `cross_entropy` and `nll`: the part of the target probability spread
    evenly over all classes."""
    class_weights: Any = None
    """Class weights for `cross_entropy` and `nll`, or positive-label weights for `bce`: a list in
    class order; `auto`: the inverse of each class's frequency in the training samples."""
    metrics: Any = None
    """A list of `accuracy`, `perplexity`, `f1`, `precision`, `recall`, `auc`, `mcc`, `confusion`,
    and per-class forms such as `accuracy_per_class`; or a mapping such as `{kappa: {_target_:
    torchmetrics.classification.MulticlassCohenKappa, num_classes: 10}}`; null: accuracy, for
    classification."""


@dataclass
@takes(TrainerOptions, *_OF_CHECKPOINT, prefix="checkpoint_")
class CheckpointConfig(Group):
    """The checkpoints of a run."""

    every_steps: int | None = None
    """Steps between checkpoints; null: only at the end; 0: never."""
    keep: int | None = 3
    """How many of the newest checkpoints to keep; null: all."""
    background: bool = False
    """Write checkpoints in the background; a step waits only for the copy to host memory."""
    writers: str = "auto"
    """`all`: each process writes its share into a shared directory; `rank0`: rank 0 gathers and
    writes everything; `auto`: rank 0 if it has everything, else all if they share the directory."""


@dataclass
@takes(TrainerOptions, "timeline_every")
@has_trackers
class MonitorConfig(Group):
    """Trackers and reports of a run.

    A tracker is true, false, or a mapping of its arguments. Any other key is a user-defined
    tracker: a mapping with a `_target_`.
    """

    report: bool = False
    """Write the run's report, `report.html`, to the run directory at the end."""
    profile: Any = False
    """Write a PyTorch profiler trace of some steps, `{steps: [20, 25]}`; `memory: true` adds
    allocations."""
    group: str | None = None
    """The group of the run in W&B and MLflow; null: the name of the sweep, if any."""

    def __post_init__(self) -> None:
        for name in TRACKERS:
            if not isinstance(value := getattr(self, name), bool | Mapping | None):
                raise ConfigError(
                    f"monitor.{name}={value} must be true, false or a mapping of its arguments"
                )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MonitorConfig) and vars(self) == vars(other)

    def chosen(self) -> dict[str, Any]:
        """Returns the trackers that are on, with their arguments or True."""
        settings = ("group", "report", "timeline_every")
        return {
            name: value
            for name, value in vars(self).items()
            if name not in settings and value not in (None, False)
        }


@dataclass
class SubmitConfig(Group):
    """The job that `hybridtrain submit` sends; other commands ignore it."""

    to: str = "slurm"
    """`slurm` sends a batch script; `torchrun` and `kubernetes` print the command or manifest that
    starts the run."""
    nodes: int = 1
    """Nodes per job."""
    processes_per_node: int | None = None
    """Processes per node; null: one per `nb_part` GPUs with `engine=local`, one per GPU with
    `distributed`; without GPUs, one or `nb_part`."""
    gpus_per_node: int | None = None
    """GPUs per node; null: none."""
    cpus_per_task: int | None = None
    """CPUs per process; null: `cpus_per_gpu` times its GPUs."""
    cpus_per_gpu: int | None = None
    """CPUs per GPU of a process; null: the cluster's default."""
    mem: Any = None
    """Memory per node, such as `64G`; null: the cluster's default."""
    partition: str | None = None
    """sbatch's --partition."""
    account: str | None = None
    """sbatch's --account."""
    qos: str | None = None
    """sbatch's --qos."""
    constraint: str | None = None
    """sbatch's --constraint."""
    time: Any = None
    """The time limit, in the formats of `trainer.max_time` or Slurm: `10:00` is 10 minutes, `1-12`
    a day and 12 hours. A bare number is seconds; null: the cluster's default."""
    signal_s: int = 120
    """Seconds before the time limit at which Slurm signals the run to save and stop; 0: never."""
    max_requeues: int = 20
    """How often a job may requeue itself after it saved and stopped."""
    modules: list[str] = field(default_factory=list)
    """Environment modules that the script loads before the `setup` lines, such as `[cuda]`."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that the script runs before training, such as `[export NCCL_DEBUG=WARN]`."""
    container: Any = None
    """The container to run in, `{runtime: pyxis, image: my.sqsh, gpus: nvidia, mounts: [/data],
    args: []}`, where the runtime is `pyxis`, `apptainer`, `singularity`, `charliecloud`, `shifter`
    or `podman-hpc`, and `gpus` is `nvidia`, `amd` or `none`; null: no container."""
    srun_args: list[str] = field(default_factory=list)
    """More arguments of srun, verbatim."""
    sbatch_args: list[str] = field(default_factory=list)
    """More arguments of sbatch, verbatim."""
    array_parallelism: int | None = None
    """With --multirun, how many jobs may run at a time; null: no limit."""


@dataclass
class SearchConfig(Group):
    """The study of `hybridtrain search`; other commands ignore it."""

    space: list[str] = field(default_factory=list)
    """The search space, as overrides: `["optim.lr=tag(log,interval(1e-4,1e-1))",
    "pipeline.chunks=4,8"]`. Keys with several values on the command line are added."""
    trials: int = 20
    """Total trials of the study; a higher number than before continues it."""
    metric: str | None = None
    """The evaluation value to optimize; null: `checkpoint.best`, or `loss`."""
    mode: str | None = None
    """`min` or `max`; null: `checkpoint.best_mode`."""
    sampler: str = "tpe"
    """Optuna's sampler: `tpe`, which learns from earlier trials, or `random`."""
    pruner: str | None = "median"
    """Optuna's rule to stop trials early, by their evaluations: `median`, if worse than half of the
    others at that step; `hyperband`; null: none."""
    storage: str | None = None
    """Where the study is stored: null: `study.db` in its folder; `journal`: a file there that
    several nodes can write to on a shared file system; or the URL of a database."""
    launcher: str | None = None
    """The command that starts each trial, up to `train`, such as `torchrun --standalone
    --nproc-per-node 2 -m hybridtrain`; null: one process."""

    def __post_init__(self) -> None:
        check_choice("search.sampler", self.sampler, ("tpe", "random"))
        check_choice("search.pruner", self.pruner or "none", ("median", "hyperband", "none"))
        if self.mode is not None:
            check_choice("search.mode", self.mode, ("min", "max"))


@dataclass
@takes(Hardware)
class HardwareConfig(Group):
    """The machine for which `plan` predicts a run."""

    costs: str = "estimated"
    """`estimated`: layer costs from counted FLOPs and bytes, without a device; `measured`: layer
    costs measured on this machine's first device."""


@dataclass
class Config:
    """A run."""

    recipe: str | None = None
    """The name of a built-in recipe, or the path of a recipe file."""
    run_name: str | None = None
    """The run's folder in `output_dir`; null: the name of the recipe, or `run`."""
    output_dir: str = "outputs"
    """The folder that holds all runs."""
    seed: int = PipelineOptions.seed
    """The seed of the initial weights, the data order and dropout."""
    resume: str | None = "auto"
    """The checkpoint to start from: `auto`, the newest in the run directory, if any (`evaluate`,
    `predict` and `export` prefer the best, if one is marked); `last`, the newest, which must exist;
    `best`; the path of a checkpoint or run directory; or null, none."""
    allow_changes: bool = False
    """Allow a command to use an existing run with a different model, data or seed."""
    init_from: Any = None
    """The initial weights of a new run: the path of a safetensors or torch.save file, a checkpoint,
    a run (also from Accelerate, torchtune and transformers) or a Hub folder; the name of a model on
    the Hub; or a mapping of `path`, `strict`, `best` and `prefix` (to remove from the source's
    names, such as Lightning's `net.`)."""
    ema: bool = True
    """`evaluate`, `predict` and `export` use the moving average of the weights if the run evaluates
    with one; false: the weights themselves."""
    output: str | None = None
    """The file that `predict` writes, with the suffix `.jsonl`, `.npy` or `.parquet`; null: a file
    in the run directory."""
    format: str = "safetensors"
    """The format of `export`: `safetensors`; `torch`, a state dict saved by `torch.save`;
    `transformers`, a folder for `from_pretrained`; `torch_export` and `onnx`, the model for
    inference; or `peft`, a folder with only the adapter of `model.lora`."""
    push_to: str | None = None
    """The Hugging Face Hub repository, such as `me/my-model`, to which `export` uploads the folder
    of `format=transformers` with a model card; new repositories are private; null: none."""
    allow_targets: list[str] = field(default_factory=list)
    """Your packages that a `_target_` may name, such as `[my_project.models]`; set on the command
    line or in `pyproject.toml`."""
    model: dict[str, Any] = field(default_factory=dict)
    """The model's `_target_` and arguments; a null argument takes its value from the data set.
    `lora`, true or a mapping such as `{rank: 16, targets: [q_proj, v_proj]}`, trains an adapter on
    frozen weights, and `quantize`, `nf4` or `int8`, keeps these in 4 or 8 bits."""
    data: dict[str, Any] = field(
        default_factory=lambda: {name: getattr(LoaderOptions, name) for name in LOADER_OPTIONS}
    )
    """The data set's `_target_` and arguments, `batch_size` (samples per batch across replicas),
    and the settings of `LoaderOptions`: `workers`, `drop_last`, `timeout_s`, `divided`."""
    optim: dict[str, Any] = field(default_factory=dict)
    """The optimizer's `_target_` and arguments, and `groups` and `layer_decay` for parameter
    groups."""
    lr_schedule: dict[str, Any] = field(default_factory=dict)
    """The schedule's `_target_` and arguments, and `warmup_steps` or `warmup_share`."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    callbacks: Any = None
    """A list of names such as `[ema, learning_rates]`, or a mapping from names to arguments such as
    `{early_stopping: {patience: 3}}`; with a `_target_`, the name is free."""
    submit: SubmitConfig = field(default_factory=SubmitConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    hardware: HardwareConfig | None = None
    """The machine for which `plan` predicts the run and `auto` chooses values; null: none."""


def auto_keys(pipeline: PipelineConfig) -> list[str]:
    """Returns the keys that are `auto`."""
    return [key for key in AUTO_KEYS if getattr(pipeline, key) == AUTO]


def with_auto_replaced(pipeline: PipelineConfig, known: PipelineConfig) -> PipelineConfig:
    """Returns `pipeline` with its `auto` keys set as in `known`."""
    return replace(pipeline, **{key: getattr(known, key) for key in auto_keys(pipeline)})


def is_own(value: Any) -> bool:
    """Returns whether a value of `monitor` is a user-defined tracker."""
    return isinstance(value, Mapping) and "_target_" in value


@cache
def groups() -> dict[str, type[Group]]:
    """Returns the classes of the groups, by the groups' names."""
    first = {name: (*get_args(hint), hint)[0] for name, hint in get_type_hints(Config).items()}
    return {
        n: kind for n, kind in first.items() if inspect.isclass(kind) and issubclass(kind, Group)
    }


@cache
def text_keys() -> frozenset[str]:
    """Returns the keys with a string value, or null."""
    keys = {
        f"{name}.{key}"
        for name, kind in groups().items()
        for key, hint in get_type_hints(kind).items()
        if hint in _TEXT
    }
    return frozenset(keys) | {n for n, hint in get_type_hints(Config).items() if hint in _TEXT}


_TEXT = (str, str | None)


def taken(options: type) -> Iterator[tuple[str, str, str]]:
    """Yields argument, group and key for each key that a group takes from `options`."""
    for group, kind in groups().items():
        for argument, key in kind.taken.get(options, {}).items():
            yield argument, group, key


def arguments_of(config: Config, options: type) -> dict[str, Any]:
    """Returns the values in `config` for the fields of a dataclass of options."""
    return {name: getattr(getattr(config, group), key) for name, group, key in taken(options)}
