"""The times of counted work on a machine, by the roofline model; see `estimates`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridtrain.machine import Machine
from hybridtrain.planning.costs import LayerCost
from hybridtrain.planning.estimates import CountedLayer, Work


@dataclass(frozen=True)
class Rates:
    """The operations and bytes per second of a device, as training reaches them.

    Attributes:
        flops: of matrix products.
        bandwidth: bytes from and to its memory.
        operator_ms: the host's time to call an operator.
    """

    flops: float
    bandwidth: float
    operator_ms: float

    @classmethod
    def of(cls, machine: Machine, precision: str, tf32: bool) -> Rates:
        """Returns the rates of a machine for a precision."""
        name = "tf32" if tf32 and precision == "fp32" else precision
        return cls(
            machine.sustained_flops(name),
            machine.sustained_bandwidth,
            machine.operator_s * 1e3,
        )

    def timed(self, layer: CountedLayer) -> LayerCost:
        """Returns the cost of a layer with the times that its work takes."""
        return replace(
            layer.cost,
            forward_ms=self._ms(layer.forward),
            backward_ms=self._ms(layer.backward),
        )

    def host_ms(self, layer: CountedLayer) -> tuple[float, float]:
        """Returns the host's times to call the operators of a forward and of a backward."""
        return (
            layer.forward.operators * self.operator_ms,
            layer.backward.operators * self.operator_ms,
        )

    def _ms(self, work: Work) -> float:
        product = max(work.flops / self.flops, work.product_bytes / self.bandwidth)
        return (product + (work.bytes - work.product_bytes) / self.bandwidth) * 1e3
