"""Outputs whose backward is a function: where the gradients of a pipelined call arrive.

    the model's outputs     [1] loss -- Carry --.
                                                +-- Arrive --> backwards of the pipeline [2]
                                logits - Carry -'                 |
                                                                  '-> gradients of arguments
                                                                      and parameters [3]

[1] Each `Carry` notes the gradient of its output. [2] `Arrive` runs once all of them have, and
returns [3] the gradients of the arguments and parameters. PyTorch itself adds them to
`parameter.grad`, or returns them from `torch.autograd.grad`, or drops those that nobody has asked
for. The edges between [1] and [2] are numbers on the CPU, because PyTorch runs a node on the thread
of its device: in a GPU's own thread, [2] would wait for backwards that need that thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from hybridtrain._base.torch_private import replace_backward_entry
from hybridtrain.errors import UserError
from hybridtrain.head import LazyLogits, with_backward
from hybridtrain.pipeline import unwatched

Backward = Callable[[Mapping[int, Tensor]], Sequence[Tensor | None]]
"""`backward(gradients)`, by the number of the output, returns the gradients of what entered."""


class _Arrivals:
    """The gradients that have arrived, and what to do once all have."""

    def __init__(self, backward: Backward, count: int) -> None:
        self.backward: Backward | None = backward
        self.gradients: dict[int, Tensor] = {}
        self._count = count  # of what entered

    def finish(self) -> Sequence[Tensor | None]:
        if not self.gradients:  # the outputs are in the graph, but no gradient reaches them
            return [None] * self._count
        if self.backward is None:
            raise UserError(
                "the backward of this call of a pipelined model has already run, and its "
                "activations are freed: call the model again, or add up the losses and call "
                "backward once (retain_graph=True keeps the graph of other code only)"
            )
        if torch.is_grad_enabled():
            raise UserError(
                "create_graph=True needs a graph of the backward, which a pipelined model does not "
                "make: compute this gradient (a penalty, a force) inside the model, or with the "
                "plain model, unpipelined(model)"
            )
        backward, self.backward = self.backward, None
        gradients, self.gradients = self.gradients, {}
        return backward(gradients)


# On the CPU, whatever the default device is. The anchor requires a gradient and never gets one.
_ANCHOR = torch.zeros((), device="cpu", requires_grad=True)
_GRADIENT_OF_TOKEN = torch.zeros((), device="cpu")


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arrivals: _Arrivals, count: int, *inputs: Tensor) -> Any:
        ctx.arrivals = arrivals
        ctx.set_materialize_grads(False)
        return tuple([torch.zeros((), device="cpu") for _ in range(count)])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None, None, None, *ctx.arrivals.finish())


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, arrivals: _Arrivals, held: list[Any]) -> Tensor:
        ctx.arrivals, ctx.number = arrivals, held[0]
        ctx.set_materialize_grads(False)
        output: Tensor = held[1]
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is not None:
            ctx.arrivals.gradients[ctx.number] = gradient
        return _GRADIENT_OF_TOKEN, None, None


def attached(
    outputs: Mapping[int, Tensor], backward: Backward, entering: Sequence[Tensor]
) -> dict[int, Tensor]:
    """Returns the outputs, with `backward` as their graph.

    Args:
        outputs: tensors without a graph, by their number.
        backward: gets the gradients that have arrived; runs once.
        entering: the arguments and parameters whose gradients it returns.
    """
    arrivals = _Arrivals(backward, len(entering))
    tokens = _Arrive.apply(arrivals, len(outputs), _ANCHOR, *entering)

    def carried(number: int, token: Tensor, output: Tensor) -> Tensor:
        # the output in a list: a returned argument would be a view, which code like HF Trainer's
        # `loss *= ...` must not change
        same: Tensor = _Carry.apply(token, arrivals, [number, output])
        return same

    return {
        number: with_backward(output, partial(carried, number, token))
        if isinstance(output, LazyLogits)
        else carried(number, token, output)
        for token, (number, output) in zip(tokens, outputs.items(), strict=True)
    }


@cache
def explain_backwards() -> None:
    """Adds to PyTorch's error of a graph that is freed what it means in a pipelined model."""

    def explain(error: RuntimeError) -> None:
        if "backward through the graph a second time" in str(error):
            error.add_note(
                "a tensor that a hook of a layer, or an attribute, has kept from a pipelined model "
                "belongs to one micro-batch, and cannot be used in a loss: return it from the "
                "model's forward, and use the output"
            )

    replace_backward_entry(lambda inputs: None, lambda gradients: None, explain)


class Late:
    """The gradients of a micro-batch's outputs, which arrive after its forward.

    An object, because the code between layers copies containers of the arguments that it looks at.

    Attributes:
        gradients: one for each output of the gate.
    """

    def __init__(self) -> None:
        self.gradients: list[Tensor | None] = []


@unwatched
class Gate(torch.autograd.Function):
    """The root of a micro-batch's backward, which hands its outputs their gradients."""

    @staticmethod
    def forward(ctx: Any, late: Late, *outputs: Tensor) -> Tensor:  # noqa: D102
        ctx.late = late
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:  # noqa: D102
        return None, *ctx.late.gradients
