"""What a cluster is for, on a real Slurm: both engines, submit, preemption, lost networks.

Run with `--all`; skipped, with the reason, where Slurm cannot run. The parts run beside
each other on one cluster, and each test reports one of them. They wait for lines of output; no
verdict depends on a time.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import pytest
from cluster.runs import DISTRIBUTED, ENDLESS, HYBRIDTRAIN, SMALL, command, gpus_of_tasks, losses
from cluster.slurm import Slurm

# the last parts wait for the first ones, on a machine that has other tests to run
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

Wait: TypeAlias = Callable[[str], None]
Part: TypeAlias = Callable[[Slurm, Wait], None]

AT_ONCE = 4
PARTS: dict[str, Part] = {}


def part(function: Part) -> Part:
    """Registers a part, in the order in which they begin; a function may wait for earlier ones."""
    PARTS[function.__name__] = function
    return function


@pytest.fixture(scope="module")
def running(slurm: Slurm) -> Iterator[dict[str, Future[None]]]:
    """All parts, of which some run at a time."""
    futures: dict[str, Future[None]] = {}

    def wait(name: str) -> None:
        futures[name].result()

    pool = ThreadPoolExecutor(AT_ONCE)
    for name, function in PARTS.items():
        futures[name] = pool.submit(function, slurm, wait)
    yield futures
    pool.shutdown(wait=False, cancel_futures=True)


@part
def the_runs_of_an_array_train_and_are_in_one_table(slurm: Slurm, wait: Wait) -> None:
    array = ["--multirun", *SMALL, "run_name=array", "optim.lr=3e-3,1e-2"]
    said = slurm.run(*HYBRIDTRAIN, "submit", *array, "submit.time=10m")
    job = said.splitlines()[-1]
    slurm.wait_until_gone(job)
    logs = [path.read_text() for path in slurm.work.glob("outputs/*/slurm/*.out")]
    table = slurm.run(*HYBRIDTRAIN, "results", "outputs/array-lr")
    assert re.search(r"lr_0.003 +0.003 +done +10", table), (table, logs)
    assert re.search(r"lr_0.01 +0.01 +done +10", table), (table, logs)
    assert losses(slurm, "array-lr/lr_0.003") != losses(slurm, "array-lr/lr_0.01")


@part
def a_submitted_run_goes_on_at_its_step_after_usr1_and_after_a_preemption(
    slurm: Slurm, wait: Wait
) -> None:
    """Two requeues; the second one for a job that wants the GPUs, of which each task has one."""
    layout = ["submit.nodes=2", "submit.gpus_per_node=2", "submit.partition=scavenge"]
    layout += ["submit.sbatch_args=['--nodelist=n1,n2']"]
    said = slurm.run(*HYBRIDTRAIN, "submit", *SMALL, "run_name=long", *ENDLESS, *layout)
    job = said.splitlines()[-1]
    assert "2 nodes x 1 process, 2 replicas of 2 GPUs" in said
    log, metrics = f"outputs/long/slurm/{job}.out", "outputs/long/metrics.jsonl"

    def saved_by(signal: str) -> int:
        text = slurm.wait_for(log, f" by {signal}: saved")
        found = re.findall(rf"interrupted at step (\d+) of 1000000 by {signal}: saved", text)
        assert len(found) == 1, text
        slurm.wait_for(log, f", at step {found[0]} of 1000000")
        return int(found[0])

    slurm.wait_for(metrics, '"step": 10,')
    slurm.run("scancel", "--signal=USR1", job)
    first = saved_by("SIGUSR1")
    slurm.wait_for(metrics, f'"step": {first // 5 * 5 + 10},')
    binding = ("--gres=gpu:2", "--gpu-bind=single:1")
    assert gpus_of_tasks(slurm, *binding) == ["n1 0", "n1 1", "n2 0", "n2 1"]
    assert saved_by("SIGTERM") > first
    slurm.run("scancel", job)
    slurm.wait_until_gone(job)
    steps = [json.loads(line)["step"] for line in (slurm.work / metrics).read_text().splitlines()]
    assert steps == sorted(set(steps))


@part
def both_ends_of_a_cut_network_end_and_say_so(slurm: Slurm, wait: Wait) -> None:
    """Under torchrun, on two nodes that Slurm does not have."""
    torchrun = [HYBRIDTRAIN[0], "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += ["--master-addr=n4", "--master-port=29500"]
    run = command("cut", *ENDLESS, DISTRIBUTED, "world.timeout_s=20")[1:]
    for rank, node in enumerate(("n4", "n5")):
        slurm.popen(*torchrun, f"--node-rank={rank}", *run, node=node, output=f"{node}.log")
    slurm.wait_for("outputs/cut/metrics.jsonl", '"step": 10,')
    slurm.cut("n5")
    slurm.wait_for("n4.log", "error: rank 1 (stage 1, pid ")
    store = "the processes' store, which the launcher serves at MASTER_ADDR"
    slurm.wait_for("n5.log", f"error: {store}, has not answered rank 1 on n5 for ")


@part
def two_steps_at_once_in_one_job_train_as_one_process_does(slurm: Slurm, wait: Wait) -> None:
    """Replicas on two nodes, and beside them a pipeline over the same two."""

    def step(name: str, *overrides: str) -> str:
        run = shlex.join(command(name, *overrides))
        return f"srun --exact -K1 -N2 -n2 -c1 {run} >{name}.log 2>&1 &"

    slurm.submit(
        "#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=2 --output=both.log\n"
        f"{step('replicas')}\na=$!\n{step('pipeline', DISTRIBUTED)}\nb=$!\n"
        "wait $a; echo replicas: $?\nwait $b; echo pipeline: $?\necho ended\n"
    )
    said = slurm.wait_for("both.log", "ended")
    logs = {name: (slurm.work / f"{name}.log").read_text() for name in ("replicas", "pipeline")}
    assert "replicas: 0\npipeline: 0\n" in said, f"{said}{logs}"
    for log in logs.values():
        assert "launcher slurm, backend gloo" in log
        hosts = re.findall(r"^ +[01]  (n\d) ", log, re.MULTILINE)
        assert len(set(hosts)) == 2, log
    wait("the_runs_of_an_array_train_and_are_in_one_table")
    alone = losses(slurm, "array-lr/lr_0.003")
    assert losses(slurm, "pipeline") == alone  # one replica: the same additions
    assert losses(slurm, "replicas") == pytest.approx(alone, rel=1e-5)  # in another order
    # the clocks of the nodes are 1000 s apart
    trace = json.loads((slurm.work / "outputs" / "pipeline" / "timeline.json").read_text())
    begins = [event["ts"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert -1 < min(begins) / 1e6 <= max(begins) / 1e6 < 500


@part
def three_nodes_train_as_one_process_does(slurm: Slurm, wait: Wait) -> None:
    said = slurm.run("srun", "-K1", "-N3", *command("three"))
    for rank in range(3):
        assert re.search(rf"^ +{rank}  n{rank + 1} ", said, re.MULTILINE), said
    wait("the_runs_of_an_array_train_and_are_in_one_table")
    assert losses(slurm, "three") == pytest.approx(losses(slurm, "array-lr/lr_0.003"), rel=1e-5)


@part
def a_run_does_not_begin_anew_where_another_node_has_its_checkpoints(
    slurm: Slurm, wait: Wait
) -> None:
    own_disk = f"output_dir={slurm.folder}/private"
    slurm.run("srun", "-K1", "-N2", "-w", "n2,n3", *command("local", own_disk))
    said = slurm.run("srun", "-K1", "-N3", *command("local", own_disk), code=2)
    assert said.count("rank 1 on n2 has a checkpoint of step 10") == 1, said


def problems(said: str) -> list[str]:
    """Returns the parts of a check that have a problem."""
    return re.findall(r"^(\w+(?: \w+)*) {2,}problem ", said, re.MULTILINE)


@part
def what_a_check_says_of_a_job_is_what_slurm_and_the_job_do(slurm: Slurm, wait: Wait) -> None:
    submit = [*HYBRIDTRAIN, "submit"]
    job = [*SMALL, "run_name=checked", "submit.nodes=2", "submit.time=10m"]
    said = slurm.run(*submit, "--check", *job)
    assert not problems(said), said
    assert re.search(r"^sbatch +ok ", said, re.MULTILINE), said
    layout = re.search(r"^processes +ok +(.*)$", said, re.MULTILINE)
    assert layout is not None, said
    sent = slurm.run(*submit, *job)
    assert layout[1] in sent
    number = sent.splitlines()[-1]
    slurm.wait_until_gone(number)
    assert slurm.state(number) == "COMPLETED"
    for mistake in ("submit.partition=nowhere", "submit.gpus_per_node=8", "submit.nodes=9"):
        said = slurm.run(*submit, "--check", *job, mistake, code=2)
        assert problems(said) == ["sbatch"], said
        # Slurm takes a job of more nodes than there are, and never starts it
        refuses = mistake != "submit.nodes=9"
        said = slurm.run(*submit, *job, mistake, code=2 if refuses else 0)
        if not refuses:
            number = said.splitlines()[-1]
            assert "Reason=Partition" in slurm.run("scontrol", "show", "job", number)
            slurm.run("scancel", number)
    # Slurm takes this one, and it ends with the error that the check has found
    lost = [*SMALL, "run_name=lost", "submit.time=10m", "init_from=missing.safetensors"]
    assert problems(slurm.run(*submit, "--check", *lost, code=2)) == ["init_from"]
    number = slurm.run(*submit, *lost).splitlines()[-1]
    slurm.wait_until_gone(number)
    assert "ExitCode=2:0" in slurm.run("scontrol", "show", "job", number)


@pytest.mark.parametrize("name", PARTS)
def test_on_a_cluster(running: dict[str, Future[None]], name: str) -> None:
    assert running[name].result() is None  # or the part's own assertion fails here
