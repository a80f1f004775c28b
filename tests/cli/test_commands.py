"""The commands evaluate, export and plan, and sweeps."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_runs import LAST, assert_same, contents, fail, metrics, succeed
from omegaconf import OmegaConf
from safetensors.torch import load_file
from support.cases import thinned
from support.checkpoint_files import tensors_in
from support.launch import SMALL

import hybridtrain.data
from hybridtrain import World, models
from hybridtrain.checkpoint import read_manifest, read_tree
from hybridtrain.cli import main
from hybridtrain.cli.run.sweep import run_sweep
from hybridtrain.errors import ConfigError
from hybridtrain.launch import activity, current


def change(run: Path, values: dict[str, Any]) -> None:
    """Changes the config of a run, as if it had begun so."""
    config = OmegaConf.load(run / "config.yaml")
    for group, own in values.items():
        if not isinstance(own, dict):
            config[group] = own
        elif "_target_" in own:
            config[group] = {**own, "batch_size": 32} if group == "data" else own
        else:
            config[group].update(own)
    OmegaConf.save(config, run / "config.yaml")


@pytest.mark.thorough
def test_evaluate_gives_the_values_that_the_run_logged(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(copied)
    by_step = {line["step"]: line for line in metrics(copied) if "eval/loss" in line}
    for step, resume in (
        (6, "auto"),
        (4, "outputs/digits/checkpoints/step_00000004"),
    ):
        said = succeed(capfd, "evaluate", *SMALL, f"resume={resume}")
        assert f"step {step}: " in said
        assert f"loss {by_step[step]['eval/loss']:.4f}" in said
        assert f"accuracy {by_step[step]['eval/accuracy']:.4f}" in said
        assert "(355 samples)" in said
    listed = contents(copied)
    del listed["evaluations.jsonl"]
    assert listed == before


def test_verify_says_that_a_run_is_exact_and_writes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = succeed(capfd, "verify", *SMALL, "pipeline.schedule=zb-h1")
    assert "exact: all numbers are bitwise equal" in said
    assert "in 2 stages (zb-h1, 4 micro-batches, engine local, fp32)" in said
    assert not (tmp_path / "outputs").exists()


def test_verify_ends_with_1_where_a_loss_is_no_mean_over_samples(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("disguised.py").write_text(
        "import torch\n"
        "from torch.nn import functional as F\n"
        "class Loss(torch.nn.Module):\n"
        "    def forward(self, output, targets):\n"
        "        weight = torch.arange(1.0, 11.0)\n"
        "        return F.nll_loss(output, targets, weight=weight)\n"
    )
    arguments = [*SMALL, "allow_targets=[disguised]", "trainer.loss={_target_: disguised.Loss}"]
    assert main(["verify", *arguments, "trainer.metrics=null"]) == 1
    said = capfd.readouterr().err
    assert "NOT EXACT: loss of the whole batch differs by" in said
    assert "MeanLoss(loss_fn, count)" in said


def test_export_writes_the_weights_under_the_names_of_the_model(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = succeed(capfd, "export", *SMALL)
    written = copied / "export" / f"{LAST}.safetensors"
    assert str(written.relative_to(Path.cwd())) in said
    expected = load_file(copied / "checkpoints" / LAST / "model.safetensors")
    net = models.basicnet(num_classes=10, image_size=8, channels=1)
    net.load_state_dict(load_file(written))
    assert_same(dict(net.state_dict()), dict(expected))
    others = copied / "config.yaml"
    assert written.stat().st_mode == others.stat().st_mode


@pytest.mark.thorough
def test_export_needs_nothing_but_the_files_of_the_run(
    copied: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    succeed(capfd, "export", "run_name=digits")
    written = copied / "export" / f"{LAST}.safetensors"
    expected = written.read_bytes()
    written.unlink()
    # no such GPUs, no such code, no such data
    change(copied, {
        "world": {"devices": "cuda", "engine": "distributed", "backend": "nccl"},
        "allow_targets": ["gone"],
        "model": {"_target_": "gone.Model"},
        "data": {"_target_": "gone.data", "root": "/nowhere"},
    })  # fmt: skip
    monkeypatch.setattr(World, "from_env", None)
    succeed(capfd, "export", "run_name=digits")
    assert written.read_bytes() == expected


@pytest.mark.thorough
def test_one_process_evaluates_and_predicts_with_a_run_of_several_processes_and_gpus(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logged = next(line for line in metrics(copied) if line["step"] == 6 and "eval/loss" in line)
    change(copied, {"world": {"devices": "cuda", "engine": "distributed", "backend": "nccl"}})
    said = succeed(capfd, "evaluate", "run_name=digits")
    assert "the run has 2 stages (world.engine=distributed, world.devices=cuda)" in said
    assert "uses 2 stages (world.engine=local, world.devices=cpu)" in said
    assert f"loss {logged['eval/loss']:.4f}  accuracy {logged['eval/accuracy']:.4f}" in said
    assert "wrote predictions.npy" in succeed(
        capfd, "predict", "run_name=digits", "output=predictions.npy"
    )
    # what the command line says stays
    assert "need 2 GPUs, but there are 0" in fail(
        capfd, "evaluate", "run_name=digits", "world.devices=cuda"
    )


def test_predictions_are_in_the_order_of_the_samples(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    succeed(capfd, "predict", "run_name=digits")
    succeed(capfd, "predict", "run_name=digits", "output=there/predictions.npy")
    (lines,) = (copied / "predictions").glob("step_00000006.jsonl")
    found = np.load("there/predictions.npy")
    read = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["sample"] for line in read] == [*range(len(found))]
    assert np.array_equal(found, np.array([line["output"] for line in read], np.float32))
    data = hybridtrain.datasets.digits().eval
    net = models.basicnet(num_classes=10, image_size=8, channels=1).eval()
    net.load_state_dict(load_file(copied / "checkpoints" / LAST / "model.safetensors"))
    inputs, targets = data.__getitems__(range(len(data)))
    with torch.no_grad():
        np.testing.assert_allclose(found, net(inputs).numpy(), rtol=1e-4, atol=1e-5)
    logged = next(line for line in metrics(copied) if line["step"] == 6 and "eval/loss" in line)
    right = (torch.from_numpy(found).argmax(1) == targets).double().mean()
    assert right == pytest.approx(logged["eval/accuracy"])


@pytest.mark.parametrize("name", ["predictions.csv", "predictions"])
@pytest.mark.quick_cases(1)
def test_an_unknown_format_of_predictions_is_said_before_anything_is_loaded(
    name: str, copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = fail(capfd, "predict", "run_name=digits", f"output={name}")
    assert said == f"error: output={name}: the suffix must be .jsonl, .npy or .parquet\n"


@pytest.mark.thorough
def test_commands_take_the_average_that_the_run_was_evaluated_with(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = succeed(capfd, *SMALL, "callbacks=[ema]", "checkpoint.best=loss")
    (logged,) = re.findall(r"step 6/6  eval: (.*)", said)
    raw = succeed(capfd, "evaluate", "run_name=digits", "ema=false")
    assert logged not in raw
    assert "moving average" not in raw
    averaged = succeed(capfd, "evaluate", "run_name=digits")
    assert logged in averaged
    assert "moving average" in averaged
    for ema in ("true", "false"):
        succeed(capfd, "export", "run_name=digits", f"ema={ema}")
        path = tmp_path / f"outputs/digits/export/{LAST}.safetensors"
        path.rename(f"{ema}.safetensors")
    checkpoint = tmp_path / "outputs/digits/checkpoints" / LAST
    weights = tensors_in(checkpoint, "model")
    assert_same(load_file("false.safetensors"), {name: weights[name] for name in sorted(weights)})
    exported = load_file("true.safetensors")
    saved = read_tree(checkpoint, "callbacks", read_manifest(checkpoint)["files"])
    for name, value in exported.items():
        assert torch.equal(value, saved["ema"]["average"][name])
        assert not torch.equal(value, weights[name])
    assert "train does not read ema=" in fail(capfd, "run_name=digits", "ema=false")


def test_data_that_is_gone_is_one_line(copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("gone.py").write_text("def data(root):\n    open(root + '/train.jsonl')\n")
    change(copied, {"data": {"_target_": "gone.data", "root": "/nowhere"}})
    said = fail(capfd, "evaluate", "run_name=digits", "allow_targets=[gone]")
    assert said.startswith("error: the data set gone.data ")
    assert said.endswith("'/nowhere/train.jsonl' (data.root=/nowhere)\n")
    assert said.count("\n") == 1


def test_an_export_that_cannot_be_written_is_one_line(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (copied / "export").write_text("a file where the folder should be")
    assert f"cannot write outputs/digits/export/{LAST}.safetensors: " in fail(
        capfd, "export", *SMALL
    )


def test_a_plan_is_shown_and_written_and_a_run_is_cut_by_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    said = succeed(capfd, "plan", *SMALL, "pipeline.split=balanced", "run_name=planned")
    path = Path("outputs/planned/plan.yaml")
    assert f"wrote {path}; " in said
    assert f"pipeline.split={path};" in said
    assert "forward ms  backward ms" in said
    plan = path.read_text()
    assert re.search(r"^  - \{name: conv1, parameters: 320, forward_ms: \d", plan, re.M)
    # a layer moved by hand
    lines = plan.splitlines()
    first = [i for i, line in enumerate(lines) if line.startswith("- device")][1] - 1
    moved = lines.pop(first)
    second = next(i for i, line in enumerate(lines) if i > first and line == "  layers:")
    lines.insert(second + 1, moved)
    path.write_text("\n".join(lines))
    said = succeed(capfd, *SMALL, f"pipeline.split={path}", "monitor.tensorboard=false")
    name = re.search(r"name: (\w+)", moved)
    assert name is not None
    assert f"{name[1]} ... " in said
    assert f"name: {name[1]}," in Path("outputs/digits/plan.yaml").read_text()
    message = fail(capfd, *SMALL, f"pipeline.split={path}", "pipeline.nb_part=3")
    assert re.search(r"\b2 stages, .*\b3 .*: set pipeline\.nb_part=2 ", message)


def test_one_process_plans_a_pipeline_over_several(capfd: pytest.CaptureFixture[str]) -> None:
    across = ["world.engine=distributed", "pipeline.nb_part=4"]
    said = succeed(capfd, "plan", *SMALL, *across, "run_name=planned")
    assert "4 processes x 4 stages, 1f1b" in said
    assert "planned by one process" in said
    plan = OmegaConf.load("outputs/planned/plan.yaml")
    assert [stage.process for stage in plan.stages] == [0, 1, 2, 3]
    assert len(re.findall(r"^ +\d  not started  cpu$", said, re.M)) == 4
    # training still needs the processes
    message = fail(capfd, *SMALL, *across, "run_name=planned")
    assert "1 process cannot be divided into pipelines of pipeline.nb_part=4 processes" in message


def test_a_new_plan_does_not_replace_that_of_a_run_with_checkpoints(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = (copied / "plan.yaml").read_text()
    said = succeed(capfd, "plan", *SMALL, "pipeline.split=size")
    assert f"wrote {copied.relative_to(Path.cwd())}/plan.new.yaml" in said
    assert (copied / "plan.yaml").read_text() == before


@pytest.mark.parametrize("command", ["evaluate", "export"])
@pytest.mark.quick_cases(1)
def test_a_command_without_its_checkpoint_says_where_it_looked(
    command: str, copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # the data, which does not exist, would be read next
    data = ["data=datasets", "data.path=nowhere.csv", "data.task=classification"]
    message = fail(capfd, command, *SMALL, *data, "run_name=other")
    assert "outputs/other/checkpoints" in message
    assert copied.name in message  # a run that exists
    assert not Path("outputs/other").exists()
    assert "resume=null: set resume=auto" in fail(capfd, command, *SMALL, "resume=null")


@pytest.mark.thorough
def test_multirun_makes_a_run_directory_for_each_combination(
    capfd: pytest.CaptureFixture[str],
) -> None:
    quick = [*SMALL, "monitor.tensorboard=false", "trainer.steps=2"]
    succeed(capfd, "-m", *quick, "optim.lr=1e-3,1e-2")
    names = ["lr_0.001", "lr_0.01"]
    rates = [OmegaConf.load(f"outputs/digits-lr/{name}/config.yaml").optim.lr for name in names]
    assert rates == [1e-3, 1e-2]
    assert sorted(path.name for path in Path().iterdir()) == ["outputs"]
    assert sorted(path.name for path in Path("outputs/digits-lr").iterdir()) == [
        *names,
        "results.csv",
    ]
    said = succeed(capfd, "evaluate", "-m", *quick, "optim.lr=1e-3,1e-2")
    assert (
        len(re.findall(r"outputs/digits-lr/lr_0.0+1/checkpoints/step_00000002, step 2: ", said))
        == 2
    )


@pytest.mark.thorough
def test_a_failed_run_of_a_sweep_is_not_watched_any_more(tmp_path: Path) -> None:
    watched = []

    def run(command: str, settings: object) -> dict[str, object]:
        watched.append((current(), activity.work))
        World.from_env(devices="cpu").watch(tmp_path)
        raise ConfigError("wrong")

    assert run_sweep("plan", ["recipe=digits", "optim.lr=1e-3,1e-2"], None, run) == 2
    assert [*watched, (current(), activity.work)] == [(None, None)] * 3


def test_an_allocation_of_slurm_without_srun_is_no_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    seeds = ["recipe=digits", "seed=1,2"]
    assert run_sweep("plan", seeds, None, lambda *_: {}) == 0
    monkeypatch.setenv("SLURM_PROCID", "1")
    with pytest.raises(ConfigError, match=r"SLURM_NTASKS.* srun "):
        run_sweep("plan", seeds, None, lambda *_: {})
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    with pytest.raises(ConfigError, match="does not work under torchrun or srun"):
        run_sweep("plan", seeds, None, lambda *_: {})


@pytest.mark.parametrize(
    ("swept", "message"),
    thinned(
        [
            ("optim.lrr=1,2", "optim.lrr: .* did you mean optim.lr?"),
            ("recipe=digits,digts", "recipe=digts is unknown: did you mean 'digits'?"),
            (
                "seed=interval(1,2)",
                r"seed=interval\(1,2\): interval\(\) .* seed=1e-4,1e-3",
            ),
            ("optim.lr=", "optim.lr= has no value: write optim.lr=null, or a list of values"),
            ("optim.lr=glob(*)", r"optim.lr=glob\(\*\): .* optim.lr=value1,value2"),
            ("seed=[1", ".*'\\[1'"),
        ],
        2,
    ),
)
@pytest.mark.quick_cases(1)
def test_a_mistake_in_a_sweep_is_reported_before_its_first_run(
    swept: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said = fail(capfd, "-m", *SMALL, swept)
    assert re.match("error: " + message.replace("?", r"\?"), said)
    assert said.count("\n") == 1
    assert not Path("outputs").exists()
