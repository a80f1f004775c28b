"""HybridModel: a user's module, run as a pipeline of stages and kept in sync across replicas.

The functions before the class check arguments and raise errors for `nn.Module` methods that a
`HybridModel` replaces.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import Parameter, is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridtrain._base import codec
from hybridtrain._base.accelerator import put
from hybridtrain._base.adapter import BaseWeights
from hybridtrain._base.attention import AUTO, attention_kernel, check_attention
from hybridtrain._base.microbatch import (
    Microbatch,
    MicrobatchCut,
    as_containers,
    batch_size,
    check_samples,
    first_share,
    merge,
    split,
)
from hybridtrain._base.precision import AUTOCAST, forward_context
from hybridtrain._base.repacked_weights import keep_weights_for_training
from hybridtrain._base.shares import MicrobatchPlace, Shares
from hybridtrain._base.torch_private import without_torch_function
from hybridtrain._base.values import named_leaves
from hybridtrain.errors import BatchError, ConfigError, UserError, argument, setting
from hybridtrain.graph import check_unwrapped, is_chain, layers_of
from hybridtrain.loss import (
    BatchWeight,
    CountedLoss,
    LossFn,
    ShareLoss,
    StepWeights,
    resolve,
    zero_of,
)
from hybridtrain.models.quantized import describe_plain_weights
from hybridtrain.options import PipelineOptions, with_settings
from hybridtrain.partitioning import Plan, PlannedLayers, Planner, needs_costs
from hybridtrain.pipeline import (
    BatchCheck,
    Head,
    HeadOutput,
    HeldGraphs,
    LayerRNG,
    Pipeline,
    SettingsCheck,
    StepKind,
    Timeline,
    check_same_bits,
    check_same_modules,
    check_schedule,
    construct_own_stages,
    memory_bytes,
    remove_aliases,
    stage_summaries,
    unscale_,
    with_device_speeds,
    with_sync_batch_norm,
)
from hybridtrain.schedule import Schedule, forward_only, make_schedule
from hybridtrain.verification import (
    CutModel,
    FirstSteps,
    ForwardCheck,
    Verification,
    loss_facts,
    verify,
)
from hybridtrain.world import World

_FROM_SPLIT = ("pipeline", "plan", "planned", "stages")
_MOVES = ("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "type", "to_empty")


def check_arguments(net: Any, world: Any, options: Any, *, constructs: bool = False) -> None:
    """Checks the types of the arguments of `HybridModel` or `HybridModel.construct`.

    Raises:
        ConfigError: an argument has the wrong type; the message shows a correct call.
    """
    call = "HybridModel(net, World.from_env(nb_part=2), chunks=4)"
    if constructs:
        call = "HybridModel.construct(lambda: MyNet(), World.from_env(nb_part=2), chunks=4)"
        if isinstance(net, nn.Module) or not callable(net):
            value = f"the module {type(net).__name__}" if isinstance(net, nn.Module) else f"{net!r}"
            raise ConfigError(
                f"build= must be a function that returns the module, not {value[:200]}: {call}"
            )
    elif not isinstance(net, nn.Module):
        is_class = isinstance(net, type) and issubclass(net, nn.Module)
        value = f"the class {net.__name__}, not an instance of it" if is_class else f"{net!r}"
        raise ConfigError(f"net= must be a torch.nn.Module, not {value[:200]}: {call}")
    if world is None:
        raise ConfigError(f"missing argument world= (the processes and devices): {call}")
    if not isinstance(world, World):
        raise ConfigError(f"world= must be a World, not {str(world)[:200]}: {call}")
    if not isinstance(options, PipelineOptions | None):
        raise ConfigError(
            f"options= must be a PipelineOptions, not {str(options)[:200]}; pass single settings "
            f"by name: {call}"
        )


def _settings_of(loss_fn: LossFn) -> Sequence[Any]:
    """Returns the settings of a loss module that decide what it counts, and may be assigned."""
    if not isinstance(loss_fn, nn.Module):
        return ()
    return [getattr(loss_fn, name, None) for name in ("weight", "ignore_index", "reduction")]


def _is_same_loss(resolved: tuple[LossFn, CountedLoss, Sequence[Any]], loss_fn: LossFn) -> bool:
    return resolved[0] is loss_fn and all(map(is_, resolved[2], _settings_of(loss_fn)))


def sequence_first_layer(net: nn.Module) -> str | None:
    """Returns the name of the first layer if it expects the batch dimension in dim 1."""
    first = layers_of(net)[0]
    module = first.module
    if isinstance(module, nn.TransformerEncoder):
        module = module.layers[0]
    if isinstance(module, nn.TransformerEncoderLayer):
        module = module.self_attn
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first:
        return first.name or type(net).__name__
    return None


def check_grad_mode() -> None:
    """Raises a UserError under `torch.inference_mode()`, which disables gradients."""
    if torch.is_inference_mode_enabled():
        raise UserError(
            "train_step computes gradients, but runs under torch.inference_mode(), which disables "
            "them: leave inference_mode before training"
        )


def leaves_without_graph(name: str, values: Any) -> Any:
    """Returns the inputs or targets of a batch as containers; their tensors have no graph.

    All micro-batches would run the backward of that one graph, which PyTorch allows once.

    Raises:
        BatchError: a tensor has a graph.
    """
    if type(values) is Tensor and values.grad_fn is None:  # most often
        return values
    values = as_containers(values)
    if not any(isinstance(leaf, Tensor) and leaf.grad_fn for leaf in tree_leaves(values)):
        return values
    for place, leaf in named_leaves(values, name):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            raise BatchError(
                f"{place} was computed from a tensor that requires a gradient "
                f"({leaf.grad_fn.name()}), and the backwards of all micro-batches would run "
                f"through that computation: pass {place}.detach(), or move the computation into "
                "the model's forward (or the loss), which then trains it"
            )
    return values


def check_fixed_replicas(options: PipelineOptions, world: World) -> None:
    """Refuses options that would make results depend on the number of processes.

    Raises:
        ConfigError: such an option is set.
    """
    if not options.broadcast_buffers:
        raise ConfigError(
            f"{setting('broadcast_buffers', False)} keeps separate buffers per process, but a "
            f"fixed number of replicas uses replica 0's buffers everywhere: remove this setting"
        )
    if options.find_unused_parameters:
        raise ConfigError(
            f"{setting('find_unused_parameters', True)} depends on each process's last backward "
            f"pass, but results of a fixed number of replicas must not depend on the number of "
            f"processes: remove this setting"
        )
    if world.logical_replicas == world.data_parallel_size:
        return
    if options.sync_batch_norm:
        raise ConfigError(
            f"{setting('sync_batch_norm', True)} needs all {world.logical_replicas} replicas to "
            f"run at the same time, but {world.data_parallel_size} processes run them one after "
            f"another: start one process per replica"
        )


def check_loss_function(loss_fn: Any, net: nn.Module, world: World) -> None:
    """Checks the loss function of a training step.

    Raises:
        ConfigError: it is not a function (often because arguments are swapped), or it has
            trainable parameters, which would diverge between the replicas.
    """
    if not callable(loss_fn):
        raise ConfigError(
            f"{argument('loss_fn')} must be a function, not a {type(loss_fn).__name__}: the "
            "signature is train_step(inputs, targets, loss_fn)"
        )
    if world.data_parallel_size > 1 and (trained := trained_by_loss(loss_fn, net)):
        raise ConfigError(
            f"the loss has trainable parameters ({', '.join(trained[:3])}), but only gradients of "
            f"the model's parameters are averaged over the replicas: move them into the model, "
            f"which may return them next to its output, or freeze them with requires_grad_(False)"
        )


def trained_by_loss(loss_fn: Any, net: nn.Module) -> list[str]:
    """Returns the names of a loss's trainable parameters that are not parameters of the model."""
    inner: Any = loss_fn
    while not isinstance(inner, nn.Module):
        if isinstance(inner, partial):
            inner = inner.func
        elif isinstance(inner, CountedLoss):
            inner = inner.function
        elif isinstance(getattr(inner, "__self__", None), nn.Module):
            inner = inner.__self__
        else:
            return []
    trainable = [(name, p) for name, p in inner.named_parameters() if p.requires_grad]
    if not trainable:
        return []
    model_parameters = {id(parameter) for parameter in net.parameters()}
    return [name for name, parameter in trainable if id(parameter) not in model_parameters]


NO_GRAPH = (
    "model(inputs) returns an output without a graph, so calling backward on it would fail. To "
    "train, call model.train_step(inputs, targets, loss_fn), which runs forward, loss and "
    "backward. For inference, call the model under torch.no_grad()"
)


class StepLoss(Tensor):
    """The loss of a step: a tensor without a graph, with a clear error when `backward` is
    called."""

    # results of operations on it are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a UserError, because `train_step` has already run the backward pass."""
        raise UserError(
            "train_step has already run the backward pass: the gradients are in parameter.grad, so "
            "call optimizer.step() next"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles a plain tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        """Returns a plain tensor."""
        return self.as_subclass(Tensor).clone()

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))


def no_attribute(net: nn.Module | None, name: str) -> NoReturn:
    """Raises an AttributeError that says what to use instead of `name`."""
    if name in _FROM_SPLIT:
        raise UserError(
            f"the model has no {name} before its first batch, which shows where its forward can be "
            f"split: pass {argument('example_inputs')}<the inputs of a batch>, or call "
            "model.split_for(inputs)"
        )
    text = f"'HybridModel' object has no attribute {name!r}"
    if name in _MOVES:
        text += (
            ": its layers are on the devices of their stages, set by World.from_env(devices=...). "
            "Convert the module before wrapping it; to compute in bf16 or fp16, set "
            f"{argument('precision')}"
        )
    elif name == "forward":
        text += ": call model(inputs), or model.train_step(inputs, targets, loss_fn) to train"
    elif name == "backward":
        text += ": model.train_step(inputs, targets, loss_fn) runs the backward"
    elif net is not None and hasattr(net, name):
        text += f": a HybridModel is not an nn.Module. Use the wrapped module: model.net.{name}"
    raise AttributeError(text)


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainStepResult:
    """Result of a training step.

    Attributes:
        loss: the mean of the loss over this replica's batch, a 0-dim tensor on the last stage's
            device. It is a mean over samples, or over the items that the loss function counts; 0
            if it counts none, NaN in a process without the last stage.
        samples: the number of samples in this replica's batch.
        count: the number of samples or counted items that `loss` is the mean of.
        timeline: the measured times of the step's actions, if requested.
        share_losses: the loss of each logical replica of this process; empty if there is only one.
    """

    loss: Tensor
    samples: int
    timeline: Timeline | None = None
    count: float = 0
    share_losses: Sequence[ShareLoss] = ()


class HybridModel:
    """Trains `net` as a pipeline of stages, together with the other replicas.

    `net` stays the user's module: its layers are moved to the devices of their stages in place.
    Parameters, state dicts and checkpoints keep its names, whatever the split.

    Args:
        net: any module. An `nn.Sequential` is split between its elements (nested ones are
            flattened), any other module between the submodules that its forward calls.
        world: the processes and devices; `world.nb_part` devices form one pipeline.
        options: how to split and run the model; see `PipelineOptions`.
        example_inputs: the inputs of a batch, as for `train_step`, in which layers are found and
            measured. None: the first batch. `engine="distributed"` needs them at construction,
            unless the model is an `nn.Sequential` that is split without costs.
        **settings: fields of `options` to change: `HybridModel(net, world, chunks=8)`.

    Attributes:
        net: the module.
        world: the processes.
        options: the settings.
        pipeline: the stages that this process owns, and operations on the whole model.
        stages: the stages of this process, in pipeline order.
        plan: the split into stages, and the layer costs it is based on.
        planned: the layers of all stages at planning time; layers of other processes are on the
            meta device.
        changes: how often parameters have been frozen or unfrozen since construction.
        base: the frozen weights of a model with an adapter, once `init_from` has loaded them.
        rng: seeds the random operations of the layers; checkpoints store its `step`.
        is_split: whether the model has been split, at construction or by its first batch. Until
            then `pipeline`, `stages`, `plan` and `planned` are not available.

    Raises:
        SplitError, ScheduleError, ConfigError: an argument is invalid, or `example_inputs` is
            required.
    """

    @torch.inference_mode(False)  # construction may create parameters
    def __init__(
        self,
        net: nn.Module,
        world: World | None = None,
        options: PipelineOptions | None = None,
        *,
        example_inputs: Any = None,
        **settings: Any,
    ) -> None:
        check_arguments(net, world, options)
        assert world is not None
        options = with_settings(options or PipelineOptions(), settings)
        options = with_device_speeds(options, world)
        check_same_bits(world)
        check_schedule(options, world)
        if options.sync_batch_norm:
            net = with_sync_batch_norm(net, world)
        remove_aliases(net)
        check_unwrapped(net)
        self._begin(net, world, options)
        needs_inputs = needs_costs(options) or not is_chain(net)
        is_early = example_inputs is not None or not needs_inputs
        if is_early or world.processes_per_replica > 1:
            self.split_for(example_inputs)
        else:
            for tensor in (*net.parameters(), *net.buffers()):
                if not is_lazy(tensor):
                    world.broadcast_tensor(tensor.data)

    @classmethod
    @torch.inference_mode(False)
    def construct(
        cls,
        build: Callable[[], nn.Module],
        world: World | None = None,
        options: PipelineOptions | None = None,
        *,
        example_inputs: Any = None,
        **settings: Any,
    ) -> HybridModel:
        """Returns a `HybridModel` of `build()`, built stage by stage with `engine="distributed"`.

            torch.manual_seed(0)
            model = HybridModel.construct(lambda: gpt(50257, 1024), world, split=[6, 6, 6, 9])

        With that engine, each process initializes only the weights of its stages, bitwise
        identical to `HybridModel(build(), ...)` under the same seeds. No process holds the whole
        model. Some models cannot be built in parts: their constructor reads tensor values, or their
        modules are lazy. Each process then builds the whole model, and logs the reason. Stages that
        are built in parts are not compared with plain PyTorch (`self_check`).

        Args:
            build: a function without arguments, or a class, that returns the module on the CPU. It
                runs several times and must return a new module each time.
            world: as in `HybridModel`.
            options: as in `HybridModel`.
            example_inputs: as in `HybridModel`.
            **settings: as in `HybridModel`.

        Raises:
            ConfigError: `build` is not a function.
            SplitError, ScheduleError, ConfigError: as in `HybridModel`.
        """
        check_arguments(build, world, options, constructs=True)
        assert world is not None
        options = with_settings(options or PipelineOptions(), settings)
        options = with_device_speeds(options, world)
        check_same_bits(world)
        check_schedule(options, world)

        def make() -> nn.Module:
            net = build()
            check_arguments(net, world, options)
            return with_sync_batch_norm(net, world) if options.sync_batch_norm else net

        parts = construct_own_stages(make, world, options, example_inputs)
        if parts is None:
            return cls(build(), world, options, example_inputs=example_inputs)
        model = cls.__new__(cls)
        model._begin(parts.net, world, options)
        model._cut_into(parts.plan, parts.planned)
        return model

    def _begin(self, net: nn.Module, world: World, options: PipelineOptions) -> None:
        keep_weights_for_training(net)
        self.net = net
        self.world = world
        self.options = options
        self.changes = 0
        self.base: BaseWeights | None = None
        self.is_split = False
        self.rng = LayerRNG.of_world(options.seed, world, options.compile)
        if world.size > 1:
            codec.allow(codec.classes_around({type(module) for module in net.modules()}))
        check_same_modules(net, world)
        self._batch_check = BatchCheck(world)
        self._settings_check = SettingsCheck(world)
        self._sequence_first = sequence_first_layer(net)
        # the most recent loss, and its settings then
        self._resolved: tuple[LossFn, CountedLoss, Sequence[Any]] | None = None
        self._says_no_graph = False  # warn only once
        if world.fixed_replicas is not None:
            check_fixed_replicas(options, world)
        if options.shard != "none" and world.data_parallel_size == 1:
            shard = setting("shard", options.shard)
            log.info("%s has no effect with a single replica", shard)
        self._device_type = world.devices[0].type
        self._is_plain = options.precision == "fp32" and options.attention == AUTO
        types = (p.dtype for p in net.parameters() if p.is_floating_point())
        dtype = AUTOCAST[options.precision] or next(types, torch.float32)
        check_attention(options.attention, world.devices, dtype)
        self._schedules: dict[int, Schedule] = {}  # by the number of micro-batches
        self._ones: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    @torch.inference_mode(False)
    def split_for(self, inputs: Any) -> None:
        """Splits the model for the inputs of a batch, unless it has been split.

        The constructor does it with `example_inputs`, or else the first batch does. All processes
        call it together.

        Args:
            inputs: the inputs of a batch, as for `train_step`.

        Raises:
            SplitError, ConfigError: as in the constructor.
        """
        if self.is_split:
            return
        net, world, options = self.net, self.world, self.options
        owners = world.stage_owners
        planner = Planner(net, options, inputs, owners)
        plan = world.from_main(planner.plan)
        planned = planner.layers_of(plan)
        if world.processes_per_replica > 1 and inputs is not None:
            # the only time at which a process has the whole model
            check = ForwardCheck(CutModel(net, plan, planned, options, world))
            world.on_main(partial(check.check_at_construction, inputs))
        self._cut_into(plan, planned)

    def _cut_into(self, plan: Plan, planned: PlannedLayers) -> None:
        net, world, options = self.net, self.world, self.options
        self.pipeline = Pipeline(net, plan, planned, world, options, rng=self.rng)
        self._checks = FirstSteps(CutModel(net, plan, planned, options, world), self.pipeline)
        self.plan = plan
        self.planned = planned
        self.stages = self.pipeline.stages
        self.is_split = True
        if world.is_main and (planned.head.names or options.head == "fused"):
            chosen = "fused" if planned.head.names else "plain"
            log.info("%s: %s", setting("head", chosen), planned.head.reason)
        if world.is_main and (plain_weights := describe_plain_weights(net)):
            log.info("%s", plain_weights)

    def follow_changes(self, trains: bool) -> None:
        """Follows changes of `requires_grad` in `net`; each step does it, see `check_batch`.

        Args:
            trains: whether a backward follows.

        Raises:
            ConfigError: modules or parameters were replaced, converted or moved.
        """
        names = self.pipeline.frozen_or_freed()
        # frozen parameters do not change a forward, which one replica may run alone
        if names and trains:
            self.pipeline.follow_requires_grad(names)
            self.changes += 1

    def _run_forward(
        self,
        parts: Sequence[Any],
        head: Head,
        places: Sequence[MicrobatchPlace] | None = None,
        kind: StepKind | None = None,
    ) -> list[Any]:
        schedule = self._forward_schedule(len(parts))
        with self.autocast():
            return self.pipeline.run_forward(
                schedule, parts.__getitem__, head, places, self._batch_check, kind
            )

    def _evaluate(self, parts: Sequence[Any], head: Head) -> list[Any]:
        """Runs a forward without dropout and without updates of running statistics."""
        with self.evaluating():
            return self._run_forward(parts, head)

    def _forward_schedule(self, chunks: int) -> Schedule:
        options, devices = self.options, self.world.nb_part
        return forward_only(devices, chunks, options.stages_per_device, options.placement)

    def schedule(self, chunks: int) -> Schedule:
        """Returns the training schedule for `chunks` micro-batches."""
        if chunks not in self._schedules:
            options = self.options
            shape = self.world.nb_part, chunks, options.stages_per_device
            made = make_schedule(options.schedule, *shape, options.max_inflight)
            self._schedules[chunks] = made
        return self._schedules[chunks]

    def train_step(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: LossFn,
        *,
        weight: float | BatchWeight | None = None,
        sync: bool = True,
        scale_loss: Callable[[Tensor], Tensor] | None = None,
        timeline: bool = False,
    ) -> TrainStepResult:
        """Runs forward, loss and backward for a batch; adds the gradients to `parameter.grad`.

        All replicas call it together, each with its own batch. The gradients become the mean over
        the replicas.

        Args:
            inputs: a pytree of tensors with the batch in dim 0, passed to the first layer. NumPy
                arrays, and lists without tensors that are as long as the batch, are split as well;
                wrap values that must not be split in `hybridtrain.shared`.
            targets: as `inputs`; None if `loss_fn` needs none.
            loss_fn: `loss_fn(output, targets)` returns the mean loss over the samples of one
                micro-batch. Wrap a mean over something else, such as the targets that are not
                ignored, in `SumLoss` or `MeanLoss`; `cross_entropy` and `nll` from PyTorch and
                `hybridtrain.loss` need no wrapper.
            weight: an element of `step_weights`, which weights the batches of a step and of the
                replicas. A number scales the gradient of the batch mean. None: 1, or for a loss
                with a count this batch's weight among the replicas.
            sync: False to accumulate gradients without averaging them over the replicas yet; the
                last `train_step` before `optimizer.step` needs True.
            scale_loss: applied to the loss before the backward, such as `GradScaler.scale`.
            timeline: record the start and end of every action.

        Raises:
            BatchError: the batch is empty, or its tensors differ in their number of samples.
            Exception: raised by a layer or `loss_fn`, with a note that names the layer, stage and
                micro-batch. Gradients are incomplete in this case.
        """
        check_grad_mode()
        check_loss_function(loss_fn, self.net, self.world)
        inputs = leaves_without_graph("inputs", inputs)
        targets = leaves_without_graph("targets", targets)
        if not self.is_split:
            self.split_for(first_share(inputs))
        self.follow_changes(trains=True)
        loss = self._compared_loss(loss_fn)
        if sync and not self._settings_check.is_done:  # the same number on all ranks
            self._settings_check.begin_step(self.pipeline)
        self._batch_check.begin(inputs, targets)
        cut = self._cut(inputs, targets)
        sizes = cut.sizes
        if self.options.sync_batch_norm:
            self._check_synchronised(len(sizes))
        # first-step checks use the first logical replica's share, which is a whole batch for them
        compared = inputs, targets, sizes
        if cut.places is not None:
            compared = first_share(inputs), first_share(targets), cut.of_first_share
        kind = self._checked_kind(compared[0], compared[2], len(sizes), trains=True)
        input_parts = cut.of(inputs)
        target_parts = cut.of(self.to_output_device(targets))
        if not isinstance(weight, BatchWeight):
            weight = self._weight_alone(loss, inputs, targets, weight)
        elif weight.microbatches != len(sizes):
            raise BatchError("weight= belongs to another batch: pass step_weights in batch order")
        batch_weight = weight
        is_whole = batch_weight.is_single_microbatch
        proof = self._checks.of_loss(
            loss,
            *compared,
            is_whole=is_whole,
            has_targets=self._batch_check.has_targets,
            evaluate=self._evaluate,
        )

        def head(microbatch: int, output: Any) -> HeadOutput:
            if proof is not None and microbatch < len(compared[2]):
                proof.observe(microbatch, output)
            # the mean over zero items would be NaN
            factor = batch_weight.weights[microbatch]
            value = loss(output, target_parts[microbatch]) if factor else zero_of(output)
            root = value if scale_loss is None else scale_loss(value)
            with without_torch_function():  # the engine's mode need not see these
                value = value.detach()
                # scale - 0 x value: NaN if the value is not finite, even if its derivative is
                # finite. All replicas then see NaN in the averaged gradients and skip the step
                # together
                scale = batch_weight.grad_scales[microbatch]
                if scale == 1:  # such as for a batch of one micro-batch in one process
                    gradient = torch.sub(self._one(value), value, alpha=0)
                else:
                    gradient = torch.rsub(value, scale, alpha=0)
            return HeadOutput(value, root, gradient)

        schedule = self.schedule(len(sizes))
        recorded = self.pipeline.new_timeline(schedule) if timeline else None
        run = partial(
            self.pipeline.run_train_step,
            schedule,
            input_parts.__getitem__,
            head,
            reduce=sync,
            timeline=recorded,
            places=cut.places,
            batch_check=self._batch_check,
            kind=kind,
        )
        if self._is_plain and torch.is_grad_enabled():
            losses = run()
        else:
            with torch.enable_grad(), self.autocast():
                losses = run()
        self._batch_check.finish()
        mean = batch_weight.mean(losses)
        if type(mean) is Tensor:
            mean = mean.as_subclass(StepLoss)
        shares = batch_weight.share_losses(losses) if cut.places is not None else ()
        return TrainStepResult(mean, sum(sizes), recorded, batch_weight.counted, shares)

    def _one(self, like: Tensor) -> Tensor:
        """Returns 1 as a tensor of a dtype and device; making one takes as long as an operation."""
        key = like.dtype, like.device
        one = self._ones.get(key)
        if one is None:
            one = self._ones[key] = torch.ones((), dtype=like.dtype, device=like.device)
        return one

    def _weight_alone(
        self, loss: CountedLoss, inputs: Any, targets: Any, weight: float | None
    ) -> BatchWeight:
        """Returns the weight of a batch that is a whole step; see `train_step`."""
        total = None
        if weight is None and self.world.fixed_replicas is None:
            # a loss without a count gives all replicas equal weights, as for equal batch sizes
            total = batch_size(inputs, targets) * self.world.data_parallel_size
        elif weight is None and loss.counts_samples:
            weight = 1.0
        batches, chunks = [(inputs, targets)], self.options.chunks
        return StepWeights(loss, batches, chunks, self.world, total=total, weight=weight)[0]

    def step_weights(
        self,
        batches: Sequence[tuple[Any, Any]],
        loss_fn: LossFn,
        *,
        samples: Sequence[int] | None = None,
        total: int | None = None,
    ) -> StepWeights:
        """Returns the `weight` of each batch of an optimizer step, for `train_step`.

        With these weights, the accumulated gradients are the gradient of the mean over all batches
        of all replicas: over samples, or over the items that `loss_fn` counts. All replicas call it
        together. It starts an all-reduce of one number, which the last stage's first forward waits
        for.

            weights = model.step_weights(batches, loss_fn)
            for index, (inputs, targets) in enumerate(batches):
                last = index + 1 == len(batches)
                model.train_step(inputs, targets, loss_fn, weight=weights[index], sync=last)

        Args:
            batches: this replica's `(inputs, targets)`.
            loss_fn: as in `train_step`.
            samples: the number of samples of each batch that count, if not all do: 0 for a batch
                that is only padding.
            total: the number of samples in the step over all batches and replicas, if known; saves
                the all-reduce for a loss without a count.
        """
        loss, chunks = self._compared_loss(loss_fn), self.options.chunks
        if set(map(type, chain.from_iterable(batches))) != {Tensor}:
            batches = [
                (as_containers(inputs), as_containers(targets)) for inputs, targets in batches
            ]
        return StepWeights(loss, batches, chunks, self.world, samples=samples, total=total)

    def _compared_loss(self, loss_fn: LossFn) -> CountedLoss:
        """Returns a loss with its count; compares the first one over the ranks, collectively."""
        if not self._settings_check.has_loss:
            self._settings_check.check_loss(*loss_facts(resolve(loss_fn, self.net)))
        return self.resolve_loss(loss_fn)

    def resolve_loss(self, loss_fn: LossFn) -> CountedLoss:
        """Returns `loss_fn` wrapped with its count; see `loss.resolve`."""
        resolved = self._resolved
        if resolved is None or not _is_same_loss(resolved, loss_fn):
            resolved = self._resolved = loss_fn, resolve(loss_fn, self.net), _settings_of(loss_fn)
        return resolved[1]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output for a batch, run through the pipeline, on the last device.

        Call it like the module, or with the inputs of a batch as in `train_step`. The output has no
        autograd graph. In training mode, dropout is active and running statistics are updated, as
        in any module.

        The outputs of the micro-batches are concatenated along dim 0. A 0-dim tensor, such as the
        loss returned by a `transformers` model, becomes a tensor with one value per micro-batch.
        Constants must be equal in all micro-batches. Use `map_outputs` for any other output.

        Raises:
            BatchError: a tensor does not have the batch in dim 0, or another value depends on the
                samples; see `check_joinable`.
        """
        inputs: Any = kwargs if kwargs and not args else args[0] if len(args) == 1 else args
        if args and kwargs:
            raise BatchError("pass the inputs either all by position or all by keyword")
        if self.training and torch.is_grad_enabled() and not self._says_no_graph:
            self._says_no_graph = True
            log.warning(NO_GRAPH)
        outputs = self.map_outputs(inputs, None, lambda output, _: output)
        if len(MicrobatchCut(self.options.chunks, inputs).sizes) > 1:
            self.check_joinable(inputs, outputs)
        return merge(outputs) if outputs else None

    def check_joinable(self, inputs: Any, outputs: Sequence[Any]) -> None:
        """Checks that the outputs of a batch's micro-batches can be concatenated along dim 0.

        In evaluation mode, it compares them with a forward of fewer or more samples, once per
        kind of output, and leaves buffers and generators unchanged. All processes of a pipeline
        call it together.

        Args:
            inputs: the inputs of the batch.
            outputs: the outputs of its micro-batches on the last stage; empty elsewhere.

        Raises:
            BatchError: a value depends on the number of samples other than by its size in dim 0.
        """
        sizes = MicrobatchCut(self.options.chunks, inputs).sizes
        if outputs:
            check_samples(outputs, sizes)
        if not self.training:
            self._checks.of_outputs(first_share(inputs), outputs, sizes, self._run_forward)

    def map_outputs(
        self, inputs: Any, targets: Any, function: Callable[[Any, Any], Any]
    ) -> list[Any]:
        """Runs a forward and applies `function(output, targets)` to each micro-batch's output.

        Args:
            inputs: the inputs of a batch.
            targets: a pytree of tensors with the batch in dim 0, or None.
            function: runs on the last stage, under `no_grad` and this model's autocast.

        Returns:
            the results by micro-batch; an empty list in a process without the last stage.
        """
        inputs, targets = as_containers(inputs), as_containers(targets)
        self.split_for(first_share(inputs))
        self.follow_changes(trains=False)
        self._batch_check.begin(inputs, targets)
        cut = self._cut(inputs, targets)
        kind = self._checked_kind(
            first_share(inputs), cut.of_first_share, len(cut.sizes), trains=False
        )
        input_parts = cut.of(inputs)
        target_parts = cut.of(self.to_output_device(targets))

        def head(microbatch: int, output: Any) -> HeadOutput:
            return HeadOutput(function(output, target_parts[microbatch]))

        with torch.no_grad():
            values = self._run_forward(input_parts, head, cut.places, kind)
        self._batch_check.finish()
        return values

    def run_microbatches(
        self,
        inputs: Sequence[Any],
        head: Head,
        *,
        trains: bool,
        sync: bool = True,
        compared: Any = None,
        kind: StepKind | None = None,
    ) -> list[Any]:
        """Runs a step over micro-batches prepared by the caller, with a custom loss callback.

        Args:
            inputs: the model's inputs of each micro-batch.
            head: runs after each forward on the last stage; see `pipeline.step`.
            trains: also run the backward, from the root that `head` returns, and add the gradients
                to `parameter.grad`. If False, the caller disables gradients.
            sync: as in `train_step`.
            compared: further values that must be equal in all processes of a pipeline.
            kind: what `check_batch` has returned, if it was called; the caller has then called
                `follow_changes` as well.

        Returns:
            the values returned by `head`, by micro-batch; an empty list in a process without the
            last stage.
        """
        self.split_for(Microbatch(inputs[0]))
        if kind is None:
            self.follow_changes(trains)
            kind = self.pipeline.kinds.of_parts(inputs, trains)
        self._batch_check.begin(inputs, compared)
        if trains:
            check_grad_mode()
            schedule = self.schedule(len(inputs))
            with self.autocast():
                values = self.pipeline.run_train_step(
                    schedule,
                    inputs.__getitem__,
                    head,
                    reduce=sync,
                    batch_check=self._batch_check,
                    kind=kind,
                )
        else:
            values = self._run_forward(inputs, head, kind=kind)
        self._batch_check.finish()
        return values

    def run_forwards(
        self, inputs: Sequence[Any], head: Head, kind: StepKind | None = None
    ) -> tuple[list[Any], HeldGraphs]:
        """Runs the forwards of a step whose backwards `run_backwards` runs later.

        For gradients that arrive from outside, such as from a loss that the caller computes. All
        micro-batches are in flight in the meantime. Needs `engine="local"`.

        Args:
            inputs: the model's inputs of each micro-batch.
            head: as in `run_microbatches`; the backwards start at its roots.
            kind: as in `run_microbatches`.

        Returns:
            the values returned by `head`, by micro-batch, and what `run_backwards` needs.
        """
        check_grad_mode()
        self.split_for(Microbatch(inputs[0]))
        if kind is None:
            self.follow_changes(trains=True)
            kind = self.pipeline.kinds.of_parts(inputs, trains=True)
        schedule = self._forward_schedule(len(inputs))
        with torch.enable_grad(), self.autocast():
            return self.pipeline.run_forwards(schedule, inputs.__getitem__, head, kind)

    def run_backwards(self, held: HeldGraphs) -> None:
        """Runs the backwards of a step, once; adds the gradients to `parameter.grad`."""
        # layers that are recomputed run their forwards again
        with torch.enable_grad(), attention_kernel(self.options.attention):
            self.pipeline.run_backwards(held)

    def check_batch(self, inputs: Any, sizes: Sequence[int], *, trains: bool) -> StepKind:
        """Runs the self-check if it is due for these inputs; see `PipelineOptions.self_check`.

        `train_step` and evaluations do it, `run_microbatches` and `run_forwards` do not: pass them
        the result.

        Args:
            inputs: the inputs of a batch.
            sizes: the number of samples in each micro-batch.
            trains: whether a backward follows.

        Returns:
            the kind of the step.

        Raises:
            NotExactError: the pipeline computes something else than plain PyTorch.
        """
        if not self.is_split:
            self.split_for(Microbatch(split(inputs, sizes)[0]))
        return self._checked_kind(inputs, sizes, len(sizes), trains)

    def verify(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: LossFn,
        *,
        reference: nn.Module | None = None,
        times: int = 3,
    ) -> Verification:
        """Compares training steps and evaluations of the pipeline with the unsplit module.

            print(model.verify(inputs, targets, loss_fn))  # or: assert ....exact

        `hybridtrain.verify` takes several batches.

        Args:
            inputs: the inputs of this replica's batch, as in `train_step`.
            targets: the targets of this replica's batch, as in `train_step`.
            loss_fn: as in `train_step`.
            reference: the module before it was wrapped; required with `engine="distributed"`.
            times: the number of steps, each followed by an evaluation; state that a forward changes
                shows in the next step.
        """
        return verify(self, [(inputs, targets)] * times, loss_fn, reference)

    def without_self_check(self) -> AbstractContextManager[None]:
        """Disables `self_check` inside the block."""
        return self._checks.without_forward_check()

    def autocast(self) -> AbstractContextManager[object]:
        """Returns the context of a forward: autocast, and the kernel of `attention`.

        `precision="fp32"` keeps the caller's autocast, and `attention="auto"` its kernels.
        """
        options = self.options
        return forward_context(options.precision, options.attention, self._device_type)

    def train(self, mode: bool = True) -> HybridModel:
        """Sets training mode, as `nn.Module.train`."""
        if mode and not self.net.training:
            self.rng.reprobe()
        self.net.train(mode)
        return self

    def eval(self) -> HybridModel:
        """Sets evaluation mode, as `nn.Module.eval`."""
        return self.train(False)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Sets all modules to evaluation mode inside the block, then restores their modes."""
        modes = [(module, module.training) for module in self.net.modules()]
        self.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
            self.rng.reprobe()

    @property
    def owns_output(self) -> bool:
        """True if this process has the last stage, which computes the loss and the outputs."""
        return not self.is_split or self.pipeline.owns_output

    @property
    def output_device(self) -> torch.device:
        """The device of the last stage in this process, for targets and metrics."""
        if self.is_split:
            return self.pipeline.output_device
        owners = self.world.stage_owners.placed(self.options.placement)
        last = self.world.nb_part * self.options.stages_per_device - 1
        return self.world.devices[owners.local_index(last)]

    def to_output_device(self, values: Any) -> Any:
        """Moves the tensors of a pytree to the last stage's device, if this process has it."""
        if self.is_split:  # in every step
            owns, device = self.pipeline.owns_output, self.pipeline.output_device
        else:
            owns, device = True, self.output_device
        if values is None or not owns:
            return values
        if type(values) is Tensor and values.device == device:
            return values
        return tree_map_only(Tensor, lambda tensor: put(tensor, device), values)

    @property
    def readers(self) -> tuple[int, ...]:
        """The processes of the pipeline that use batches, by `World.pipeline_rank`.

        With `engine="distributed"`, these are the processes with the first and the last stage. Pass
        it to `Loader.batches` in your own loop.
        """
        return self.pipeline.readers if self.is_split else (0,)

    @property
    def training(self) -> bool:
        """True in training mode, as `nn.Module.training`."""
        return self.net.training

    def parameters(self) -> Iterator[Parameter]:
        """Returns the parameters of this process's stages, for an optimizer.

        With `engine="distributed"`, all stages of a process may be frozen. PyTorch then rejects an
        optimizer of `(p for p in model.parameters() if p.requires_grad)` as empty, so pass all
        parameters.
        """
        return iter(self.pipeline.trained) if self.is_split else self.net.parameters()

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Returns the parameters of this process's stages with their names in `net`."""
        if not self.is_split:
            return self.net.named_parameters()
        return iter(self.pipeline.parameters.items())

    def modules(self) -> Iterator[nn.Module]:
        """Returns the modules of `net`."""
        return self.net.modules()

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Returns the modules of `net` with their names."""
        yield from self.net.named_modules()

    def buffers(self) -> Iterator[Tensor]:
        """Returns the buffers of this process's stages."""
        return (buffer for _, buffer in self.named_buffers())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Returns the buffers of this process's stages with their names in `net`."""
        return ((name, b) for name, b in self.net.named_buffers() if not b.is_meta)

    def requires_grad_(self, requires_grad: bool = True) -> HybridModel:
        """Freezes or unfreezes all parameters from the next step on; call it on all replicas."""
        self.net.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, as `nn.Module.zero_grad`."""
        self.net.zero_grad(set_to_none)

    def grad_norm(self) -> Tensor:
        """Returns the L2 norm of the gradients of all stages, a 0-dim tensor.

        With `engine="distributed"`, all processes of a pipeline must call this together, as well as
        `clip_grad_norm_`, `unscale_`, `state_dict` and `stage_summaries`.
        """
        return self.pipeline.grad_norm()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the gradient norm over all stages to `max_norm`; returns the norm before
        clipping."""
        return self.pipeline.clip_grad_norm_(max_norm)

    def unscale_(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Unscales the gradients for `scaler.step`, with one overflow decision for all stages.

        With `engine="distributed"`, use it instead of `scaler.unscale_(optimizer)`.
        """
        unscale_(scaler, optimizer, self.world)

    def compare_optimizers(self, optimizers: Sequence[Any]) -> None:
        """Compares classes and settings of optimizers over the ranks; a collective call.

        `OptimizerStep` calls it before its updates 1, 2, 4, 8 and so on. In other loops, the second
        `train_step` compares the optimizers of PyTorch that have stepped, and so do steps 3, 5, 9
        and so on.

        Args:
            optimizers: the optimizers of this rank's parameters.

        Raises:
            ConfigError: another rank has a different class or setting.
        """
        self._settings_check.check_optimizers(optimizers, self.stages)

    def reduce_loss(self, sums: Tensor) -> Tensor:
        """Returns the sum over the replicas of `sums`, computed on the last stage."""
        return self.pipeline.sum_over_replicas(sums)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict of `net`, which `net.load_state_dict` accepts.

        With `engine="distributed"`, every process returns the whole model on the CPU, and all
        processes of a pipeline must call it together. Saving a checkpoint does not need it.
        """
        return self.pipeline.state_dict() if self.is_split else self.net.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Loads a state dict of `net`, from any split. All replicas must load the same one."""
        with warnings.catch_warnings():
            # tensors of other processes' stages are on the meta device and stay there
            warnings.filterwarnings("ignore", message=".*meta parameter.*no-op")
            return self.net.load_state_dict(state, strict=strict)

    def sync_buffers(self) -> None:
        """Copies replica 0's buffers to all replicas, as DDP does before each forward."""
        if self.is_split:  # a split copies all values
            self.pipeline.sync_buffers()

    def memory_bytes(self) -> list[int]:
        """Returns the peak memory of each stage so far, in bytes; see `pipeline.memory_bytes`."""
        return memory_bytes(self.pipeline)

    def stage_summaries(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Returns the layers, parameters and peak memory of each stage."""
        return stage_summaries(self.pipeline, optimizer)

    def __repr__(self) -> str:
        options, replicas = self.options, self.world.data_parallel_size
        head = f"{type(self.net).__name__}, chunks={options.chunks}, schedule={options.schedule}"
        if options.recompute != "never":
            head += f", recompute={options.recompute}"
        if options.precision != "fp32":
            head += f", precision={options.precision}"
        if replicas > 1:
            head += f", replica {self.world.data_parallel_rank} of {replicas}"
        plan = self.plan if self.is_split else "not split yet: the first batch decides"
        return f"HybridModel({head})\n{plan}"

    def __getattr__(self, name: str) -> NoReturn:
        no_attribute(self.__dict__.get("net"), name)

    def __getitem__(self, index: Any) -> NoReturn:
        raise TypeError(f"a HybridModel is not an nn.Sequential: use model.net[{index!r}]")

    def __reduce__(self) -> NoReturn:  # copy calls it too
        raise TypeError(
            "a HybridModel holds threads and process groups and cannot be copied or pickled: save "
            "model.state_dict(), or wrap copy.deepcopy(model.net) in a new HybridModel"
        )

    def _cut(self, inputs: Any, targets: Any) -> MicrobatchCut:
        """Returns the split of a batch into micro-batches along dim 0."""
        owned = self.world.owned_replicas
        if len(owned) > 1 and self.training and not isinstance(inputs, Shares):
            raise BatchError(
                f"this process runs {len(owned)} of {self.world.logical_replicas} replicas, so a "
                f"batch must assign its samples to replicas: take batches from "
                f"TrainLoader(dataset, batch_size, world), or start one process per replica"
            )
        cut = MicrobatchCut(self.options.chunks, inputs, targets)
        if self._sequence_first is not None and len(cut.sizes) > 1:
            raise BatchError(
                f"the first layer, {self._sequence_first!r}, expects the batch in dim 1, but "
                "batches are split along dim 0: construct the layer with batch_first=True, or set "
                f"{setting('chunks', 1)}"
            )
        return cut

    def _checked_kind(
        self, inputs: Any, sizes: Sequence[int], microbatches: int, trains: bool
    ) -> StepKind:
        """Returns the kind of a step, after the self-check if it is due.

        Args:
            inputs: the inputs of the batch, or of the first logical replica's share.
            sizes: the sizes of its micro-batches.
            microbatches: the number of micro-batches of all shares.
            trains: whether a backward follows.
        """
        kind = self.pipeline.kinds.of(inputs, sizes, trains, microbatches)
        self._checks.before(inputs, sizes, kind, trains=trains)
        return kind

    def _check_synchronised(self, microbatches: int) -> None:
        """Refuses a batch for which replicas may have unequal numbers of micro-batches.

        Every micro-batch is a collective call of each synchronized batch norm; a replica with one
        more would wait forever.
        """
        chunks = self.options.chunks
        if (
            self.options.sync_batch_norm
            and self.world.data_parallel_size > 1
            and microbatches < chunks
        ):
            raise BatchError(
                f"this batch has {microbatches} samples for {setting('chunks', chunks)}, but with "
                f"{setting('sync_batch_norm', True)} all replicas must run the same number of "
                f"micro-batches: lower {argument('chunks')}, or set {setting('drop_last', True)} "
                "to skip a short last batch"
            )
