"""The two forms of a call with gradients.

All outputs attached: the forwards of all micro-batches run, and their backwards when gradients
arrive. Any output may get one, and the loss may be computed anywhere.

    model(x)         F0 F1 F2 F3
    loss.backward()                 B0 B1 B2 B3

The loss attached: the whole schedule runs in the call, with the factor that the loss was multiplied
by in the last backward, and the backward adds the gradients to `parameter.grad`.

    model(x)         F0 F1 B0 F2 B1 F3 B2 B3
    loss.backward()                             returns them

A gradient scaler's factor is in the backward from its start, so gradients in half precision do not
underflow. Another factor multiplies the gradients. If another output gets a gradient after all, the
forwards run again: draws by place make them the same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from hybridtrain._base.precision import ThreadState
from hybridtrain._base.torch_private import (
    at_end_of_backward,
    is_accumulated,
    without_gradient_hooks,
    without_torch_function,
)
from hybridtrain._base.values import flat_values, leaves_of
from hybridtrain.errors import BatchError, setting
from hybridtrain.head import LazyLogits, without_graph, without_lazy
from hybridtrain.loss import zero_of
from hybridtrain.piped.attach import Gate, Late, attached
from hybridtrain.piped.calls import Call
from hybridtrain.piped.joining import Join, joined
from hybridtrain.pipeline import HeadOutput, HeldGraphs, StepKind, own_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils._pytree import TreeSpec

    from hybridtrain.model import HybridModel


log = logging.getLogger("hybridtrain")

_SEVERAL = "outputs other than the loss of the model get gradients"


@dataclass
class Kind:
    """What is known about a kind of call.

    Attributes:
        schedule: the name of the schedule, for the log.
        join: how its outputs are joined.
        calls: the number of calls that were cut.
        loss: the number of the output that alone got a gradient in the last backward; None: not
            known, or several did.
        factor: the gradient of that output.
        is_mixed: whether an output other than the loss has got a gradient.
    """

    schedule: str
    join: Join | None = None
    calls: int = 0
    loss: int | None = None
    factor: float = 1.0
    is_mixed: bool = False

    def check_structure(self, spec: TreeSpec) -> None:
        """Checks that an output is of the structure that was compared.

        Raises:
            BatchError: it is another.
        """
        if self.join is None or spec == self.join.spec:
            return
        if self.calls == 1:
            raise BatchError(
                "the structure of the model's output is another in training mode than in "
                "evaluation mode, in which micro-batches are compared with the batch: return the "
                f"same structure in both, or set {setting('chunks', 1)}"
            )
        raise BatchError(
            "the structure of the model's output has changed since its first call with such "
            "arguments, because of an attribute: after such a change, make the pipeline again "
            "by pipelined(unpipelined(model), ...)"
        )

    def note(self, gradients: Mapping[int, Tensor]) -> None:
        """Notes which outputs got gradients in a backward."""
        (number, gradient), *others = gradients.items()
        is_another = self.loss is not None and self.loss != number
        if others or gradient.dim() or is_another:
            if not self.is_mixed:
                log.info("forwards first, then backwards: %s", _SEVERAL)
            self.loss, self.is_mixed = None, True
        elif not self.is_mixed:
            if self.loss is None:
                schedule = setting("schedule", self.schedule)
                log.info("%s: only the loss of the model gets a gradient", schedule)
            self.loss, self.factor = number, usable(float(gradient))


def usable(factor: float) -> float:
    """Returns a factor to begin a backward with, from which any other can be reached."""
    return factor if math.isfinite(factor) and factor else 1.0


class Step:
    """One call of a model in micro-batches, with gradients.

    Args:
        model: the pipeline.
        call: the call.
        parts: the inputs of its micro-batches.
        weights: for each leaf of the output that is a number, its weights in them; None for the
            only micro-batch.
        kind: what is known about its kind.
        of_step: its kind as a step.
        finish: called at the end of a backward that adds to the gradients of parameters, such as to
            average them over the replicas; None: nothing is to be done then.
    """

    def __init__(
        self,
        model: HybridModel,
        call: Call,
        parts: Sequence[Any],
        weights: Sequence[list[float] | None] | None,
        kind: Kind,
        of_step: StepKind,
        finish: Callable[[], None] | None,
    ) -> None:
        self._model, self._call, self._kind, self._finish = model, call, kind, finish
        self._of_step = of_step
        self._parts, self._leaves = call.with_leaves(parts)
        self._weights = weights
        self._is_lazy = bool(model.planned.head.names)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._state = ThreadState.capture()
        self._number = model.rng.step
        self._spec: TreeSpec | None = None
        self._places: list[int] = []
        self._flat: Any = None  # the kind of output if it is flat

    def run(self) -> Any:
        """Runs the call; returns the output of the batch."""
        kind = self._kind
        if kind.loss is not None and not self._leaves:
            gradients, columns = self._run_whole(kind.loss, kind.factor)
            loss, factor = kind.loss, kind.factor

            def backward(arrived: Mapping[int, Tensor]) -> Sequence[Tensor | None]:
                return self._deliver(arrived, loss, factor, gradients)

        else:
            late, held, columns = self._run_forwards()

            def backward(arrived: Mapping[int, Tensor]) -> Sequence[Tensor | None]:
                kind.note(arrived)
                return self._run_backwards(arrived, late, held)

        assert self._spec is not None
        leaves = joined(self._spec, columns, self._weights or [None] * len(columns[0]))
        outputs = {place: leaves[place] for place in self._places}
        if not outputs:
            return tree_unflatten(leaves, self._spec)
        entering = [*self._call.entering, *self._parameters]
        for place, output in attached(outputs, backward, entering).items():
            leaves[place] = output
        return tree_unflatten(leaves, self._spec)

    # --- all outputs attached

    def _run_forwards(self) -> tuple[list[Late], HeldGraphs, list[list[Any]]]:
        late = [Late() for _ in self._parts]
        gradient_of_root = torch.ones(())

        def head(microbatch: int, output: Any) -> HeadOutput:
            leaves = without_lazy(self._leaves_of(microbatch, output))
            with without_torch_function():  # the engine's mode need not see this
                leaves = own_values(leaves)
                if self._places:
                    root = Gate.apply(late[microbatch], *(leaves[place] for place in self._places))
                else:
                    root = torch.zeros((), requires_grad=True)
                return HeadOutput(list(map(_detached, leaves)), root, gradient_of_root)

        columns, held = self._model.run_forwards(self._parts, head, self._of_step)
        return late, held, columns

    def _run_backwards(
        self, arrived: Mapping[int, Tensor], late: list[Late], held: HeldGraphs
    ) -> Sequence[Tensor | None]:
        for place in self._places:
            for of_part, gradient in zip(late, self._cut(place, arrived.get(place)), strict=True):
                of_part.gradients.append(gradient)
        with own_gradients(self._parameters) as gradients:
            self._model.run_backwards(held)
        self._finish_later()
        return [*self._call.joined_gradients(self._leaves), *gradients]

    def _finish_later(self) -> None:
        if self._finish is not None and any(map(is_accumulated, self._parameters)):
            at_end_of_backward(self._finish)

    def _cut(self, place: int, gradient: Tensor | None) -> Sequence[Tensor | None]:
        """Returns the gradient of an output in each micro-batch."""
        sizes = self._call.sizes
        if gradient is None or len(sizes) == 1:
            return [gradient] * len(sizes)
        weights = self._weights[place] if self._weights is not None else None
        if weights is not None:
            return [gradient * weight for weight in weights]
        rows = len(gradient) // self._call.samples  # several entries per sample, such as tokens
        pieces: Sequence[Tensor] = gradient.split_with_sizes([size * rows for size in sizes])
        return pieces

    # --- the loss attached

    def _run_whole(self, loss: int, factor: float) -> tuple[list[Tensor | None], list[list[Any]]]:
        """Runs the schedule; returns the gradients of the parameters, and the outputs."""
        weights = [1.0] * len(self._parts)
        if self._weights is not None:
            weights = self._weights[loss] or weights

        def head(microbatch: int, output: Any) -> HeadOutput:
            leaves = self._leaves_of(microbatch, output)
            root = leaves[loss]
            with without_torch_function():
                weight = weights[microbatch] * factor if root.dim() == 0 else 1
                gradient = torch.full_like(root, weight)
            return HeadOutput(Kept(self._detached(leaves)), root, gradient)

        with own_gradients(self._parameters) as gradients:
            kept = self._model.run_microbatches(
                self._parts, head, trains=True, sync=False, kind=self._of_step
            )
        return gradients, [of_part.output for of_part in kept]

    def _deliver(
        self,
        arrived: Mapping[int, Tensor],
        loss: int,
        used: float,
        gradients: list[Tensor | None],
    ) -> Sequence[Tensor | None]:
        self._kind.note(arrived)
        if set(arrived) != {loss}:
            gradients.clear()
            with self._again():
                late, held, _ = self._run_forwards()
            return self._run_backwards(arrived, late, held)
        factor = float(arrived[loss])
        if factor != used and (found := [g for g in gradients if g is not None]):
            torch._foreach_mul_(found, factor / used)
        self._finish_later()
        return gradients

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Runs forwards with the draws of this step, and leaves buffers as they are."""
        model = self._model
        latest, model.rng.step = model.rng.step, self._number
        buffers = [(buffer, buffer.clone()) for buffer in model.net.buffers()]
        try:
            with self._state.autocast():
                yield
        finally:
            model.rng.step = latest
            with torch.no_grad():
                for buffer, value in buffers:
                    # the backward needs those that have not changed, such as indices of positions
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)

    def _leaves_of(self, microbatch: int, output: Any) -> list[Any]:
        """Returns the leaves of a micro-batch's output; those that count nothing become zero."""
        kind, leaves = flat_values(output) or (None, [])
        spec = self._spec
        if spec is None or kind is None or kind != self._flat:
            if spec is None:
                leaves_of(output)  # registers dataclasses
            values, (leaves, spec) = leaves, tree_flatten(output)
            # a registered container may hold more than its values, which the kind does not tell
            is_plain = spec.context == (list(output) if isinstance(output, dict) else None)
            if is_plain and len(values) == len(leaves) and all(map(is_, values, leaves)):
                self._flat = kind
        with without_torch_function():
            places = [k for k, v in enumerate(leaves) if isinstance(v, Tensor) and v.requires_grad]
        if self._spec is None:
            self._spec, self._places = spec, places
            self._kind.check_structure(spec)
        if spec != self._spec or places != self._places:
            raise BatchError(
                f"micro-batches returned outputs of different structure: {self._spec} and {spec}. "
                f"Return the same structure for any samples, or set {setting('chunks', 1)}"
            )
        for place in places if self._weights is not None else ():
            weights = self._weights[place]  # type: ignore[index]
            if weights is not None and not weights[microbatch]:
                leaves[place] = zero_of(output)  # the mean over no items would be NaN
        return leaves

    def _detached(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the leaves of an output without their graph, on the device of the last stage."""
        if self._is_lazy:
            leaves = without_graph(leaves)
            return [leaf if isinstance(leaf, LazyLogits) else _detached(leaf) for leaf in leaves]
        with without_torch_function():
            return list(map(_detached, own_values(leaves)))


@contextmanager
def own_gradients(parameters: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """Lets the backward in the block begin without gradients; then restores those from before.

    Hooks of parameters are left out: the gradient of the batch runs them, once.

    Yields:
        a list that holds the gradients of the parameters after the block.
    """
    before = [parameter.grad for parameter in parameters]
    gradients: list[Tensor | None] = []
    for parameter in parameters:
        parameter.grad = None
    try:
        with without_gradient_hooks(parameters):
            yield gradients
        gradients += [parameter.grad for parameter in parameters]
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


# Enough elements of a gradient to compare.
_COMPARED = 2**20


def gradient_of_number(model: HybridModel, inputs: Any, number: int) -> Tensor | None:
    """Returns some elements of the gradient of a number among the outputs, of shape (n,).

    None: it depends on no trained parameter.

    Args:
        model: the pipeline.
        inputs: the inputs of one micro-batch.
        number: the index of the number among the leaves of the output.
    """

    def head(_: int, output: Any) -> HeadOutput:
        leaf = tree_flatten(output)[0][number]
        if not leaf.requires_grad:
            return HeadOutput(None, zero_of(output), torch.ones(()))
        return HeadOutput(leaf.detach(), leaf, torch.ones_like(leaf))

    with own_gradients(list(model.parameters())) as gradients:
        (value,), held = model.run_forwards([inputs], head)
        model.run_backwards(held)
    if value is None:
        return None
    pieces: list[Tensor] = []
    for gradient in reversed(gradients):  # from the last layers, which are rarely all zero
        if gradient is not None and sum(map(len, pieces)) < _COMPARED:
            values = gradient.detach().to_dense().reshape(-1)
            pieces.append(values[:_COMPARED].double().cpu())
    return torch.cat(pieces) if pieces else None


class Kept:
    """The output of a micro-batch whose lazy logits stay lazy after its forward.

    A pipeline looks for them in what its head returns, but not inside this.

    Attributes:
        output: the output, without a graph of the logits.
    """

    def __init__(self, output: Any) -> None:
        self.output = output


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
