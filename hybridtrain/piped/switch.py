"""`pipelined(model)` and `unpipelined(model)`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from hybridtrain import integrations
from hybridtrain._base.devices import DeviceSpec
from hybridtrain._base.plain_numbers import plain_numbers
from hybridtrain.errors import ConfigError, argument
from hybridtrain.launch import Launch, detect
from hybridtrain.options import PipelineOptions, with_settings
from hybridtrain.piped.attach import explain_backwards
from hybridtrain.piped.device_map import placement_of, refuse_to_move_quantized
from hybridtrain.piped.replicas import processes_of
from hybridtrain.piped.runner import Runner
from hybridtrain.piped.surface import restore, runner_of, swap

Net = TypeVar("Net", bound=nn.Module)


def pipelined(
    model: Net,
    *,
    nb_part: int | None = None,
    devices: DeviceSpec = None,
    chunks: int = 4,
    **settings: Any,
) -> Net:
    """Lets several devices work at the same time on a model, in any trainer.

        model = pipelined(model, chunks=8)   # after loading, before the optimizer or the trainer

    The same object comes back. Its calls, `model(...)`, run as a pipeline of micro-batches; outputs
    and gradients are those of the batch, so the trainer or the loop does not change. The model is
    split at its first call, and moved to the devices of its stages. Where accelerate has put it on
    several devices (`device_map="balanced"`), it stays there, and the map is the split.

    Args:
        model: any module.
        nb_part: the number of devices; None: the environment variable HYBRIDTRAIN_NB_PART, or the
            length of `devices`, or all GPUs of this process (its share of the node's GPUs, if a
            launcher has started several).
        devices: as in `World.from_env`.
        chunks: the maximum number of micro-batches of a call.
        **settings: further fields of `PipelineOptions`, such as `schedule`, `split`, `recompute`
            and `compile`. With `head="fused"` the loss that the model computes from `labels` needs
            no logits in memory; they are computed if something uses them.

    Raises:
        ConfigError: `model` is not a module or is pipelined already, its `device_map` offloads
            weights, its quantized weights would have to move, or there is no GPU and neither
            `nb_part` nor `devices` is given.
        WorldError: the devices are inconsistent.
        TypeError: a setting is unknown.
    """
    if not isinstance(model, nn.Module):
        kind = model.__name__ if isinstance(model, type) else type(model).__name__
        raise ConfigError(
            f"pipelined(model) needs a torch.nn.Module, not {kind}: model = pipelined(model, "
            "chunks=8)"
        )
    if is_pipelined(model):
        raise ConfigError(
            "this model is pipelined already: call unpipelined(model) before pipelined(model) "
            "with other settings"
        )
    _refuse_fixed_order(settings)
    settings["chunks"] = plain_numbers(chunks)
    with_settings(PipelineOptions(), settings)  # a wrong one is an error before anything changes
    launch, nb_part = detect(os.environ), plain_numbers(nb_part)
    stays, placement = False, placement_of(model)
    if placement is not None and len(placement.devices) > 1:
        devices = devices or placement.devices
        nb_part = nb_part or len(placement.devices)
        if nb_part == len(placement.devices) and "split" not in settings:
            stays, settings["split"] = True, placement.first_modules
    # a caller that uses the logits after a step, as some trainers do, needs their values
    options = with_settings(PipelineOptions(head="plain"), settings)
    count = _devices_of(launch, nb_part, devices)
    if count > 1 and not stays:
        refuse_to_move_quantized(model)
    runner = Runner(model, launch, count, devices, options)
    if placement is not None:
        placement.release()
    swap(model, runner)
    integrations.install(averages_gradients)
    explain_backwards()
    return model


def unpipelined(model: Net) -> Net:
    """Returns the plain model, which stays on its devices; a plain model as it is."""
    if is_pipelined(model):
        restore(model)
    return model


def is_pipelined(model: nn.Module) -> bool:
    """Returns whether `model` itself has been pipelined, not a module inside it."""
    return runner_of(model) is not None


def averages_gradients(model: nn.Module) -> bool:
    """Returns whether a model is pipelined, or is a wrapper around pipelined models.

    Raises:
        ConfigError: a wrapper has trained parameters of its own, which would not be averaged.
    """
    inside = [part for part in model.modules() if is_pipelined(part)]
    if not inside:
        return False
    averaged = {id(parameter) for part in inside for parameter in part.parameters()}
    others = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in averaged
    ]
    if others and processes_of(detect(os.environ).size) > 1:
        raise ConfigError(
            f"{type(model).__name__} contains a pipelined model, and trains {others[0]} outside of "
            "it, whose gradient would not be averaged over the processes: call pipelined on a "
            "module that contains all trained parameters"
        )
    return True


def _refuse_fixed_order(settings: Mapping[str, Any]) -> None:
    for name in ("replicas", "fixed_replicas"):
        if name in settings:
            raise ConfigError(
                f"{argument(name)} makes results independent of the number of processes, but "
                "a trainer cuts its data by processes: use Session(world=World.from_env("
                "replicas=...)), or leave it out"
            )


def _devices_of(launch: Launch, nb_part: int | None, devices: DeviceSpec) -> int:
    """Returns the number of devices of this process."""
    if nb_part is not None:
        return nb_part
    if "HYBRIDTRAIN_NB_PART" in os.environ:
        return launch.nb_part
    if devices is not None and not isinstance(devices, str):
        several = len(devices) > launch.local_size and not len(devices) % launch.local_size
        return len(devices) // launch.local_size if several else len(devices)
    gpus = torch.cuda.device_count()
    if gpus >= launch.local_size and devices != "cpu":
        return gpus // launch.local_size
    raise ConfigError(
        f"pipelined needs devices, but this machine has {gpus} GPUs for {launch.local_size} "
        f"process(es): pass {argument('nb_part')} (the number of stages on the CPU), or "
        f"{argument('devices')}"
    )
