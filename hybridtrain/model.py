"""HybridModel: the user's module as a pipeline of stages, kept equal over the replicas.

Before the class stand the checks and messages for what one would do with an `nn.Module`, and a
`HybridModel` does otherwise.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from hybridtrain._base import codec
from hybridtrain._base.adapter import BaseWeights
from hybridtrain._base.joining import JoinProof, check_same_but_samples
from hybridtrain._base.microbatch import (
    MicrobatchCut,
    as_containers,
    batch_size,
    check_samples,
    first_share,
    merge,
    split,
)
from hybridtrain._base.precision import autocast
from hybridtrain._base.shares import MicrobatchPlace, Shares
from hybridtrain.errors import BatchError, ConfigError, UserError, argument, setting
from hybridtrain.graph import layers_of
from hybridtrain.loss import (
    BatchWeight,
    CountedLoss,
    LogProbabilityCheck,
    LossFn,
    ModelLossProof,
    OutputProof,
    SeenLosses,
    ShareLoss,
    StepWeights,
    is_of_model,
    model_output,
    prove_in_training,
    resolve,
    zero_of,
)
from hybridtrain.options import PipelineOptions, with_settings
from hybridtrain.partitioning import Plan, PlannedLayers, Planner
from hybridtrain.pipeline import (
    BatchCheck,
    Head,
    HeadOutput,
    Pipeline,
    Timeline,
    check_schedule,
    construct_own_stages,
    remove_aliases,
    unscale_,
    with_device_speeds,
    with_sync_batch_norm,
)
from hybridtrain.schedule import Schedule, forward_only, make_schedule
from hybridtrain.verification import CutModel, SelfCheck, Verification, undone, verify
from hybridtrain.world import World

_MOVES = ("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "type", "to_empty")


def check_arguments(net: Any, world: Any, options: Any, *, constructs: bool = False) -> None:
    """Checks the types of the arguments of `HybridModel`, or of its `construct`.

    Raises:
        ConfigError: one of them is something else; shows the call.
    """
    call = "HybridModel(net, World.from_env(nb_part=2), chunks=4)"
    if constructs:
        call = "HybridModel.construct(lambda: MyNet(), World.from_env(nb_part=2), chunks=4)"
        if isinstance(net, nn.Module) or not callable(net):
            what = f"the module {type(net).__name__}" if isinstance(net, nn.Module) else f"{net!r}"
            raise ConfigError(
                f"build= must be a function that makes the module, not {what[:200]}: {call}"
            )
    elif not isinstance(net, nn.Module):
        is_class = isinstance(net, type) and issubclass(net, nn.Module)
        given = f"the class {net.__name__}, not a module of it" if is_class else f"{net!r}"
        raise ConfigError(f"net= must be a torch.nn.Module, not {given[:200]}: {call}")
    if world is None:
        raise ConfigError(f"world= is missing, the processes and devices to train on: {call}")
    if not isinstance(world, World):
        raise ConfigError(f"world={str(world)[:200]} is not a World: {call}")
    if not isinstance(options, PipelineOptions | None):
        raise ConfigError(
            f"options={str(options)[:200]} is not a PipelineOptions; single settings go by name: "
            f"{call}"
        )


def sequence_first_layer(net: nn.Module) -> str | None:
    """Returns the name of the first layer if it takes the samples in dim 1, of a batch itself."""
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
    """Raises a UserError under `torch.inference_mode()`, where nothing can be trained."""
    if torch.is_inference_mode_enabled():
        raise UserError(
            "train_step computes gradients, and torch.inference_mode() is on around it, where "
            "there are none: leave it out for training"
        )


def check_fixed_replicas(options: PipelineOptions, world: World) -> None:
    """Refuses options with which a run would depend on the number of processes.

    Raises:
        ConfigError: one of them is set.
    """
    if not options.broadcast_buffers:
        raise ConfigError(
            f"{setting('broadcast_buffers', False)} keeps buffers apart for each process, and with "
            f"a fixed number of replicas they are those of replica 0: leave it out"
        )
    if options.find_unused_parameters:
        raise ConfigError(
            f"{setting('find_unused_parameters', True)} looks at the last backward of a process "
            f"alone, and a fixed number of replicas must not depend on processes: leave it out"
        )
    if world.logical_replicas == world.data_parallel_size:
        return
    if options.sync_batch_norm:
        raise ConfigError(
            f"{setting('sync_batch_norm', True)} computes with the samples of all replicas, and "
            f"{world.data_parallel_size} processes run the {world.logical_replicas} replicas one "
            f"after another: start a process for each replica"
        )


def check_loss_function(loss_fn: Any, net: nn.Module, world: World) -> None:
    """Checks the loss function of a training step.

    Raises:
        ConfigError: it is not a function, as where arguments are swapped, or has parameters that
            the replicas would train apart.
    """
    if not callable(loss_fn):
        raise ConfigError(
            f"{argument('loss_fn')} must be a function, not a {type(loss_fn).__name__}: the order "
            "is train_step(inputs, targets, loss_fn)"
        )
    if world.data_parallel_size > 1 and (trained := trained_by_loss(loss_fn, net)):
        raise ConfigError(
            f"the loss has trainable parameters ({', '.join(trained[:3])}), but only the model's "
            "parameters are averaged over the replicas: make them part of the model, and let its "
            "forward return them with its output, or freeze them with requires_grad_(False)"
        )


def trained_by_loss(loss_fn: Any, net: nn.Module) -> list[str]:
    """Returns the names of the trainable parameters of a loss that the model does not have."""
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
    own = [(name, p) for name, p in inner.named_parameters() if p.requires_grad]
    if not own:
        return []
    theirs = {id(parameter) for parameter in net.parameters()}
    return [name for name, parameter in own if id(parameter) not in theirs]


NO_GRAPH = (
    "the output of model(inputs) has no graph, and a backward of it would fail: "
    "model.train_step(inputs, targets, loss_fn) runs forward, loss and backward. Where no backward "
    "is meant, call the model under torch.no_grad()"
)


class StepLoss(Tensor):
    """The loss of a step: a tensor without a graph, which says so where one calls `backward`."""

    # what is computed from it is a plain tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a UserError."""
        raise UserError(
            "train_step has run the backward already: the gradients are in parameter.grad, and the "
            "optimizer's step is next"
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
    """Raises an AttributeError that says where to find `name`."""
    text = f"'HybridModel' object has no attribute {name!r}"
    if name in _MOVES:
        text += (
            ": its layers are on their stages' devices, "
            f"World.from_env(devices=...). Convert the module before you wrap it; "
            f"the option {argument('precision')} computes in bf16 or fp16"
        )
    elif name == "forward":
        text += ": call model(inputs), or model.train_step(inputs, targets, loss_fn) to train"
    elif name == "backward":
        text += ": model.train_step(inputs, targets, loss_fn) runs the backward"
    elif net is not None and hasattr(net, name):
        text += f": it is not an nn.Module. Use the module that it trains: model.net.{name}"
    raise AttributeError(text)


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainStepResult:
    """Result of a training step.

    Attributes:
        loss: the mean over what the loss counts in this replica's batch, or over its samples, a
            0-dim tensor on the last stage's device; 0 if nothing counts, NaN in a process that
            does not have the last stage.
        samples: the number of samples in this replica's batch.
        count: what `loss` is a mean over: the samples, or what the loss function counts.
        timeline: the measured times of its actions, if they were asked for.
        share_losses: the loss of each logical replica of this process; empty: it is `loss`.
    """

    loss: Tensor
    samples: int
    timeline: Timeline | None = None
    count: float = 0
    share_losses: Sequence[ShareLoss] = ()


class HybridModel:
    """Trains `net` as a pipeline of stages, together with the other replicas.

    `net` stays the user's module: its layers are moved to the stages' devices where they are, and
    parameters, states and checkpoints go by its names, whatever the split.

    Args:
        net: any module. An `nn.Sequential` is cut between its elements (nested ones are
            flattened); any other module is traced, see `hybridtrain.graph`.
        world: the processes and devices; `world.nb_part` devices make one pipeline.
        options: how the model is cut and run; see `PipelineOptions`.
        example_inputs: the inputs of a batch, as `train_step` takes them; needed to measure layers
            and to trace models whose forward has optional arguments or that torch.fx cannot trace.
        **settings: fields of `options` to change: `HybridModel(net, world, chunks=8)`.

    Attributes:
        net: the module.
        world: the processes.
        options: the settings.
        pipeline: the stages that this process owns, and what concerns the whole model.
        stages: the stages of this process, in the order of the pipeline.
        plan: how the model is divided, and from which costs.
        planned: the layers of all stages as they were planned; those of other processes are on the
            meta device.
        changes: how often parameters were frozen or freed since.
        base: the frozen weights of a model with an adapter, once `init_from` has loaded them.
        rng: seeds the random operations of the layers; its `step` belongs into a checkpoint.

    Raises:
        SplitError, ScheduleError, ConfigError: an argument does not fit, or `example_inputs` are
            needed.
    """

    @torch.inference_mode(False)  # parameters may be made here
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
        check_schedule(options, world)
        if options.sync_batch_norm:
            net = with_sync_batch_norm(net, world)
        remove_aliases(net)
        planner = Planner(net, options, example_inputs, world.stage_owners)
        plan = world.from_main(planner.plan)
        planned = planner.layers_of(plan)
        if world.processes_per_replica > 1 and example_inputs is not None:
            # later no process has the whole model
            check = SelfCheck(CutModel(net, plan, planned, options, world))
            world.on_main(partial(check.check_at_construction, example_inputs))
        self._begin(net, world, options, plan, planned)

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
        """Returns a `HybridModel` of `build()`; with `engine="distributed"` made in parts.

            torch.manual_seed(0)
            model = HybridModel.construct(lambda: gpt(50257, 1024), world, split=[6, 6, 6, 9])

        There, each process makes the values of its stages alone, bitwise those that
        `HybridModel(build(), ...)` has under the same seeds. No process holds the whole model,
        also where layers are measured for the split. A model that cannot be made in parts (its
        constructor looks at values, its modules are lazy, or torch.export has to trace it) is built
        whole in each process; the log says so.

        Args:
            build: a function without arguments, or a class, that makes the module on the CPU. It
                runs several times and must return a new module each time.
            world: as for `HybridModel`, and so are the other arguments.
            options: see there.
            example_inputs: see there.
            **settings: see there.

        Raises:
            ConfigError: `build` is not a function.
            SplitError, ScheduleError, ConfigError: as of `HybridModel`.
        """
        check_arguments(build, world, options, constructs=True)
        assert world is not None
        options = with_settings(options or PipelineOptions(), settings)
        options = with_device_speeds(options, world)
        check_schedule(options, world)

        def make() -> nn.Module:
            net = build()
            check_arguments(net, world, options)
            return with_sync_batch_norm(net, world) if options.sync_batch_norm else net

        parts = construct_own_stages(make, world, options, example_inputs)
        if parts is None:
            return cls(build(), world, options, example_inputs=example_inputs)
        model = cls.__new__(cls)
        model._begin(parts.net, world, options, parts.plan, parts.planned)
        return model

    def _begin(
        self,
        net: nn.Module,
        world: World,
        options: PipelineOptions,
        plan: Plan,
        planned: PlannedLayers,
    ) -> None:
        self.net = net
        self.world = world
        self.options = options
        self.changes = 0
        self.base: BaseWeights | None = None
        self.planned = planned
        if world.size > 1:
            codec.allow(codec.classes_around({type(module) for module in net.modules()}))
        self._batch_check = BatchCheck(world)
        self._sequence_first = sequence_first_layer(net)
        self._resolved: tuple[LossFn, CountedLoss] | None = None  # the last one
        self._says_no_graph = False  # once
        self._seen_losses = SeenLosses()  # by the proof of the first step
        self._read_losses = SeenLosses()  # by the last stage's look at its graph
        self._join_proof = JoinProof()
        if world.fixed_replicas is not None:
            check_fixed_replicas(options, world)
        if options.shard != "none" and world.data_parallel_size == 1:
            shard = setting("shard", options.shard)
            log.info("%s has no effect: there is one replica", shard)
        self.pipeline = Pipeline(net, plan, planned, world, options)
        cut_model = CutModel(net, plan, planned, options, world)
        self._self_check = SelfCheck(cut_model, self.pipeline.variants_of)
        self.plan = plan
        self.stages = self.pipeline.stages
        self.rng = self.pipeline.rng
        self._device_type = world.devices[0].type

    def _follow_changes(self, trains: bool) -> None:
        """Trains what now requires a gradient; refuses other changes of `net`."""
        names = self.pipeline.frozen_or_freed()
        # a forward is the same for frozen parameters, and one replica may run it alone
        if names and trains:
            self.pipeline.follow_requires_grad(names)
            self.changes += 1

    def _run_forward(
        self, parts: Sequence[Any], head: Head, places: Sequence[MicrobatchPlace] | None = None
    ) -> list[Any]:
        options, devices = self.options, self.world.nb_part
        schedule = forward_only(devices, len(parts), options.stages_per_device, options.placement)
        with self.autocast():
            return self.pipeline.run_forward(
                schedule, parts.__getitem__, head, places, self._batch_check.compare
            )

    def schedule(self, chunks: int) -> Schedule:
        """Returns the schedule of a training step of `chunks` micro-batches."""
        options = self.options
        shape = self.world.nb_part, chunks, options.stages_per_device
        return make_schedule(options.schedule, *shape, options.max_inflight)

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
        """Runs forward, loss and backward of a batch; gradients are added to `parameter.grad`.

        With several replicas, all call it together, each with its own batch, and the gradients
        become the mean over the replicas of what each would have alone.

        Args:
            inputs: a pytree of tensors with the batch in dim 0; what the first layer is given.
                Arrays of numpy, and lists without tensors that are as long as the batch, are cut as
                well; `hybridtrain.shared` marks values that are not.
            targets: as `inputs`; None if `loss_fn` needs none.
            loss_fn: `loss_fn(output, targets)` gives, for one micro-batch, the mean of the loss
                over its samples. A mean over something else, such as the targets that are not
                ignored, is a `SumLoss` or a `MeanLoss`; `cross_entropy` and `nll` of PyTorch and
                of `hybridtrain.loss` need neither.
            weight: one of `step_weights`, which weigh the batches of a step and of the replicas.
                A number multiplies the gradient of the batch's mean. None: 1, or for a loss with
                a count the weight of this batch among those of the replicas.
            sync: False to accumulate gradients without averaging them over the replicas yet; the
                last `train_step` before the optimizer's must have it True.
            scale_loss: applied to the loss where the backward starts, such as `GradScaler.scale`.
            timeline: record the start and end of every action.

        Raises:
            BatchError: the batch is empty or its parts do not fit together.
            Exception: an exception of a layer or of `loss_fn`, with a note that names the layer,
                the stage and the micro-batch. Gradients are incomplete then.
        """
        check_grad_mode()
        check_loss_function(loss_fn, self.net, self.world)
        inputs, targets = as_containers(inputs), as_containers(targets)
        self._follow_changes(trains=True)
        self._batch_check.begin(inputs, targets)
        cut = self._cut(inputs, targets)
        sizes = cut.sizes
        self._check_synchronised(len(sizes))
        # comparisons of a first step take a share for the batch: it is one, of a logical replica
        compared = first_share(inputs), cut.of_first_share
        self._self_check.check_batch(*compared, trains=True)
        input_parts = cut.of(inputs)
        target_parts = cut.of(self.pipeline.to_output_device(targets))
        loss = self.resolve_loss(loss_fn)
        if not isinstance(weight, BatchWeight):
            weight = self._weight_alone(loss, inputs, targets, weight)
        elif weight.microbatches != len(sizes):
            raise BatchError("weight= is one of another batch: pass step_weights in order")
        batch_weight = weight
        is_whole = batch_weight.is_single_microbatch
        proof = self._proof(loss, compared[0], first_share(targets), compared[1], is_whole)

        def head(microbatch: int, output: Any) -> HeadOutput:
            if proof is not None and microbatch < len(compared[1]):
                proof.observe(microbatch, output)
            # the mean of nothing is not a number
            factor = batch_weight.weights[microbatch]
            value = loss(output, target_parts[microbatch]) if factor else zero_of(output)
            root = value if scale_loss is None else scale_loss(value)
            value = value.detach()
            # scale - 0 x value: NaN if the value is not finite, also where the derivative would be
            # finite. Then all replicas see it in the averaged gradients, and skip the step together
            gradient = torch.rsub(value, batch_weight.grad_scales[microbatch], alpha=0)
            return HeadOutput(value, root, gradient)

        schedule = self.schedule(len(sizes))
        recorded = self.pipeline.new_timeline(schedule) if timeline else None
        with torch.enable_grad(), self.autocast():
            losses = self.pipeline.run_train_step(
                schedule,
                input_parts.__getitem__,
                head,
                reduce=sync,
                timeline=recorded,
                places=cut.places,
                meanwhile=self._batch_check.compare,
            )
        self._batch_check.finish()
        mean = batch_weight.mean(losses)
        if type(mean) is Tensor:
            mean = mean.as_subclass(StepLoss)
        shares = batch_weight.share_losses(losses) if cut.places is not None else ()
        return TrainStepResult(mean, sum(sizes), recorded, batch_weight.counted, shares)

    def _weight_alone(
        self, loss: CountedLoss, inputs: Any, targets: Any, weight: float | None
    ) -> BatchWeight:
        """Returns the weight of a batch that is a step by itself; see `train_step`."""
        total = None
        if weight is None and self.world.fixed_replicas is None:
            # without a count each replica has the same part, as if all had as many samples
            total = batch_size(inputs, targets) * self.world.data_parallel_size
        elif weight is None and loss.counts_samples:
            weight = 1.0
        batches, chunks = [(inputs, targets)], self.options.chunks
        return StepWeights(loss, batches, chunks, self.world, total=total, weight=weight)[0]

    def _proof(
        self, loss: CountedLoss, inputs: Any, targets: Any, sizes: Sequence[int], is_whole: bool
    ) -> OutputProof | LogProbabilityCheck | None:
        """Returns what looks at the outputs of a first step with a loss; None if nothing must.

        All processes of a pipeline call it together: a loss of the model's own takes a forward.

        Args:
            loss: of the step.
            inputs: of the batch.
            targets: of the batch.
            sizes: of its micro-batches.
            is_whole: the step is one micro-batch, so that no mean is taken of several.
        """
        if loss.is_known_reduction and not loss.takes_log_probabilities:
            return None
        is_one = is_whole or sum(sizes) == 1
        if not self._seen_losses.is_new(loss, divided=not is_one):
            return None
        if not self._batch_check.has_targets(targets):
            targets = None
        if is_one and is_of_model(loss, targets):
            return None
        if loss.is_known_reduction or is_one:
            return LogProbabilityCheck(loss, targets, sum(sizes))

        def warn(text: str, *args: object) -> None:
            if self.world.data_parallel_rank == 0 and self._seen_losses.should_warn(loss):
                log.warning(text, *args)

        if not is_of_model(loss, targets):
            return OutputProof(loss, inputs, targets, sizes, warn)
        proof = ModelLossProof(loss, inputs, targets, sizes, warn)
        try:
            # without dropout, and without changes of running statistics
            with self.evaluating(), torch.no_grad():
                self._run_forward(proof.inputs, proof.head)
        except ConfigError:
            raise
        except Exception as error:
            if self.world.pipeline_group is not None:  # the other processes wait
                error.add_note("in an evaluation that compares the model's loss with its count")
                raise
            log.warning("the loss is not compared with its count: the evaluation failed: %s", error)
        prove_in_training(loss, self.net, inputs, targets, sizes, warn)
        # in the step too, if it is computed from outputs that have samples
        is_output = loss.function is model_output
        return None if is_output else OutputProof(loss, inputs, targets, sizes, warn)

    def step_weights(
        self,
        batches: Sequence[tuple[Any, Any]],
        loss_fn: LossFn,
        *,
        samples: Sequence[int] | None = None,
        total: int | None = None,
    ) -> StepWeights:
        """Returns the `weight` of each batch of an optimizer step, for `train_step`.

        With them the gradients that are accumulated are those of the mean over all batches of all
        replicas: over the samples, or over what `loss_fn` counts. With several replicas, all call
        it together; it starts one all-reduce of a number, for which the last stage's first forward
        waits.

            weights = model.step_weights(batches, loss_fn)
            for index, (inputs, targets) in enumerate(batches):
                last = index + 1 == len(batches)
                model.train_step(inputs, targets, loss_fn, weight=weights[index], sync=last)

        Args:
            batches: this replica's `(inputs, targets)`.
            loss_fn: as in `train_step`.
            samples: for each batch the samples that count, if it is not all of them: 0 for a batch
                that only fills a place.
            total: the samples of the step over all batches and replicas, if they are known; saves
                the all-reduce for a loss without a count.
        """
        loss, chunks = self.resolve_loss(loss_fn), self.options.chunks
        batches = [(as_containers(inputs), as_containers(targets)) for inputs, targets in batches]
        return StepWeights(loss, batches, chunks, self.world, samples=samples, total=total)

    def resolve_loss(self, loss_fn: LossFn) -> CountedLoss:
        """Returns `loss_fn` with what it counts; see `loss.resolve`."""
        if self._resolved is None or self._resolved[0] is not loss_fn:
            self._resolved = loss_fn, resolve(loss_fn, self.net)
            if self.owns_output and self._read_losses.is_new(self._resolved[1], divided=False):
                last = self.stages[-1]
                last.checks_graph = last.names is not None  # a loss may read any parameter
        return self._resolved[1]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output for a batch, pipelined, on the last stage's device.

        Called as the module is, or with the inputs of a batch as `train_step` takes them. The
        output carries no graph. In `train()` mode dropout is active and running statistics are
        updated, as in any module.

        The outputs of the micro-batches are joined along dim 0. For a 0-dim tensor, such as the
        loss that a model of `transformers` returns, there is one value for each micro-batch.
        Constants must be equal in all micro-batches. `map_outputs` gives everything else.

        Raises:
            BatchError: a tensor does not have the samples in dim 0, or another value depends on
                the samples; see `check_joinable`.
        """
        inputs: Any = kwargs if kwargs and not args else args[0] if len(args) == 1 else args
        if args and kwargs:
            raise BatchError("pass the inputs all by position or all by keyword")
        if self.training and torch.is_grad_enabled() and not self._says_no_graph:
            self._says_no_graph = True
            log.warning(NO_GRAPH)
        outputs = self.map_outputs(inputs, None, lambda output, _: output)
        if len(MicrobatchCut(self.options.chunks, inputs).sizes) > 1:
            self.check_joinable(inputs, outputs)
        return merge(outputs) if outputs else None

    def check_joinable(self, inputs: Any, outputs: Sequence[Any]) -> None:
        """Makes sure that the outputs of the micro-batches of a batch can be joined along dim 0.

        In evaluation mode a forward of another number of samples is compared, once for each kind of
        output. It leaves buffers and generators unchanged. All processes of a pipeline call it
        together.

        Args:
            inputs: of the batch.
            outputs: of its micro-batches, where the last stage is; empty elsewhere.

        Raises:
            BatchError: a value depends on the number of samples other than by its size in dim 0.
        """
        sizes = MicrobatchCut(self.options.chunks, inputs).sizes
        if outputs:
            check_samples(outputs, sizes)
        inputs = first_share(inputs)
        total = batch_size(inputs)
        other_size = sizes[0] + 1 if total > sizes[0] else sizes[0] - 1
        if self.training or not other_size:
            return
        if not self.pipeline.any_process(self._join_proof.asks(outputs, sizes)):
            return
        part = split(inputs, [other_size, total - other_size])[0]
        try:
            with torch.no_grad(), undone(self.net, self.world.devices):
                others = self._run_forward([part], lambda _, output: HeadOutput(output))
        except Exception as error:
            if self.world.pipeline_group is not None:  # the other processes wait
                error.add_note(
                    f"in a forward of {other_size} samples, see hybridtrain._base.joining"
                )
                raise
            log.warning("the outputs are joined unproven: %s samples failed: %s", other_size, error)
            return
        if outputs:
            check_same_but_samples(outputs[0], sizes[0], others[0], other_size)

    def map_outputs(
        self, inputs: Any, targets: Any, function: Callable[[Any, Any], Any]
    ) -> list[Any]:
        """Runs a forward, and `function(output, targets)` of each micro-batch at the last stage.

        Args:
            inputs: the inputs of a batch.
            targets: a pytree of tensors with the batch in dim 0, or None.
            function: called under `no_grad` and this model's autocast.

        Returns:
            the results by micro-batch; an empty list in a process without the last stage.
        """
        inputs, targets = as_containers(inputs), as_containers(targets)
        self._follow_changes(trains=False)
        self._batch_check.begin(inputs, targets)
        cut = self._cut(inputs, targets)
        self._self_check.check_batch(first_share(inputs), cut.of_first_share, trains=False)
        input_parts = cut.of(inputs)
        target_parts = cut.of(self.pipeline.to_output_device(targets))

        def head(microbatch: int, output: Any) -> HeadOutput:
            return HeadOutput(function(output, target_parts[microbatch]))

        with torch.no_grad():
            values = self._run_forward(input_parts, head, cut.places)
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
    ) -> list[Any]:
        """Runs a step over micro-batches that the caller has cut, with a head of the caller's.

        Args:
            inputs: the model's inputs of each micro-batch.
            head: ends each forward, at the last stage; see `pipeline.step`.
            trains: run the backward too, from the root that the head returns; gradients are added
                to `parameter.grad`. Otherwise the caller turns gradients off.
            sync: as of `train_step`.
            compared: what else the processes of a pipeline must be given alike.

        Returns:
            the head's values by micro-batch; an empty list in a process without the last stage.
        """
        self._follow_changes(trains)
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
                    meanwhile=self._batch_check.compare,
                )
        else:
            values = self._run_forward(inputs, head)
        self._batch_check.finish()
        return values

    def verify(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: LossFn,
        *,
        reference: nn.Module | None = None,
        times: int = 3,
    ) -> Verification:
        """Compares steps and evaluations of a batch in stages with those of the unsplit module.

            print(model.verify(inputs, targets, loss_fn))  # or: assert ....exact

        See `hybridtrain.verify`, which takes several batches.

        Args:
            inputs: of this replica's batch, as in `train_step`.
            targets: of this replica's batch, as in `train_step`.
            loss_fn: as in `train_step`.
            reference: the module before it was wrapped; needed with `engine="distributed"`.
            times: the steps, each with an evaluation; what a forward leaves behind shows in the
                next one.
        """
        return verify(self, [(inputs, targets)] * times, loss_fn, reference)

    def without_self_check(self) -> AbstractContextManager[None]:
        """Leaves out, in the block, the comparison that the option `self_check` asks for."""
        return self._self_check.off()

    def autocast(self) -> AbstractContextManager[object]:
        """Returns the autocast context of `precision`; for fp32 the caller's autocast counts."""
        return autocast(self.options.precision, self._device_type)

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
        """Has all modules in evaluation mode in the block, then in the modes they were in."""
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
        """True if this process has the last stage, and so the loss and the outputs."""
        return self.pipeline.owns_output

    @property
    def training(self) -> bool:
        """True in training mode, as `nn.Module.training`."""
        return self.net.training

    def parameters(self) -> Iterator[Parameter]:
        """Returns the parameters of `net`, for an optimizer; of this process's stages.

        With `engine="distributed"` those that require a gradient may be none: where all stages of a
        process are frozen, PyTorch refuses an optimizer of `(p for p in model.parameters() if
        p.requires_grad)` as empty. Give it all of them.
        """
        return iter(self.pipeline.trained)

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Returns the parameters of `net` under its names; of this process's stages."""
        return iter(self.pipeline.parameters.items())

    def modules(self) -> Iterator[nn.Module]:
        """Returns the modules of `net`."""
        return self.net.modules()

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Returns the modules of `net` under its names."""
        yield from self.net.named_modules()

    def buffers(self) -> Iterator[Tensor]:
        """Returns the buffers of `net`; of this process's stages."""
        return (buffer for _, buffer in self.named_buffers())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Returns the buffers of `net` under its names; of this process's stages."""
        return ((name, b) for name, b in self.net.named_buffers() if not b.is_meta)

    def requires_grad_(self, requires_grad: bool = True) -> HybridModel:
        """Freezes or frees all parameters, from the next step on; all replicas must do it."""
        self.net.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, as `nn.Module.zero_grad`."""
        self.net.zero_grad(set_to_none)

    def grad_norm(self) -> Tensor:
        """Returns the L2 norm of the gradients of all stages, a 0-dim tensor.

        With `engine="distributed"` all processes of a pipeline call this together, as well as
        `clip_grad_norm_`, `unscale_`, `state_dict` and `stage_summaries`.
        """
        return self.pipeline.grad_norm()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients of all stages down to `max_norm`; returns their norm before."""
        return self.pipeline.clip_grad_norm_(max_norm)

    def unscale_(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Unscales the gradients for `scaler.step`, with one decision for all stages.

        With `engine="distributed"` it takes the place of `scaler.unscale_(optimizer)`.
        """
        unscale_(scaler, optimizer, self.world)

    def reduce_loss(self, sums: Tensor) -> Tensor:
        """Returns the sum over the replicas of `sums`, which are known at the last stage."""
        return self.pipeline.sum_over_replicas(sums)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of `net` under its names; `net.load_state_dict` takes it.

        With `engine="distributed"` every process gets the whole model, on the CPU, and all of a
        pipeline call it together. A checkpoint does not need it.
        """
        return self.pipeline.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Loads a state of `net`, of this or any other split. All replicas must load the same."""
        with warnings.catch_warnings():
            # values of other processes' stages are left out on purpose
            warnings.filterwarnings("ignore", message=".*meta parameter.*no-op")
            return self.net.load_state_dict(state, strict=strict)

    def sync_buffers(self) -> None:
        """Copies replica 0's buffers to all replicas, as DDP does before each forward."""
        self.pipeline.sync_buffers()

    def memory_bytes(self) -> list[int]:
        """Returns the peak memory of each stage so far, in bytes; see `Pipeline.memory_bytes`."""
        return self.pipeline.memory_bytes()

    def stage_summaries(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Returns for each stage its layers, parameters and peak memory."""
        return self.pipeline.stage_summaries(optimizer)

    def __repr__(self) -> str:
        options, replicas = self.options, self.world.data_parallel_size
        head = f"{type(self.net).__name__}, chunks={options.chunks}, schedule={options.schedule}"
        if options.recompute != "never":
            head += f", recompute={options.recompute}"
        if options.precision != "fp32":
            head += f", precision={options.precision}"
        if replicas > 1:
            head += f", replica {self.world.data_parallel_rank} of {replicas}"
        return f"HybridModel({head})\n{self.plan}"

    def __getattr__(self, name: str) -> NoReturn:
        no_attribute(self.__dict__.get("net"), name)

    def __getitem__(self, index: Any) -> NoReturn:
        raise TypeError(f"a HybridModel is not an nn.Sequential: write model.net[{index!r}]")

    def __reduce__(self) -> NoReturn:  # copy asks for it too
        raise TypeError(
            "a HybridModel has threads and process groups, and cannot be copied or pickled: save "
            "model.state_dict(), or copy.deepcopy(model.net) and make a HybridModel of the copy"
        )

    def _cut(self, inputs: Any, targets: Any) -> MicrobatchCut:
        """Returns how a batch is cut into micro-batches, along dim 0."""
        owned = self.world.owned_replicas
        if self.training and len(owned) > 1 and not isinstance(inputs, Shares):
            raise BatchError(
                f"this process runs {len(owned)} of {self.world.logical_replicas} replicas, and a "
                f"batch must say which samples are whose: take batches from TrainLoader(dataset, "
                f"batch_size, world), or start a process for each replica"
            )
        cut = MicrobatchCut(self.options.chunks, inputs, targets)
        if self._sequence_first is not None and len(cut.sizes) > 1:
            raise BatchError(
                f"the first layer, {self._sequence_first!r}, takes the samples in dim 1, and "
                "micro-batches are cut along dim 0: make it with batch_first=True, or set "
                f"{setting('chunks', 1)}"
            )
        return cut

    def _check_synchronised(self, microbatches: int) -> None:
        """Refuses a batch for which replicas may have unequal numbers of micro-batches.

        Each of them is a collective call of every synchronised batch norm, and one too many would
        wait for ever.
        """
        chunks = self.options.chunks
        if (
            self.options.sync_batch_norm
            and self.world.data_parallel_size > 1
            and microbatches < chunks
        ):
            raise BatchError(
                f"this batch has {microbatches} samples for {setting('chunks', chunks)}, and with "
                f"{setting('sync_batch_norm', True)} all replicas must have equally many "
                f"micro-batches: lower {argument('chunks')}, or set {setting('drop_last', True)} "
                "so that there is no short last batch"
            )
