"""The parts of a check that concern the start of a run: data, model, weights, checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import Parameter

from hybridtrain._base.construction import construct_on_meta, default_generators, rewind
from hybridtrain._base.microbatch import chunk_sizes
from hybridtrain._base.tensors import bytes_of_module
from hybridtrain._base.text_table import counted
from hybridtrain.checkpoint import (
    CheckpointStore,
    check_fits,
    check_sizes,
    check_weights,
    checkpoint_weights,
    locate_weights,
    parse_init_from,
    read_manifest,
    under_all_names,
)
from hybridtrain.cli.check.report import NotCheckedError
from hybridtrain.cli.config.resolve import Settings
from hybridtrain.cli.config.schema import AUTO, Config
from hybridtrain.cli.run.components import (
    build_lr_schedule,
    build_model,
    build_optimizer,
)
from hybridtrain.cli.run.directory import RunDirectory
from hybridtrain.cli.run.moved_base import place_of_base
from hybridtrain.cli.run.resume import named_checkpoint
from hybridtrain.cli.run.run_data import load_data, refuse_other_data
from hybridtrain.data import (
    DataSplits,
    StreamLoader,
    TrainLoader,
    is_stream,
    length_of,
)
from hybridtrain.errors import ConfigError, UserError
from hybridtrain.options import LoaderOptions, PipelineOptions, TrainerOptions
from hybridtrain.world import World


def data_set(config: Config) -> tuple[str, DataSplits]:
    """Loads the data set here, without downloading it."""
    download = bool(config.data.get("download"))
    if "download" in config.data:
        config = replace(config, data={**config.data, "download": False})
    try:
        data = load_data(config, World())
    except UserError as error:
        if download:
            raise NotCheckedError(f"data.download=true: the job downloads it ({error})") from error
        raise
    return f"{str(data).removeprefix('data: ')}; checked here, not on the nodes", data


@dataclass(frozen=True)
class Batches:
    """The batches of an epoch.

    Attributes:
        per_epoch: the number of batches; None: unknown.
        samples: the samples of a full batch.
        cuts: the micro-batch sizes of a replica's share, for each kind of share and batch.
        chunks: the possible numbers of micro-batches per process and step.
    """

    per_epoch: int | None
    samples: int
    cuts: list[tuple[int, ...]]
    chunks: list[int]


def batches(
    settings: Settings,
    data: DataSplits,
    worlds: Sequence[World],
    pipeline: PipelineOptions,
    loader: LoaderOptions,
) -> tuple[str, Batches]:
    """Divides the full batch and the short last one over replicas and micro-batches."""
    config, replicas = settings.config, worlds[0].logical_replicas
    size = config.data["batch_size"]
    if size == AUTO:
        raise NotCheckedError("the job chooses data.batch_size=auto")
    if size < replicas:
        raise ConfigError(
            f"data.batch_size={size} is less than one sample per replica ({replicas} replicas), so "
            f"{replicas - size} of them would compute only padding: set "
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
        of_replica = [
            tuple(chunk_sizes(max(1, samples), pipeline.chunks))
            for samples in worlds[0].samples_by_replica(total)
        ]
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


def learning_rate(config: Config, batches: Batches, trainer: TrainerOptions) -> tuple[str, bool]:
    """Builds the learning-rate schedule for all steps of the run."""
    steps = trainer.total_steps(batches.per_epoch)
    optimizer = build_optimizer(config.optim, [Parameter(torch.zeros(1))], config.allow_targets)
    schedule = build_lr_schedule(config.lr_schedule, optimizer, steps, config.allow_targets)
    return f"{type(schedule).__name__} over {counted(steps, 'step')}", True


@dataclass(frozen=True)
class Model:
    """The model of a run.

    Attributes:
        net: the model on meta tensors, if its constructor supports that.
        build: builds it with values.
        nbytes: the size of its parameters and buffers.
    """

    net: nn.Module
    build: Callable[[], nn.Module]
    nbytes: int


def model(config: Config, data: DataSplits) -> tuple[str, Model]:
    """Constructs the model on meta tensors, or with values if its constructor needs them."""
    build = partial(build_model, config, data)
    draws, how = default_generators(), "without allocating its weights"
    try:
        net = construct_on_meta(build)
    except UserError:
        raise
    except Exception:  # a constructor that needs values, or fails with them too
        rewind(draws)
        net, how = build(), "with its weights, because its constructor needs them"
    nbytes = bytes_of_module(net)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    text = f"{type(net).__name__}, {parameters:,} parameters, built {how}"
    return text, Model(net, build, nbytes)


def init_from(config: Config) -> tuple[str, Path | bool]:
    """Finds the weights of `init_from`; returns False if nothing is to be loaded."""
    initial = parse_init_from(config.init_from)
    if initial is None:
        return "none", False
    if CheckpointStore(RunDirectory(config).checkpoints).steps():
        return "the run resumes from its own checkpoint", False
    path = locate_weights(initial["source"], initial.get("best", False))
    if path is None:
        raise NotCheckedError(f"init_from={initial['source']} is on the Hub and not downloaded")
    return str(path), path


def checkpoint(config: Config) -> tuple[str, Path | bool]:
    """Finds the checkpoint that the job resumes; returns False for a new run."""
    store = CheckpointStore(RunDirectory(config).checkpoints)
    path = None if config.resume is None else named_checkpoint(config.resume, store, reads=False)
    if path is None:
        return "none: a new run", False
    step = check_sizes(path)["step"]
    return f"{path}, step {step}: file sizes are correct, contents were not read", path


def weights(
    config: Config, data: DataSplits, model: Model, initial: Path | bool, checkpoint: Path | bool
) -> tuple[str, bool]:
    """Compares the model and the data with the checkpoint or initial weights to load."""
    if isinstance(checkpoint, Path):
        files = read_manifest(checkpoint)["files"]
        saved = checkpoint_weights(checkpoint, files, place_of_base(config))
        weights = {**under_all_names(model.net, saved.base_tensors), **saved.tensors}
        check_fits(checkpoint, weights | saved.extra, model.net.state_dict())
        refuse_other_data(checkpoint, data, config.allow_changes)
        return f"{counted(len(weights), 'tensor')} of the checkpoint fit the model", True
    if isinstance(initial, Path):
        arguments = parse_init_from(config.init_from) or {}
        flags = {key: value for key, value in arguments.items() if key in ("strict", "prefix")}
        report = check_weights(model.net, initial, arguments["source"], **flags)
        return f"{counted(len(report.loaded), 'tensor')} of init_from= fit the model", True
    return "initial values", True
