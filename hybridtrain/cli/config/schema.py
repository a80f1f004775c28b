"""The keys of a config: one dataclass per group.

Most keys are settings of the library: a group takes them from the option classes (`takes`), where
each has its name, type, default and text. Beside these stand the keys that only the command line
has, each with a docstring.

Hydra composes YAML files and overrides, and the result is merged into these classes, so that a typo
or a wrong type is an error, whichever file or override it comes from. `model`, `data`, `optim` and
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

LOADER_OPTIONS = tuple(each.name for each in fields(LoaderOptions) if each.name != "collate")
"""The keys of `data` that are fields of `LoaderOptions`."""


OPEN_GROUPS = ("model", "data", "optim", "lr_schedule")
"""The groups whose keys are the arguments of a `_target_`."""


GROUP_KEYS = ("groups", "layer_decay")
"""The keys of `optim` that make parameter groups; the others are arguments of the optimizer."""


WRAPPER_KEYS = ("lora",)
"""The keys of `model` that wrap the model (`hybridtrain.models.WRAPPERS`); the others are arguments
of the `_target_`."""


LOADER_KEYS = ("batch_size", *LOADER_OPTIONS)
"""The keys of `data` that the loader takes; the others are arguments of the data set."""


AUTO = "auto"
"""The value of a key that is chosen at the start of a run, by the price of a step."""


AUTO_KEYS = ("nb_part", "chunks", "schedule")
"""The keys of `pipeline` that may be `auto`."""


class Group:
    """A group of keys, with those that it takes from classes of options.

    Attributes:
        taken: by option class that keys are taken from (`takes`), the keys by the fields' names.
        texts: the meaning of keys that have no docstring.
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
    """Decorates a group that takes keys from a dataclass of options: their types and defaults.

    A key that the group has itself, since it means more there, keeps that meaning. A type that
    OmegaConf does not know becomes `Any`, and the options check the value.

    Args:
        options: the dataclass.
        names: of the fields; none: all of them.
        but: fields that are left out.
        prefix: of the fields' names, which the keys do not have.
    """

    def decorate(group: Class) -> Class:
        hints, keys = get_type_hints(options), {}
        for each in fields(options):
            if each.name in but or (names and each.name not in names):
                continue
            key = keys[each.name] = each.name.removeprefix(prefix)
            if key not in group.__annotations__:
                group.__annotations__[key] = _known_type(hints[each.name])
                factory: Any = each.default_factory
                made_anew = factory is not MISSING
                setattr(group, key, field(default_factory=factory) if made_anew else each.default)
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
    """Returns the type as OmegaConf takes it."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    if hint == Mapping[str, float]:
        return dict[str, float]
    return hint if len(kinds) == 1 and kinds[0] in (bool, int, float, str) else Any


_OF_WORLD = ("broadcast_buffers", "find_unused_parameters", "shard")


_OF_TRAINER = ("precision", "compile")


_OF_RUN = ("seed", "optimizer_tensors_per_param")  # a key of the run; what its optimizer keeps


_OF_CHECKPOINT = tuple(
    each.name for each in fields(TrainerOptions) if each.name.startswith(("checkpoint_", "best"))
)


@dataclass
@takes(PipelineOptions, but=(*_OF_WORLD, *_OF_TRAINER, *_OF_RUN))
class PipelineConfig(Group):
    """One replica's pipeline."""

    nb_part: Any = 1
    """Devices of a pipeline, each with `stages_per_device` stages: of one process, or with
    `engine=distributed` of as many processes; `auto`: the fastest number, by the price of a
    step."""
    chunks: Any = PipelineOptions.chunks
    """Micro-batches that a replica's batch is cut into, fewer if it has fewer samples; `auto`: the
    fastest number, by the price of a step."""
    schedule: str = PipelineOptions.schedule
    """The order of forwards and backwards: `1f1b`, `gpipe`; with backwards in two parts `zb-h1`,
    and with `stages_per_device=2` `zb-v`, `v-half` and `v-min`, whose activations take as much
    memory as with `1f1b`, half of it and a third; a user-defined schedule, by its name or the path
    of its file (`.csv`, or a plan's `.yaml`); or `auto`: the fastest that fits into memory, by the
    price of a step, with `stages_per_device`, `recompute` and `chunks` where these are not set."""


@dataclass
@takes(PipelineOptions, *_OF_WORLD)
class WorldConfig(Group):
    """The processes and their devices."""

    engine: str = "local"
    """Home of the stages of a replica: `local`, in one process, a thread per device;
    `distributed`, in `pipeline.nb_part` processes with a device each."""
    inner: str = "pp"
    """With `distributed`, which processes have consecutive ranks: `pp`, those of a pipeline, which
    then is inside a node; `dp`, those that have the same stages."""
    replicas: int | None = None
    """The number of replicas that a batch is divided over, each with its own share and random
    numbers; null: one for each process, or with `distributed` for each pipeline. With a number the
    run is bitwise the same on fewer processes, which then run several replicas each."""
    replica_shares: Any = None
    """The relative number of samples that each replica gets of a batch, such as `[1,2]` for a slow
    and a fast one; null: all get the same. Not with `replicas`."""
    backend: str | None = None
    """`gloo` or `nccl`; null: nccl on GPUs, gloo on CPUs."""
    devices: Any = None
    """null: the GPUs, or the CPU where there are none (an error if the launcher has given some);
    `auto`: the GPUs if there are enough, else the CPU; `cpu`; `cuda`; or a list such as
    `[cuda:0,cuda:1]`."""
    timeout_s: float = 600.0
    """Seconds that a collective may take."""
    stall_s: float | None = 300.0
    """Seconds without progress after which the run is ended, with the name of the process that the
    others wait for; null: never. The first steps may take four times as long, a save ten times."""


@dataclass
@takes(PipelineOptions, *_OF_TRAINER)
@takes(TrainerOptions, but=(*_OF_CHECKPOINT, "timeline_every"))
class TrainerConfig(Group):
    """The training loop."""

    deterministic: bool = False
    """Use deterministic algorithms only; an operation without one is an error. Sets
    `CUBLAS_WORKSPACE_CONFIG` if it is not set."""
    tf32: bool = False
    """Let GPUs multiply fp32 matrices, and convolve, in TF32."""
    loss: Any = None
    """`cross_entropy`, `nll`, `bce`, `mse`; `model_output` for the model's own `output.loss`; or a
    mapping such as `{_target_: torch.nn.MultiMarginLoss, margin: 0.5}`. null: the loss that fits
    what the model returns: `cross_entropy` for logits, `nll` for log-probabilities, `bce` for the
    logits of several labels, `mse` for the values of a regression."""
    label_smoothing: float = 0.0
    """The share of a target's probability that `cross_entropy` and `nll` give to all classes
    alike."""
    class_weights: Any = None
    """Weights of the classes in `cross_entropy` and `nll`, or of the labels that are 1 in `bce`: a
    list in the order of the classes; `auto`: inverse to their frequency in the training samples."""
    metrics: Any = None
    """Names among `accuracy`, `perplexity`, `f1`, `precision`, `recall`, `auc`, `mcc`, `confusion`,
    and `accuracy_per_class` and the like for each class; or a mapping such as `{kappa: {_target_:
    torchmetrics.classification.MulticlassCohenKappa, num_classes: 10}}`; null: accuracy, where
    there are classes."""


@dataclass
@takes(TrainerOptions, *_OF_CHECKPOINT, prefix="checkpoint_")
class CheckpointConfig(Group):
    """The checkpoints of a run."""

    every_steps: int | None = None
    """Steps between two checkpoints; null: only at the end; 0: none at all."""
    keep: int | None = 3
    """The newest checkpoints to keep; null: all."""
    background: bool = False
    """Write checkpoints in the background; a step waits for the copy to host memory only."""
    writers: str = "auto"
    """`all`: each process writes its share, into a directory that all see; `rank0`: rank 0 gathers
    and writes everything; `auto`: rank 0 if it has everything, else all if they see it."""


@dataclass
@takes(TrainerOptions, "timeline_every")
@has_trackers
class MonitorConfig(Group):
    """The reports of a run while it trains.

    A tracker is true, false, or a mapping of its arguments. Any other key is a tracker of the
    user's own, a mapping with a `_target_`.
    """

    report: bool = False
    """Write `report.html`, the page of the run, to its directory at the end."""
    profile: Any = False
    """Write a trace of PyTorch's profiler over some steps, `{steps: [20, 25]}`; with `memory: true`
    of the allocations too."""
    group: str | None = None
    """The name of runs that belong together, in W&B and MLflow; null: that of the sweep, if there
    is one."""

    def __post_init__(self) -> None:
        for name in TRACKERS:
            if not isinstance(value := getattr(self, name), bool | Mapping | None):
                raise ConfigError(
                    f"monitor.{name}={value} must be true, false or a mapping of its arguments"
                )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MonitorConfig) and vars(self) == vars(other)

    def chosen(self) -> dict[str, Any]:
        """Returns the trackers that are not off, with their arguments or True."""
        settings = ("group", "report", "timeline_every")
        return {
            name: value
            for name, value in vars(self).items()
            if name not in settings and value not in (None, False)
        }


@dataclass
class SubmitConfig(Group):
    """The job that `hybridtrain submit` sends; without effect on the other commands."""

    to: str = "slurm"
    """`slurm` sends a batch script; `torchrun` and `kubernetes` print what starts the same run."""
    nodes: int = 1
    """Nodes of a job."""
    processes_per_node: int | None = None
    """null: with `engine=local` one for every `nb_part` GPUs, with `distributed` one for each GPU;
    without GPUs one, or `nb_part`."""
    gpus_per_node: int | None = None
    """GPUs of a node; null: none."""
    cpus_per_task: int | None = None
    """CPUs of each process; null: `cpus_per_gpu` for each of its GPUs."""
    cpus_per_gpu: int | None = None
    """CPUs of each process for each of its GPUs; null: as the cluster has it."""
    mem: Any = None
    """Memory of a node, such as `64G`; null: as the cluster has it."""
    partition: str | None = None
    """As sbatch takes it."""
    account: str | None = None
    """As sbatch takes it."""
    qos: str | None = None
    """As sbatch takes it."""
    constraint: str | None = None
    """As sbatch takes it."""
    time: Any = None
    """The time limit, in the forms of `trainer.max_time` or as Slurm writes it: `10:00` is 10
    minutes, `1-12` a day and 12 hours. A bare number is seconds; null: the cluster's default."""
    signal_s: int = 120
    """Seconds before the time limit at which the run is asked to save and stop; 0: never."""
    max_requeues: int = 20
    """The number of times that a job which was stopped, and has saved, is queued again."""
    modules: list[str] = field(default_factory=list)
    """Modules that the script loads before the lines of `setup`, such as `[cuda]`."""
    setup: list[str] = field(default_factory=list)
    """Lines of the script before the run, such as `[export NCCL_DEBUG=WARN]`."""
    container: Any = None
    """The container of the processes: `{runtime: pyxis, image: my.sqsh, gpus: nvidia, mounts:
    [/data], args: []}`, the runtime `pyxis`, `apptainer`, `singularity`, `charliecloud`, `shifter`
    or `podman-hpc`, the GPUs `nvidia`, `amd` or `none`; null: no container."""
    srun_args: list[str] = field(default_factory=list)
    """More arguments of srun, verbatim."""
    sbatch_args: list[str] = field(default_factory=list)
    """More arguments of sbatch, verbatim."""
    array_parallelism: int | None = None
    """With --multirun, how many jobs run at a time; null: any number."""


@dataclass
class SearchConfig(Group):
    """The study of `hybridtrain search`; without effect on the other commands."""

    space: list[str] = field(default_factory=list)
    """Settings that are searched for, as the command line writes them:
    `["optim.lr=tag(log,interval(1e-4,1e-1))", "pipeline.chunks=4,8"]`. Keys of the command line
    with several values are added."""
    trials: int = 20
    """Trials of the study in all; more than before goes on with it."""
    metric: str | None = None
    """A value of the evaluation; null: `checkpoint.best`, or `loss`."""
    mode: str | None = None
    """`min` or `max`; null: as in `checkpoint.best_mode`."""
    sampler: str = "tpe"
    """Optuna's sampler: `tpe`, by what came of earlier trials, or `random`."""
    pruner: str | None = "median"
    """Optuna's rule for trials that are stopped early, by their evaluations: `median`, those worse
    than half of the others at that step; `hyperband`; null: none."""
    storage: str | None = None
    """null: `study.db` in the study's folder; `journal`: a file there that several nodes may write
    to, on a shared file system; or the URL of a database."""
    launcher: str | None = None
    """The command of each trial up to `train`, such as `torchrun --standalone --nproc-per-node 2 -m
    hybridtrain`; null: one process."""

    def __post_init__(self) -> None:
        check_choice("search.sampler", self.sampler, ("tpe", "random"))
        check_choice("search.pruner", self.pruner or "none", ("median", "hyperband", "none"))
        if self.mode is not None:
            check_choice("search.mode", self.mode, ("min", "max"))


@dataclass
@takes(Hardware)
class HardwareConfig(Group):
    """The machine that `plan` prices a run for."""

    costs: str = "estimated"
    """`estimated`: the layers' FLOPs and bytes are counted, and no device is needed; `measured`:
    they run on this machine's first device."""


@dataclass
class Config:
    """A whole run."""

    recipe: str | None = None
    """A recipe of the package by its name, or any by the path of its file."""
    run_name: str | None = None
    """The folder of the run in `output_dir`; null: the name of the recipe, or `run`."""
    output_dir: str = "outputs"
    """The folder of all runs."""
    seed: int = PipelineOptions.seed
    """The seed of the initial weights, the data order and dropout."""
    resume: str | None = "auto"
    """`auto`: the newest checkpoint in the run directory, if any, and for `evaluate`, `predict` and
    `export` the best, if one is marked; `last`: the newest, which must exist; `best`; the path of a
    checkpoint or of a run directory; or null: none."""
    allow_changes: bool = False
    """Go on with a run with another model, other data or another seed than it has."""
    init_from: Any = None
    """The weights that a new run begins with: the path of a file of safetensors or of torch.save,
    of a checkpoint or a run, also of Accelerate, torchtune and transformers, or a folder of the
    Hub; the name of a model there; or a mapping of `path`, `strict`, `best` and `prefix` (the
    beginning of the source's names, such as `net.` of Lightning)."""
    ema: bool = True
    """`evaluate`, `predict` and `export` take the average of the weights, where the run evaluates
    with one; false: the weights themselves."""
    output: str | None = None
    """The file that `predict` writes, with the suffix `.jsonl`, `.npy` or `.parquet`; null: one in
    the run directory."""
    format: str = "safetensors"
    """The form in which `export` writes: `safetensors`; `torch`, a state dict of `torch.save`;
    `transformers`, a folder for `from_pretrained`; `torch_export` and `onnx`, the net for
    inference; or `peft`, a folder with the adapter of `model.lora` alone."""
    push_to: str | None = None
    """The repository of the Hugging Face Hub, such as `me/my-model`, to which `export` sends the
    folder of `format=transformers` with a model card; a new one is private; null: none."""
    allow_targets: list[str] = field(default_factory=list)
    """Your packages that a `_target_` may come from, such as `[my_project.models]`; on the command
    line, or in `pyproject.toml`."""
    model: dict[str, Any] = field(default_factory=dict)
    """The model's `_target_` and arguments; one that is null is taken from the data set. `lora`,
    true or a mapping such as `{rank: 16, targets: [q_proj, v_proj]}`, trains an adapter on frozen
    weights."""
    data: dict[str, Any] = field(
        default_factory=lambda: {name: getattr(LoaderOptions, name) for name in LOADER_OPTIONS}
    )
    """The data set's `_target_` and arguments, `batch_size` (samples per batch over all replicas),
    and the settings of `LoaderOptions`: `workers`, `drop_last`, `timeout_s`, `divided`."""
    optim: dict[str, Any] = field(default_factory=dict)
    """The optimizer's `_target_` and arguments, and `groups` and `layer_decay` of its
    parameters."""
    lr_schedule: dict[str, Any] = field(default_factory=dict)
    """The schedule's `_target_` and arguments, and `warmup_steps`."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    callbacks: Any = None
    """Names such as `[ema, learning_rates]`, or a mapping of names to their arguments such as
    `{early_stopping: {patience: 3}}`; with a `_target_` any name."""
    submit: SubmitConfig = field(default_factory=SubmitConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    hardware: HardwareConfig | None = None
    """The machine that `plan` prices the run for, and that `auto` keys are chosen for; null:
    none."""


def auto_keys(pipeline: PipelineConfig) -> list[str]:
    """Returns the keys that are `auto`."""
    return [key for key in AUTO_KEYS if getattr(pipeline, key) == AUTO]


def with_auto_replaced(pipeline: PipelineConfig, known: PipelineConfig) -> PipelineConfig:
    """Returns `pipeline` with the values of `known` for the keys that are `auto`."""
    return replace(pipeline, **{key: getattr(known, key) for key in auto_keys(pipeline)})


def is_own(value: Any) -> bool:
    """Returns whether a value of `monitor` is a tracker of the user's own, under a free name."""
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
    """Returns the keys that have a text as their value, or null."""
    keys = {
        f"{name}.{key}"
        for name, kind in groups().items()
        for key, hint in get_type_hints(kind).items()
        if hint in _TEXT
    }
    return frozenset(keys) | {n for n, hint in get_type_hints(Config).items() if hint in _TEXT}


_TEXT = (str, str | None)


def taken(options: type) -> Iterator[tuple[str, str, str]]:
    """Yields argument, group and key of what the groups take from `options`."""
    for group, kind in groups().items():
        for argument, key in kind.taken.get(options, {}).items():
            yield argument, group, key


def arguments_of(config: Config, options: type) -> dict[str, Any]:
    """Returns what `config` says for the fields of a dataclass of options."""
    return {name: getattr(getattr(config, group), key) for name, group, key in taken(options)}
