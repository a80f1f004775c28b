"""Statistics of a run: where the time of its steps goes, and the times and memory of its stages."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from torch.optim import Optimizer

from hybridtrain.data import Loader, OwnLoader
from hybridtrain.loop.advice import RecordedStep, advise
from hybridtrain.model import HybridModel, TrainStepResult
from hybridtrain.pipeline import Phases, Timeline, measured_ms, read_timelines
from hybridtrain.schedule import (
    Account,
    Spans,
    account_of,
    bubble_fraction,
    mean_costs,
    predict,
)

_log = logging.getLogger(__name__)

# How many of the last recorded steps are kept, to find the typical one among them.
_LATEST = 5
# The share of a step that the others wait for a replica, from which on it is named.
_CLEARLY_SLOWER = 0.1


class DeviceAccount(NamedTuple):
    """The time of a device in a step, by its parts.

    Attributes:
        replica: the copy of the model that it works for.
        device: its number in the pipeline.
        account: the parts of a step.
    """

    replica: int
    device: int
    account: Account


def around_pipeline(
    ends: Mapping[str, float], windows: Sequence[tuple[float, float]], parts: Sequence[Account]
) -> Account:
    """Returns the account of a device for a whole step.

        begin      data         host   window 1   host   window 2         optimizer   host
          |------------------|.......|==========|......|==========|......|----------|......|
                                                               own part done ^

    A process may still wait for its batch while another one of its pipeline has begun: there that
    time is a message that comes late, and here it is the data's. One whose own actions are done
    waits in the optimizer's phase for the end of the others': that time is in the window already.

    Args:
        ends: of the phases `data`, `pipeline`, `optimizer` and `host`, in seconds of the step.
        windows: of each batch, the begin and end of the actions of all devices.
        parts: of each batch, the device's account of that time.
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
    """Returns the seconds of a step that each replica takes by itself, the mean of its devices.

    Waiting for slower replicas is left out, so that they differ where the steps do not.
    """
    return {
        replica: account.total - account.stragglers
        for replica, account in _by_replica(accounts).items()
    }


def slow_replica(accounts: Sequence[DeviceAccount]) -> str | None:
    """Returns a sentence about the replica that the others wait for; None: there is none.

    Args:
        accounts: of all devices, the means over some steps: what is by chance evens out.
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
        f"replica {slowest} is slower than the others, which wait for it {late / step:.0%} of a "
        f"step: without that a step would take {(step - late) * 1e3:.4g} ms instead of "
        f"{step * 1e3:.4g}; most of the difference is in {part}"
    )


def _by_replica(accounts: Sequence[DeviceAccount]) -> dict[int, Account]:
    """Returns the mean account of the devices of each replica, by its number."""
    return {
        replica: Account.mean([each.account for each in accounts if each.replica == replica])
        for replica in sorted({each.replica for each in accounts})
    }


@dataclass
class _Recorded:
    """Sums over the recorded steps.

    Attributes:
        bubbles: the idle share of each.
        accounts: the sums of the accounts of each device.
        accounted: how many steps are in them.
        latest: the last steps with the most samples.
    """

    bubbles: list[float] = field(default_factory=list)
    accounts: list[DeviceAccount] = field(default_factory=list)
    accounted: int = 0
    latest: deque[RecordedStep] = field(default_factory=lambda: deque(maxlen=_LATEST))

    def add(self, accounts: Sequence[DeviceAccount]) -> None:
        """Adds the accounts of a step."""
        before = self.accounts or [each._replace(account=Account()) for each in accounts]
        self.accounts = [
            each._replace(account=Account.sum_of([sums.account, each.account]))
            for sums, each in zip(before, accounts, strict=True)
        ]
        self.accounted += 1

    def keep(self, step: RecordedStep) -> None:
        """Keeps a step to find advice by, if it is not of the short batch that ends an epoch."""
        most = max((each.samples for each in self.latest), default=0)
        if step.samples > most:
            self.latest.clear()
        if step.samples >= most:
            self.latest.append(step)

    @property
    def typical(self) -> RecordedStep | None:
        """The step that is in the middle by its length: another one may have been interrupted."""
        by_length = sorted(self.latest, key=lambda step: step.account.total)
        return by_length[(len(by_length) - 1) // 2] if by_length else None


class RunStats:
    """Keeps the timelines of the last recorded step; only the reading methods wait for a device.

    Args:
        model: that is trained.
        train: its data.
    """

    def __init__(self, model: HybridModel, train: Loader) -> None:
        self._recorded = _Recorded()
        self._model = model
        self._train = train
        self._advice: list[str] | None = None  # for all trackers, until the next recorded step
        self._samples = 0
        self._timelines: list[Timeline] = []
        self._phases: Phases | None = None
        self._times = [(0.0, 0.0)] * len(model.plan.stages)

    @property
    def bubble(self) -> float | None:
        """The mean bubble fraction of the recorded steps; None: there is none."""
        bubbles = self._recorded.bubbles
        return sum(bubbles) / len(bubbles) if bubbles else None

    def begin_step(self, recorded: bool) -> None:
        """Begins a step; its phases are timed if it is `recorded`."""
        self._timelines = []
        self._phases = Phases(self._model.world.devices) if recorded else None

    def end_phase(self, name: str) -> None:
        """Notes that a phase of the step ends: `data`, `pipeline`, `optimizer` or `host`."""
        if self._phases is not None:
            self._phases.end(name)

    def record(self, results: Sequence[TrainStepResult]) -> None:
        """Keeps the timelines of the step's batches, as far as they were recorded."""
        self._samples = results[-1].samples if results else 0
        self._timelines = [result.timeline for result in results if result.timeline is not None]
        if len(self._timelines) < len(results):
            self._phases = None  # what was not recorded has no account

    @property
    def recorded(self) -> bool:
        """True if the last step was recorded: a user's own `training_step` need not do so."""
        return bool(self._timelines)

    def read(self, optimizer: Optimizer) -> dict[str, float]:
        """Returns the account, times, memory and bubble of the last step, if it was recorded.

        By tag; those of `account/` are in milliseconds, the mean over all devices. With several
        replicas `replicas/` has which one is slowest, its time without waiting for others, and the
        mean of all. All processes call it together.
        """
        world = self._model.world
        # A user's own `training_step` may have recorded it in some processes alone.
        some, whole = map(
            all, zip(*world.gather((bool(self._timelines), self._phases is not None)), strict=True)
        )
        if not some:
            self._timelines = []
            return {}
        read_timelines(self._timelines)
        spans, computing = self._timelines[-1].spans(), self._timelines[-1].computing()
        self._recorded.bubbles.append(bubble_fraction(spans))
        self._times = measured_ms(computing, len(self._times))
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
                batches=len(self._timelines),
                samples=samples,
                plan=self._model.plan,
                options=self._model.options,
                workers=None if isinstance(self._train, OwnLoader) else self._train.options.workers,
                costs=mean_costs(computing, len(self._times)),
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
        """Returns the account of the last step of all devices."""
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
        """Returns the parts of a batch's time between its first action and its last."""
        schedule, spans = timeline.schedule, timeline.spans()
        reductions, least = timeline.reductions, {}
        # batches before the last one are not averaged
        if self._model.world.data_parallel_size > 1 and timeline is self._timelines[-1]:
            # An all-reduce ends everywhere at one time: it was shortest for whom nobody waited.
            of_ranks = self._model.world.gather(reductions)
            least = {
                action: min(each.get(action, 0.0) for each in of_ranks) for action in reductions
            }
        again = self._model.pipeline.recomputed(schedule.chunks)
        return account_of(schedule, spans, reductions, least, again)

    def timelines(self) -> tuple[Spans, Spans]:
        """Returns the predicted and the measured spans of the last recorded batch, in seconds.

        The prediction is the schedule's, for the mean measured costs of each stage.
        """
        last = self._timelines[-1]
        return predict(last.schedule, last.computing()), last.spans()

    def advice(self) -> list[str]:
        """Returns what would make a step shorter, by a typical one of the last; see `advise`.

        And which replica the others wait for, by the means over all recorded steps.
        """
        typical = self._recorded.typical
        if typical is None:
            return []
        if self._advice is None:
            self._advice = []
            try:
                slow = slow_replica(self._means())
                sentences = [proposal.text for proposal in advise(typical)]
                self._advice = [*sentences, *([slow] if slow else [])]
            except Exception:  # no sentence is worth a run that is done
                _log.debug("there is no advice", exc_info=True)
        return self._advice

    def _means(self) -> list[DeviceAccount]:
        """Returns the means over the recorded steps."""
        share = 1 / max(1, self._recorded.accounted)
        accounts = self._recorded.accounts
        return [each._replace(account=each.account.scaled(share)) for each in accounts]

    def account_summary(self) -> dict[str, Any] | None:
        """Returns the means over the recorded steps, in milliseconds; None: no step has any."""
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
        """Returns the summary of each stage, with the times that were last read."""
        return [
            {**stage, "forward_ms": forward, "backward_ms": backward}
            for stage, (forward, backward) in zip(
                self._model.stage_summaries(optimizer), self._times, strict=True
            )
        ]
