"""The stages and layers that the option `recompute` selects, by micro-batch.

The only module that reads the option:

    pipeline   `recompute_policy`: the stages and layers to recompute
    planner    `recomputes_stages`: whether a stage holds its inputs or its activations
    price      `priced_mode`, then `whole_stages`: the cost of backwards and the memory of devices
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from hybridtrain.errors import ConfigError, did_you_mean, setting
from hybridtrain.options import RecomputeSpec


@dataclass(frozen=True)
class RecomputePolicy:
    """The recomputed parts: whole stages for some micro-batches, or some layers for all of them.

    Attributes:
        mode: the micro-batches that recompute whole stages: `never`, `except_last` or `always`.
        layers: the indices of the layers that are recomputed individually.
    """

    mode: str = "never"
    layers: frozenset[int] = frozenset()

    @property
    def is_active(self) -> bool:
        """True if anything is recomputed."""
        return self.mode != "never" or bool(self.layers)

    def whole_stages(self, chunks: int) -> frozenset[int]:
        """Returns the micro-batches (of `chunks`) that recompute whole stages."""
        return whole_stages(self.mode, chunks)

    def shares(self, times: Sequence[Sequence[float]], chunks: int) -> list[list[float]]:
        """Returns, by stage and micro-batch, the share of a forward that its backward recomputes.

        Args:
            times: the forward times of each stage's layers, in any unit; all 0 if unknown, so that
                all layers count equally.
            chunks: the micro-batches of a batch.
        """
        whole = self.whole_stages(chunks)
        shares, first = [], 0
        for of_stage in times:
            layer_times = of_stage if any(of_stage) else [1.0] * len(of_stage)
            again = sum(t for n, t in enumerate(layer_times, first) if n in self.layers)
            first += len(layer_times)
            share = again / sum(layer_times)
            shares.append([1.0 if i in whole else share for i in range(chunks)])
        return shares


@cache
def whole_stages(mode: str, chunks: int) -> frozenset[int]:
    """Returns the micro-batches (of `chunks`) that recompute whole stages.

    Args:
        mode: a mode of `PipelineOptions.recompute`; for `layers` the result is empty.
        chunks: the micro-batches of a batch.
    """
    return frozenset(range({"always": chunks, "except_last": chunks - 1}.get(mode, 0)))


def recomputes_stages(spec: RecomputeSpec) -> bool:
    """Returns whether the option recomputes whole stages, given enough micro-batches.

    A stage then stores only its inputs for each micro-batch, and activations for one.
    """
    return isinstance(spec, str) and bool(whole_stages(spec, 2))


def priced_mode(spec: RecomputeSpec) -> str:
    """Returns the option as a layout's `recompute`: its mode, or `layers` for single layers."""
    return spec if isinstance(spec, str) else "layers"


def recompute_policy(spec: RecomputeSpec, names: Sequence[str]) -> RecomputePolicy:
    """Reads the option `recompute`.

    Args:
        spec: as in `PipelineOptions`; a name in a list stands for a layer, or for a group of layers
            (`blocks` for `blocks.0`, ...), or for the layer around it (`blocks.0.attention`).
        names: the names of the model's layers.

    Raises:
        ConfigError: there is no such layer.
    """
    if isinstance(spec, str):
        return RecomputePolicy(spec)
    if isinstance(spec, Mapping):
        return RecomputePolicy(layers=frozenset(range(0, len(names), spec["every"])))
    chosen: set[int] = set()
    for wanted in spec:
        matches = {i for i, name in enumerate(names) if f"{name}.".startswith(f"{wanted}.")}
        # or the layer that contains it
        matches = matches or {
            i for i, name in enumerate(names) if str(wanted).startswith(f"{name}.")
        }
        if not matches:
            hint = did_you_mean(str(wanted), names, "layers")
            raise ConfigError(
                f"{setting('recompute', list(spec))}: there is no layer {wanted!r}; {hint}"
            )
        chosen |= matches
    return RecomputePolicy(layers=frozenset(chosen))
