"""Compares training steps and evaluations of a pipeline with the unsplit module.

Both run the same micro-batches with the same random draws, and all numbers are compared: outputs,
losses, gradients, buffers. This reveals errors of cutting or scheduling, and losses that
are not a mean over the batch, on the user's own model and batches.

    pipeline    cut by the plan, run by schedule and engine ─┐
                                                             ├─ compared, tensor by tensor
    plain       net(micro-batch), loss, backward, in turn ───┘

It cannot compare a model that does not fit on a device twice, and says nothing about other batches.
The optimizer does not run, because its inputs, the gradients, are compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hybridtrain._base.accelerator import put
from hybridtrain._base.intra_op_threads import intra_op_threads, threads_per_lane
from hybridtrain._base.microbatch import (
    MicrobatchCut,
    batch_size,
    check_samples,
    first_share,
    joined,
    merge,
    uncut,
)
from hybridtrain._base.summation_tree import total
from hybridtrain._base.tensors import put_values
from hybridtrain._base.text_table import text_table
from hybridtrain.errors import BatchError, ConfigError, UserError, setting
from hybridtrain.graph import arguments_of
from hybridtrain.loss import BatchWeight, CountedLoss, LossFn
from hybridtrain.pipeline import ReplayedDraws, remove_aliases
from hybridtrain.verification.comparison import Calls, difference
from hybridtrain.verification.loss_proof import is_of_model
from hybridtrain.verification.module_copy import copy_modules
from hybridtrain.verification.python_state import PythonState

if TYPE_CHECKING:
    from hybridtrain.model import HybridModel
    from hybridtrain.world import World

TOLERANCES = {"fp32": 1e-5, "bf16": 5e-2, "fp16": 1e-2}
"""By precision, tolerance for numbers summed in a different order, relative to the largest entry
of the tensor. In half precision, the last bit of a weight can change the rounding of an activation,
which has 8 or 11 bits.
"""

_PRECISION_OF = {torch.bfloat16: "bf16", torch.float16: "fp16"}

# Compiled code and GPUs round differently. There, a gradient that is zero except for rounding, such
# as the gradient of a bias before a batch norm, is compared relative to this share of the largest
# entry of all gradients.
_SMALL = 1e-2

# Relative change of the weights between two batches: state kept by a forward may have no effect
# while the weights stay the same.
_MOVE = 1e-2


@dataclass
class Compared:
    """The comparison of one kind of number, such as gradients.

    Attributes:
        tensors: the number of compared tensors.
        bitwise: the number of them that are bitwise equal.
        largest: the largest difference, relative to the largest entry of its tensor.
        where: the tensor with the largest difference.
    """

    tensors: int = 0
    bitwise: int = 0
    largest: float = 0.0
    where: str = ""

    def add(self, name: str, difference: float) -> None:
        """Counts a tensor."""
        self.tensors += 1
        self.bitwise += difference == 0
        if difference > self.largest:
            self.largest, self.where = difference, name


@dataclass
class Verification:
    """The result of a comparison, the same on every process.

    Attributes:
        kinds: the comparison of each kind of number, by name.
        tolerance: the tolerance for numbers summed in a different order.
        reasons: why the order of some sums differs here.
        first: the first layer, in forward order, with an output that differs by more than the
            tolerance; None without one, or if only the backward differs.
        title: a description of the runs.
        not_compared: values with types that cannot be compared, such as "Parser in output in
            training".
    """

    kinds: dict[str, Compared]
    tolerance: float
    reasons: list[str]
    first: str | None = None
    title: str = ""
    not_compared: list[str] = field(default_factory=list)

    @property
    def differs(self) -> list[str]:
        """The kinds of numbers that differ by more than the tolerance."""
        return [kind for kind, compared in self.kinds.items() if compared.largest > self.tolerance]

    @property
    def exact(self) -> bool:
        """True if all numbers are equal within the tolerance for the order of summation."""
        return not self.differs

    @property
    def bitwise(self) -> bool:
        """True if all numbers are bitwise equal, except the loss of the whole batch.

        That loss is a single sum in the unsplit module, but several sums in the stages.
        """
        sizes = {kind: compared.largest for kind, compared in self.kinds.items()}
        return not any(size for kind, size in sizes.items() if kind != WHOLE_BATCH)

    @property
    def worst(self) -> Compared:
        """The kind of number with the largest difference."""
        return max(self.kinds.values(), key=lambda compared: compared.largest, default=Compared())

    def __str__(self) -> str:
        lines = [("tensors", "bitwise", "", "largest difference")]
        for kind, compared in self.kinds.items():
            largest = f"{compared.largest:.1e} in {compared.where}" if compared.largest else "0"
            lines.append((str(compared.tensors), str(compared.bitwise), kind, largest))
        return "\n".join([self.title, *text_table(lines, 2), self.verdict])

    @property
    def verdict(self) -> str:
        """The result in one or two sentences."""
        if not self.not_compared:
            return self._verdict
        values = ", ".join(self.not_compared)
        return f"{self._verdict}. Not compared, because their type cannot be compared: {values}"

    @property
    def _verdict(self) -> str:
        if self.exact and self.bitwise:
            return "exact: all numbers are bitwise equal" + (
                ", except the loss of the whole batch, which is one sum instead of several"
                if self.worst.largest
                else ""
            )
        if self.exact:
            why = f": {', '.join(self.reasons)}" if self.reasons else ""
            return (
                f"exact up to the order of summation{why}. The largest difference is "
                f"{self.worst.largest:.1e} of the largest entry of its tensor, within the "
                f"tolerance of {self.tolerance:.0e}"
            )
        lines = [
            f"NOT EXACT: {kind} differs by {self.kinds[kind].largest:.1e} in "
            f"{self.kinds[kind].where}"
            for kind in self.differs
        ]
        lines.append(f"The tolerance for the order of summation is {self.tolerance:.0e}")
        if self.differs == [WHOLE_BATCH]:
            lines.append(
                "The loss of the whole batch is not the mean over its micro-batches: either it "
                "averages over something other than samples (declare this with MeanLoss(loss_fn, "
                "count)), or it compares samples with each other, which micro-batches do not "
                "support"
            )
        elif self.first is not None:
            lines.append(f"The first layer with a different output is {self.first}")
        return ". ".join(lines)


STATE = "state before the first step"
WHOLE_BATCH = "loss of the whole batch"


def verify(
    model: HybridModel,
    batches: Sequence[tuple[Any, Any]],
    loss_fn: LossFn,
    reference: nn.Module | None = None,
) -> Verification:
    """Compares training steps and evaluations of the stages with the unsplit module.

    A collective call. The weights change slightly between batches. Afterwards, also after an error,
    the model is restored: weights, gradients, buffers, modes, the step of its random draws, and
    state that its code holds in attributes, closures and globals.

    Args:
        model: the model, with the run's options.
        batches: this replica's batches, as `(inputs, targets)`.
        loss_fn: as in `HybridModel.train_step`.
        reference: the original module, before it was wrapped in the `HybridModel`, on any device.
            It is moved to the last stage's device and modified. None to use a copy of `model.net`.

    Raises:
        ConfigError: each process has only a part of the model, and `reference` is None.
        Exception: raised by the pipeline, or by the unsplit module (then with a note).
    """
    options, world = model.options, model.world
    if reference is None and world.processes_per_replica > 1:
        raise ConfigError(
            "verify() compares the stages with the whole model, which no process has with "
            f"{setting('engine', 'distributed')}: pass reference=, the module before it was "
            "wrapped"
        )
    # The comparison needs the pipeline, such as its output device.
    model.split_for(first_share(batches[0][0]))
    loss = model.resolve_loss(loss_fn)
    comparison = _Comparison(model, loss, reference)
    with _as_before(model, loss):
        comparison.state()
        for number, (inputs, targets) in enumerate(batches):
            if number:
                comparison.move_weights(number)
            comparison.batch(f"batch {number}", inputs, targets)
    count = len(batches)
    stages = f"{len(model.plan.stages)} stage{'s' * (len(model.plan.stages) > 1)}"
    return comparison.result(
        f"{count} training step{'s' * (count > 1)} and evaluation{'s' * (count > 1)} in {stages} "
        f"({options.schedule}, {options.chunks} micro-batches, engine {world.engine}, "
        f"{options.precision}) compared with the unsplit module"
    )


@contextmanager
def _as_before(model: HybridModel, loss: CountedLoss) -> Iterator[None]:
    """Restores `model`, and the state reachable from its code and the loss, after the block."""
    # copies, because a step accumulates in place
    gradients = [(p, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    state = PythonState(model.net, loss.function, parameters=True)
    modes = [(module, module.training) for module in model.net.modules()]
    rng, step = model.rng, model.rng.step
    rng.seeds_evaluations = True  # so that the unsplit module can repeat the draws
    try:
        with model.without_self_check():
            yield
    finally:
        rng.seeds_evaluations = False
        state.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
        rng.step = step
        # The layers have run with other weights than the next step's.
        rng.reprobe()


@dataclass
class _Recorded:
    """A loss that records the outputs and losses of its micro-batches."""

    loss: CountedLoss
    outputs: list[Any] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    def __call__(self, output: Any, targets: Any) -> Tensor:
        # a copy, because the loss may work in place
        self.outputs.append(tree_map_only(Tensor, lambda t: t.detach().clone(), output))
        loss = self.loss(output, targets)
        self.losses.append(loss.detach().clone())
        return loss


class _Batch(NamedTuple):
    """A batch, and the inputs and targets of its micro-batches on the device of the output.

    Attributes:
        replicas: the logical replica of each micro-batch.
    """

    name: str
    inputs: Any
    targets: Any
    weights: BatchWeight
    parts: Sequence[tuple[Any, Any]]
    replicas: Sequence[int]

    @property
    def whole(self) -> tuple[Any, Any] | None:
        """The joined inputs and targets; None if several replicas' batches cannot be joined."""
        try:
            return joined(self.inputs), joined(self.targets)
        except BatchError:
            return None


class PlainReplicas:
    """Runs the logical replicas of `world` one after the other in an unsplit module.

    Each replica begins with the buffers from before the step, and the first replica's buffers are
    kept. Gradients are summed in the order of `summation_tree`.
    """

    def __init__(self, net: nn.Module, world: World) -> None:
        self._net = net
        self._world = world
        self._replica: int | None = None
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._buffers = self._first_buffers = self._copies()

    def _copies(self) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self._net.named_buffers()}

    def enter(self, replica: int) -> None:
        """Prepares a micro-batch of `replica`."""
        if replica == self._replica:
            return
        if self._replica is not None:
            self._leave()
            self._put(self._buffers)
        self._replica = replica

    def _leave(self) -> None:
        assert self._replica is not None
        if not self._gradients:
            self._first_buffers = self._copies()
        self._gradients[self._replica] = [p.grad for p in self._net.parameters()]
        self._net.zero_grad()

    def _put(self, buffers: Mapping[str, Tensor]) -> None:
        for name, buffer in self._net.named_buffers():
            put_values(buffer, buffers[name])

    @torch.no_grad()
    def finish(self) -> None:
        """Stores the summed gradients of all replicas in the module; a collective call."""
        if self._world.fixed_replicas is None:
            return
        self._leave()
        self._put(self._first_buffers)
        of_replicas: dict[int, list[Tensor | None]] = {}
        for gradients in self._world.gather(self._gradients):
            of_replicas |= gradients
        for place, parameter in enumerate(self._net.parameters()):
            leaves = {
                (replica, replica + 1): gradients[place]
                for replica, gradients in of_replicas.items()
            }
            gradient = total(leaves, self._world.logical_replicas, _sum_of)
            parameter.grad = None if gradient is None else put(gradient, parameter.device)


def _sum_of(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right


class _Comparison:
    """Runs the stages and the unsplit module on the same batches.

    Args:
        model: the model in stages.
        loss: the loss of a step.
        reference: the unsplit module; None to use a copy of `model.net`.
    """

    def __init__(self, model: HybridModel, loss: CountedLoss, reference: nn.Module | None) -> None:
        self._model = model
        self._world = model.world
        self._loss = loss
        self._device = model.pipeline.output_device
        net = _copied(model.net) if reference is None else reference
        # Its layers would otherwise compute with leaves that the model's pipeline owns.
        remove_aliases(net)
        self._net = net.to(self._device)
        computed = [model.options.precision]
        computed += [_PRECISION_OF.get(p.dtype, "fp32") for p in model.net.parameters()]
        self._tolerance = max(TOLERANCES[precision] for precision in computed)
        # (kind, name, difference) of each tensor
        self._compared: list[tuple[str, str, float]] = []
        self._not_compared: set[str] = set()
        self._first: str | None = None
        # parameter -> largest entries of the terms of its gradient
        self._terms: dict[str, float] = {}

    def state(self) -> None:
        """Compares the weights and buffers before the first step."""
        self._model.sync_buffers()
        plain_tensors = {**dict(self._net.named_parameters()), **dict(self._net.named_buffers())}
        for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]:
            self._add(STATE, name, tensor, plain_tensors.get(name))

    def move_weights(self, number: int) -> None:
        """Adds the same small random numbers to the weights of both."""
        for modules in (self._model, self._net):
            for name, parameter in modules.named_parameters():
                if not parameter.is_floating_point() or parameter.is_meta:
                    continue
                # By name, so that all processes move a parameter alike, whichever of them have it.
                generator = torch.Generator().manual_seed(zlib.crc32(f"{number} {name}".encode()))
                noise = torch.rand(parameter.shape, generator=generator).mul_(2).sub_(1)
                with torch.no_grad():
                    parameter.mul_(1 + _MOVE * noise.to(parameter.device, parameter.dtype))

    def batch(self, name: str, inputs: Any, targets: Any) -> None:
        """Compares a training step and an evaluation of a batch."""
        model = self._model
        weights = model.step_weights([(inputs, targets)], self._loss)[0]
        cut = MicrobatchCut(model.options.chunks, inputs, targets)
        parts = [cut.of(self._placed(values)) for values in (inputs, targets)]
        replicas = [self._world.owned_replicas.start] * len(cut.sizes)
        if cut.places is not None:
            replicas = [place.replica for place in cut.places]
        batch = _Batch(name, inputs, targets, weights, list(zip(*parts, strict=True)), replicas)
        differed = self._differs
        self._train(batch)
        self._evaluate(batch)
        # All processes take part in `_first_layer`, also those in which nothing differs.
        if any(self._world.gather(self._differs and not differed)):
            self._first = self._first or self._first_layer(inputs, parts[0])

    def result(self, title: str) -> Verification:
        """Returns the combined result of all processes; a collective call."""
        kinds: dict[str, Compared] = {}
        for rank, compared in enumerate(self._world.gather(self._compared)):
            on_rank = f" on rank {rank}" if self._world.size > 1 else ""
            for kind, name, size in compared:
                kinds.setdefault(kind, Compared()).add(name + on_rank, size)
        model, reasons = self._model, []
        if model.pipeline.has_ties:
            reasons.append("stages share a parameter and sum its gradients at the end")
        if self._world.data_parallel_size > 1 and self._world.fixed_replicas is None:
            reasons.append("gradients are summed over replicas")
        if self._device.type != "cpu":
            reasons.append("a GPU sums in its own order")
        if model.options.compile:
            reasons.append("compiled layers sum in their own order")
        if model.planned.head.names:
            reasons.append(f"{setting('head', 'fused')} computes the loss in chunks")
        not_compared = set().union(*self._world.gather(self._not_compared))
        return Verification(
            kinds, self._tolerance, reasons, self._first, title, sorted(not_compared)
        )

    def _train(self, batch: _Batch) -> None:
        name, weights = batch.name, batch.weights
        model, net = self._model, self._net
        recorded = _Recorded(self._loss)
        # a known reduction; otherwise the first step's check would call it again
        loss = self._loss.of(recorded, is_known_reduction=True)
        self._set_modes(training=True)
        # Both begin without gradients: a sum with earlier ones would hide small differences.
        model.zero_grad()
        net.zero_grad()
        self._terms.clear()
        with self._shared_state_undone(), self._seeds(len(batch.parts)) as seeds:
            result = model.train_step(batch.inputs, batch.targets, loss, weight=weights)
        values: list[Tensor] = []
        recorded_pairs = iter(zip(recorded.outputs, recorded.losses, strict=True))
        plain_replicas = PlainReplicas(net, self._world)
        for number, (part, target) in enumerate(batch.parts):
            plain_replicas.enter(batch.replicas[number])
            if not weights.weights[number]:
                # the loss is not called without samples
                values.append(torch.zeros((), device=self._device))
                continue
            plain = _Recorded(self._loss)
            with self._plainly(seeds[number]), torch.enable_grad():
                value = plain(self._forward(part), target)
            # A backward runs outside of autocast, as in a training loop.
            with self._plainly(autocast=False), self._terms_noted():
                value.backward(torch.full_like(value, weights.grad_scales[number]))
            values += plain.losses
            if model.owns_output:
                output, loss_of_stages = next(recorded_pairs)
                place = f"{name}, micro-batch {number}"
                self._add("output in training", place, output, plain.outputs[0])
                self._add("loss in training", place, loss_of_stages, plain.losses[0])
        plain_replicas.finish()
        if model.owns_output:
            self._add("loss of the step", name, result.loss, weights.mean(values))
            self._compare_whole_loss(batch, recorded, values)
        self._compare_gradients()
        if model.options.batch_norm == "deferred":  # its running statistics intentionally differ
            self._take_buffers()
        plain_buffers = dict(net.named_buffers())
        for key, buffer in model.named_buffers():
            self._add("buffer after the step", key, buffer, plain_buffers.get(key))

    @contextmanager
    def _terms_noted(self) -> Iterator[None]:
        """Sums, by parameter, the magnitudes of the gradients accumulated in the block."""
        earlier_grads = {
            name: None if p.grad is None else p.grad.detach().clone()
            for name, p in self._net.named_parameters()
        }
        yield
        for name, parameter in self._net.named_parameters():
            gradient, earlier = parameter.grad, earlier_grads[name]
            if gradient is not None and gradient.numel():
                added = gradient.detach() if earlier is None else gradient.detach() - earlier
                largest = float(added.to_dense().abs().max())
                self._terms[name] = self._terms.get(name, 0.0) + largest

    def _compare_whole_loss(
        self, batch: _Batch, recorded: _Recorded, values: Sequence[Tensor]
    ) -> None:
        """Compares the loss of all micro-batches' joined outputs with the mean of their losses."""
        if len(batch.parts) == 1 or is_of_model(self._loss, batch.targets):
            return
        if len(recorded.outputs) < len(batch.parts):
            return  # micro-batches in which nothing counts have none
        try:
            check_samples(recorded.outputs, [batch_size(part) for part, _ in batch.parts])
            output = merge(recorded.outputs)
        except BatchError:
            return
        if batch.whole is None:
            return
        with torch.no_grad(), self._plainly():
            whole = self._loss(output, self._placed(batch.whole[1]))
        self._add_whole_loss(batch, whole, values)

    def _compare_gradients(self) -> None:
        replicas = self._world.data_parallel_size
        names = [name for name, p in self._net.named_parameters() if p.requires_grad]
        if replicas > 1:
            for parameter in self._net.parameters():
                if parameter.requires_grad:
                    gradient = parameter.grad
                    gradient = torch.zeros_like(parameter) if gradient is None else gradient
                    # every process of a replica has all gradients
                    if self._world.fixed_replicas is None:
                        gradient = self._world.sum(gradient) / self._world.size
                    parameter.grad = gradient
            # Tolerances must be the same on all processes, or their results would differ.
            terms = torch.tensor([self._terms.get(name, 0.0) for name in names])
            if len(terms):
                sums = self._world.sum(terms.to(self._world.wire_device)) / self._world.size
                self._terms = dict(zip(names, sums.tolist(), strict=True))
        plain_grads = {name: p.grad for name, p in self._net.named_parameters()}
        least = 0.0
        if self._model.options.compile or self._device.type != "cpu":
            least = _SMALL * max(self._terms.values(), default=0.0)
        for name, parameter in self._model.named_parameters():
            grad = parameter.grad
            if grad is None and replicas > 1:
                grad = torch.zeros_like(parameter)  # unused by all replicas
            scale = max(least, self._terms.get(name, 0.0))
            self._add("gradient", name, grad, plain_grads.get(name), scale)

    @torch.no_grad()
    def _evaluate(self, batch: _Batch) -> None:
        name, weights = batch.name, batch.weights
        model = self._model
        model.sync_buffers()
        if self._world.data_parallel_size > 1 and model.options.broadcast_buffers:
            # In the order of the module: each call is a collective.
            for buffer in self._net.buffers():
                self._world.broadcast_tensor(buffer)
        self._set_modes(training=False)
        staged, plain = _Recorded(self._loss), _Recorded(self._loss)
        with self._shared_state_undone(), self._seeds(len(batch.parts)) as seeds:
            model.map_outputs(batch.inputs, batch.targets, staged)
        for (part, target), draws in zip(batch.parts, seeds, strict=True):
            with self._plainly(draws):
                plain(self._forward(part), target)
        if not model.owns_output:
            return
        for number, output in enumerate(staged.outputs):
            place = f"{name}, micro-batch {number}"
            self._add("output in evaluation", place, output, plain.outputs[number])
            if weights.weights[number]:  # otherwise it is a mean over nothing
                loss = staged.losses[number]
                self._add("loss in evaluation", place, loss, plain.losses[number])
        values = [
            value if factor else torch.zeros_like(value)
            for value, factor in zip(staged.losses, weights.weights, strict=True)
        ]
        # a forward that draws random numbers, or keeps state, gives other outputs for a whole batch
        if any(seeds) or not self._repeats_itself(batch.parts[0][0], plain.outputs[0]):
            self._compare_whole_loss(batch, staged, values)
        elif len(batch.parts) > 1 and batch.whole is not None:
            state = PythonState(self._net, self._loss.function)
            with self._plainly():
                inputs, targets = batch.whole
                output = self._forward(uncut(self._placed(inputs)))
                whole = self._loss(output, uncut(self._placed(targets)))
            state.restore()
            self._add_whole_loss(batch, whole, values)

    def _repeats_itself(self, part: Any, output: Any) -> bool:
        """Returns whether the unsplit module reproduces `output` for a micro-batch."""
        state = PythonState(self._net)
        with self._plainly():
            repeated = self._forward(part)
        state.restore()
        return not difference(repeated, output)

    def _add_whole_loss(self, batch: _Batch, whole: Tensor, values: Sequence[Tensor]) -> None:
        mean = batch.weights.mean(values)
        # values of both signs round relative to their own size, not to that of their mean
        scale = float(batch.weights.mean([value.abs() for value in values]))
        if self._loss.is_sum:
            whole = whole / max(batch.weights.count, 1)
        place = f"{batch.name}: {float(whole):.7g}, but {float(mean):.7g} by micro-batches"
        self._add(WHOLE_BATCH, place, mean, whole.to(mean.dtype), scale)

    def _first_layer(self, inputs: Any, parts: Sequence[Any]) -> str | None:
        """Returns the first layer with a different output, in evaluation or else in training."""
        for training in (False, True):
            self._set_modes(training)
            staged_calls, plain_calls = Calls(), Calls()
            watched = [(name, m) for name, m in self._model.net.named_modules() if name]
            plain_modules = [(name, m) for name, m in self._net.named_modules() if name]
            with (
                torch.no_grad(),
                self._shared_state_undone(),
                self._seeds(len(parts)) as seeds,
                staged_calls.watching(watched),
            ):
                self._model.map_outputs(inputs, None, lambda output, _: None)
            with torch.no_grad(), plain_calls.watching(plain_modules):
                for part, own_seeds in zip(parts, seeds, strict=True):
                    with self._plainly(own_seeds):
                        self._forward(part)
            differing = [
                (place, name)
                for place, (name, outputs) in enumerate(plain_calls.outputs.items())
                if len(staged_calls.outputs.get(name, ())) == len(outputs)
                and difference(staged_calls.outputs[name], outputs) > self._tolerance
            ]
            on_ranks = self._world.gather(min(differing, default=None))
            if first := min((layer for layer in on_ranks if layer is not None), default=None):
                return first[1]
        return None

    @contextmanager
    def _shared_state_undone(self) -> Iterator[None]:
        """Restores state that the stages' run changes and the unsplit module shares.

        Such state is in closures and globals, for example a counter in a hook.
        """
        state = PythonState(self._net, self._loss.function, without=self._model.net)
        yield
        state.restore()

    @contextmanager
    def _plainly(self, seeds: Sequence[int] = (), autocast: bool = True) -> Iterator[None]:
        """Runs the unsplit module like the stages, with their threads, autocast and draws."""
        draws = ReplayedDraws(seeds)
        try:
            with (
                intra_op_threads(threads_per_lane(len(self._world.devices))),
                self._model.autocast() if autocast else nullcontext(),
                draws if seeds else nullcontext(),
            ):
                yield
        except Exception as error:
            error.add_note("in the unsplit module, with which the stages are compared")
            raise
        if draws.left:
            raise UserError(
                f"the unsplit module makes {len(draws.left)} fewer random draws than its stages"
            )

    @contextmanager
    def _seeds(self, microbatches: int) -> Iterator[list[Sequence[int]]]:
        """Yields a list that a step in the block fills with the seeds of each micro-batch."""
        rng, seeds = self._model.rng, list[Sequence[int]]()
        step = rng.step
        yield seeds
        # Collective: other processes' stages have made the draws of the layers before.
        counts = dict(self._model.pipeline.gather(list(rng.counts.items())))
        seeds += [rng.seeds_in_order(counts, number, step) for number in range(microbatches)]

    def _forward(self, part: Any) -> Any:
        args, kwargs = arguments_of(self._net, part)
        return self._net(*args, **kwargs)

    def _placed(self, values: Any) -> Any:
        # copies, because a layer may work in place
        return tree_map_only(Tensor, lambda t: put(t, self._device).clone(), values)

    def _set_modes(self, training: bool) -> None:
        """Sets the mode of both, except modules that the user keeps in evaluation mode."""
        if self._model.training is not training:
            self._model.train(training)
        modes = {name: module.training for name, module in self._model.named_modules()}
        for name, module in self._net.named_modules():
            module.training = modes.get(name, training)

    def _take_buffers(self) -> None:
        """Copies the buffers of the stages to the unsplit module."""
        buffers = [(name, buffer.cpu()) for name, buffer in self._model.named_buffers()]
        for name, buffer in self._model.pipeline.gather(buffers):
            put_values(self._net.get_buffer(name), buffer)

    @property
    def _differs(self) -> bool:
        return any(difference > self._tolerance for _, _, difference in self._compared)

    def _add(self, kind: str, name: str, staged: Any, plain: Any, scale: float = 0.0) -> None:
        if isinstance(staged, Tensor) and isinstance(plain, Tensor):
            plain = put(plain, staged.device)
        types: set[str] = set()
        self._compared.append((kind, name, difference(staged, plain, scale, types)))
        self._not_compared |= {f"{type_name} in {kind}" for type_name in types}


def _copied(net: nn.Module) -> nn.Module:
    try:
        return copy_modules(net)
    except Exception as error:
        raise ConfigError(
            f"{type(net).__name__} cannot be copied ({error}): pass reference=, the module before "
            f"it was wrapped"
        ) from error
