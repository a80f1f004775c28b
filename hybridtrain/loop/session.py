"""Session: what a script needs of the processes, devices and stages, in one object.

`Session.prepare` gives `PreparedModel`, `PreparedOptimizer`, `PreparedScheduler` and
`PreparedLoader` in the place of a script's own objects. They share the `StepInUse`: the batches of
an optimizer step, and how far the script's loop is in them.
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
from hybridtrain.checkpoint import replay, resume_run, save_run
from hybridtrain.data import (
    Batch,
    Loader,
    StreamLoader,
    TrainLoader,
    example_batch,
    name_of,
    next_step,
    share_of,
)
from hybridtrain.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    DataError,
    argument,
    setting,
)
from hybridtrain.loop.callbacks.tracker import Tracker, call_hook
from hybridtrain.loss import LossFn
from hybridtrain.model import HybridModel, TrainStepResult
from hybridtrain.options import PipelineOptions, with_settings
from hybridtrain.step import OptimizerStep, StepInProgress, check_steps_alone
from hybridtrain.world import World

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


class PreparedModel:
    """A `HybridModel` whose call returns the output in every process of a pipeline.

    Everything else is the `HybridModel`'s, `hybrid`. `train` and `eval` also call these methods of
    the optimizers, if they have them, as schedule-free ones do.
    """

    def __init__(
        self, hybrid: HybridModel, show_weights: Callable[[bool], None] = lambda training: None
    ) -> None:
        self.hybrid = hybrid
        self._show_weights = show_weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output for a batch, see `HybridModel`, on the CPU where it was sent."""
        output = self.hybrid(*args, **kwargs)
        world = self.hybrid.world
        if world.pipeline_object_group is None:
            return output
        # gloo carries what is on the CPU
        sent = tree_map_only(object, _to_cpu, output) if self.hybrid.owns_output else None
        owner = self.hybrid.pipeline.output_process
        return objects.broadcast(sent, world.pipeline_object_group, owner)

    def train(self, mode: bool = True) -> PreparedModel:
        """Sets training mode, as `nn.Module.train`."""
        self.hybrid.train(mode)
        self._show_weights(mode)
        return self

    def eval(self) -> PreparedModel:
        """Sets evaluation mode, as `nn.Module.eval`, with replica 0's buffers on all replicas."""
        self.hybrid.eval()
        self._show_weights(False)
        self.hybrid.sync_buffers()
        return self

    def __getattr__(self, name: str) -> Any:
        return _attribute(self, "hybrid", name)


def _to_cpu(value: Any) -> Any:
    return value.cpu() if hasattr(value, "cpu") else value


def _attribute(wrapper: object, field: str, name: str) -> Any:
    """Returns the attribute `name` of what `wrapper` has in `field`, if it is not a special one.

    `copy` and `pickle` ask an object without a state for special methods; those of the wrapped
    object would be wrong for the wrapper.
    """
    if name.startswith("__") or field not in vars(wrapper):
        raise AttributeError(f"{type(wrapper).__name__!r} object has no attribute {name!r}")
    return getattr(vars(wrapper)[field], name)


class PreparedOptimizer:
    """An optimizer that steps, and drops gradients, at the last batch of a step only."""

    def __init__(self, optimizer: Optimizer, session: Session) -> None:
        self.optimizer = optimizer
        self._session = session

    def step(self) -> None:
        """Steps, unless more batches are to be accumulated, or gradients of fp16 overflow."""
        if self._session.sync_gradients:
            self._session._take(self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, unless more batches are to be accumulated to them."""
        if not self._session.in_use.has_partial_grads:
            self.optimizer.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        return _attribute(self, "optimizer", name)


class PreparedScheduler:
    """A learning rate schedule that steps once per optimizer step.

    Attributes:
        scheduler: the schedule itself.
        steps: how often it was stepped.
    """

    def __init__(self, scheduler: LRScheduler, session: Session) -> None:
        self.scheduler = scheduler
        self.steps = 0
        self._session = session

    def step(self) -> None:
        """Steps, unless more batches are to be accumulated."""
        if self._session.sync_gradients:
            self.scheduler.step()
            self.steps += 1

    def __getattr__(self, name: str) -> Any:
        return _attribute(self, "scheduler", name)


@dataclass
class StepInUse:
    """The step whose batch a loop uses, and how far it is.

    Attributes:
        batches: of the step, of this replica.
        index: of the batch in use.
        training: the step, once one of its batches was trained on.
        optimizer_stepped: an optimizer has stepped.
        in_loop: the loop that uses it has not been left.
    """

    batches: Sequence[Batch] = ()
    index: int = 0
    training: StepInProgress | None = None
    optimizer_stepped: bool = False
    in_loop: bool = False

    @property
    def at_last_batch(self) -> bool:
        """Tells whether the batch in use is the last one."""
        return self.index + 1 >= len(self.batches)

    @property
    def has_partial_grads(self) -> bool:
        """Tells whether gradients of a part of its batches are there."""
        return self.training is not None and not self.training.is_trained

    @property
    def has_unapplied_grads(self) -> bool:
        """Tells whether gradients are there that no optimizer has stepped on."""
        return self.training is not None and not self.optimizer_stepped


class PreparedLoader:
    """A loader that tells the session which batch is in use; see `Loader` for its batches.

    A loop inside another loop, such as an evaluation, leaves the step of the outer one as it was. A
    loop that is left in the middle of a step drops its gradients.

    Everything else is that of the loader that was prepared, `original`.
    """

    def __init__(self, loader: Loader, original: Any, session: Session) -> None:
        self.loader = loader
        self.original = original
        self._session = session

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        # All batches of a step are read before the first of them is used, since their weights are
        # shares of the whole step.
        session = self._session
        outer, step = session.in_use, StepInUse()
        try:
            with closing(self.loader.batches()) as batches:
                while group := next_step(batches, session.accumulate):
                    session.in_use = step = StepInUse(group, in_loop=True)
                    for index, batch in enumerate(group):
                        session.in_use, step.index = step, index
                        targets = session.model.pipeline.to_output_device(batch.targets)
                        yield batch.inputs, targets
                        if session.in_use is not step and session.in_use.in_loop:
                            raise BatchError(
                                "two prepared loaders are read by one loop, and a step has the "
                                "batches of one: make one data set of both, or leave one of the "
                                "loaders out of prepare()"
                            )
        finally:
            step.in_loop = False
            # not if another loop has begun since, nor where the interpreter ends inside of the loop
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
    """Returns a `Loader` with the data set and the settings of a torch `DataLoader`.

    `batch_size` becomes that of a global batch, and the order is the one of `Loader`.

    Raises:
        DataError: its sampler is neither PyTorch's random nor its sequential one, draws with
            replacement or a number of samples; or it has a `generator` or a `worker_init_fn`.
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
            f"{name_of(loader)} has its own sampler, and the batches of replicas are cut from "
            f"one order: pass Loader(dataset, batch_size, world) of a data set in the wanted order"
        )
    if loader.generator is not None or getattr(loader.sampler, "generator", None) is not None:
        raise DataError(
            f"{name_of(loader)} has a generator, which would have no effect: the order is drawn "
            "from a seed, the same on all replicas; leave it out and give "
            f"Session({argument('seed')})"
        )
    if loader.worker_init_fn is not None:
        raise DataError(
            f"{name_of(loader)} has a worker_init_fn, which would have no effect: do its work in "
            f"the data set, when its first sample is read"
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
    """Leaves out of an optimizer the parameters of stages in other processes.

    Args:
        optimizer: over parameters of the model, or of the module that it was made of.
        model: the model.
        before: the ids of the module's parameters before its stages were placed.

    Raises:
        ConfigError: it holds parameters that the model does not have.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        if any(id(p) not in parameters and id(p) not in before for p in group["params"]):
            raise ConfigError(
                "the optimizer holds parameters that the model does not have: make it over "
                "model.parameters() of the model that is prepared with it"
            )
        params = [p for p in group["params"] if id(p) in parameters]
        if len(params) < len(group["params"]):
            if model.world.processes_per_replica == 1:
                raise ConfigError(
                    "the model has other parameters than the module: prepare(module) first, and "
                    "then an optimizer over its parameters()"
                )
            # an optimizer wants one at least
            group["params"] = params or [Parameter(torch.empty(0))]


@dataclass(frozen=True)
class _SessionRun:
    """The `Run` of a script's own loop, which knows the number of steps alone."""

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

    A pipeline computes the loss inside the step, for each micro-batch where the last stage is. So
    `output = model(inputs)`, `loss = loss_fn(output, targets)` and `loss.backward()` become the one
    call `forward_backward`; a call of the model has no graph, and is for evaluation.

    A step whose loss or gradients are not finite is skipped and named, as by a `Trainer`; signals
    are not listened to.

    Args:
        nb_part: the stages; None: what the launcher says, see `World.from_env`.
        world: in place of `nb_part`, a World that is there already.
        max_skipped: consecutive steps that may be skipped because the loss or a gradient is not
            finite; then `optimizer.step` raises `DivergedError`. None: no limit.
        accumulate: batches per optimizer step. `optimizer.step` and `scheduler.step` do nothing
            until the last of them, as `sync_gradients` says, and `zero_grad` nothing in between.
        seed: of the order of the samples.
        trackers: receive what `log` is given, on rank 0, such as `TensorBoard(directory)`.
        options: how the model is cut and run; see `PipelineOptions`.
        **settings: fields of `options` to change.

    Attributes:
        world: the processes.
        in_use: the step whose batch is in use.
        states: what else `save_state` saves, by name: objects with `state_dict` and
            `load_state_dict`.

    Raises:
        ConfigError, WorldError: an argument does not fit.
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
        if type(accumulate) is not int or accumulate < 1:
            raise ConfigError(
                f"{setting('accumulate', accumulate)} must be a whole number of at least 1"
            )
        if world is not None and nb_part is not None:
            raise ConfigError(
                f"give {argument('nb_part')} or world=, not both: a World has its nb_part"
            )
        self.options = with_settings(options or PipelineOptions(), settings)
        self.world = world or World.from_env(nb_part)
        self.accumulate = accumulate
        self.in_use = StepInUse()
        self.states: dict[str, Stateful] = {}
        self._max_skipped = max_skipped
        self._seed = seed
        self._before: set[int] = set()  # the module's parameters before it was prepared
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
        if kind is None:  # an error is told to the other processes first; see `launch.failure`
            self.close()

    def prepare(self, *objects: Any, example_inputs: Any = None) -> Any:
        """Returns the objects as a script uses them, in the same order; one alone by itself.

        Args:
            *objects: one `nn.Module`; optimizers over its parameters; their schedules; torch
                `DataLoader`s or `Loader`s. The `batch_size` of a loader is over all replicas, and
                its samples are divided over them.
            example_inputs: the inputs of a batch, see `HybridModel`; None: from the first loader.

        Raises:
            ConfigError: an object is of another kind, or there are two models.
        """
        loaders = {
            id(each): as_loader(each, self.world, self._seed)
            for each in objects
            if isinstance(each, DataLoader | TrainLoader | StreamLoader)
        }
        nets = [each for each in objects if isinstance(each, nn.Module)]
        if len(nets) + (self._optimizer_step is not None) > 1:
            raise ConfigError("a Session prepares one model: wrap several in one module")
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
            raise ConfigError("fp16 needs one optimizer: join several as a CombinedOptimizer")
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepared(self, each: Any, loaders: Mapping[int, Loader]) -> Any:
        if id(each) in loaders:
            return PreparedLoader(loaders[id(each)], each, self)
        if isinstance(each, nn.Module):
            return PreparedModel(self.model, self._step.show_weights)
        if isinstance(each, Optimizer):
            for optimizer in getattr(each, "optimizers", [each]):
                keep_own_parameters(optimizer, self.model, self._before)
            check_steps_alone(each, f"optimizer={type(each).__name__}")
            self._step.add(each)
            return PreparedOptimizer(each, self)
        if isinstance(each, ReduceLROnPlateau):
            raise ConfigError(
                "prepare() takes no ReduceLROnPlateau, since it depends on a metric, and a script "
                "can be resumed at any step only if its schedule depends on the step alone"
            )
        if isinstance(each, LRScheduler):
            self._schedulers.append(PreparedScheduler(each, self))
            return self._schedulers[-1]
        raise ConfigError(
            f"prepare() does not know a {type(each).__name__}: it takes an nn.Module, optimizers, "
            f"learning rate schedules, DataLoaders and Loaders"
        )

    def _example(self, loader: Loader) -> Any:
        share = share_of(loader.batch_size, 0, self.world.logical_replicas)
        draws = default_generators()
        example = example_batch(loader.dataset, share.stop, loader.options.collate)
        rewind(draws)
        return example[0]

    @property
    def model(self) -> HybridModel:
        """The model that was prepared.

        Raises:
            ConfigError: none was.
        """
        return self._step.model

    @property
    def _step(self) -> OptimizerStep:
        if self._optimizer_step is None:
            raise ConfigError("prepare() a model first, or together with its optimizer")
        return self._optimizer_step

    @property
    def steps(self) -> int:
        """Optimizer steps done, taken or skipped."""
        return 0 if self._optimizer_step is None else self._optimizer_step.number

    @property
    def sync_gradients(self) -> bool:
        """Tells whether the batch in use is the last one of its step."""
        return self.in_use.at_last_batch

    def train_step(self, inputs: Any, targets: Any, loss_fn: LossFn) -> TrainStepResult:
        """Runs forward, loss and backward of the batch in use; see `HybridModel.train_step`.

        The gradients are those of the mean over the whole step, of all replicas and accumulated
        batches, as a `Trainer` has them.

        Args:
            inputs: a pytree of tensors with this replica's batch in dim 0.
            targets: as the loader gave them, since what they count weighs the batches.
            loss_fn: as in `HybridModel.train_step`.

        Raises:
            BatchError: no prepared loader is in use.
        """
        use = self.in_use
        if not use.batches:
            raise BatchError("a training step is for a batch of a prepared loader: none is used")
        if use.training is None:
            use.training = self._step.begin(use.batches, loss_fn)
        if use.training is not self._step.in_progress:
            raise BatchError("another loop has trained between the batches of one step")
        return self._step.train_step(inputs, targets, index=use.index)

    def forward_backward(self, inputs: Any, targets: Any, loss_fn: LossFn) -> Tensor:
        """Returns the loss of a `train_step`: the mean of this replica, a detached 0-dim tensor.

        NaN in a process that does not have the last stage; see `mean_loss` for that of all.
        """
        return self.train_step(inputs, targets, loss_fn).loss

    def mean_loss(self) -> float:
        """Returns the mean loss over all replicas since the last call; a collective call."""
        return self._step.mean_loss()

    def clip_grad_norm_(self, max_norm: float) -> Tensor | None:
        """Scales the gradients of all stages down to `max_norm`; returns their norm before.

        Does nothing, and returns None, while more batches are to be accumulated.
        """
        return self._step.clip(max_norm) if self.sync_gradients else None

    def gather_for_metrics(self, values: Any) -> Any:
        """Returns the values of all samples of the global batch, each once, in its order.

        A collective call; on the CPU.

        Args:
            values: a pytree of tensors with this replica's batch in dim 0, such as predictions and
                targets.

        Raises:
            BatchError: no prepared loader is in use, or a tensor has no samples.
        """
        if not self.in_use.batches:
            raise BatchError("gather_for_metrics() is for a batch of a prepared loader")
        samples = self.in_use.batches[self.in_use.index].samples

        def own(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dim() == 0:
                raise BatchError("gather_for_metrics() takes tensors with the samples in dim 0")
            return leaf[:samples].detach().cpu()

        of_ranks = self.world.gather(tree_map(own, values))
        places = [
            self.world.rank_of(replica, 0) for replica in range(self.world.data_parallel_size)
        ]
        return merge([of_ranks[rank] for rank in places])

    def print(self, *values: Any, **options: Any) -> None:
        """Prints on rank 0."""
        if self.world.is_main:
            print(*values, **options)

    def log(self, values: Mapping[str, float]) -> None:
        """Hands values by tag, such as `train/loss`, to the trackers on rank 0."""
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
        """Returns the user's module; with stages in several processes, other stages' are empty."""
        return model.hybrid.net

    def save(self, directory: str | Path, keep: int | None = None) -> Path:
        """Saves a checkpoint in a folder of `directory`; returns the folder. A collective call.

        Args:
            directory: of all checkpoints of the run.
            keep: how many of the newest to keep; None: all.

        Raises:
            CheckpointError: it cannot be written, or the step is not complete: the position of the
                loader is after the batch in use.
            DivergedError: weights or moments are not finite; nothing is written.
        """
        if not self.sync_gradients:
            raise CheckpointError("a step is not complete: save when session.sync_gradients is set")
        if self.in_use.has_unapplied_grads or (
            self.in_use.in_loop and not self.in_use.optimizer_stepped
        ):
            raise CheckpointError(
                "the batch in use was not trained on yet, and a run that goes on from here would "
                "leave it out: save after optimizer.step()"
            )
        return save_run(
            self._step, directory, *self._loaders, states=self.states, keep=keep, progress=self
        )

    def resume(self, path: str | Path, *, missing_ok: bool = False) -> bool:
        """Continues from the checkpoint at `path`, or from the newest in that directory.

        Schedules are stepped on to where they were; hyperparameters are the script's. The next
        loop over the first loader continues in its epoch.

        Args:
            path: a checkpoint, or the directory of all.
            missing_ok: if there is none, do nothing.

        Returns:
            whether there was one.

        Raises:
            CheckpointError: it is missing or damaged, is of another model or of other schedules, or
                a schedule is further than it was then.
        """
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
        """Saves a checkpoint: `save` by the name of Accelerate."""
        return self.save(directory, keep)

    def load_state(self, path: str | Path) -> None:
        """Continues from a checkpoint: `resume` by the name of Accelerate."""
        self.resume(path)

    def _schedule_steps(self, saved: Mapping[str, Any]) -> list[int]:
        """Returns how often each schedule was stepped when `saved` was.

        Raises:
            CheckpointError: there were others, or one cannot go back to where it was.
        """
        # a Trainer does not say, and steps its schedule in every step
        counts: list[int] = saved.get("schedule_steps", [saved["step"]] * len(self._schedulers))
        if len(counts) != len(self._schedulers):
            raise CheckpointError(
                f"the checkpoint has {len(counts)} schedules, and {len(self._schedulers)} were "
                f"prepared: prepare the same as when it was saved"
            )
        for scheduler, steps in zip(self._schedulers, counts, strict=True):
            if steps < scheduler.steps:
                raise CheckpointError(
                    f"{type(scheduler.scheduler).__name__} has done {scheduler.steps} steps, and "
                    f"{steps} in the checkpoint; it cannot go back: load it in a new Session"
                )
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress in JSON's types."""
        schedule_steps = [scheduler.steps for scheduler in self._schedulers]
        return {"schedule_steps": schedule_steps, **self._step.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a `state_dict`, but for the schedules."""
        self._schedule_steps(state_dict)  # refused before anything is loaded
        self._step.load_state_dict(state_dict)

    def close(self) -> None:
        """Ends the trackers and leaves the other processes; the session cannot be used again."""
        self._tell("on_end")
        self._optimizer_step = None
        self.world.close()

    def _leave(self, step: StepInUse, outer: StepInUse) -> None:
        """Ends the use of `step`, whose loop is left, inside that of `outer`."""
        if step.has_partial_grads:
            self.model.zero_grad()
            for optimizer in self._step.optimizers:
                optimizer.zero_grad()
        if outer.in_loop:
            self.in_use = outer
        elif not step.at_last_batch:  # else its last batch may be used after the loop
            self.in_use = StepInUse()

    def _take(self, optimizer: Optimizer) -> None:
        """Has a prepared optimizer step; the first of several counts the step."""
        use = self.in_use
        self._step.take(optimizer)
        if not use.optimizer_stepped:
            self._step.end()
        use.optimizer_stepped = True
