"""Compares the stages with the unsplit module before the first step of each kind of input.

Only `engine="distributed"` needs this file.

A wrong trace or cut would train a wrong model without an error. So before the first step, and
before the first step on each new kind of input, a small sample runs twice on copies of the model:

    copy 1   cut as planned, by the run's schedule, backward ───────┐
                                                                    ├─ outputs, gradients, buffers
    copy 2   module(sample), backward ──────────────────────────────┘

Small models run on numbers, with the same random draws in both runs, and are compared bitwise.
Large models, and models of which this process holds only a part, run without data and are compared
by the expressions that they compute (see `expressions`). If the model's code depends on data, or
the expressions differ, a run on numbers decides, unless the model is too large for it. A mismatch
is an error that names the first layer with a different output.

The check never touches the model itself, and restores the closures, globals and generators that its
code uses.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from hybridtrain._base.accelerator import accelerator_of
from hybridtrain._base.microbatch import Microbatch, batch_size, chunk_sizes, split
from hybridtrain._base.precision import autocast
from hybridtrain._base.tensors import bytes_of_module
from hybridtrain._base.torch_private import without_modes
from hybridtrain.errors import NotExactError, setting
from hybridtrain.graph import Layer, Segment, TraceGuards, arguments_of
from hybridtrain.partitioning import PlannedLayers
from hybridtrain.pipeline import HeadOutput, InlineEngine, Pipeline, ReplayedDraws
from hybridtrain.schedule import forward_only, make_schedule
from hybridtrain.verification.comparison import Calls, Difference, difference, differences
from hybridtrain.verification.cut_model import (
    MAX_BYTES,
    MAX_SECONDS,
    SAMPLES,
    CutModel,
    kind_of,
    root_of,
)
from hybridtrain.verification.expressions import Expressions, Symbol, contents
from hybridtrain.verification.module_copy import copy_modules
from hybridtrain.verification.python_state import undone
from hybridtrain.world import World

log = logging.getLogger("hybridtrain")

SMALL_BYTES = 32 * 2**20
"""Models with at most this many bytes of parameters and buffers are run on numbers at once."""

TOLERANCE = 1e-5
"""The relative difference allowed for gradients of parameters shared by several stages, because the
stages sum them in another order."""


class _Skipped(Exception):
    """The comparison is not possible; the message has the reason."""


class _Sample(NamedTuple):
    """A small micro-batch, and the modes in which the model runs on it."""

    inputs: Any
    training: bool
    trains: bool
    variant: int | None = None

    def __str__(self) -> str:
        shapes = [
            f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
            for leaf in tree_leaves(self.inputs)
            if isinstance(leaf, Tensor)
        ]
        mode = "training" if self.training else "evaluation"
        return f"in {mode} mode, for inputs of {', '.join(shapes)}"


class _Numbers(NamedTuple):
    """The outputs of a run, and by name the gradients and buffers after it."""

    output: Any
    gradients: dict[str, Any]
    buffers: dict[str, Any]


class SelfCheck:
    """Compares a model's stages with the unsplit module, once for each kind of input.

    Args:
        model: the model to check.
        variants_of: returns the graph variant of each micro-batch, or None without variants.
    """

    def __init__(
        self,
        model: CutModel,
        variants_of: Callable[[Sequence[Any]], Sequence[int] | None] = lambda parts: None,
    ) -> None:
        self._model = model
        self._variants_of = variants_of
        self._signatures: set[Any] = set()  # exact shapes, for a fast lookup
        self._kinds: set[Any] = set()
        self._is_off = not model.options.self_check or _is_trivial(model.planned)
        self._says_skipped = model.world.is_main
        self._not_compared: set[str] = set()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switches the check off in the block."""
        was_off, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = was_off

    def check_at_construction(self, example_inputs: Any) -> None:
        """Checks the micro-batches of an example batch, in training and in evaluation mode.

        Raises:
            NotExactError: the stages compute something other than the module.
        """
        if isinstance(example_inputs, Microbatch):
            inputs, sizes = example_inputs.inputs, [batch_size(example_inputs.inputs)]
        else:
            inputs = example_inputs
            sizes = chunk_sizes(batch_size(inputs), self._model.options.chunks)
        net = self._model.net
        modes = [(module, module.training) for module in net.modules()]
        try:
            for training in (True, False):
                net.train(training)
                self.check_batch(inputs, sizes, trains=training)
        finally:
            for module, mode in modes:
                module.training = mode

    def check_batch(self, inputs: Any, sizes: Sequence[int], *, trains: bool) -> None:
        """Checks the micro-batches of a batch whose kind has not been checked before.

        Args:
            inputs: the inputs of the batch.
            sizes: the number of samples in each micro-batch.
            trains: whether a backward follows.

        Raises:
            NotExactError: the stages compute something other than the module.
        """
        if self._is_off:
            return
        training = self._model.net.training
        if type(inputs) is Tensor:
            signature: Any = inputs.shape, inputs.dtype, training, trains, len(sizes)
        else:
            leaves, spec = tree_flatten(inputs)
            shapes = [(v.shape, v.dtype) if isinstance(v, Tensor) else type(v) for v in leaves]
            signature = (*shapes, spec, training, trains, len(sizes))
        if signature not in self._signatures:
            self._signatures.add(signature)
            with without_modes(), self._autocast():
                self._check_batch(inputs, sizes, training, trains)

    def _autocast(self) -> AbstractContextManager[object]:
        return autocast(self._model.options.precision, self._model.world.devices[0].type)

    def _check_batch(self, inputs: Any, sizes: Sequence[int], training: bool, trains: bool) -> None:
        with torch.set_grad_enabled(trains):
            self._model.planned.guards.check()  # raises clearer errors than a mismatch
        parts = split(inputs, sizes)
        variants: Sequence[int | None] = self._variants_of(parts) or [None] * len(sizes)
        start = 0
        for part, size, variant in zip(parts, sizes, variants, strict=True):
            kind = kind_of(inputs, size), training, trains, variant
            if kind not in self._kinds:
                self._kinds.add(kind)
                small = part
                if size > SAMPLES and variant is None:  # fewer samples may need another variant
                    # cut from the batch, because shared values are marked only there
                    small = split(inputs, [start, SAMPLES, sum(sizes) - start - SAMPLES])[1]
                self._check(*(_Sample(s, training, trains, variant) for s in (small, part)))
            start += size

    def _check(self, small: _Sample, whole: _Sample) -> None:
        try:
            try:
                self._compare(small)
            except _Failed:
                if small.inputs is whole.inputs:
                    raise
                self._compare(whole)  # the model may need more samples
        except _Failed as failure:
            # if the cause is not the small sample, the step itself raises this error
            log.debug("could not compare the stages with the unsplit module: %r", failure.error)
        except _Skipped as reason:
            if self._says_skipped:
                self._says_skipped = False
                log.info(
                    "the stages were not compared with the unsplit module, because %s: to "
                    "compare them, run `hybridtrain verify` or model.verify(...)",
                    reason,
                )

    def _compare(self, sample: _Sample) -> None:
        model = self._model
        if bytes_of_module(model.net) <= SMALL_BYTES and not model.is_partial:
            if place := self._mismatch(sample, symbolic=False):
                self._refuse(place)
            return
        place = None
        with suppress(_Failed):  # its code depends on data
            place = self._mismatch(sample, symbolic=True)
            if place is None:
                return
        try:
            place = self._mismatch(sample, symbolic=False)
        except (_Skipped, _Failed) as reason:
            if place is None:
                raise
            # a graph may compute the same numbers with other operators
            raise _Skipped(
                f"{place}, and a run on numbers cannot decide, because {reason}"
            ) from None
        if place is not None:
            self._refuse(place)

    def _mismatch(self, sample: _Sample, *, symbolic: bool) -> str | None:
        """Returns where the cut and unsplit model differ; logs values that cannot be compared."""
        run = _Run(self._model, symbolic=symbolic)
        place = run.mismatch(sample)
        new_kinds = run.not_compared - self._not_compared
        self._not_compared |= new_kinds
        if new_kinds and self._model.world.is_main:
            log.info(
                "the self-check did not compare %s, because the type cannot be compared",
                ", ".join(sorted(new_kinds)),
            )
        return place

    def _refuse(self, place: str) -> NoReturn:
        model = self._model
        raise NotExactError(
            f"the model in {len(model.plan.stages)} stages does not compute the same as "
            f"{type(model.net).__name__} itself, {place}. Move the code around that place, and "
            "everything that shares state with it, into a submodule that the model calls: "
            f"submodules are called, not traced. {setting('self_check', False)} disables this "
            "check"
        )


def _is_trivial(planned: PlannedLayers) -> bool:
    """Returns whether nothing is cut or traced."""
    (first, *later_stages) = planned.stages
    return not later_stages and not any(isinstance(layer.module, Segment) for layer in first)


class _Failed(Exception):
    """One of the two runs raised `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _Run:
    """Runs copies of a model on a sample, cut and unsplit.

    Attributes:
        not_compared: the values that could not be compared, as "Parser in output".
    """

    def __init__(self, model: CutModel, *, symbolic: bool) -> None:
        self._model = model
        self._net = model.net
        self._planned = model.planned
        self._lanes = model.world.nb_part
        self._symbolic = symbolic
        self.not_compared: set[str] = set()
        self._device = torch.device("cpu") if symbolic else model.world.devices[-1]
        # without the options that concern only replicas or compiled code
        self._options = replace(
            model.options,
            compile=False,
            shard="none",
            sync_batch_norm=False,
            broadcast_buffers=False,
        )
        # recomputation would repeat draws, and a deferred batch norm computes differently
        if symbolic:
            self._options = replace(self._options, recompute="never", batch_norm="micro_batch")
        self._check_modules()

    def mismatch(self, sample: _Sample) -> str | None:
        """Returns where the cut and the unsplit model differ, or None if they do not.

        Raises:
            _Skipped: the comparison would take too long, or is not possible.
            _Failed: one of the two runs raised an error.
        """
        mismatch = self._difference(sample)
        if mismatch is None:
            return None
        if not self._repeats_itself(sample):
            raise _Skipped("two runs of the module on the same inputs give different numbers")
        return f"{sample}: {mismatch}{self._first_place(sample)}"

    def _difference(self, sample: _Sample) -> Difference | None:
        """Returns the first output, gradient or buffer that differs."""
        cut, seeds, tied = self._run_cut(sample)
        plain = self._run_plain(sample, seeds)
        results = [("output", cut.output, plain.output)]
        for name, gradient in plain.gradients.items():
            results.append((f"the gradient of {name}", cut.gradients.get(name), gradient))
        if self._options.batch_norm != "deferred":  # its buffers intentionally differ
            for name, buffer in plain.buffers.items():
                results.append((f"buffer {name}", cut.buffers.get(name), buffer))
        for mismatch in differences(*results, not_compared=self.not_compared):
            if not (mismatch.name in tied and (self._symbolic or mismatch.size <= TOLERANCE)):
                return mismatch
        return None

    def _repeats_itself(self, sample: _Sample) -> bool:
        """Returns whether two runs of the unsplit module give the same numbers."""
        seeds = self._run_cut(sample)[1]
        first, second = self._run_plain(sample, seeds), self._run_plain(sample, seeds)
        return not difference(tuple(first), tuple(second))

    def _first_place(self, sample: _Sample) -> str:
        """Returns the end of an error message: the first layer with a different output."""
        cut, plain = Calls(), Calls()
        seeds = self._run_cut(sample, cut)[1]
        self._run_plain(sample, seeds, plain)
        for name, outputs in plain.outputs.items():
            if name in cut.outputs and difference(cut.outputs[name], outputs):
                if _same_inputs(cut.inputs.get(name), plain.inputs.get(name)):
                    return f"; the first layer with a different output is {name!r}"
                return f"; the first difference is in the code that leads to layer {name!r}"
        return ""

    def _check_modules(self) -> None:
        for module in self._net.modules():
            if isinstance(module, SyncBatchNorm):
                raise _Skipped("a SyncBatchNorm needs all processes")
            if isinstance(module, torch.jit.ScriptModule):
                raise _Skipped("TorchScript runs different code in its first runs than later")
        if self._symbolic:
            return
        if self._model.is_partial:
            raise _Skipped("its code depends on data, and no process has the whole model")
        limit: float = MAX_BYTES
        if (accelerator := accelerator_of(self._device)) is not None:
            limit = min(limit, accelerator.total_memory(self._device) / 16)
        if (total := bytes_of_module(self._net)) > limit:
            raise _Skipped(
                f"its code depends on data, and its size of {total / 2**30:.1f} GiB exceeds "
                f"{limit / 2**30:.1f} GiB"
            )

    def _run_cut(
        self, sample: _Sample, calls: Calls | None = None
    ) -> tuple[_Numbers, Sequence[int], set[str]]:
        """Runs a copy that is cut into stages as planned.

        Returns:
            the results; the seeds of the random draws, in order; and the names of the gradients
            that are summed over stages.
        """
        layers = [[layer.module for layer in stage] for stage in self._planned.stages]
        numbers = self._numbers()
        net, copied = numbers.copied((self._net, layers))
        planned = replace(
            self._planned,
            guards=TraceGuards(),
            variants=None,  # the layers contain them
            stages=[
                [Layer(layer.name, module) for layer, module in zip(stage, modules, strict=True)]
                for stage, modules in zip(self._planned.stages, copied, strict=True)
            ],
        )
        world = World(devices=(self._device,) * self._lanes)
        shape = self._lanes, 1, self._options.stages_per_device
        inputs, trains = numbers.placed(sample.inputs, sample.trains), sample.trains
        output: list[Any] = []

        def head(microbatch: int, value: Any) -> HeadOutput:
            output.append(numbers.noted(value))
            root = root_of(value) if trains else None
            if root is None:
                return HeadOutput(None)
            return HeadOutput(root.detach(), root, torch.ones_like(root))

        with self._as_before(net), _failures(), numbers.entered():
            pipeline = Pipeline(net, self._model.plan, planned, world, self._options, InlineEngine)
            pipeline.watches_state = not self._symbolic  # a run without data recomputes nothing
            pipeline.rng.seeds_evaluations = not self._symbolic
            if sample.variant is not None:
                pipeline.choose_variants([sample.variant])
            step = pipeline.rng.step
            begun = time.perf_counter()
            with (
                _watching(calls, net, numbers, planned, pipeline.traced_names),
                torch.set_grad_enabled(trains),
                self._autocast(),
            ):
                if trains:
                    schedule = make_schedule(
                        self._options.schedule, *shape, self._options.max_inflight
                    )
                    pipeline.run_train_step(schedule, lambda _: inputs, head, reduce=False)
                else:
                    forward = forward_only(self._lanes, 1, shape[2], self._options.placement)
                    pipeline.run_forward(forward, lambda _: inputs, head)
            if calls is None and time.perf_counter() - begun > MAX_SECONDS and not self._symbolic:
                raise _Skipped(f"a forward and backward take more than {MAX_SECONDS:.0f} s")
            seeds = pipeline.rng.seeds_in_order(dict(pipeline.rng.counts), 0, step)
            shared = {id(tie.parameter) for stage in pipeline.stages for tie in stage.aliases}
            tied = {
                f"the gradient of {name}" for name, p in net.named_parameters() if id(p) in shared
            }
            return numbers.after(net, output[0], inputs), seeds, tied

    def _run_plain(
        self, sample: _Sample, seeds: Sequence[int], calls: Calls | None = None
    ) -> _Numbers:
        """Runs an unsplit copy, with the random draws of the cut copy."""
        numbers = self._numbers()
        (net,) = numbers.copied((self._net,))
        inputs = numbers.placed(sample.inputs, sample.trains)
        args, kwargs = arguments_of(net, inputs)
        draws = ReplayedDraws(seeds) if seeds else nullcontext()
        with self._as_before(net), _failures(), numbers.entered():
            with (
                _watching(calls, net, numbers),
                torch.set_grad_enabled(sample.trains),
                self._autocast(),
                draws,
            ):
                output = net(*args, **kwargs)
                noted = numbers.noted(output)
                root = root_of(output) if sample.trains else None
            if root is not None:
                with torch.autocast(self._device.type, enabled=False):  # the caller's
                    root.backward(torch.ones_like(root))
            return numbers.after(net, noted, inputs)

    def _numbers(self) -> _Values:
        return _Symbols(self._net) if self._symbolic else _Values(self._device)

    @contextmanager
    def _as_before(self, net: nn.Module) -> Iterator[None]:
        """Restores state that a run changes outside the copy `net`, and the default generators."""
        with undone(net, [self._device]) as state, warnings.catch_warnings():
            if not state.is_complete:
                raise _Skipped("its code can reach too many objects to restore them all")
            warnings.simplefilter("ignore")  # the run itself warns too
            yield

    def _autocast(self) -> Any:
        return autocast(self._options.precision, self._device.type)


class _Values:
    """Copies of a model that compute numbers.

    Args:
        device: the device of the copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copied(self, modules: Any) -> Any:
        """Returns copies of modules."""
        try:
            copied = copy_modules(modules)
            copied[0].to(self._device)
        except Exception as error:
            raise _Skipped(f"the module cannot be copied ({_first_line(error)})") from error
        return copied

    def placed(self, inputs: Any, trains: bool) -> Any:
        """Returns a copy of `inputs` with the same `requires_grad`."""

        def placed(tensor: Tensor) -> Tensor:
            moved = tensor.detach().to(self._device, copy=True)
            return moved.requires_grad_(tensor.requires_grad and trains)

        return tree_map_only(Tensor, placed, inputs)

    def entered(self) -> AbstractContextManager[Any]:
        """Returns the context of a run."""
        return nullcontext()

    def noted(self, tree: Any) -> Any:
        """Returns the representation of a result for the comparison."""
        return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), tree)

    def after(self, net: nn.Module, output: Any, inputs: Any) -> _Numbers:
        """Returns the output of a run with the gradients and buffers after it."""
        gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
        for number, leaf in enumerate(tree_leaves(inputs)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                gradients[f"input {number}"] = leaf.grad
        return _Numbers(output, self.noted(gradients), self.noted(dict(net.named_buffers())))


class _Symbols(_Values):
    """Copies of a model that have no data.

    Args:
        net: the model; the expressions call its parameters and buffers by their names.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__(torch.device("cpu"))
        self._expressions = Expressions()
        self._names = {id(t): name for name, t in (*net.named_parameters(), *net.named_buffers())}

    def copied(self, modules: Any) -> Any:
        """Returns copies of modules."""
        try:
            return copy_modules(modules, self._stand_in)
        except Exception as error:
            raise _Failed(error) from error

    def placed(self, inputs: Any, trains: bool) -> Any:
        """Returns inputs without data, with the same `requires_grad`."""
        leaves, spec = tree_flatten(inputs)
        stand_in = self._expressions.stand_in
        placed = [
            stand_in(leaf.detach(), f"input {number}").requires_grad_(leaf.requires_grad and trains)
            if isinstance(leaf, Tensor)
            else leaf
            for number, leaf in enumerate(leaves)
        ]
        return tree_unflatten(placed, spec)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Returns the context of a run."""
        with self._expressions.fake, self._expressions:
            yield

    def noted(self, tree: Any) -> Any:
        """Returns the representation of a result for the comparison."""
        return self._expressions.values(tree)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        name = self._names.get(id(tensor)) or contents(tensor)
        return self._expressions.stand_in(tensor.detach() if tensor.grad_fn else tensor, name)


def _same_inputs(of_cut: list[Any] | None, of_plain: list[Any] | None) -> bool:
    """Returns whether a layer's recorded calls receive the same tensors in both runs.

    A layer of a graph receives one value as its argument and pops the others from a stash.
    """
    tensors, expected = (
        [leaf for leaf in tree_leaves(calls) if isinstance(leaf, Tensor | Symbol)]
        for calls in (of_cut, of_plain)
    )
    return all(any(not difference(tensor, leaf) for leaf in expected) for tensor in tensors)


def _watching(
    calls: Calls | None,
    net: nn.Module,
    numbers: _Values,
    planned: PlannedLayers | None = None,
    without: Collection[str] = (),
) -> AbstractContextManager[Any]:
    """Records the calls of the submodules of `net`, and of planned layers, in the block."""
    if calls is None:
        return nullcontext()
    watched = [(name, m) for name, m in net.named_modules() if name and name not in without]
    if planned is not None:
        watched += [(layer.name, layer.module) for stage in planned.stages for layer in stage]
    return calls.watching(watched, numbers.noted)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except _Skipped:
        raise
    except Exception as error:
        raise _Failed(error) from error
