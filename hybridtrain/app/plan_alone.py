"""The plan of a pipeline over several processes, made by one: on a login node, for example."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from hybridtrain.app.build import Setup, set_up
from hybridtrain.app.config import AUTO, Config
from hybridtrain.app.settings import Settings
from hybridtrain.cluster import Cluster
from hybridtrain.devices import check_nb_part, choose_devices
from hybridtrain.errors import ConfigError
from hybridtrain.launch.environment import detect
from hybridtrain.pipeline.own_stages import plan_without_values
from hybridtrain.planning import Plan, Planner
from hybridtrain.world import World


@dataclass(frozen=True)
class PlanAlone:
    """The plan of one replica.

    Attributes:
        setup: the objects of the run, whose `world` is this process.
        plan: the plan that the processes would make on devices like this one's.
        cluster: the devices and processes of the plan.
    """

    setup: Setup
    plan: Plan
    cluster: Cluster


def other_processes_are_missing(config: Config) -> bool:
    """Returns whether this is one process, and the config's pipeline is over several."""
    distributed = config.world.engine == "distributed" and config.pipeline.nb_part != 1
    return distributed and detect(os.environ).size == 1


def plan_alone(settings: Settings) -> PlanAlone:
    """Plans a pipeline of `nb_part` processes in this one, without the model's values.

    Layers that are measured are measured on one device of this machine, as rank 0 would do it. The
    batch is that of a run with one replica.

    Raises:
        UserError: a value of the config is wrong, or the run directory cannot be written to.
    """
    if settings.config.pipeline.nb_part == AUTO:
        raise ConfigError(
            "pipeline.nb_part=auto divides the processes of a run, and this is one alone: start "
            "the others too, with torchrun, or describe the machine with cluster="
        )
    setup = set_up(settings, _this_process, writes=True)
    nb_part = setup.config.pipeline.nb_part
    cluster = Cluster((str(setup.world.devices[0]),) * nb_part, nb_part)
    plan = plan_without_values(
        setup.build,
        setup.pipeline_options,
        lambda net: Planner(net, setup.pipeline_options, setup.example_inputs, cluster),
    )
    return PlanAlone(setup, plan, cluster)


def _this_process(config: Config) -> World:
    check_nb_part(config.pipeline.nb_part)
    devices = config.world.devices
    if isinstance(devices, list):  # of the processes of a node, one after the other
        devices = devices[:1]
    chosen = choose_devices(1, devices, detect(os.environ), torch.cuda.device_count())
    return World(devices=chosen, engine=config.world.engine)
