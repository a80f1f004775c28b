"""Parallel layouts: the ways to run a model on a machine, which the search for plans compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from hybridtrain._base.hardware import Hardware
from hybridtrain._base.replica_shares import samples_by_replica
from hybridtrain._base.summation_tree import most_waiting
from hybridtrain.errors import ConfigError, ScheduleError, argument, setting
from hybridtrain.options import (
    ENGINES,
    OFFLOAD_MODES,
    SHARD_MODES,
    OptimizerState,
    PipelineOptions,
)
from hybridtrain.partitioning import whole_stages
from hybridtrain.price.unequal import EQUAL, Arrangement, arrangements
from hybridtrain.schedule import (
    Placement,
    offloading_on,
    offloads_anything,
    place_of,
    registered,
    schedule_names,
)


@dataclass(frozen=True)
class StepWork:
    """The work of one optimizer step, independent of the layout.

    Attributes:
        samples: samples of a batch, over all replicas.
        accumulate: batches per optimizer step.
        optimizer_tensors_per_param: see `PipelineOptions`.
        data_ms_per_sample: milliseconds that a process needs to load a sample, in the background.
        tokens_per_sample: tokens of a sample that is a sequence of token ids; 0 for other samples.
    """

    samples: int
    accumulate: int = 1
    optimizer_tensors_per_param: OptimizerState = 2
    data_ms_per_sample: float = 0.0
    tokens_per_sample: int = 0

    def state_bytes(self, trained: int, state: int | None) -> int:
        """Returns the bytes of optimizer state of layers.

        Args:
            trained: the bytes of their trained parameters.
            state: the bytes of state if a cost table has them.
        """
        if state is not None:
            return state
        tensors = self.optimizer_tensors_per_param
        if callable(tensors):
            raise ValueError(
                f"{argument('optimizer_tensors_per_param')} is a function of the model: price it "
                "with find_plans, or give the bytes of state in the sizes of the table"
            )
        return round(trained * tensors)


@dataclass(frozen=True)
class ParallelLayout:
    """A way to run a model in parallel; the fields are keys of `pipeline` and `world`.

    Attributes:
        nb_part: devices per pipeline.
        replicas: copies of the pipeline.
        recompute: `never`, `except_last`, `always` or `layers`; for `layers`, `Price.recomputed`
            lists the recomputed layers.
        arrangement: the places of unequal devices, and the shares of the replicas.
        chunks: micro-batches of a logical replica.
        owned_replicas: logical replicas that each pipeline runs, with the micro-batches of all in
            one schedule.
        gradient_sums: the gradients of logical replicas that a process keeps at most while it
            computes another one's, in copies of its gradients.
    """

    nb_part: int = 1
    replicas: int = 1
    engine: str = "local"
    chunks: int = 1
    schedule: str = "1f1b"
    stages_per_device: int = 1
    recompute: str = "never"
    shard: str = "none"
    arrangement: Arrangement = EQUAL
    offload: str = "none"
    owned_replicas: int = 1
    gradient_sums: int = 0

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """The relative speed of each device of a pipeline."""
        return self.arrangement.device_speeds or (1.0,) * self.nb_part

    @cached_property
    def stage_speeds(self) -> tuple[float, ...]:
        """The relative speed of each stage's device."""
        return tuple(self.speeds[device] for device in self.devices)

    @property
    def has_unequal_shares(self) -> bool:
        """True if replicas get unequal shares of a batch."""
        return bool(self.arrangement.replica_shares)

    def usable_bytes(self, hardware: Hardware) -> list[float]:
        """Returns the bytes that a plan may use on each device of a pipeline."""
        return self.arrangement.usable_bytes(hardware, self.nb_part)

    @cached_property
    def stages(self) -> int:
        """Stages per pipeline."""
        return self.nb_part * self.stages_per_device

    @cached_property
    def microbatches(self) -> int:
        """Micro-batches of a pipeline's schedule."""
        return self.chunks * self.owned_replicas

    @property
    def shape(self) -> tuple[int, int, int]:
        """The arguments of the schedule: devices, micro-batches and stages per device."""
        return self.nb_part, self.microbatches, self.stages_per_device

    @cached_property
    def splits_backwards(self) -> bool:
        """True if backwards run in two parts; with recomputation they do not."""
        return registered(self.schedule).splits_backward and self.recompute == "never"

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """For each stage, the index of its device in the pipeline."""
        return _devices(self.stages, self.nb_part, registered(self.schedule).placement)

    def by_device(self, values: Sequence[float]) -> list[float]:
        """Returns the sum of the stages' values for each device."""
        sums = [0.0] * self.nb_part
        for device, value in zip(self.devices, values, strict=True):
            sums[device] += value
        return sums

    @cached_property
    def recomputed(self) -> float:
        """Forwards that a backward recomputes, on average over the micro-batches: 0 to 1."""
        return len(whole_stages(self.recompute, self.microbatches)) / self.microbatches

    @property
    def communicators(self) -> int:
        """Communicators that a device joins at most.

        Those of the world, of the pipeline and of each direction of its two edges, and of the
        replicas of each stage.
        """
        of_pipeline = 0
        if self.engine == "distributed" and self.nb_part > 1:
            of_pipeline = 1 + min(4, 2 * (self.nb_part - 1))
        if self.replicas == 1 and not of_pipeline:
            return 0  # a single process
        return 1 + of_pipeline + self.stages_per_device * (self.replicas > 1)

    def samples(self, work: StepWork) -> int:
        """Returns the number of samples in the largest micro-batch."""
        of_replica = -(-work.samples // (self.replicas * self.owned_replicas))
        if self.has_unequal_shares:
            of_replica = max(self.samples_by_replica(work))
        return -(-of_replica // min(self.chunks, of_replica))

    def samples_by_replica(self, work: StepWork) -> tuple[int, ...]:
        """Returns the number of samples of a batch that each replica gets."""
        shares = self.arrangement.replica_shares or (1,) * self.replicas
        return _samples_by_replica(work.samples, shares)


@lru_cache(maxsize=256)  # many layouts of a search have the same shares
def _samples_by_replica(total: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(samples_by_replica(total, shares))


@lru_cache(maxsize=256)
def _devices(stages: int, nb_part: int, placement: Placement) -> tuple[int, ...]:
    return tuple(place_of(stage, nb_part, placement) for stage in range(stages))


@dataclass(frozen=True)
class Choices:
    """The values that a search may choose from; None: every value that hardware and work allow.

    A sequence with one value fixes the setting. `schedule` defaults to all registered schedules.

    Attributes:
        offload: the values of the option `offload`; a further one is tried where the one before
            it does not fit, if the rates of copies to the host are known.
        options: pipeline options that determine the cut (`split`); None: the search also chooses
            the cut.
        arrange: yields the ways to place pipelines on the devices.
        logical_replicas: the number of logical replicas, which the pipelines divide evenly; None:
            one for each pipeline.
    """

    nb_part: Sequence[int] | None = None
    engine: Sequence[str] = ENGINES
    chunks: Sequence[int] | None = None
    schedule: Sequence[str] = field(default_factory=schedule_names)
    stages_per_device: Sequence[int] = (1, 2, 4)
    recompute: Sequence[str] = ("never", "layers", "except_last", "always")
    shard: Sequence[str] = SHARD_MODES
    offload: Sequence[str] = OFFLOAD_MODES
    options: PipelineOptions | None = None
    arrange: Callable[[Hardware, int, int], Iterable[Arrangement]] = arrangements
    logical_replicas: int | None = None


def layouts(
    hardware: Hardware, work: StepWork, layers: int, choices: Choices
) -> list[ParallelLayout]:
    """Returns the layouts that use all devices and divide all batches evenly.

    The number of replicas divides the samples of a batch, and the number of micro-batches divides
    a replica's samples. The number of pipelines divides that of logical replicas. A node holds
    whole pipelines, or a pipeline covers whole nodes; `engine=local` keeps a pipeline inside a
    node. Interleaved stages need groups of `nb_part` micro-batches. Where a choice makes no
    difference (one device has no schedule, one replica no shards), only its first value is used.

    Raises:
        ConfigError: no layout meets these conditions.
    """
    candidates = list(_all(hardware, work, layers, choices))
    if not candidates:
        fixed = ""
        if choices.logical_replicas is not None:
            fixed = f"{setting('replicas', choices.logical_replicas)} and "
        raise ConfigError(
            f"no layout uses all {hardware.devices} devices for batches of {work.samples} samples "
            f"and a model of {layers} layers: the number of replicas must divide {fixed}the number "
            f"of samples, and each stage needs at least one layer. Change "
            f"{argument('batch_size')}, hardware.nodes=, or a fixed {argument('nb_part')}, "
            f"{argument('chunks')} or {argument('engine')}"
        )
    return candidates


def _all(
    hardware: Hardware, work: StepWork, layers: int, choices: Choices
) -> Iterator[ParallelLayout]:
    in_node = hardware.devices_per_node
    for nb_part in choices.nb_part or divisors(hardware.devices):
        replicas, remainder = divmod(hardware.devices, nb_part)
        whole_nodes = nb_part % in_node == 0 or in_node % nb_part == 0
        if remainder or nb_part > layers or not whole_nodes:
            continue
        logical = choices.logical_replicas or replicas
        owned, remainder = divmod(logical, replicas)
        if remainder or not owned:
            continue
        for arrangement in choices.arrange(hardware, nb_part, replicas):
            placed = ParallelLayout(
                nb_part, replicas, arrangement=arrangement, owned_replicas=owned,
                gradient_sums=most_waiting(range(owned), logical),
            )  # fmt: skip
            if placed.has_unequal_shares:
                is_even = choices.logical_replicas is None  # whose samples are always even
            else:
                is_even = work.samples % logical == 0
            if is_even:
                yield from _placed(placed, hardware, work, layers, choices)


def _placed(
    placed: ParallelLayout, hardware: Hardware, work: StepWork, layers: int, choices: Choices
) -> Iterator[ParallelLayout]:
    """Yields the layouts with the devices of `placed`."""
    nb_part, replicas = placed.nb_part, placed.replicas
    of_replica = min(placed.samples_by_replica(work)) // placed.owned_replicas
    for engine in choices.engine if nb_part > 1 else choices.engine[:1]:
        if engine != "distributed" and nb_part > hardware.devices_per_node:
            continue
        for chunks in choices.chunks or _chunks(of_replica, placed.has_unequal_shares):
            microbatches = chunks * placed.owned_replicas
            for schedule, v in _schedules(nb_part, microbatches, layers, choices):
                shape = nb_part, microbatches, v
                offload = choices.offload[0]
                if offload != "none" and not _offloads(schedule, shape, hardware.device):
                    continue
                for recompute in _recompute_modes(microbatches, choices):
                    for shard in choices.shard if replicas > 1 else ("none",):
                        yield replace(
                            placed, engine=engine, chunks=chunks, schedule=schedule,
                            stages_per_device=v, recompute=recompute, shard=shard,
                            offload=offload,
                        )  # fmt: skip


def _chunks(of_replica: int, unequal: bool) -> list[int]:
    """Returns the numbers of micro-batches to try: the divisors of a replica's samples.

    The shares of unequal replicas have few common divisors, so powers of two are included;
    micro-batches need not be equal.
    """
    powers = [2**k for k in range(of_replica.bit_length())] if unequal else []
    return sorted({*powers, *divisors(of_replica)})


def _schedules(
    nb_part: int, microbatches: int, layers: int, choices: Choices
) -> Iterator[tuple[str, int]]:
    for schedule in choices.schedule if nb_part > 1 else choices.schedule[:1]:
        for v in choices.stages_per_device:
            if v != 1 and (nb_part == 1 or nb_part * v > layers):
                continue
            if registered(schedule).stages_per_device not in (None, v):
                continue
            if v == 1 or registered(schedule).placement == "v" or microbatches % nb_part == 0:
                yield schedule, v


def _recompute_modes(microbatches: int, choices: Choices) -> Sequence[str]:
    """Returns the modes to try; with one micro-batch `except_last` is the same as `never`."""
    same = microbatches == 1 and "never" in choices.recompute
    moves_inputs = choices.offload[0] == "inputs"  # which only recomputed layers keep
    left_out = ["except_last"] * same + ["never"] * moves_inputs
    return [mode for mode in choices.recompute if mode not in left_out]


def moving_more(
    layout: ParallelLayout, choices: Choices, hardware: Hardware
) -> ParallelLayout | None:
    """Returns the layout with the next value of `offload`, which moves more; None: there is none.

    None as well if the rates of copies are unknown, or no activations would leave a device.
    """
    if hardware.host_copies is None:
        return None
    if not _offloads(layout.schedule, layout.shape, hardware.device):
        return None
    further = choices.offload[choices.offload.index(layout.offload) + 1 :]
    # only recomputed layers keep inputs
    further = [mode for mode in further if mode != "inputs" or layout.recompute != "never"]
    return replace(layout, offload=further[0]) if further else None


@lru_cache(maxsize=4096)
def _offloads(schedule: str, shape: tuple[int, int, int], device_type: str) -> bool:
    """Returns whether activations would leave a device."""
    try:
        table = registered(schedule).build(*shape)
    except ScheduleError:  # the search leaves the layout out
        return True
    return offloads_anything(table, offloading_on(device_type))


def divisors(number: int) -> list[int]:
    """Returns the divisors of `number`, from 1 on."""
    return [d for d in range(1, number + 1) if number % d == 0]
