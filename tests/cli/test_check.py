"""`check` and `submit --check`: planted errors are found in one run, and none in a good job."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridtrain.cli import main

NETS = """
import torch
from torch import nn

def narrow():
    return nn.Sequential(nn.Flatten(), nn.Linear(60, 10), nn.ReLU(), nn.Linear(10, 10))

def normed():
    norm = nn.BatchNorm1d(32)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), norm, nn.ReLU(), nn.Linear(32, 10))
"""

DIGITS = ["recipe=digits"]
TEXT = ["recipe=gpt_text_files", "data.path=book.txt", "model.vocab_size=null"]
CLASSES = "trainer.loss=cross_entropy"


def net(name: str) -> list[str]:
    """Returns the overrides of a run with one of `NETS`."""
    allowed = ["allow_targets=[planted_nets]", f"model._target_=planted_nets.{name}"]
    return [*DIGITS, *allowed, CLASSES]


# What a user types, the part that finds the error, and words of its line.
PLANTED: dict[str, tuple[list[str], str, str]] = {
    "unknown key": ([*DIGITS, "submit.acount=me"], "config", "did you mean submit.account"),
    "key of the optimizer": ([*DIGITS, "optim.lrr=1"], "config", "optim.lrr"),
    "loss": ([*DIGITS, "trainer.loss=cross_entopy"], "loss", "did you mean 'cross_entropy'"),
    "metric": ([*DIGITS, "trainer.metrics=[acuracy]"], "metrics", "did you mean 'accuracy'"),
    "callback": ([*DIGITS, "callbacks=[emma]"], "callbacks", "emma"),
    "schedule": ([*DIGITS, "pipeline.schedule=1f1c"], "pipeline", "did you mean '1f1b'"),
    "schedule that does not fit": (
        [*DIGITS, "pipeline.schedule=zb-v", "pipeline.stages_per_device=1"],
        "schedule",
        "zb-v",
    ),
    "devices that cannot be divided": (
        [*DIGITS, "submit.gpus_per_node=3"],
        "processes",
        "submit.gpus_per_node=3 is not a multiple of pipeline.nb_part=2",
    ),
    "too many processes": (
        [*DIGITS, "submit.gpus_per_node=4", "submit.processes_per_node=3"],
        "processes",
        "need 6 GPUs",
    ),
    "too few logical replicas": (
        [*DIGITS, "submit=2x8", "world.replicas=2"],
        "devices",
        "world.replicas=2 is less than the 8 copies",
    ),
    "list of devices": (
        [*DIGITS, "submit=2x8", "world.devices=[cuda:0,cuda:9]"],
        "devices",
        "cuda:9 does not exist",
    ),
    "port": ([*DIGITS, "submit=2x8"], "ports", "MASTER_PORT=http is not a port"),
    "run directory": ([*DIGITS, "output_dir=book.txt"], "run directory", "book.txt is a file"),
    "batch smaller than replicas": (
        [*DIGITS, "submit=2x8", "data.batch_size=4"],
        "batches",
        "data.batch_size=4 is less than one sample per replica (8 replicas)",
    ),
    "drop_last leaves nothing": (
        [*DIGITS, "submit=2x8", "data.batch_size=2000", "data.drop_last=true"],
        "batches",
        "less than one batch of data.batch_size=2000",
    ),
    "last batch": (
        [*net("normed"), "data.batch_size=131", "pipeline.chunks=1"],
        "messages",
        "layer '2', micro-batch of 1 sample fails",
    ),
    "missing data": (
        ["recipe=gpt_text_files", "data.path=nothing.txt"],
        "data",
        "data.path=nothing.txt",
    ),
    "missing tokenizer": (
        [*TEXT, "data.tokenizer=./nothing/tokenizer.json"],
        "data",
        "tokenizer",
    ),
    "missing checkpoint": ([*DIGITS, "resume=nothing"], "checkpoint", "resume=nothing"),
    "missing weights": (
        [*DIGITS, "init_from=nothing.safetensors"],
        "init_from",
        "init_from=nothing.safetensors: no such file",
    ),
    "weights without a path": (
        [*DIGITS, "init_from={path:null}"],
        "init_from",
        "init_from.path is not set",
    ),
    "single key": ([*DIGITS, "world.timeout_s=0"], "keys", "world.timeout_s=0"),
    "other classes": ([*DIGITS, "model.num_classes=4"], "model", "model.num_classes=4 does not"),
    "model for other inputs": (net("narrow"), "messages", "layer '1'"),
    "split": ([*DIGITS, "pipeline.split=[5,5]"], "plan", "5"),
    "more stages than layers": ([*DIGITS, "pipeline.nb_part=40"], "plan", "40"),
    "recomputed layer": ([*DIGITS, "pipeline.recompute=[nothing]"], "plan", "nothing"),
    "plan for other devices": (
        [*DIGITS, "pipeline.nb_part=4", "pipeline.split=two.yaml"],
        "plan",
        "the plan has 2 stages, but 4 are requested",
    ),
    "schedule for other devices": (
        [*DIGITS, "pipeline.nb_part=4", "pipeline.schedule=two.yaml"],
        "schedule",
        "is a table for 2 devices",
    ),
    "memory": (
        [*DIGITS, "submit=2x8", "pipeline.memory_limit_gib=0.0002"],
        "memory",
        "(pipeline.memory_limit_gib=0.0002)",
    ),
}


@pytest.fixture(autouse=True)
def slurm_that_does_not_respond(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Hides this machine's Slurm, if it has one, behind commands that fail."""
    bin_folder = tmp_path_factory.mktemp("bin")
    put_slurm(bin_folder, sbatch="exit 1", scontrol="exit 1")
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")


def put_slurm(bin_folder: Path, **scripts: str) -> None:
    """Writes commands of Slurm, each a line of bash."""
    for name, script in scripts.items():
        (bin_folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (bin_folder / name).chmod(0o755)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder: a text, a plan for two devices, and a module of nets."""
    Path("book.txt").write_text("A fine day. " * 1000)
    Path("planted_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(sys.modules, "planted_nets", raising=False)
    return Path.cwd()


def checked(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, str], str]:
    """Runs a check; returns its exit code, the lines of each part as one, and the last line."""
    capfd.readouterr()
    code = main(words)
    *lines, last = capfd.readouterr().out.splitlines()
    parts: dict[str, str] = {}
    for line in lines:
        match = re.fullmatch(r"(\S.{12})  (ok|problem|not checked) *(.*)", line)
        assert match, line
        name, before = match[1].strip(), parts.get(match[1].strip())
        parts[name] = f"{before}; {match[2]}: {match[3]}" if before else f"{match[2]}: {match[3]}"
    return code, parts, last


@pytest.mark.parametrize("case", PLANTED)
@pytest.mark.quick_cases("batch smaller than replicas", "missing checkpoint")
def test_a_planted_error_is_found_and_nothing_is_written(
    case: str, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, part, text = PLANTED[case]
    if case == "port":
        monkeypatch.setenv("MASTER_PORT", "http")
    if "two.yaml" in " ".join(words):
        assert main(["plan", *DIGITS, "world.devices=cpu", "run_name=two"]) == 0
        (folder / "outputs" / "two" / "plan.yaml").rename(folder / "two.yaml")
    before = sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    code, parts, last = checked(capfd, "submit", "--check", *words)
    assert code == 2, parts
    assert parts[part].startswith("problem: "), parts
    assert text in parts[part]
    assert last.startswith("1 problem")
    assert sorted(p for p in folder.rglob("*") if "__pycache__" not in p.parts) == before


def test_all_problems_are_found_in_one_run(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["submit.gpus_per_node=3", "trainer.loss=nothing", "resume=nothing"]
    words += ["optim.lr_=1", "trainer.x=1"]
    code, parts, last = checked(capfd, "submit", "--check", *DIGITS, *words)
    assert code == 2
    problems = {name for name, verdict in parts.items() if verdict.startswith("problem")}
    assert problems == {"config", "loss", "processes", "checkpoint"}
    assert parts["config"].endswith("without optim.lr_=1 trainer.x=1")
    assert last.startswith("5 problems")
    assert parts["memory"].startswith("not checked: depends on: ")


def test_more_processes_than_gpus_are_no_problem_if_they_may_share(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words, part, _ = PLANTED["too many processes"]
    _, parts, _ = checked(capfd, "check", *words, "world.share_gpus=true")
    assert parts[part].startswith("ok")
    assert parts["devices"].startswith("ok")


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["shorter file", "other model", "other weights"])
def test_a_checkpoint_that_does_not_fit_is_found(
    case: str, folder: Path, copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if case == "shorter file":
        (file,) = copied.glob("checkpoints/step_00000006/model*.safetensors")
        file.write_bytes(file.read_bytes()[:-1])
        _, parts, _ = checked(capfd, "check", "run_name=digits")
        assert re.search(r"model.* bytes ", parts["checkpoint"])
    elif case == "other model":
        _, parts, _ = checked(capfd, "check", *net("normed"), "run_name=x", f"resume={copied}")
        assert "another model" in parts["weights"]
    else:
        _, parts, _ = checked(capfd, "check", *net("normed"), "run_name=x", f"init_from={copied}")
        assert f"init_from={copied}" in parts["weights"]
    part = "checkpoint" if case == "shorter file" else "weights"
    assert parts[part].startswith("problem: ")


GOOD = [
    [recipe, size, f"world.engine={engine}"]
    for recipe in ("recipe=digits", "recipe=python_source_gpt")
    for size in ("submit=2x8", "submit=3x4")
    for engine in ("distributed", "local")
]


@pytest.mark.parametrize("words", GOOD, ids=" ".join)
@pytest.mark.quick_cases(1)
def test_no_problem_is_found_in_a_good_job(
    words: Sequence[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, parts, last = checked(capfd, "submit", "--check", *words, "hardware=h100")
    assert code == 0, parts
    assert last.startswith("no problems found")
    assert {name for name, text in parts.items() if not text.startswith("ok")} <= {"sbatch"}
    assert "sends match receives" in parts["order"] or "local" in words[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_a_run_goes_on_from_the_checkpoint_that_was_checked(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, parts, _ = checked(capfd, "check", "run_name=digits")
    assert code == 0, parts
    assert "step_00000006, step 6" in parts["checkpoint"]
    assert "tensors of the checkpoint fit the model" in parts["weights"]


@pytest.mark.parametrize(
    ("sbatch", "scontrol", "verdict"),
    [
        pytest.param(0, 0, "ok", marks=pytest.mark.thorough),
        pytest.param(1, 0, "problem", marks=pytest.mark.thorough),
        (1, 1, "not checked"),  # installed, but no controller responds
    ],
)
def test_slurm_checks_the_script_without_a_job_unless_it_does_not_respond(
    sbatch: int,
    scontrol: int,
    verdict: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    script = f'echo "$@" > called; cat > script; echo "Invalid account" >&2; exit {sbatch}'
    put_slurm(bin_folder, sbatch=script, scontrol=f"exit {scontrol}")
    monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin")
    code, parts, _ = checked(capfd, "submit", "--check", *DIGITS, "submit=2x8", "submit.account=x")
    assert Path("called").read_text() == "--test-only\n"
    assert "#SBATCH --account=x" in Path("script").read_text()
    assert parts["sbatch"].startswith(f"{verdict}: ")
    assert code == (2 if verdict == "problem" else 0)
    assert ("Invalid account" in parts["sbatch"]) == (verdict != "ok")


def test_check_goes_with_submit_only(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe=digits", "--check"]) == 2
    assert "--check works with submit, not with train" in capfd.readouterr().err
    assert main(["submit", "recipe=digits", "optim.lr=1,2", "--multirun", "--check"]) == 2
    assert "--check works with a single run" in capfd.readouterr().err
