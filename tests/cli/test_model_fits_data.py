"""A model of transformers for another kind of data ends in one line."""

import json
from pathlib import Path

import pytest
from cli_runs import fail, succeed
from support.small_data import write_images, write_tokenizer

IMAGES = [
    *("recipe=image_folder_vit", "data.root=pets", "data.image_size=32", "data.workers=0"),
    *("model=transformers", "trainer.epochs=null", "lr_schedule.warmup_steps=0"),
]
TEXTS = ["data=datasets", "data.path=a.jsonl", "data.tokenizer=./tokenizer.json"]
TEXTS += ["model=transformers"]
SHORT = [
    *("pipeline.nb_part=1", "pipeline.chunks=1", "world.devices=cpu", "trainer.steps=1"),
    *("data.batch_size=8", "monitor.report=false"),
]


def model(kind: str, more: str = "") -> str:
    sizes = "hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16"
    return f"model.config={{model_type: {kind}, {sizes}{more}}}"


VIT = ["model.task=image_classification", model("vit", ", patch_size: 8")]


@pytest.fixture(autouse=True)
def _data(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    write_images("pets", per_class=6)
    write_tokenizer(tmp_path / "tokenizer.json")
    rows = [{"text": "the plot", "label": ("neg", "pos")[i % 2]} for i in range(10)]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*TEXTS, *VIT], "ViTForImageClassification takes images, but the data set has texts"),
        (
            [*IMAGES, model("bert")],
            "BertForSequenceClassification takes token ids, but the data set has images",
        ),
        (
            [*IMAGES, VIT[0], model("vit", ", patch_size: 8, image_size: 64")],
            "images of the data set, 32 x 32 pixels with 3 color channels",
        ),
        (
            [*IMAGES, VIT[0], model("vit", ", patch_size: 8, num_channels: 1")],
            "images of the data set, 32 x 32 pixels with 3 color channels",
        ),
    ],
    ids=["texts", "images", "size", "colours"],
)
@pytest.mark.quick_cases(1)
def test_other_data_than_the_model_takes_is_one_line(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said = fail(capfd, *words, *SHORT)
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.thorough
def test_a_model_that_takes_other_sizes_than_its_own_takes_them(
    capfd: pytest.CaptureFixture[str],
) -> None:
    sizes = "depths: [1, 1, 1, 1], hidden_sizes: [8, 8, 8, 8], image_size: 64"
    config = f"model.config={{model_type: convnext, {sizes}}}"
    said = succeed(capfd, *IMAGES, VIT[0], config, *SHORT)
    assert "done: 1 steps" in said
