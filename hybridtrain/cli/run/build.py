"""Builds a run from the settings of a command, stage by stage.

    settings -> options -> PreparedRun: processes, data, `auto` keys -> RunContext: model

The first stage that can detect an error raises it: errors in options before the processes join,
errors in paths before the data is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from hybridtrain._base.construction import default_generators, rewind
from hybridtrain._base.repeatable import repeat_results
from hybridtrain._base.text_table import counted
from hybridtrain.checkpoint import CheckpointStore, find_weights, parse_init_from
from hybridtrain.cli.config.agreement import agreed
from hybridtrain.cli.config.check import check_config, check_rate
from hybridtrain.cli.config.leftovers import leave_out_leftovers
from hybridtrain.cli.config.resolve import Settings
from hybridtrain.cli.config.schema import AUTO, LOADER_OPTIONS, Config, arguments_of
from hybridtrain.cli.run.auto import with_auto_chosen, without_auto
from hybridtrain.cli.run.components import (
    build_callbacks,
    build_loss,
    build_metrics,
    build_model,
    check_several_classes,
    class_weights_of,
    optimizer_state,
)
from hybridtrain.cli.run.context import PreparedRun, RunContext, RunOptions
from hybridtrain.cli.run.directory import RunDirectory
from hybridtrain.cli.run.lock import RunLock
from hybridtrain.cli.run.moved_base import naming_source
from hybridtrain.cli.run.resume import check_trained, checkpoint_to_read
from hybridtrain.cli.run.run_data import load_data, load_for_trained
from hybridtrain.cli.run.run_record import recorded_class_weights
from hybridtrain.data import (
    DataSplits,
    WithoutTargets,
    already_batched,
    example_batch,
    length_of,
)
from hybridtrain.errors import ConfigError, check_choice, did_you_mean, naming
from hybridtrain.launch import raise_on_signals
from hybridtrain.loop import Callback, TrainerOptions
from hybridtrain.model import HybridModel
from hybridtrain.options import ENGINES, LoaderOptions, PipelineOptions
from hybridtrain.schedule import is_file, schedule_names
from hybridtrain.world import World

_log = logging.getLogger(__name__)


MakeTrackers = Callable[[Config], Sequence[Callback]]


def build_options(
    config: Config,
    make_trackers: MakeTrackers = lambda config: (),
    uses: Callable[[str], bool] = lambda part: True,
) -> RunOptions:
    """Builds the objects that need neither processes nor data.

    Args:
        config: the config of the run.
        make_trackers: returns the trackers of a run that trains.
        uses: returns whether the command uses a part of the run; see `PARTS`.

    Raises:
        UserError: a value of the config is wrong, or a tracker's package is not installed.
    """
    parse_init_from(config.init_from)  # which the check of a job reports with the weights
    parts = option_parts(config, lambda name, make, *needs: make(*needs), make_trackers, uses)
    return RunOptions(**parts)


def option_parts(
    config: Any,
    part: Callable[..., Any],
    make_trackers: MakeTrackers,
    uses: Callable[[str], bool] = lambda part: True,
) -> dict[str, Any]:
    """Makes the objects that need neither processes nor data, by their names in `RunOptions`.

    `build_options` and the command `check` make them here, so that no part of a run is left out of
    its check.

    Args:
        config: the config of the run, as `part` takes it.
        part: `part(name, make, *needs)` returns `make(*needs)`, or what stands for it in `needs`.
        make_trackers: as in `build_options`.
        uses: as in `build_options`.
    """
    part("keys", partial(_check_keys, uses=uses), config)
    loss_fn = part("loss", build_loss, config) if uses("loss") else None
    return {
        "loss_fn": loss_fn,
        "metrics": part("metrics", build_metrics, config, loss_fn) if uses("metrics") else {},
        "callbacks": part("callbacks", _callbacks, config) if uses("callbacks") else [],
        "trainer": part("trainer", trainer_options, config),
        "loader": part("loader", loader_options, config),
        "pipeline": part("pipeline", partial(pipeline_options, uses=uses), config),
        # last, because some trackers report a run as soon as they are constructed
        "trackers": part("trackers", make_trackers, config),
    }


def _check_keys(config: Config, uses: Callable[[str], bool]) -> None:
    """Checks the keys that no option class of the library checks."""
    check_config(config)
    if uses("optimizer"):
        check_rate(config.optim)
    check_choice("world.engine", config.world.engine, ENGINES)
    check_choice("world.inner", config.world.inner, ("pp", "dp"))


def _callbacks(config: Config) -> list[Callback]:
    return build_callbacks(config, RunDirectory(config))


def pipeline_options(
    config: Config, uses: Callable[[str], bool] = lambda part: True
) -> PipelineOptions:
    """Returns the options of the model; registers the user's schedules first."""
    register_schedules(config)
    options = PipelineOptions(**arguments_of(config, PipelineOptions), seed=config.seed)
    if not uses("optimizer"):
        return options
    state = optimizer_state(config.optim, config.allow_targets)
    return replace(options, optimizer_tensors_per_param=state)


def trainer_options(config: Config) -> TrainerOptions:
    """Returns the options of the trainer."""
    arguments = arguments_of(config, TrainerOptions)
    arguments["checkpoint_every_steps"] = config.checkpoint.every_steps or None  # 0: no store
    return TrainerOptions(**arguments)


def loader_options(config: Config) -> LoaderOptions:
    """Returns the options of the loaders."""
    with naming({name: f"data.{name}" for name in LOADER_OPTIONS}):
        settings = {name: config.data[name] for name in LOADER_OPTIONS if name in config.data}
        return LoaderOptions(**settings)


def join_processes(config: Config) -> World:
    """Joins the other processes that the launcher started."""
    return World.from_env(
        config.pipeline.nb_part,
        config.world.devices,
        config.world.backend,
        config.world.timeout_s,
        config.world.engine,
        config.world.stall_s or 0,
        config.world.inner,
        config.world.replicas,
        config.world.replica_shares,
        deterministic=config.trainer.deterministic,
        share_gpus=config.world.share_gpus,
    )


def prepare_run(
    settings: Settings,
    *,
    join: Callable[[Config], World] = join_processes,
    writes: bool = False,
    trained: bool = False,
    make_trackers: MakeTrackers = lambda config: (),
) -> PreparedRun:
    """Checks the config, joins the other processes and loads the data.

    It writes nothing except logs, if the run directory exists.

    Args:
        settings: the settings of the command.
        join: returns the processes of the run.
        writes: the command will write to the run directory (`writing`).
        trained: the command needs a checkpoint; data for training is loaded only if necessary.
        make_trackers: see `build_options`.

    Raises:
        UserError: a value of the config is wrong, or the run directory cannot be written to.
    """
    leave_out_leftovers(settings)
    register_schedules(settings.config)
    local_config = without_auto(settings)
    make_options = partial(build_options, make_trackers=make_trackers, uses=settings.uses)
    local_options = make_options(local_config)

    repeat_results(False)  # an earlier run in this process may have been deterministic
    joined = join(local_config)
    agreed_config = agreed(local_config, joined)  # rank 0's: another rank may not see the run
    is_same = agreed_config == local_config
    agreed_options = local_options if is_same else make_options(agreed_config)

    directory, store = _open_directory(settings, agreed_config, joined, writes)
    weights: Tensor | None = None
    checkpoint: Path | None = None
    if trained:
        check_trained(agreed_config.resume, store, joined)
        checkpoint = read = checkpoint_to_read(agreed_config.resume, store, joined)
        if settings.uses("loss"):
            recorded = joined.from_main(lambda: recorded_class_weights(read))
            weights = None if recorded is None else torch.tensor(recorded, dtype=torch.float32)
        counts = settings.uses("loss") and weights is None
        counts &= agreed_config.trainer.class_weights == AUTO  # by an earlier release
        data = load_data(agreed_config, joined) if counts else None
        data = data or load_for_trained(settings, joined, checkpoint)
    else:
        data = load_data(agreed_config, joined)
    _describe_data(data)

    config = with_auto_chosen(settings, agreed_config, data, joined, agreed_options)
    is_divided = settings.config.pipeline.nb_part == AUTO
    world = joined.divided(config.pipeline.nb_part, config.world.devices) if is_divided else joined
    loss_fn, metrics = None, {}
    if settings.uses("loss"):
        weights = class_weights_of(config, data) if weights is None else weights
        loss_fn = build_loss(config, weights)
        if not trained:
            check_several_classes(loss_fn, data)
    if loss_fn is not None and settings.uses("metrics"):
        metrics = build_metrics(config, loss_fn, data.metadata)
    options = replace(
        agreed_options,
        loss_fn=loss_fn,
        metrics=metrics,
        pipeline=replace(agreed_options.pipeline, **arguments_of(config, PipelineOptions)),
        loader=replace(agreed_options.loader, collate=data.collate),
    )
    set_numerics(config, world)
    torch.manual_seed(config.seed)
    inputs, targets = example_of_run(config, data, world)
    build = partial(build_model, config, data)
    return PreparedRun(
        settings,
        config,
        directory,
        store,
        world,
        data,
        build,
        inputs,
        targets,
        options,
        weights,
        checkpoint,
    )


def build_run(
    settings: Settings,
    *,
    writes: bool = False,
    reuse_plan: bool = True,
    trained: bool = False,
    make_trackers: MakeTrackers = lambda config: (),
) -> RunContext:
    """Prepares a run and builds its model.

    Args:
        settings: the settings of the command.
        writes: the command will write to the run directory (`writing`).
        reuse_plan: split a resumed run by its own plan if its settings are the same.
        trained: see `prepare_run`.
        make_trackers: see `build_options`.

    Raises:
        UserError: a value of the config is wrong, or the run directory cannot be written to.
    """
    prepared = prepare_run(settings, writes=writes, trained=trained, make_trackers=make_trackers)
    world, options = prepared.world, prepared.options
    split: Any = options.pipeline.split
    if reuse_plan:
        split = world.from_main(lambda: _split_or_plan(prepared))
    model = HybridModel.construct(
        prepared.build,
        world,
        replace(options.pipeline, split=split),
        example_inputs=prepared.example_inputs,
    )
    if options.loss_fn is not None:
        model.resolve_loss(options.loss_fn)  # raises if the loss cannot be weighted
    if isinstance(options.loss_fn, nn.Module):
        options.loss_fn.to(model.output_device)
    return RunContext(**vars(prepared), model=model)


def set_numerics(config: Config, world: World) -> None:
    """Sets TF32 for this process, and deterministic algorithms unless `world` has set them."""
    if config.trainer.deterministic and not world.deterministic:
        # a rank that does not see the run's directory learns it from rank 0, after it has joined
        repeat_results(True)
        world.deterministic = True
    torch.set_float32_matmul_precision("high" if config.trainer.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = config.trainer.tf32  # PyTorch's own default is True


def _open_directory(
    settings: Settings, config: Config, world: World, writes: bool
) -> tuple[RunDirectory, CheckpointStore]:
    """Returns the run directory and its checkpoints; logs and stall reports go there from now on.

    Raises:
        UserError: the directory is not writable, or there are no weights at `init_from`.
    """
    directory = RunDirectory(config)
    world.watch(directory.path / "stalls")
    raise_on_signals()
    store = CheckpointStore(
        directory.checkpoints,
        config.checkpoint.keep,
        config.checkpoint.background,
        config.checkpoint.writers,
    )
    if writes:
        directory.check_writable()
        world.on_main(RunLock(directory.path).check)
        if (initial := parse_init_from(config.init_from)) and not store.steps():
            with naming_source(config):
                world.on_main(lambda: find_weights(initial["source"]))
    directory.log_to_files(world.rank, settings.quiet)
    if world.unused_gpus and world.is_main:
        _log.warning("%s", world.unused_gpus)
    for note in settings.notes:
        _log.info("%s", note)
    return directory, store


def _describe_data(data: DataSplits) -> None:
    _log.info("%s", data)
    if data.without_samples:
        _log.warning("no training samples for class %s", ", ".join(data.without_samples[:8]))


def example_of_run(config: Config, data: DataSplits, world: World) -> tuple[Any, Any]:
    """Returns inputs and targets of a replica's batch, with the same samples on every replica."""
    size, replicas = config.data["batch_size"], world.logical_replicas
    share = max(world.samples_by_replica(size))
    if size < replicas:
        _log.warning(
            "data.batch_size=%d is less than one sample for each of %d replicas: set "
            "data.batch_size=%d or more",
            size,
            replicas,
            replicas,
        )
    if share < config.pipeline.chunks:
        _log.warning(
            "a replica's batch has %s, so there %s %s instead of pipeline.chunks=%d",
            counted(share, "sample"),
            "is" if share == 1 else "are",
            counted(share, "micro-batch", "es"),
            config.pipeline.chunks,
        )
    draws = default_generators()
    example = _example_batch(data, share)
    rewind(draws)  # transforms may draw random numbers, but the model must draw first
    return example[0], example[1]


def _example_batch(data: DataSplits, samples: int) -> Any:
    """Returns a batch of training samples, or of the samples that were loaded instead."""
    if length_of(data.train) != 0:
        return example_batch(data.train, samples, data.collate)
    if data.predict is None:
        assert data.eval is not None  # `load_for_trained` loads one of them
        return example_batch(data.eval, samples, data.collate)
    inputs: Any = data.predict
    collate = WithoutTargets(data.predict_collate or data.collate or already_batched)
    if length := length_of(inputs):
        inputs = Subset(inputs, [number % length for number in range(samples)])
    return example_batch(inputs, samples, collate)


def register_schedules(config: Config) -> None:
    """Imports the user's packages if one of them may register the schedule.

    Raises:
        ConfigError: a package cannot be imported, or none of them registers the schedule.
    """
    name, packages = config.pipeline.schedule, config.allow_targets
    if name in schedule_names() or is_file(name):
        return
    for package in packages:
        try:
            import_module(package)
        except ImportError as error:
            raise ConfigError(
                f"pipeline.schedule={name}: cannot import allow_targets={package}, which may "
                f"register it: {error}"
            ) from error
    if packages and name not in (AUTO, *schedule_names()):
        raise ConfigError(
            f"pipeline.schedule={name} is unknown, and {', '.join(packages)} does not register it "
            f"(@hybridtrain.schedule.schedule): {did_you_mean(name, schedule_names())}"
        )


def _split_or_plan(prepared: PreparedRun) -> Any:
    """Returns the path of a resumed run's plan if it still fits, or the config's split."""
    settings, plan = prepared.settings, prepared.directory.plan
    split = settings.config.pipeline.split
    if split not in ("time", "memory", "balanced") or not plan.exists():
        return split
    if settings.config.resume is None or not prepared.store.steps():
        return split
    for change in settings.changes:
        if change.key.startswith(("model.", "pipeline.")):
            _log.info("measuring layers again: %s has changed since the plan was made", change.key)
            return split
    _log.info("split as in %s", plan)
    return str(plan)
