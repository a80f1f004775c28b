"""The processes of a run: ranks, replicas, devices and process groups.

A replica is one copy of the model. With `engine="local"`, each process is one replica and owns the
`nb_part` devices of its pipeline. 3 nodes of 4 GPUs with nb_part=2 run 6 processes, 2 per node:

    node 0                  node 1                  node 2
    rank 0: cuda:0 cuda:1   rank 2: cuda:0 cuda:1   rank 4: cuda:0 cuda:1
    rank 1: cuda:2 cuda:3   rank 3: cuda:2 cuda:3   rank 5: cuda:2 cuda:3

With `engine="distributed"`, each process owns one device, and `nb_part` processes form a replica. 2
nodes of 4 GPUs with nb_part=4 run 8 processes and 2 replicas. With `inner="pp"`, the processes of a
pipeline have consecutive ranks, so a pipeline stays inside a node; with `inner="dp"`, the processes
that run the same stage in different replicas do:

                   node 0            node 1
    inner="pp"     a0 a1 a2 a3       b0 b1 b2 b3      a, b: replicas; 0 to 3: places in the pipeline
    inner="dp"     a0 b0 a1 b1       a2 b2 a3 b3

Code outside this module must not assume that a process is a replica. It uses the property it needs:
`data_parallel_rank` and `data_parallel_size` (which copy of the model), `owned_replicas` and
`logical_replicas` (data shards and dropout masks), `is_main` (rank 0, which writes what is written
once), `stage_owners` (which process owns which stage).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtrain._base import objects
from hybridtrain._base.devices import (
    DeviceSpec,
    check_nb_part,
    choose_backend,
    choose_devices,
    gpus_left_out,
)
from hybridtrain._base.plain_numbers import plain_numbers
from hybridtrain._base.problem import Problem, first_problem
from hybridtrain._base.repeatable import repeat_results
from hybridtrain._base.replica_shares import samples_by_replica
from hybridtrain._base.shared_gpus import (
    check_not_shared,
    nccl_variables,
    physical_gpus,
    ranks_by_shared_gpu,
)
from hybridtrain._base.summation_tree import owned_by
from hybridtrain._base.torch_private import Store, get_default_store
from hybridtrain.errors import WorldError, argument, setting
from hybridtrain.launch import (
    Launch,
    Phase,
    ProcessStore,
    Watchdog,
    activity,
    check_interface,
    check_reachable,
    current,
    detect,
    end_with_parent,
    meet,
    restore_signals,
    tell_uncaught_errors,
)
from hybridtrain.partitioning import StageOwners

_log = logging.getLogger(__name__)

T = TypeVar("T")

# Rank 0 may take long for a download or a checkpoint while the others wait. If a process dies,
# `launch.watchdog` ends the run long before.
_SETUP_TIMEOUT = timedelta(hours=24)


@dataclass(eq=False)
class World:
    """The processes of a run, and this process's place among them.

    Attributes:
        launcher: `torchrun`, `slurm` or `single`.
        rank: the global rank of this process.
        size: the number of processes.
        local_rank: the rank of this process on its node.
        devices: the devices of this process, in the order of its stages.
        backend: `gloo` or `nccl`, for gradients and values.
        timeout_s: seconds before a collective call, or a process without a sign of life, is an
            error.
        stall_s: seconds without progress after which a run ends; 0: never. See `from_env`.
        engine: the name of the engine that executes pipelines.
        processes_per_replica: the number of processes that share a pipeline.
        inner: which processes have consecutive ranks: `pp`, the processes of a pipeline; `dp`, the
            processes with the same stages.
        fixed_replicas: the number of logical replicas; None: one per copy of the model.
        replica_shares: the relative number of samples of a batch that each copy of the model gets;
            None: equal shares.
        deterministic: whether this process uses deterministic algorithms only; see `from_env`.
        share_gpus: whether several ranks may use one GPU over NCCL; see `from_env`.
        pipeline_group: the processes of this replica, in pipeline order; None for a single process.
        pipeline_object_group: the same processes, in a group with a long timeout.
        edge_groups: with NCCL, the groups of two neighboring processes of a pipeline, by the
            `pipeline_rank` of the sender and of the receiver; see `edges_of`.
        watchdog: ends a run that has failed or stalled; see `from_env`.
        unused_gpus: with `devices="auto"` on the CPU of a machine with GPUs, why they are not used,
            and how to use them; otherwise None.
    """

    launcher: str = "single"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    devices: tuple[torch.device, ...] = (torch.device("cpu"),)
    backend: str = "gloo"
    timeout_s: float = 600.0
    stall_s: float = 300.0
    engine: str = "local"
    processes_per_replica: int = 1
    inner: str = "pp"
    fixed_replicas: int | None = None
    replica_shares: tuple[float, ...] | None = None
    deterministic: bool = False
    share_gpus: bool = False
    pipeline_group: dist.ProcessGroup | None = field(default=None, repr=False)
    pipeline_object_group: dist.ProcessGroup | None = field(default=None, repr=False)
    edge_groups: Mapping[tuple[int, int], dist.ProcessGroup] = field(
        default_factory=dict, repr=False
    )
    watchdog: Watchdog | None = field(default=None, repr=False)
    unused_gpus: str | None = field(default=None, repr=False)
    _object_group: dist.ProcessGroup | None = field(default=None, repr=False)
    _saving_group: dist.ProcessGroup | None = field(default=None, repr=False)
    _sum_group: dist.ProcessGroup | None = field(default=None, repr=False)
    _wait_for_save: Callable[[], None] | None = field(default=None, repr=False)
    _closed: bool = field(default=False, repr=False)

    @classmethod
    def from_env(
        cls,
        nb_part: int | None = None,
        devices: DeviceSpec = None,
        backend: str | None = None,
        timeout_s: float = 600.0,
        engine: str = "local",
        stall_s: float = 300.0,
        inner: str = "pp",
        replicas: int | None = None,
        replica_shares: Sequence[float] | None = None,
        deterministic: bool = False,
        share_gpus: bool = False,
    ) -> World:
        """Reads the launcher's environment and joins the process group, if there are several.

        It changes the environment only for `deterministic`, `replicas` on GPUs, and `share_gpus`.

        Args:
            nb_part: the number of devices per pipeline, and so of stages (times
                `stages_per_device`); None: the environment variable HYBRIDTRAIN_NB_PART, or 1.
            devices: None: the GPUs from `local_rank * nb_part` on, or the CPU on a machine without
                GPUs (an error if the launcher has allocated GPUs and PyTorch sees none); `"auto"`:
                the GPUs if there are enough, else the CPU; `"cpu"`; `"cuda"`; or a list: `nb_part`
                devices that every process uses, or the devices of all local processes in order.
            backend: None: `nccl` on GPUs and `gloo` on CPUs.
            timeout_s: timeout of collective calls, in seconds.
            engine: what executes a pipeline: `local`, one process with all stages; `distributed`,
                `nb_part` processes with one device each.
            stall_s: seconds without progress in a step, an evaluation or a run of a `Trainer` after
                which the process exits with code 4 and reports what has stalled; 0: never. The
                first steps may take four times as long, a checkpoint ten times.
            inner: see the class.
            replicas: the number of logical replicas. Results are then bitwise identical for any
                number of copies of the model from 1 to `replicas`; see `logical_replicas`. On GPUs
                it implies `deterministic`, and all ranks need the same GPU model and libraries.
                None: one per copy.
            replica_shares: the relative number of samples of a batch that each copy of the model
                gets, such as `[1, 2]` for a slow and a fast one; None: equal shares.
            deterministic: make PyTorch use deterministic algorithms only in this process, for all
                of its computations from now on; an operation without one raises an error. Create
                the World before the first matrix product on a GPU, because this sets
                `CUBLAS_WORKSPACE_CONFIG`. Compiled code then depends only on the shapes of its
                inputs, and not on those that the process has seen before.
            share_gpus: allow several ranks to use one GPU over NCCL, to test a run on a machine
                with fewer GPUs than ranks; its speed means nothing.

        Raises:
            WorldError: the devices, the backend or the launcher's variables are inconsistent.
        """
        launch = detect(os.environ)
        if launch.problem is not None:
            raise WorldError(launch.problem)
        if nb_part is None:
            nb_part = launch.nb_part
        nb_part, replicas = plain_numbers(nb_part), plain_numbers(replicas)
        timeout_s, stall_s = plain_numbers(timeout_s), plain_numbers(stall_s)
        replica_shares = plain_numbers(replica_shares)
        gpus = torch.cuda.device_count()
        world = cls.of_launch(
            *(launch, gpus, nb_part, devices, backend, engine, inner, replicas, replica_shares),
            share_gpus=share_gpus,
        )
        world.deterministic = deterministic or (
            replicas is not None and world.devices[0].type == "cuda"
        )
        if world.deterministic:
            repeat_results(True)
        world.timeout_s, world.stall_s = timeout_s, stall_s
        if devices == "auto" and gpus and world.devices[0].type == "cpu":
            world.unused_gpus = gpus_left_out(len(world.devices), launch, gpus)
        # Before anything can block: a launcher that is killed cannot end its processes.
        end_with_parent()
        if world.size == 1:
            return world._watched(None)
        store = _meet(launch, world.devices, timeout_s)
        # before the process groups: their creation waits for all processes
        world._watched(store)
        # For the watchdog, which has started: a process may die while the groups are made.
        with activity.waiting():
            try:
                world._object_group = _join(launch, world.backend, store, timeout_s)
            finally:  # another process may end while this one joins it
                tell_uncaught_errors()  # around PyTorch's hook
            return world._with_pipeline_groups()

    @classmethod
    def of_launch(
        cls,
        launch: Launch,
        gpus: int,
        nb_part: int,
        devices: DeviceSpec = None,
        backend: str | None = None,
        engine: str = "local",
        inner: str = "pp",
        replicas: int | None = None,
        replica_shares: Sequence[float] | None = None,
        share_gpus: bool = False,
    ) -> World:
        """Returns the World of a process of any launch, without joining process groups.

        It has ranks, devices and stage owners; its collective calls fail.

        Args:
            launch: the launcher's facts about the process.
            gpus: the number of GPUs that the process sees.
            nb_part: as in `from_env`.
            devices: as in `from_env`.
            backend: as in `from_env`.
            engine: as in `from_env`.
            inner: as in `from_env`.
            replicas: as in `from_env`.
            replica_shares: as in `from_env`.
            share_gpus: as in `from_env`.

        Raises:
            WorldError: the devices, the backend or the number of processes are inconsistent.
        """
        per_replica, own_devices = _shape(launch, gpus, nb_part, devices, engine, inner, share_gpus)
        chosen = choose_backend(backend, own_devices)
        check_logical_replicas(replicas, launch.size // per_replica)
        check_replica_shares(replica_shares, launch.size // per_replica, replicas)
        return cls(
            launcher=launch.launcher,
            rank=launch.rank,
            size=launch.size,
            local_rank=launch.local_rank,
            devices=own_devices,
            backend=chosen,
            engine=engine,
            processes_per_replica=per_replica,
            inner=inner,
            fixed_replicas=replicas,
            replica_shares=None if replica_shares is None else tuple(replica_shares),
            share_gpus=share_gpus,
        )

    @classmethod
    def of_replica(cls, launch: Launch, gpus: int, nb_part: int, devices: DeviceSpec) -> World:
        """Returns the World of one replica, of a process whose caller averages the gradients.

        Its rank, which seeds dropout, is the process's among all; it has no collective calls.

        Args:
            launch: the launcher's facts about the process.
            gpus: the number of GPUs that the process sees.
            nb_part: as in `from_env`.
            devices: as in `from_env`.

        Raises:
            WorldError: the devices are inconsistent.
        """
        _, own_devices = _shape(launch, gpus, nb_part, devices, "local", "pp")
        return cls(rank=launch.rank, local_rank=launch.local_rank, devices=own_devices)

    def divided(self, nb_part: int, devices: DeviceSpec = None) -> World:
        """Returns a World of the same processes, with pipelines of `nb_part` devices.

        Use it if `nb_part` is known only after the processes have joined: create a World with
        `nb_part=1`, and replace it with the result before any model uses it. A collective call.

        Args:
            nb_part: as in `from_env`.
            devices: as in `from_env`, and of the same type as this World's.

        Raises:
            WorldError: the devices or the number of processes are inconsistent.
        """
        launch, gpus = detect(os.environ), torch.cuda.device_count()
        per_replica, own_devices = _shape(
            launch, gpus, nb_part, devices, self.engine, self.inner, self.share_gpus
        )
        check_logical_replicas(self.fixed_replicas, self.size // per_replica)
        check_replica_shares(self.replica_shares, self.size // per_replica, self.fixed_replicas)
        if own_devices[0].type == "cuda":
            # NCCL and new tensors use the current device of the thread.
            torch.cuda.set_device(own_devices[0])
        divided = replace(self, devices=own_devices, processes_per_replica=per_replica)
        return divided._with_pipeline_groups()

    def _with_pipeline_groups(self) -> World:
        """Adds the groups of the processes that share a pipeline; a collective call."""
        uses_nccl = self.backend == "nccl"
        if self.size > 1 and uses_nccl:
            # Before the first communicator, for which NCCL reads its variables.
            self._share_or_refuse(self.gather(physical_gpus(self.devices)))
            # Allocate NCCL's memory now, not in the middle of a run: `sum` and `broadcast_tensor`
            # take tensors of the first and the last stage
            self._connect(None, dict.fromkeys((self.devices[0], self.devices[-1])))
        if self.processes_per_replica > 1:
            timeout = timedelta(seconds=self.timeout_s)
            # with several backends: CPU tensors go through gloo even if the devices are GPUs
            self.pipeline_group = self._new_pipeline_group(None, timeout)
            self.pipeline_object_group = self._new_pipeline_group("gloo", _SETUP_TIMEOUT)
            if uses_nccl:
                # all processes must join its first collective, and a step starts with pairs
                self._connect(self.pipeline_group, self.devices)
                self.edge_groups = self._connected_edges(self.backend)
        return self

    def _share_or_refuse(self, gpus: Sequence[Sequence[str]]) -> None:
        """Prepares NCCL for ranks that share a GPU, before its first communicator.

        Args:
            gpus: the GPUs of each rank.

        Raises:
            WorldError: ranks share a GPU without `share_gpus`.
        """
        if not self.share_gpus:
            check_not_shared(gpus)
        shared = ranks_by_shared_gpu(gpus)
        if not shared:
            return
        is_one_host = len({gpu.split()[0] for of_rank in gpus for gpu in of_rank}) == 1
        version: tuple[int, ...] = torch.cuda.nccl.version()
        for name, value in nccl_variables(version, self.rank, is_one_host).items():
            # What the user has set wins.
            os.environ.setdefault(name, value)
        if self.is_main:
            several = max(map(len, shared.values()))
            _log.warning(
                "up to %d ranks share a GPU (%s): results are as with a GPU for each rank, but the "
                "speed means nothing",
                several,
                setting("share_gpus", True),
            )

    def _connect(self, group: dist.ProcessGroup | None, devices: Iterable[torch.device]) -> None:
        """Makes NCCL create a group's communicators, which it does in the first collective."""
        for device in devices:
            # The result is not read, so the host does not wait for the GPU.
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def _connected_edges(self, backend: str) -> dict[tuple[int, int], dist.ProcessGroup]:
        """Creates the groups of the edges of all replicas (a collective call), and connects them.

        A message in the middle of a step would otherwise create the communicator, and wait for a
        process that is still busy.

        Returns:
            the groups of this process, by the places of the sender and of the receiver.
        """
        here, timeout = self.pipeline_rank, timedelta(seconds=self.timeout_s)
        groups = {}
        # Every process makes all groups, also those that it is no part of: `new_group` is a call of
        # all.
        for replica in range(self.data_parallel_size):
            for edge in edges_of(self.processes_per_replica):
                group = _new_group(backend, timeout, [self.rank_of(replica, at) for at in edge])
                if replica == self.data_parallel_rank and here in edge:
                    groups[edge] = group
        # In the order of `edges_of`, which is the same at both ends of an edge.
        for (sender, receiver), group in groups.items():
            operation, peer = (dist.isend, receiver) if here == sender else (dist.irecv, sender)
            signal = torch.zeros(1, device=self.wire_device)
            message = dist.P2POp(operation, signal, group=group, group_peer=int(peer > here))
            for work in dist.batch_isend_irecv([message]):
                # Connected one after another; see `edges_of` for why that is no chain through all
                # processes.
                work.wait()
        return groups

    def _new_pipeline_group(self, backend: str | None, timeout: timedelta) -> dist.ProcessGroup:
        """Creates the groups of all replicas (a collective call) and returns this replica's."""
        places = range(self.processes_per_replica)
        # All replicas' in the same order in all processes, since `new_group` is a call of all.
        groups = [
            _new_group(backend, timeout, [self.rank_of(replica, place) for place in places])
            for replica in range(self.data_parallel_size)
        ]
        return groups[self.data_parallel_rank]

    def _watched(self, store: Store | None) -> World:
        """Starts a watchdog and returns this World."""
        running = current()
        # A second one would publish under the same keys of the store.
        if self.size > 1 and running is not None and running.store.size > 1:
            self.watchdog = running  # of another World of these processes
            return self
        process_store = ProcessStore(store, self.rank, self.size)
        self.watchdog = Watchdog(process_store, self.stall_s, self.timeout_s)
        self.watchdog.start()
        return self

    def watch(self, stacks: Path) -> None:
        """Also ends the run if another process dies between two steps, until `close`.

        Every step, evaluation and run of a `Trainer` is always watched: the run ends if another
        process dies or makes no progress for `stall_s`. Between the steps of a custom loop, no
        progress is expected unless another process is waiting inside a step.

        Args:
            stacks: the folder for the stack traces of all processes if the run stalls.
        """
        if self.watchdog is not None:
            self.watchdog.stacks = stacks
            self.watchdog.prints_failures = False  # the processes share the terminal, and have logs
            activity.now(Phase.SETUP)

    def say_stages(self, stages: Sequence[int]) -> None:
        """Tells the other processes which stages this process has, for failure reports."""
        if self.watchdog is not None and self.processes_per_replica > 1:
            several = "s" * (len(stages) > 1)
            self.watchdog.store.set_place(f"stage{several} {', '.join(map(str, stages))}")

    @cached_property
    def nb_part(self) -> int:
        """The number of devices per pipeline."""
        return len(self.devices) * self.processes_per_replica

    @cached_property
    def data_parallel_size(self) -> int:
        """The number of copies of the model."""
        return self.size // self.processes_per_replica

    @cached_property
    def data_parallel_rank(self) -> int:
        """The index of this process's copy of the model."""
        if self.inner == "dp":
            return self.rank % self.data_parallel_size
        return self.rank // self.processes_per_replica

    @property
    def repeats_bits(self) -> bool:
        """Whether a run must end with the same bits again, also after a resume.

        True with `deterministic`, and with `fixed_replicas`, where it also holds for other numbers
        of processes.
        """
        return self.deterministic or self.fixed_replicas is not None

    @cached_property
    def logical_replicas(self) -> int:
        """The number of replicas that share a global batch.

        A logical replica has its own share of each batch, its own random numbers and its own place
        in the order in which gradients are summed. Each copy of the model runs one of them, or
        several if `fixed_replicas` is set.
        """
        return self.fixed_replicas or self.data_parallel_size

    @cached_property
    def owned_replicas(self) -> range:
        """The logical replicas that this copy of the model runs."""
        return owned_by(self.data_parallel_rank, self.data_parallel_size, self.logical_replicas)

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """The relative number of samples that each logical replica gets of a batch."""
        return self.replica_shares or (1,) * self.logical_replicas

    def samples_by_replica(self, total: int) -> list[int]:
        """Returns how many of the `total` samples of a batch each logical replica gets."""
        return samples_by_replica(total, self.shares)

    @cached_property
    def pipeline_rank(self) -> int:
        """The rank of this process within its replica."""
        if self.inner == "dp":
            return self.rank // self.data_parallel_size
        return self.rank % self.processes_per_replica

    def rank_of(self, replica: int, pipeline_rank: int) -> int:
        """Returns the rank of the process with this place in this replica."""
        if self.inner == "dp":
            return pipeline_rank * self.data_parallel_size + replica
        return replica * self.processes_per_replica + pipeline_rank

    @property
    def wire_device(self) -> torch.device:
        """The device for tensors sent to other processes: the CPU with gloo."""
        return torch.device("cpu") if self.backend == "gloo" else self.devices[0]

    @property
    def stage_owners(self) -> StageOwners:
        """The devices of a pipeline, and which of its processes owns which."""
        names = tuple(map(str, self.devices)) * self.processes_per_replica
        return StageOwners(names, self.processes_per_replica, self.data_parallel_size)

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes what is written once; all may write a checkpoint."""
        return self.rank == 0

    def new_stage_group(self, pipeline_rank: int) -> dist.ProcessGroup | None:
        """Creates a group of the processes at this place in each replica, replica 0's first.

        Every process calls it for the owner of every stage, in the same order. Returns None with
        a single replica.
        """
        if self.data_parallel_size == 1:
            return None
        self._check_open()
        ranks = [self.rank_of(replica, pipeline_rank) for replica in range(self.data_parallel_size)]
        return _new_group(self.backend, timedelta(seconds=self.timeout_s), ranks)

    def new_group_like(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Creates another group of the members of `group`, which call it together."""
        return cast(
            dist.ProcessGroup,
            # Local synchronization: only the members call this, while the other stages' processes
            # go on.
            dist.new_group(
                dist.get_process_group_ranks(group),
                backend=self.backend,
                timeout=timedelta(seconds=self.timeout_s),
                use_local_synchronization=True,
            ),
        )

    def saving_group(self, wait: Callable[[], None]) -> dist.ProcessGroup:
        """Returns a group of all processes for saves, which may run in a background thread.

        It uses gloo with a long timeout. The first call is collective. Requires several processes.

        Args:
            wait: returns once the caller has no save in progress; called before another caller
                gets the group.
        """
        self._check_open()
        # Two saves at once would mix their collectives in one group.
        if self._wait_for_save is not None and self._wait_for_save != wait:
            self._wait_for_save()
        self._wait_for_save = wait
        if self._saving_group is None:
            self._saving_group = _new_group("gloo", _SETUP_TIMEOUT)
        return self._saving_group

    def on_main(self, action: Callable[[], T]) -> T | None:
        """Runs `action` on rank 0 while the others wait; they get None.

        Raises:
            Exception: rank 0's error, on every rank, so that no rank waits forever; see `on_all`.
        """
        runs_here = self.is_main or self.size == 1
        return self._all_or_none(lambda: action() if runs_here else None, self.broadcast)

    def from_main(self, action: Callable[[], T]) -> T:
        """Runs `action` on rank 0 and returns its result on every rank; see `gather` for types.

        Raises:
            Exception: rank 0's error, on every rank, so that no rank waits forever; see `on_all`.
        """
        return cast(T, self.broadcast(self.on_main(action)))

    def on_all(self, action: Callable[[], T]) -> T:
        """Runs `action` on every rank and returns its local result; a collective call.

        Raises:
            Exception: if any rank fails, all ranks raise, so that none waits forever. The lowest
                failing rank raises its own error; the others raise a copy: a `UserError` of the
                same type, otherwise an `OtherProcessError`.
        """
        return self._all_or_none(action, lambda problem: first_problem(self.gather(problem)))

    def _all_or_none(
        self, action: Callable[[], T], agree: Callable[[Problem | None], Problem | None]
    ) -> T:
        """Returns the result of `action`, or raises the problem that the processes agree on.

        Args:
            action: runs in this process.
            agree: takes this process's problem, and returns the problem that all of them raise.
        """
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        # Every process comes here, whatever `action` did: this is the collective that ends the wait
        # of the others.
        problem = agree(None if failure is None else Problem.of(self.rank, failure))
        try:
            if failure is not None and problem is not None and problem.rank == self.rank:
                raise failure
            if problem is not None:
                raise problem.error()
        finally:
            del failure  # or its traceback keeps the caller's model alive until the next collection
        return result

    def broadcast(self, value: T) -> T:
        """Returns rank 0's `value` on every rank.

        Args:
            value: of a type that `gather` supports.

        Raises:
            UserError: the type of the value is not supported.
        """
        if self.size == 1:
            return value
        self._check_open()
        # So that the watchdog notices an ended process while this one waits between two steps.
        with activity.waiting():
            return cast(T, objects.broadcast(value, self._object_group, 0))

    def gather(self, value: T) -> list[T]:
        """Returns the `value` of every rank, in rank order, on every rank.

        Args:
            value: tensors, NumPy arrays, plain values, paths, dates, containers of these, and
                dataclasses, named tuples and enums that the model's modules define or import.

        Raises:
            UserError: a rank's value has a different type. Nothing is pickled between processes.
        """
        if self.size == 1:
            return [value]
        self._check_open()
        with activity.waiting():
            return objects.gather(value, self._object_group)

    def sum(self, values: Tensor) -> Tensor:
        """Sums `values` over all ranks in place; they may be on the CPU or one of the devices."""
        if self.size > 1:
            dist.all_reduce(values, group=self._group_of_sums())
        return values

    def begin_sum(self, values: Tensor) -> dist.Work | None:
        """Starts `sum` without waiting; call `wait()` on the result, if any, before reading."""
        if self.size == 1:
            return None
        return dist.all_reduce(values, group=self._group_of_sums(), async_op=True)

    def begin_max(self, values: Tensor) -> dist.Work:
        """Starts an element-wise maximum of `values` over all ranks, on the CPU, in place.

        Call `wait()` on the returned work before reading. Requires several processes.
        """
        return _begin_max(values, self._object_group)

    def begin_max_in_pipeline(self, values: Tensor) -> dist.Work:
        """Starts `begin_max` over the processes of this replica only; requires several of them."""
        return _begin_max(values, self.pipeline_object_group)

    def all_arrive(self, seconds: float) -> bool:
        """Waits up to `seconds` for all processes to call this; returns whether they all did."""
        if self.size == 1:
            return True
        try:
            # On the group of objects: only gloo has this barrier.
            dist.monitored_barrier(self._object_group, timedelta(seconds=seconds))
        except RuntimeError:
            # The caller raises: the group is of no use with processes that have not come.
            return False
        return True

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Overwrites `tensor` with rank 0's."""
        if self.size > 1:
            dist.broadcast(tensor, src=0, group=self._group_of_sums())

    def _group_of_sums(self) -> dist.ProcessGroup:
        """Returns the group of all processes for tensors. The first call is collective.

        Not the default group, which is the script's: what a script sends there on one rank only
        would be taken for a part of a sum.
        """
        self._check_open()
        if self._sum_group is None:
            self._sum_group = _new_group(None, timedelta(seconds=self.timeout_s))
        return self._sum_group

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # `launch.failure` reports an error to the other processes first
            self.close()

    def close(self) -> None:
        """Leaves the process groups at the end of a run; the World cannot be used afterwards.

        Returns once the threads of `broadcast`, `gather` and `on_main` have ended. A gloo thread
        that outlives the interpreter while it releases the tensors of the last message aborts the
        process (pytorch/pytorch#190489), and torchrun would report a finished run as failed. The
        threads that average gradients end with their model.
        """
        if self.watchdog is not None:
            # Before the groups: a connection that closes must not look like a failure.
            self.watchdog.close()
            restore_signals()
        if self.size > 1 and dist.is_initialized():
            # All groups, the models' groups too.
            dist.destroy_process_group()
            self._closed = True
            # drop the last references to the groups
            self._object_group = self._saving_group = self._sum_group = self._wait_for_save = None
            self.pipeline_group = self.pipeline_object_group = None
            self.edge_groups = {}

    def _check_open(self) -> None:
        if self._closed:
            raise WorldError(
                "this World is closed, and its processes cannot join again: call world.close() "
                "once, after the last model of the run"
            )

    def __deepcopy__(self, memo: Any) -> World:
        # A copy of a model belongs to the same processes.
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a World holds this process's process groups and cannot be pickled: call "
            "World.from_env() in the other process"
        )


def edges_of(processes: int) -> list[tuple[int, int]]:
    """Returns sender and receiver of each direction of each edge between neighboring processes.

    The last and the first process are neighbors too: interleaved schedules and tied embeddings
    connect them. So no process has more than four, however many stages it has. The order lets
    edges without a common process connect at the same time: 0-1, 2-3, ..., then 1-2, 3-4, ...
    """
    # A set, because with two processes both neighbors are the same one.
    pairs = {tuple(sorted((place, (place + 1) % processes))) for place in range(processes)}
    ordered = sorted(pairs, key=lambda pair: (pair[0] % 2, pair))
    return [edge for low, high in ordered for edge in ((low, high), (high, low))]


def check_logical_replicas(replicas: int | None, copies: int) -> None:
    """Checks that each copy of the model has a logical replica to run.

    Raises:
        WorldError: there are fewer replicas than copies, or the number is not positive.
    """
    if replicas is None:
        return
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise WorldError(f"{setting('replicas', replicas)} must be a positive number")
    if copies > replicas:
        raise WorldError(
            f"{setting('replicas', replicas)} is less than the {copies} copies of the model being "
            f"started: start at most {replicas} times the processes of a pipeline, or raise "
            f"{argument('replicas')}"
        )


def check_replica_shares(
    shares: Sequence[float] | None, copies: int, fixed_replicas: int | None
) -> None:
    """Makes sure that each copy of the model has a share of a batch.

    Raises:
        WorldError: the number of shares is another, one is not positive, or the run is to be the
            same on any number of copies.
    """
    if shares is None:
        return
    if not isinstance(shares, Sequence) or isinstance(shares, str):
        raise WorldError(
            f"{setting('replica_shares', shares)} must be a list with a number for each replica"
        )
    shown = setting("replica_shares", list(shares))
    for share in shares:
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        if not is_number or not 0 < share < math.inf:
            raise WorldError(f"{shown}: {share!r} must be a positive number")
    if fixed_replicas is not None:
        raise WorldError(
            f"{shown} depends on the processes, and {setting('replicas', fixed_replicas)} makes a "
            f"run the same on any number of them: leave one of the two out"
        )
    if len(shares) != copies:
        are = "is 1 replica" if copies == 1 else f"are {copies} replicas"
        values = f"{len(shares)} value{'s' * (len(shares) != 1)}"
        raise WorldError(
            f"{shown} has {values}, and there {are}: give one for each, or set "
            f"{setting('replica_shares', None)} for equal shares"
        )


def _shape(
    launch: Launch,
    gpus: int,
    nb_part: int,
    devices: DeviceSpec,
    engine: str,
    inner: str,
    share_gpus: bool = False,
) -> tuple[int, tuple[torch.device, ...]]:
    """Returns the number of processes per replica, and the devices of this process."""
    check_nb_part(nb_part)
    per_replica, size = nb_part if engine == "distributed" else 1, launch.size
    if inner not in ("pp", "dp"):
        raise WorldError(f"{setting('inner', inner)} is unknown: use pp or dp")
    if size % per_replica:
        raise WorldError(
            f"{size} process{'es' * (size > 1)} cannot be divided into pipelines of "
            f"{setting('nb_part', per_replica)} processes: start a multiple of {per_replica}, or "
            f"set {setting('engine', 'local')}"
        )
    own_devices = choose_devices(nb_part // per_replica, devices, launch, gpus, share_gpus)
    return per_replica, own_devices


def _meet(launch: Launch, devices: Sequence[torch.device], timeout_s: float) -> Store:
    """Returns the store of the processes, which have all joined."""
    if devices[0].type == "cuda":
        torch.cuda.set_device(devices[0])
    # The script has made its own group: its processes have met already.
    if dist.is_initialized():
        return get_default_store()
    check_interface(os.environ)
    return meet(launch, os.environ, timeout_s)


def _join(launch: Launch, backend: str, store: Store, timeout_s: float) -> dist.ProcessGroup:
    """Creates the process group of all processes, and returns one for objects."""
    if not dist.is_initialized():
        check_reachable(store, launch, os.environ)
        try:
            dist.init_process_group(
                # objects and CPU tensors always use gloo
                backend="gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl",
                store=store,
                rank=launch.rank,
                world_size=launch.size,
                timeout=timedelta(seconds=timeout_s),
            )
        except (RuntimeError, ValueError) as error:
            raise WorldError(
                f"rank {launch.rank} could not connect to the other {launch.size - 1} processes "
                f"(GLOO_SOCKET_IFNAME chooses the network interface): {error}"
            ) from error
    return _new_group("gloo", _SETUP_TIMEOUT)


def _begin_max(values: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    assert group is not None
    # not dist.all_reduce, whose checks and logging cost 30 us per step
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    return group.allreduce([values], options)


def _new_group(
    backend: str | None, timeout: timedelta, ranks: Sequence[int] | None = None
) -> dist.ProcessGroup:
    with activity.waiting():
        return cast(dist.ProcessGroup, dist.new_group(ranks, backend=backend, timeout=timeout))
