"""Whole runs in this process: what they leave on disk and on the terminal, and how they go on."""

import json
import math
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_launch import SMALL, logging_as_before
from omegaconf import OmegaConf
from safetensors.torch import load_file
from small_data import write_imdb, write_mnist

from hybridtrain import models
from hybridtrain.app.cli import main
from hybridtrain.app.compose import compose_config
from hybridtrain.app.config import Config
from hybridtrain.model import HybridModel

LAST = "step_00000006"
# What a second run on the same machine may have different.
MEASURED = ("time", "train/samples_per_second", "train/step_ms", "pipeline/", "stage")


def succeed(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that must end well, and returns what it wrote to the terminal."""
    capfd.readouterr()
    code = main(arguments)
    written = capfd.readouterr()
    assert code == 0, written.err
    assert written.out == ""
    return written.err


def fail(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that must end with a message and no traceback, and returns the message."""
    capfd.readouterr()
    code = main(arguments)
    err = capfd.readouterr().err
    assert code == 2, err
    assert "Traceback" not in err
    return err[err.index("error: ") :]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def learned(run: Path) -> list[dict[str, Any]]:
    """The lines of the metrics without what was measured."""
    return [
        {key: value for key, value in line.items() if not key.startswith(MEASURED)}
        for line in metrics(run)
    ]


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Bitwise equal weights and optimizer states, and the same place in the run."""
    for name in ("model.pt", "optimizer.pt"):
        assert_same(torch.load(one / name), torch.load(other / name))
    assert json.loads((one / "state.json").read_text()) == json.loads(
        (other / "state.json").read_text()
    )


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, Mapping):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, Sequence) and not isinstance(one, str):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` but the logs, which every command writes to."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "logs"
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of six steps that nothing interrupted; read it, copy it, leave it."""
    outputs = tmp_path_factory.mktemp("outputs")
    with pytest.MonkeyPatch.context() as patch, logging_as_before():
        for key in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
            patch.delenv(key, raising=False)
        assert main([*SMALL, f"output_dir={outputs}"]) == 0
    return outputs / "digits"


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run at outputs/digits, where the same command line looks for it."""
    return Path(shutil.copytree(finished, tmp_path / "outputs" / "digits"))


# What a run leaves behind --------------------------------------------------------------------


def test_config_yaml_is_the_resolved_config_and_overrides_yaml_the_command_line(
    finished: Path,
) -> None:
    asked = [*SMALL, f"output_dir={finished.parent}"]
    assert OmegaConf.to_object(OmegaConf.load(finished / "overrides.yaml")) == asked
    loaded = OmegaConf.load(finished / "config.yaml")
    assert OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), loaded)) == (
        compose_config(asked)
    )


def test_metrics_jsonl_has_a_line_for_each_logged_step_and_each_evaluation(finished: Path) -> None:
    lines = metrics(finished)
    training = [line for line in lines if "train/loss" in line]
    evaluations = [line for line in lines if "eval/loss" in line]
    assert [line["step"] for line in training] == [2, 4, 6]
    assert [line["step"] for line in evaluations] == [4, 6]
    for line in training:
        for tag in ("train/loss", "train/lr", "train/grad_norm", "train/samples_per_second"):
            assert line[tag] > 0
    # the recipe's warm-up over 20 steps, at the steps 1, 3 and 5 counted from 0
    assert [line["train/lr"] for line in training] == pytest.approx(
        [3e-3 * (1 + step) / 21 for step in (1, 3, 5)]
    )


def test_summary_json_keeps_its_contract(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["samples"] == 6 * 32
    assert summary["train_loss"] == metrics(finished)[-2]["train/loss"]
    assert summary["eval"]["samples"] == 355  # every held-out digit once
    assert summary["eval"]["loss"] == metrics(finished)[-1]["eval/loss"]
    assert 0 <= summary["eval"]["accuracy"] <= 1
    assert summary["eval"]["accuracy"] * 355 == pytest.approx(
        round(summary["eval"]["accuracy"] * 355)
    )
    assert summary["samples_per_second"] > 0
    assert 0 < summary["step_ms"]["p50"] <= summary["step_ms"]["p95"]
    assert 0 <= summary["bubble_fraction"] < 1
    world = {"processes": 1, "nb_part": 2, "engine": "local", "backend": "gloo"}
    assert summary["world"] == world
    assert summary["checkpoint"] == str(finished / "checkpoints" / LAST)
    assert summary["resumed_from"] is None

    net = models.basicnet(num_classes=10, image_size=8, channels=1)
    assert len(summary["stages"]) == 2
    layers = [name for stage in summary["stages"] for name in stage["layers"]]
    assert layers == [name for name, _ in net.named_children()]
    parameters = sum(parameter.numel() for parameter in net.parameters())
    assert sum(stage["parameters"] for stage in summary["stages"]) == parameters
    for stage in summary["stages"]:
        assert stage["layers"]
        assert stage["forward_ms"] > 0
        assert stage["backward_ms"] > 0
        # weights, gradients and the two moments of Adam
        assert stage["peak_memory_bytes"] >= 4 * 4 * stage["parameters"]
        assert isinstance(stage["peak_memory_bytes"], int)


def test_tensorboard_has_every_curve_and_the_config_as_text(finished: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished / "tensorboard"))
    events.Reload()
    scalars = set(events.Tags()["scalars"])
    assert scalars >= {
        *(f"train/{name}" for name in ("loss", "lr", "grad_norm", "samples_per_second", "step_ms")),
        *(f"stage{i}/{name}" for i in (0, 1) for name in ("forward_ms", "backward_ms")),
        *(f"stage{i}/memory_bytes" for i in (0, 1)),
        "eval/accuracy",
        "eval/loss",
    }
    assert [point.step for point in events.Scalars("train/loss")] == [2, 4, 6]
    assert [point.step for point in events.Scalars("eval/accuracy")] == [4, 6]
    texts = [
        event.tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
        for event in events.Tensors(tag)
    ]
    assert any("nb_part: 2" in text and "T_max: null" in text for text in texts)


def test_the_terminal_shows_the_layout_the_progress_and_where_the_run_is(
    capfd: pytest.CaptureFixture[str],
) -> None:
    said = succeed(capfd, *SMALL, "monitor.tensorboard=false")
    assert said.count("1 process x 2 stages") == 1
    assert re.search(
        r"^ +0 +6 +[\d,]+ +[\d.]+ [KM]iB +\d+% +cpu +conv1 \.\.\. dropout1$", said, re.M
    )
    assert re.search(r"^ +0 +\S+ +cpu cpu$", said, re.M)
    steps = re.findall(
        r"^step (\d)/6  loss [\d.]+  [\d,.]+ samples/s  lr \S+  left \S+$", said, re.M
    )
    assert steps == ["2", "4", "6"]
    assert re.findall(r"^step (\d)/6  eval: loss \S+  accuracy \S+$", said, re.M) == ["4", "6"]
    here = Path("outputs/digits")
    accuracy = json.loads((here / "summary.json").read_text())["eval"]["accuracy"]
    assert f"accuracy {accuracy:.4f}\nrun directory: {here.resolve()}\n" in said
    assert f"tensorboard --logdir {here}/tensorboard" in said
    logged = (here / "logs" / "rank_000.log").read_text()
    assert logged.count("1 process x 2 stages") == 1
    assert f"run directory: {here.resolve()}" in logged
    assert not (here / "tensorboard").exists()


def test_checkpoint_keep_and_every_steps_say_what_stays(capfd: pytest.CaptureFixture[str]) -> None:
    quick = [*SMALL, "monitor.tensorboard=false", "trainer.steps=3", "checkpoint.every_steps=1"]
    succeed(capfd, *quick, "checkpoint.keep=2")
    kept = sorted(path.name for path in Path("outputs/digits/checkpoints").iterdir())
    assert kept == ["step_00000002", "step_00000003"]
    succeed(capfd, *quick, "run_name=none", "checkpoint.every_steps=0")
    assert not Path("outputs/none/checkpoints").exists()
    assert json.loads(Path("outputs/none/summary.json").read_text())["checkpoint"] is None


def test_an_epoch_is_every_sample_once(capfd: pytest.CaptureFixture[str]) -> None:
    by_epochs = ["trainer.steps=null", "trainer.epochs=2", "data.batch_size=500"]
    succeed(capfd, *SMALL, "monitor.tensorboard=false", *by_epochs)
    summary = json.loads(Path("outputs/digits/summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (6, 2 * 1442)  # a ragged last batch of 442


# Going on ------------------------------------------------------------------------------------


def test_a_run_that_broke_off_goes_on_as_if_it_had_not(
    finished: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = HybridModel.train_step, []

    def fail_in_the_sixth_step(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("the power went")
        return step(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(HybridModel, "train_step", fail_in_the_sixth_step)
        assert main(SMALL) == 1
    assert "the power went" in capfd.readouterr().err
    run = Path("outputs/digits")
    assert not (run / "summary.json").exists()

    said = succeed(capfd, *SMALL)
    assert "resumed from outputs/digits/checkpoints/step_00000004, at step 4 of 6" in said
    assert_same_checkpoint(run / "checkpoints" / LAST, finished / "checkpoints" / LAST)
    assert learned(run) == learned(finished)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["resumed_from"] == "outputs/digits/checkpoints/step_00000004"
    assert summary["samples"] == 6 * 32


def test_a_run_can_start_from_the_checkpoint_of_another(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start = finished / "checkpoints" / "step_00000002"
    succeed(capfd, *SMALL, f"resume={start}", "run_name=second", "pipeline.nb_part=3")
    summary = json.loads(Path("outputs/second/summary.json").read_text())
    assert summary["resumed_from"] == str(start)
    assert summary["world"]["nb_part"] == 3
    last = Path("outputs/second/checkpoints") / LAST
    weights, expected = (
        torch.load(p / "model.pt") for p in (last, finished / "checkpoints" / LAST)
    )
    assert list(weights) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor)


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ("null", "resume=null would start anew over the checkpoints in outputs/digits/checkpoints"),
        ("outputs/nowhere", "resume=outputs/nowhere: there is no such checkpoint directory"),
        ("outputs/digits/checkpoints/step_00000002", "has later checkpoints, up to step 6"),
        ("outputs/digits/logs", "outputs/digits/logs is not a checkpoint"),
    ],
)
def test_a_resume_that_would_lose_or_mix_checkpoints_is_refused(
    resume: str, message: str, copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(copied)
    assert message in fail(capfd, *SMALL, "trainer.steps=8", f"resume={resume}")
    assert contents(copied) == before


def test_a_restart_by_torchrun_goes_on_from_the_newest_and_not_from_where_it_began(
    copied: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    start = "resume=outputs/digits/checkpoints/step_00000002"
    said = succeed(capfd, *SMALL, "trainer.steps=7", start)
    assert "resumed from outputs/digits/checkpoints/step_00000006, at step 6 of 7" in said


def test_a_complete_run_says_so_and_keeps_what_it_wrote(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(copied)
    said = succeed(capfd, *SMALL)
    assert "the run is complete at step 6" in said
    accuracy = json.loads(before["summary.json"])["eval"]["accuracy"]
    assert f"accuracy {accuracy:.4f}" in said
    assert contents(copied) == before


def test_another_model_does_not_load_and_nothing_is_lost(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(copied)
    message = fail(capfd, *SMALL, "trainer.steps=8", "model.num_classes=11")
    assert "fc2.weight is [10, 128] there and [11, 128] in the model" in message
    assert contents(copied) == before


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    finished: Path, copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flip_a_byte(copied / "checkpoints" / LAST / "model.pt")
    said = succeed(capfd, *SMALL)
    assert (
        "skipping a damaged checkpoint: outputs/digits/checkpoints/step_00000006/model.pt" in said
    )
    assert "resumed from outputs/digits/checkpoints/step_00000004, at step 4 of 6" in said
    assert_same_checkpoint(copied / "checkpoints" / LAST, finished / "checkpoints" / LAST)
    assert learned(copied) == learned(finished)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew_by_itself(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (copied / "checkpoints").iterdir():
        flip_a_byte(path / "model.pt")
    before = contents(copied)
    assert "none of the checkpoints in outputs/digits/checkpoints is intact" in fail(capfd, *SMALL)
    assert contents(copied) == before


# The other commands --------------------------------------------------------------------------


def test_evaluate_gives_the_figures_of_the_run(
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
    assert contents(copied) == before


def test_export_writes_the_weights_under_the_names_of_the_model(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = succeed(capfd, "export", *SMALL)
    written = copied / "export" / f"{LAST}.safetensors"
    assert str(written.relative_to(Path.cwd())) in said
    expected = torch.load(copied / "checkpoints" / LAST / "model.pt")
    net = models.basicnet(num_classes=10, image_size=8, channels=1)
    net.load_state_dict(load_file(written))
    assert_same(dict(net.state_dict()), dict(expected))
    others = copied / "config.yaml"
    assert written.stat().st_mode == others.stat().st_mode


def test_a_plan_is_shown_and_written_and_a_run_cuts_by_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    said = succeed(capfd, "plan", *SMALL, "pipeline.split=balanced", "run_name=planned")
    path = Path("outputs/planned/plan.yaml")
    assert f"wrote {path}; to train with it: pipeline.split={path}" in said
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
    assert "the plan has 2 stages, and 3 are asked for: set pipeline.nb_part=2" in message


def test_a_plan_for_a_run_that_has_begun_leaves_its_own_in_place(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = (copied / "plan.yaml").read_text()
    said = succeed(capfd, "plan", *SMALL, "pipeline.split=size")
    assert f"wrote {copied.relative_to(Path.cwd())}/plan.new.yaml" in said
    assert (copied / "plan.yaml").read_text() == before


def test_a_measured_run_goes_on_with_another_split_as_if_it_had_never_stopped(
    capfd: pytest.CaptureFixture[str],
) -> None:
    constant = [*SMALL, "monitor.tensorboard=false", "lr_schedule=constant"]
    parts = [*constant, "run_name=parts"]
    succeed(capfd, *constant, "run_name=whole")
    succeed(capfd, *parts, "trainer.steps=2", "pipeline.split=time")
    plan = Path("outputs/parts/plan.yaml").read_text()
    succeed(capfd, *parts, "trainer.steps=4", "pipeline.split=time")
    assert Path("outputs/parts/plan.yaml").read_text() == plan  # it was not measured again
    succeed(capfd, *parts, "pipeline.split=[1,11]")
    assert Path("outputs/parts/plan.yaml").read_text() != plan
    ours = torch.load(f"outputs/parts/checkpoints/{LAST}/model.pt")
    theirs = torch.load(f"outputs/whole/checkpoints/{LAST}/model.pt")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_a_command_that_needs_a_checkpoint_says_where_it_looked(
    command: str, copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    message = fail(capfd, command, *SMALL, "run_name=other")
    assert "there is no checkpoint in outputs/other/checkpoints: train first" in message
    assert not Path("outputs/other").exists()
    assert "resume=null: set it to auto" in fail(capfd, command, *SMALL, "resume=null")


def test_multirun_makes_a_run_directory_for_each_combination(
    capfd: pytest.CaptureFixture[str],
) -> None:
    quick = [*SMALL, "monitor.tensorboard=false", "trainer.steps=2"]
    succeed(capfd, "-m", *quick, "optim.lr=1e-3,1e-2")
    names = ["digits-optim.lr=0.001", "digits-optim.lr=0.01"]
    rates = [OmegaConf.load(f"outputs/{name}/config.yaml").optim.lr for name in names]
    assert rates == [1e-3, 1e-2]
    assert sorted(path.name for path in Path().iterdir()) == ["outputs"]
    assert sorted(path.name for path in Path("outputs").iterdir()) == names
    said = succeed(capfd, "evaluate", "-m", *quick, "optim.lr=1e-3,1e-2")
    assert (
        len(re.findall(r"outputs/digits-optim.lr=0.0+1/checkpoints/step_00000002, step 2: ", said))
        == 2
    )


@pytest.mark.parametrize(
    ("swept", "message"),
    [
        ("optim.lrr=1,2", "optim.lrr: .* did you mean optim.lr?"),
        ("recipe=digits,digts", "recipe=digts: .* did you mean recipe=digits?"),
        ("seed=interval(1,2)", ".*INTERVAL_SWEEP"),
        ("seed=[1", ".*'\\[1'"),
    ],
)
def test_a_mistake_in_a_sweep_ends_it_before_its_first_run(
    swept: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said = fail(capfd, "-m", *SMALL, swept)
    assert re.match("error: " + message.replace("?", r"\?"), said)
    assert said.count("\n") == 1
    assert not Path("outputs").exists()


# What cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pipeline.nb_part=13"], "12 layers cannot be cut into 13 stages: lower pipeline.nb_part"),
        (["pipeline.split=[3,4]"], "pipeline.split=[3, 4]: layer counts must"),
        (["world.devices=[cpu,cpu,cpu]"], "world.devices names 3 devices"),
        (["world.devices=cuda"], "need 2 GPUs, and there are 0"),
        (["world.backend=mpi"], "world.backend=mpi is not there"),
        (["model.image_size=3"], "model.image_size=3 is too small"),
        (["output_dir=in_the_way"], "cannot write to the run directory in_the_way/digits: Not a"),
        (["data=mnist", "data.root=empty"], "hybridtrain recipe=mnist_basicnet data.download=true"),
        (
            ["data=imdb", "data.root=empty"],
            "hybridtrain recipe=imdb_transformer data.download=true",
        ),
    ],
)
def test_what_cannot_be_is_one_message_that_names_the_key_or_path(
    overrides: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    Path("in_the_way").touch()
    said = fail(capfd, *SMALL, *overrides)
    assert message in said
    if "data.root=empty" in overrides:
        assert str(Path("empty").resolve()) in said  # where it looked
        command = re.search(r"hybridtrain (recipe=.*data.download=true.*)", said)
        assert command is not None
        data = compose_config(shlex.split(command[1])).data
        assert (data["root"], data["download"]) == ("empty", True)  # it fetches what was missing
    assert not list(Path().glob("outputs/*/metrics.jsonl"))


def test_an_error_in_the_users_model_names_the_layer_the_stage_and_the_micro_batch(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "model.image_size=10"]) == 1
    said = capfd.readouterr().err
    assert said.count("shapes cannot be multiplied") == 1
    assert "in layer 'fc1', which was given float32[8, 256]" in said
    assert "micro-batch 0 on stage 1" in said


# The recipes -----------------------------------------------------------------------------------

TINY = {
    "digits": [],
    "mnist_basicnet": ["data.root=data"],
    "imdb_transformer": [
        *("data.root=data", "data.max_len=32", "model.d_model=16", "model.d_hid=16"),
        "model.nhead=2",
    ],
    "python_source_gpt": [
        *("data.seq_len=32", "data.max_bytes=20000", "data.eval_bytes=2000"),
        *("model.d_model=16", "model.n_head=2"),
    ],
}


@pytest.mark.parametrize("recipe", TINY)
def test_every_recipe_trains_a_few_steps_on_small_data(
    recipe: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if recipe == "mnist_basicnet":
        write_mnist("data", n_train=48, n_test=20)
    if recipe == "imdb_transformer":
        pytest.importorskip("torchtext")
        write_imdb("data", n=40)
    few = ["trainer.epochs=null", "trainer.steps=3", "trainer.log_every=1", "data.batch_size=16"]
    cpu = ["world.devices=cpu", "monitor.tensorboard=false"]
    said = succeed(capfd, f"recipe={recipe}", *few, *cpu, *TINY[recipe])
    run = Path("outputs") / recipe
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["world"]["nb_part"] == len(summary["stages"]) == 2
    losses = [line["train/loss"] for line in metrics(run) if "train/loss" in line]
    classes = {"imdb_transformer": 2, "python_source_gpt": 256}.get(recipe, 10)
    assert len(losses) == 3
    # untrained, a model knows about as much as one that guesses
    assert losses[0] == pytest.approx(math.log(classes), rel=0.5)
    assert summary["eval"]["samples"] > 0
    assert 0 <= summary["eval"]["accuracy"] <= 1
    assert (run / "checkpoints" / "step_00000003").is_dir()
    assert "1 process x 2 stages" in said


def test_a_plan_is_measured_anew_if_anything_of_the_pipeline_has_changed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = [*SMALL, "monitor.tensorboard=false", "pipeline.split=balanced"]
    succeed(capfd, *run, "trainer.steps=2")
    assert "cut as in outputs/digits/plan.yaml" in succeed(capfd, *run, "trainer.steps=4")
    said = succeed(capfd, *run, "pipeline.memory_weight=0.9")
    assert "measured anew: pipeline.memory_weight is not what it was in this run" in said


def test_another_model_is_told_that_the_run_is_not_its_own_and_not_that_the_plan_does_not_fit(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = [*SMALL, "monitor.tensorboard=false", "pipeline.split=time", "pipeline.nb_part=2"]
    succeed(capfd, *run, "trainer.steps=2")
    said = fail(capfd, *run, "model=torchvision", "model.name=squeezenet1_1", "model.resize=32")
    assert "is of another model" in said
    assert "start a new run" in said
