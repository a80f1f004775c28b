"""Faults of every kind in every phase on every rank: is the first one reported, and how soon?

Each run has two processes with two stages each. A fault is named rightly if what the processes
print says which rank, exactly once and last, with the layer, the stage and the micro-batch where
there are any; and if the root cause in torchrun's report is the same, or of that rank.

    python -m scripts.reliability.first_errors [--only exception:forward:1] [--markdown]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PHASES = ("setup", "data", "forward", "backward", "optimizer", "evaluate")
KINDS = ("exception", "exit", "kill", "segfault", "memory")
LIMIT_S = 300


@dataclass(frozen=True)
class Outcome:
    """The end of a run with a fault.

    Attributes:
        named: whether the fault was reported rightly.
        seconds: from the fault to torchrun's end.
        line: what was said of it.
        output: all that was printed.
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
    restarts: int = 0,
    limit_s: float = LIMIT_S,
    processes: int = 2,
) -> Outcome:
    """Runs the training with a fault `kind:phase:rank` under torchrun."""
    folder.mkdir(parents=True, exist_ok=True)
    at = folder / "fault_time"
    path = os.pathsep.join([str(REPOSITORY / "scripts" / "reliability"), str(REPOSITORY)])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
    environment |= {
        "FAULT": fault,
        "FAULT_TIME": str(at),
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        f"--nproc-per-node={processes}",
        *(f"--max-restarts={restarts}", "-m", "hybridtrain"),
        *("allow_targets=[faults]", f"output_dir={folder}", "run_name=run"),
        *("model._target_=faults.model", "data._target_=faults.data", "data.batch_size=16"),
        *("optim=sgd", "optim._target_=faults.FaultySGD", "pipeline.nb_part=2"),
        *("pipeline.chunks=4", "pipeline.split=[2,3]", "world.devices=cpu", "trainer.epochs=null"),
        *("trainer.steps=8", "trainer.log_every=4", "trainer.eval_every=4"),
        *("monitor.tensorboard=false", "monitor.progress=false", *overrides),
    ]
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        process.kill()  # its processes then get a SIGTERM of the system
        output = process.communicate()[0] + "\nHANGS"
    seconds = time.time() - float(at.read_text()) if at.exists() else float("nan")
    named, line = judge(fault, output)
    return Outcome(named, seconds, line, output, process.returncode)


def judge(fault: str, output: str) -> tuple[bool, str]:
    """Returns whether the output of torchrun reports the fault rightly, and what it says of it."""
    kind, phase, rank = fault.split(":")
    if kind in ("none", "restart", "terminate"):
        return "HANGS" not in output, ""
    ours = re.split(r"\n[WE]\d{4} .*failed \(exitcode", output)[0]
    ours = re.sub(r"^W\d{4} .*closing signal.*$", "", ours, flags=re.M)
    reports = re.findall(r"^(?:error: |\w+Error: |MemoryError).*", ours, re.M)
    line = reports[-1] if reports else ""
    root = output.partition("Root Cause")[2]
    root_rank = re.search(r"rank      : (\d)", root)
    root_text = root.partition("traceback : ")[2]
    if not root_rank or len(reports) != 1 or "HANGS" in output:
        return False, line or "nothing"
    right = root_rank[1] == rank or f"rank {rank}" in root_text
    if kind in ("exit", "kill", "segfault"):
        return right and f"rank {rank} (pid" in line and "ended without a message" in line, line
    if kind in ("sleep", "stop"):
        right = line.startswith(f"error: rank {rank} ") and "stalls" in line
        if phase in ("forward", "backward"):
            # a stop reaches the other threads of a process a moment later
            action = phase if kind == "sleep" else "(forward|backward)"
            right &= bool(re.search(f"{action} of micro-batch \\d on stage 1", line))
        return right, line
    after = ours[ours.rindex(line) :]
    expected = {"exception": f"boom in {phase}", "memory": "memory", "disk": "checkpoint"}.get(
        kind, ""
    )
    right &= expected in after and (f"on rank {rank}" in after or line.startswith("error: "))
    if phase in ("forward", "evaluate"):
        right &= "in layer '3'" in after and "of micro-batch" in after and "on stage 1" in after
    if phase == "backward":
        right &= "in the backward of micro-batch" in after and "on stage 1" in after
    return right, line


def main() -> int:
    """Runs all faults and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="a part of the faults' names, such as exit:data")
    parser.add_argument("--output", action="store_true", help="show the output of what is wrong")
    arguments = parser.parse_args()
    faults = [f"{kind}:{phase}:{rank}" for kind in KINDS for phase in PHASES for rank in (0, 1)]
    faults += ["disk:save:0"]
    faults = [fault for fault in faults if not arguments.only or arguments.only in fault]
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, fault in enumerate(faults):
            outcome = outcomes[fault] = run(fault, Path(folder) / str(number))
            print(
                f"{fault:24} {'named' if outcome.named else 'WRONG'} {outcome.seconds:5.1f} s  "
                f"{outcome.line[:150]}",
                flush=True,
            )
            if arguments.output and not outcome.named:
                print(outcome.output)
    print("\n| kind | named rightly | seconds to exit: median | most |\n|---|---|---|---|")
    for kind in dict.fromkeys(fault.split(":")[0] for fault in faults):
        own = [outcome for fault, outcome in outcomes.items() if fault.startswith(f"{kind}:")]
        seconds = sorted(outcome.seconds for outcome in own)
        named = sum(outcome.named for outcome in own)
        print(
            f"| {kind} | {named} of {len(own)} | {seconds[len(seconds) // 2]:.1f} | "
            f"{seconds[-1]:.1f} |"
        )
    share = sum(outcome.named for outcome in outcomes.values()) / len(outcomes)
    print(f"\nnamed rightly: {share:.2f} of {len(outcomes)}")
    return 0 if share >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
