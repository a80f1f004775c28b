"""Bitwise comparison of recomputations with their forwards.

A backward that recomputes a forward uses the tensors that the second run saves. They must equal
those of the first run, even if a layer depends on state that is not restored: its own generator, a
counter in an object, a numpy array. So some steps record a digest of each tensor that autograd
saves, and of each layer's output, in both runs:

    forward      saved 3f..  saved 81..  output of 'a' 55..  saved 07..  output of 'b' 9c..
    recomputed   saved 3f..  saved 81..  output of 'a' d2..  saved 6e..   (ends at the last saved)
                                                       ^ layer 'a' is the first that differs

The backward uses nothing that the second run does not reach. Digests stay on their device, and are
compared at the end of the step. The compared steps are the first `FIRST_STEPS` of each kind
(training mode, number of micro-batches), then each power of two, and each `INTERVAL`-th step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hybridtrain._base.torch_private import noting_saved, saved_hooks
from hybridtrain.errors import ConfigError, argument, setting
from hybridtrain.graph import Layer
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
    """

    layer: int
    kind: str
    form: Any
    bits: Tensor | None
    magnitude: Tensor | None


class Record:
    """The digests of one piece, a stage or a layer, in the forward and in its recomputation."""

    def __init__(self) -> None:
        self._runs: list[list[_Entry]] = []
        self._layer = 0

    @contextmanager
    def run(self) -> Iterator[None]:
        """Surrounds a run of the piece."""
        self._runs.append([])
        with noting_saved(self._note_saved):
            yield

    def at(self, layer: int) -> None:
        """Notes that the layer at this position runs next."""
        self._layer = layer

    def output(self, value: Any) -> None:
        """Notes the output of the layer."""
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                self._note("output", leaf)

    def _note_saved(self, tensor: Tensor) -> None:
        self._note("saved", tensor)

    def _note(self, kind: str, tensor: Tensor) -> None:
        form = tensor.dtype, tuple(tensor.shape), tensor.device
        self._runs[-1].append(_Entry(self._layer, kind, form, digest(tensor), _magnitude(tensor)))

    def first_difference(self, exempt: Callable[[int], bool]) -> int | None:
        """Returns the position of the first layer that differs.

        Args:
            exempt: returns whether the layer at a position may be nondeterministic.
        """
        if len(self._runs) < 2:
            return None
        for before, after in zip(*self._runs[:2], strict=False):
            if not _agree(before, after):
                # later layers may differ because of an exempt layer
                return None if exempt(before.layer) else before.layer
        return None


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
    if before.bits is None or after.bits is None or torch.equal(before.bits, after.bits):
        return True
    if before.magnitude is None or after.magnitude is None:
        return False
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
