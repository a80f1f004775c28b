"""`submit=` for the centres that have an option: the script of each, and what its job starts.

The scripts run in bash with commands of Slurm's that only record how they were called.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from hybridtrain.cli import main

FOLDER = Path(__file__).parents[2] / "configs" / "submit"
RUN = ["submit", "--dry-run", "recipe=digits", "pipeline.nb_part=1"]


@dataclass(frozen=True)
class Centre:
    """What its documentation asks for: GPUs of a node, CPUs of a GPU, directives, environment."""

    gpus: int
    cpus: int | None
    directives: dict[str, str]
    environment: dict[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()


# LUMI's own masks of a process for each GPU, in the order of the GPUs
LUMI = "fe000000000000,fe00000000000000,fe0000,fe000000,fe,fe00,fe00000000,fe0000000000"
CORES = {"hint": "nomultithread"}
CENTRES = {
    "jean-zay-v100": Centre(4, 10, {"constraint": "v100-32g", **CORES}),
    "jean-zay-a100": Centre(
        8, 8, {"partition": "gpu_p5", "constraint": "a100", **CORES}, modules=("arch/a100",)
    ),
    "jean-zay-h100": Centre(
        4, 24, {"partition": "gpu_p6", "constraint": "h100", **CORES}, modules=("arch/h100",)
    ),
    "juwels-booster": Centre(
        4,
        24,
        {"partition": "booster", "mem": "0"},
        {
            "MASTER_ADDR": "jwb0001i",
            "GLOO_SOCKET_IFNAME": "ib0",
            "NCCL_SOCKET_IFNAME": "ib0",
            "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        },
    ),
    "perlmutter": Centre(
        4, 32, {"constraint": "gpu", "qos": "regular"}, srun=("--cpu-bind=cores",)
    ),
    "lumi-g": Centre(
        8,
        7,
        {"partition": "standard-g", "mem": "480G"},
        {"NCCL_SOCKET_IFNAME": "hsn0,hsn1,hsn2,hsn3", "NCCL_NET_GDR_LEVEL": "PHB"},
        srun=(f"--cpu-bind=mask_cpu:{LUMI}",),
    ),
    "aws-parallelcluster": Centre(
        8,
        None,
        {"exclusive": ""},
        {"FI_EFA_USE_HUGE_PAGE": "0", "NCCL_SOCKET_IFNAME": "en"},
        srun=("--cpu-bind=none",),
    ),
}
# of every job
COMMON = {"job-name", "nodes", "ntasks-per-node", "gres", "signal", "chdir", "output", "open-mode"}
COMMON |= {"requeue", "cpus-per-task"}


def directives(script: str) -> dict[str, str]:
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    pairs = (shlex.split(line)[1].removeprefix("--").partition("=") for line in lines)
    return {option: value for option, _, value in pairs}


def started(script: str, folder: Path, tasks: int) -> tuple[list[str], dict[str, str], list[str]]:
    """Runs the script; returns srun's arguments and environment, and the modules loaded before."""
    answers = {
        "srun": f'printf "%s\\0" "$@" > {folder}/arguments; env -0 > {folder}/environment',
        "module": f'printf "%s\\n" "$@" >> {folder}/modules',
        "scontrol": 'echo "jwb0001"; echo "jwb0002"',
    }
    for name, answer in answers.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{answer}\n")
        path.chmod(0o755)
    of_node = ("CUDA_", "NCCL_", "GLOO_", "MASTER_", "FI_", "MPICH_", "ROCR_", "HIP_")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(of_node)},
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "jwb[0001-0002]",
        "SLURM_NTASKS_PER_NODE": str(tasks),
    }
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    subprocess.run(["bash", "-u"], input=script, text=True, env=environment, check=True)
    pairs = (folder / "environment").read_text().split("\0")[:-1]
    modules = folder / "modules"
    return (
        (folder / "arguments").read_text().split("\0")[:-1],
        dict(pair.split("=", 1) for pair in pairs),
        modules.read_text().split() if modules.exists() else [],
    )


def dry_run(capfd: pytest.CaptureFixture[str], *overrides: str) -> str:
    capfd.readouterr()
    assert main([*RUN, *overrides]) == 0  # the last of two overrides of a key counts
    written = capfd.readouterr()
    assert written.err == ""
    return written.out


def test_every_option_of_submit_is_a_size_or_a_centre_that_is_checked_here() -> None:
    sizes = {"default", "1x4", "2x8", "3x4"}
    assert {path.stem for path in FOLDER.glob("*.yaml")} == sizes | set(CENTRES)


@pytest.mark.parametrize("name", CENTRES)
def test_a_centre_says_which_pages_it_was_checked_against(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    header = text[: text.index("defaults:")]
    assert re.search(r"Checked on|checked on", header)
    assert re.search(r"\d{4}-\d\d-\d\d", header)
    assert re.search(r"<https?://[^\s<>]+>", header)
    assert yaml.safe_load(text)["defaults"] == ["default", "_self_"]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("name", CENTRES)
def test_the_script_asks_for_what_the_centre_documents(
    name: str, nodes: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    centre = CENTRES[name]
    script = dry_run(capfd, f"submit={name}", f"submit.nodes={nodes}")
    found = directives(script)
    assert found["nodes"] == str(nodes)
    assert found["ntasks-per-node"] == str(centre.gpus)
    assert found["gres"] == f"gpu:{centre.gpus}"
    assert found.get("cpus-per-task") == (str(centre.cpus) if centre.cpus else None)
    assert {key: value for key, value in found.items() if key not in COMMON} == centre.directives
    arguments, environment, modules = started(script, tmp_path, centre.gpus)
    assert environment.items() >= centre.environment.items()
    assert modules == (["load", *centre.modules] if centre.modules else [])
    cpus = (f"--cpus-per-task={centre.cpus}",) if centre.cpus else ()
    own = tuple(word.replace("0x", "") for word in arguments[: arguments.index("train") - 3])
    assert own == ("--kill-on-bad-exit=1", *cpus, *centre.srun)


@pytest.mark.parametrize("name", CENTRES)
def test_a_process_of_two_gpus_has_the_cpus_of_two(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    centre = CENTRES[name]
    found = directives(dry_run(capfd, f"submit={name}", "pipeline.nb_part=2"))
    assert found["ntasks-per-node"] == str(centre.gpus // 2)
    assert found.get("cpus-per-task") == (str(2 * centre.cpus) if centre.cpus else None)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_a_process_of_several_gpus_on_lumi_has_the_cores_next_to_each_of_them(
    gpus: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = dry_run(capfd, "submit=lumi-g", f"pipeline.nb_part={gpus}")
    arguments, _, _ = started(script, tmp_path, 8 // gpus)
    (binding,) = [word for word in arguments if word.startswith("--cpu-bind=mask_cpu:")]
    masks = [int(mask, 16) for mask in LUMI.split(",")]
    of_processes = [sum(masks[start : start + gpus]) for start in range(0, 8, gpus)]
    assert [int(mask, 16) for mask in binding.partition(":")[2].split(",")] == of_processes


def test_account_qos_constraint_and_modules_are_keys(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = ["submit.account=abc@h100", "submit.qos=qos_gpu_h100-t3", "submit.constraint=null"]
    modules = "submit.modules=[arch/h100,pytorch-gpu/py3/2.8.0]"
    script = dry_run(capfd, "submit=jean-zay-h100", *own, modules, "submit.cpus_per_task=6")
    found = directives(script)
    assert (found["account"], found["qos"]) == ("abc@h100", "qos_gpu_h100-t3")
    assert "constraint" not in found
    assert found["cpus-per-task"] == "6"  # before cpus_per_gpu
    assert started(script, tmp_path, 4)[2] == ["load", "arch/h100", "pytorch-gpu/py3/2.8.0"]


@pytest.mark.parametrize("name", CENTRES)
@pytest.mark.quick_cases("lumi-g")
def test_the_command_as_typed_prints_the_script(name: str, tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("hybridtrain")
    words = [*RUN, f"submit={name}", "submit.nodes=2", "submit.account=project"]
    done = subprocess.run(
        [command, *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert directives(done.stdout)["account"] == "project"
    assert list(tmp_path.iterdir()) == []
