"""HybridModel: the user's module, cut into stages, placed, and kept equal over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils._pytree import tree_map_only

from hybridtrain.errors import BatchError, ConfigError
from hybridtrain.graph.chain import ExampleInputsNeeded
from hybridtrain.memory import optimizer_bytes, resident_bytes
from hybridtrain.microbatch import batch_size, chunk_sizes, merge, split
from hybridtrain.pipeline.activation_checkpoint import CheckpointSpec, checkpoint_policy
from hybridtrain.pipeline.batch_norm import DeferredBatchNormStats
from hybridtrain.pipeline.engines.threads import Step
from hybridtrain.pipeline.layer_rng import LayerRNG, default_generator_states
from hybridtrain.pipeline.stage import Stage
from hybridtrain.pipeline.ties import remove_aliases
from hybridtrain.pipeline.timeline import Timeline
from hybridtrain.placement import Placement, PlacementOptions, place, requiring_grad
from hybridtrain.planning.plan import Plan
from hybridtrain.planning.planner import Ask
from hybridtrain.planning.split_spec import SplitSpec, check_split
from hybridtrain.schedule import (
    SCHEDULES,
    Schedule,
    forward_only,
    make_schedule,
    peak_in_flight,
)
from hybridtrain.world import World

LossFn = Callable[[Any, Any], Tensor]

AUTOCAST: dict[str, torch.dtype | None] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
BATCH_NORM = ("micro_batch", "deferred")


@dataclass(frozen=True)
class TrainStepResult:
    """What a training step gives.

    TraceGuards:
        loss: the mean over the rows of this replica's batch, 0-dim, on the last stage's device.
        samples: how many samples those were.
        timeline: the measured spans of the step, if asked for.
    """

    loss: Tensor
    samples: int
    timeline: Timeline | None = None


class HybridModel:
    """Trains `net` as a pipeline over this process's devices, in step with the other replicas.

    `net` stays the user's own module: its layers are moved to the stages' devices where they are,
    and parameters, states and checkpoints go by its names, whatever the split.

    Args:
        net: any module. An `nn.Sequential` is cut between its elements (nested ones are
            flattened); any other is traced, see `hybridtrain.graph.tracer`.
        world: the processes and devices; the stages are `world.nb_part`.
        chunks: micro-batches a batch is cut into along dim 0 (fewer if it has fewer rows).
        schedule: `1f1b` or `gpipe`.
        split: which layers go to which stage, the largest stage as small as can be: `uniform` (by
            number of layers), `size` (by parameters), `time` or `memory` (by what each layer is
            measured to cost), `balanced` (by both); `manual`: as marked by `partition` and
            `set_partition`; the path of a plan (`.yaml`); or layer counts, cut points, names or
            name patterns, see `split_layers`.
        checkpoint: what is recomputed in the backward instead of kept: `never`, whole stages for
            all micro-batches `except_last` or `always`, `{"every": k}` for every kth layer, or a
            list of layers' names.
        stages_per_device: how many stages each device has in turn; more than one interleaves them.
        max_inflight: how many micro-batches may be alive at one time; None: as the schedule has it.
        batch_norm: when running statistics move: at each `micro_batch`, as in the unsplit model
            under gradient accumulation, or `deferred` to once a step.
        sync_batch_norm: normalise over the replicas' micro-batches too (GPUs only, as in PyTorch).
        precision: `fp32`, or `bf16` or `fp16` for autocast; fp16 wants `scale_loss` in
            `train_step`.
        compile: compile each layer.
        seed: where the draws of layers such as dropout start from.
        find_unused_parameters: as in DDP: look, in each step, for parameters without a gradient.
        broadcast_buffers: as in DDP: every step begins with rank 0's buffers on all replicas. Off,
            running statistics are each replica's own until an evaluation.
        example_inputs: the inputs of a batch, as `train_step` takes them. Without, the model is divided at
            the first batch if that is needed to measure or to trace it, as where its forward has
            optional arguments.
        memory_weight: for `split="balanced"`: 0 for time alone, 1 for memory alone.
        memory_limit_gib: what a device may hold, in GiB, for a split by measured costs.
        default_partition: for `split="manual"`: the stage of what is marked for none.
        optimizer_tensors_per_param: tensors of a parameter's size that the optimizer keeps for it (AdamW 2),
            for a split by memory.

    Raises:
        SplitError, ScheduleError, ConfigError: an argument does not fit.
    """

    def __init__(
        self,
        net: nn.Module,
        world: World,
        *,
        chunks: int = 1,
        schedule: str = "1f1b",
        split: SplitSpec = "uniform",
        checkpoint: CheckpointSpec = "never",
        stages_per_device: int = 1,
        max_inflight: int | None = None,
        batch_norm: str = "micro_batch",
        sync_batch_norm: bool = False,
        precision: str = "fp32",
        compile: bool = False,
        seed: int = 0,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        example_inputs: Any = None,
        memory_weight: float = 0.2,
        memory_limit_gib: float | None = None,
        default_partition: int | None = None,
        optimizer_tensors_per_param: int = 2,
    ) -> None:
        _check("pipeline.schedule", schedule, SCHEDULES)
        _check("pipeline.batch_norm", batch_norm, BATCH_NORM)
        _check("trainer.precision", precision, AUTOCAST)
        check_split(split)
        if chunks < 1:
            raise ConfigError(
                f"pipeline.chunks={chunks} must be a positive number of micro-batches"
            )
        for key, value in (
            ("stages_per_device", stages_per_device),
            ("max_inflight", max_inflight),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"pipeline.{key}={value} must be at least 1")
        if sync_batch_norm and world.size > 1:
            if world.devices[0].type != "cuda":
                raise ConfigError("pipeline.sync_batch_norm=true needs GPUs: PyTorch's is for them")
            if len(set(world.devices)) < world.nb_part:
                raise ConfigError(
                    "pipeline.sync_batch_norm=true needs a GPU of its own for every stage: NCCL's "
                    "collectives of two stages on one GPU may wait for one another"
                )
            net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
        self.net = net
        self.world = world
        self.chunks = chunks
        self._broadcast_buffers = broadcast_buffers
        self._schedule_name = schedule
        self._stages_per_device = stages_per_device
        self._max_inflight = max_inflight
        self._autocast = AUTOCAST[precision]
        self.rng = LayerRNG(seed, world.rank)
        remove_aliases(net)
        checkpoint_policy(checkpoint, None)
        self._deferred = DeferredBatchNormStats(net) if batch_norm == "deferred" else None
        self._loss_gradients: dict[tuple[float, torch.dtype], Tensor] = {}
        self._gpus = sorted({device.index for device in world.devices if device.type == "cuda"})
        self._ask = Ask(
            split=split,
            world=world,
            stages_per_device=stages_per_device,
            schedule=schedule,
            chunks=chunks,
            in_flight=peak_in_flight(self.schedule(chunks)),
            memory_weight=memory_weight,
            memory_limit_gib=memory_limit_gib,
            default_partition=default_partition,
            optimizer_tensors_per_param=optimizer_tensors_per_param,
            precision=self.precision,
            recomputes=checkpoint in ("always", "except_last"),
        )
        self._options: PlacementOptions = {
            "checkpoint": checkpoint,
            "compile": compile,
            "find_unused_parameters": find_unused_parameters,
        }
        self._placed: Placement | None = None
        with suppress(ExampleInputsNeeded):
            self._placed = self._place(example_inputs)

    @property
    def stages(self) -> list[Stage]:
        """The stages, in the order of the pipeline.

        Raises:
            ConfigError: the model waits for its first batch to be divided.
        """
        return self._in_place.stages

    @property
    def plan(self) -> Plan:
        """How the model is divided, and from what costs."""
        return self._in_place.plan

    @property
    def _in_place(self) -> Placement:
        if self._placed is None:
            raise ConfigError(
                "the model is divided at its first batch, which is needed to measure or to trace "
                "it: pass HybridModel(..., example_inputs=<the inputs of a batch>) to have it divided now"
            )
        return self._placed

    def _place(self, example_inputs: Any) -> Placement:
        """Divides the model and brings its stages to their devices; a collective call."""
        if example_inputs is not None:
            example_inputs = split(
                example_inputs, chunk_sizes(batch_size(example_inputs), self.chunks)
            )[0]
        return place(self.net, self._ask, self.rng, example_inputs, **self._options)

    def _place_by(self, inputs: Any) -> Placement:
        """The placement; the first batch may have to bring it about."""
        if self._placed is None:
            if inputs is None:
                raise BatchError(
                    "the inputs of the first batch, which the model is traced by, are None"
                )
            self._placed = self._place(inputs)
        return self._placed

    def schedule(self, chunks: int) -> Schedule:
        """The table that a step of `chunks` micro-batches follows."""
        return make_schedule(
            self._schedule_name,
            self.world.nb_part,
            chunks,
            self._stages_per_device,
            self._max_inflight,
        )

    def train_step(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: LossFn,
        *,
        weight: float = 1.0,
        sync: bool = True,
        scale_loss: Callable[[Tensor], Tensor] | None = None,
        timeline: bool = False,
    ) -> TrainStepResult:
        """Runs forward, loss and backward of a batch; gradients are added to `parameter.grad`.

        With several replicas, all call it together, each with its own batch, and the gradients
        become the mean over the replicas of what each would have had alone.

        Args:
            inputs: a pytree of tensors with the rows in dim 0; what the first layer is given.
            targets: likewise; None if `loss_fn` needs none.
            loss_fn: `loss_fn(output, targets)` gives, for one micro-batch, the mean of the loss
                over its rows. Micro-batches count by their rows.
            weight: what the gradient is multiplied by. A replica that has `rows` of the `total`
                rows of a step passes `rows * replicas / total` when these differ among replicas.
            sync: False to add up gradients without averaging them over the replicas yet; the
                last `train_step` before the optimizer must have it True.
            scale_loss: applied to what the backward starts from, such as `GradScaler.scale`.
            timeline: record the spans of the step.

        Raises:
            BatchError: the batch is empty or its parts do not fit together.
            Exception: what a layer or `loss_fn` raised, as itself, with a note that names the
                layer, the stage and the micro-batch. Gradients are incomplete then.
        """
        rows = batch_size(inputs, targets)
        sizes = chunk_sizes(rows, self.chunks)
        placed = self._place_by(inputs)
        target_parts = split(self.to_last(targets), sizes)
        losses: list[Tensor | None] = [None] * len(sizes)
        gradients: list[Tensor | None] = [None] * len(sizes)

        def head(microbatch: int, output: Any) -> Tensor:
            loss = loss_fn(output, target_parts[microbatch])
            if not isinstance(loss, Tensor) or loss.dim():
                raise BatchError(f"loss_fn must return a 0-dim tensor, the mean, not {loss!r}")
            losses[microbatch] = loss.detach()
            share = weight * sizes[microbatch] / rows
            gradients[microbatch] = self._loss_gradient(share, loss.dtype)
            return loss if scale_loss is None else scale_loss(loss)

        recorded = Timeline(self.world.devices) if timeline else None
        if requiring_grad(self.net, self.world) != placed.trained:
            raise ConfigError(
                "requires_grad of a parameter has changed since HybridModel was made, and the "
                "replicas would not average its gradient: freeze first, or make a new HybridModel"
            )
        if self._broadcast_buffers:
            self.sync_buffers()
        placed.refresh()
        self.rng.active = self.net.training
        with torch.enable_grad(), self.precision():
            step = Step(
                lanes=self.schedule(len(sizes)).lanes,
                inputs=split(inputs, sizes),
                head=head,
                recompute=[placed.policy.whole_stage(i, len(sizes)) for i in range(len(sizes))],
                loss_gradients=gradients,
                reduce=sync,
                trace=recorded,
            )
        before = default_generator_states(self._gpus)
        with self._statistics():
            placed.engine.run(step)
        self.rng.end_step(drew=default_generator_states(self._gpus) != before)
        for stage in self.stages:
            for alias in stage.aliases:
                alias.accumulate_into_owner()
        return TrainStepResult(
            _weighted_mean([x for x in losses if x is not None], sizes), rows, recorded
        )

    def __call__(self, inputs: Any) -> Any:
        """The model's output for a batch, pipelined, on the last stage's device.

        It carries no graph; `train_step` is what trains. In `train()` mode dropout is active and
        running statistics move, as in any module.
        """
        return merge(self.map_outputs(inputs, None, lambda output, _: output))

    def map_outputs(
        self, inputs: Any, targets: Any, function: Callable[[Any, Any], Any]
    ) -> list[Any]:
        """Runs a forward, and `function(output, targets)` of each micro-batch, without a graph.

        Returns:
            the results in the order of the micro-batches, on the process of the last stage; an
            empty list on the others.
        """
        sizes = chunk_sizes(batch_size(inputs, targets), self.chunks)
        placed = self._place_by(inputs)
        target_parts = split(self.to_last(targets), sizes)
        results: list[Any] = [None] * len(sizes)

        def head(microbatch: int, output: Any) -> Any:
            results[microbatch] = function(output, target_parts[microbatch])
            return None

        placed.refresh()
        self.rng.active = self.net.training
        with torch.no_grad(), self.precision():
            step = Step(
                lanes=forward_only(self.world.nb_part, len(sizes), self._stages_per_device),
                inputs=split(inputs, sizes),
                head=head,
                recompute=[False] * len(sizes),
            )
        before = default_generator_states(self._gpus)
        with self._statistics():
            placed.engine.run(step)
        if self.net.training:
            self.rng.end_step(drew=default_generator_states(self._gpus) != before)
        return results

    def train(self, mode: bool = True) -> HybridModel:
        """Sets training mode, as `nn.Module.train`."""
        if mode and not self.net.training:
            self.rng.redetect()
        self.net.train(mode)
        return self

    def eval(self) -> HybridModel:
        """Sets evaluation mode, as `nn.Module.eval`."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.net.training

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of `net`, for an optimizer."""
        return self.net.parameters()

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """The parameters of `net` under its own names."""
        return self.net.named_parameters()

    def zero_grad(self) -> None:
        """Drops the gradients."""
        self.net.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """The state of `net` under its own names; `net.load_state_dict` takes it."""
        return self.net.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Loads a state of `net`, of this or any other split. All replicas must load the same."""
        return self.net.load_state_dict(state, strict=strict)

    def sync_buffers(self) -> None:
        """Copies rank 0's buffers to all replicas, as DDP does before each forward."""
        for stage in self.stages:
            if stage.replica is not None:
                stage.replica.sync_buffers()

    def memory_bytes(self) -> list[int]:
        """The most memory each stage held so far, in bytes.

        On a GPU the allocator's own peak. On a CPU a count: parameters, gradients, buffers, and
        the activations of one micro-batch times as many as the schedule holds.
        """
        held = peak_in_flight(self.schedule(self.chunks))
        return [
            torch.cuda.max_memory_allocated(stage.device)
            if stage.device.type == "cuda"
            else resident_bytes(stage.module) + held[stage.index] * (stage.saved_bytes or 0)
            for stage in self.stages
        ]

    def grad_norm(self) -> Tensor:
        """Returns the 2-norm of the gradients of all stages together, 0-dim."""
        return get_total_norm([p.grad for p in self.parameters() if p.grad is not None])

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients to a norm of at most `max_norm`; returns the norm before it."""
        return clip_grad_norm_(self.parameters(), max_norm)

    def reduce_loss(self, sums: Tensor) -> Tensor:
        """Sums over the replicas values that are known where the last stage is; a collective."""
        return self.world.sum(sums)

    def stage_summaries(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """Returns `layers`, `parameters` and `peak_memory_bytes` of each stage."""
        return [
            {
                "layers": [layer.name for layer in stage.layers],
                "parameters": stage.count_parameters(),
                # on a GPU the allocator has counted the optimizer's state already
                "peak_memory_bytes": memory
                + (stage.device.type != "cuda") * optimizer_bytes(stage.module, optimizer),
            }
            for stage, memory in zip(self.stages, self.memory_bytes(), strict=True)
        ]

    def to_last(self, targets: Any) -> Any:
        """`targets` on the device where the outputs are."""
        device = self.stages[-1].device
        if targets is None or (type(targets) is Tensor and targets.device == device):
            return targets
        return tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), targets)

    def _loss_gradient(self, share: float, dtype: torch.dtype) -> Tensor:
        """What the backward of a micro-batch starts from; made once for each share and dtype."""
        key = share, dtype
        if key not in self._loss_gradients:
            if len(self._loss_gradients) == 64:  # shares that change from step to step
                self._loss_gradients.clear()
            device = self.stages[-1].device
            self._loss_gradients[key] = torch.full((), share, dtype=dtype, device=device)
        return self._loss_gradients[key]

    def _statistics(self) -> AbstractContextManager[object]:
        return nullcontext() if self._deferred is None else self._deferred.step()

    def precision(self) -> AbstractContextManager[object]:
        """The autocast that this model computes under, for a loss outside of `train_step`."""
        if self._autocast is None:
            return nullcontext()  # and so the caller's own autocast, if any
        device_type = self.world.devices[0].type
        return torch.autocast(device_type, dtype=self._autocast, cache_enabled=False)


def _weighted_mean(losses: list[Tensor], sizes: list[int]) -> Tensor:
    if len(losses) == 1:
        return losses[0]
    stacked = torch.stack(losses)
    stacked = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
    weights = stacked.new_tensor([float(size) for size in sizes])
    return (stacked * weights).sum() / sum(sizes)


def _check(key: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}={value} is unknown; there are: {', '.join(allowed)}")
