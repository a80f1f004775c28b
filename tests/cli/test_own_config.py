"""A run is its own config: what a later command takes from it, lists, refuses and allows."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from cli_runs import contents, fail, succeed
from omegaconf import OmegaConf
from support.cases import thorough
from support.launch import SMALL

from hybridtrain.cli import main
from hybridtrain.cli.config.compose import compose_config
from hybridtrain.cli.config.overrides import hydra_quoted
from hybridtrain.cli.config.resolve import resolve_settings
from hybridtrain.cli.config.tree import to_yaml
from hybridtrain.cli.run.directory import RunDirectory
from hybridtrain.cli.run.lock import RunLock
from hybridtrain.cli.run.sweep import sweep_of
from hybridtrain.errors import ConfigError


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A run directory with a config and a checkpoint, for what is settled before anything is read.

    It was begun with `recipe=imdb_transformer data.max_len=64 optim.lr=0.01`.
    """
    run = tmp_path / "outputs" / "imdb_transformer"
    (run / "checkpoints" / "step_00000008").mkdir(parents=True)
    first = ["recipe=imdb_transformer", "data.max_len=64", "optim.lr=0.01"]
    write_config(run, first)
    return run


def write_config(run: Path, overrides: list[str]) -> None:
    (run / "config.yaml").unlink(missing_ok=True)
    settings = resolve_settings("train", overrides)
    run.mkdir(parents=True, exist_ok=True)
    RunDirectory(settings.config).write_config(settings.config, overrides, settings.texts)


@pytest.mark.parametrize("command", ["evaluate", "train", *thorough(["export", "plan"])])
@pytest.mark.quick_cases(1)
def test_the_name_alone_is_enough(command: str, begun: Path) -> None:
    settings = resolve_settings(command, ["run_name=imdb_transformer"])
    assert settings.config.data["max_len"] == 64
    assert settings.config.model["_target_"] == "hybridtrain.models.transformer"
    assert settings.config.optim["lr"] == 0.01
    assert settings.config.recipe == "imdb_transformer"
    assert (settings.changes, settings.kept, settings.notes) == ([], [], [])


@pytest.mark.thorough
def test_what_the_recipe_alone_would_change_is_kept_and_said(begun: Path) -> None:
    settings = resolve_settings("evaluate", ["recipe=imdb_transformer"])
    assert (settings.config.data["max_len"], settings.config.optim["lr"]) == (64, 0.01)
    assert settings.notes == [
        "keeping these settings of outputs/imdb_transformer/config.yaml, although "
        "recipe=imdb_transformer differs:\n"
        "  data.max_len  64  (recipe: 256)\n"
        "  optim.lr      0.01  (recipe: 0.0005)"
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.steps=9", "optim.lr=${seed}", "~lr_schedule.T_max", "optim.betas=[0.5,0.9]"],
        *thorough(
            [
                ["optim=sgd", "optim.lr=0.2", "hardware=h100", "hardware.nodes=2"],
                ["monitor=[csv]", "callbacks=[ema]", "resume=last", "~optim.eps"],
                ["monitor.wandb={project: mine}"],  # merged with the run's
                ["trainer.steps=9", "+optim.amsgrad=true"],
                ["optim._target_=torch.optim.SGD", "trainer.epochs=1"],
            ]
        ),
    ],
    ids=" ".join,
)
def test_overrides_next_to_the_recipe_change_the_run_as_without_it(
    overrides: list[str], begun: Path
) -> None:
    run = "run_name=imdb_transformer"
    write_config(begun, ["recipe=imdb_transformer", "optim.lr=0.01", "monitor.wandb={tags: [a]}"])
    alone = resolve_settings("train", [run, *overrides])
    with_recipe = resolve_settings("train", ["recipe=imdb_transformer", *overrides])
    assert with_recipe.config == alone.config
    assert (with_recipe.changes, with_recipe.texts) == (alone.changes, alone.texts)
    assert alone.changes


@pytest.mark.thorough
def test_the_same_command_again_says_nothing(begun: Path) -> None:
    again = ["recipe=imdb_transformer", "data.max_len=64", "optim.lr=0.01"]
    assert resolve_settings("train", again).notes == []
    write_config(begun, [*again, "trainer.steps=8"])  # in place of the recipe's epochs
    assert resolve_settings("train", [*again, "trainer.steps=8"]).notes == []
    again += ["+model.width=3", "~optim.eps", "~model.pad_index", "monitor=default"]
    again += ["lr_schedule=linear", "lr_schedule.end_factor=0.5"]
    write_config(begun, again)
    settings = resolve_settings("train", again)
    assert settings.notes == []
    assert settings.config.model["width"] == 3
    assert settings.config.lr_schedule["warmup_steps"] == 200  # the recipe's


def test_every_change_that_is_allowed_is_listed(begun: Path) -> None:
    changed = ["optim.lr=0.1", "pipeline.nb_part=3", "optim=sgd", "data.workers=2"]
    settings = resolve_settings("train", ["run_name=imdb_transformer", *changed])
    assert settings.config.optim["_target_"] == "torch.optim.SGD"
    assert settings.notes == [
        "using the settings in outputs/imdb_transformer/config.yaml, except for:\n"
        "  data.workers      0 -> 2\n"
        "  optim._target_    torch.optim.AdamW -> torch.optim.SGD\n"
        "  pipeline.nb_part  2 -> 3"
    ]


@pytest.mark.parametrize("command", [*thorough(["evaluate"]), "train"])
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.nhead=2", "model.nhead=4, not 2"),
        ("data.max_len=32", "data.max_len=64, not 32"),
        ("seed=3", "seed=0, not 3"),
        ("+model.bias=true", "model.bias=(not set), not true"),
        ("data=digits", "data._target_=hybridtrain.datasets.imdb, not hybridtrain.datasets.digits"),
    ],
)
@pytest.mark.quick_cases("+model.bias=true-model.bias=(not set), not true-train")
def test_another_model_other_data_or_another_seed_is_refused(
    command: str, override: str, words: str, begun: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_settings(command, ["recipe=imdb_transformer", override])
    message = str(caught.value)
    assert message.startswith(f"the run outputs/imdb_transformer has {words}: ")
    assert "\n" not in message
    allowed = resolve_settings(command, ["recipe=imdb_transformer", override, "allow_changes=true"])
    assert len(allowed.changes) >= 1


@pytest.mark.thorough
def test_a_batch_size_and_the_place_of_the_data_may_be_others(begun: Path) -> None:
    others = ["data.batch_size=8", "data.root=/elsewhere"]
    settings = resolve_settings("evaluate", ["run_name=imdb_transformer", *others])
    assert not any(change.is_identity for change in settings.changes)
    assert (settings.config.data["batch_size"], settings.config.data["root"]) == (8, "/elsewhere")


@pytest.mark.thorough
def test_the_recipe_of_another_run_is_refused_and_the_runs_own_config_is_a_recipe(
    begun: Path,
) -> None:
    with pytest.raises(ConfigError, match="recipe=imdb_transformer, not recipe=dig"):
        resolve_settings("evaluate", ["recipe=digits", "run_name=imdb_transformer"])
    settings = resolve_settings("evaluate", ["recipe=outputs/imdb_transformer/config.yaml"])
    assert (settings.changes, settings.kept) == ([], [])
    assert settings.config.recipe == "imdb_transformer"


@pytest.mark.thorough
def test_a_run_without_a_checkpoint_begins_with_the_recipe_of_now(begun: Path) -> None:
    shutil.rmtree(begun / "checkpoints")
    again = resolve_settings("train", ["recipe=imdb_transformer", "model.nhead=2"])
    assert (again.config.model["nhead"], again.config.data["max_len"]) == (2, 256)
    by_name = resolve_settings("train", ["run_name=imdb_transformer", "model.nhead=2"])
    assert (by_name.config.model["nhead"], by_name.config.data["max_len"]) == (2, 64)


@pytest.mark.thorough
def test_a_run_has_the_defaults_for_what_its_config_lacks(begun: Path) -> None:
    saved = OmegaConf.load(begun / "config.yaml")
    del saved["monitor"], saved["trainer"]["log_every"]
    (begun / "config.yaml").write_text(OmegaConf.to_yaml(saved))
    again = ["recipe=imdb_transformer", "data.max_len=64", "optim.lr=0.01"]
    settings = resolve_settings("evaluate", again)
    assert settings.config.trainer.log_every == 10
    saved["trainer"]["log_evry"] = 3
    (begun / "config.yaml").write_text(OmegaConf.to_yaml(saved))
    with pytest.raises(ConfigError, match=r"imdb_transformer/config\.yaml: Key 'log_evry' not in"):
        resolve_settings("evaluate", ["recipe=imdb_transformer"])
    (begun / "config.yaml").unlink()
    assert resolve_settings("evaluate", ["recipe=imdb_transformer"]).config.data["max_len"] == 256


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
@pytest.mark.quick_cases(1)
def test_a_config_of_a_run_that_was_emptied_or_cut_short_is_named(
    share: float, begun: Path
) -> None:
    config = begun / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(lines[: int(share * len(lines))]))
    with pytest.raises(ConfigError, match=r"imdb_transformer/config\.yaml has no [a-z_.]+"):
        resolve_settings("evaluate", ["run_name=imdb_transformer"])


@pytest.mark.thorough
def test_a_run_name_that_no_file_system_takes_is_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    Path("outputs").mkdir()
    for name, problem in (
        ("a" * 300, "300 bytes"),
        ("'g/" + "é" * 130 + "'", "260 bytes"),
        ("'a\x1bb'", "run_name='a\\x1bb' has a control or invisible"),
        ("'a\nb'", "run_name='a\\nb' has a control"),
        ("'a\x00b'", "run_name='a\\x00b' has a control"),
        ("'a '", "run_name='a ' must be the name of a folder"),
        ("a.", "run_name='a.' must be the name of a folder"),
    ):
        for command in ("train", "evaluate", "submit"):
            assert main([command, *SMALL, f"run_name={name}"]) == 2
            message = capfd.readouterr().err
            assert message.startswith("error: run_name=")
            assert problem in message
            assert message.count("\n") == 1
    assert main([*SMALL, f"output_dir={'a' * 300}"]) == 2
    message = capfd.readouterr().err
    assert message.startswith("error: cannot read the run directory aaa")
    assert message.endswith(": File name too long; set run_name= or output_dir=\n")
    assert not any(Path("outputs").iterdir())


@pytest.mark.parametrize("name", ["1e3", "true", "1_000", "nan", "0.10", "007", "off"])
@pytest.mark.thorough
def test_a_run_name_that_looks_like_a_number_stays_as_it_was_typed(name: str) -> None:
    overrides = ["recipe=digits", f"run_name={name}", f"monitor.group={name}", "output_dir=1e3"]
    config = resolve_settings("train", overrides).config
    assert (config.run_name, config.monitor.group, config.output_dir) == (name, name, "1e3")
    run = Path("1e3") / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(config))
    found = resolve_settings("evaluate", [f"run_name={name}", "output_dir=1e3"])
    assert found.of_run is not None
    assert (found.config.run_name, found.config.monitor.group) == (name, name)
    points = sweep_of(["recipe=digits", f"run_name={name},b"]).points
    assert [point.run_name for point in points] == [name, "b"]
    assert compose_config([f"run_name={hydra_quoted(name)}"]).run_name == name


@pytest.mark.thorough
def test_names_that_a_sweep_makes_are_short_enough_for_a_folder_and_differ() -> None:
    words = [f"{'x' * 400}{end}" for end in "ab"]
    points = sweep_of(["recipe=digits", f"+model.words={','.join(words)}"]).points
    names = [point.run_name for point in points]
    assert len({*names}) == 2
    assert all(len(part) <= 140 for name in names for part in name.split("/"))
    assert [name.rpartition("-")[0] for name in names] == [f"digits-words/words_{'x' * 125}"] * 2
    assert sweep_of(["recipe=digits", f"+model.words={','.join(words)}"]).points == points
    accented = "é" * 400
    (point, _) = sweep_of(["recipe=digits", f"+model.words='{accented}',b"]).points
    assert len(point.run_name.split("/")[1].encode()) <= 140


@pytest.mark.thorough
def test_the_packages_of_a_run_are_allowed_on_the_command_line_only(begun: Path) -> None:
    with_code = [
        *("recipe=imdb_transformer", "data.max_len=64", "optim.lr=0.01"),
        "allow_targets=[my_nets]",
    ]
    write_config(begun, with_code)
    with pytest.raises(ConfigError, match=r"my_nets: .*allow_targets=\[my_nets\]"):
        resolve_settings("evaluate", ["run_name=imdb_transformer"])
    trusted = resolve_settings("evaluate", ["run_name=imdb_transformer", "allow_targets=[my_nets]"])
    assert trusted.config.allow_targets == ["my_nets"]


@pytest.mark.thorough
def test_a_secret_of_the_environment_is_not_written_but_found_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", "hunter2")
    secret = ["+model.key=${oc.env:MY_KEY}", "+model.copy=${model.key}", "+model.api_key=literal"]
    run = Path("outputs/digits")
    write_config(run, ["recipe=digits", *secret])
    (run / "checkpoints" / "step_00000001").mkdir(parents=True)
    for path in (run / "config.yaml", run / "overrides.yaml"):
        assert "hunter2" not in path.read_text()
    settings = resolve_settings("evaluate", ["run_name=digits"])
    assert (settings.config.model["key"], settings.config.model["copy"]) == ("hunter2", "hunter2")
    monkeypatch.setenv("MY_KEY", "hunter3")
    assert resolve_settings("evaluate", ["run_name=digits"]).config.model["key"] == "hunter3"
    capfd.readouterr()
    assert main(["--cfg", "job", "recipe=digits", *secret]) == 0
    shown = capfd.readouterr().out
    assert "hunter" not in shown
    assert "literal" not in shown
    assert "api_key: '***'" in shown


@pytest.mark.thorough
def test_evaluate_says_its_result_on_stdout_and_in_a_file(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for arguments, step in (
        (["run_name=digits"], 6),
        (["resume=outputs/digits"], 6),
        (["resume=outputs/digits/checkpoints"], 6),
        (["resume=outputs/digits/checkpoints/step_00000004"], 4),
        (["run_name=digits", "resume=last", "data.batch_size=5"], 6),
    ):
        capfd.readouterr()
        assert main([*arguments, "evaluate"]) == 0
        out, err = capfd.readouterr()
        result = json.loads(out)
        assert (result["step"], result["samples"]) == (step, 355)
        line = json.loads((copied / "evaluations.jsonl").read_text().splitlines()[-1])
        assert {key: line[key] for key in result} == result
    assert line["changes"] == {"data.batch_size": 5}
    assert re.search(r"^  data.batch_size +\d+ -> 5$", err, re.M)


@pytest.mark.thorough
def test_a_complete_run_with_other_settings_is_not_reported_as_trained(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(copied)
    said = fail(capfd, *SMALL, "optim.lr=0.01")
    assert "the run outputs/digits is complete at step 6, with optim.lr=0.003, not 0.01: " in said
    said = fail(capfd, "recipe=digits")  # which is another length, among others
    assert "trainer.steps=6, not null" in said
    said = succeed(capfd, *SMALL, "pipeline.chunks=2", "trainer.log_every=1")
    assert "the run is complete at step 6" in said
    assert contents(copied) == before
    succeed(capfd, "run_name=digits", "trainer.steps=7", "optim.lr=0.01")
    assert OmegaConf.load(copied / "config.yaml").optim.lr == 0.01


@pytest.mark.parametrize("requeued", [True, False])
@pytest.mark.thorough
def test_a_job_with_an_explicit_start_goes_on_when_it_is_called_again(
    requeued: bool,
    finished: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = f"resume={finished}/checkpoints/step_00000002"
    command = [*SMALL, "run_name=second", start, "monitor.tensorboard=false"]
    succeed(capfd, *command, "trainer.steps=4")
    if requeued:
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        for file in filter(Path.is_file, [*Path("outputs/second").iterdir()]):
            file.unlink()  # only the checkpoints are left
    said = succeed(capfd, *command)
    assert "resumed from outputs/second/checkpoints/step_00000004, at step 4 of 6" in said
    if not requeued:
        assert f"started from {start}; resuming" in said
        other = f"resume={finished}/checkpoints/step_00000004"
        message = fail(capfd, *command, "trainer.steps=8", other)
        assert f"{other} would mix" in message


@pytest.mark.thorough
def test_a_second_writer_is_refused_and_a_reader_is_not(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(copied)
    longer = [*SMALL, "trainer.steps=8", "monitor.tensorboard=false"]
    with RunLock(copied):
        said = fail(capfd, *longer)
        assert f"outputs/digits: process {os.getpid()} on" in said
        assert "resumed" not in said
        succeed(capfd, "evaluate", "run_name=digits")
    assert {k: v for k, v in contents(copied).items() if k != "evaluations.jsonl"} == before
    succeed(capfd, *longer)
    assert not (copied / "run.lock").exists()
