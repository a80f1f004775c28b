"""The library's state in this process, from `init` to `shutdown`.

`Attendance` is how replicas agree to continue training: every training step starts with an
agreement of all processes, and so does the end of every script. A process that starts a step while
another one ends its script learns that the other replica has no further batch and would not take
part in the step.

On a machine without GPUs, `cuda` means the CPU, so that scripts that name the device need no
change: `torch.cuda.set_device(smp.local_rank())`, `data.to("cuda")`. `init` replaces these few
functions only if PyTorch sees no GPU. Creating tensors on a device,
`torch.zeros(3, device="cuda")`, still fails: use `smp.device()`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from hybridtrain._base.torch_private import HashStore
from hybridtrain.errors import BatchError, ConfigError, UserError, naming
from hybridtrain.launch import Launch, detect
from hybridtrain.smp import config as smp_config
from hybridtrain.smp.bodies import refuse_in_body
from hybridtrain.smp.config import NAMING, SmpConfig, parameters_of, parse
from hybridtrain.world import World

if TYPE_CHECKING:
    from hybridtrain.smp.model import DistributedModel
    from hybridtrain.smp.optimizer import DistributedOptimizer

log = logging.getLogger("hybridtrain")

_LONG = timedelta(hours=24)  # a barrier may wait for a checkpoint or a download


class Attendance:
    """Agrees with the other processes of `world` that all of them continue training.

    Args:
        world: all processes; None for a single replica.
    """

    def __init__(self, world: World | None = None) -> None:
        self._world = world
        self._steps = 0
        self._failed = False
        self._pending: tuple[torch.Tensor, Any] | None = None

    def begin(self) -> None:
        """Starts the agreement of a training step."""
        if self._world is not None:
            self._steps += 1
            self._begin(self._world, leaves=False)

    def finish(self) -> None:
        """Waits for the agreement.

        Raises:
            BatchError: a process has ended and would not take part in this step.
        """
        if self._pending is None:
            return
        least, most, any_left = self._agreed()
        if any_left:
            self._failed = True
            raise BatchError(
                f"a replica ended after {-least} training steps, but this one is in step {most}: "
                f"every replica needs the same number of batches. Give each the same number of "
                f"samples, and set drop_last=True in the DataLoader"
            )

    def leave(self) -> None:
        """Announces at the end of the script that this process has no further batch."""
        failed = self._failed or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        # skipped after a failure or an interruption inside a step: the others end as well
        if self._world is None or failed or self._pending is not None:
            return
        with suppress(RuntimeError):  # the others are gone
            self._begin(self._world, leaves=True)
            self._agreed()

    def _begin(self, world: World, leaves: bool) -> None:
        values = torch.tensor([-self._steps, self._steps, int(leaves)])
        self._pending = values, world.begin_max(values)

    def _agreed(self) -> list[int]:
        assert self._pending is not None
        values, work = self._pending
        work.wait()
        self._pending = None
        counts: list[int] = values.tolist()
        return counts


@dataclass
class Runtime:
    """The library's state, as set up by `init`.

    Attributes:
        config: the configuration.
        world: the processes and devices.
        launch: the launcher's facts about this process.
        object_group: all processes, for objects; None for a single process.
        dp_group: the processes with this process's stages, for tensors; None for a single replica.
        dp_object_group: the same processes, for objects.
        attendance: which replicas have further batches.
        model: the model of the script, once it is wrapped.
        optimizers: the wrapped optimizers, in order.
        resume: a checkpoint to load when the model is partitioned.
        began_group: whether `own_group` has created PyTorch's default group.
    """

    config: SmpConfig
    world: World
    launch: Launch
    object_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    dp_object_group: dist.ProcessGroup | None = None
    attendance: Attendance = field(default_factory=Attendance)
    model: DistributedModel | None = None
    optimizers: list[DistributedOptimizer] = field(default_factory=list)
    resume: Callable[[], None] | None = None
    began_group: bool = False
    _own_group: dist.ProcessGroup | None = None

    def own_group(self) -> dist.ProcessGroup:
        """Returns a group of only this process; not a collective call.

        Not None, which PyTorch takes as all processes. With a single process, the first call
        creates PyTorch's default group, and `shutdown` leaves it.
        """
        if self._own_group is None:
            if not dist.is_initialized():
                on_gpu = self.world.devices[0].type == "cuda"
                backend = "cpu:gloo,cuda:nccl" if on_gpu and dist.is_nccl_available() else "gloo"
                dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
                self.began_group = True
            self._own_group = cast(
                dist.ProcessGroup,
                dist.new_group([self.world.rank], use_local_synchronization=True),
            )
        return self._own_group

    def leave_groups(self) -> None:
        """Leaves its process groups; the World's stay."""
        self.object_group = self.dp_group = self.dp_object_group = self._own_group = None
        if self.began_group and dist.is_initialized():
            dist.destroy_process_group()


_runtime: Runtime | None = None


@naming(NAMING)
def init(config: Mapping[str, Any] | None = None) -> None:
    """Reads the configuration and joins the other processes; call it once, at the beginning.

    Args:
        config: the dictionary `parameters` of smp 1.x, or an estimator's whole `distribution`.
            None: the environment variable `SM_HP_MP_PARAMETERS`, as JSON or the path of a JSON
            file.

    Raises:
        ConfigError: there is no configuration, or it is wrong; the message names the key.
        WorldError: the processes or devices do not match it.
    """
    global _runtime
    if _runtime is not None:
        if config is not None and parse(parameters_of(config)) != _runtime.config:
            raise ConfigError("smp.init was already called with another configuration")
        return
    if config is None:
        text = os.environ.get(smp_config.ENVIRONMENT)
        if not text:
            raise ConfigError(
                f"smp.init() found no configuration: pass one, "
                f'smp.init({{"pipeline_parallel_degree": 2, "microbatches": 4}}), or set the '
                f"environment variable {smp_config.ENVIRONMENT} to it, as "
                f"`hybridtrain smp-config distribution.json` shows"
            )
        config = smp_config.read(text)
    settings = parse(parameters_of(config))
    launch = detect(os.environ)
    degree = settings.pipeline_parallel_degree
    if settings.engine == "distributed" and launch.size % degree:
        raise ConfigError(
            f"pipeline_parallel_degree={degree} does not divide the {launch.size} processes that "
            f"were started: start a multiple of {degree}, or set "
            f'{smp_config.OWN_KEY}={{"engine": "local"}} to run all stages in one process'
        )
    backend = settings.ddp_dist_backend
    timeouts = {k: settings.own[k] for k in ("timeout_s", "stall_s") if k in settings.own}
    world = World.from_env(
        degree,
        devices=settings.own.get("devices"),
        backend=None if backend == "auto" else backend,
        engine=settings.engine,
        inner=settings.inner,
        **timeouts,
    )
    if world.devices[0].type == "cuda":
        torch.cuda.set_device(world.devices[0])
    elif not torch.cuda.is_available():
        let_cuda_mean_cpu()
    runtime = Runtime(settings, world, launch)
    if world.size > 1:
        runtime.object_group = _new_group("gloo", range(world.size), _LONG)
        if world.data_parallel_size > 1:
            # of the default backend, because scripts send CPU and GPU tensors through it
            timeout = timedelta(seconds=world.timeout_s)
            # creating a group is a collective call of all processes: each creates all groups
            for place in range(world.processes_per_replica):
                ranks = [
                    world.rank_of(replica, place) for replica in range(world.data_parallel_size)
                ]
                group, objects = _new_group(None, ranks, timeout), _new_group("gloo", ranks, _LONG)
                if place == world.pipeline_rank:
                    runtime.dp_group, runtime.dp_object_group = group, objects
            runtime.attendance = Attendance(world)
    _runtime = runtime
    atexit.register(shutdown)


def shutdown() -> None:
    """Leaves the process groups; runs automatically when the script ends.

    Raises:
        UserError: called inside a step.
    """
    global _runtime
    refuse_in_body("smp.shutdown()")
    runtime, _runtime = _runtime, None
    if runtime is None:
        return
    atexit.unregister(shutdown)
    runtime.attendance.leave()
    if runtime.model is not None:
        runtime.model.hybrid = None  # its process groups must end before the interpreter does
    runtime.model = None
    runtime.resume = None
    runtime.optimizers.clear()
    runtime.leave_groups()
    gc.collect()
    runtime.world.close()


def is_initialized() -> bool:
    """Returns whether `init` was called."""
    return _runtime is not None


def is_tracing() -> bool:
    """Returns False: the model's own forward runs."""
    return False


def current() -> Runtime:
    """Returns the state set up by `init`.

    Raises:
        UserError: `init` has not been called.
    """
    if _runtime is None:
        raise UserError("call smp.init() first, at the beginning of the script")
    return _runtime


def _new_group(backend: str | None, ranks: Iterable[int], timeout: timedelta) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.new_group(list(ranks), backend=backend, timeout=timeout))


_CPU = torch.device("cpu")
_replaced = False


def let_cuda_mean_cpu() -> None:
    """Makes `.to("cuda")`, `.cuda()` and `torch.cuda.set_device` work without a GPU."""
    global _replaced
    if _replaced:
        return
    _replaced = True
    log.info("no GPU found: cuda means the CPU in this script")
    owners: tuple[Any, ...] = (torch.Tensor, nn.Module)
    for owner in owners:
        owner.to = _on_cpu(owner.to)
        owner.cuda = _answering(owner.cuda, lambda self, *args, **kwargs: self)
    cuda: Any = torch.cuda
    # a separate function for each, because torch.compile keeps a table of them
    cuda.set_device = _answering(cuda.set_device, lambda *args, **kwargs: None)
    cuda.synchronize = _answering(cuda.synchronize, lambda *args, **kwargs: None)
    cuda.current_device = _answering(cuda.current_device, lambda: _CPU)


def _answering(function: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(answer)


def _on_cpu(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_device(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _device(kwargs["device"])
        return method(self, *args, **kwargs)

    return to


def _device(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("cuda"):
        return _CPU
    if isinstance(value, torch.device) and value.type == "cuda":
        return _CPU
    return _CPU if type(value) is int else value
