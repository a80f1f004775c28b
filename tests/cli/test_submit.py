"""`submit`: what it sends, what the script does, and what is refused before anything is sent.

The scripts run in bash with commands of Slurm's that only record how they were called.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_runs import fail
from support.cases import thinned

from hybridtrain.cli import main
from hybridtrain.cli.commands.submit import submit as send
from hybridtrain.cli.config.compose import compose_config
from hybridtrain.cli.config.schema import Config, PipelineConfig, SubmitConfig, WorldConfig
from hybridtrain.cli.run.job import JobRun, _ranges, batch_script, layout_of
from hybridtrain.cli.run.run_table import read_sweep
from hybridtrain.errors import ConfigError

Calls = Callable[[str], list[list[str]]]

DIGITS = ["recipe=digits", "world.devices=cpu"]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Puts recording commands on PATH; returns a function that gives the calls of one of them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    answers = {
        "srun": 'exit "${SRUN_CODE:-0}"',
        "torchrun": "",
        "sleep": "",
        "sbatch": 'echo "${SBATCH_ANSWER-17}"; echo "$SBATCH_ERROR" >&2; exit "${SBATCH_CODE:-0}"',
        "scontrol": '[ "$1" = requeue ] || echo "   JobState=${STATE:-RUNNING} Reason=None"',
    }
    for name, answer in answers.items():
        path = folder / name
        record = f'printf "%s\\0" "$#" "$@" >> "{tmp_path / name}.calls"'
        path.write_text(f"#!/bin/bash\n{record}\n{answer}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def calls(name: str) -> list[list[str]]:
        path = tmp_path / f"{name}.calls"
        words = path.read_text().split("\0")[:-1] if path.exists() else []
        found = []
        while words:
            count = int(words[0])
            found.append(words[1 : count + 1])
            words = words[count + 1 :]
        return found

    return calls


def submit(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """Runs the command, which must end well; returns its stdout and its stderr."""
    capfd.readouterr()
    code = main(["submit", *arguments])
    written = capfd.readouterr()
    assert code == 0, written.err
    return written.out, written.err


@pytest.mark.thorough
def test_several_gpus_for_a_task_without_a_number_of_cpus_are_warned_of(
    slurm: Calls, capfd: pytest.CaptureFixture[str]
) -> None:
    layout = ["recipe=digits", "submit.gpus_per_node=4", "--dry-run"]
    warning = "submit.cpus_per_task=4 or more"
    assert warning in submit(capfd, *layout, "pipeline.nb_part=2")[1]
    for enough in (
        ["pipeline.nb_part=2", "submit.cpus_per_task=3"],
        ["pipeline.nb_part=2", "world.engine=distributed"],
        ["pipeline.nb_part=1"],
    ):
        assert "warning" not in submit(capfd, *layout, *enough)[1]


def run_script(text: str, variables: Mapping[str, object]) -> int:
    """Runs a script as Slurm would, and returns its exit code."""
    # the stubs come after what the script puts first on PATH, where there is none of their names
    environment = {**os.environ, **{key: str(value) for key, value in variables.items()}}
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    return subprocess.run(["bash"], input=text, text=True, env=environment).returncode


def trained(call: list[str]) -> list[str]:
    """Returns the overrides of a call of srun or torchrun."""
    return call[call.index("train") + 1 :]


def script_of(submit: SubmitConfig, overrides: list[str], array: bool = False) -> str:
    """Returns the script of a run of two stages in one process."""
    config = Config(submit=submit, pipeline=PipelineConfig(nb_part=2))
    if not array:
        run = JobRun("mine", Path("outputs/mine"), overrides)
    else:
        file = Path("sweep.txt")
        file.write_text("seed=1\n" + " ".join(map(shlex.quote, overrides)) + "\n")
        run = JobRun("mine", Path("outputs/mine"), [], None, [1, 2], file)
    return batch_script(run, submit, layout_of(config))


def directives(script: str) -> dict[str, str]:
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    pairs = (shlex.split(line)[1].removeprefix("--").partition("=") for line in lines)
    return {option: value for option, _, value in pairs}


def test_a_run_is_checked_written_and_sent(slurm: Calls, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = [*DIGITS, "submit.nodes=2", "submit.time=90m", "submit.partition=long"]
    out, err = submit(capfd, *overrides)
    assert out == "17\n"
    assert "submitted job 17: 2 nodes x 1 process, 2 replicas of 2 devices\n" in err
    assert slurm("sbatch") == [["--parsable", "outputs/digits/slurm/job.sh"]]
    script = Path("outputs/digits/slurm/job.sh").read_text()
    assert len(script.splitlines()) < 45
    head = directives(script)
    assert head["nodes"] == "2"
    assert head["time"] == "1:30:00"
    assert head["partition"] == "long"
    assert head["signal"] == "USR1@120"
    assert head["output"] == "outputs/digits/slurm/%j.out"
    assert "account" not in head
    assert run_script(script, {"SLURM_JOB_ID": 17}) == 0
    (call,) = slurm("srun")
    assert trained(call) == overrides
    assert slurm("scontrol") == []


@pytest.mark.thorough
def test_a_job_with_gpus_does_not_train_on_the_cpu_unless_the_user_says_so(
    slurm: Calls, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = ["recipe=digits", "submit.gpus_per_node=2", "--dry-run"]
    assert "world.devices=cuda" in submit(capfd, *wanted)[0]
    assert submit(capfd, "--multirun", *wanted, "seed=1,2")[0].count("world.devices=cuda") == 2
    for own in ("world.devices=auto", "world.devices=cpu", "world.devices=null"):
        assert "world.devices=cuda" not in submit(capfd, *wanted, own)[0]
    assert "world.devices=cuda" not in submit(capfd, "recipe=digits", "--dry-run")[0]


NAME = """a $HOME 'b' "c" = `d` %j #e"""
TYPED = [
    *DIGITS,
    r"""run_name='a $HOME \'b\' "c" = `d` %j #e'""",
    "output_dir='${oc.env:PLACE}/new outputs'",
    "optim.betas=[0.9, 0.95]",
]


def test_overrides_reach_the_run_as_they_were_typed(
    slurm: Calls, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLACE", "there")
    overrides = [
        *TYPED,
        """submit.setup=['export MARK="a  $((1+1))"']""",
        "submit.srun_args=['--exclude=n1,n2']",
        "submit.sbatch_args=['--mail-type=END']",
    ]
    submit(capfd, *overrides)
    ((_, path),) = slurm("sbatch")
    assert path == f"there/new outputs/{NAME}/slurm/job.sh"
    script = Path(path).read_text()
    assert "\n#SBATCH --mail-type=END\n" in script
    assert directives(script)["job-name"] == NAME
    assert directives(script)["output"].replace("%%", "%") == str(Path(path).with_name("%j.out"))
    assert run_script(script, {"SLURM_JOB_ID": 17}) == 0
    (call,) = slurm("srun")
    assert trained(call) == overrides
    assert "--exclude=n1,n2" in call
    assert 'export MARK="a  $((1+1))"\n' in script


@pytest.mark.parametrize(
    ("runtime", "begin"),
    [
        ("pyxis", "--container-image=a b.sqsh|--container-mounts={0}:{0},/data:/in|{1}"),
        ("apptainer", "apptainer|exec|--nv|--pwd|{0}|--bind|{0}|--bind|/data:/in|--x|a b.sqsh"),
        ("singularity", "singularity|exec|--nv|--pwd|{0}|--bind|{0}|--bind|/data:/in|--x|a b.sqsh"),
        ("charliecloud", "ch-run|--cd|{0}|--bind|{0}|--bind|/data:/in|--x|a b.sqsh|--"),
        (
            "shifter",
            "shifter|--module=gpu|--image=a b.sqsh|--workdir={0}|--volume=/data:/in|--x",
        ),
        (
            "podman-hpc",
            "podman-hpc|run|--rm|--net|host|--gpu|--workdir|{0}|--volume|{0}:{0}|--volume|/data:/in|"
            "--env|SLURM_*|--env|NCCL_*|--env|HYBRIDTRAIN_*|--x|a b.sqsh",
        ),
    ],
)
def test_a_container_is_started_by_srun_in_the_same_folder(
    runtime: str, begin: str, slurm: Calls
) -> None:
    container = {"runtime": runtime, "image": "a b.sqsh", "mounts": ["/data:/in"], "args": ["--x"]}
    script = script_of(SubmitConfig(container=container, gpus_per_node=4), TYPED)
    assert run_script(script, {"SLURM_JOB_ID": 17}) == 0
    (call,) = slurm("srun")
    inner = begin.format(Path.cwd(), f"--container-workdir={Path.cwd()}|--x").split("|")
    train = ["python3", "-m", "hybridtrain", "train", *TYPED]
    assert call == ["--kill-on-bad-exit=1", *inner, *train]


@pytest.mark.parametrize(
    ("gpus", "argument"), [("amd", "--rocm"), ("none", None), ("nvidia", "--nv")]
)
def test_a_container_shows_the_gpus_of_the_vendor_that_is_named(gpus, argument, slurm) -> None:
    container = {"runtime": "apptainer", "image": "my.sif", "gpus": gpus}
    assert run_script(script_of(SubmitConfig(container=container, gpus_per_node=4), TYPED), {}) == 0
    (call,) = slurm("srun")
    assert [word for word in call if word in ("--nv", "--rocm")] == ([argument] if argument else [])


def test_a_container_without_gpus_has_no_argument_for_them(slurm) -> None:
    container = {"runtime": "apptainer", "image": "my.sif"}
    assert run_script(script_of(SubmitConfig(container=container), TYPED), {}) == 0
    (call,) = slurm("srun")
    assert "--nv" not in call


@pytest.mark.parametrize(
    ("code", "state", "restarts", "requeued"),
    [
        (75, "RUNNING", None, True),
        (75, "RUNNING", 2, True),
        (75, "RUNNING", 3, False),  # submit.max_requeues
        (75, "COMPLETING", None, False),  # of a job that was cancelled
        (0, "RUNNING", None, False),
        (1, "RUNNING", None, False),
        (2, "RUNNING", None, False),
        (143, "RUNNING", None, False),
    ],
)
@pytest.mark.parametrize("array", [False, True])
def test_only_a_run_that_was_stopped_while_its_job_goes_on_is_queued_again(
    array: bool, code: int, state: str, restarts: int | None, requeued: bool, slurm: Calls
) -> None:
    script = script_of(SubmitConfig(max_requeues=3), DIGITS, array)
    # the last task of an array has the array's id
    variables: dict[str, Any] = {"SLURM_JOB_ID": 17, "SRUN_CODE": code, "STATE": state}
    if array:
        variables |= {"SLURM_ARRAY_JOB_ID": 17, "SLURM_ARRAY_TASK_ID": 2}
    if restarts is not None:
        variables["SLURM_RESTART_COUNT"] = restarts
    assert run_script(script, variables) == code
    job = "17_2" if array else "17"
    requeues = [call for call in slurm("scontrol") if call[0] == "requeue"]
    assert requeues == ([["requeue", job]] if requeued else [])
    assert slurm("sleep") == ([["600"]] if requeued else [])


@pytest.mark.thorough
def test_a_sweep_is_an_array_with_a_run_directory_for_each_combination(
    slurm: Calls, capfd: pytest.CaptureFixture[str]
) -> None:
    swept = [*DIGITS, "optim.lr=1e-3,1e-2", "submit.array_parallelism=1"]
    _, err = submit(capfd, "--multirun", *swept)
    folder = Path("outputs/digits-lr")
    assert "submitted array 17: 1 node x 1 process, 1 replica of 2 devices, 2 runs" in err
    assert f"hybridtrain results {folder}" in err
    script = (folder / "slurm/job.sh").read_text()
    assert directives(script)["array"] == "1-2%1"
    assert directives(script)["output"] == f"{folder}/slurm/%A_%a.out"
    names = []
    for task in (1, 2):
        array = {"SLURM_JOB_ID": 17, "SLURM_ARRAY_JOB_ID": 17, "SLURM_ARRAY_TASK_ID": task}
        assert run_script(script, array) == 0
        config = compose_config(trained(slurm("srun")[-1]))
        names.append(config.run_name)
        assert config.optim["lr"] == [1e-3, 1e-2][task - 1]
    assert names == ["digits-lr/lr_0.001", "digits-lr/lr_0.01"]  # as --multirun names them
    before = (folder / "slurm/sweep.txt").read_text()
    submit(capfd, "--multirun", *DIGITS, "optim.lr=1e-2,1e-1", "submit.array_parallelism=1")
    # an array that still waits finds its lines where they were
    assert (folder / "slurm/sweep.txt").read_text().startswith(before)
    assert directives((folder / "slurm/job.sh").read_text())["array"] == "2-3%1"


@pytest.mark.thorough
def test_a_sweep_that_another_submit_has_written_meanwhile_is_not_sent(
    slurm: Calls, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def read_and_be_late(path: Path) -> list[list[str]]:
        found = read_sweep(path)
        if not path.exists():
            path.parent.mkdir(parents=True)
            path.write_text("seed=1\n")
        return found

    monkeypatch.setattr("hybridtrain.cli.commands.submit.read_sweep", read_and_be_late)
    error = fail(capfd, "submit", "--multirun", "recipe=digits", "optim.lr=1e-3,1e-2")
    assert "outputs/digits-lr/slurm/sweep.txt" in error
    assert slurm("sbatch") == []


def test_the_jobs_of_an_array_have_one_layout(
    slurm: Calls, capfd: pytest.CaptureFixture[str]
) -> None:
    said = fail(capfd, "submit", "-m", *DIGITS, "submit.nodes=1,2")
    assert "submit.nodes=1: " in said
    assert slurm("sbatch") == []


@pytest.mark.parametrize(
    ("mistake", "message"),
    thinned(
        [
            ("optim.lrr=1", "optim.lrr: "),
            ("model.numclasses=3", "model.numclasses: "),
            ("data.rot=/data", "data.rot: "),
            ("pipeline.schedule=2f2b", "pipeline.schedule=2f2b"),
            ("lr_schedule._target_=torch.optim.lr_scheduler.CosineLR", "lr_schedule._target_="),
            ("submit.node=2", "submit.node: "),
            ("submit.time=soon", "submit.time=soon must be a positive number of seconds"),
            ("resume=nowhere", "resume=nowhere: there is no such checkpoint"),
        ],
        3,
    ),
)
@pytest.mark.quick_cases(1)
def test_a_mistake_does_not_wait_in_the_queue(
    mistake: str, message: str, slurm: Calls, capfd: pytest.CaptureFixture[str]
) -> None:
    said = fail(capfd, "submit", *DIGITS, mistake)
    assert said.startswith(f"error: {message}")
    assert said.count("\n") == 1
    assert slurm("sbatch") == []
    assert not Path("outputs").exists()


def config_of(nb_part: int | str, engine: str, devices: str | None = None, **submit: Any) -> Config:
    world = WorldConfig(engine=engine, devices=devices)
    pipeline = PipelineConfig(nb_part=nb_part)
    return Config(pipeline=pipeline, world=world, submit=SubmitConfig(**submit))


@pytest.mark.parametrize(
    ("config", "tasks", "said"),
    [
        # 4 GPUs; 3 nodes of 4; 2 nodes of 8: one process a replica
        (config_of(2, "local", gpus_per_node=4), 2, "1 node x 2 processes, 2 replicas of 2 GPUs"),
        (config_of(2, "local", nodes=3, gpus_per_node=4), 2, "6 replicas of 2 GPUs"),
        (config_of(2, "local", nodes=2, gpus_per_node=8), 4, "8 replicas of 2 GPUs"),
        # one process a GPU
        (config_of(4, "distributed", nodes=2, gpus_per_node=8), 8, "4 replicas of 4 GPUs"),
        (config_of(16, "distributed", nodes=2, gpus_per_node=8), 8, "1 replica of 16 GPUs"),
        # CPUs
        (config_of(2, "local", nodes=2), 1, "2 nodes x 1 process, 2 replicas of 2 devices"),
        (config_of(2, "distributed", nodes=2), 2, "2 nodes x 2 processes, 2 replicas"),
        (config_of(2, "distributed", nodes=2, processes_per_node=1), 1, "1 replica of 2 devices"),
    ],
)
def test_the_processes_of_a_node_follow_from_its_gpus(
    config: Config, tasks: int, said: str
) -> None:
    layout = layout_of(config)
    assert layout.processes_per_node == tasks
    assert said in str(layout)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            config_of(3, "local", gpus_per_node=4),
            "submit.gpus_per_node=4 is not a multiple of pipeline.nb_part=3",
        ),
        (
            config_of(2, "local", gpus_per_node=4, processes_per_node=4),
            "submit.processes_per_node=4 x pipeline.nb_part=2 need 8 GPUs",
        ),
        (
            config_of(1, "distributed", gpus_per_node=2, processes_per_node=3),
            "submit.processes_per_node=3 x 1 GPU need 3 GPUs",
        ),
        (
            config_of(3, "distributed", gpus_per_node=4),
            "submit.nodes=1 x 4 processes = 4, which is not a multiple of pipeline.nb_part=3",
        ),
        (config_of(1, "local", "cuda"), "world.devices=cuda needs GPUs: set submit.gpus_per_node="),
        (config_of(1, "local", nodes=0), "submit.nodes=0 must be at least 1"),
        (config_of(1, "local", to="pbs"), "submit.to=pbs is unknown"),
        (config_of(1, "local", time="1:30"), "submit.time=1:30 is 90 s, "),
        (config_of(1, "local", time="0:00"), "submit.time=0:00:00 must be a positive number"),
        (config_of(1, "local", time=90), "submit.time=90 is 90 s, "),
        (
            config_of(1, "local", container={"image": "x"}),
            "submit.container.runtime=None is unknown",
        ),
        (config_of(1, "local", container={"runtime": "pyxis"}), "submit.container={'runtime': "),
        (
            config_of(1, "local", container={"image": "x", "imge": "x"}),
            "a key of submit.container=imge is unknown: did you mean 'image'?",
        ),
        (
            config_of(1, "local", container={"image": "x", "runtime": "shifter", "gpus": "amd"}),
            "submit.container.gpus=amd: shifter ",
        ),
        (config_of("auto", "local"), "pipeline.nb_part=auto cannot be used in a job"),
        (config_of(1, "local", to="kubernetes"), "submit.to=kubernetes needs an image"),
        (
            config_of(1, "local", to="kubernetes", container={"image": "x", "mounts": ["/data"]}),
            "submit.container.mounts=/data: with Kubernetes",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_one_error(config: Config, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        layout_of(config)
    assert str(error.value).startswith(message)


def test_a_pipeline_larger_than_a_node_is_offered_processes_on_several() -> None:
    for processes in (None, 1):
        with pytest.raises(ConfigError) as error:
            layout_of(config_of(8, "local", nodes=2, gpus_per_node=4, processes_per_node=processes))
        said = str(error.value)
        names = ("submit.gpus_per_node=4", "pipeline.nb_part=8", "world.engine=distributed")
        assert all(name in said for name in names)
    assert "\n" not in str(error.value)


def test_a_line_break_in_a_directive_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"account='a.nb' has a line break"):
        script_of(SubmitConfig(account="a\nb"), DIGITS)


@pytest.mark.parametrize("break_", ["\n", "\r", "\x85", "\u2028"])
def test_a_line_break_in_a_name_is_an_error(break_: str) -> None:
    with pytest.raises(ConfigError, match="has a line break: set another one"):
        JobRun(f"a{break_}rm -rf", Path("outputs"), [])


def test_a_task_of_an_array_whose_line_is_missing_does_not_train(slurm: Calls) -> None:
    script = script_of(SubmitConfig(), DIGITS, array=True)
    array = {"SLURM_JOB_ID": 17, "SLURM_ARRAY_JOB_ID": 17, "SLURM_ARRAY_TASK_ID": 99}
    assert run_script(script, array) == 2
    assert slurm("srun") == []


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("10:00", "0:10:00"), ("90:30", "1:30:30"), ("1:30:00", "1:30:00"), ("1-12", "1-12:00:00"),
        ("1-12:30", "1-12:30:00"), ("1-12:30:09", "1-12:30:09"), (600, "0:10:00"),
    ],
)  # fmt: skip
def test_a_time_limit_is_read_as_slurm_writes_it(time: str | int, expected: str) -> None:
    assert directives(script_of(SubmitConfig(time=time), DIGITS))["time"] == expected


def test_dry_run_prints_the_script_and_leaves_nothing(
    slurm: Calls, capfd: pytest.CaptureFixture[str]
) -> None:
    script, _ = submit(capfd, "--dry-run", *DIGITS, "submit.time=1-12:00:00")
    assert directives(script)["time"] == "1-12:00:00"
    assert slurm("sbatch") == []
    assert not Path("outputs").exists()


def test_without_slurm_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    said = fail(capfd, "submit", *DIGITS)
    assert said.startswith("error: there is no sbatch on this machine")
    assert "--dry-run" in said
    assert not Path("outputs").exists()


def test_what_sbatch_refuses_is_one_line(
    slurm: Calls, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SBATCH_CODE", "1")
    monkeypatch.setenv("SBATCH_ERROR", "sbatch: error: invalid partition specified: long")
    said = fail(capfd, "submit", *DIGITS)
    assert said == (
        "error: sbatch rejected outputs/digits/slurm/job.sh: sbatch: error: invalid partition "
        "specified: long\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate"], "--dry-run works with train, submit, not with evaluate"),
        (["-m", "seed=1,2"], "--dry-run works with a single run, not with a sweep"),
    ],
)
def test_dry_run_is_for_train_and_submit_alone(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert message in fail(capfd, *words, *DIGITS, "--dry-run")


def test_a_job_is_submitted_by_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match="without torchrun or srun"):
        send(DIGITS)


def test_nodes_started_by_hand_get_a_torchrun_line(
    slurm: Calls, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = [*DIGITS, "run_name='a b'", "submit.to=torchrun", "submit.nodes=2"]
    lines, _ = submit(capfd, *overrides)
    assert run_script(lines, {"FIRST_NODE": "n1"}) == 0
    (call,) = slurm("torchrun")
    assert trained(call) == overrides
    torchrun = "--nnodes|2|--rdzv-id|a b|--rdzv-backend|c10d|--rdzv-endpoint|n1:29500"
    assert "|".join(call[: call.index("-m")]) == f"{torchrun}|--nproc-per-node|1"
    single, _ = submit(capfd, *DIGITS, "submit.to=torchrun")
    assert "torchrun --standalone --nproc-per-node 1 " in single


def test_the_manifest_for_kubernetes_is_an_indexed_job_with_a_headless_service(
    capfd: pytest.CaptureFixture[str],
) -> None:
    overrides = [
        *DIGITS,
        "run_name=My_run.2",
        "output_dir='${oc.env:PLACE,there}'",
        "submit.to=kubernetes",
        "submit.nodes=2",
        "submit.gpus_per_node=4",
        "submit.mem=64G",
        "submit.setup=['echo \"$HOSTNAME\"']",
        "submit.container={image: 'registry/a:1', mounts: ['my-claim:/data']}",
    ]
    manifest, _ = submit(capfd, *overrides)
    service, job = yaml.safe_load_all(manifest)
    name = service["metadata"]["name"]
    assert name == "my-run-2"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == name
    (container,) = pod["containers"]
    command = container["command"]
    assert "--node-rank=$(JOB_COMPLETION_INDEX)" in command
    assert f"--master-addr={name}-0.{name}" in command
    assert [word.replace("$$", "$") for word in trained(command)] == overrides
    assert command[:2] == ["bash", "-c"]
    assert command[2].replace("$$", "$") == 'echo "$HOSTNAME"\nexec "$@"'
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4, "memory": "64G"}
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/dev/shm", "/data"]
    assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "my-claim"}


def test_the_manifest_has_the_overrides_whatever_is_in_them(
    capfd: pytest.CaptureFixture[str],
) -> None:
    odd = "output_dir='outputs/\U0001f600 \u2028 : # {a} $(HOME)'"
    image = "submit.container={image: x}"
    manifest, _ = submit(capfd, *DIGITS, odd, "submit.to=kubernetes", image)
    _, job = yaml.safe_load_all(manifest)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert odd.replace("$", "$$") in container["command"]


def test_both_recipes_for_a_container_begin_alike() -> None:
    folder = Path(__file__).parents[2] / "container"
    bases = [
        re.findall(r"BASE=(docker\.io\S+)$", (folder / name).read_text(), re.MULTILINE)
        for name in ("Containerfile", "hybridtrain.def")
    ]
    assert bases[0] == bases[1]
    assert len(bases[0]) == 1


def test_a_line_of_a_sweep_ends_where_bash_ends_it(tmp_path: Path) -> None:
    file = tmp_path / "sweep.txt"
    file.write_text("'name=a\x85b\u2028c' seed=0\nseed=1\n")
    assert read_sweep(file) == [["name=a\x85b\u2028c", "seed=0"], ["seed=1"]]


def test_ranges() -> None:
    assert _ranges([1, 2, 3, 7, 9, 10]) == "1-3,7,9-10"
