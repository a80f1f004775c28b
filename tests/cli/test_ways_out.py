"""The way out in an error, as it is printed, gets further when it is typed."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import fail, succeed
from support.launch import SMALL, forked_command, single
from support.small_data import write_images
from support.small_hub import write_bert, write_chats, write_reviews

from hybridtrain.cli import main


@pytest.mark.usefixtures("copied")
def test_other_weights_are_loaded_by_the_words_of_the_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = [*SMALL, "run_name=new", "trainer.steps=1"]
    said = fail(capfd, *words, "init_from=outputs/digits", "model.num_classes=12")
    typed = re.search(r"set ('init_from=.*')", said)
    assert typed is not None
    said = succeed(capfd, *words, "model.num_classes=12", *shlex.split(typed[1]))
    assert "reshaped: " in said


def test_a_prefix_is_removed_by_the_words_of_the_error(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(copied / "checkpoints/step_00000006/model.safetensors")
    save_file({f"student.net.{name}": value for name, value in weights.items()}, "a.safetensors")
    words = [*SMALL, "run_name=new", "trainer.steps=1"]
    said = fail(capfd, *words, "init_from=a.safetensors")
    typed = re.search(r"set ('init_from=.*')", said)
    assert typed is not None
    assert "prefix: student.net." in typed[1]
    assert "tensors loaded" in succeed(capfd, *words, *shlex.split(typed[1]))


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        (["--lr=1e-3"], "optim.lr=1e-3"),
        (["--learning-rate", "1e-3"], "optim.lr=1e-3"),
        (["-lr", "1e-3"], "optim.lr=1e-3"),
        (["--batch-size", "16"], "data.batch_size=16"),
        (["--seed=3"], "seed=3"),
    ],
)
@pytest.mark.quick_cases(1)
def test_a_key_typed_as_a_flag_is_one_line_with_the_key(
    typed: list[str], key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said = fail(capfd, *SMALL, *typed)
    assert said == f"error: {typed[0]}: keys have no dashes: {key}\n"
    words = [word for word in SMALL if word.partition("=")[0] != key.partition("=")[0]]
    succeed(capfd, *words, key, "trainer.steps=1")


def test_a_misspelled_flag_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert fail(capfd, *SMALL, "--dryrun") == (
        "error: there is no flag --dryrun: did you mean --dry-run?\n"
    )


@pytest.mark.parametrize("recipe", ["bert_classifier", "sft_chat"])
@pytest.mark.quick_cases(1)
def test_a_misspelled_model_is_named_by_the_key_that_was_typed(
    recipe: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_reviews(Path("texts.jsonl"), 4)
    write_chats(Path("chats.jsonl"), 4)
    write_bert(Path("bert"), layers=1)
    data = "texts.jsonl" if recipe == "bert_classifier" else "chats.jsonl"
    said = fail(capfd, f"recipe={recipe}", "model.source=./brt", f"data.path={data}")
    assert said.startswith("error: model.source=./brt: no such file or directory")


def test_a_loss_with_class_weights_is_priced(capfd: pytest.CaptureFixture[str]) -> None:
    weights = "trainer.class_weights=[1,2,1,1,1,1,1,1,1,1]"
    succeed(capfd, *SMALL, weights, "trainer.steps=2", "hardware=h100")
    predicted = json.loads(Path("outputs/digits/summary.json").read_text())["predicted"]
    assert predicted["step_ms"] > 0
    assert predicted["reason"] is None


def test_a_sweep_with_a_value_twice_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["submit", *SMALL, "--dry-run", "--multirun"]
    said = fail(capfd, *words, "optim.lr=0.1,0.1")
    assert "the sweep has this combination twice" in said
    assert "optim.lr=0.1; write each value once" in said


@pytest.mark.thorough
def test_a_sweep_under_torchrun_is_submitted_by_the_command_of_the_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["--multirun", *SMALL, "optim.lr=0.1,0.2"]
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    done = single(words, env=ranks | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    assert done.returncode == 2
    assert "hybridtrain submit --multirun" in done.stderr
    assert main(["submit", *words, "--dry-run"]) == 0
    assert "#SBATCH --array=1-2" in capfd.readouterr().out


@pytest.mark.thorough
def test_standard_input_of_two_processes_is_read_by_one_or_from_a_file() -> None:
    write_images("pets", {"train": 2, "val": 2})
    words = ["recipe=digits", "data=image_folder", "data.root=pets", "data.image_size=8"]
    words += ["data.batch_size=4", "trainer.epochs=null", "trainer.steps=1", "world.devices=cpu"]
    forked_command(1, words, Path("log"))
    predict = ["predict", "run_name=digits", "output=out.jsonl"]
    with pytest.raises(pytest.fail.Exception, match=r"start one, or set data.predict_path= to a f"):
        forked_command(2, [*predict, "data.predict_path=-"], Path("log"))
    forked_command(2, [*predict, "data.predict_path=pets/val/red/0.png"], Path("log"))
    done = subprocess.run(
        [sys.executable, "-m", "hybridtrain", *predict, "data.predict_path=-"],
        input="pets/val/red/0.png\n", text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_a_cache_that_cannot_be_written_is_moved_by_the_variable_of_the_error() -> None:
    write_reviews(Path("texts.jsonl"), 12)
    write_bert(Path("bert"), layers=1)
    Path("file").write_text("")
    words = ["recipe=bert_classifier", "model.source=./bert", "data.path=texts.jsonl"]
    said = single([*words, "--dry-run"], env={"HF_HOME": "file/cache"}).stderr
    assert "set HF_HOME= to a writable folder" in said
    done = single([*words, "--dry-run"], env={"HF_HOME": "cache"})
    assert done.returncode == 0, done.stderr
