"""The first step of each kind of input, compared with the unsplit module.

A pipeline is only as good as its trace and its cuts. So before the first step, and before the first
one of every new kind of input, a small sample runs twice on copies of the model:

    copy 1   cut as planned, by the run's schedule, backward ───────┐
                                                                    ├─ outputs, gradients, buffers
    copy 2   module(sample), backward ──────────────────────────────┘

A small model computes numbers, which are compared bitwise, with the same random draws in both.
A large one, or one of which this process has a part only, runs without data, and its expressions
are compared (see `expressions`). Where its code depends on data, or a difference is found, numbers
decide unless the model is too large for them. A mismatch is an error that names the first layer
that differs.

The run's own model is never touched, and what its code can reach outside of it (closures, globals,
generators) is put back.
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

from hybridtrain._torch_private import without_modes
from hybridtrain.accelerator import accelerator_of
from hybridtrain.errors import NotExactError
from hybridtrain.graph import CallSignature, Layer, Segment, TraceGuards
from hybridtrain.microbatch import Microbatch, batch_size, chunk_sizes, split
from hybridtrain.options import PipelineOptions
from hybridtrain.pipeline import HeadOutput, InlineEngine, Pipeline, ReplayedDraws
from hybridtrain.planning import Plan, PlannedLayers
from hybridtrain.precision import autocast
from hybridtrain.schedule import forward_only, make_schedule
from hybridtrain.verification.comparison import Calls, Difference, difference, differences
from hybridtrain.verification.expressions import Expressions, Symbol, contents
from hybridtrain.verification.module_copy import copy_modules
from hybridtrain.verification.python_state import undone
from hybridtrain.world import World

log = logging.getLogger("hybridtrain")

SAMPLES = 2
"""Samples of a micro-batch that the check runs on."""

SMALL_BYTES = 32 * 2**20
"""Parameters and buffers of a model that computes numbers at once."""

MAX_BYTES = 4 * 2**30
"""Parameters and buffers of a model that computes numbers at all, for which the check needs about
four times as much memory."""

MAX_SECONDS = 5.0
"""Time of a forward and backward of the cut model after which the numbers are given up."""

TOLERANCE = 1e-5
"""The difference allowed for gradients of parameters that stages share, which are summed in another
order; relative to the largest entry of the tensor."""


class _Skipped(Exception):
    """The check cannot be made; the message says why."""


class _Sample(NamedTuple):
    """The inputs of a small micro-batch, and how the model runs on them."""

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
        net: the whole module, in this process.
        plan: how it is cut.
        planned: its layers.
        options: those of the run.
        world: the processes and devices of the run.

    Attributes:
        variants_of: returns the variant of the graphs for each micro-batch, or None.
        context: the autocast of the run, as a function that returns it.
    """

    def __init__(
        self,
        net: nn.Module,
        plan: Plan,
        planned: PlannedLayers,
        options: PipelineOptions,
        world: World,
    ) -> None:
        self.variants_of: Callable[[Sequence[Any]], Sequence[int] | None] = lambda parts: None
        self.context: Callable[[], AbstractContextManager[object]] = nullcontext
        self._net = net
        self._plan = plan
        self._planned = planned
        self._options = options
        self._world = world
        self._signatures: set[Any] = set()  # exact shapes, for a quick answer
        self._kinds: set[Any] = set()
        self._is_off = not options.self_check or _is_trivial(planned)
        self._says_skipped = world.is_main

    @contextmanager
    def off(self) -> Iterator[None]:
        """Checks nothing in the block."""
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before

    def look_at_construction(self, example_inputs: Any) -> None:
        """Checks the micro-batches of a batch in training and in evaluation mode.

        Raises:
            NotExactError: the stages compute other numbers than the module.
        """
        if isinstance(example_inputs, Microbatch):
            inputs, sizes = example_inputs.inputs, [batch_size(example_inputs.inputs)]
        else:
            inputs = example_inputs
            sizes = chunk_sizes(batch_size(inputs), self._options.chunks)
        modes = [(module, module.training) for module in self._net.modules()]
        try:
            for training in (True, False):
                self._net.train(training)
                self.look(inputs, sizes, trains=training)
        finally:
            for module, mode in modes:
                module.training = mode

    def look(self, inputs: Any, sizes: Sequence[int], *, trains: bool) -> None:
        """Checks the kinds of micro-batches in a batch that are new.

        Args:
            inputs: of the batch.
            sizes: the numbers of samples of its micro-batches.
            trains: whether a backward follows.

        Raises:
            NotExactError: the stages compute other numbers than the module.
        """
        if self._is_off:
            return
        training = self._net.training
        if type(inputs) is Tensor:
            signature: Any = inputs.shape, inputs.dtype, training, trains, len(sizes)
        else:
            leaves, spec = tree_flatten(inputs)
            shapes = [(v.shape, v.dtype) if isinstance(v, Tensor) else type(v) for v in leaves]
            signature = (*shapes, spec, training, trains, len(sizes))
        if signature not in self._signatures:
            self._signatures.add(signature)
            with without_modes(), self.context():
                self._look(inputs, sizes, training, trains)

    def _look(self, inputs: Any, sizes: Sequence[int], training: bool, trains: bool) -> None:
        with torch.set_grad_enabled(trains):
            self._planned.guards.check()  # whose errors say more than a difference does
        parts = split(inputs, sizes)
        variants: Sequence[int | None] = self.variants_of(parts) or [None] * len(sizes)
        start = 0
        for part, size, variant in zip(parts, sizes, variants, strict=True):
            kind = _kind(inputs, size), training, trains, variant
            if kind not in self._kinds:
                self._kinds.add(kind)
                small = part
                if size > SAMPLES and variant is None:  # fewer samples may take another one
                    # of the batch, in which values are marked that are not cut
                    small = split(inputs, [start, SAMPLES, sum(sizes) - start - SAMPLES])[1]
                samples = [_Sample(some, training, trains, variant) for some in (small, part)]
                self._check(*samples)
            start += size

    def _check(self, small: _Sample, whole: _Sample) -> None:
        try:
            try:
                self._compare(small)
            except _Failed:
                if small.inputs is whole.inputs:
                    raise
                self._compare(whole)  # it may need more samples
        except _Failed as failure:
            # the step itself will say so, if it is more than the sample's fault
            log.debug("the stages were not compared with the unsplit module: %r", failure.error)
        except _Skipped as reason:
            if self._says_skipped:
                self._says_skipped = False
                log.info(
                    "the stages were not compared with the unsplit module, since %s: "
                    "`hybridtrain verify`, or model.verify(...), does it",
                    reason,
                )

    def _compare(self, sample: _Sample) -> None:
        model = self._net, self._plan, self._planned, self._options, self._world
        if size_of(self._net) <= SMALL_BYTES and not self._is_partial:
            if where := _Run(*model, symbolic=False).mismatch(sample):
                self._refuse(where)
            return
        where = None
        with suppress(_Failed):  # its code depends on data
            where = _Run(*model, symbolic=True).mismatch(sample)
            if where is None:
                return
        try:
            where = _Run(*model, symbolic=False).mismatch(sample)
        except (_Skipped, _Failed) as reason:
            if where is None:
                raise
            # a graph may have other operators for the same numbers
            raise _Skipped(f"{where}, and numbers cannot decide, since {reason}") from None
        if where is not None:
            self._refuse(where)

    @property
    def _is_partial(self) -> bool:
        return any(tensor.is_meta for tensor in (*self._net.parameters(), *self._net.buffers()))

    def _refuse(self, where: str) -> NoReturn:
        raise NotExactError(
            f"the model in {len(self._plan.stages)} stages does not compute what "
            f"{type(self._net).__name__} itself computes, {where}. Move the code around that "
            f"place, and what shares state with it, into a submodule that the model calls: a "
            f"submodule is called, not traced. self_check=False trains without this comparison"
        )


def _is_trivial(planned: PlannedLayers) -> bool:
    """Returns whether nothing is cut or traced."""
    (first, *others) = planned.stages
    return not others and not any(isinstance(layer.module, Segment) for layer in first)


def _kind(inputs: Any, size: int) -> Any:
    """Returns what decides which code runs for a micro-batch of `size` samples."""
    leaves, spec = tree_flatten(inputs)
    return spec, tuple(
        (leaf.dtype, tuple(min(s, 2) for s in (size, *leaf.shape[1:])) if leaf.dim() else ())
        if isinstance(leaf, Tensor)
        else type(leaf)
        for leaf in leaves
    )


class _Failed(Exception):
    """A run has raised an error, which it keeps."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _Run:
    """Runs copies of a model on a sample, cut and unsplit."""

    def __init__(
        self,
        net: nn.Module,
        plan: Plan,
        planned: PlannedLayers,
        options: PipelineOptions,
        world: World,
        *,
        symbolic: bool,
    ) -> None:
        self._net = net
        self._plan = plan
        self._planned = planned
        self._lanes = world.nb_part
        self._symbolic = symbolic
        self._device = torch.device("cpu") if symbolic else world.devices[-1]
        self._precision = options.precision
        # what concerns replicas alone, and compiled code, is left out
        self._options = replace(
            options, compile=False, shard="none", sync_batch_norm=False, broadcast_buffers=False
        )
        if symbolic:  # a recomputation would draw anew, and a deferred batch norm is another one
            self._options = replace(self._options, checkpoint="never", batch_norm="micro_batch")
        self._check_modules()

    def mismatch(self, sample: _Sample) -> str | None:
        """Returns where the cut model differs from the unsplit one; None: nowhere.

        Raises:
            _Skipped: the comparison would take too long or cannot be made.
            _Failed: one of the two cannot run on the sample.
        """
        found = self._difference(sample)
        if found is None:
            return None
        if not self._repeats_itself(sample):
            raise _Skipped("the module gives other numbers when it runs twice on the same inputs")
        return f"{sample}: {found}{self._first_place(sample)}"

    def _difference(self, sample: _Sample) -> Difference | None:
        """Returns the first number in which the two differ."""
        cut, seeds, tied = self._run_cut(sample)
        plain = self._run_plain(sample, seeds)
        deferred = self._options.batch_norm == "deferred"  # has other buffers on purpose
        return next(
            (
                found
                for found in differences(
                    ("output", cut.output, plain.output),
                    *(
                        (f"the gradient of {name}", cut.gradients.get(name), gradient)
                        for name, gradient in plain.gradients.items()
                    ),
                    *(
                        (f"buffer {name}", cut.buffers.get(name), buffer)
                        for name, buffer in ({} if deferred else plain.buffers).items()
                    ),
                )
                if not (found.name in tied and (self._symbolic or found.size <= TOLERANCE))
            ),
            None,
        )

    def _repeats_itself(self, sample: _Sample) -> bool:
        """Returns whether two runs of the unsplit module give the same numbers."""
        seeds = self._run_cut(sample)[1]
        one, other = self._run_plain(sample, seeds), self._run_plain(sample, seeds)
        return not list(differences(("", tuple(one), tuple(other))))

    def _first_place(self, sample: _Sample) -> str:
        """Returns where outputs begin to differ, to follow an error message."""
        mine, theirs = Calls(), Calls()
        seeds = self._run_cut(sample, mine)[1]
        self._run_plain(sample, seeds, theirs)
        for name, outputs in theirs.outputs.items():
            if name in mine.outputs and any(differences((name, mine.outputs[name], outputs))):
                if _same_inputs(mine.inputs.get(name), theirs.inputs.get(name)):
                    return f"; the first layer whose output differs is {name!r}"
                return f"; the first difference is in the code that leads to layer {name!r}"
        return ""

    def _check_modules(self) -> None:
        for module in self._net.modules():
            if isinstance(module, SyncBatchNorm):
                raise _Skipped("a SyncBatchNorm needs all processes")
            if isinstance(module, torch.jit.ScriptModule):
                raise _Skipped("TorchScript runs other code in its first runs than in later ones")
        if self._symbolic:
            return
        if any(tensor.is_meta for tensor in self._net.parameters()):
            raise _Skipped("its code depends on data, and no process has the whole model")
        limit: float = MAX_BYTES
        if (accelerator := accelerator_of(self._device)) is not None:
            limit = min(limit, accelerator.total_memory(self._device) / 16)
        if (total := size_of(self._net)) > limit:
            raise _Skipped(
                f"its code depends on data, and it has {total / 2**30:.1f} GiB, above "
                f"{limit / 2**30:.1f} GiB"
            )

    def _run_cut(
        self, sample: _Sample, calls: Calls | None = None
    ) -> tuple[_Numbers, Sequence[int], set[str]]:
        """Runs a copy that is cut as planned.

        Returns:
            the numbers; the seeds of its draws, in order; and the names of those numbers that are
            summed over stages.
        """
        layers = [[layer.module for layer in stage] for stage in self._planned.stages]
        numbers = self._numbers()
        net, copied = numbers.copied((self._net, layers))
        planned = replace(
            self._planned,
            guards=TraceGuards(),
            variants=None,  # they are in the layers
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
            root = _root(value) if trains else None
            if root is None:
                return HeadOutput(None)
            return HeadOutput(root.detach(), root, torch.ones_like(root))

        with self._as_before(net), _failures(), numbers.entered():
            pipeline = Pipeline(net, self._plan, planned, world, self._options, InlineEngine)
            pipeline.watches_state = not self._symbolic  # a symbolic run recomputes nothing
            pipeline.rng.seeds_evaluations = not self._symbolic
            if sample.variant is not None:
                for stage in pipeline.stages:
                    stage.choose_variants([sample.variant])
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
        """Runs an unsplit copy, with the draws of the cut one."""
        numbers = self._numbers()
        (net,) = numbers.copied((self._net,))
        inputs = numbers.placed(sample.inputs, sample.trains)
        signature, values = CallSignature.of_inputs(net, inputs)
        args, kwargs = signature.split(values)
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
                root = _root(output) if sample.trains else None
            if root is not None:
                with torch.autocast(self._device.type, enabled=False):  # the caller's
                    root.backward(torch.ones_like(root))
            return numbers.after(net, noted, inputs)

    def _numbers(self) -> _Values:
        return _Symbols(self._net) if self._symbolic else _Values(self._device)

    @contextmanager
    def _as_before(self, net: nn.Module) -> Iterator[None]:
        """Undoes what a run does outside of the copy `net`, and to the default generators."""
        with undone(net, [self._device]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself warns, too
            yield

    def _autocast(self) -> Any:
        return autocast(self._precision, self._device.type)


class _Values:
    """Copies of a model that compute numbers.

    Args:
        device: where they are.
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
        """Returns a copy of `inputs`; leaves that require a gradient are leaves again."""

        def placed(tensor: Tensor) -> Tensor:
            moved = tensor.detach().to(self._device, copy=True)
            return moved.requires_grad_(tensor.requires_grad and trains)

        return tree_map_only(Tensor, placed, inputs)

    def entered(self) -> AbstractContextManager[Any]:
        """Returns the context of a run."""
        return nullcontext()

    def noted(self, tree: Any) -> Any:
        """Returns what stands for a result in a comparison."""
        return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), tree)

    def after(self, net: nn.Module, output: Any, inputs: Any) -> _Numbers:
        """Returns the result of a run, with the gradients and buffers that it has left."""
        gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
        for number, leaf in enumerate(tree_leaves(inputs)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                gradients[f"input {number}"] = leaf.grad
        return _Numbers(output, self.noted(gradients), self.noted(dict(net.named_buffers())))


class _Symbols(_Values):
    """Copies of a model that have no data.

    Args:
        net: the model, whose names are those of its parameters in the expressions.
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
        """Returns inputs without data; leaves that require a gradient are leaves again."""
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
        """Returns what stands for a result in a comparison."""
        return self._expressions.values(tree)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        name = self._names.get(id(tensor)) or contents(tensor)
        return self._expressions.stand_in(tensor.detach() if tensor.grad_fn else tensor, name)


def _same_inputs(mine: list[Any] | None, theirs: list[Any] | None) -> bool:
    """Returns whether two calls of a layer begin from the same tensors, as far as that is seen.

    A layer of a graph is given one value, and takes the others where they were stashed.
    """
    kinds = (Tensor, Symbol)
    tensors = [leaf for leaf in tree_leaves(mine) if isinstance(leaf, kinds)]
    given = [leaf for leaf in tree_leaves(theirs) if isinstance(leaf, kinds)]
    return all(any(not difference(tensor, leaf) for leaf in given) for tensor in tensors)


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


def size_of(net: nn.Module) -> int:
    """Returns the bytes of the parameters and buffers of `net`."""
    tensors = (*net.parameters(), *net.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


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


def _root(output: Any) -> Tensor | None:
    """Returns a number that depends on all outputs that require a gradient; None: none does."""
    generator = torch.Generator().manual_seed(0)
    total: Tensor | None = None
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            values = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            weights = torch.rand(values.shape, generator=generator, dtype=torch.float64)
            product = (values * weights.to(values.device, values.dtype)).sum().float()
            total = product if total is None else total + product
    return total
