"""What a command does not use, by the table of commands, is neither built nor read."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from cli_runs import succeed
from support.small_data import write_images
from support.small_hub import write_bert, write_chats, write_llama, write_reviews

from hybridtrain.cli import main
from hybridtrain.cli.command_table import COMMANDS, PARTS

FEW = [
    *("world.devices=cpu", "pipeline.nb_part=1", "pipeline.chunks=2", "data.batch_size=8"),
    *("trainer.epochs=null", "trainer.steps=2", "lr_schedule.warmup_steps=0"),
    *("monitor.report=false", "trainer.eval_every=null", "checkpoint.every_steps=null"),
]
RUN = [
    *("recipe=bert_classifier", "model.source=./bert", "data.tokenizer=./tokenizer"),
    *("data.path=train.jsonl", "data.eval_path=eval.jsonl", "data.max_len=16"),
    *("trainer.class_weights=auto", "run_name=run", *FEW),
]
# What a user types, for each command that builds a run; the others only start or read runs.
TYPED = {
    "train": ["train", "run_name=run", "trainer.steps=3"],
    "plan": ["plan", "run_name=run"],
    "verify": ["verify", "run_name=run"],
    "find-lr": ["find-lr", "run_name=run"],
    "evaluate": ["evaluate", "run_name=run"],
    "predict": ["predict", "run_name=run"],
    "export": ["export", "run_name=run", "format=torch_export"],
}


def set_key(group: str, key: str, value: Any) -> None:
    path = Path("outputs/run/config.yaml")
    config = yaml.safe_load(path.read_text())
    (config[group] if key else config)[key or group] = value
    path.write_text(yaml.safe_dump(config))


BREAK: dict[str, Callable[[], object]] = {
    "model": lambda: set_key("model", "auto", "AutoModelOfNothing"),
    "loss": lambda: set_key("trainer", "label_smoothing", 7.0),
    "metrics": lambda: set_key("trainer", "metrics", ["nothing"]),
    "callbacks": lambda: set_key("callbacks", "", {"nothing": {}}),
    "optimizer": lambda: set_key("optim", "_target_", "torch.optim.Nothing"),
    "training data": lambda: Path("train.jsonl").unlink(),
    "evaluation data": lambda: Path("eval.jsonl").unlink(),
    "tokenizer": lambda: shutil.rmtree("tokenizer"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on texts; tests take a copy of it."""
    pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_bert(Path("bert"), layers=1)
        Path("tokenizer").mkdir()
        for file in Path("bert").glob("tokenizer*"):
            shutil.move(file, "tokenizer")
        write_reviews(Path("train.jsonl"), 24)
        write_reviews(Path("eval.jsonl"), 8)
        assert main(RUN) == 0
    return folder


@pytest.fixture
def _in_a_copy(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)


def test_every_command_that_builds_a_run_and_every_part_are_tested() -> None:
    assert set(TYPED) == {name for name, command in COMMANDS.items() if command.takes == "settings"}
    assert set(BREAK) == set(PARTS)
    assert {name for name in TYPED if set(COMMANDS[name].parts) == set(PARTS)} == {"train"}


@pytest.mark.usefixtures("_in_a_copy")
@pytest.mark.parametrize("command", [name for name in TYPED if name != "train"])
@pytest.mark.quick_cases("evaluate")
def test_a_command_needs_no_part_that_it_does_not_use(
    command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for part in PARTS:
        if part not in COMMANDS[command].parts:
            BREAK[part]()
    code = main(TYPED[command])
    said = capfd.readouterr().err
    # random weights may have no learning rate
    assert code == 0 or (command == "find-lr" and "the loss does not fall" in said), said


@pytest.mark.thorough
@pytest.mark.usefixtures("_in_a_copy")
@pytest.mark.parametrize(
    ("command", "part"), [(name, part) for name in TYPED for part in COMMANDS[name].parts]
)
def test_a_command_needs_each_part_that_it_uses(
    command: str, part: str, capfd: pytest.CaptureFixture[str]
) -> None:
    BREAK[part]()
    assert main(TYPED[command]) == 2
    assert "error: " in capfd.readouterr().err


@pytest.mark.usefixtures("_in_a_copy")
def test_an_evaluation_has_the_class_weights_of_the_training(
    capfd: pytest.CaptureFixture[str],
) -> None:
    trained = json.loads(Path("outputs/run/summary.json").read_text())["eval"]
    BREAK["training data"]()
    assert main(TYPED["evaluate"]) == 0
    assert json.loads(capfd.readouterr().out)["loss"] == trained["loss"]


@pytest.mark.usefixtures("_in_a_copy")
def test_new_texts_are_predicted_without_any_other_data(capfd: pytest.CaptureFixture[str]) -> None:
    for part in ("loss", "training data", "evaluation data"):
        BREAK[part]()
    write_reviews(Path("new.jsonl"), 3)
    words = ["run_name=run", "data.predict_path=new.jsonl", "output=new.out.jsonl"]
    succeed(capfd, "predict", *words)
    lines = [json.loads(line) for line in Path("new.out.jsonl").read_text().splitlines()]
    assert [list(line["probabilities"]) for line in lines] == 3 * [["neg", "pos"]]


TEXTS = ["model=gpt", "model.d_model=16", "model.n_layer=1", "model.n_head=1", "data.seq_len=16"]
CHATS = [
    *("recipe=sft_chat", "model.source=./llama", "model.dtype=float32", "data.max_len=32"),
    *("data.path=train", "data.eval_path=eval"),
]
PHOTOS = [
    *("recipe=image_folder_vit", "data=image_table", "data.path=train", "data.eval_path=eval"),
    *("data.image_size=32", "model=timm", "model.name=resnet10t", "data.workers=0"),
]


def write_photos() -> None:
    for split in ("train", "eval"):
        write_images(f"{split}_photos", per_class=4)
        names = [*Path(f"{split}_photos").rglob("*.png")]
        lines = [f"{name},{name.parent.name}\n" for name in names]
        Path(f"{split}.csv").write_text("image,label\n" + "".join(lines))


def write_of_chats() -> None:
    write_llama(Path("llama"), layers=1)
    for split in ("train", "eval"):
        write_chats(Path(f"{split}.jsonl"), 8)


def write_of_text() -> None:
    for split in ("train", "eval"):
        Path(f"{split}.txt").write_text("a text to learn from, line by line\n" * 40)


def write_of_tokens() -> None:
    for split in ("train", "eval"):
        (np.arange(500, dtype=np.uint16) % 50).tofile(f"{split}.bin")


def write_numbers(folder: str = ".") -> None:
    Path(folder).mkdir(exist_ok=True)
    for split, shift in (("train", 0), ("eval", 5)):
        rows = [f"{i + shift},{i % 7},{'ab'[i % 2]}\n" for i in range(24)]
        Path(folder, f"{split}.csv").write_text("x,y,label\n" + "".join(rows))


def write_split_reviews() -> None:
    write_bert(Path("bert"), layers=1)
    Path("reviews").mkdir()
    for split in ("train", "eval"):
        write_reviews(Path("reviews", f"{split}.jsonl"), 24)


def write_saved_reviews() -> None:
    import datasets

    write_split_reviews()
    loaded = datasets.load_dataset("json", data_dir="reviews")
    shutil.rmtree("reviews")
    splits = {"train": loaded["train"], "eval": loaded["test"]}
    datasets.DatasetDict(splits).save_to_disk("reviews")


def write_pets() -> None:
    for split in ("train", "eval"):
        write_images(f"pets/{split}", per_class=4)


NUMBERS = ["data=table", "model=tabular_mlp", "model.hidden=[8]"]
REVIEWS = ["recipe=bert_classifier", "model.source=./bert", "data.path=reviews", "data.max_len=16"]
PETS = ["recipe=image_folder_vit", "data.root=pets", "data.image_size=32", *PHOTOS[5:]]


@pytest.mark.parametrize(
    ("write", "suffix", "words"),
    [
        pytest.param(
            write_numbers, ".csv", [*NUMBERS, "data.path=train", "data.eval_path=eval"], id="table"
        ),
        pytest.param(
            partial(write_numbers, "numbers"),
            "numbers/train.csv",
            [*NUMBERS, "data.path=numbers"],
            id="folder of tables",
        ),
        pytest.param(write_split_reviews, "reviews/train.jsonl", REVIEWS, id="folder of texts"),
        pytest.param(write_saved_reviews, "reviews/train", REVIEWS, id="save_to_disk"),
        pytest.param(write_pets, "pets/train", PETS, id="image_folder"),
        pytest.param(write_of_chats, ".jsonl", CHATS, id="chat"),
        pytest.param(write_photos, ".csv", PHOTOS, id="image_table"),
        pytest.param(
            write_of_text,
            ".txt",
            [*TEXTS, "data=text_files", "data.path=train", "data.eval_path=eval"],
            id="text_files",
        ),
        pytest.param(
            write_of_tokens,
            ".bin",
            [*TEXTS, "data=token_files", "data.root=.", "data.train=train", "data.eval=eval"],
            id="token_files",
        ),
    ],
)
@pytest.mark.quick_cases("table")
def test_each_data_set_with_samples_to_evaluate_on_is_evaluated_without_those_to_train_on(
    write: Callable[[], None], suffix: str, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datasets")
    pytest.importorskip("timm")
    pytest.importorskip("peft")
    write()
    named = [w + suffix if w.endswith(("=train", "=eval")) else w for w in words]
    succeed(capfd, *named, *FEW, "run_name=run")
    trained = json.loads(Path("outputs/run/summary.json").read_text())["eval"]
    train = Path(f"train{suffix}" if suffix.startswith(".") else suffix)
    shutil.rmtree(train) if train.is_dir() else train.unlink()
    shutil.rmtree("train_photos", ignore_errors=True)
    capfd.readouterr()
    assert main(["evaluate", "run_name=run"]) == 0
    assert json.loads(capfd.readouterr().out)["loss"] == pytest.approx(trained["loss"], abs=1e-6)
    succeed(capfd, "predict", "run_name=run", "output=new.jsonl")
