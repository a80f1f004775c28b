"""Runs on a real Slurm: srun, requeue, several steps, GPUs per task, mistakes, lost nodes.

Not collected by default: `scripts/cluster_check.sh` runs them. They wait for lines of output; no
verdict depends on a time.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster.slurm import HYBRIDTRAIN, Slurm

pytestmark = pytest.mark.timeout(400)

# a model without dropout, whose masks would differ with the number of replicas
NET = """
import os, signal, torch
from torch import nn

class Dies(nn.Module):
    steps = 0
    def forward(self, x):
        Dies.steps += self.training
        if Dies.steps == 20 and os.environ.get("DIES", "") == os.environ.get("SLURM_PROCID"):
            os.kill(os.getpid(), signal.SIGKILL)
        return x

def build():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), Dies(), nn.Linear(48, 32), nn.ReLU(),
        nn.Linear(32, 10), nn.LogSoftmax(1),
    )
"""
SMALL = [
    "recipe=digits",
    "allow_targets=[net]",
    "model._target_=net.build",
    "world.devices=cpu",
    "data.batch_size=36",
    "pipeline.chunks=3",
    "lr_schedule.warmup_steps=0",
    "trainer.epochs=null",
    "trainer.steps=10",
    "trainer.log_every=1",
    "trainer.eval_every=null",
    "monitor.tensorboard=false",
    "monitor.progress=false",
]
ENDLESS = ["trainer.steps=1000000", "trainer.log_every=5", "checkpoint.every_steps=null"]


def command(name: str, *overrides: str) -> list[str]:
    return [*HYBRIDTRAIN, *SMALL, f"run_name={name}", *overrides]


@pytest.fixture(autouse=True)
def net(slurm: Slurm) -> None:
    (slurm.work / "net.py").write_text(NET)


@pytest.fixture(scope="module")
def alone(slurm: Slurm) -> list[float]:
    """The losses of a single process."""
    (slurm.work / "net.py").write_text(NET)
    slurm.run(*command("alone"))
    return losses(slurm, "alone")


def losses(slurm: Slurm, name: str) -> list[float]:
    lines = (slurm.work / "outputs" / name / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [line["train/loss"] for line in found if "train/loss" in line]


@pytest.mark.parametrize("nodes", [2, 3])
def test_replicas_on_several_nodes_train_as_one_process_does(
    slurm: Slurm, nodes: int, alone: list[float]
) -> None:
    output = slurm.run("srun", "-K1", f"-N{nodes}", *command(f"nodes{nodes}"))
    assert "started by slurm, gloo" in output
    for rank in range(nodes):
        assert re.search(rf"^ +{rank}  n{rank + 1} ", output, re.MULTILINE), output
    # replicas add up in another order
    assert losses(slurm, f"nodes{nodes}") == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "tasks", "inner"),
    [
        ("pipeline", ("-N2", "-n2"), "pp"),
        ("pp", ("-N2", "-n4"), "pp"),
        ("dp", ("-N2", "-n4"), "dp"),
    ],
)
def test_pipelines_across_nodes_train_as_one_process_does(
    slurm: Slurm, name: str, tasks: tuple[str, str], inner: str, alone: list[float]
) -> None:
    overrides = ["world.engine=distributed", f"world.inner={inner}"]
    slurm.run("srun", "-K1", *tasks, *command(name, *overrides), timeout=300)
    if name == "one":  # one replica: the same additions
        assert losses(slurm, name) == alone
    assert losses(slurm, name) == pytest.approx(alone, rel=1e-5)


def test_usr1_saves_and_the_requeued_job_goes_on_at_that_step(slurm: Slurm) -> None:
    long = shlex.join(command("long", *ENDLESS))
    job = slurm.submit(
        f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --open-mode=append --output=long.log
srun --kill-on-bad-exit=1 {long}
code=$?
echo "ended with $code"
if [ $code = 75 ] && scontrol show job $SLURM_JOB_ID | grep -q JobState=RUNNING; then
    scontrol requeue $SLURM_JOB_ID
    sleep 600
fi
exit $code
"""
    )
    metrics = "outputs/long/metrics.jsonl"
    slurm.wait_for(metrics, '"step": 10,')
    slurm.run("scancel", "--signal=USR1", job)
    said = slurm.wait_for("long.log", "ended with 75")
    found = re.search(r"interrupted at step (\d+) of .* by SIGUSR1: saved", said)
    assert found, said
    assert said.count("interrupted at step") == 1
    slurm.wait_for("long.log", f", at step {found[1]} of 1000000")
    assert slurm.state(job) == "RUNNING"
    slurm.run("scancel", job)
    slurm.wait_until_gone(job)
    steps = [json.loads(x)["step"] for x in (slurm.work / metrics).read_text().splitlines()]
    assert steps == sorted(set(steps))


def test_two_steps_at_once_in_one_job_do_not_mix(slurm: Slurm, alone: list[float]) -> None:
    def step(name: str) -> str:
        # both have rank 0 on n1
        return f"srun --exact -K1 -N2 -n2 -c1 {shlex.join(command(name))} >{name}.log 2>&1 &"

    job = slurm.submit(
        "#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=2 --output=both.log\n"
        f"{step('first')}\na=$!\n{step('second')}\nb=$!\n"
        "wait $a; echo first: $?\nwait $b; echo second: $?\necho ended\n"
    )
    said = slurm.wait_for("both.log", "ended", 240)
    logs = "".join((slurm.work / f"{name}.log").read_text() for name in ("first", "second"))
    assert "first: 0\nsecond: 0\n" in said, f"job {job}\n{said}{logs}"
    for name in ("first", "second"):
        assert losses(slurm, name) == pytest.approx(alone, rel=1e-5)


def test_processes_that_meet_in_the_store_of_another_run_say_so(slurm: Slurm) -> None:
    """Two steps are made to use one port; without it they would mix."""
    env = {"MASTER_ADDR": "n1", "MASTER_PORT": "23456"}
    first = slurm.popen(
        "srun", "--overlap", "-N2", "-n2", *command("owner", *ENDLESS), env=env, output="owner.log"
    )
    slurm.wait_for("outputs/owner/metrics.jsonl", '"step": 5,')
    said = slurm.run("srun", "-K1", "-N2", "-n2", *command("guest"), env=env, code=2)
    assert "error: the port 23456 of n1, where the processes are to meet, is" in said
    assert "set MASTER_PORT to a free one" in said
    assert not (slurm.work / "outputs" / "guest").exists()
    assert first.poll() is None
    slurm.run("scancel", "--user=root", code=None)
    first.wait(60)


GPUS = """
import os
from hybridtrain.devices import choose_devices
from hybridtrain.launch.environment import detect
seen = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
launch = detect(os.environ)
own = choose_devices(1, "cuda", launch, len(seen))
print(launch.rank, os.environ["SLURMD_NODENAME"], seen[own[0].index])
"""


@pytest.mark.parametrize(
    "binding", [("--gpus-per-task=1",), ("--gres=gpu:2", "--gpu-bind=single:1"), ("--gres=gpu:2",)]
)
def test_each_task_uses_the_gpu_that_slurm_gives_it(slurm: Slurm, binding: tuple[str]) -> None:
    (slurm.work / "gpus.py").write_text(GPUS)
    said = slurm.run("srun", "-N2", "--ntasks-per-node=2", *binding, sys.executable, "gpus.py")
    lines = [line.split() for line in said.splitlines() if not line.startswith("srun:")]
    chosen = [words[1:] for words in lines]
    assert sorted(chosen) == [["n1", "0"], ["n1", "1"], ["n2", "0"], ["n2", "1"]]


@pytest.mark.parametrize("kill", [(), ("-K1",)])
def test_a_mistake_is_told_once_with_its_exit_code(slurm: Slurm, kill: tuple[str]) -> None:
    said = slurm.run(
        "srun", *kill, "-N3", *HYBRIDTRAIN, "recipe=digits", "trainer.epochss=1", code=2
    )
    assert said.count("did you mean trainer.epochs?") == 1, said
    assert "Traceback" not in said


def test_a_batch_script_without_srun_says_so(slurm: Slurm) -> None:
    job = slurm.submit(
        "#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1 --output=bare.log\n"
        f"{shlex.join(command('bare'))}\necho ended with $?\n"
    )
    said = slurm.wait_for("bare.log", "ended with 2")
    assert said.count("put srun before the command") == 1, f"job {job}\n{said}"


def test_a_run_does_not_begin_anew_where_another_node_has_its_checkpoints(slurm: Slurm) -> None:
    own_disk = f"output_dir={slurm.folder}/private"
    slurm.run("srun", "-K1", "-N2", "-w", "n2,n3", *command("local", own_disk))
    said = slurm.run("srun", "-K1", "-N2", "-w", "n1,n2", *command("local", own_disk), code=2)
    assert said.count("rank 1 on n2 has a checkpoint of step 10") == 1, said


def test_a_process_that_was_killed_on_another_node_is_named_in_one_line(slurm: Slurm) -> None:
    said = slurm.run("srun", "-N2", *command("dies", *ENDLESS), env={"DIES": "1"}, code=None)
    assert re.search(r"^error: rank 1 \(pid \d+ on n2\)", said, re.MULTILINE), said
    assert "Traceback" not in said, said


LONG_SAVE = """
import sys, time
from pathlib import Path
from hybridtrain.world import World
world = World.from_env(devices="cpu", timeout_s=20)
world.watch(Path("stalls"))
sys.stderr = open(f"cut{world.rank}.log", "w", buffering=1)
print("waits", file=sys.stderr)
world.on_main(lambda: time.sleep(3600))
"""


def test_a_node_that_loses_its_network_ends_the_run_on_both_sides(slurm: Slurm) -> None:
    """While rank 0 writes and the others wait; no connection is closed."""
    (slurm.work / "save.py").write_text(LONG_SAVE)
    process = slurm.popen("srun", "-N2", "-w", "n1,n2", sys.executable, "save.py", output="cut.log")
    for rank in (0, 1):
        slurm.wait_for(f"cut{rank}.log", "waits")
    slurm.cut("n2")
    try:
        slurm.wait_for("cut0.log", "error: rank 1 (pid ")
        slurm.wait_for("cut1.log", "error: rank 1 on n2 has been cut off from rank 0 on n1 for ")
    finally:
        slurm.mend("n2")
        slurm.run("scancel", "--user=root", code=None)
        process.wait(90)


def test_the_cluster_ends_with_the_process_that_holds_it(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from cluster.slurm import Slurm\n"
        "print(Slurm(Path(sys.argv[2]), nodes=1).init, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tests), str(tmp_path)],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
    )
    init = Path("/proc", done.stdout.strip())
    deadline = time.monotonic() + 60
    while init.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not init.exists()
