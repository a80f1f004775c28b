"""The words of a command line: flags, commands, names of runs, sweeps, and messages."""

import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from cli_runs import fail, succeed
from omegaconf import OmegaConf
from support.launch import SMALL, environment

import hybridtrain
from hybridtrain.cli import main
from hybridtrain.cli.config import targets as instantiate
from hybridtrain.cli.config.compose import compose_config, compose_settings
from hybridtrain.cli.config.resolve import Settings
from hybridtrain.cli.config.schema import Config
from hybridtrain.cli.config.sweeps import sweep_choices
from hybridtrain.cli.run import errors
from hybridtrain.cli.run.dry_run import dry_run_name, run_dry
from hybridtrain.cli.run.errors import LastingStream
from hybridtrain.cli.run.sweep import names_of
from hybridtrain.errors import ConfigError

QUICK = [*SMALL, "monitor.tensorboard=false", "trainer.steps=2"]


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose_config(overrides)
    return str(caught.value)


# Names of runs


def test_recipes_of_one_name_in_two_folders_are_two_runs() -> None:
    for folder in ("recs/a", "recs/b"):
        Path(folder).mkdir(parents=True)
        Path(folder, "base.yaml").write_text("seed: 1\n")
    names = [compose_config([f"recipe=recs/{x}/base.yaml"]).run_name for x in "ab"]
    assert names == ["recs-a-base", "recs-b-base"]
    absolute = Path("recs/a/base.yaml").resolve()
    assert compose_config([f"recipe={absolute}"]).run_name == "recs-a-base"


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (
            ["recipe=digits", "optim.lr=1e-3,1e-2"],
            ["digits-lr/lr_0.001", "digits-lr/lr_0.01"],
        ),
        (["recipe=digits", "run_name=digits,mine"], ["digits", "mine"]),
        (["recipe=digits,mnist_basicnet"], ["digits", "mnist_basicnet"]),
        (
            ["recipe=digits,mnist_basicnet", "run_name=x"],
            ["x-recipe/recipe_digits", "x-recipe/recipe_mnist_basicnet"],
        ),
        (
            ["run_name=a,b", "seed=1,2"],
            [f"a-b-seed/{name}-seed_{seed}" for name in "ab" for seed in (1, 2)],
        ),
        (
            ["recipe=digits", "optim.betas=[0.9,0.99],[0.8,0.9]", "optim.lr=1,2", "+model.lr=3,4"],
            [
                f"digits-betas-optim.lr-model.lr/betas_{betas}-optim.lr_{lr}-model.lr_{other}"
                for betas in ("0.9_0.99", "0.8_0.9")
                for lr in (1, 2)
                for other in (3, 4)
            ],
        ),
        (["recipe=digits", "run_name='lr_${optim.lr}'", "optim.lr=1,2"], ["lr_1", "lr_2"]),
        (
            ["recipe=digits", "pipeline.split=['a b'],[a_b]"],
            ["digits-split/split_a_b-209a1a3a", "digits-split/split_a_b-47708ba1"],
        ),
        (["run_name=g/digits", "seed=1,2"], ["g-digits-seed/seed_1", "g-digits-seed/seed_2"]),
        (["run_name=g/a,g/b", "seed=1"], ["g/a", "g/b"]),
        (["run_name=g/digits"], ["g/digits"]),
    ],
)
@pytest.mark.quick_cases(1)
def test_a_sweep_names_its_runs_by_the_values_that_vary(
    overrides: list[str], names: list[str]
) -> None:
    choices = sweep_choices(overrides)
    varying = [len(set(values)) > 1 for values in zip(*choices, strict=True)]
    points = [[o for o, v in zip(choice, varying, strict=True) if v] for choice in choices]
    own = [str(compose_config(choice).run_name) for choice in choices]
    assert names_of(own, points)[1] == names


@pytest.mark.thorough
def test_a_sweep_goes_on_after_a_bad_point_and_ends_with_a_table(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["-m", *QUICK, "optim.lr=-1,1e-2", "optim.betas=0.5,[0.9,0.99]"]) == 2
    said = capfd.readouterr().err
    assert said.count("error: optim.") == 3
    path = Path("outputs/digits-lr-betas/results.csv")
    table = list(csv.DictReader(io.StringIO(path.read_text())))
    assert [(line["optim.lr"], line["exit code"]) for line in table] == [
        ("-1", "2"),
        ("-1", "2"),
        ("0.01", "2"),
        ("0.01", "0"),
    ]
    assert table[3]["step"] == "2"
    assert float(table[3]["loss"]) > 0
    assert re.search(r"^  digits-lr-betas/lr_0.01-betas_0.9_0.99 .* 0 +2 +2\.\d+", said, re.M)


def test_a_dry_run_trains_evaluates_and_leaves_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    Path("outputs").mkdir()
    assert main(["--dry-run", "recipe=digits", "world.devices=cpu"]) == 0
    said = capfd.readouterr().err
    assert "dashboard: " not in said
    assert re.search(r"^step 2/2  eval: loss \d", said, re.M)
    assert "dry run: two steps, an evaluation and a checkpoint " in said
    assert not any(Path("outputs").iterdir())
    assert main(["--dry-run", *QUICK, "trainer.loss=nlll"]) == 2
    assert not any(Path("outputs").iterdir())


@pytest.mark.thorough
def test_a_dry_run_says_what_it_has_tried(capfd: pytest.CaptureFixture[str]) -> None:
    for words, found, said in (
        (["checkpoint.every_steps=0"], {"step": 2, "loss": 1.0}, "two steps and an evaluation"),
        ([], {"step": 2}, "two steps and a checkpoint"),
        (["checkpoint.every_steps=0"], {"step": 2}, "two steps"),
    ):
        assert run_dry([*QUICK, *words], None, lambda *_, found=found: found) == 0
        assert f"dry run: {said} " in capfd.readouterr().err


@pytest.mark.thorough
def test_two_dry_runs_leave_each_others_files() -> None:
    def run(command: str, settings: Settings) -> dict[str, int]:
        folder = Path(settings.config.output_dir)
        folder.mkdir(parents=True)
        other = [sys.executable, "-m", "hybridtrain", "--dry-run", *QUICK]
        assert subprocess.run(other, env=environment(), check=False).returncode == 0
        assert folder.is_dir()
        return {"step": 2}

    assert run_dry(QUICK, None, run) == 0
    assert not any(Path("outputs").iterdir())


def test_the_processes_of_a_dry_run_have_one_folder_and_other_launches_another() -> None:
    def name(**variables: str | int) -> str:
        values = {"WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500, **variables}
        return dry_run_name({key: str(value) for key, value in values.items()})

    assert name(RANK=0) == name(RANK=1)
    others = [{"MASTER_PORT": 29501}, {"TORCHELASTIC_RUN_ID": "a/b"}, {"MASTER_ADDR": "node2"}]
    names = {name(RANK=0, **other) for other in ({}, *others)}
    assert len(names) == 4
    assert not any("/" in name for name in names)


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        (["recipe=digits"], (None, 30)),
        (["recipe=digits", "trainer.steps=5"], (5, None)),
        (["recipe=gpt_text_files", "trainer.epochs=2"], (None, 2)),
        (["recipe=digits", "trainer.steps=null"], (None, 30)),
        (["recipe=digits", "trainer.steps=5", "trainer.epochs=2"], (5, 2)),
    ],
)
@pytest.mark.quick_cases(1)
def test_a_length_of_the_command_line_replaces_that_of_the_recipe(
    overrides: list[str], length: tuple[int | None, int | None]
) -> None:
    trainer = compose_config(overrides).trainer
    assert (trainer.steps, trainer.epochs) == length


# Flags and commands


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config-path", "x"], "--config-path has no effect here: --config-dir adds a folder"),
        (["--config-name", "x"], "--config-name has no effect here: recipe=<file>"),
        (["--experimental-rerun", "x"], "--experimental-rerun has no effect here: recipe="),
        (["hydra.run.dir=x"], "hydra.run.dir=x: hydra.run.dir"),
        (["--multirun", "hydra/launcher=joblib"], "hydra/launcher=joblib: hydra/launcher"),
        (["hydra/sweeper=optuna"], "hydra/sweeper=optuna: hydra/sweeper"),
        (["--config-dir", "nowhere"], "--config-dir nowhere: "),
        (["--resolve"], "--resolve works only with --cfg job"),
        (["--multirun", "--cfg", "job"], "--cfg job shows one config, but --multirun"),
        (["evaluate", "plan"], "give only one command, not evaluate and plan"),
        (["trian"], "there is no command 'trian': did you mean 'train'?"),
    ],
)
def test_what_has_no_effect_is_refused(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for words in (["recipe=digits", *arguments], [*arguments, "recipe=digits"]):
        assert fail(capfd, *words).startswith(f"error: {message}")
    assert not Path("outputs").exists()


def test_a_word_without_its_key_gets_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert "recipe=digits" in fail(capfd, "digits")
    assert "recipe=digits" in fail(capfd, "evaluate", "digits")
    Path("outputs/digits").mkdir(parents=True)
    Path("outputs/digits/config.yaml").touch()
    assert "run_name=digits" in fail(capfd, "evaluate", "digits")


def test_a_command_may_stand_anywhere(capfd: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    for words in (
        ["recipe=digits", "evaluate"],
        ["--config-dir", "mine", "evaluate", "recipe=digits"],
        ["evaluate", "recipe=digits", "--config-dir", "mine", "world.devices=cpu"],
    ):
        assert "there is no checkpoint in outputs/digits" in fail(capfd, *words)


def test_the_version_is_hybridtrains(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    said = capfd.readouterr().out
    assert said.startswith(f"hybridtrain {hybridtrain.__version__}, torch 2.")
    assert "hydra-core 1." in said


def test_cfg_job_shows_each_key_with_its_comment(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["recipe=digits", "optim=sgd", "~lr_schedule.T_max", "trainer.steps=${seed}"]
    assert main(["--cfg", "job", *arguments]) == 0
    shown = capfd.readouterr().out
    assert "  batch_size: 64  # samples per batch" in shown
    assert "  chunks: 8  # Micro-batches per replica" in shown
    assert "  workers: 0  # Worker processes per replica " in shown
    assert "T_max" not in shown
    tree = yaml.safe_load(shown)
    assert tree["trainer"]["steps"] == "${seed}"
    OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(tree))
    assert "inner" not in tree["world"]  # rare, and not set
    assert "world.inner" in shown.splitlines()[-1]
    assert main(["--cfg", "job", *arguments, "world.inner=dp"]) == 0
    assert yaml.safe_load(capfd.readouterr().out)["world"]["inner"] == "dp"
    assert main(["--cfg", "job", *arguments, "--resolve", "--package", "trainer"]) == 0
    assert yaml.safe_load(capfd.readouterr().out)["trainer"]["steps"] == 0


def test_a_working_directory_that_is_gone_is_one_line(tmp_path: Path) -> None:
    script = (
        f"mkdir gone; cd gone; rmdir ../gone; {Path(sys.executable).parent}/hybridtrain results"
    )
    ended = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: the working directory no longer exists")


def test_a_package_of_ones_own_is_a_search_path_of_the_console_script() -> None:
    Path("my_conf/model").mkdir(parents=True)
    Path("my_conf/__init__.py").touch()
    Path("my_conf/model/wide.yaml").write_text("_target_: my.wide\nwidth: 3\n")
    script = "import sys; sys.path.remove(''); from hybridtrain.cli import main; "
    script += "sys.exit(main(['--cfg', 'job', 'hydra.searchpath=[pkg://my_conf]', 'model=wide']))"
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment()
    )
    assert yaml.safe_load(shown.stdout)["model"] == {"_target_": "my.wide", "width": 3}


# What a mistake says


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("pipeline.nbpart=2", "pipeline.nbpart: .*did you mean pipeline.nb_part?"),
        ("trainer.epochs=0.5", "trainer.epochs=0.5 must be a whole number"),
        ("trainer.accumulate=two", "trainer.accumulate=two must be a whole number"),
        ("data.bath_size=8", "data.bath_size: .*did you mean data.batch_size?"),
        ("trainer.loss_scale=x", "trainer.loss_scale=x must be a number"),
    ],
)
@pytest.mark.quick_cases(1)
def test_a_right_key_that_was_added_is_not_blamed_for_another_mistake(
    mistake: str, message: str
) -> None:
    mine = ["recipe=digits", "model._target_=mine.wide", "+model.width=32", "allow_targets=[mine]"]
    assert re.match(message.replace("?", r"\?"), refusal(*mine, mistake))


def test_a_key_that_a_group_lacks_says_how_to_add_it() -> None:
    assert refusal("recipe=digits", "model.width=3").endswith("+model.width=3)")


def test_a_null_key_can_be_removed_and_a_key_that_is_not_there_cannot() -> None:
    assert "T_max" not in compose_config(["recipe=digits", "~lr_schedule.T_max"]).lr_schedule
    assert refusal("recipe=digits", "~lr_schedule.T_mux").startswith("lr_schedule.T_mux: unknown")


def test_what_is_left_of_another_target_is_left_out_and_what_the_user_gave_is_not() -> None:
    given = ["recipe=digits", "optim._target_=torch.optim.SGD", "optim.lr=0.5"]
    composed = compose_settings(given)
    assert composed.leftovers["optim"] == ["betas", "eps", "weight_decay", "fused"]
    optim = composed.config.optim
    assert instantiate.not_taken("optim", optim, composed.leftovers["optim"]) == ["betas", "eps"]
    wanted = compose_settings([*given, "optim.eps=1"])
    assert "eps" not in wanted.leftovers["optim"]


def test_a_run_with_a_target_of_another_kind_needs_no_tilde(
    capfd: pytest.CaptureFixture[str],
) -> None:
    other = [
        "optim._target_=torch.optim.SGD",
        "lr_schedule._target_=torch.optim.lr_scheduler.StepLR",
    ]
    said = succeed(capfd, *QUICK, *other, "+lr_schedule.step_size=3")
    assert "optim.eps=1e-08: torch.optim.SGD " in said
    assert "lr_schedule.eta_min=0.0: " in said
    assert "lr_schedule.warmup_steps=20 before torch.optim.lr_scheduler." in said
    assert set(OmegaConf.load("outputs/digits/config.yaml").optim) == {
        *("_target_", "lr", "weight_decay", "fused")
    }


def test_a_callable_is_given_the_facts_that_it_has_parameters_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def takes(vocab_size, *, num_classes=3, seq_len=None, other=0, **more):  # type: ignore
        return {"seen": (vocab_size, num_classes, seq_len, other, more)}

    takes.__module__ = "mine"
    facts = {"vocab_size": 5, "num_classes": 2, "image_size": 8, "more": 1}
    module = types.ModuleType("mine")
    module.takes = takes  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", module)
    made = instantiate.build("model", {"_target_": "mine.takes"}, dict, ["mine"], defaults=facts)
    assert made["seen"] == (5, 2, None, 0, {})
    config = {"_target_": "mine.takes", "num_classes": 7}
    made = instantiate.build("model", config, dict, ["mine"], defaults=facts)
    assert made["seen"][1] == 7


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.betas=0.9"], "optim.betas=0.9 must be a list of 2 values, such as [0.9,0.999]"),
        (["optim.betas=[0.9]"], "optim.betas=[0.9] must be a list of 2 values"),
        (["optim.betas=[2,0.9]"], "optim.betas=[2, 0.9]: Invalid beta parameter"),
        (["optim.weight_decay=-1"], "optim.weight_decay=-1: Invalid weight_decay value: -1"),
        (
            ["optim._target_=torch.optim.LBFGS"],
            "optim._target_=torch.optim.LBFGS: this optimizer recomputes the loss",
        ),
        (["lr_schedule.T_max=foo"], "lr_schedule.T_max=foo must be a number"),
        (
            ["data=image_folder", "data.root=.", "data.classes=cat"],
            "data.classes=cat must be a list, such as [cat]",
        ),
        (
            ["data=image_folder", "data.root=.", "data.image_size=big"],
            "data.image_size=big must be a number",
        ),
        (
            ["data=datasets", "data.path=[a.csv,b.csv]"],
            "data.path=['a.csv', 'b.csv'] must be a single text",
        ),
        (
            ["trainer.metrics={f: {_target_: torchmetrics.F1}}"],
            "trainer.metrics.f._target_=torchmetrics.F1: torchmetrics has no F1",
        ),
        (
            ["trainer.metrics={_target_: torchmetrics.F1Score}"],
            "trainer.metrics._target_=torchmetrics.F1Score: give the metric a name",
        ),
    ],
)
@pytest.mark.quick_cases(1)
def test_a_value_that_a_target_cannot_take_is_one_line_and_leaves_no_directory(
    overrides: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said = fail(capfd, *SMALL, *overrides)
    assert said.startswith(f"error: {message}")
    assert said.count("\n") == 1
    assert not Path("outputs").exists()


def test_settings_that_can_have_no_effect_are_said(capfd: pytest.CaptureFixture[str]) -> None:
    said = succeed(capfd, *QUICK, "pipeline.chunks=1000", "data.batch_size=16")
    assert "16 micro-batches instead of pipeline.chunks=1000" in said
    assert "lr_schedule.warmup_steps=20 is not less than the 2 steps of the run" in said


def test_a_batch_without_a_sample_for_each_replica_is_a_warning(
    capfd: pytest.CaptureFixture[str],
) -> None:
    said = succeed(capfd, *QUICK, "data.batch_size=1", "world.replicas=2")
    assert "data.batch_size=1 " in said
    assert "data.batch_size=2 or more" in said
    assert "1 sample, so there is 1 micro-batch " in said


def test_a_config_that_cannot_be_written_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    Path("outputs/digits/summary.json").mkdir(parents=True)
    Path("outputs/digits/overrides.yaml").mkdir()
    said = fail(capfd, *QUICK)
    assert said.startswith("error: cannot write outputs/digits/overrides.yaml: Is a directory")


# The terminal


class Closed(io.StringIO):
    """A pipe that nobody reads."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_stream_that_nobody_reads_goes_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = LastingStream(Closed(), patience_s=0)
    assert stream.write("three") == 5
    assert stream.broken
    stream.flush()
    assert not stream.isatty()


def fill(pipe: int) -> None:
    """Writes to a pipe until it is full."""
    os.set_blocking(pipe, False)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * 4096)
    os.set_blocking(pipe, True)


def test_a_stream_drops_what_a_full_pipe_cannot_take_until_it_is_read_again() -> None:
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as reader, open(write_end, "w") as pipe:
        stream = LastingStream(pipe, patience_s=0)
        long = "long\n" * 20_000
        assert stream.write(long) == len(long)  # more than a pipe takes
        taken = len(long) - stream.dropped
        assert 4096 <= taken < len(long)
        assert reader.read(taken).decode() == long[:taken]
        stream.write("read again")
        stream.flush()
        assert reader.read(10) == b"read again"
    assert not stream.broken


def test_a_character_that_stderr_cannot_encode_is_not_too_long_for_its_pipe() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)  # a write that would block fails, and breaks the stream
    with (
        open(read_end, "rb") as reader,
        open(write_end, "w", encoding="ascii", errors="backslashreplace") as pipe,
    ):
        stream = LastingStream(pipe, patience_s=0)
        text = "\N{OCTOPUS}" * 20_000
        stream.write(text)
        assert not stream.broken
        taken = len(text) - stream.dropped
        assert reader.read(taken * 10) == rb"\U0001f419" * taken


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """The end to write to of a full pipe that nobody reads."""
    read_end, write_end = os.pipe()
    fill(write_end)
    yield write_end
    os.close(read_end)
    os.close(write_end)


def test_a_command_that_fails_ends_while_its_stderr_is_full(
    full_pipe: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "STDERR_S", 0.1)
    with open(full_pipe, "w", closefd=False) as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        assert main(["recipe=nope"]) == 2


def test_a_command_whose_stdout_is_full_from_its_start_says_what_is_missing(
    full_pipe: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(errors, "STDOUT_S", 0.1)
    with open(full_pipe, "w", closefd=False) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["--version"]) == 1
    assert re.search(r"nobody read stdout .* lacks \d+ characters$", capfd.readouterr().err.strip())


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.quick_cases(">&-")
def test_a_command_runs_with_closed_streams(closed: str) -> None:
    command = f"{Path(sys.executable).parent / 'hybridtrain'} --version {closed}"
    assert subprocess.run(command, shell=True, env=environment()).returncode == 0


@pytest.mark.thorough
def test_training_goes_on_while_its_stderr_is_full_from_its_start(full_pipe: int) -> None:
    command = [sys.executable, "-m", "hybridtrain", *QUICK]
    assert subprocess.run(command, stderr=full_pipe, env=environment(), timeout=300).returncode == 0
    assert json.loads(Path("outputs/digits/summary.json").read_text())["steps"] == 2


@pytest.mark.thorough
def test_training_goes_on_when_nobody_reads_its_output() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "hybridtrain", *QUICK, "trainer.log_every=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=300) == 0
    assert Path("outputs/digits/summary.json").exists()
    log = Path("outputs/digits/logs/rank_000.log").read_text()
    assert re.findall(r"step (\d)/2  loss", log) == ["1", "2"]


@pytest.mark.parametrize("value", ["données.csv", "a=b", "a#b", "~a", "a(b", "it's (a)", "a b=c"])
@pytest.mark.quick_cases(1)
def test_an_override_that_hydra_cannot_read_is_shown_as_it_must_be_typed(value: str) -> None:
    try:
        compose_config(["recipe=digits", f"output_dir={value}"])
    except ConfigError as error:
        (typed,) = shlex.split(str(error).partition("need quotes: ")[2])
        assert compose_config(["recipe=digits", typed]).output_dir == value
    else:
        assert compose_config(["recipe=digits", f"output_dir={value}"]).output_dir == value


def test_a_quiet_run_prints_its_result_only(capfd: pytest.CaptureFixture[str]) -> None:
    said = succeed(capfd, *QUICK, "lr_schedule.warmup_steps=0", "--quiet")
    assert re.fullmatch(r"done: 2 steps, loss \S+  accuracy \S+\n", said)
    assert "run directory" in Path("outputs/digits/logs/rank_000.log").read_text()
