"""Session: processes, devices and stages for a training script, in one object.

`Session.prepare` replaces a script's objects by `PreparedModel`, `PreparedOptimizer`,
`PreparedScheduler` and `PreparedLoader`. They share the `StepInUse`: the batches of an optimizer
step, and the position of the script's loop in them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from hybridtrain._base import objects
from hybridtrain._base.construction import default_generators, rewind
from hybridtrain._base.microbatch import merge
from hybridtrain._base.plain_numbers import plain_numbers
from hybridtrain.checkpoint import replay, resume_run, save_run
from hybridtrain.data import (
    Batch,
    Loader,
    StreamLoader,
    TrainLoader,
    example_batch,
    name_of,
    next_step,
)
from hybridtrain.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    DataError,
    argument,
    setting,
)
from hybridtrain.launch import activity
from hybridtrain.loop.callbacks.tracker import Tracker, call_hook
from hybridtrain.loss import LossFn
from hybridtrain.model import HybridModel, TrainStepResult
from hybridtrain.options import PipelineOptions, with_settings
from hybridtrain.step import OptimizerStep, StepInProgress, check_optimizer, inner_optimizers
from hybridtrain.world import World

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


class PreparedModel:
    """Wraps a `HybridModel` so that a call returns the output in every process of a pipeline.

    Other attributes are forwarded to the `HybridModel`, `hybrid`. `train` and `eval` also call the
    same methods of optimizers that have them, such as schedule-free optimizers.
    """

    def __init__(
        self, hybrid: HybridModel, show_weights: Callable[[bool], None] = lambda training: None
    ) -> None:
        self.hybrid = hybrid
        self._show_weights = show_weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output for a batch, see `HybridModel`; on the CPU if it was sent here."""
        output = self.hybrid(*args, **kwargs)
        world = self.hybrid.world
        if world.pipeline_object_group is None:
            return output
        # gloo sends CPU tensors
        sent = tree_map_only(object, _to_cpu, output) if self.hybrid.owns_output else None
        owner = self.hybrid.pipeline.output_process
        with activity.waiting():
            return objects.broadcast(sent, world.pipeline_object_group, owner)

    def train(self, mode: bool = True) -> PreparedModel:
        """Sets training mode, like `nn.Module.train`."""
        self.hybrid.train(mode)
        self._show_weights(mode)
        return self

    def eval(self) -> PreparedModel:
        """Sets evaluation mode like `nn.Module.eval`; copies replica 0's buffers to the others."""
        self.hybrid.eval()
        self._show_weights(False)
        self.hybrid.sync_buffers()
        return self

    def __getattr__(self, name: str) -> Any:
        return _attribute(self, "hybrid", name)


def _to_cpu(value: Any) -> Any:
    return value.cpu() if hasattr(value, "cpu") else value


def _attribute(wrapper: object, field: str, name: str) -> Any:
    """Returns the attribute `name` of the object in the field of `wrapper`, unless it is special.

    `copy` and `pickle` look up special methods on an object without state; the wrapped object's
    methods would be wrong for the wrapper.
    """
    if name.startswith("__") or field not in vars(wrapper):
        raise AttributeError(f"{type(wrapper).__name__!r} object has no attribute {name!r}")
    return getattr(vars(wrapper)[field], name)


class PreparedOptimizer:
    """An optimizer that steps, and clears gradients, only at the last batch of a step."""

    def __init__(self, optimizer: Optimizer, session: Session) -> None:
        self.optimizer = optimizer
        self._session = session

    def step(self) -> None:
        """Steps, unless the session is accumulating or fp16 gradients overflow."""
        if self._session.sync_gradients:
            self._session._take(self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, unless the session is accumulating."""
        if not self._session.in_use.has_partial_grads:
            self.optimizer.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        return _attribute(self, "optimizer", name)


class PreparedScheduler:
    """A learning rate schedule that steps once per optimizer step.

    Attributes:
        scheduler: the wrapped schedule.
        steps: the number of steps taken.
    """

    def __init__(self, scheduler: LRScheduler, session: Session) -> None:
        self.scheduler = scheduler
        self.steps = 0
        self._session = session

    def step(self) -> None:
        """Steps, unless the session is accumulating."""
        if self._session.sync_gradients:
            self.scheduler.step()
            self.steps += 1

    def __getattr__(self, name: str) -> Any:
        return _attribute(self, "scheduler", name)


@dataclass
class StepInUse:
    """The optimizer step of the batch in use, and its progress.

    Attributes:
        batches: this replica's batches of the step.
        loader: the loader that they are from; None: no batch is in use.
        index: the index of the batch in use.
        training: the step in progress, once it has trained on a batch.
        optimizer_stepped: whether an optimizer has stepped.
        in_loop: whether the loop over the batches is still running.
    """

    batches: Sequence[Batch] = ()
    loader: Loader | None = None
    index: int = 0
    training: StepInProgress | None = None
    optimizer_stepped: bool = False
    in_loop: bool = False

    @property
    def at_last_batch(self) -> bool:
        """True if the batch in use is the last one."""
        return self.index + 1 >= len(self.batches)

    @property
    def has_partial_grads(self) -> bool:
        """True if gradients of only some of its batches are accumulated."""
        return self.training is not None and not self.training.is_trained

    @property
    def has_unapplied_grads(self) -> bool:
        """True if there are gradients that no optimizer has applied."""
        return self.training is not None and not self.optimizer_stepped


class PreparedLoader:
    """A loader that records the batch in use in the session; see `Loader` for its batches.

    A nested loop, such as an evaluation, does not change the step of the outer loop. Leaving a loop
    in the middle of a step discards its gradients.

    Other attributes are forwarded to the prepared loader, `original`.
    """

    def __init__(self, loader: Loader, original: Any, session: Session) -> None:
        self.loader = loader
        self.original = original
        self._session = session

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        # All batches of a step are read before the first is used, because their weights are shares
        # of the whole step.
        session = self._session
        outer, step = session.in_use, StepInUse()
        try:
            with closing(self.loader.batches()) as batches:
                while group := next_step(batches, session.accumulate):
                    session.in_use = step = StepInUse(group, self.loader, in_loop=True)
                    for index, batch in enumerate(group):
                        session.in_use, step.index = step, index
                        targets = session.model.to_output_device(batch.targets)
                        yield batch.inputs, targets
                        if session.in_use is not step and session.in_use.in_loop:
                            raise BatchError(
                                "one loop reads two prepared loaders, but a step takes batches "
                                "from one loader: combine the data sets, or do not pass the "
                                "second loader to prepare()"
                            )
        finally:
            step.in_loop = False
            # not if another loop has begun since, nor if the interpreter exits inside the loop
            if session.in_use is step and not sys.is_finalizing():
                session._leave(step, outer)

    def state_dict(self) -> dict[str, Any]:
        """See `Loader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Loader.load_state_dict`."""
        self.loader.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        return _attribute(self, "original", name)


def as_loader(loader: Any, world: World, seed: int) -> Loader:
    """Returns a `Loader` with the data set and settings of a torch `DataLoader`.

    `batch_size` becomes the global batch size, and `Loader` determines the order.

    Raises:
        DataError: the sampler is not PyTorch's `RandomSampler` or `SequentialSampler`, or samples
            with replacement or `num_samples`; or the loader has a `generator` or a
            `worker_init_fn`.
    """
    if isinstance(loader, Loader):
        return loader
    sampler = type(loader.sampler)
    stream = loader.batch_size is not None and sampler.__name__ == "_InfiniteConstantSampler"
    permutes = not getattr(loader.sampler, "replacement", False) and (
        getattr(loader.sampler, "_num_samples", None) is None
    )
    if not stream and (
        sampler not in (RandomSampler, SequentialSampler)
        or loader.batch_size is None
        or not permutes
    ):
        raise DataError(
            f"{name_of(loader)} has a custom sampler, but all replicas take their batches from "
            "one order: pass Loader(dataset, batch_size, world) with the data set in the order "
            "you want"
        )
    if loader.generator is not None or getattr(loader.sampler, "generator", None) is not None:
        raise DataError(
            f"{name_of(loader)} has a generator, which would have no effect, because the order "
            "comes from a seed that all replicas share: remove it and set "
            f"Session({argument('seed')})"
        )
    if loader.worker_init_fn is not None:
        raise DataError(
            f"{name_of(loader)} has a worker_init_fn, which would have no effect: do its work in "
            "the data set, when it reads its first sample"
        )
    default = DataLoader([0]).collate_fn  # type: ignore[arg-type]
    return Loader(
        loader.dataset,
        loader.batch_size,
        world,
        shuffle=sampler is RandomSampler,
        seed=seed,
        workers=loader.num_workers,
        drop_last=loader.drop_last,
        collate=None if loader.collate_fn is default else loader.collate_fn,
    )


def keep_own_parameters(optimizer: Optimizer, model: HybridModel, before: Collection[int]) -> None:
    """Removes the parameters of other processes' stages from an optimizer.

    Args:
        optimizer: an optimizer over parameters of the model, or of the original module.
        model: the model.
        before: the ids of the module's parameters before its stages were placed.

    Raises:
        ConfigError: the optimizer holds parameters that the model does not have.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        if any(id(p) not in parameters and id(p) not in before for p in group["params"]):
            raise ConfigError(
                "the optimizer holds parameters that the model does not have: build it from "
                "model.parameters() of the model that you prepare with it"
            )
        params = [p for p in group["params"] if id(p) in parameters]
        if len(params) < len(group["params"]):
            if model.world.processes_per_replica == 1:
                raise ConfigError(
                    "the prepared model's parameters differ from the module's: call "
                    "prepare(module) first, then build and prepare an optimizer from its "
                    "parameters()"
                )
            # an optimizer needs at least one
            group["params"] = params or [Parameter(torch.empty(0))]


@dataclass(frozen=True)
class _SessionRun:
    """The `Run` of a script's own loop, in which only the step is known."""

    step: int
    total_steps: int | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    account: Mapping[str, Any] | None = None
    advice: Sequence[str] = ()
    finished: bool = False
    results: Mapping[str, Any] = field(default_factory=dict)


class Session:
    """Runs a training script unchanged on any number of processes and stages.

        session = Session()
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            loss = session.forward_backward(inputs, targets, F.nll_loss)
            optimizer.step()
            optimizer.zero_grad()

    A pipeline computes the loss inside the step, per micro-batch on the last stage. Therefore one
    call of `forward_backward` replaces `output = model(inputs)`, `loss = loss_fn(output, targets)`
    and `loss.backward()`. Calling the model builds no autograd graph, and is for evaluation.

    Like a `Trainer`, a session skips and reports a step with a non-finite loss or gradients. It
    does not handle signals.

    Args:
        nb_part: the number of devices in a pipeline; None to use the launcher's, see
            `World.from_env`.
        world: an existing World, instead of `nb_part`.
        max_skipped: the number of consecutive steps that may be skipped because of a non-finite
            loss or gradient, before `optimizer.step` raises `DivergedError`; None for no limit.
        accumulate: batches per optimizer step. `optimizer.step` and `scheduler.step` do nothing
            before the last of them, when `sync_gradients` is True; `zero_grad` does nothing between
            them.
        seed: the seed of the sample order.
        trackers: receive the values of `log` on rank 0, such as `TensorBoard(directory)`.
        options: how to split and run the model; see `PipelineOptions`.
        **settings: fields of `options` to change.

    Attributes:
        world: the processes.
        in_use: the step of the batch in use.
        states: further objects that `save_state` saves, by name, with `state_dict` and
            `load_state_dict`.

    Raises:
        ConfigError, WorldError: an argument is invalid.
    """

    def __init__(
        self,
        nb_part: int | None = None,
        *,
        world: World | None = None,
        accumulate: int = 1,
        max_skipped: int | None = 10,
        seed: int = 0,
        trackers: Sequence[Tracker] = (),
        options: PipelineOptions | None = None,
        **settings: Any,
    ) -> None:
        accumulate, max_skipped = plain_numbers(accumulate), plain_numbers(max_skipped)
        if type(accumulate) is not int or accumulate < 1:
            raise ConfigError(
                f"{setting('accumulate', accumulate)} must be a whole number of at least 1"
            )
        if world is not None and nb_part is not None:
            raise ConfigError(
                f"pass {argument('nb_part')} or world=, not both: a World already has its nb_part"
            )
        self.options = with_settings(options or PipelineOptions(), settings)
        self.world = world or World.from_env(nb_part)
        self.accumulate = accumulate
        self.in_use = StepInUse()
        self.states: dict[str, Stateful] = {}
        self._max_skipped = max_skipped
        self._seed = seed
        self._before: set[int] = set()  # the module's parameters before prepare()
        self._optimizer_step: OptimizerStep | None = None
        self._schedulers: list[PreparedScheduler] = []
        self._loaders: list[Loader] = []
        self._trackers = tuple(trackers if self.world.is_main else ())
        self._logs = False

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, _: object) -> None:
        if error is not None:
            self._tell("on_exception", error)
        self._tell("on_end")
        if kind is None:  # reports an error to the other processes first; see `launch.failure`
            self.close()

    def prepare(self, *objects: Any, example_inputs: Any = None) -> Any:
        """Returns the prepared objects in the same order; a single object without a tuple.

        Args:
            *objects: one `nn.Module`; optimizers over its parameters; their schedules; torch
                `DataLoader`s or `Loader`s. A loader's `batch_size` is the global batch size, and
                its samples are divided over the replicas.
            example_inputs: the inputs of a batch, see `HybridModel`; None to take them from the
                first loader.

        Raises:
            ConfigError: an object has an unsupported type, or there are two models.
        """
        loaders = {
            id(each): as_loader(each, self.world, self._seed)
            for each in objects
            if isinstance(each, DataLoader | TrainLoader | StreamLoader)
        }
        nets = [each for each in objects if isinstance(each, nn.Module)]
        if len(nets) + (self._optimizer_step is not None) > 1:
            raise ConfigError("a Session prepares only one model: wrap several in one module")
        if nets:
            if example_inputs is None and loaders:
                example_inputs = self._example(next(iter(loaders.values())))
            self._before = {id(parameter) for parameter in nets[0].parameters()}
            hybrid = HybridModel(nets[0], self.world, self.options, example_inputs=example_inputs)
            self._optimizer_step = OptimizerStep(hybrid, max_skipped=self._max_skipped)
        self._loaders += loaders.values()
        prepared = tuple(self._prepared(each, loaders) for each in objects)
        step = self._optimizer_step
        if step is not None and len(step.optimizers) > 1 and step.scaler.is_enabled():
            raise ConfigError(
                "fp16 needs a single optimizer: combine several with CombinedOptimizer"
            )
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepared(self, each: Any, loaders: Mapping[int, Loader]) -> Any:
        if id(each) in loaders:
            return PreparedLoader(loaders[id(each)], each, self)
        if isinstance(each, nn.Module):
            return PreparedModel(self.model, self._step.show_weights)
        if isinstance(each, Optimizer):
            for optimizer in inner_optimizers(each):
                keep_own_parameters(optimizer, self.model, self._before)
            check_optimizer(each, f"optimizer={type(each).__name__}")
            self._step.add(each)
            return PreparedOptimizer(each, self)
        if isinstance(each, ReduceLROnPlateau):
            raise ConfigError(
                "prepare() does not accept ReduceLROnPlateau, because it depends on a metric: a "
                "script can be resumed at any step only if its schedule depends on the step alone"
            )
        if isinstance(each, LRScheduler):
            self._schedulers.append(PreparedScheduler(each, self))
            return self._schedulers[-1]
        raise ConfigError(
            f"prepare() does not accept a {type(each).__name__}: it takes an nn.Module, "
            "optimizers, learning rate schedules, DataLoaders and Loaders"
        )

    def _example(self, loader: Loader) -> Any:
        samples = max(self.world.samples_by_replica(loader.batch_size))
        draws = default_generators()
        example = example_batch(loader.dataset, samples, loader.options.collate)
        rewind(draws)
        return example[0]

    @property
    def model(self) -> HybridModel:
        """The prepared model.

        Raises:
            ConfigError: no model was prepared.
        """
        return self._step.model

    @property
    def _step(self) -> OptimizerStep:
        if self._optimizer_step is None:
            raise ConfigError(
                "no model was prepared: call prepare() with the model first, or together with "
                "its optimizer"
            )
        return self._optimizer_step

    @property
    def steps(self) -> int:
        """The number of optimizer steps, taken or skipped."""
        return 0 if self._optimizer_step is None else self._optimizer_step.number

    @property
    def sync_gradients(self) -> bool:
        """True if the batch in use is the last one of its step."""
        return self.in_use.at_last_batch

    def train_step(self, inputs: Any, targets: Any, loss_fn: LossFn) -> TrainStepResult:
        """Runs the forward, loss and backward of the batch in use; see `HybridModel.train_step`.

        As in a `Trainer`, the gradients are of the mean loss over the whole step: all replicas and
        accumulated batches.

        Args:
            inputs: a pytree of tensors with this replica's batch in dim 0.
            targets: the unchanged targets from the loader, because their counts weight the batches.
            loss_fn: as in `HybridModel.train_step`. The batches of a step may have different ones
                if they average over the same, such as samples.

        Raises:
            BatchError: no prepared loader is in use, or `loss_fn` averages over something else than
                the loss with which the step began.
        """
        use = self.in_use
        if not use.batches:
            raise BatchError(
                "no batch of a prepared loader is in use: call this inside a loop over a loader "
                "from prepare()"
            )
        if use.training is None:
            use.training = self._step.begin(use.batches, loss_fn)
        if use.training is not self._step.in_progress:
            raise BatchError(
                "another loop trained between the batches of one step: finish a step before "
                "starting another loop"
            )
        return self._step.train_step(inputs, targets, loss_fn=loss_fn, index=use.index)

    def forward_backward(self, inputs: Any, targets: Any, loss_fn: LossFn) -> Tensor:
        """Runs a `train_step` and returns this replica's mean loss, a detached 0-dim tensor.

        NaN in a process without the last stage; `mean_loss` averages over all replicas.
        """
        return self.train_step(inputs, targets, loss_fn).loss

    def mean_loss(self) -> float:
        """Returns the mean loss over all replicas since the last call; a collective call."""
        return self._step.mean_loss()

    def clip_grad_norm_(self, max_norm: float) -> Tensor | None:
        """Clips the gradient norm over all stages to `max_norm`; returns the norm before clipping.

        Does nothing and returns None while the session is accumulating.
        """
        return self._step.clip(max_norm) if self.sync_gradients else None

    def gather_for_metrics(self, values: Any) -> Any:
        """Returns the values for all samples of the global batch, in order, each once.

        A collective call. Returns CPU tensors. The samples of a stream that is divided have no
        common order: one replica's follow the other's.

        Args:
            values: a pytree of tensors with this replica's batch in dim 0, such as predictions and
                targets.

        Raises:
            BatchError: no prepared loader is in use, or a tensor has no samples.
        """
        if self.in_use.loader is None:
            raise BatchError(
                "no batch of a prepared loader is in use: call gather_for_metrics() inside a "
                "loop over a loader from prepare()"
            )
        batch = self.in_use.batches[self.in_use.index]

        def own(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dim() == 0:
                raise BatchError("gather_for_metrics() needs tensors with the samples in dim 0")
            return leaf[: batch.samples].detach().cpu()

        of_ranks = self.world.gather(tree_map(own, values))
        places = [
            self.world.rank_of(replica, 0) for replica in range(self.world.data_parallel_size)
        ]
        merged = merge([of_ranks[rank] for rank in places])
        order = self.in_use.loader.order_of_shares(batch.total)
        if order is None:
            return merged
        # a collate function may return more or fewer samples than it gets
        return tree_map(lambda leaf: leaf[order] if len(leaf) == len(order) else leaf, merged)

    def print(self, *values: Any, **options: Any) -> None:
        """Prints on rank 0."""
        if self.world.is_main:
            print(*values, **options)

    def log(self, values: Mapping[str, float]) -> None:
        """Logs values by tag, such as `train/loss`, to the trackers on rank 0."""
        if not self._logs:
            self._logs = True
            self._tell("on_start")
        self._tell("on_log", dict(values))

    def _tell(self, hook: str, *args: object) -> None:
        """Calls a hook of all trackers."""
        run = _SessionRun(self.steps)
        for tracker in self._trackers:
            call_hook(tracker, hook, run, *args)

    def unwrap(self, model: PreparedModel) -> nn.Module:
        """Returns the user's module; layers of other processes' stages are empty."""
        return model.hybrid.net

    def save(self, directory: str | Path, keep: int | None = None) -> Path:
        """Saves a checkpoint to a subfolder of `directory` and returns its path. A collective call.

        Args:
            directory: the directory for all checkpoints of the run.
            keep: the number of newest checkpoints to keep; None to keep all.

        Raises:
            CheckpointError: the checkpoint cannot be written, or the step is not complete.
            DivergedError: weights or moments are not finite; nothing is written.
        """
        if not self.sync_gradients:
            raise CheckpointError(
                "the step is not complete: save when session.sync_gradients is True"
            )
        if self.in_use.has_unapplied_grads or (
            self.in_use.in_loop and not self.in_use.optimizer_stepped
        ):
            raise CheckpointError(
                "the batch in use has not been trained on yet, and a resumed run would skip it: "
                "save after optimizer.step()"
            )
        return save_run(
            self._step, directory, *self._loaders, states=self.states, keep=keep, progress=self
        )

    def resume(
        self, path: str | Path, *, missing_ok: bool = False, allow_changes: bool = False
    ) -> bool:
        """Continues from the checkpoint at `path`, or from the newest in that directory.

        Schedules are stepped to their saved position; hyperparameters come from the script. The
        next loop over the first loader continues its epoch.

        Args:
            path: a checkpoint, or the directory of all checkpoints.
            missing_ok: do nothing if there is no checkpoint.
            allow_changes: as in `Trainer.resume`.

        Returns:
            whether a checkpoint was loaded.

        Raises:
            CheckpointError: the checkpoint is missing or damaged, belongs to another model or other
                schedules, a schedule is already past its saved position, or it is in the middle of
                an epoch with another order; see `Loader.order`.
        """
        for loader in self._loaders:
            loader.refuses_other_order = not allow_changes
        saved = resume_run(
            self._step,
            path,
            *self._loaders,
            states=self.states,
            missing_ok=missing_ok,
            progress=self,
        )
        if saved is not None:
            for scheduler, steps in zip(self._schedulers, self._schedule_steps(saved), strict=True):
                replay(scheduler.scheduler, steps - scheduler.steps)
                scheduler.steps = steps
        return saved is not None

    def save_state(self, directory: str | Path, keep: int | None = None) -> Path:
        """Saves a checkpoint; Accelerate's name for `save`."""
        return self.save(directory, keep)

    def load_state(self, path: str | Path) -> None:
        """Continues from a checkpoint; Accelerate's name for `resume`."""
        self.resume(path)

    def _schedule_steps(self, saved: Mapping[str, Any]) -> list[int]:
        """Returns the number of steps of each schedule in the checkpoint `saved`.

        Raises:
            CheckpointError: the schedules differ, or one is already past its saved position.
        """
        # a Trainer does not save this, and steps its schedule in every step
        counts: list[int] = saved.get("schedule_steps", [saved["step"]] * len(self._schedulers))
        if len(counts) != len(self._schedulers):
            raise CheckpointError(
                f"the checkpoint has {len(counts)} schedules, but {len(self._schedulers)} were "
                "prepared: prepare the same schedules as when it was saved"
            )
        for scheduler, steps in zip(self._schedulers, counts, strict=True):
            if steps < scheduler.steps:
                raise CheckpointError(
                    f"{type(scheduler.scheduler).__name__} is at step {scheduler.steps}, past "
                    f"step {steps} of the checkpoint, and cannot step back: load the checkpoint "
                    "in a new Session"
                )
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress as JSON types."""
        schedule_steps = [scheduler.steps for scheduler in self._schedulers]
        return {"schedule_steps": schedule_steps, **self._step.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a `state_dict`, except for the schedules."""
        self._schedule_steps(state_dict)  # raises before anything is loaded
        self._step.load_state_dict(state_dict)

    def close(self) -> None:
        """Closes the trackers and leaves the process group; the session cannot be used again."""
        self._tell("on_end")
        self._optimizer_step = None
        self.world.close()

    def _leave(self, step: StepInUse, outer: StepInUse) -> None:
        """Leaves the loop over `step`, and returns to the step of the outer loop."""
        if step.has_partial_grads:
            self.model.zero_grad()
            for optimizer in self._step.optimizers:
                optimizer.zero_grad()
        if outer.in_loop:
            self.in_use = outer
        elif not step.at_last_batch:  # otherwise its last batch may be used after the loop
            self.in_use = StepInUse()

    def _take(self, optimizer: Optimizer) -> None:
        """Steps a prepared optimizer; the first of several counts the step."""
        use = self.in_use
        self._step.take(optimizer)
        if not use.optimizer_stepped:
            self._step.end()
        use.optimizer_stepped = True
