"""The command `plan`: splits the model as a run would, or predicts the run on given hardware."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from PIL import Image

from hybridtrain._base.devices import choose_devices
from hybridtrain._base.files import atomic_file
from hybridtrain._base.hardware import Hardware
from hybridtrain._base.text_table import Block
from hybridtrain.cli.commands.check import refuse_launcher
from hybridtrain.cli.commands.layout_tables import layout_tables, placement_tables
from hybridtrain.cli.commands.result import Result
from hybridtrain.cli.config.overrides import given_keys, hydra_quoted, with_later
from hybridtrain.cli.config.resolve import Settings
from hybridtrain.cli.config.schema import AUTO, Config
from hybridtrain.cli.run.auto import without_auto
from hybridtrain.cli.run.build import (
    build_options,
    build_run,
    prepare_run,
    register_schedules,
)
from hybridtrain.cli.run.context import PreparedRun, RunOptions
from hybridtrain.cli.run.directory import RunDirectory
from hybridtrain.cli.run.hardware import hardware_of, in_order_of, why_too_large, with_limit
from hybridtrain.cli.run.lock import writing
from hybridtrain.cli.run.run_data import load_data
from hybridtrain.cli.run.run_model import model_of_run
from hybridtrain.data import DataSplits, batches_in, first_samples, length_of
from hybridtrain.errors import ConfigError, SplitError
from hybridtrain.launch import detect
from hybridtrain.observe import NodesPoint, draw_plan, in_ms
from hybridtrain.partitioning import Plan, Planner, StageOwners, priced_mode
from hybridtrain.pipeline import plan_without_values
from hybridtrain.price import (
    Arrangement,
    Choices,
    DoesNotFit,
    ParallelLayout,
    PricedPlans,
    arrangements,
    choice_in_words,
    find_layouts,
    find_plans,
    offload_in_words,
    why_not_priced,
)
from hybridtrain.world import World

_log = logging.getLogger(__name__)

# The keys to search unless they are set, with their groups.
_OF_PIPELINE = ("nb_part", "chunks", "schedule", "stages_per_device", "recompute", "offload")
_KEYS = {**dict.fromkeys(_OF_PIPELINE, "pipeline"), "engine": "world", "shard": "world"}

# For the picture: numbers of nodes, and micro-batches in the timeline.
_MOST_BARS = 5
_MOST_SHOWN = 24


def plan(settings: Settings) -> Result:
    """Splits the model as a run would, shows the plan and writes it.

    One process can plan a pipeline over several. With `hardware`, it predicts the run there.
    """
    if settings.config.hardware is not None:
        return plan_for_hardware(settings)
    if other_processes_are_missing(settings.config):
        prepared, plan, devices = plan_alone(settings)
        processes = [("not started", [device]) for device in devices]
        _log.info("%s", layout_tables(plan, processes, "planned by one process"))
        _write_plan(plan, prepared.directory, prepared.world)
        return {}
    context = build_run(settings, writes=True, reuse_plan=False)
    _log.info("%s", placement_tables(context.model.plan, context.world))
    _write_plan(context.model.plan, context.directory, context.world)
    context.world.close()
    return {}


def _write_plan(plan: Plan, directory: RunDirectory, world: World) -> None:
    with writing(directory, world):
        if world.is_main:
            path = directory.plan_to_write()
            plan.write(path)
            _log.info(
                "wrote %s; to train with this split: pipeline.split=%s; with this order of "
                "actions: pipeline.schedule=%s",
                *(path, path, path),
            )


def plan_for_hardware(settings: Settings) -> dict[str, Any]:
    """Predicts the run on the config's machine, shows the ten best plans and writes the best.

    It keeps the keys of `pipeline` and `world` on the command line, and searches all others.

    Raises:
        ConfigError: the description of the machine is wrong, or no plan uses all of it.
        SplitError: no plan fits into memory.
    """
    register_schedules(settings.config)
    config = without_auto(settings)
    if settings.config.data.get("batch_size") == AUTO:
        raise ConfigError(
            "plan hardware=... needs a fixed batch size, but data.batch_size=auto: set "
            "data.batch_size= to a number of samples"
        )
    refuse_launcher("plan hardware=...")
    assert config.hardware is not None
    options = build_options(config, uses=settings.uses)
    hardware = hardware_of(config.hardware)
    hardware = in_order_of(config.world.devices, hardware, hardware.devices)
    hardware = with_limit(hardware, config)
    directory = RunDirectory(config)
    directory.check_writable()
    directory.log_to_files(0)
    data = load_data(config, World())
    tensors = options.pipeline.optimizer_tensors_per_param
    run, choices = model_of_run(config, data), _fixed(settings)
    try:
        plans = find_plans(
            run.net,
            run.inputs,
            hardware,
            run.work(config, tensors),
            choices=choices,
            costs=config.hardware.costs,
            precision=config.trainer.precision,
            tf32=config.trainer.tf32,
            loss=run.loss,
        )
    except DoesNotFit as error:
        raise SplitError(why_too_large(error, config)) from error
    best = plans.prices[0]
    _log.info(
        "%s on %d x %d devices, batches of %d samples; times predicted from %s costs\n%s",
        plans.table.model,
        hardware.nodes,
        hardware.devices_per_node,
        plans.work.samples,
        plans.table.costs_from,
        plans,
    )
    if (left_out := why_not_priced(options.pipeline)) is not None:
        _log.info("%s: the times and the memory are those of a run without it", left_out)
    if best.layout.offload != "none":
        _log.info("%s", plans.copies_in_words())
    batches = _batches_per_epoch(config, data, options)
    steps = options.trainer.total_steps(batches) if batches or options.trainer.steps else None
    advice = "FSDP2 is faster; for a pipeline, " if plans.advises_fsdp2 else ""
    _log.info("%suse the first:\n%s", advice, Block(plans.answer(steps)))
    searched = [name for name in _KEYS if len(getattr(choices, name) or "any") > 1]
    if searched:
        _log.info("%s", choice_in_words(plans.prices, searched, plans.table.costs_from))
    known = plans.table, hardware, plans.work
    if (why := offload_in_words(plans.prices, *known, choices)) is not None:
        _log.info("%s", why)
    with writing(directory, World()):
        path = directory.plan_to_write()
        plans.plan().write(path)
        with atomic_file(path.with_suffix(".png")) as file:
            _picture(plans, choices).save(file, format="PNG")
    _log.info("wrote %s, and %s next to it", path, path.with_suffix(".png").name)
    recompute = plans.recompute()
    keys = [f"pipeline.split={path}", *overrides_of(best.layout, recompute)]
    _log.info("to train with it:\n  %s", _command(settings, hardware, best.layout, keys))
    return {"step_ms": round(best.step_ms, 3), "memory_bytes": best.peak_bytes}


def _batches_per_epoch(config: Config, data: DataSplits, options: RunOptions) -> int | None:
    """Returns the batches per epoch; None: the data set has no length."""
    samples = length_of(data.train)
    if samples is None:
        return None
    size = config.data["batch_size"]
    return batches_in(first_samples(samples, size, options.loader), size, options.loader)


def _command(
    settings: Settings, hardware: Hardware, layout: ParallelLayout, keys: Sequence[str]
) -> str:
    """Returns the command that trains with a plan."""
    per_node = hardware.devices_per_node
    words = with_later(settings.overrides, keys)
    if hardware.nodes > 1:
        words += [f"submit.nodes={hardware.nodes}", f"submit.gpus_per_node={per_node}"]
    if settings.config_dir is not None:
        words += ["--config-dir", settings.config_dir]
    overrides = shlex.join(words)
    if hardware.nodes > 1:
        return f"hybridtrain submit {overrides}"
    processes = per_node if layout.engine == "distributed" else per_node // layout.nb_part
    if processes == 1:
        return f"hybridtrain {overrides}"
    return f"torchrun --standalone --nproc-per-node {processes} -m hybridtrain {overrides}"


def _picture(plans: PricedPlans, choices: Choices) -> Image.Image:
    """Draws the fastest plan, and the times of other numbers of nodes."""
    hardware, best = plans.hardware, plans.prices[0]
    layout = best.layout
    numbers = {1, 2, 4, 8, *(2**k for k in range(hardware.nodes.bit_length())), hardware.nodes}
    points = [_with_nodes(plans, choices, nodes) for nodes in sorted(numbers)[-_MOST_BARS:]]
    # the timeline shows a few groups of `nb_part` micro-batches
    most = layout.microbatches
    chunks = min(most, max(1, _MOST_SHOWN // layout.nb_part) * layout.nb_part)
    part = f"{chunks} of {most} micro-batches" if chunks < most else "a batch"
    return draw_plan(
        f"{plans.table.model} on {hardware.nodes} x {hardware.devices_per_node} devices, "
        f"{plans.work.samples * plans.work.accumulate} samples per step, "
        f"predicted from {plans.table.costs_from} costs",
        points,
        hardware.nodes,
        [vars(memory) for memory in best.memory],
        hardware.usable_bytes,
        plans.timeline(chunks),
        f"{layout.schedule}, {part}; the step: {in_ms(best.step_ms)} ms, idle {best.bubble:.1%}",
    )


def _with_nodes(plans: PricedPlans, choices: Choices, nodes: int) -> NodesPoint:
    price = plans.prices[0]
    if nodes != plans.hardware.nodes:
        hardware = replace(plans.hardware, nodes=nodes)
        try:
            (price,) = find_layouts(plans.table, hardware, plans.work, choices, best=1)
        except (ConfigError, SplitError):  # no layout uses all devices, or none fits
            return NodesPoint(nodes, None)
    layout = price.layout
    return NodesPoint(nodes, price.step_ms, f"{layout.replicas} x {layout.nb_part}")


def overrides_of(layout: ParallelLayout, recompute: str | list[str]) -> list[str]:
    """Returns the overrides that a run of this layout needs in addition to the split."""
    if not isinstance(recompute, str):
        recompute = f"[{','.join(map(hydra_quoted, recompute))}]"
    values = {
        "pipeline.nb_part": layout.nb_part,
        "pipeline.chunks": layout.chunks,
        "pipeline.schedule": layout.schedule,
        "pipeline.stages_per_device": layout.stages_per_device,
        "pipeline.recompute": recompute,
        "world.engine": layout.engine,
    }
    if layout.offload != "none":
        values["pipeline.offload"] = layout.offload
    if layout.shard != "none":
        values["world.shard"] = layout.shard
    if layout.arrangement.replica_shares:
        values["world.replica_shares"] = _list(layout.arrangement.replica_shares)
    if layout.arrangement.device_order:
        devices = [f"cuda:{number}" for number in layout.arrangement.device_order]
        values["world.devices"] = _list(devices)
    return [f"{key}={value}" for key, value in values.items()]


def _list(values: Sequence[object]) -> str:
    return f"[{','.join(f'{v:g}' if isinstance(v, float) else str(v) for v in values)}]"


def _fixed(settings: Settings) -> Choices:
    """Returns the search space; keys on the command line are fixed."""
    set_keys = {key.partition("=")[0] for key in given_keys(settings.overrides)}
    values: dict[str, Any] = {}
    for key, group in _KEYS.items():
        value = getattr(getattr(settings.config, group), key)
        if f"{group}.{key}" in set_keys and value != AUTO:
            values[key] = [value]
    if "recompute" in values and priced_mode(values["recompute"][0]) == "layers":
        raise ConfigError(
            f"plan hardware=... does not support pipeline.recompute={values['recompute'][0]}: use "
            f"never, except_last or always, or remove it to search all three"
        )
    if (offload := settings.config.pipeline.offload) != "none":  # also that of a recipe
        values["offload"] = [offload]
    return replace(
        Choices(),
        **values,
        arrange=partial(_arrange, settings.config),
        logical_replicas=settings.config.world.replicas,
    )


def _arrange(
    config: Config, hardware: Hardware, nb_part: int, replicas: int
) -> Iterator[Arrangement]:
    """Yields the arrangements with the shares and the order of devices that the config gives."""
    shares = config.world.replica_shares
    if shares is not None and len(shares) != replicas:
        return
    # a given order stays, and CPU devices have no numbers to order them by
    in_order = hardware.device == "cpu" or isinstance(config.world.devices, list)
    for arrangement in arrangements(hardware, nb_part, replicas, shares):
        if not (arrangement.device_order and in_order):
            yield arrangement


def other_processes_are_missing(config: Config) -> bool:
    """Returns whether this is one process, but the config's pipeline spans several."""
    distributed = config.world.engine == "distributed" and config.pipeline.nb_part != 1
    return distributed and detect(os.environ).size == 1


def plan_alone(settings: Settings) -> tuple[PreparedRun, Plan, Sequence[str]]:
    """Plans a pipeline of `nb_part` processes in this one, with the model on meta tensors.

    Returns the objects of the run (with this process as `world`), the plan that the processes would
    make on devices like this one's, and these devices.

    It measures layers on one device of this machine, as rank 0 would. The batch is a batch of a run
    with one replica.

    Raises:
        UserError: a value of the config is wrong, or the run directory cannot be written to.
    """
    if settings.config.pipeline.nb_part == AUTO:
        raise ConfigError(
            "pipeline.nb_part=auto divides the processes of a run, but there is only one: start "
            "all processes with torchrun, or describe the machine with hardware="
        )
    prepared = prepare_run(settings, join=_this_process, writes=True)
    nb_part = prepared.config.pipeline.nb_part
    hardware = StageOwners((str(prepared.world.devices[0]),) * nb_part, nb_part)
    plan = plan_without_values(
        prepared.build,
        prepared.options.pipeline,
        lambda net: Planner(net, prepared.options.pipeline, prepared.example_inputs, hardware),
    )
    return prepared, plan, hardware.devices


def _this_process(config: Config) -> World:
    devices = config.world.devices
    if isinstance(devices, list):  # the devices of a node's processes, in order
        devices = devices[:1]
    chosen = choose_devices(1, devices, detect(os.environ), torch.cuda.device_count())
    return World(devices=chosen, engine=config.world.engine)
