"""Every recipe, for a few steps on small data."""

import json
import math
from pathlib import Path

import hybridtrain.recipes
import numpy as np
import pytest
from cli_runs import metrics, succeed
from support.small_data import (
    write_cifar10,
    write_images,
    write_imdb,
    write_mnist,
    write_texts,
)

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
    "gpt_text_files": [
        *("data.path=data", "data.seq_len=32", "data.eval_share=0.2", "data.max_tokens=20000"),
        *("model.d_model=16", "model.n_head=2"),
    ],
    "gpt_token_files": [
        *("data.root=data", "data.seq_len=32", "data.vocab_size=256", "pipeline.chunks=4"),
        *("model.n_layer=2", "model.d_model=16", "model.n_head=2"),
    ],
    "cifar10_resnet18": ["data.root=data", "data.workers=1"],
    # with a smaller model: a vision transformer of torchvision has 86 million parameters
    "image_folder_vit": [
        *("data.root=data", "data.workers=0", "data.image_size=32"),
        *("model.name=shufflenet_v2_x0_5", "pipeline.chunks=2"),
    ],
}

CLASSES = {
    "imdb_transformer": 2,
    "image_folder_vit": 3,
    **dict.fromkeys(("python_source_gpt", "gpt_text_files", "gpt_token_files"), 256),
}


def write_data(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes small data for a recipe into the folder `data`, in the format that it reads."""
    if recipe == "mnist_basicnet":
        write_mnist("data", n_train=48, n_test=20)
    elif recipe == "imdb_transformer":
        pytest.importorskip("torchtext")
        write_imdb("data", n=40)
    elif recipe == "cifar10_resnet18":
        write_cifar10("data", monkeypatch, n=16)
    elif recipe == "image_folder_vit":
        write_images("data", {"train": 16, "val": 3})
    elif recipe == "gpt_text_files":
        write_texts("data")
    elif recipe == "gpt_token_files":
        Path("data").mkdir()
        for split, count in (("train", 4000), ("val", 700)):
            ids = np.random.default_rng(0).integers(0, 256, count, dtype=np.uint16)
            ids.tofile(f"data/{split}.bin")


@pytest.mark.parametrize("recipe", TINY)
def test_every_recipe_trains_a_few_steps_on_small_data(
    recipe: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data(recipe, monkeypatch)
    few = ["trainer.epochs=null", "trainer.steps=3", "trainer.log_every=1", "data.batch_size=16"]
    cpu = ["world.devices=cpu", "monitor.tensorboard=false"]
    said = succeed(capfd, f"recipe={recipe}", *few, *cpu, *TINY[recipe])
    run = Path("outputs") / recipe
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["world"]["nb_part"] == len(summary["stages"]) == 2
    losses = [line["train/loss"] for line in metrics(run) if "train/loss" in line]
    assert len(losses) == 3
    # untrained, a model knows about as much as one that guesses
    assert losses[0] == pytest.approx(math.log(CLASSES.get(recipe, 10)), rel=0.5)
    assert summary["eval"]["samples"] > 0
    assert 0 <= summary["eval"]["accuracy"] <= 1
    assert (run / "checkpoints" / "step_00000003").is_dir()
    assert "1 process x 2 stages" in said


def test_every_recipe_is_tried() -> None:
    assert set(TINY) == {path.stem for path in Path(hybridtrain.recipes.__path__[0]).glob("*.yaml")}
