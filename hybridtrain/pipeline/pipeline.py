"""The stages that this process owns: placed, linked, tied, reduced and ready to run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hybridtrain._base import objects
from hybridtrain._base.precision import ThreadState
from hybridtrain._base.shares import MicrobatchPlace
from hybridtrain._base.torch_private import keep_device_guard
from hybridtrain.errors import ConfigError, did_you_mean, setting
from hybridtrain.launch import activity, second_signal_ends
from hybridtrain.options import ENGINES, PipelineOptions, offloads_nothing
from hybridtrain.partitioning import Plan, PlannedLayers, recompute_policy
from hybridtrain.pipeline.agreement import BatchCheck, check_frozen_alike
from hybridtrain.pipeline.batch_norm import DeferredBatchNormStats
from hybridtrain.pipeline.engine import Engine, Head, Source, Step
from hybridtrain.pipeline.forward import (
    ForwardStage,
    StageInFlight,
    build_forward_stages,
    forward_engine,
    of_other_code,
)
from hybridtrain.pipeline.layer_rng import LayerRNG
from hybridtrain.pipeline.model_watch import ModelWatch
from hybridtrain.pipeline.own_stages import drop_other_stages
from hybridtrain.pipeline.reducer import norm_over_devices, norm_over_processes, norms_of
from hybridtrain.pipeline.step_kind import StepKind, StepKinds, begun
from hybridtrain.pipeline.summaries import log_compiled, log_offload
from hybridtrain.pipeline.ties import TiedUse, tied_uses, ties_of
from hybridtrain.pipeline.timeline import LanePeers, Timeline, seconds_ahead
from hybridtrain.schedule import Schedule, backward_only, offloads_anything, peak_in_flight
from hybridtrain.world import World

_log = logging.getLogger(__name__)

T = TypeVar("T")

_NOTHING = nullcontext()


class HeldGraphs(NamedTuple):
    """A step between its forwards and its backwards.

    Attributes:
        schedule: the backwards.
        number: the number of the step, which seeds its draws.
        training: whether the model was in training mode.
        in_flight: the micro-batches in each stage.
    """

    schedule: Schedule
    number: int
    training: bool
    in_flight: Sequence[dict[int, StageInFlight]]


def _no_more(*_: Any) -> NoReturn:
    raise AssertionError("a step of backwards has no forward")


class Pipeline:
    """The stages of a model that this process owns, and the known facts about other stages.

    Operations on the whole model go through this class: no other code may assume that the last
    stage, its device, or every gradient is in this process.

    Args:
        net: the model; its layers are moved to their devices, and rank 0's values to all ranks.
        plan: the stages.
        planned: the layers of each stage in `plan`.
        world: the processes and devices; all processes build the pipeline together.
        options: the pipeline options.
        rng: the random numbers of the layers; None: new ones.

    Attributes:
        stages: the stages of this process, in the order of the pipeline.
        devices: their devices.
        kinds: the kinds of steps so far.
        plan: the plan of the stages.
        planned: the layers of all stages.
        in_flight: for each stage, the peak number of micro-batches in flight.
        groups: the process group of each stage; None with one replica.
        rng: seeds the random operations of the layers.
        furthest_ahead: run one action at a time, each stage as far ahead as the schedule allows.
        output_device: the device of the last stage in this process.
        output_process: the index of the replica's process with the last stage.
        readers: the replica's processes that use the inputs or the targets of a batch: those with
            the first or the last stage.
        owns_output: whether this process has the last stage.
    """

    def __init__(
        self,
        net: nn.Module,
        plan: Plan,
        planned: PlannedLayers,
        world: World,
        options: PipelineOptions,
        rng: LayerRNG | None = None,
    ) -> None:
        if world.engine not in ENGINES:
            hint = did_you_mean(world.engine, ENGINES, "engines")
            raise ConfigError(f"{setting('engine', world.engine)} is unknown; {hint}")
        layers = [layer for part in planned.stages for layer in part]
        self.plan = plan
        self.planned = planned
        self.furthest_ahead = False
        self._net = net
        self._world = world
        self._options = options
        self._policy = recompute_policy(options.recompute, [layer.name for layer in layers])
        self.rng = rng or LayerRNG.of_world(options.seed, world, options.compile)
        self.rng.follow(planned.units)
        # From here on the order is the same in all processes: there are collective calls in
        # `new_stage_group`, in `build_stages` (the reducers) and in the broadcasts after them.
        stage_owners = world.stage_owners.placed(options.placement)
        owners = map(stage_owners.process_of, range(len(planned.stages)))
        self.groups = [world.new_stage_group(owner) for owner in owners]
        owned = stage_owners.stages_of(world.pipeline_rank, options.stages_per_device)
        uses: list[list[TiedUse]] = [[] for _ in planned.stages]
        # In one process a shared parameter crosses the border like any other value, and needs no
        # tie.
        if len(owned) < len(planned.stages):
            of_code = of_other_code(net, planned, owned)
            drop_other_stages(net, planned.stages, owned, of_code)
            uses = tied_uses([[layer.module for layer in part] for part in planned.stages])
        self.stages: Sequence[ForwardStage] = build_forward_stages(
            net, planned, world, options, self.groups, self.rng, self._policy, uses
        )
        self._ties = ties_of(self.stages, uses, world, stage_owners)
        used = {id(buffer) for layer in layers for buffer in layer.module.buffers()}
        # In the order of the module, which is the same in all processes: each call is a collective.
        for buffer in net.buffers():
            if id(buffer) not in used:  # no layer uses it, so no stage sends it
                world.broadcast_tensor(buffer.data)
        fixed = world.fixed_replicas is not None
        if fixed and world.devices[0].type == "cpu" and torch.get_num_threads() > 1:
            _log.info("one intra-op thread, since kernels add up in an order that depends on it")
            torch.set_num_threads(1)
        world.say_stages(owned)
        self.output_process = stage_owners.process_of(len(plan.stages) - 1)
        self.owns_output = self.output_process == world.pipeline_rank
        ends = {stage_owners.process_of(0), self.output_process}
        self.readers = tuple(sorted(ends))
        self._watch = ModelWatch(net)
        self.kinds = StepKinds(self._watch, len(plan.stages))
        self._accumulates = False  # the step has further batches
        self._is_first_step = True
        self.in_flight = plan.in_flight
        self._named: tuple[Sequence[Any], Mapping[str, nn.Parameter]] | None = None
        self._norms = DeferredBatchNormStats(net) if options.batch_norm == "deferred" else None
        self._has_replicas = len(world.owned_replicas) > 1
        if self._has_replicas:
            for stage in self.stages:
                stage.run_several_replicas(
                    [] if self._norms is None else self._norms.of(stage.module)
                )
        self._reducers = [stage.reducer for stage in self.stages if stage.reducer is not None]
        self.devices = {stage.device for stage in self.stages}
        self.output_device = self.stages[-1].device
        # TorchScript parameters cannot be dropped, but do not belong to this process
        self._of_others = {id(p) for layer in layers for p in layer.module.parameters()}
        for stage in self.stages:
            self._of_others -= {id(p) for p in stage.module.parameters()}
        # PyTorch's optimizers refuse an empty list.
        self._no_parameter = nn.Parameter(torch.empty(0, device=self.stages[-1].device))
        self._engine = self._new_engine()

    def _new_engine(self) -> Engine:
        keep_device_guard()
        return forward_engine(
            self._net, self.planned, self.stages, self._world, self._options, self.rng
        )

    @property
    def world(self) -> World:
        """The processes and devices."""
        return self._world

    @property
    def offload(self) -> str:
        """The option `offload`."""
        return self._options.offload

    @property
    def compiles(self) -> bool:
        """True if layers are compiled."""
        return self._options.compile

    def run_train_step(
        self,
        schedule: Schedule,
        source: Source,
        head: Head,
        *,
        reduce: bool = True,
        timeline: Timeline | None = None,
        places: Sequence[MicrobatchPlace] | None = None,
        batch_check: BatchCheck | None = None,
        kind: StepKind | None = None,
    ) -> list[Any]:
        """Runs a step with its backward; gradients are added to `parameter.grad`.

        All processes call it together. For arguments and result, see `Step` and `Engine.run`; a
        step without a kind is the first of its kind.
        """
        # with fixed replicas, not between the batches of a step: processes may be at different
        # replicas
        goes_on = self._accumulates and any(p.grad is not None for p in self.parameters.values())
        if not goes_on:
            if self._has_replicas:
                for stage in self.stages:
                    stage.end_replicas()  # after an abandoned step
            if self._reducers and self._options.broadcast_buffers:
                self.sync_buffers()
        self._accumulates = not reduce and self._world.fixed_replicas is not None
        for reducer in self._reducers if reduce else ():
            # In the order of the stages, which the processes of a group share: it may be a
            # collective call.
            reducer.begin_step()
        if self._is_first_step:
            self._check_offload(schedule)
            # a process with several logical replicas has the micro-batches of all
            self.in_flight = list(map(max, self.in_flight, peak_in_flight(schedule)))
        recomputed = self._policy.whole_stages(schedule.chunks)
        training = self._net.training
        state = ThreadState.capture()
        step = Step(
            schedule,
            source,
            head,
            state,
            begun(kind),
            recomputed,
            reduce,
            timeline,
            training,
            places,
            batch_check,
            self.furthest_ahead,
        )
        for stage in self.stages:
            stage.runs.begin_step(step.number, recomputed)
        values = self._run(step, trains=True)
        # Before the ties: an alias's gradient must be the sum over all replicas when it is added to
        # the owner's.
        for reducer in self._reducers if reduce else ():
            reducer.finish()
        # Before anything uses the gradients, which would be wrong if a recomputation differs.
        for stage in self.stages:
            stage.runs.check_recomputations()
        for tie in self._ties:
            # In the order of `ties_of` in all processes: each waits for the other end.
            tie.accumulate_into_owner()
        if self._is_first_step:
            self._end_first_step()
        return values

    def run_forwards(
        self, schedule: Schedule, source: Source, head: Head, kind: StepKind | None = None
    ) -> tuple[list[Any], HeldGraphs]:
        """Runs the forwards of a step, whose backwards `run_backwards` runs later.

        Several steps may wait for their backwards. Needs a pipeline that runs the model's own
        forward, in one process.

        Args:
            schedule: a schedule of forwards.
            source: as in `Step`.
            head: as in `Step`; its roots are where the backwards start.
            kind: as in `run_train_step`.

        Returns:
            the values of `head` by micro-batch, and what the backwards need.
        """
        if self._options.broadcast_buffers:
            self.sync_buffers()
        if self._is_first_step:
            self._check_offload(schedule)
        training, recomputed = self._net.training, self._policy.whole_stages(schedule.chunks)
        step = Step(
            schedule,
            source,
            head,
            ThreadState.capture(),
            begun(kind),
            recomputed,
            training=training,
            furthest_ahead=self.furthest_ahead,
            keeps_graphs=True,
        )
        for stage in self.stages:
            stage.runs.begin_step(step.number, recomputed)
        number = self.rng.step
        values = self._run(step, trains=True)
        if self._is_first_step:
            self._end_first_step()
        in_flight = [stage.take_graphs() for stage in self.stages]
        return values, HeldGraphs(backward_only(schedule), number, training, in_flight)

    def run_backwards(self, held: HeldGraphs) -> None:
        """Runs the backwards of a step; gradients are added to `parameter.grad`.

        Each step takes its graphs with it, so this can run once. Gradients are not averaged over
        the replicas.
        """
        stages = self.stages
        for stage, in_flight in zip(stages, held.in_flight, strict=True):
            stage.put_back_graphs(in_flight)
        step = Step(
            held.schedule,
            _no_more,
            _no_more,
            ThreadState.capture(),
            training=held.training,
            furthest_ahead=self.furthest_ahead,
        )
        # recomputed layers repeat the draws of their step, which may not have been the last
        latest, self.rng.step = self.rng.step, held.number
        try:
            self._run(step, trains=False)
        finally:
            self.rng.step = latest
        for stage in stages:
            stage.runs.check_recomputations()

    def _check_offload(self, schedule: Schedule) -> None:
        """Checks that the option `offload` has an effect in a full batch."""
        options, offload = self._options, self.stages[0].offload
        if offload is None or schedule.chunks < options.chunks:
            return
        if not offloads_anything(schedule, offload.memory.offloading):
            schedules = schedule.trains  # otherwise a caller's loop runs all forwards first
            raise ConfigError(offloads_nothing(options, len(schedule.lanes), schedules))

    def _end_first_step(self) -> None:
        self._is_first_step = False
        # A first forward may set what it had not, such as a cache in an attribute.
        self._watch.changed_by_forward()
        log_offload(self)
        if self._options.compile:
            log_compiled(self)

    def frozen_or_freed(self) -> list[str]:
        """Returns the parameters frozen or unfrozen since the last step; see `ModelWatch`."""
        return self._watch.frozen_or_freed()

    def follow_requires_grad(self, names: Sequence[str]) -> None:
        """Trains the parameters that now require a gradient; a collective call.

        Args:
            names: the names of the frozen or unfrozen parameters.

        Raises:
            ConfigError: other processes have frozen or unfrozen different parameters.
        """
        # First: `build` is a collective call, and ranks that have frozen nothing would never join.
        check_frozen_alike(names, self._world)
        for stage in self.stages:
            for alias in stage.aliases:
                # Before `build`, which reads it.
                alias.alias.requires_grad_(alias.parameter.requires_grad)
        for reducer in self._reducers:
            reducer.build()
        # a new engine, because different gradients change the message formats
        self._engine = self._new_engine()
        self._watch.look()

    def run_forward(
        self,
        schedule: Schedule,
        source: Source,
        head: Head,
        places: Sequence[MicrobatchPlace] | None = None,
        batch_check: BatchCheck | None = None,
        kind: StepKind | None = None,
    ) -> list[Any]:
        """Runs a step with forwards only; the caller has disabled gradients."""
        training, state = self._net.training, ThreadState.capture()
        step = Step(
            schedule,
            source,
            head,
            state,
            begun(kind),
            training=training,
            places=places,
            batch_check=batch_check,
            furthest_ahead=self.furthest_ahead,
        )
        return self._run(step, trains=training)

    def _run(self, step: Step, trains: bool) -> list[Any]:
        for tie in self._ties:
            # Before any layer runs, and in all processes, since each end waits for the other.
            tie.refresh()
        self.rng.begin_step(step.training, step.places)
        if self._has_replicas:
            for stage in self.stages:
                stage.begin_replicas(step.places)
        # None inside a `Trainer`, which has set its own phase and handlers.
        noted, signals = activity.step(step.schedule.trains), second_signal_ends()
        norms = None if self._norms is None else self._norms.step()
        contexts = noted or signals or norms
        if contexts is None and step.places is None:  # most often in a `Trainer`
            values = self._engine.run(step)
        else:
            with noted or _NOTHING, signals or _NOTHING, norms or _NOTHING:
                values = self._engine.run(step)
                # Inside the contexts, because deferred batch norms commit per replica.
                if step.places is not None and not self._accumulates:
                    for stage in self.stages:
                        stage.end_replicas()
        if trains:
            # Not after a failure: the step is repeated with the same draws.
            self.rng.end_step()
        return values

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters of the model in this process, by name."""
        objects = self._watch.objects
        if self._named is not None and self._named[0] is objects and self._watch.has_same_objects():
            return self._named[1]
        named = {
            name: p
            for name, p in self._net.named_parameters()
            if not p.is_meta and id(p) not in self._of_others
        }
        if self._watch.has_same_objects():  # not during a change or a step
            self._named = objects, named
        return named

    def local_state_dict(self) -> dict[str, Any]:
        """Returns the entries of the model's state that this process is responsible for.

        These are the entries of its stages' modules; the first process of a pipeline also has the
        entries of no stage. A tied parameter belongs to its first stage.
        """
        state: dict[str, Any] = self._net.state_dict(keep_vars=True)
        if self._world.pipeline_group is None:
            return state
        layers = [layer.module for part in self.planned.stages for layer in part]
        stages = [stage.module for stage in self.stages]
        modules = dict(self._net.named_modules(remove_duplicate=False))

        def held(by: Sequence[nn.Module]) -> set[int]:
            tensors = [t for module in by for t in (*module.parameters(), *module.buffers())]
            return {id(part) for part in (*tensors, *(m for root in by for m in root.modules()))}

        staged, own_ids = held(layers), held(stages)

        def answers(key: str, value: Any) -> bool:
            if id(value) in staged:
                return id(value) in own_ids and not value.is_meta
            # extra state of a module, or an entry of no stage
            name = key
            while name not in modules:  # the innermost module with this state
                name = name.rpartition(".")[0]
            module = id(modules[name])
            return module in own_ids or (module not in staged and self._world.pipeline_rank == 0)

        return {key: value for key, value in state.items() if answers(key, value)}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the whole model; see `HybridModel.state_dict`."""
        if self._world.pipeline_group is None:
            state: dict[str, Any] = self._net.state_dict()
            return state
        own_entries = {
            name: value.detach().cpu() if isinstance(value, Tensor) else value
            for name, value in self.local_state_dict().items()
        }
        # Collective: all processes of a pipeline call `state_dict`, although each gets the whole.
        entries = dict(self.gather(list(own_entries.items())))
        # several names of a tensor get the same tensor
        first: dict[int, str] = {}
        objects = self._net.state_dict(keep_vars=True)
        for name, value in objects.items():
            if isinstance(value, Tensor) and name in entries:
                first.setdefault(id(value), name)
        return {
            name: entries[name] if name in entries else entries[first[id(value)]]
            for name, value in objects.items()
        }

    def any_process(self, flag: bool) -> bool:
        """Returns whether `flag` is true in any process of the pipeline; a collective call."""
        if self._world.pipeline_group is None:
            return flag
        flags = torch.tensor([flag], dtype=torch.uint8)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._world.pipeline_group)
        return bool(flags)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters for an optimizer; one empty parameter if there are none."""
        return list(self.parameters.values()) or [self._no_parameter]

    def new_timeline(self, schedule: Schedule) -> Timeline:
        """Returns a timeline for the next step; its spans cover all processes."""
        world = self._world
        if world.pipeline_group is None:
            return Timeline(schedule, world.devices)
        devices = list(world.devices) * world.processes_per_replica
        peers = LanePeers(world.pipeline_rank, self.gather, partial(seconds_ahead, world))
        return Timeline(schedule, devices, peers)

    def recomputed(self, chunks: int) -> list[list[float]]:
        """Returns, by stage and micro-batch, the share of a forward that its backward recomputes.

        For single layers, this is their share of the stage's time, if the plan has times.
        """
        times = [[cost.forward_ms for cost in stage.layers] for stage in self.plan.stages]
        return self._policy.shares(times, chunks)

    @property
    def has_ties(self) -> bool:
        """True if several stages share a parameter of this process."""
        return bool(self._ties)

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        """Returns the sum over the replicas of `values`, on every process.

        Args:
            values: a CPU tensor of any shape; ignored in a process without the last stage.
        """
        return self._world.sum(values if self.owns_output else torch.zeros_like(values))

    def sync_buffers(self) -> None:
        """Copies replica 0's buffers to all replicas, as DDP does before each forward."""
        for reducer in self._reducers:
            reducer.sync_buffers()

    def grad_norm(self) -> Tensor:
        """Returns the L2 norm of the gradients of all stages' parameters, a 0-dim tensor."""
        world = self._world
        if world.pipeline_group is not None:
            return norm_over_processes(
                # All parameters, also the meta tensors of other processes' stages: the order
                # decides how the norm rounds.
                list(self._net.parameters()),
                world.pipeline_group,
                self.output_device,
                world.wire_device,
            )
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if len(self.devices) > 1 and gradients:
            return norm_over_devices(gradients)
        if not gradients:
            return get_total_norm(gradients)
        # the same operations without sorting by device, which would take longer than the norms
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms_of(gradients)))
        return norm

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients of all stages down to `max_norm`; returns their previous norm."""
        norm = self.grad_norm()
        self.clip_grads_with_norm_(max_norm, norm)
        return norm

    def clip_grads_with_norm_(self, max_norm: float, norm: Tensor) -> None:
        """Scales gradients with the norm `norm` down to `max_norm`."""
        clip_grads_with_norm_(list(self.parameters.values()), max_norm, norm)

    def gather(self, items: list[T]) -> list[T]:
        """Concatenates the lists of all processes of the pipeline, on each process."""
        if self._world.pipeline_group is None:
            return items
        return list(chain.from_iterable(objects.gather(items, self._world.pipeline_group)))
