"""The times of counted work on a machine, by the roofline model; see `estimates`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridtrain.machine import Machine
from hybridtrain.planning.costs import LayerCost
from hybridtrain.planning.estimates import CountedLayer, Work


@dataclass(frozen=True)
class Calibration:
    """The times that a device takes, as multiples of those that are estimated for it.

    Attributes:
        forward: of a forward.
        backward: of a backward.
        contention: as of a `CostTable`.
    """

    forward: float = 1.0
    backward: float = 1.0
    contention: float = 1.0


@dataclass(frozen=True)
class Rates:
    """The operations and bytes per second of a device, as training reaches them.

    Attributes:
        flops: of matrix products.
        bandwidth: bytes from and to its memory.
        operator_ms: the host's time to call an operator.
        calibration: what times are multiplied with.
    """

    flops: float
    bandwidth: float
    operator_ms: float
    calibration: Calibration = Calibration()

    @classmethod
    def of(
        cls, machine: Machine, precision: str, tf32: bool, calibration: Calibration | None = None
    ) -> Rates:
        """Returns the rates of a machine for a precision."""
        name = "tf32" if tf32 and precision == "fp32" else precision
        return cls(
            machine.sustained_flops(name),
            machine.sustained_bandwidth,
            machine.operator_s * 1e3,
            calibration or Calibration(),
        )

    def timed(self, layer: CountedLayer) -> LayerCost:
        """Returns the cost of a layer with the times that its work takes."""
        return replace(
            layer.cost,
            forward_ms=self._ms(layer.forward) * self.calibration.forward,
            backward_ms=self._ms(layer.backward) * self.calibration.backward,
        )

    def host_ms(self, layer: CountedLayer) -> tuple[float, float]:
        """Returns the host's times to call the operators of a forward and of a backward."""
        return (
            layer.forward.operators * self.operator_ms * self.calibration.forward,
            layer.backward.operators * self.operator_ms * self.calibration.backward,
        )

    def _ms(self, work: Work) -> float:
        product = max(work.flops / self.flops, work.product_bytes / self.bandwidth)
        return (product + (work.bytes - work.product_bytes) / self.bandwidth) * 1e3
