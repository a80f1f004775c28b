"""The cross-entropy of a linear layer's outputs, without these outputs: the logits of one chunk.

    losses  =  input part  +  weight part       two autograd nodes, for a backward in two parts

    forward              in chunks of tokens: logits, their log-sum-exp, the losses, and the
                         gradient of the hidden states
    in between           hidden states, their gradient, one float per token
    backward to inputs   scales the gradient that it has: no product, the stage before need not wait
    backward to weights  in chunks of classes: the logits again, and the gradient of these rows of
                         the weight, each in one product over all tokens

Products have the dtype of the plain layer; all else is computed in float32. The sizes of chunks
depend on the shapes of a micro-batch alone, so that every layout computes the same bits.

The weight's gradient could be made in the forward where the backward follows at once, by adding
the products of all chunks of tokens, and the logits would be computed once. For 4,096 tokens of
width 512 and 131,072 classes on a CPU that took 20.1 s instead of 25.6 in float32, but in bfloat16
23.1 s instead of 16.9, and 0.74 GiB instead of 0.31: each chunk adds to a float32 sum as large as
the weight. Schedules that divide the backward would have to add in the same order, for the same
bits, and would gain nothing. So all compute it here, in one product per row of the weight.

PyTorch's `F.linear_cross_entropy` has one node, keeps a tensor as large as the weight from the
forward to the backward of each micro-batch, sums bf16 losses in bf16, and has no autocast rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 2**24
"""The logits of a chunk: 64 MiB in float32."""

# Multiplies the gradient of fp16 logits in the forward, before the scale of a GradScaler is known.
_SCALE_OF_FP16 = 1024.0


@dataclass(frozen=True)
class Term:
    """A linear layer: `factor * (hidden @ weight.T + bias)`.

    Attributes:
        hidden: of shape (tokens, width), in the dtype of the product.
        weight: of shape (classes, width).
        bias: of shape (classes), or None.
        factor: a number.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    factor: float = 1.0

    @property
    def trains(self) -> bool:
        """Whether the weight or the bias needs a gradient."""
        return self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)


@dataclass(frozen=True)
class Loss:
    """What follows the sum of the linear layers.

    Attributes:
        targets: the class of each token, of shape (tokens).
        softcap: whether logits pass through a tanh.
        factor: multiplies them after it.
        ignore_index: the target that does not count.
        smoothing: the label smoothing, 0 to 1.
        class_weights: of shape (classes), float32, or None.
    """

    targets: Tensor
    softcap: bool = False
    factor: float = 1.0
    ignore_index: int = -100
    smoothing: float = 0.0
    class_weights: Tensor | None = None

    def token_weights(self) -> Tensor:
        """Returns 1 or the class weight for each token, 0 if its target is ignored."""
        counted = self.targets != self.ignore_index
        if self.class_weights is None:
            return counted.float()
        return self.class_weights[self.classes()] * counted

    def classes(self) -> Tensor:
        """Returns the targets, with the first class in the place of ignored ones."""
        return self.targets.masked_fill(self.targets == self.ignore_index, 0)


def token_losses(terms: Sequence[Term], loss: Loss) -> Tensor:
    """Returns the loss of each token, float32: 0 if its target is ignored.

    Gradients go to all hidden states, weights and biases of `terms` that need one. Any autocast of
    the caller must be off.
    """
    # The input part must not give the weight a gradient: the weight part does.
    fixed = [_without_gradient(term) for term in terms]
    with_grad = torch.is_grad_enabled()
    losses: Tensor
    losses, log_sums = _InputPart.apply(fixed, loss, with_grad, *(term.hidden for term in terms))
    if with_grad and any(term.trains for term in terms):
        hidden = [term.hidden.detach() for term in terms]
        values = [value for term in terms for value in (term.weight, term.bias)]
        factors = [term.factor for term in terms]
        # Zeros are added, so that the sum has both nodes and the values of the first alone.
        losses = losses + _WeightPart.apply(factors, loss, log_sums, hidden, *values)
    return losses


def largest_classes(terms: Sequence[Term], softcap: bool, factor: float) -> Tensor:
    """Returns the class with the largest logit of each token."""
    rows = len(terms[0].hidden)
    classes = terms[0].hidden.new_empty(rows, dtype=torch.long)
    loss = Loss(classes, softcap, factor)
    for chunk in _chunks(rows, len(terms[0].weight)):
        classes[chunk] = _logits(terms, loss, tokens=chunk)[0].argmax(1)
    return classes


def _without_gradient(term: Term) -> Term:
    """Returns a term whose weight is a constant, in the dtype of the product."""
    bias = None if term.bias is None else term.bias.detach()
    return replace(term, weight=term.weight.detach().to(term.hidden.dtype), bias=bias)


def _chunks(size: int, other_size: int) -> Iterator[slice]:
    """Yields the parts of a dimension, for a table with this size of the other one."""
    step = max(16, CHUNK // max(other_size, 1))
    return (slice(at, at + step) for at in range(0, size, step))


_ALL = slice(None)


def _logits(
    terms: Sequence[Term], loss: Loss, tokens: slice = _ALL, classes: slice = _ALL
) -> tuple[Tensor, Tensor | None]:
    """Returns logits in float32, and the slope of the softcap."""
    logits: Tensor | None = None
    for term in terms:
        hidden, weight = term.hidden[tokens], term.weight[classes]
        bias = None if term.bias is None else term.bias[classes].to(hidden.dtype)
        product = F.linear(hidden, weight.to(hidden.dtype), bias).float()
        if logits is None:
            # In place from here on: `product` is a new tensor.
            logits = product if term.factor == 1.0 else product.mul_(term.factor)
        else:
            logits.add_(product, alpha=term.factor)
    assert logits is not None
    slope = None
    if loss.softcap:
        logits.tanh_()
        slope = torch.addcmul(logits.new_ones(()), logits, logits, value=-1)
    if loss.factor != 1.0:
        logits.mul_(loss.factor)
    return logits, slope


class _Rows(NamedTuple):
    """The derivative of each token's loss by its logit z of class j, with probabilities p.

        at_all * p[j] - share * class_weights[j] - (at_target if j is the target)

    All are of shape (tokens, 1).
    """

    at_all: Tensor
    share: Tensor
    at_target: Tensor

    @classmethod
    def of(cls, loss: Loss, classes: int) -> _Rows:
        """Returns the numbers of all tokens, for this number of classes."""
        at_target = loss.token_weights()[:, None] * (1 - loss.smoothing)
        counted = (loss.targets != loss.ignore_index)[:, None].float()
        share = counted * (loss.smoothing / classes)
        total = classes if loss.class_weights is None else loss.class_weights.sum()
        return cls(at_target + share * total, share, at_target)

    def times(self, upstream: Tensor) -> _Rows:
        """Returns the derivative of something that depends on the losses."""
        return _Rows(*(numbers * upstream[:, None] for numbers in self))


def _gradient_of_logits(
    logits: Tensor,
    slope: Tensor | None,
    log_sums: Tensor,
    loss: Loss,
    rows: _Rows,
    tokens: slice = _ALL,
    classes: slice = _ALL,
) -> Tensor:
    """Returns the derivative by the logits before softcap and factor, written over `logits`."""
    at_all, share, at_target = (numbers[tokens] for numbers in rows)
    start, count = classes.start or 0, logits.shape[1]
    # Over the logits, which are not needed any more: one table of a chunk instead of two.
    gradient = logits.sub_(log_sums[tokens, None]).exp_().mul_(at_all)
    if loss.smoothing:
        weights = loss.class_weights
        gradient.sub_(share if weights is None else share * weights[classes])
    # Targets outside of this chunk of classes add zero at a clamped place, without a branch on the
    # device.
    place = loss.classes()[tokens, None] - start
    is_here = (place >= 0) & (place < count)
    gradient.scatter_add_(1, place.clamp(0, count - 1), -at_target * is_here)
    if slope is not None:
        gradient.mul_(slope)
    return gradient.mul_(loss.factor) if loss.factor != 1.0 else gradient


class _InputPart(torch.autograd.Function):
    """Returns the losses, and the log-sum-exp of each token's logits."""

    @staticmethod
    def forward(
        ctx: Any, terms: Sequence[Term], loss: Loss, with_grad: bool, *hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        tokens, classes = len(hidden[0]), len(terms[0].weight)
        rows, target = _Rows.of(loss, classes), loss.classes()[:, None]
        losses, log_sums = rows.at_all.new_empty(tokens), rows.at_all.new_empty(tokens)
        # in fp16 many numbers that are not yet multiplied by the scale of the loss would be lost
        gradients = [
            torch.empty_like(h, dtype=torch.float32 if h.dtype == torch.float16 else h.dtype)
            if needed and with_grad
            else None
            for h, needed in zip(hidden, ctx.needs_input_grad[3:], strict=True)
        ]
        for chunk in _chunks(tokens, classes):
            logits, slope = _logits(terms, loss, tokens=chunk)
            log_sum = torch.logsumexp(logits, 1, keepdim=True)
            log_sums[chunk] = log_sum[:, 0]
            _, share, at_target = (numbers[chunk] for numbers in rows)
            of_token = (log_sum - logits.gather(1, target[chunk])) * at_target
            if loss.smoothing:
                ones = logits.new_ones(classes)
                weights = ones if loss.class_weights is None else loss.class_weights
                spread = log_sum * weights.sum() - (logits @ weights)[:, None]
                of_token = of_token + spread * share
            losses[chunk] = of_token[:, 0]
            # As in evaluation: nothing but the loss is needed.
            if all(gradient is None for gradient in gradients):
                continue
            of_logits = _gradient_of_logits(logits, slope, log_sums, loss, rows, tokens=chunk)
            for term, gradient in zip(terms, gradients, strict=True):
                if gradient is None:
                    continue
                if term.hidden.dtype == torch.float16:
                    product = (of_logits * _SCALE_OF_FP16).half() @ term.weight
                    gradient[chunk] = product.float().mul_(term.factor / _SCALE_OF_FP16)
                else:
                    product = of_logits.to(term.hidden.dtype) @ term.weight
                    gradient[chunk] = product if term.factor == 1 else product * term.factor
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [h.dtype for h in hidden]
        # It only feeds the weight part, whose gradient is computed directly.
        ctx.mark_non_differentiable(log_sums)
        return losses, log_sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Any) -> Any:
        gradients = [
            # in float32: 1 / count has an error of up to 0.4% in bf16, and the scale of a
            # GradScaler may be too large for fp16
            None if gradient is None else (gradient.float() * upstream[:, None]).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return None, None, None, *gradients


class _WeightPart(torch.autograd.Function):
    """Returns zeros; its backward computes the gradients of the weights and biases."""

    @staticmethod
    def forward(
        ctx: Any,
        factors: Sequence[float],
        loss: Loss,
        log_sums: Tensor,
        hidden: Sequence[Tensor],
        *values: Tensor | None,
    ) -> Tensor:
        ctx.factors, ctx.loss = factors, loss
        # Saved by autograd, so that a change in place is noticed.
        ctx.save_for_backward(log_sums, *hidden, *values)
        return torch.zeros_like(log_sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        log_sums, *saved = ctx.saved_tensors
        factors, loss, count = ctx.factors, ctx.loss, len(ctx.factors)
        hidden, weights, biases = saved[:count], saved[count::2], saved[count + 1 :: 2]
        terms = list(map(Term, hidden, weights, biases, factors))
        # Filled chunk by chunk, so no sum over chunks rounds.
        gradients = [
            torch.empty_like(value) if needed else None
            for value, needed in zip(saved[count:], ctx.needs_input_grad[4:], strict=True)
        ]
        classes = len(weights[0])
        rows = _Rows.of(loss, classes).times(upstream)
        kind = log_sums.device.type
        with torch.autocast(kind, enabled=False):  # a backward may run under the caller's
            for chunk in _chunks(classes, len(log_sums)):
                logits, slope = _logits(terms, loss, classes=chunk)
                of_logits = _gradient_of_logits(logits, slope, log_sums, loss, rows, classes=chunk)
                for term, of_weight, of_bias in zip(
                    terms, gradients[::2], gradients[1::2], strict=True
                ):
                    if of_weight is not None:
                        product = of_logits.to(term.hidden.dtype).t() @ term.hidden
                        of_weight[chunk] = product if term.factor == 1 else product * term.factor
                    if of_bias is not None:
                        of_bias[chunk] = of_logits.sum(0).mul_(term.factor)
        return None, None, None, None, *gradients
