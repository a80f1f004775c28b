"""The devices of a replica's stages, and the processes that own them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridtrain.errors import ConfigError
from hybridtrain.schedule import Placement, place_of


@dataclass(frozen=True)
class StageOwners:
    """The devices of a pipeline, and the processes that own them.

    Attributes:
        devices: the pipeline's devices in order, such as `("cuda:0", "cuda:1")`; names are local
            to the process that owns them.
        processes: the number of processes of a replica, which own equally many consecutive
            devices. 1: one process owns all; `len(devices)`: one process per device.
        replicas: the number of data-parallel copies of the pipeline.
        placement: how the schedule assigns stages to devices.
    """

    devices: tuple[str, ...] = ("cpu",)
    processes: int = 1
    replicas: int = 1
    placement: Placement = "loop"

    def __post_init__(self) -> None:
        if not self.devices or self.processes < 1 or len(self.devices) % self.processes:
            raise ConfigError(
                f"{len(self.devices)} devices cannot be shared equally by {self.processes} "
                f"processes"
            )

    @classmethod
    def of_cpus(cls, nb_part: int) -> StageOwners:
        """Returns `nb_part` CPU stages in one process."""
        return cls(("cpu",) * nb_part)

    @property
    def nb_part(self) -> int:
        """The number of devices of the pipeline."""
        return len(self.devices)

    def placed(self, placement: Placement) -> StageOwners:
        """Returns the same devices with this placement of stages."""
        return replace(self, placement=placement)

    def device_of(self, stage: int) -> str:
        """Returns the device of `stage`."""
        return self.devices[place_of(stage, self.nb_part, self.placement)]

    def process_of(self, stage: int) -> int:
        """Returns which of the replica's processes owns `stage`, counted from 0."""
        return place_of(stage, self.nb_part, self.placement) * self.processes // self.nb_part

    def local_index(self, stage: int) -> int:
        """Returns the index of the device of `stage` among the devices of its process."""
        per_process = self.nb_part // self.processes
        return place_of(stage, self.nb_part, self.placement) % per_process

    def stages_of(self, process: int, stages_per_device: int = 1) -> list[int]:
        """Returns the stages that `process` owns."""
        stages: Sequence[int] = range(self.nb_part * stages_per_device)
        return [stage for stage in stages if self.process_of(stage) == process]
