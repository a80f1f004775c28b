"""Runs the calls of a pipelined model: with gradients, without, and those that are not cut.

The pipeline is made at the first call with a batch, when patches of the forward and adapters are in
place, and again if modules or parameters have been replaced since.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from hybridtrain._base.accelerator import accelerator_of
from hybridtrain._base.microbatch import Microbatch, uncut
from hybridtrain._base.values import leaves_of
from hybridtrain.errors import ConfigError
from hybridtrain.head import LazyLogits, hidden_states, without_graph
from hybridtrain.launch import Launch
from hybridtrain.model import HybridModel
from hybridtrain.options import PipelineOptions
from hybridtrain.piped.calls import (
    Call,
    asks_for_cache,
    call_of,
    takes_cache,
    wants_cache_by_default,
)
from hybridtrain.piped.joining import Runs, joined, narrowed, proved
from hybridtrain.piped.optimizers import StaleOptimizers
from hybridtrain.piped.replicas import Replicas
from hybridtrain.piped.shares import CutBatch, rules_for
from hybridtrain.piped.steps import Kept, Kind, Step, gradient_of_number
from hybridtrain.pipeline import HeadOutput, StepKind, net_of_trip
from hybridtrain.world import World

log = logging.getLogger("hybridtrain")

_ONE_ROW = (
    "pipelined(%s): this batch has one row, so one device works at a time. A larger batch per "
    "device is cut into micro-batches; sequences that are packed into one row are not (for TRL's "
    "packing, set packing_strategy='wrapped')"
)

Forward = Callable[..., Any]


class _Here(threading.local):
    runs_plainly = False


_here = _Here()


@contextmanager
def plainly() -> Iterator[None]:
    """Lets forwards of pipelined models in the block run as they are, in this thread."""
    before, _here.runs_plainly = _here.runs_plainly, True
    try:
        yield
    finally:
        _here.runs_plainly = before


class Runner:
    """Runs the calls of one pipelined model.

    Args:
        net: the model.
        launch: the launcher's facts about this process.
        nb_part: the number of devices.
        devices: as in `World.from_env`.
        options: how to split and run the model.

    Attributes:
        world: the devices.
        replicas: the copies of the model in other processes.
        is_one_of_several: whether the launcher has started several processes.
    """

    def __init__(
        self,
        net: nn.Module,
        launch: Launch,
        nb_part: int,
        devices: Any,
        options: PipelineOptions,
    ) -> None:
        self.net = net
        self.options = options
        self.world = World.of_replica(launch, torch.cuda.device_count(), nb_part, devices)
        self.is_one_of_several = launch.size > 1
        self.replicas = Replicas(net, launch)
        self._optimizers = StaleOptimizers(net)
        self._model: HybridModel | None = None
        self._kinds: dict[Hashable, Kind] = {}
        self._has_begun = self._says_one_row = False

    def __call__(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the output of a call of the model.

        Args:
            forward: the forward, as assigned to `model.forward`.
            args: the arguments by position.
            kwargs: the arguments by name.
        """
        if _here.runs_plainly or net_of_trip() is not None or _is_transformed():
            return forward(*args, **kwargs)
        refuse_wrapped()
        with plainly():
            return self._run(forward, args, kwargs)

    def _run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        net = self.net
        wants_gradients = torch.is_grad_enabled() and (
            any(parameter.requires_grad for parameter in net.parameters())
            or any(isinstance(v, Tensor) and v.requires_grad for v in leaves_of((args, kwargs)))
        )
        learns = net.training and wants_gradients
        # without labels, a model in evaluation mode may be asked for its keys and values
        wants_cache = asks_for_cache(kwargs) or (
            not learns
            and kwargs.get("use_cache") is None
            and kwargs.get("labels") is None
            and wants_cache_by_default(net)
            and takes_cache(net)
        )
        chunks = self.options.chunks
        if wants_cache and not learns:
            if accelerator_of(self.world.devices[0]) is None:  # nothing moves
                return forward(*args, **kwargs)
            if not wants_gradients:
                return self._run_uncut(forward, args, kwargs)
            chunks = 1
        call = call_of(net, forward, args, kwargs, chunks, not wants_cache)
        model = self._pipeline(call, trains=wants_gradients)
        key = call.kind, net.training, wants_gradients, getattr(forward, "__func__", forward)
        kind = self._kinds.setdefault(key, Kind(self.options.schedule))
        if learns and call.samples == 1 < self.options.chunks and not self._says_one_row:
            self._says_one_row = True
            log.warning(_ONE_ROW, type(net).__name__)
        parts = call.cut()
        weights = self._weights(model, call, kind, parts, wants_gradients)
        of_step = model.check_batch(call.inputs, call.sizes, trains=wants_gradients)
        if net.training:  # or nothing is seeded
            # Trainers save and seed PyTorch's generator, so a resumed run has the same masks.
            model.rng.step = _number_ahead()
        if wants_gradients:
            finish = self.replicas.begin_step()
            output = Step(model, call, parts, weights, kind, of_step, finish).run()
        else:
            output = self._evaluate(model, parts, weights, kind, of_step)
        if model.rng.counts:  # A model that draws nothing leaves the generator as it is.
            torch.randint(2, (), device="cpu")
        return output

    def _is_current(self, model: HybridModel, trains: bool) -> bool:
        """Returns whether the pipeline is that of the model: none of its parts has been replaced,
        converted or moved. Frozen parameters are followed."""
        try:
            model.follow_changes(trains)
        except ConfigError:
            return False
        return True

    def _pipeline(self, call: Call, trains: bool) -> HybridModel:
        """Returns the pipeline of the model as it is now."""
        if self._model is None or not self._is_current(self._model, trains):
            if not self._has_begun:
                self.replicas.begin()
                # some trainers launch processes themselves, after pipelined(model)
                self.world = replace(self.world, rank=self.replicas.rank)
                self._has_begun = True
            self._optimizers.look()
            model = HybridModel(self.net, self.world, self.options)
            model.split_for(Microbatch(call.cut()[0]))  # may fail for this batch
            self._model = model
            self._kinds.clear()
            log.info("pipelined(%s): %s", type(self.net).__name__, model.plan)
        return self._model

    def _weights(
        self, model: HybridModel, call: Call, kind: Kind, parts: Sequence[Any], trains: bool
    ) -> Sequence[list[float] | None] | None:
        """Returns the weight of each micro-batch in the numbers among the outputs.

        None for a batch that is one micro-batch.
        """
        if len(parts) == 1:
            return None
        kind.calls += 1
        if kind.join is None:
            with self._comparing(model, trains) as runs:
                kind.join = proved(call, runs, rules_for(self.net, call))
            numbers = kind.join.trained
            if model.planned.head.names and len(numbers) == 1 and not _is_in_fp16(self.world):
                # or the first step would have the logits; if it is wrong, the forwards run again
                (kind.loss,) = numbers
        batch = CutBatch(call.cut([call.samples])[0], parts, call.sizes)
        shares = kind.join.shares(batch)
        is_due = kind.calls > 1 and not kind.calls & (kind.calls - 1)  # 2, 4, 8 and so on
        if kind.join.may_narrow(shares, is_due):
            with self._comparing(model, trains) as runs:
                kind.join = narrowed(kind.join, call, runs, shares, is_due)
        return kind.join.weights(shares)

    @contextmanager
    def _comparing(self, model: HybridModel, trains: bool) -> Iterator[Runs]:
        """Yields how the proofs run the model; it and the random state stay as they are."""
        has_gradients = trains and any(p.requires_grad for p in self.net.parameters())

        def head(_: int, output: Any) -> HeadOutput:
            # the logits of lazy ones depend on nothing but the hidden states of the same token
            return HeadOutput(tree_map_only(LazyLogits, lambda x: hidden_states(x)[0], output))

        def output(inputs: Any) -> Any:
            with torch.no_grad():
                return model.run_microbatches([inputs], head, trains=False)[0]

        def gradient(number: int, inputs: Any) -> Tensor | None:
            return gradient_of_number(model, inputs, number) if has_gradients else None

        step = model.rng.step
        try:
            with model.evaluating(), torch.random.fork_rng():
                yield Runs(output, gradient)
        finally:
            model.rng.step = step

    def _evaluate(
        self,
        model: HybridModel,
        parts: Sequence[Any],
        weights: Sequence[list[float] | None] | None,
        kind: Kind,
        of_step: StepKind,
    ) -> Any:
        kept = model.run_microbatches(parts, _kept, trains=False, kind=of_step)
        outputs = [of_part.output for of_part in kept]
        if len(outputs) == 1:
            return outputs[0]
        columns, spec = [], None
        for output in outputs:
            leaves, spec = tree_flatten(output)
            columns.append(leaves)
        assert spec is not None
        assert weights is not None
        kind.check_structure(spec)
        return tree_unflatten(joined(spec, columns, weights), spec)

    def _run_uncut(self, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a call as one micro-batch, device after device, such as a step of `generate()`."""
        call = call_of(self.net, forward, args, dict(kwargs), 1, False)
        model = self._pipeline(call, trains=False)
        return model.run_microbatches([uncut(call.inputs)], _as_it_is, trains=False)[0]


def _number_ahead() -> int:
    """Returns a number that PyTorch's default generator decides, without a draw from it."""
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return int(torch.randint(2**62, (), generator=generator, device="cpu"))


def _is_transformed() -> bool:
    """Returns whether PyTorch traces the call, or transforms it (torch.func).

    Then there is no data to cut.
    """
    return (
        torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or torch.compiler.is_exporting()
    )


def _as_it_is(_: int, output: Any) -> HeadOutput:
    return HeadOutput(output)


def _kept(_: int, output: Any) -> HeadOutput:
    leaves_of(output)  # registers dataclasses
    return HeadOutput(Kept(without_graph(output)))


def _is_in_fp16(world: World) -> bool:
    """Returns whether a scaler may multiply the loss by a number that its first backward needs."""
    kind = world.devices[0].type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16


def refuse_wrapped() -> None:
    """Refuses a call from inside DistributedDataParallel.

    Raises:
        ConfigError: DDP is around the model, or around a model that contains it.
    """
    if DistributedDataParallel._active_ddp_module is not None:
        raise ConfigError(
            "DistributedDataParallel cannot wrap a pipelined model, or a model that "
            "contains one: remove it, and gradients are averaged over the processes all the same"
        )
