"""Statistics of a run: the time breakdown of its steps, and each stage's time and memory."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from torch.optim import Optimizer

from hybridtrain.data import Loader, OwnLoader
from hybridtrain.errors import setting
from hybridtrain.loop.advice import RecordedStep, advise
from hybridtrain.model import HybridModel, TrainStepResult
from hybridtrain.pipeline import Phases, Timeline, measured_ms, read_timelines
from hybridtrain.schedule import (
    COMPUTING,
    Account,
    Spans,
    account_of,
    bubble_fraction,
    offloading_on,
    predict,
)

_log = logging.getLogger(__name__)

# The number of recorded steps among which the typical one is chosen.
_LATEST = 5
# A replica is reported as slow when the others wait for it for this share of a step.
_CLEARLY_SLOWER = 0.1


class DeviceAccount(NamedTuple):
    """The time breakdown of a device in a step.

    Attributes:
        replica: the replica that it belongs to.
        device: its index in the pipeline.
        account: the parts of the step.
    """

    replica: int
    device: int
    account: Account


def around_pipeline(
    ends: Mapping[str, float], windows: Sequence[tuple[float, float]], parts: Sequence[Account]
) -> Account:
    """Returns the time breakdown of a device for a whole step.

        begin      data         host   window 1   host   window 2         optimizer   host
          |------------------|.......|==========|......|==========|......|----------|......|
                                                               own part done ^

    A process may still wait for data while another process of its pipeline has begun the batch:
    that wait counts as a late message in the other process, and as data here. A process that has
    run its actions waits for the others in the optimizer phase; the window already includes that
    time.

    Args:
        ends: the ends of the phases `data`, `pipeline`, `optimizer` and `host`, in seconds from the
            start of the step.
        windows: for each batch, the begin and end of all devices' actions.
        parts: for each batch, the device's time breakdown in that window.
    """
    account = Account.sum_of(parts)
    begin, end = windows[0][0], windows[-1][1]
    late = max(0.0, ends["data"] - begin)
    waited = min(late, account.messages)
    between = sum(b[0] - a[1] for a, b in pairwise(windows))
    optimizer = max(0.0, ends["optimizer"] - max(ends["pipeline"], end))
    return account._replace(
        data=max(0.0, ends["data"] - late + waited),
        messages=account.messages - waited,
        optimizer=optimizer,
        host=account.host
        + max(0.0, begin - ends["data"])
        + between
        + ends["host"]
        - end
        - optimizer
        + min(0.0, ends["data"] - late + waited),
    )


def own_times(accounts: Sequence[DeviceAccount]) -> dict[int, float]:
    """Returns the seconds per step of each replica without waits for others, averaged over devices.

    Replicas step together, so only the time without waiting shows which is slower.
    """
    return {
        replica: account.total - account.stragglers
        for replica, account in _by_replica(accounts).items()
    }


def slow_replica(
    accounts: Sequence[DeviceAccount], shares: Sequence[float] | None = None
) -> str | None:
    """Returns a sentence about the replica that the others wait for, or None.

    If it computes for longer, the sentence has the shares of a batch with which all replicas would
    compute equally long.

    Args:
        accounts: the breakdowns of all devices, averaged over steps to remove noise.
        shares: the relative number of samples of each replica; None: it cannot be changed.
    """
    by_replica = _by_replica(accounts)
    times = own_times(accounts)
    if len(times) < 2:
        return None
    slowest = max(times, key=times.__getitem__)
    others = Account.mean([by_replica[replica] for replica in times if replica != slowest])
    late, step = times[slowest] - (others.total - others.stragglers), by_replica[slowest].total
    if late < _CLEARLY_SLOWER * step:
        return None
    more = {
        name: value - getattr(others, name)
        for name, value in by_replica[slowest]._asdict().items()
        if name != "stragglers"
    }
    part = max(more, key=more.__getitem__)
    return (
        f"replica {slowest} is slower than the others, which wait for it for {late / step:.0%} of "
        f"a step: without that wait a step would take {(step - late) * 1e3:.4g} ms instead of "
        f"{step * 1e3:.4g}; most of the difference is in {part}"
        + (_better_shares(by_replica, shares, step) if shares and part in COMPUTING else "")
    )


def _better_shares(by_replica: Mapping[int, Account], shares: Sequence[float], step: float) -> str:
    """Returns a proposal of shares with which all replicas compute equally long, with its price.

    The time to compute is taken to be in proportion to the samples.
    """
    computing = [sum(getattr(a, name) for name in COMPUTING) for a in by_replica.values()]
    rates = [share / seconds for share, seconds in zip(shares, computing, strict=True)]
    better = [round(rate / min(rates), 1) for rate in rates]
    slowest = max(share / sum(better) / rate for share, rate in zip(better, rates, strict=True))
    saved = max(computing) - slowest * sum(shares)
    return (
        f". {setting('replica_shares', better)} would take {(step - saved) * 1e3:.4g} ms, if the "
        f"time is in proportion to the samples"
    )


def _by_replica(accounts: Sequence[DeviceAccount]) -> dict[int, Account]:
    """Returns the mean time breakdown of each replica's devices, by replica index."""
    return {
        replica: Account.mean([each.account for each in accounts if each.replica == replica])
        for replica in sorted({each.replica for each in accounts})
    }


@dataclass
class _Recorded:
    """Sums over the recorded steps.

    Attributes:
        bubbles: the bubble fraction of each step.
        accounts: the summed time breakdowns of each device.
        accounted: the number of steps in the sums.
        latest: the most recent steps with the largest batch.
    """

    bubbles: list[float] = field(default_factory=list)
    accounts: list[DeviceAccount] = field(default_factory=list)
    accounted: int = 0
    latest: deque[RecordedStep] = field(default_factory=lambda: deque(maxlen=_LATEST))

    def add(self, accounts: Sequence[DeviceAccount]) -> None:
        """Adds the time breakdowns of a step."""
        before = self.accounts or [each._replace(account=Account()) for each in accounts]
        self.accounts = [
            each._replace(account=Account.sum_of([sums.account, each.account]))
            for sums, each in zip(before, accounts, strict=True)
        ]
        self.accounted += 1

    def keep(self, step: RecordedStep) -> None:
        """Stores a step for `advise`, unless it has the short batch at the end of an epoch."""
        most = max((each.samples for each in self.latest), default=0)
        if step.samples > most:
            self.latest.clear()
        if step.samples >= most:
            self.latest.append(step)

    @property
    def typical(self) -> RecordedStep | None:
        """The step of median duration, since other steps may have been interrupted."""
        by_length = sorted(self.latest, key=lambda step: step.account.total)
        return by_length[(len(by_length) - 1) // 2] if by_length else None


class RunStats:
    """Stores the timelines of the last recorded step; only the reading methods wait for a device.

    Args:
        model: the model being trained.
        train: the training data.
    """

    def __init__(self, model: HybridModel, train: Loader) -> None:
        self._recorded = _Recorded()
        self._model = model
        self._train = train
        self._advice: list[str] | None = None  # shared by all trackers until the next recorded step
        self._samples = 0
        self._timelines: list[Timeline] = []
        self._phases: Phases | None = None
        self._times: list[tuple[float, float]] | None = None  # of each stage

    @property
    def bubble(self) -> float | None:
        """The mean bubble fraction of the recorded steps; None without any."""
        bubbles = self._recorded.bubbles
        return sum(bubbles) / len(bubbles) if bubbles else None

    def begin_step(self, recorded: bool) -> None:
        """Begins a step; times its phases if it is `recorded`."""
        self._timelines = []
        self._phases = Phases(self._model.world.devices) if recorded else None

    def end_phase(self, name: str) -> None:
        """Records the end of a phase of the step: `data`, `pipeline`, `optimizer` or `host`."""
        if self._phases is not None:
            self._phases.end(name)

    def record(self, results: Sequence[TrainStepResult]) -> None:
        """Stores the recorded timelines of the step's batches."""
        self._samples = results[-1].samples if results else 0
        self._timelines = [result.timeline for result in results if result.timeline is not None]
        if len(self._timelines) < len(results):
            self._phases = None  # a step that was recorded in part has no breakdown

    @property
    def recorded(self) -> bool:
        """True if the last step was recorded; a user-defined `training_step` may not record."""
        return bool(self._timelines)

    def read(self, optimizer: Optimizer) -> dict[str, float]:
        """Returns the time breakdown, stage times, memory and bubble of the last recorded step.

        The keys are tags. `account/` values are in milliseconds, averaged over all devices. With
        several replicas, `replicas/` has the index of the slowest, its time without waiting for
        others, and the mean over replicas. A collective call.
        """
        world = self._model.world
        # A user-defined `training_step` may have recorded in some processes only.
        some, whole = map(
            all, zip(*world.gather((bool(self._timelines), self._phases is not None)), strict=True)
        )
        if not some:
            self._timelines = []
            return {}
        read_timelines(self._timelines)
        spans, computing = self._timelines[-1].spans(), self._timelines[-1].computing()
        self._recorded.bubbles.append(bubble_fraction(spans))
        self._times = measured_ms(computing, len(self._model.plan.stages))
        values = {"pipeline/bubble_fraction": self._recorded.bubbles[-1]}
        if whole and self._phases is not None:
            accounts = self._read_account(self._phases)
            self._recorded.add(accounts)
            self._advice = None
            mean = Account.mean([each.account for each in accounts])
            samples = -(-self._samples // self._timelines[-1].schedule.chunks)
            recorded = RecordedStep(
                mean,
                self._timelines[-1].schedule,
                spans,
                computing,
                batches=len(self._timelines),
                samples=samples,
                plan=self._model.plan,
                options=self._model.options,
                workers=None if isinstance(self._train, OwnLoader) else self._train.options.workers,
            )
            self._recorded.keep(recorded)
            values |= {f"account/{name}_ms": s * 1e3 for name, s in mean._asdict().items()}
            if world.data_parallel_size > 1:
                times = list(own_times(accounts).values())
                slowest = max(range(len(times)), key=times.__getitem__)
                values["replicas/slowest"] = slowest
                values["replicas/slowest_ms"] = times[slowest] * 1e3
                values["replicas/mean_ms"] = sum(times) / len(times) * 1e3
        for index, stage in enumerate(self.stages(optimizer)):
            values[f"stage{index}/forward_ms"] = stage["forward_ms"]
            values[f"stage{index}/backward_ms"] = stage["backward_ms"]
            values[f"stage{index}/memory_bytes"] = peak = stage["peak_memory_bytes"]
            if limit := stage.get("device_memory_bytes"):
                values[f"stage{index}/memory_percent"] = 100 * peak / limit
        return values

    def _read_account(self, phases: Phases) -> list[DeviceAccount]:
        """Returns the time breakdowns of the last step for all devices."""
        world = self._model.world
        in_pipeline = [self._accounts_in_pipeline(timeline) for timeline in self._timelines]
        accounts = []
        for number, lane in enumerate(self._timelines[-1].own_lanes):
            windows = [each.window(lane, phases.begin[number]) for each in self._timelines]
            parts = [of_batch[lane] for of_batch in in_pipeline]
            account = around_pipeline(phases.ends(number), windows, parts)
            accounts.append(DeviceAccount(world.data_parallel_rank, lane, account))
        return [each for of_rank in world.gather(accounts) for each in of_rank]

    def _accounts_in_pipeline(self, timeline: Timeline) -> list[Account]:
        """Returns each device's time breakdown between the batch's first and last action."""
        schedule, spans = timeline.schedule, timeline.spans()
        reductions, least = timeline.reductions, {}
        # only the last batch averages gradients
        if self._model.world.data_parallel_size > 1 and timeline is self._timelines[-1]:
            # An all-reduce ends everywhere at once, so its shortest duration contains no waiting.
            of_ranks = self._model.world.gather(reductions)
            least = {
                action: min(times.get(action, 0.0) for times in of_ranks) for action in reductions
            }
        again = self._model.pipeline.recomputed(schedule.chunks)
        return account_of(schedule, spans, reductions, least, again)

    def timelines(self) -> tuple[Spans, Spans]:
        """Returns the predicted and the measured spans of the last recorded batch, in seconds.

        The prediction simulates the schedule with the mean measured costs of each stage, and with
        the mean time of its copies if activations are offloaded.
        """
        last = self._timelines[-1]
        offloading = offloading_on(self._model.world.devices[0].type)
        return predict(last.schedule, last.computing(), offloading), last.spans()

    def advice(self) -> list[str]:
        """Returns suggestions to make a step shorter, from a typical recent step; see `advise`.

        Also names the replica that the others wait for, from the means over all recorded steps.
        """
        typical = self._recorded.typical
        if typical is None:
            return []
        if self._advice is None:
            self._advice = []
            try:
                world = self._model.world
                is_custom = isinstance(self._train, OwnLoader)
                is_fixed = world.fixed_replicas or is_custom or self._train.options.divided
                shares = None if is_fixed else world.shares
                slow = slow_replica(self._means(), shares)
                sentences = [proposal.text for proposal in advise(typical)]
                self._advice = [*sentences, *([slow] if slow else [])]
            except Exception:  # a failure here must not fail a completed run
                _log.debug("could not compute advice", exc_info=True)
        return self._advice

    def _means(self) -> list[DeviceAccount]:
        """Returns the means over the recorded steps."""
        share = 1 / max(1, self._recorded.accounted)
        accounts = self._recorded.accounts
        return [each._replace(account=each.account.scaled(share)) for each in accounts]

    def account_summary(self) -> dict[str, Any] | None:
        """Returns the means over the recorded steps in milliseconds, or None without any."""
        means = self._means()
        if not means:
            return None

        def in_ms(account: Account) -> dict[str, float]:
            return {name: seconds * 1e3 for name, seconds in account._asdict().items()}

        mean = Account.mean([each.account for each in means])
        return {
            "step_ms": mean.total * 1e3,
            "mean": in_ms(mean),
            "devices": [
                {"replica": each.replica, "device": each.device, **in_ms(each.account)}
                for each in means
            ],
        }

    def stages(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Returns the summary of each stage, with the most recently read times."""
        if not self._model.is_split:  # nothing has run
            return []
        stages = self._model.stage_summaries(optimizer)
        times = self._times or [(0.0, 0.0)] * len(stages)
        return [
            {**stage, "forward_ms": forward, "backward_ms": backward}
            for stage, (forward, backward) in zip(stages, times, strict=True)
        ]
