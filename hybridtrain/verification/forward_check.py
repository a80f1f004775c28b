"""Compares micro-batches that run ahead of one another with plain PyTorch, before they do.

A pipeline that runs the model's own forward runs the code of several micro-batches at the same
time. State that one stage writes and another one reads would then be another micro-batch's. So
before the first step of each kind of batch, and again before its 4th, 8th, 16th and so on, because
state may change with the steps, some small micro-batches run twice, on copies:

    copy 1   cut as planned, one action at a time, each stage as far ahead of the next
             as the schedule allows: F0@0 F1@0 F0@1 B0@1 ...                     ──────┐
                                                                                       ├─ outputs,
    copy 2   plain PyTorch: forward and backward of one micro-batch after another ─────┘  gradients,
                                                                                          buffers
That order is the worst one for such state, and reproducible. The draws are the same in both runs.
A difference is an error that names the first layer with another output, and the state that forwards
change. The check never touches the model itself, and restores closures, globals and generators that
its code uses.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from hybridtrain._base.accelerator import accelerator_of
from hybridtrain._base.intra_op_threads import intra_op_threads, threads_per_lane
from hybridtrain._base.microbatch import Microbatch, batch_size, chunk_sizes, split
from hybridtrain._base.precision import forward_context
from hybridtrain._base.skip import skip_scope
from hybridtrain._base.tensors import bytes_of_module
from hybridtrain._base.torch_private import (
    DRAWS_IN_OTHER_THREAD,
    without_fast_attention,
    without_modes,
)
from hybridtrain.errors import NotExactError, SplitError, UserError, argument, setting
from hybridtrain.graph import Layer, arguments_of
from hybridtrain.head import install as install_head
from hybridtrain.head import lazily
from hybridtrain.launch import activity
from hybridtrain.partitioning import PlannedLayers
from hybridtrain.pipeline import HeadOutput, PartsHere, Pipeline, ReplayedDraws, StepKind
from hybridtrain.schedule import Schedule, forward_only, make_schedule, registered
from hybridtrain.verification.comparison import Calls, Difference, difference, differences
from hybridtrain.verification.cut_model import (
    MAX_BYTES,
    MAX_SECONDS,
    SAMPLES,
    CutModel,
    root_of,
)
from hybridtrain.verification.module_copy import copy_modules
from hybridtrain.verification.python_state import undone
from hybridtrain.world import World

log = logging.getLogger("hybridtrain")


TOLERANCE = 1e-5
"""The relative difference allowed for gradients of parameters that several processes share, because
they are added up in a different order."""


class _Skipped(Exception):
    """The comparison is not possible; the message has the reason."""


class _Results(NamedTuple):
    """The outputs of each micro-batch, and by name the gradients and buffers after all of them."""

    outputs: list[Any]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


class _Batch(NamedTuple):
    """Small micro-batches, and how the model runs on them."""

    parts: Sequence[Any]
    training: bool
    trains: bool

    def __str__(self) -> str:
        mode = "training" if self.training else "evaluation"
        return f"in {mode} mode, for {len(self.parts)} micro-batches"


class ForwardCheck:
    """Compares the stages of a pipeline that runs the forward with plain PyTorch, now and then.

    Args:
        model: the model to check.
    """

    def __init__(self, model: CutModel) -> None:
        self._model = model
        self._is_off = (
            not model.options.self_check or len(model.plan.stages) == 1 or model.is_partial
        )
        self._says_skipped = model.world.is_main
        self._not_compared: set[str] = set()

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
        # One by one: the user may keep some modules in evaluation mode.
        modes = [(module, module.training) for module in net.modules()]
        try:
            for training in (True, False):
                net.train(training)
                self.check_batch(inputs, sizes, StepKind(), trains=training)
        finally:
            for module, mode in modes:
                module.training = mode

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switches the check off in the block."""
        was_off, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = was_off

    def check_batch(
        self, inputs: Any, sizes: Sequence[int], kind: StepKind, *, trains: bool
    ) -> None:
        """Checks the micro-batches of a batch, if a check is due for its kind.

        Args:
            inputs: the inputs of the batch.
            sizes: the number of samples in each micro-batch.
            kind: the kind of the step, which has not begun: a refused batch stays refused.
            trains: whether a backward follows.

        Raises:
            NotExactError: the micro-batches compute something else when stages run ahead.
        """
        number = kind.number + 1
        # A power of two, but not 2: the first one has just been compared.
        if self._is_off or number in (2, 3) or number & (number - 1):
            return
        # As many as can be ahead of one another in so many stages, and one that follows all of
        # them.
        count = min(len(sizes), len(self._model.plan.stages) + 1)
        # cut from the batch, because shared values are marked only there
        pieces = [(min(size, SAMPLES), max(size - SAMPLES, 0)) for size in sizes]
        parts = split(inputs, [size for pair in pieces for size in pair])[::2][:count]
        # The caller's modes would see, or change, a computation that does not belong to the step.
        with without_modes():
            try:
                training = self._model.net.training
                self._check(_Batch(parts, training, trains), split(inputs, sizes)[:count])
            except _Skipped as reason:
                if self._says_skipped:
                    self._says_skipped = False
                    log.info(
                        "the results of the pipeline were not compared with plain PyTorch before "
                        "the first steps, because %s: to compare them, run `hybridtrain verify` or "
                        "call model.verify(...)",
                        reason,
                    )

    def _check(self, batch: _Batch, whole: Sequence[Any]) -> None:
        run = _Run(self._model)
        try:
            mismatch = run.mismatch(batch)
        # These are results, not failures of small samples.
        except (_Skipped, UserError, SplitError):
            raise
        except Exception:
            try:  # the model may need more samples
                mismatch = run.mismatch(batch._replace(parts=whole))
            except (_Skipped, UserError, SplitError):
                raise
            except Exception as error:
                # if the cause is not the check, the step itself raises this error
                log.debug("could not compare the pipeline with plain PyTorch: %r", error)
                return
        new_kinds = run.not_compared - self._not_compared
        self._not_compared |= new_kinds
        if new_kinds and self._model.world.is_main:
            log.info(
                "the self-check did not compare %s, because the type cannot be compared",
                ", ".join(f"{kind} in output" for kind in sorted(new_kinds)),
            )
        if mismatch is None:
            return
        if any(f"gradient of {name}" in str(mismatch) for name in run.recast):
            raise NotExactError(
                f"{type(self._model.net).__name__} in {len(self._model.plan.stages)} stages: "
                f"{mismatch}, because the forward uses a torch.autocast of its own, which casts a "
                "parameter once for all uses and adds up their gradients in the lower precision, "
                "but several stages use this parameter, and each casts it: pass "
                f"cache_enabled=False to torch.autocast, set {setting('precision', 'bf16')} "
                f"instead, or cut so that one stage has all uses ({argument('split')}). "
                f"{setting('self_check', False)} disables this check"
            )
        changed = run.changed_state(batch)
        state = f"; its forward changes {', '.join(changed[:4])}" if changed else ""
        model = self._model
        raise NotExactError(
            f"{type(model.net).__name__} in {len(model.plan.stages)} stages, {batch}, does not "
            f"compute the same as one micro-batch after another: {mismatch}{state}. Stages run "
            "ahead of one another, so a value that one of them leaves in a module, a list or a "
            "global would reach another micro-batch: "
            "return it from the layer or pass it as an argument, or cut so that the code that "
            f"writes it and the code that reads it are in one stage ({argument('split')}). "
            f"{setting('self_check', False)} disables this check"
        )


class _Run:
    """Runs copies of a model, cut and plain.

    Attributes:
        recast: the names of parameters that several stages cast under an autocast of the forward.
        not_compared: the types of values in outputs that cannot be compared.
    """

    def __init__(self, model: CutModel) -> None:
        self.recast: set[str] = set()
        self._model = model
        self._net = model.net
        self.not_compared: set[str] = set()
        self._tied: set[str] = set()  # parameters whose gradients are added up in a different order
        # One device for both runs: different GPUs could round differently.
        self._device = model.world.devices[-1]
        # without the options that concern only replicas, memory or compiled code
        self._options = replace(
            model.options,
            offload="none",
            compile=False,
            shard="none",
            sync_batch_norm=False,
            broadcast_buffers=False,
        )
        for module in self._net.modules():
            if isinstance(module, SyncBatchNorm):
                raise _Skipped("SyncBatchNorm needs all processes")
            if isinstance(module, torch.jit.ScriptModule):
                raise _Skipped("TorchScript runs different code in its first runs than later")
        limit: float = MAX_BYTES
        # Beside the model and its optimizer, a run needs about four times the model's bytes.
        if (accelerator := accelerator_of(self._device)) is not None:
            limit = min(limit, accelerator.total_memory(self._device) / 16)
        if (total := bytes_of_module(self._net)) > limit:
            raise _Skipped(f"the model exceeds {limit / 2**30:.1f} GiB ({total / 2**30:.1f} GiB)")

    def mismatch(self, batch: _Batch) -> str | None:
        """Returns the first output, gradient or buffer that differs, or how the run fails."""
        try:
            cut, seeds = self._run_cut(batch)
        except (_Skipped, UserError, SplitError):
            raise
        except Exception as error:
            if DRAWS_IN_OTHER_THREAD in str(error):  # the cause of TorchScript's own error
                raise _Skipped(DRAWS_IN_OTHER_THREAD) from error  # an evaluation may do so
            # Without seeds, since the cut run has not told any.
            self._run_plain(batch, [[] for _ in batch.parts])  # fails too if the model is the cause
            return f"it fails ({type(error).__name__}: {str(error).partition('.')[0]})"
        plain = self._run_plain(batch, seeds)
        mismatch = self._difference(cut, plain)
        if mismatch is None:
            return None
        # Only after a difference, since it costs a run: kernels may add in any order.
        if difference(tuple(plain), tuple(self._run_plain(batch, seeds))):
            raise _Skipped("two runs of the module on the same inputs give different numbers")
        layer = self._first_layer(batch)
        place = f"; the first layer with a different output is {layer!r}" if layer else ""
        return f"{mismatch}{place}"

    def _difference(self, cut: _Results, plain: _Results) -> Difference | None:
        for number, outputs in enumerate(zip(cut.outputs, plain.outputs, strict=True)):
            if self._model.world.processes_per_replica > 1:
                # An object that layers fill, such as a cache of keys and values, has only what
                # the layers of the last process put there.
                outputs = tuple(tree_map(_without_objects, output) for output in outputs)
            if size := difference(*outputs, not_compared=self.not_compared):
                return Difference(f"the output of micro-batch {number}", size, *outputs)
        results = [
            (f"the gradient of {name}", cut.gradients.get(name), gradient)
            for name, gradient in plain.gradients.items()
            if name not in self._tied
        ]
        for name in self._tied:
            first, second = cut.gradients.get(name), plain.gradients.get(name)
            if (size := difference(first, second)) > TOLERANCE:
                return Difference(f"the gradient of {name}", size, first, second)
        if self._options.batch_norm != "deferred":  # its buffers intentionally differ
            for name, buffer in plain.buffers.items():
                results.append((f"buffer {name}", cut.buffers.get(name), buffer))
        return next(differences(*results), None)

    def _first_layer(self, batch: _Batch) -> str:
        """Returns the name of the first submodule with another output; "" if there is none."""
        cut, plain = Calls(), Calls()
        seeds = self._run_cut(batch, cut)[1]
        self._run_plain(batch, seeds, plain)
        for name, outputs in plain.outputs.items():
            if name in cut.outputs and difference(cut.outputs[name], outputs):
                return name
        return ""

    def changed_state(self, batch: _Batch) -> list[str]:
        """Returns the attributes of modules that a forward changes, as `module.attribute`."""
        (net,) = self._copied((self._net,))
        attributes = _attributes(net)
        with (
            self._as_before(net),
            torch.set_grad_enabled(batch.trains),
            self._autocast(),
            skip_scope({}),
        ):
            args, kwargs = arguments_of(net, self._placed(batch.parts[0], trains=False))
            net(*args, **kwargs)
            changed = _attributes(net)
        return [name for name, value in changed.items() if attributes.get(name) != value]

    def _run_cut(
        self, batch: _Batch, calls: Calls | None = None
    ) -> tuple[_Results, list[Sequence[int]]]:
        if self._model.world.processes_per_replica > 1:
            return self._run_parts(batch, calls)
        planned = self._model.planned
        layers = [[layer.module for layer in stage] for stage in planned.stages]
        # In one call, so that the copies of the layers are those inside the copy of the model.
        net, copied = self._copied((self._net, layers))
        planned = _with_modules(planned, net, copied)
        world = World(devices=(self._device,) * self._model.world.nb_part)
        parts = [self._placed(part, batch.trains) for part in batch.parts]
        outputs: dict[int, Any] = {}

        def head(microbatch: int, value: Any) -> HeadOutput:
            outputs[microbatch] = _noted(value)
            if not batch.trains:
                return HeadOutput(None)
            root = root_of(value)
            if root is None:  # an output without a gradient, such as classes: nothing flows back
                root = torch.zeros((), requires_grad=True)
            return HeadOutput(root.detach(), root, torch.ones_like(root))

        with self._as_before(net):
            options = self._options
            if calls is not None:
                options = replace(options, recompute="never")  # which would record calls twice
            pipeline = Pipeline(net, self._model.plan, planned, world, options)
            # The worst order for state that micro-batches share, see the module.
            pipeline.furthest_ahead = True
            pipeline.rng.seeds_evaluations = True
            # One action at a time here, so that a changed generator state can only be the forward's
            # doing.
            pipeline.rng.refuses_own_seeds = True
            # Read before the step, which counts it up; the seeds below belong to this number.
            step = pipeline.rng.step
            begun = time.perf_counter()
            with (
                _watching(calls, _inside(net, [net])),
                torch.set_grad_enabled(batch.trains),
                self._autocast(),
            ):
                if batch.trains:
                    schedule = self._schedule(len(parts))
                    pipeline.run_train_step(schedule, parts.__getitem__, head, reduce=False)
                else:
                    shape = world.nb_part, len(parts), self._options.stages_per_device
                    forward = forward_only(*shape, self._options.placement)
                    pipeline.run_forward(forward, parts.__getitem__, head)
            self.recast |= planned.recast
            # After the fact: nobody knows before how long it takes, and one such run is bearable.
            if calls is None and time.perf_counter() - begun > MAX_SECONDS * len(parts):
                raise _Skipped(f"a forward and backward take more than {MAX_SECONDS:.0f} s")
            counts = dict(pipeline.rng.counts)
            seeds = [
                pipeline.rng.seeds_in_order(counts, number, step) for number in range(len(parts))
            ]
            return _results([outputs[n] for n in range(len(parts))], net, parts), list(seeds)

    def _run_parts(
        self, batch: _Batch, calls: Calls | None = None
    ) -> tuple[_Results, list[Sequence[int]]]:
        """Runs the model as several processes do, each with one stage and its own copy."""
        planned = self._model.planned
        layers = [[layer.module for layer in stage] for stage in planned.stages]
        # One per part: they would share state, which processes cannot.
        copies = [self._copied((self._net, layers)) for _ in planned.stages]
        nets = [net for net, _ in copies]
        parts = [self._placed(part, batch.trains) for part in batch.parts]
        own = [
            (name, module)
            for (net, modules), number in zip(copies, range(len(copies)), strict=True)
            for name, module in _inside(net, modules[number])
        ]
        outputs: dict[int, Any] = {}

        def head(microbatch: int, value: Any) -> HeadOutput:
            outputs[microbatch] = _noted(value)
            root = root_of(value) if batch.trains else None
            if root is None:
                return HeadOutput(None)
            return HeadOutput(root.detach(), root, torch.ones_like(root))

        with self._as_before(nets[0]):
            here = PartsHere(
                [(net, _with_modules(planned, net, modules)) for net, modules in copies],
                self._device,
                self._options,
            )
            for rng in here.rngs:
                rng.seeds_evaluations = True
            shape = len(nets), len(parts), 1
            schedule = forward_only(*shape)
            if batch.trains:
                splits = registered(self._options.schedule).splits_backward
                schedule = make_schedule("zb-h1" if splits else "1f1b", *shape)
            with (
                _watching(calls, own),
                torch.set_grad_enabled(batch.trains),
                self._autocast(),
            ):
                here.run(schedule, parts.__getitem__, head, batch.training)
            self._tied = here.tied
            counts = here.counts()
            rng = here.rngs[0]
            seeds = [rng.seeds_in_order(counts, number, rng.step) for number in range(len(parts))]
            gradients = here.gradients() | {
                f"input {number}": leaf.grad
                for number, leaf in enumerate(tree_leaves(parts))
                if isinstance(leaf, Tensor) and leaf.requires_grad
            }
            outputs_in_order = [outputs[number] for number in range(len(parts))]
            return _Results(outputs_in_order, _noted(gradients), _noted(here.buffers())), list(
                seeds
            )

    def _schedule(self, chunks: int) -> Schedule:
        options, lanes = self._options, self._model.world.nb_part
        shape = lanes, chunks, options.stages_per_device, options.max_inflight
        return make_schedule(options.schedule, *shape)

    def _run_plain(
        self, batch: _Batch, seeds: Sequence[Sequence[int]], calls: Calls | None = None
    ) -> _Results:
        (net,) = self._copied((self._net,))
        install_head(net, self._model.planned.head.names)
        parts = [self._placed(part, batch.trains) for part in batch.parts]
        outputs: list[Any] = []
        # Kernels add in an order that depends on the number of threads.
        threads = threads_per_lane(self._model.world.nb_part)
        with (
            self._as_before(net),
            _watching(calls, _inside(net, [net])),
            intra_op_threads(threads),
            without_fast_attention(),  # as in the stages
        ):
            for part, seeds_of_part in zip(parts, seeds, strict=True):
                # For the watchdog: this runs without lanes and may take long.
                activity.compared += 1  # progress
                args, kwargs = arguments_of(net, part)
                draws = ReplayedDraws(seeds_of_part) if seeds_of_part else nullcontext()
                with (
                    torch.set_grad_enabled(batch.trains),
                    self._autocast(),
                    lazily(),
                    # As in the stages: what an earlier run of this thread has stashed is not there.
                    skip_scope({}),
                    draws,
                ):
                    value = net(*args, **kwargs)
                    outputs.append(_noted(value))
                    root = root_of(value) if batch.trains else None
                if root is not None:
                    # A backward runs outside of autocast, as in a training loop.
                    with torch.autocast(self._device.type, enabled=False):  # the caller's
                        root.backward(torch.ones_like(root))
            return _results(outputs, net, parts)

    def _copied(self, modules: Any) -> Any:
        try:
            copied = copy_modules(modules)
            copied[0].to(self._device)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise _Skipped(f"the module cannot be copied ({reason})") from error
        return copied

    def _placed(self, inputs: Any, trains: bool) -> Any:
        def placed(tensor: Tensor) -> Tensor:
            # A copy in each run: a layer may work in place on its input.
            moved = tensor.detach().to(self._device, copy=True)
            return moved.requires_grad_(tensor.requires_grad and trains)

        return tree_map_only(Tensor, placed, inputs)

    @contextmanager
    def _as_before(self, net: nn.Module) -> Iterator[None]:
        """Restores state that a run changes outside the copy `net`, and the default generators."""
        # The copy shares closures and globals with the model, and the two runs with each other.
        with undone(net, [self._device]) as state, warnings.catch_warnings():
            if not state.is_complete:
                raise _Skipped("the model's code can reach too many objects to restore them all")
            warnings.simplefilter("ignore")  # the run itself warns too
            yield

    def _autocast(self) -> Any:
        options = self._options
        return forward_context(options.precision, options.attention, self._device.type)


def _with_modules(
    planned: PlannedLayers, net: nn.Module, modules: Sequence[Sequence[nn.Module]]
) -> PlannedLayers:
    """Returns the planned layers in a copy of the model."""
    return replace(
        planned,
        stages=[
            [Layer(layer.name, module) for layer, module in zip(*pair, strict=True)]
            for pair in zip(planned.stages, modules, strict=True)
        ],
        recast=set(),
        net=net,
    )


def _inside(net: nn.Module, layers: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of some layers of a model, with their names."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    return ((name, m) for name, m in net.named_modules() if id(m) in inside and name)


def _watching(
    calls: Calls | None, modules: Iterable[tuple[str, nn.Module]]
) -> AbstractContextManager[None]:
    """Records the calls of modules in the block."""
    return nullcontext() if calls is None else calls.watching(modules)


def _without_objects(leaf: Any) -> Any:
    return leaf if isinstance(leaf, Tensor | bool | int | float | str | bytes) else None


def _noted(tree: Any) -> Any:
    # Clones: later micro-batches may change the memory, such as a buffer that is returned.
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), tree)


def _results(outputs: list[Any], net: nn.Module, parts: Sequence[Any]) -> _Results:
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
    for number, leaf in enumerate(tree_leaves(parts)):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            gradients[f"input {number}"] = leaf.grad
    return _Results(outputs, _noted(gradients), _noted(dict(net.named_buffers())))


def _attributes(net: nn.Module) -> dict[str, Any]:
    """Returns something for each attribute of each module that changes when it is changed."""
    internal = vars(nn.Module()).keys()
    return {
        f"{name}.{attribute}" if name else attribute: _content(value)
        for name, module in net.named_modules()
        for attribute, value in vars(module).items()
        if attribute not in internal
    }


def _content(value: Any) -> Any:
    if isinstance(value, bool | int | float | str | type(None)):
        return value
    if isinstance(value, Tensor):
        # Not the values: this only names what has changed, after a difference was found.
        return id(value), value._version
    if isinstance(value, list | dict | set | tuple):
        return id(value), len(value), [id(item) for item in value]
    return id(value)
