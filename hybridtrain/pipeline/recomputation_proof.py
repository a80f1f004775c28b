"""Bitwise comparison of recomputations with their forwards.

A backward that recomputes a forward uses the tensors that the second run saves. They must equal
those of the first run, even if a layer depends on state that is not restored: its own generator, a
counter in an object, a numpy array. So some steps record a digest of each tensor that autograd
saves, and of each layer's output, in both runs:

    forward      saved 3f..  saved 81..  output of 'a' 55..  saved 07..  output of 'b' 9c..
    recomputed   saved 3f..  saved 81..  output of 'a' d2..  saved 6e..   (ends at the last saved)
                                                       ^ layer 'a' is the first that differs

The backward uses nothing that the second run does not reach. It does not use everything that is
saved either: attention kernels save a random seed and offset, which are uninitialised memory if
their dropout is 0. `_UnusedSeeds` finds them. Digests stay on their device, and are compared at the
end of the step. The compared steps are the first `FIRST_STEPS` of each kind (`step_kind`), then
each power of two, and each `INTERVAL`-th step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hybridtrain._base.tensors import storage_id
from hybridtrain._base.torch_private import InterceptedDraws, is_traced, noting_saved, saved_hooks
from hybridtrain.errors import ConfigError, argument, setting
from hybridtrain.graph import Layer
from hybridtrain.head import hidden_states
from hybridtrain.pipeline.layer_rng import is_off
from hybridtrain.pipeline.tensor_digest import digest

FIRST_STEPS = 4
INTERVAL = 128

# Some GPU kernels add in a nondeterministic order, which explains differences below this share of
# the sum of magnitudes.
_ROUNDING = 1e-3


def is_compared(step: int) -> bool:
    """Returns whether recomputations are compared in a step; the first of its kind is 1."""
    return step <= FIRST_STEPS or not step & (step - 1) or step % INTERVAL == 0


class _Entry(NamedTuple):
    """A tensor in one of the runs.

    Attributes:
        layer: the position of the layer.
        kind: saved or output.
        form: its type, shape and device.
        bits: a digest of its bits; None where they cannot be read.
        magnitude: the sum of its magnitudes, on devices other than the CPU.
        is_used: False for a seed that no gradient depends on.
    """

    layer: int
    kind: str
    form: Any
    bits: Tensor | None
    magnitude: Tensor | None
    is_used: bool = True


class Record:
    """The digests of one piece, a stage or a layer, in the forward and in its recomputation."""

    def __init__(self) -> None:
        self._runs: list[list[_Entry]] = []
        self._layer = 0
        self._seeds: _UnusedSeeds | None = None  # in a run

    @contextmanager
    def run(self) -> Iterator[None]:
        """Surrounds a run of the piece, inside the context that seeds its draws."""
        self._runs.append([])
        seeds = self._seeds = _UnusedSeeds()
        try:
            # Innermost, so that it sees the draws before the context that seeds them.
            with noting_saved(self._note_saved), seeds:
                yield
        finally:
            self._seeds = None
        for position in seeds.positions:
            self._runs[-1][position] = self._runs[-1][position]._replace(is_used=False)

    def at(self, layer: int) -> None:
        """Notes that the layer at this position runs next."""
        self._layer = layer

    def output(self, value: Any) -> None:
        """Notes the output of the layer."""
        # Lazy logits are compared by what they refer to: comparing would compute them.
        for leaf in tree_leaves(hidden_states(value)):
            if isinstance(leaf, Tensor):
                self._note("output", leaf)

    def _note_saved(self, tensor: Tensor) -> None:
        if self._seeds is not None:
            self._seeds.saved(len(self._runs[-1]), tensor)
        self._note("saved", tensor)

    def _note(self, kind: str, tensor: Tensor) -> None:
        form = tensor.dtype, tuple(tensor.shape), tensor.device
        # A digest stays on its device: nothing waits before the end of the step.
        self._runs[-1].append(_Entry(self._layer, kind, form, digest(tensor), _magnitude(tensor)))

    def first_difference(self, exempt: Callable[[int], bool]) -> int | None:
        """Returns the position of the first layer that differs.

        Args:
            exempt: returns whether the layer at a position may be nondeterministic.
        """
        if len(self._runs) < 2:
            return None
        # The second run is shorter: the checkpoint ends it when everything saved is there again.
        for before, after in zip(*self._runs[:2], strict=False):
            if not _agree(before, after):
                # later layers may differ because of an exempt layer
                # In the order of the forward, so the first difference is the cause of the
                # later ones.
                return None if exempt(before.layer) else before.layer
        return None


class _UnusedSeeds(InterceptedDraws):
    """Finds saved tensors that no gradient depends on: random seeds of a kernel without dropout.

    An operation with an argument `dropout_p` draws nothing in a call where that is 0. The integers
    that it returns are then either computed from its inputs, as its other results are, or are seeds
    without a meaning. Operations are watched and not autograd's nodes, because compiled code saves
    the same seeds in a node of its own. An operation's own autograd saves them before the operation
    returns, a custom `autograd.Function` and compiled code afterwards.

    Attributes:
        positions: the positions of such tensors among the saved ones; complete at the end, but
            only if no exception ended the operation, as one does at the end of a recomputation.
    """

    def __init__(self) -> None:
        self.positions: set[int] = set()
        # kept, because a freed storage's id may become another's
        self._unused: dict[int, Tensor] = {}
        self._saved_inside: list[tuple[int, Tensor]] = []
        self._depth = 0

    def draw(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a random operation, drawn as in the enclosing context."""
        outer = self._outer

        def run(*args: Any, **kwargs: Any) -> Any:
            if outer is None:
                return operation(*args, **kwargs)
            return outer.draw(operation, args, kwargs)

        return self.call(run, operation, args, kwargs)

    def call(
        self, run: Callable[..., Any], operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Returns the result of an operation with an argument `dropout_p`, and notes its seeds."""
        if not is_off(operation, args, kwargs) or is_traced(args):
            return run(*args, **kwargs)
        self._depth += 1
        try:
            result = run(*args, **kwargs)
            inputs = {storage_id(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            for leaf in tree_leaves(result):
                if _is_integer(leaf) and storage_id(leaf) not in inputs:
                    self._unused[storage_id(leaf)] = leaf
            for position, tensor in self._saved_inside:
                if storage_id(tensor) in self._unused:
                    self.positions.add(position)
        finally:
            self._depth -= 1
            if not self._depth:
                self._saved_inside.clear()
        return result

    def saved(self, position: int, tensor: Tensor) -> None:
        """Notes that autograd saves a tensor."""
        if not _is_integer(tensor):
            return
        if self._depth:
            self._saved_inside.append((position, tensor))
        elif storage_id(tensor) in self._unused:
            self.positions.add(position)


def _is_integer(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dtype == torch.bool:
        return False
    return not (value.is_floating_point() or value.is_complex() or value.is_quantized)


def check_records(records: Sequence[Record], layers: Sequence[Layer]) -> None:
    """Raises a ConfigError that names the first layer whose recomputation differs, if any does."""
    if not records:
        return
    exempt = [_has_torchscript(layer.module) for layer in layers]
    for record in records:
        # PyTorch's profiling executor changes TorchScript's code between its first runs
        layer = record.first_difference(lambda position: any(exempt[: position + 1]))
        if layer is not None:
            raise differs(layers[layer])


def differs(layer: Layer) -> ConfigError:
    """Returns the error for a layer with different results in its recomputation."""
    leave_out = (
        f"leave the layer out of recomputation: {argument('recompute')}[...] lists the layers to "
        "recompute"
    )
    if _has_rrelu(layer.module):
        cause = (
            "PyTorch's checkpoint loses the random slopes of RReLU (pytorch/pytorch#193671). Use "
            f"another activation, or {leave_out}"
        )
    elif saved_hooks() is not None:
        cause = (
            "hooks on saved tensors around the step also change the inputs that the recomputation "
            "starts from (torch.autograd.graph.saved_tensors_hooks). Use hooks that return the "
            f"same values, or {setting('recompute', 'never', repr)}"
        )
    else:
        cause = (
            "it depends on state that is not restored, such as an object, a numpy array or its own "
            f"random generator. Keep that state in a registered buffer, or {leave_out}"
        )
    return ConfigError(
        f"layer {layer.name!r} computes different values in its recomputation than in its "
        f"forward, so its gradients would be wrong: {cause}"
    )


def _agree(before: _Entry, after: _Entry) -> bool:
    if before[:3] != after[:3]:
        return False
    if not (before.is_used and after.is_used):
        return True
    if before.bits is None or after.bits is None or torch.equal(before.bits, after.bits):
        return True
    if before.magnitude is None or after.magnitude is None:
        return False
    # Bits differ where a kernel adds in any order. Wrong state would change the sum by more.
    return torch.allclose(before.magnitude, after.magnitude, rtol=_ROUNDING, atol=0.0)


@torch.no_grad()
def _magnitude(tensor: Tensor) -> Tensor | None:
    if tensor.device.type == "cpu" or not tensor.is_floating_point() or tensor.is_meta:
        return None
    return tensor.detach().abs().sum(dtype=torch.float64)


def _has_rrelu(module: nn.Module) -> bool:
    """Returns whether `module` contains an RReLU, or calls the function by name."""
    for part in module.modules():
        code = getattr(type(part).forward, "__code__", None)
        names = code.co_names if code is not None else ()
        if isinstance(part, nn.RReLU) or not {"rrelu", "rrelu_"}.isdisjoint(names):
            return True
    return False


def _has_torchscript(module: nn.Module) -> bool:
    """Returns whether `module` contains TorchScript, or calls TorchScript functions by name."""
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            return True
        code = getattr(type(part).forward, "__code__", None)
        names = getattr(type(part).forward, "__globals__", {})
        if any(
            isinstance(names.get(name), torch.jit.ScriptFunction)
            for name in (code.co_names if code is not None else ())
        ):
            return True
    return False
