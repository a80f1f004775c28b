"""Faults at each level of the API: is the first error reported, and have all processes ended?

Each run has two processes: one pipeline with `distributed`, two replicas with `local`. A fault is
reported rightly if one error is printed, which names the rank and what it was doing.

    python -m scripts.reliability.table [--only forward] [--level loop] [--engine local] [--every 9]

`--torchrun` starts the processes with torchrun, whose root cause is then compared too, and
`--output` shows what was printed if it is wrong. `--forks 3` runs three cases at a time, in
processes that are forked from one that has imported PyTorch, which takes a fraction of the time.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridtrain.launch import free_port
from tests.support import forked

HERE = Path(__file__).parent
LEVELS = ("command", "trainer", "session", "loop")
ENGINES = ("local", "distributed")
STALL_S = 15.0  # on a busy machine, workers take long to start
LIMIT_S = 300.0

# the phases of each kind of fault
PHASES = ("setup", "data", "forward", "loss", "backward", "optimizer", "evaluate", "save")
KINDS = {
    **dict.fromkeys(("exception", "exit", "kill", "segfault", "memory"), PHASES),
    **dict.fromkeys(("sleep", "stop"), (*PHASES[1:], "worker")),
    **dict.fromkeys(("nan", "terminate", "interrupt", "slow"), ("forward",)),
    **dict.fromkeys(("full-sleep", "full-exception"), ("forward", "evaluate")),
    "alone": ("optimizer", "evaluate"),
    "differ": ("setup",),
    "disk": ("save",),
}
# a loop of one's own skips no step, and a session goes on
LEVELS_OF = {"nan": LEVELS[:2]}
# what is said: the rank, with its stage if it is known, is `{who}`
SAID = {
    "exception": r"boom in {phase}[\s\S]*\bon {who}|^error: {who}.* failed: .*boom in {phase}",
    "memory": r"memory[\s\S]*\bon {who}|^error: {who}.* failed: .*memory",
    **dict.fromkeys(  # without torchrun, rank 0 has the store through which the others learn of it
        ("exit", "kill", "segfault"),
        r"^error: {who}.*ended without a message|^error: lost the connection .*: {who} or",
    ),
    **dict.fromkeys(("sleep", "alone"), r"^error: {who}.*has made no progress for .*"),
    "differ": r"^error: .*lr= of the optimizer differs between the ranks: .* on {who}",
    "stop": r"^error: {who}.*(does not respond|has not responded.*is stopped)",
    "nan": r"^error: .*not finite",
    "disk": r"^error: .*No space left",
}


@dataclass(frozen=True)
class Outcome:
    """The end of a run with a fault.

    Attributes:
        named: whether the fault was reported rightly, and no process was left.
        seconds: from the fault to the end of the last process; NaN if nothing happened.
        line: what was said of it.
        output: all that was printed.
        code: the exit code of the launcher, or the largest one of the processes.
    """

    named: bool
    seconds: float
    line: str
    output: str
    code: int = 1


def run(
    fault: str,
    folder: Path,
    *overrides: str,
    level: str = "command",
    engine: str = "local",
    start: str = "torchrun",
    restarts: int = 0,
    stall_s: float = STALL_S,
) -> Outcome:
    """Trains in two processes with a fault.

    Args:
        fault: as `kind:phase:rank`.
        folder: for the run, and for what it prints.
        *overrides: further ones of the command.
        level: one of `LEVELS`.
        engine: one of `ENGINES`.
        start: what starts the processes: `torchrun`, `python`, or `fork`, which forks them.
        restarts: `--max-restarts` of torchrun.
        stall_s: `stall_s` of the run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    at = folder / "fault_time"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")} | {
        "FAULT": fault,
        "FAULT_TIME": str(at),
        "STALL_S": str(stall_s),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    script = [str(HERE / "faults.py"), level, engine, str(stall_s), "8"]
    if level == "command":
        # faults.py fills the pipe of stderr before it calls the command
        is_full = fault.startswith("full-")
        script = [
            *([str(HERE / "faults.py"), "command"] if is_full else ["-m", "hybridtrain"]),
            *("allow_targets=[faults]", f"output_dir={folder}"),
            *("run_name=run", "model._target_=faults.model", "data._target_=faults.data"),
            *("data.batch_size=16", "optim=sgd", "optim._target_=faults.FaultySGD"),
            *("trainer.loss={_target_: faults.FaultyLoss}", "pipeline.nb_part=2"),
            *("pipeline.chunks=4", "pipeline.split=[2,3]", "world.devices=cpu"),
            *(f"world.engine={engine}", f"world.stall_s={stall_s}", "trainer.epochs=null"),
            *("trainer.steps=8", "trainer.log_every=4", "trainer.eval_every=4"),
            *("monitor.tensorboard=false", "monitor.progress=false", "trainer.max_skipped=2"),
            *(f"world.timeout_s={12 * stall_s}", "callbacks={own: {_target_: faults.FaultyState}}"),
            *(f"data.workers={int(':worker:' in fault)}", *overrides),
        ]
    places = [environment]
    if start == "torchrun":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        script = [*launcher, f"--max-restarts={restarts}", *script]
    else:
        places = [environment | place for place in _places()]
    with (folder / "output.txt").open("a+") as file:
        processes: list[Any]
        if start == "fork":
            script = ["command", *script[2:]] if level == "command" else script[1:]
            processes = [_Fork(script, place, Path(file.name)) for place in places]
        else:
            processes = [
                subprocess.Popen(
                    [sys.executable, *script], env=place, stdout=file, stderr=file, cwd=folder
                )
                for place in places
            ]
        end = time.monotonic() + LIMIT_S * (1 + restarts)
        while time.monotonic() < end and any(process.poll() is None for process in processes):
            time.sleep(0.05)
        ended = time.time()
        time.sleep(1)  # a child that was killed may take a moment
        groups = [process.pid for process in processes] if start == "fork" else []
        left = list(_left_over("" if groups else environment["FAULT_TIME"], groups))
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        codes = [process.wait() for process in processes]
        file.seek(0)
        output = file.read()
    seconds = ended - at.stat().st_mtime if at.exists() else float("nan")
    named, line = judge(fault, level, output, codes)
    if not at.exists() and not fault.startswith("none:"):
        named, line = False, f"the fault did not happen; {line}"
    if left:
        named, line = False, f"processes that are left: {len(left)}; {line}"
    return Outcome(named, seconds, line, output, max(codes, key=abs))


def _places() -> Iterator[dict[str, str]]:
    """Yields the environment of each of two processes that no launcher has started."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in ("0", "1"):
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
        yield address | sizes | {"RANK": rank, "LOCAL_RANK": rank}


_forking = threading.Lock()


class _Fork:
    """A process of faults.py that is forked from one that has imported PyTorch, as a `Popen`."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: Path
    ) -> None:
        with _forking:
            self._process = forked.start(HERE / "faults.py", arguments, environment, output)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode or 0


def _left_over(marker: str, groups: Sequence[int]) -> Iterator[int]:
    """Yields the processes of a run that are left, with its workers.

    Args:
        marker: what they have in their environment; "" if they were forked.
        groups: their process groups, if they were forked.
    """
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, group, *_ = (path / "stat").read_text().rpartition(")")[2].split()
            is_marked = marker and marker.encode() in (path / "environ").read_bytes()
            if is_marked or (int(group) in groups and state != "Z"):
                yield int(path.name)
        except OSError:  # it has ended, or is another user's
            continue


def judge(fault: str, level: str, output: str, codes: Sequence[int]) -> tuple[bool, str]:
    """Returns whether an output reports the fault rightly, and what it says of it.

    Args:
        fault: as `kind:phase:rank`.
        level: one of `LEVELS`.
        output: all that was printed.
        codes: the exit codes of the processes, or of the launcher.
    """
    kind, phase, rank = fault.split(":")
    ours, _, root = output.partition("Root Cause")
    ours = re.split(r"\n[WE]\d{4} .*failed \(exitcode", ours)[0]
    if kind in ("none", "restart"):
        return True, ""
    if kind in ("terminate", "interrupt"):  # only the first two levels handle signals
        return level in LEVELS[2:] or "interrupted at step" in ours, ""
    if kind.startswith("full-"):  # nobody has read what was said
        return min(codes) > 0, f"exit codes {codes}"
    # a script also prints Python's traceback, in the process that fails
    errors = r"error: " if level != "command" else r"error: |\w+Error: |MemoryError"
    reports = set(re.findall(rf"^(?:{errors}).*", ours, re.MULTILINE))
    line = max(reports, default="nothing", key=ours.rfind)
    if kind == "slow":  # it is right
        return not any(codes) and not reports, line
    said = SAID["sleep" if phase == "worker" else kind]  # its rank waits, and is not stopped itself
    pattern = said.format(phase=phase, who=rf"rank {rank}( \(stage \d,[^)]*\)| \([^)]*\))?")
    right = len(reports) == 1 and bool(re.search(pattern, ours, re.MULTILINE))
    if kind == "exception" and phase in ("forward", "loss", "backward"):
        right &= bool(re.search(r"(forward|backward) of micro-batch \d on stage 1", ours))
    root_rank = re.search(r"rank      : (\d)", root)
    if root_rank and kind not in ("nan", "disk"):
        right &= root_rank[1] == rank or f"rank {rank}" in root
    return right, line


def faults_of(engine: str) -> Iterator[str]:
    """Yields the faults `kind:phase:rank`; the layer and the loss are on stage 1."""
    for kind, phases in KINDS.items():
        for phase in phases:
            of_stage = phase in ("forward", "loss", "backward", "evaluate")
            of_main = kind in ("nan", "disk")
            for rank in (0, 1):
                if (of_main and rank != 0) if engine == "local" else (of_stage and rank == 0):
                    continue
                if kind == "disk" and rank:
                    continue
                yield f"{kind}:{phase}:{rank}"


def main() -> int:
    """Runs all faults and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the faults' names, as in exit:data")
    parser.add_argument("--level", choices=LEVELS, help="one level")
    parser.add_argument("--engine", choices=ENGINES, help="one engine")
    parser.add_argument("--every", type=int, default=1, help="run one of so many cases")
    parser.add_argument("--torchrun", action="store_true", help="start the processes with torchrun")
    parser.add_argument("--forks", type=int, default=0, help="how many cases at a time")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many cases")
    parser.add_argument("--stall-s", type=float, default=STALL_S, help="stall_s of the runs")
    parser.add_argument("--output", action="store_true", help="show the output of what is wrong")
    asked = parser.parse_args()
    # a shell starts a job in the background with SIGINT ignored, which children inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cases = [
        (fault, level, engine)
        for engine in ([asked.engine] if asked.engine else ENGINES)
        for fault in faults_of(engine)
        for level in ([asked.level] if asked.level else LEVELS)
        if asked.only in fault and level in LEVELS_OF.get(fault.split(":")[0], LEVELS)
    ][asked.skip :: asked.every]
    start = "torchrun" if asked.torchrun else "fork" if asked.forks else "python"
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.forks or 1) as pool:
        runs = {
            pool.submit(
                *(run, fault, Path(folder) / str(n)),
                **{"level": level, "engine": engine, "start": start, "stall_s": asked.stall_s},
            ): (fault, level, engine)
            for n, (fault, level, engine) in enumerate(cases)
        }
        for done in as_completed(runs):
            (fault, level, engine), outcome = runs[done], done.result()
            outcomes.setdefault((fault.split(":")[0], level), []).append(outcome)
            said = "right" if outcome.named else "WRONG"
            shown = f"{fault:24} {level:8} {engine:12} {said} {outcome.seconds:5.1f} s"
            print(f"{shown}  {outcome.line[:150]}", flush=True)
            if asked.output and not outcome.named:
                print(outcome.output, flush=True)
    print("\n| fault | level | reported rightly | seconds to the end: median | most |")
    print("|---|---|--:|--:|--:|")
    for (kind, level), group in outcomes.items():
        seconds = sorted(outcome.seconds for outcome in group)
        named = f"{sum(outcome.named for outcome in group)} of {len(group)}"
        median = seconds[len(seconds) // 2]
        print(f"| {kind} | {level} | {named} | {median:.1f} | {seconds[-1]:.1f} |")
    return 0 if all(outcome.named for group in outcomes.values() for outcome in group) else 1


if __name__ == "__main__":
    sys.exit(main())
