"""The objects that `Session.prepare` returns in the place of the user's."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from hybridtrain.data import Batch, Loader, name_of, take
from hybridtrain.errors import BatchError, ConfigError, DataError
from hybridtrain.model import HybridModel
from hybridtrain.world import World

if TYPE_CHECKING:
    from hybridtrain.losses import StepWeights
    from hybridtrain.session.session import Session


class PreparedModel:
    """A `HybridModel` whose call returns the output in every process of a pipeline.

    Everything else is the `HybridModel`'s, `hybrid`.
    """

    def __init__(self, hybrid: HybridModel) -> None:
        self.hybrid = hybrid

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output for a batch, see `HybridModel`, on the CPU where it was sent."""
        output = self.hybrid(*args, **kwargs)
        world = self.hybrid.world
        if world.pipeline_object_group is None:
            return output
        # gloo carries what is on the CPU
        sent = [tree_map_only(object, _to_cpu, output) if self.hybrid.owns_output else None]
        owner = self.hybrid.pipeline.output_process
        dist.broadcast_object_list(sent, group=world.pipeline_object_group, group_src=owner)
        return sent[0]

    def train(self, mode: bool = True) -> PreparedModel:
        """Sets training mode, as `nn.Module.train`."""
        self.hybrid.train(mode)
        return self

    def eval(self) -> PreparedModel:
        """Sets evaluation mode, as `nn.Module.eval`, with replica 0's buffers on all replicas."""
        self.hybrid.eval()
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
        if not self._session.in_use.open:
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

    def catch_up(self, steps: int) -> None:
        """Steps on to `steps`, whether or not the optimizer has stepped in between."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it has not
            while self.steps < steps:
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
        weights: of the batches, once one of them was trained on.
        open: gradients are there of a part of its batches.
        waits: gradients are there that no optimizer has stepped on.
        stepped: an optimizer has stepped.
        looping: the loop that uses it has not been left.
    """

    batches: Sequence[Batch] = ()
    index: int = 0
    weights: StepWeights | None = None
    open: bool = False
    waits: bool = False
    stepped: bool = False
    looping: bool = False

    @property
    def at_last(self) -> bool:
        """Tells whether the batch in use is the last one."""
        return self.index + 1 >= len(self.batches)


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
                while group := take(batches, session.accumulate):
                    session.in_use = step = StepInUse(group, looping=True)
                    for index, batch in enumerate(group):
                        session.in_use, step.index = step, index
                        yield batch.inputs, session._on_output_device(batch.targets)
                        if session.in_use is not step and session.in_use.looping:
                            raise BatchError(
                                "two prepared loaders are read by one loop, and a step has the "
                                "batches of one: make one data set of both, or leave one of the "
                                "loaders out of prepare()"
                            )
        finally:
            step.looping = False
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
            f"from a seed, the same on all replicas; leave it out and give Session(seed=)"
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
    own = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        if any(id(p) not in own and id(p) not in before for p in group["params"]):
            raise ConfigError(
                "the optimizer holds parameters that the model does not have: make it over "
                "model.parameters() of the model that is prepared with it"
            )
        kept = [p for p in group["params"] if id(p) in own]
        if len(kept) < len(group["params"]):
            if model.world.processes_per_replica == 1:
                raise ConfigError(
                    "the model has other parameters than the module: prepare(module) first, and "
                    "then an optimizer over its parameters()"
                )
            # an optimizer wants one at least
            group["params"] = kept or [Parameter(torch.empty(0))]
