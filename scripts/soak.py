"""Kills, interrupts and stops runs at random, and checks that what they end with is exact.

A run that nobody disturbs is the reference. Then the same run is started over and over, and each
time something happens to it after a random delay:

    kill-rank      SIGKILL to one process
    kill-launcher  SIGKILL to torchrun; its processes must not train on without it
    kill-all       SIGKILL to torchrun and all processes, as when a node is lost
    terminate      SIGTERM to torchrun, as a scheduler does before it takes the node away
    interrupt      SIGINT to all, as Ctrl-C in a terminal does
    preempt        SIGUSR1 to one process, as Slurm's `--signal=USR1@60` does
    stop           SIGSTOP to one process: it neither works nor ends
    restart        SIGKILL to one process under `torchrun --max-restarts`: torchrun starts again

When it is complete, its last and its best checkpoint (weights, buffers, optimizer state, position)
must be bitwise those of the reference, with the same lines in metrics.jsonl, and no process
may be left. The exit status is 1 otherwise.

With `--starts 0.5` half of the faults come while the processes start, meet and load, rather than
within two seconds after the first step. Nothing is saved then.

With `--replicas 3` the run has `world.replicas=3`, and each start draws its number of processes
(with `--engine distributed`: of pipelines) from 1 to 3. The reference has 3.

    python -m scripts.soak                  # 10 faults, some minutes
    python -m scripts.soak --faults 200     # for the table of docs/reliability-figures.md
    python -m scripts.soak --faults 200 --engine distributed    # a process for each stage
    python -m scripts.soak --faults 40 --replicas 3             # on 1, 2 and 3 processes
    python -m scripts.soak --faults 40 --starts 1               # all of them in the start
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file
from torch import nn

FAULTS = (
    "kill-rank",
    "kill-launcher",
    "kill-all",
    "terminate",
    "interrupt",
    "preempt",
    "stop",
    "restart",
)
# With these, torchrun or the run itself must save before it ends.
SAVES = ("terminate", "interrupt", "preempt")
# What may happen in the start. A process that is stopped there is waited for as long as timeout_s.
IN_START = tuple(kind for kind in FAULTS if kind not in ("stop", "restart"))

STALL_S = 8
# A run takes a fraction of this, even on a busy machine; longer means that it hangs.
LIMIT_S = 900.0

REPOSITORY = Path(__file__).parents[1]
STAGES = 2

OVERRIDES = [
    "recipe=digits",
    "allow_targets=[scripts.soak]",
    "model._target_=scripts.soak.model",
    f"pipeline.nb_part={STAGES}",
    "pipeline.chunks=4",  # so that each micro-batch of an epoch's last batch has two samples
    "run_name=run",
    "world.devices=cpu",
    f"world.stall_s={STALL_S}",
    "monitor.progress=false",
    "monitor.tensorboard=false",
    "trainer.log_every=1",
    "trainer.eval_every=50",
    "checkpoint.every_steps=20",
    "checkpoint.best=loss",
]


def model(num_classes: int, image_size: int, channels: int) -> nn.Sequential:
    """Returns a network with what a resume may get wrong: dropout, and buffers of batch norms."""
    size = channels * image_size**2
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(size, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.25)),
        *(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.25)),
        *(nn.Linear(128, num_classes), nn.LogSoftmax(dim=1)),
    )


@dataclass
class Outcome:
    """One fault: its kind and what came of it.

    Attributes:
        kind: one of `FAULTS`; `none` for a start that was left alone.
        code: the exit code of torchrun.
        seconds: from the fault to the end of the last process.
        lost: steps that had been logged and had to be done again; None until the next start.
        problem: a violated promise.
        processes: how many processes there were.
        parts: after a restart, the seconds from the fault to the first step, by what they went
            into; see `recovery`.
    """

    kind: str
    code: int
    seconds: float
    lost: int | None = None
    problem: str | None = None
    processes: int | None = None
    parts: dict[str, float] | None = None


@dataclass
class Run:
    """A run that is disturbed again and again, in its own directory."""

    folder: Path
    replicas: int
    steps: int
    engine: str
    fixed: bool = False  # whether the number of replicas is a setting of the run
    start_s: float = 0.0  # from the launch to the first step, the last time
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.folder / "outputs" / "run"

    def start(
        self,
        kind: str,
        delay_s: float,
        rng: random.Random,
        replicas: int | None = None,
        in_start: bool = False,
    ) -> Outcome:
        """Starts the run, does `kind` to it `delay_s` after its first step, and waits for its end.

        Args:
            kind: one of `FAULTS`, or `none`.
            delay_s: seconds from the first step to the fault.
            rng: chooses the process.
            replicas: how many processes, or pipelines of processes; None: one per replica.
            in_start: do it `delay_s` after the launch, or after the first step if that is earlier.

        Raises:
            TimeoutError: it hangs; all its processes are killed first.
        """
        processes = (replicas or self.replicas) * (STAGES if self.engine == "distributed" else 1)
        logged = self.logged()
        log = (self.folder / "log.txt").open("ab")
        launcher = psutil.Popen(
            self._command(processes, restarts=3 if kind == "restart" else 0),
            cwd=self.folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": str(REPOSITORY),
            },
            start_new_session=True,
        )
        launched = time.monotonic()
        deadline = launched + LIMIT_S
        due = launched + delay_s if in_start else deadline
        while launcher.poll() is None and self.logged() == logged and time.monotonic() < due:
            time.sleep(0.02)
        if time.monotonic() > deadline:
            kill_tree(launcher)
            raise TimeoutError(f"no step within {LIMIT_S:g} s; see {log.name}")
        if not in_start:
            self.start_s = time.monotonic() - launched
            time.sleep(delay_s)
        everybody = [launcher, *launcher.children(recursive=True)] if _alive(launcher) else []
        before = self.logged()
        began = time.monotonic()
        parts = None
        if everybody and before < self.steps:
            killed = time.time()
            self._disturb(kind, launcher, everybody, rng)
            if kind == "restart":
                parts = recovery(launcher, everybody[1:], self.directory, killed)
        else:
            kind = "none"  # all its work was done before the fault
        _, left = psutil.wait_procs(everybody, timeout=max(0.0, deadline - time.monotonic()))
        for process in psutil.process_iter(["cwd"]):  # those of a restart
            if process.info["cwd"] == str(self.folder) and process.pid != os.getpid():
                left.append(process)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        outcome = Outcome(
            kind, launcher.wait(), time.monotonic() - began, processes=processes, parts=parts
        )
        if left:
            outcome.problem = f"{len(left)} processes were left"
        elif kind in SAVES and not in_start and self.newest() < min(before, self.steps):
            outcome.problem = f"logged step {before}, saved step {self.newest()}"
        outcome.lost = max(0, before - self.newest())
        self.outcomes.append(outcome)
        return outcome

    def logged(self) -> int:
        """Returns the last step in metrics.jsonl, 0 without any."""
        try:
            lines = (self.directory / "metrics.jsonl").read_text().splitlines()
            return int(json.loads(lines[-1])["step"])
        except (OSError, IndexError, ValueError):
            return 0

    def newest(self) -> int:
        """Returns the step of the newest checkpoint, 0 without any."""
        found = (self.directory / "checkpoints").glob("step_*")
        return max((int(re.split(r"[_.]", path.name)[1]) for path in found), default=0)

    def checkpoints(self) -> dict[str, str]:
        """Returns the digests of the tensors and files of the last and the best checkpoint.

        Tensors by their names: with `engine=distributed` their files depend on the processes.
        """
        folder = self.directory / "checkpoints"
        digests: dict[str, str] = {}
        for directory in (folder / f"step_{self.steps:08d}", *folder.glob("best*")):
            for path in filter(Path.is_file, directory.rglob("*")):
                if path.suffix == ".safetensors":
                    stem = path.name.partition(".")[0].partition("-")[0]
                    for name, tensor in load_file(path).items():
                        values = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                        layout = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
                        key = f"{directory.name}/{stem}: {name}"
                        digests[key] = hashlib.sha256(layout + values).hexdigest()
                elif path.name != "manifest.json" and not path.name.endswith(".index.json"):
                    key = f"{directory.name}/{path.name}"
                    digests[key] = hashlib.sha256(path.read_bytes()).hexdigest()
        return digests

    def metrics(self) -> dict[int, dict[str, float]]:
        """Returns losses and evaluations by step, without what depends on the clock."""
        lines: dict[int, dict[str, float]] = {}
        for line in (self.directory / "metrics.jsonl").read_text().splitlines():
            values = json.loads(line)
            chosen = {
                name: value
                for name, value in values.items()
                if name in ("train/loss", "train/lr") or name.startswith("eval/")
            }
            lines.setdefault(values["step"], {}).update(chosen)
        return lines

    def _command(self, processes: int, restarts: int) -> list[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(processes), "--max-restarts", str(restarts)),
            *("-m", "hybridtrain", *OVERRIDES, f"world.engine={self.engine}"),
            *([f"world.replicas={self.replicas}"] if self.fixed else []),
            *("trainer.epochs=null", f"trainer.steps={self.steps}"),
        ]

    def _disturb(
        self,
        kind: str,
        launcher: psutil.Process,
        everybody: Sequence[psutil.Process],
        rng: random.Random,
    ) -> None:
        ranks = sorted(everybody[1:], key=lambda process: process.pid)
        victim = rng.choice(ranks) if ranks else launcher
        if kind in ("kill-rank", "restart"):
            _signal([victim], signal.SIGKILL)
        elif kind == "kill-launcher":
            _signal([launcher], signal.SIGKILL)
        elif kind == "kill-all":
            _signal(everybody, signal.SIGKILL)
        elif kind == "terminate":
            _signal([launcher], signal.SIGTERM)
        elif kind == "interrupt":
            _signal(everybody, signal.SIGINT)
        elif kind == "preempt":
            _signal([victim], signal.SIGUSR1)
        elif kind == "stop":
            _signal([victim], signal.SIGSTOP)


def recovery(
    launcher: psutil.Process,
    workers: Sequence[psutil.Process],
    directory: Path,
    killed: float,
    limit_s: float = 900.0,
) -> dict[str, float] | None:
    """Waits for the first step after torchrun's restart, and says where the time has gone.

    Args:
        launcher: torchrun.
        workers: its processes before the restart, one of which was killed.
        directory: the run directory.
        killed: the time of the fault, in seconds since the epoch.
        limit_s: seconds after which the restart is given up.

    Returns:
        seconds by part, in order; None if the run ends before it has done a step, or does none in
        `limit_s`.
    """
    pids = {process.pid for process in workers}
    ended = started = stepped = 0.0
    while not stepped:
        time.sleep(0.02)
        if not _alive(launcher) or time.time() - killed > limit_s:
            return None
        if not ended and not any(_alive(process) for process in workers):
            ended = time.time()
        # not by their create_time, which may be wrong by a second
        if not started and any(process.pid not in pids for process in launcher.children()):
            started = time.time()
        if started:
            # the logs say when a line was written, so that nothing depends on this loop's pace
            times = [
                json.loads(line)["time"]
                for line in (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
                if line.endswith("\n")
            ]
            stepped = next((at for at in times if at > started), 0.0)
    log = directory / "logs" / "rank_000.log"
    lines = log.read_text().splitlines() if log.exists() else []
    moments = {"survivors end": ended, "torchrun": started}
    for part, words in LOGGED.items():
        times = [_time_of(line) for line in lines if words in line]
        # a run that has no checkpoint yet does not say that it was resumed from one
        times = [at for at in times if started < at < stepped]
        if times:
            moments[part] = times[0]
    moments["first step"] = stepped
    parts, previous = {}, killed
    for part, at in moments.items():
        parts[part], previous = at - previous, at
    return parts | {"total": stepped - killed}


# The lines of a run's log at which parts of its start are done.
LOGGED = {
    "imports, joining, data": ": data: ",
    "construction": ": run directory ",
    "checkpoint": ": resumed from ",
}


def _time_of(line: str) -> float:
    """Returns the time at the beginning of a log's line, in seconds since the epoch."""
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()


def soak(
    faults: int,
    processes: int,
    steps: int,
    seed: int,
    kinds: Sequence[str],
    engine: str = "local",
    record: Path | None = None,
    replicas: int | None = None,
    starts: float = 0.0,
) -> int:
    """Does `faults` faults, prints a line for each and a table; returns the exit status."""
    rng = random.Random(seed)
    problems: list[str] = []
    outcomes: list[Outcome] = []
    complete = 0
    if replicas is None:
        most = processes // STAGES if engine == "distributed" else processes
    else:
        most = replicas
    fixed = replicas is not None
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        root = Path(name)
        reference = Run(_new(root / "reference"), most, steps, engine, fixed)
        if reference.start("none", 0.0, rng).code:
            print((reference.folder / "log.txt").read_text())
            return 1
        number = 0
        while sum(outcome.kind != "none" for outcome in outcomes) < faults:
            run = Run(_new(root / f"run{number}"), most, steps, engine, fixed)
            number += 1
            # one that was interrupted in its last step still has to be evaluated
            while not (run.directory / "summary.json").exists():
                done = sum(outcome.kind != "none" for outcome in outcomes)
                kind = "none" if done >= faults else rng.choice(list(kinds))
                running = rng.randint(1, most) if fixed else most
                in_start = bool(starts) and kind in IN_START and rng.random() < starts
                longest = reference.start_s if in_start else 2.0
                if kind == "stop" and running == 1 and engine == "local":
                    kind = "kill-rank"  # nobody is left to notice that the only process is stopped
                try:
                    delay_s = rng.uniform(0.0, longest)
                    outcome = run.start(kind, delay_s, rng, running, in_start)
                except TimeoutError as error:
                    problems.append(f"{kind}: {error}")
                    print((run.folder / "log.txt").read_text()[-4000:])
                    break
                outcomes.append(outcome)
                if record is not None:
                    with record.open("a") as file:
                        file.write(json.dumps(asdict(outcome)) + "\n")
                if outcome.problem:
                    problems.append(f"{outcome.kind}: {outcome.problem}")
                print(
                    f"{len(outcomes):4d} {outcome.kind:14s} on {outcome.processes} processes: exit "
                    f"code {outcome.code:4d} after {outcome.seconds:5.1f} s, step {run.newest()} "
                    f"of {steps}{f', {delay_s:.1f} s after its launch' * in_start} "
                    f"{outcome.problem or ''}",
                    flush=True,
                )
            else:
                differences = _differences(run, reference)
                print(*differences or [f"{run.folder.name}: as the undisturbed run"], sep="\n")
                problems += differences
                complete += 1
    if record is not None:
        outcomes = [Outcome(**json.loads(line)) for line in record.read_text().splitlines()]
    print(
        f"\n{_table(outcomes)}\n\n{complete} runs reached step {steps}; problems: {len(problems)}"
    )
    print(*problems, sep="\n")
    return 1 if problems else 0


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _differences(run: Run, reference: Run) -> list[str]:
    found = []
    expected, got = reference.checkpoints(), run.checkpoints()
    files = [name for name in expected | got if expected.get(name) != got.get(name)]
    if files or not expected:
        found.append(f"{run.folder.name}: differs from the undisturbed run in {files}")
    expected_lines, lines = reference.metrics(), run.metrics()
    differing = [step for step in expected_lines if lines.get(step) != expected_lines[step]]
    if differing or lines.keys() != expected_lines.keys():
        found.append(f"{run.folder.name}: metrics.jsonl differs at steps {differing[:5]}")
    return found


def _table(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "| fault | times | exit codes | median s to the end | longest | steps done again, median |",
        "|---|--:|---|--:|--:|--:|",
    ]
    for kind in FAULTS:
        own = [outcome for outcome in outcomes if outcome.kind == kind]
        if not own:
            continue
        seconds = [outcome.seconds for outcome in own]
        codes = ", ".join(str(code) for code in sorted({outcome.code for outcome in own}))
        # a restarted run goes on within the same start
        lost = [outcome.lost for outcome in own if outcome.lost is not None and kind != "restart"]
        again = f"{statistics.median(lost):g}" if lost else "-"
        lines.append(
            f"| {kind} | {len(own)} | {codes} | {statistics.median(seconds):.1f} | "
            f"{max(seconds):.1f} | {again} |"
        )
    return "\n".join(lines)


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def kill_tree(launcher: psutil.Process) -> None:
    """Kills a launcher, which may have ended, and its processes."""
    if not _alive(launcher):
        return
    processes = [launcher, *launcher.children(recursive=True)]
    _signal(processes, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=10)


def main() -> int:
    """Reads the arguments and soaks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--replicas", type=int, help="world.replicas; each start draws its number of processes"
    )
    parser.add_argument("--starts", type=float, default=0.0, help="the share of faults in starts")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=FAULTS, choices=FAULTS)
    parser.add_argument("--engine", default="local", choices=("local", "distributed"))
    parser.add_argument(
        "--record", type=Path, help="a file to add outcomes to; the table is of all"
    )
    return soak(**vars(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
