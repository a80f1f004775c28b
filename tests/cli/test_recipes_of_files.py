"""The recipes whose data are files of the user's: each trains on small real files of its format."""

import json
from pathlib import Path

import pytest
from support.cases import thorough
from support.small_hub import write_bert, write_reviews, write_t5
from test_recipes import TINY

from hybridtrain.app.cli import main

RECIPES = ["gpt_text_files", "gpt_token_files"]
SHORT = ["world.devices=cpu", "trainer.epochs=null", "trainer.steps=2", "trainer.eval_every=2"]
SMALL_GPT = ["model.n_layer=2", "model.d_model=16", "model.n_head=2", "data.seq_len=16"]


def write_texts(folder: Path) -> None:
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text("what is written in a book of some size\n" * 200)


def write_tokens(folder: Path) -> None:
    import numpy as np

    folder.mkdir()
    for name in ("train", "val"):
        np.arange(4000, dtype=np.uint16).__mod__(50).tofile(folder / f"{name}.bin")


def write_pictures(folder: Path) -> None:
    from PIL import Image

    for split in ("train", "val"):
        for number, colour in enumerate(("red", "blue")):
            (folder / split / colour).mkdir(parents=True)
            for each in range(8):
                picture = Image.new("RGB", (40 + each, 36), (255 * (1 - number), 0, 255 * number))
                picture.save(folder / split / colour / f"{each}.png")


def settings_of(recipe: str, folder: Path) -> list[str]:
    """Makes the recipe's data in `folder`, and returns what a small run of it needs."""
    hub = ["model.source=./bert", "data.path=r.jsonl", "data.max_len=16", "data.batch_size=8"]
    if recipe in ("bert_classifier", "t5_summaries", "gpt2_text"):
        write_reviews(folder / "r.jsonl", 60)
        write_bert(folder / "bert", layers=2)
    match recipe:
        case "gpt_text_files":
            write_texts(folder / "books")
            return [*SMALL_GPT, "data.path=books"]
        case "gpt_token_files":
            write_tokens(folder / "tokens")
            return [*SMALL_GPT, "data.root=tokens", "data.batch_size=8"]
        case "image_folder_vit":
            write_pictures(folder / "pictures")
            return ["data.root=pictures", "data.image_size=32", "data.batch_size=8"]
        case "bert_classifier":
            return hub
        case "t5_summaries":
            write_t5(folder / "t5", folder / "bert")
            return [*hub, "model.source=./t5", "data.target=label"]
        case "gpt2_text":
            size = [f"model.config.{key}" for key in ("n_layer=2", "n_head=2", "n_embd=16")]
            return [*hub[1:], *size, "data.tokenizer=./bert"]
    raise AssertionError(recipe)


LONG = ["bert_classifier", "gpt2_text", "image_folder_vit", "t5_summaries"]


@pytest.mark.parametrize("recipe", [*RECIPES, *thorough(LONG)])
def test_a_recipe_trains_and_is_evaluated_on_small_data_of_its_format(
    recipe: str, tmp_path: Path
) -> None:
    settings = settings_of(recipe, tmp_path)
    assert main([f"recipe={recipe}", *settings, *SHORT]) == 0
    summary = json.loads((tmp_path / f"outputs/{recipe}/summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["eval"]["samples"] > 0
    assert len(summary["stages"]) == 2


def test_no_recipe_is_forgotten() -> None:
    there = {path.stem for path in (Path(__file__).parents[2] / "recipes").glob("*.yaml")}
    assert there == {*TINY, *RECIPES, *LONG, "cifar10_resnet18"}  # which has a test with its data
