"""More runs on a real Slurm: mixed layouts, mistakes, lost nodes, the time limit.

`scripts/cluster_check.sh` alone collects them. They wait for lines of output; no verdict depends on
a time.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster.runs import DISTRIBUTED, ENDLESS, HYBRIDTRAIN, command, gpus_of_tasks, losses
from cluster.slurm import Slurm

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def alone(slurm: Slurm) -> list[float]:
    """The losses of a single process."""
    slurm.run(*command("alone"))
    return losses(slurm, "alone")


@pytest.mark.parametrize("inner", ["pp", "dp"])
def test_several_pipelines_across_nodes_train_as_one_process_does(
    slurm: Slurm, inner: str, alone: list[float]
) -> None:
    overrides = [DISTRIBUTED, f"world.inner={inner}"]
    slurm.run("srun", "-K1", "-N2", "-n4", *command(inner, *overrides))
    # replicas add up in another order
    assert losses(slurm, inner) == pytest.approx(alone, rel=1e-5)


def test_processes_that_meet_in_the_store_of_another_run_say_so(slurm: Slurm) -> None:
    """Two steps are made to use one port; without it they would mix."""
    env = {"MASTER_ADDR": "n1", "MASTER_PORT": "23456"}
    first = slurm.popen(
        "srun", "--overlap", "-N2", "-n2", *command("owner", *ENDLESS), env=env, output="owner.log"
    )
    slurm.wait_for("outputs/owner/metrics.jsonl", '"step": 5,')
    said = slurm.run("srun", "-N2", "-n2", *command("guest"), env=env, code=2)
    assert "error: port 23456 on n1" in said
    assert "set MASTER_PORT to a free port" in said
    assert not (slurm.work / "outputs" / "guest").exists()
    assert first.poll() is None
    slurm.run("scancel", "--user=root", code=None)
    first.wait(60)


@pytest.mark.parametrize(
    "binding", [("--gpus-per-task=1",), ("--gres=gpu:2", "--gpu-bind=single:1"), ("--gres=gpu:2",)]
)
def test_each_task_uses_the_gpu_that_slurm_gives_it(slurm: Slurm, binding: tuple[str]) -> None:
    assert gpus_of_tasks(slurm, *binding) == ["n1 0", "n1 1", "n2 0", "n2 1"]


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
    assert said.count("for a single process, use srun -n 1") == 1, f"job {job}\n{said}"


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
        cut_off = "error: rank 1 on n2 has been cut off from rank 0 on n1 for "
        assert "error: rank 1 (pid " in slurm.wait_for("cut0.log", "error: rank 1 (pid ")
        assert cut_off in slurm.wait_for("cut1.log", cut_off)
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
