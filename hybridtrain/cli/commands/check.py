"""The command `check`, and `submit --check`: proves a whole job on one CPU, before it queues.

`check_job` reads top to bottom. Each part prints one line, and a problem ends none but the parts
that need its result, so that one call finds all of them:

    ok           checked; the line says what was found
    problem      the job would end with this error, or not fit
    not checked  it cannot be seen from here, or needs a part that has a problem

No process group is joined, no layer gets values unless the model needs them, and nothing is
written.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import Parameter

from hybridtrain._base.construction import construct_on_meta, default_generators, rewind
from hybridtrain._base.hardware import host_memory
from hybridtrain._base.microbatch import Microbatch, chunk_sizes
from hybridtrain._base.tensors import byte_size
from hybridtrain._base.text_table import counted, printable, with_unit
from hybridtrain.checkpoint import (
    CheckpointStore,
    check_fits,
    check_sizes,
    check_weights,
    locate_weights,
    parse_init_from,
    read_manifest,
    read_weights,
)
from hybridtrain.cli.config.leftovers import leave_out_leftovers
from hybridtrain.cli.config.resolve import Settings, resolve_settings
from hybridtrain.cli.config.schema import AUTO, Config, HardwareConfig, SubmitConfig, auto_keys
from hybridtrain.cli.run.auto import without_auto
from hybridtrain.cli.run.build import (
    check_choices,
    example_of_run,
    loader_options,
    pipeline_options,
    trainer_options,
)
from hybridtrain.cli.run.components import (
    build_callbacks,
    build_loss,
    build_lr_schedule,
    build_metrics,
    build_model,
    build_optimizer,
    build_trackers,
)
from hybridtrain.cli.run.directory import RunDirectory
from hybridtrain.cli.run.errors import versions
from hybridtrain.cli.run.hardware import hardware_of_run
from hybridtrain.cli.run.job import PORT, JobLayout, layout_of
from hybridtrain.cli.run.lock import RunLock
from hybridtrain.cli.run.prediction import predict_step_of_run, without_errors_of_fake_tensors
from hybridtrain.cli.run.run_data import load_data, refuse_other_data
from hybridtrain.data import (
    DataSplits,
    StreamLoader,
    TrainLoader,
    example_batch,
    is_stream,
    length_of,
    share_of,
)
from hybridtrain.errors import CheckpointError, ConfigError, SplitError, UserError, WorldError
from hybridtrain.launch import Launch, check_interface, detect, free_port, in_one_line
from hybridtrain.loss import LossFn, resolve
from hybridtrain.options import LoaderOptions, PipelineOptions, TrainerOptions
from hybridtrain.partitioning import (
    LossOfStep,
    NotOnFakesError,
    Plan,
    PlannedLayers,
    Planner,
    recompute_policy,
)
from hybridtrain.pipeline import message_formats, messages_of, with_sync_batch_norm
from hybridtrain.price import why_not_priced
from hybridtrain.schedule import Schedule, make_schedule
from hybridtrain.world import World

ScriptOf = Callable[[Settings, JobLayout], str]
"""Returns the script of a job, for the cluster to check."""

# A model without values that cannot be cut is built with values if it is below this share of the
# host's memory.
_BUILDS_BELOW = 0.25


def check(overrides: Sequence[str], config_dir: str | None = None) -> int:
    """Checks a run that is started here, or on the machine that the group `submit` describes.

    Returns 2 if there is a problem, else 0.
    """
    return check_job(overrides, config_dir, _layout_here)


def check_job(
    overrides: Sequence[str],
    config_dir: str | None,
    layout: Callable[[Config], JobLayout] = layout_of,
    script_of: ScriptOf | None = None,
) -> int:
    """Checks all parts of a job and prints a line for each; returns the exit code.

    Args:
        overrides: the command line's.
        config_dir: a folder with more groups and options.
        layout: returns the processes of the job.
        script_of: returns the script that `sbatch` would get; None: none is sent.
    """
    report = Report()
    say = report.part

    settings = _settings(report, overrides, config_dir)
    config = say("keys", _keys, settings)
    loss = say("loss", _loss, config)
    say("metrics", lambda c, loss_fn: (_names(build_metrics(c, loss_fn)), True), config, loss)
    say("callbacks", _callbacks, config)
    trainer = say("trainer", _trainer, config)
    loader = say("loader", _loader, config)
    pipeline = say("pipeline", _pipeline, config)
    say("optimizer", _optimizer, config)
    say("run directory", _run_directory, config)

    processes = say("processes", partial(_processes, layout), settings)
    worlds = say("devices", _devices, config, processes)
    say("ports", partial(_ports, on_cluster=script_of is not None), config, processes)
    say("versions", _versions, config)
    if script_of is not None:
        say("sbatch", partial(_sbatch, script_of), settings, processes)

    data = say("data", _data, config)
    batches = say("batches", _batches, settings, data, worlds, pipeline, loader)
    say("learning rate", _learning_rate, config, batches, trainer)
    model = say("model", _model, config, data)
    initial = say("init_from", _init_from, config)
    checkpoint = say("checkpoint", _checkpoint, config)
    say("weights", _weights, config, data, model, initial, checkpoint)

    schedule = say("schedule", _schedule, worlds, pipeline)
    say("order", _order, worlds, batches, schedule)
    with without_errors_of_fake_tensors():
        cut = say("plan", _plan, settings, data, worlds, pipeline, model, schedule)
        say("messages", _messages, config, data, loss, pipeline, batches, cut)
        is_here = script_of is None
        say(
            "memory",
            partial(_memory, is_here=is_here),
            config,
            data,
            worlds,
            pipeline,
            loss,
            batches,
            cut,
        )
    return report.end()


@dataclass(frozen=True)
class Part:
    """The result of a part of the check.

    Attributes:
        name: of the part.
        value: for the parts that need it; None: there is a problem, or it was not checked.
    """

    name: str
    value: Any = None


class NotCheckedError(Exception):
    """A part cannot be checked from here; the message says why."""


class Report:
    """Prints the lines of a check and counts the problems."""

    def __init__(self) -> None:
        self._problems = self._unchecked = 0

    def part(self, name: str, check: Callable[..., tuple[str, Any]], *needs: Part) -> Part:
        """Runs a part, and prints its line.

        Args:
            name: of the part.
            check: takes the values of `needs`; returns what was found, as text, and a value.
            *needs: earlier parts; the part is not checked if one of them has no value.
        """
        lacking = [need.name for need in needs if need.value is None]
        try:
            if lacking:
                raise NotCheckedError(f"it needs: {', '.join(lacking)}")
            found, value = check(*(need.value for need in needs))
        except NotCheckedError as reason:
            self._unchecked += 1
            self._line(name, "not checked", str(reason))
            return Part(name)
        except Exception as error:  # of the user's code too
            self.problem(name, error)
            return Part(name)
        self._line(name, "ok", found)
        return Part(name, value)

    def problem(self, name: str, error: Exception) -> None:
        """Prints a problem of a part."""
        self._problems += 1
        self._line(name, "problem", in_one_line(error))

    def end(self) -> int:
        """Prints the verdict; returns the exit code."""
        verdict = counted(self._problems, "problem") if self._problems else "no problem found"
        not_checked = f", {counted(self._unchecked, 'part')} not checked" * bool(self._unchecked)
        print(f"{verdict}{not_checked}", flush=True)
        return UserError.exit_code if self._problems else 0

    def _line(self, name: str, verdict: str, text: str) -> None:
        print(
            printable(f"{name:<13}  {verdict:<11}  {' '.join(text.split())}").rstrip(), flush=True
        )


def _settings(report: Report, overrides: Sequence[str], config_dir: str | None) -> Part:
    """Composes the config; without the keys that are wrong, each of which is a problem."""

    def composed(words: Sequence[str]) -> tuple[str, Settings]:
        settings = resolve_settings("train", words, config_dir)
        return f"run {settings.config.run_name}", settings

    try:
        settings = composed(overrides)[1]
    except UserError as error:
        if len(overrides) == 1:
            report.problem("config", error)
            return Part("config")
        return _usable_settings(report, composed, overrides, error)
    return report.part("config", lambda: (f"run {settings.config.run_name}", settings))


def _usable_settings(
    report: Report,
    composed: Callable[[Sequence[str]], tuple[str, Settings]],
    overrides: Sequence[str],
    error: UserError,
) -> Part:
    """Reports each override that cannot be composed with the others, which are used."""
    usable: list[str] = []
    wrong: list[str] = []
    # groups first: other keys may be arguments of what they choose
    for override in sorted(overrides, key=lambda word: "." in word.partition("=")[0]):
        try:
            composed([*usable, override])
        except UserError as problem:
            report.problem("config", problem)
            wrong.append(override)
            if "." not in override.partition("=")[0]:
                return Part("config")  # a recipe or a group: nothing is known of the run
        else:
            usable.append(override)
    if not wrong:  # each alone is right
        report.problem("config", error)
        return Part("config")
    found, settings = composed(usable)
    return report.part("config", lambda: (f"{found}, without {' '.join(wrong)}", settings))


def _keys(settings: Settings) -> tuple[str, Config]:
    leave_out_leftovers(settings)
    config = without_auto(settings)
    check_choices(config)
    chosen = [f"pipeline.{key}" for key in auto_keys(settings.config.pipeline)]
    if not chosen:
        return "", config
    defaults = ", ".join(f"{key}={getattr(config.pipeline, key[9:])}" for key in chosen)
    return f"{', '.join(chosen)}: auto, chosen by the job; checked with {defaults}", config


def _names(named: Mapping[str, Any]) -> str:
    return ", ".join(named)


def _loss(config: Config) -> tuple[str, LossFn]:
    loss_fn = build_loss(config)
    return "", loss_fn


def _callbacks(config: Config) -> tuple[str, bool]:
    directory = RunDirectory(config)
    callbacks = build_callbacks(config, directory)
    build_trackers(config, directory, quiet=True, dry_run=True)
    return ", ".join(type(callback).__name__ for callback in callbacks), True


def _trainer(config: Config) -> tuple[str, TrainerOptions]:
    return "", trainer_options(config)


def _loader(config: Config) -> tuple[str, LoaderOptions]:
    return "", loader_options(config)


def _pipeline(config: Config) -> tuple[str, PipelineOptions]:
    options = pipeline_options(config)
    return f"{options.schedule}, {counted(options.chunks, 'micro-batch', 'es')}", options


def _optimizer(config: Config) -> tuple[str, bool]:
    optimizer = build_optimizer(config.optim, [Parameter(torch.zeros(1))], config.allow_targets)
    build_lr_schedule(config.lr_schedule, optimizer, 10**9, config.allow_targets)
    return type(optimizer).__name__, True


def _run_directory(config: Config) -> tuple[str, bool]:
    directory = RunDirectory(config)
    directory.check_writable()
    RunLock(directory.path).check()
    return f"{directory.path} can be written to from here", True


def _layout_here(config: Config) -> JobLayout:
    """Returns one pipeline on this machine, unless the group `submit` describes another one."""
    sizes, defaults = ("nodes", "processes_per_node", "gpus_per_node"), SubmitConfig()
    submit, nb_part = config.submit, config.pipeline.nb_part
    if nb_part != AUTO and all(getattr(submit, n) == getattr(defaults, n) for n in sizes):
        gpus = 0 if config.world.devices == "cpu" else torch.cuda.device_count()
        processes = nb_part if config.world.engine == "distributed" else 1
        submit = replace(submit, processes_per_node=processes, gpus_per_node=gpus or None)
    return layout_of(replace(config, submit=replace(submit, to="torchrun", container=None)))


def _processes(
    layout_of_job: Callable[[Config], JobLayout], settings: Settings
) -> tuple[str, JobLayout]:
    layout = layout_of_job(settings.config)
    return str(layout), layout


def _devices(config: Config, layout: JobLayout) -> tuple[str, list[World]]:
    """Returns the World of every rank, as the job will make it."""
    backend = config.world.backend
    if layout.gpus_per_node and not dist.is_nccl_available():
        backend = "gloo"  # PyTorch here says nothing about PyTorch there
    per_node = layout.processes_per_node
    worlds = [
        World.of_launch(
            Launch("slurm", rank, layout.processes, rank % per_node, per_node, None),
            layout.gpus_per_node,
            layout.nb_part,
            config.world.devices,
            backend,
            config.world.engine,
            config.world.inner,
            config.world.replicas,
        )
        for rank in range(layout.processes)
    ]
    first = worlds[0]
    names = ", ".join(map(str, first.devices))
    logical = f", {first.logical_replicas} logical replicas" * (first.fixed_replicas is not None)
    return f"{counted(len(worlds), 'rank')}; rank 0 has {names}{logical}", worlds


def _ports(config: Config, layout: JobLayout, on_cluster: bool) -> tuple[str, bool]:
    """Checks where the processes meet, as far as the environment here decides it."""
    if layout.processes == 1:
        return "one process needs none", True
    text = os.environ.get("MASTER_PORT")
    if text and not (text.isdecimal() and 0 < int(text) < 2**16):
        raise WorldError(f"MASTER_PORT={text} is not a port: unset it, or set 1 to 65535")
    if not on_cluster and layout.nodes == 1:
        check_interface(os.environ)
        free_port()
        return "processes of this machine can meet", True
    if config.submit.to == "slurm" and on_cluster:
        variables = {"PROCID": 0, "NTASKS": layout.processes, "JOB_ID": 1, "STEP_ID": 0}
        slurm = {f"SLURM_{name}": str(value) for name, value in variables.items()}
        launch = detect({**os.environ, **slurm, "SLURM_JOB_NODELIST": "node"})
        if launch.launcher == "slurm":
            chosen = f"MASTER_PORT={text}" if text else "the number of the job chooses the port"
            return f"{chosen}, on its first node", True
    raise NotCheckedError(f"whether port {text or PORT} of the first node is free")


def _versions(config: Config) -> tuple[str, bool]:
    here = ", ".join(f"{name} {number}" for name, number in versions().items())
    if config.submit.container is not None:
        raise NotCheckedError(f"those in the container; here {here}")
    return f"{here} here; the nodes need the same", True


def _sbatch(script_of: ScriptOf, settings: Settings, layout: JobLayout) -> tuple[str, bool]:
    """Has Slurm check account, partition, QOS and limits, without a job."""
    script = script_of(settings, layout)
    if settings.config.submit.to != "slurm":
        raise NotCheckedError(f"submit.to={settings.config.submit.to}")
    if (sbatch := shutil.which("sbatch")) is None:
        raise NotCheckedError("account, partition and limits: there is no sbatch on this machine")
    try:
        tested = subprocess.run(
            [sbatch, "--test-only"], input=script, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCheckedError(f"sbatch does not answer: {error}") from error
    if tested.returncode:
        reason = " ".join(tested.stderr.split()) or f"exit code {tested.returncode}"
        raise ConfigError(f"sbatch --test-only refuses the job: {reason}; see the keys of submit")
    return "sbatch --test-only takes the job", True


def _data(config: Config) -> tuple[str, DataSplits]:
    """Loads the data set here; one that is to be downloaded is not."""
    download = bool(config.data.get("download"))
    if "download" in config.data:
        config = replace(config, data={**config.data, "download": False})
    try:
        data = load_data(config, World())
    except UserError as error:
        if download:
            raise NotCheckedError(f"data.download=true: the job fetches it ({error})") from error
        raise
    return f"{data}; here, not on the nodes", data


@dataclass(frozen=True)
class Batches:
    """The batches of an epoch.

    Attributes:
        per_epoch: how many; None: not known.
        samples: of a full batch.
        cuts: the sizes of a share's micro-batches, for each kind of share and batch.
        chunks: the numbers of micro-batches that a process runs in a step.
    """

    per_epoch: int | None
    samples: int
    cuts: list[tuple[int, ...]]
    chunks: list[int]


def _batches(
    settings: Settings,
    data: DataSplits,
    worlds: Sequence[World],
    pipeline: PipelineOptions,
    loader: LoaderOptions,
) -> tuple[str, Batches]:
    """Divides the full and the short last batch over replicas and micro-batches."""
    config, replicas = settings.config, worlds[0].logical_replicas
    size = config.data["batch_size"]
    if size == AUTO:
        raise NotCheckedError("data.batch_size=auto is chosen by the job")
    if size < replicas:
        raise ConfigError(
            f"data.batch_size={size} is less than a sample for each of {replicas} replicas, and "
            f"{replicas - size} of them would compute padding alone in every step: set "
            f"data.batch_size={replicas} or more, a larger pipeline.nb_part=, or fewer processes"
        )
    options = replace(loader, collate=data.collate)
    per_epoch: int | None
    if is_stream(data.train):
        per_epoch = StreamLoader(data.train, size, worlds[0], options=options).batches_per_epoch
        samples = length_of(data.train)
    else:
        made = TrainLoader(data.train, size, World(), options=options)
        per_epoch, samples = made.batches_per_epoch, made.samples
    full = size if samples is None else min(size, samples)
    short = 0 if samples is None or options.drop_last else samples % size
    cuts: dict[tuple[int, ...], None] = {}
    chunks: dict[int, None] = {}
    for total in filter(None, (full, short)):
        of_replica = []
        for replica in range(replicas):
            share = share_of(total, replica, replicas)
            of_replica.append(tuple(chunk_sizes(max(1, share.stop - share.start), pipeline.chunks)))
        cuts |= dict.fromkeys(of_replica)
        for world in worlds:
            chunks[sum(len(of_replica[replica]) for replica in world.owned_replicas)] = None
    text = f"{size} samples over {counted(replicas, 'replica')}, micro-batches of "
    text += " or ".join(str(size) for size in sorted({n for cut in cuts for n in cut}))
    if len(next(iter(cuts))) < pipeline.chunks:
        text += f"; fewer than pipeline.chunks={pipeline.chunks}: raise data.batch_size="
    if short and full == size:
        text += f"; the last batch of an epoch has {short}"
    return text, Batches(per_epoch, full, list(cuts), list(chunks))


def _learning_rate(config: Config, batches: Batches, trainer: TrainerOptions) -> tuple[str, bool]:
    steps = trainer.total_steps(batches.per_epoch)
    optimizer = build_optimizer(config.optim, [Parameter(torch.zeros(1))], config.allow_targets)
    schedule = build_lr_schedule(config.lr_schedule, optimizer, steps, config.allow_targets)
    return f"{type(schedule).__name__} over {counted(steps, 'step')}", True


@dataclass(frozen=True)
class Model:
    """The model of a run.

    Attributes:
        net: without values, if its constructor can do that.
        build: makes it with values.
        nbytes: of its parameters and buffers.
    """

    net: nn.Module
    build: Callable[[], nn.Module]
    nbytes: int


def _model(config: Config, data: DataSplits) -> tuple[str, Model]:
    build = partial(build_model, config, data)
    draws, how = default_generators(), "without values"
    try:
        net = construct_on_meta(build)
    except UserError:
        raise
    except Exception:  # a constructor that needs values, or is wrong with them too
        rewind(draws)
        net, how = build(), "with values, which its constructor needs"
    nbytes = sum(map(byte_size, [*net.parameters(), *net.buffers()]))
    parameters = sum(parameter.numel() for parameter in net.parameters())
    text = f"{type(net).__name__}, {parameters:,} parameters, built {how}"
    return text, Model(net, build, nbytes)


def _init_from(config: Config) -> tuple[str, Path | bool]:
    """Finds the weights of `init_from`; False: there are none to load."""
    initial = parse_init_from(config.init_from)
    if initial is None:
        return "none", False
    if CheckpointStore(RunDirectory(config).checkpoints).steps():
        return "the run goes on from its own checkpoint", False
    found = locate_weights(initial["source"], initial.get("best", False))
    if found is None:
        raise NotCheckedError(f"init_from={initial['source']} is on the Hub; it was not fetched")
    return str(found), found


def _checkpoint(config: Config) -> tuple[str, Path | bool]:
    """Finds the checkpoint that the job goes on from; False: there is none."""
    path = _checkpoint_to_resume(config)
    if path is None:
        return "none: a new run", False
    step = check_sizes(path)["step"]
    return f"{path}, step {step}: the sizes of its files are right, bytes were not read", path


def _weights(
    config: Config, data: DataSplits, model: Model, initial: Path | bool, checkpoint: Path | bool
) -> tuple[str, bool]:
    """Compares the model, and the data of a checkpoint, with what is to be loaded."""
    if isinstance(checkpoint, Path):
        weights, extra = read_weights(checkpoint, read_manifest(checkpoint)["files"])
        check_fits(checkpoint, weights | extra, model.net.state_dict())
        refuse_other_data(checkpoint, data, config.allow_changes)
        return f"{counted(len(weights), 'tensor')} of the checkpoint fit the model", True
    if isinstance(initial, Path):
        arguments = parse_init_from(config.init_from) or {}
        strict = arguments.get("strict", True)
        found = check_weights(model.net, initial, arguments["source"], strict=strict)
        return f"{counted(len(found.loaded), 'tensor')} of init_from= fit the model", True
    return "initial values", True


def _checkpoint_to_resume(config: Config) -> Path | None:
    store, resume = CheckpointStore(RunDirectory(config).checkpoints), config.resume
    if resume is None:
        return None
    if resume not in ("auto", "last", "best"):
        path = Path(resume)
        if not path.is_dir():
            raise CheckpointError(f"resume={resume}: there is no such checkpoint directory")
        stores = [CheckpointStore(folder) for folder in (path / "checkpoints", path)]
        of_run = next((store for store in stores if store.steps()), None)
        return path if of_run is None else of_run.newest_up_to(of_run.steps()[-1])
    mark = store.best_mark() if resume == "best" else None
    if resume == "best" and mark is None:
        raise CheckpointError(f"resume=best: no checkpoint in {store.root} is marked as the best")
    if not store.steps():
        if resume == "auto":
            return None
        raise CheckpointError(f"resume={resume}: there is no checkpoint in {store.root}")
    return store.newest_up_to(store.steps()[-1] if mark is None else mark.step)


@dataclass(frozen=True)
class Cut:
    """A model that is cut into stages.

    Attributes:
        net: the model.
        plan: its plan.
        planned: its layers, by stage.
        example: inputs and targets of a replica's batch.
        again: rebuilds the layers for the inputs of another micro-batch.
    """

    net: nn.Module
    plan: Plan
    planned: PlannedLayers
    example: tuple[Any, Any]
    again: Callable[[Any], PlannedLayers]


def _plan(
    settings: Settings,
    data: DataSplits,
    worlds: Sequence[World],
    pipeline: PipelineOptions,
    model: Model,
    schedule: Callable[[int], Schedule],
) -> tuple[str, Cut]:
    """Cuts the model for the job's devices, with estimated costs in place of measured ones.

    The `schedule` has a table, which the plan holds.
    """
    config = without_auto(settings)
    world = worlds[0]
    example = example_of_run(config, data, world)

    def cut(net: nn.Module) -> Cut:
        net = with_sync_batch_norm(net, world) if pipeline.sync_batch_norm else net
        make = partial(Planner, net, pipeline, owners=world.stage_owners, costs="estimated")
        planner = make(example_inputs=example[0])
        plan = planner.plan()

        def again(inputs: Any) -> PlannedLayers:
            return make(example_inputs=Microbatch(inputs)).layers_of(plan)

        return Cut(net, plan, planner.layers_of(plan), example, again)

    draws = default_generators()
    try:
        found = cut(model.net)
    except Exception:
        if model.nbytes > _BUILDS_BELOW * host_memory():
            raise
        rewind(draws)
        found = cut(model.build())  # as the job does, or the error for a model with values
    names = [layer.name for stage in found.planned.stages for layer in stage]
    recompute_policy(pipeline.recompute, names)
    counts = ", ".join(map(str, found.plan.counts))
    text = f"{counted(len(found.plan.stages), 'stage')} with {counts} layers"
    if found.plan.costs_from == "estimated" and found.plan.split == pipeline.split:
        text += "; by estimated costs, where the job measures them"
    return text, found


def _messages(
    config: Config,
    data: DataSplits,
    loss_fn: LossFn,
    pipeline: PipelineOptions,
    batches: Batches,
    cut: Cut,
) -> tuple[str, bool]:
    """Runs micro-batches of all sizes through the stages, as fake tensors."""
    sizes = sorted({size for sizes in batches.cuts for size in sizes}, reverse=True)
    function = resolve(loss_fn, cut.net).function
    largest = 0
    for size in sizes:
        inputs, targets = example_batch(data.train, size, data.collate)
        # a graph that holds for some inputs only is traced anew, as a run does
        planned = cut.planned if cut.planned.variants is None else cut.again(inputs)
        loss = LossOfStep(function, targets)
        try:
            formats = message_formats(
                cut.net, planned.stages, inputs, loss, pipeline.precision, size
            )
        except NotOnFakesError as error:
            text = f"layer {error.layer!r}, micro-batch of {counted(size, 'sample')}"
            if error.needs_values:
                raise NotCheckedError(f"{text}: its shapes depend on values") from error
            way_out = "see model=, data= and trainer.loss="
            if size != sizes[0]:
                way_out = "set data.drop_last=true, or another data.batch_size= or pipeline.chunks="
            raise SplitError(f"{text} fails: {error.reason}; {way_out}") from error
        largest = max([largest, *map(_bytes_of, formats)])
    text = f"{counted(len(cut.planned.stages) - 1, 'border')}, "
    text += f"micro-batches of {' and '.join(map(str, sizes))}; the largest message has "
    return text + with_unit(largest), True


def _bytes_of(form: Any) -> int:
    elements = [torch.Size(tensor.shape).numel() for tensor in form.tensors]
    return sum(n * t.dtype.itemsize for n, t in zip(elements, form.tensors, strict=True))


def _schedule(
    worlds: Sequence[World], pipeline: PipelineOptions
) -> tuple[str, Callable[[int], Schedule]]:
    """Makes the table of a full batch; returns the function that makes one for other batches."""

    def table(chunks: int) -> Schedule:
        return make_schedule(
            pipeline.schedule,
            worlds[0].nb_part,
            chunks,
            pipeline.stages_per_device,
            pipeline.max_inflight,
        )

    full = table(pipeline.chunks)
    return f"{pipeline.schedule} of {counted(full.stages, 'stage')}", table


def _order(
    worlds: Sequence[World],
    batches: Batches,
    table: Callable[[int], Schedule],
) -> tuple[str, bool]:
    """Proves the order of each process in each kind of step, and both ends of each message."""
    messages = [messages_of(table(chunks)) for chunks in batches.chunks]
    steps = " and ".join(counted(chunks, "micro-batch", "es") for chunks in batches.chunks)
    text = f"{steps}: complete, in order, no circle"
    if worlds[0].processes_per_replica > 1:
        text += f"; {' and '.join(map(str, messages))} messages per replica, named alike at both "
        text += f"ends, for all {counted(len(worlds), 'rank')}"
    return text, True


def _memory(
    config: Config,
    data: DataSplits,
    worlds: Sequence[World],
    pipeline: PipelineOptions,
    loss_fn: LossFn,
    batches: Batches,
    cut: Cut,
    is_here: bool,
) -> tuple[str, bool]:
    """Compares the predicted peak of each device with what it may use."""
    world = worlds[0]
    if (reason := why_not_priced(pipeline)) is not None:
        raise NotCheckedError(reason)
    priced, is_known = _with_hardware(config, worlds, is_here)
    try:
        prediction = predict_step_of_run(
            priced,
            world,
            pipeline,
            data,
            cut.planned.stages,
            cut.example,
            batches.samples,
            resolve(loss_fn, cut.net).function,
        )
    except NotOnFakesError as error:
        raise NotCheckedError(f"layer {error.layer!r} does not run on fake tensors") from error
    memory = prediction.memory_bytes
    assert memory is not None
    fullest = max(range(len(memory)), key=memory.__getitem__)
    text = f"{with_unit(memory[fullest])} on the fullest device, {fullest} of the pipeline"
    if not is_known:
        raise NotCheckedError(
            f"{text}; the limit is unknown: set hardware=, or pipeline.memory_limit_gib="
        )
    usable = hardware_of_run(priced, world.devices[0], len(worlds)).usable_bytes
    if over := [number for number, nbytes in enumerate(memory) if nbytes > usable]:
        shown = ", ".join(f"device {n} needs {with_unit(memory[n])}" for n in over)
        raise SplitError(
            f"{shown} of {with_unit(round(usable))} that may be used "
            f"({'pipeline.memory_limit_gib=' if pipeline.memory_limit_gib else 'hardware='}): "
            f"raise pipeline.nb_part= or pipeline.chunks=, set pipeline.recompute=always, or "
            f"lower data.batch_size="
        )
    text += f", of {with_unit(round(usable))}"
    if prediction.step_ms is not None:
        text += f"; a step of {prediction.step_ms:.0f} ms is predicted"
    return text, True


def _with_hardware(config: Config, worlds: Sequence[World], is_here: bool) -> tuple[Config, bool]:
    """Returns the config with the job's hardware, and whether the memory of a device is known."""
    limit, device = config.pipeline.memory_limit_gib, worlds[0].devices[0].type
    if config.hardware is not None:
        return config, True
    is_one_node = worlds[-1].local_rank == len(worlds) - 1
    if limit is None and is_here and is_one_node and (device == "cpu" or torch.cuda.is_available()):
        return config, True  # of this machine
    hardware = HardwareConfig(device=device, memory_gib=limit or 1024.0, reserved_gib=0.0)
    return replace(config, hardware=hardware), limit is not None
