"""The image processor of a base model: it prepares the images of a run, and the export has it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_runs import succeed
from PIL import Image
from support.cases import installed
from support.small_data import write_images

installed("transformers")

RUN = [
    *("recipe=image_folder_vit", "model=transformers", "model.source=./vit", "~model.name"),
    *("model.task=image_classification", "trainer.loss=cross_entropy", "data.root=pets"),
    *("data.image_size=null", "data.workers=0", "data.batch_size=4", "trainer.epochs=null"),
    *("trainer.steps=1", "lr_schedule.warmup_steps=0", "pipeline.nb_part=1", "run_name=pets"),
    *("world.devices=cpu", "monitor.report=false"),
    "init_from={path: ./vit, strict: false}",
]


def write_vit(**settings: object) -> None:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        image_size=24, patch_size=8,
    )  # fmt: skip
    torch.manual_seed(0)
    ViTForImageClassification(config).save_pretrained("vit")
    made = ViTImageProcessor(size={"height": 24, "width": 24}, image_mean=[0.1, 0.2, 0.3])
    made.save_pretrained("vit")
    path = Path("vit/preprocessor_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_images_are_prepared_as_by_the_base_and_the_export_has_its_processor(
    capfd: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    write_vit()
    write_images("pets", {"train": 4, "val": 2})
    said = succeed(capfd, *RUN)
    assert "24 x 24 pixels by the image processor of ./vit" in said
    succeed(capfd, "export", "run_name=pets", "format=transformers")
    (folder,) = Path("outputs/pets/export").iterdir()
    before, after = (
        json.loads((place / "preprocessor_config.json").read_text())
        for place in (Path("vit"), folder)
    )
    assert after == before
    processor = AutoImageProcessor.from_pretrained("vit")
    Path("vit/preprocessor_config.json").unlink()  # the checkpoint has it
    succeed(capfd, "predict", "run_name=pets", "data.predict_path=pets/val", "output=o.jsonl")
    lines = [json.loads(line) for line in Path("o.jsonl").read_text().splitlines()]
    succeed(capfd, "predict", "run_name=pets", "data.predict_path=pets/val", "output=o.npy")
    logits = torch.tensor(np.load("o.npy"))
    net = AutoModelForImageClassification.from_pretrained(folder).eval()
    names = [net.config.id2label[number] for number in range(3)]
    for line, row in zip(lines, logits, strict=True):
        pixels = processor(images=Image.open(line["file"]), return_tensors="pt")
        with torch.no_grad():
            wanted = net(**pixels).logits[0]
        torch.testing.assert_close(row, wanted, rtol=1e-4, atol=1e-6)
        given = torch.tensor([line["probabilities"][name] for name in names])
        torch.testing.assert_close(given, wanted.softmax(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "size", "shape"),
    [
        ({"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 24},
          "crop_size": {"height": 20, "width": 20}, "do_center_crop": True}, None, 20),
        ({"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 24},
          "crop_size": {"height": 20, "width": 20}, "do_center_crop": True}, 40, 40),
        ({"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 32},
          "crop_pct": 0.875}, None, 32),
        ({"do_normalize": False}, 12, 12),
    ],
    ids=["a crop", "a larger crop", "a share", "not normalized"],
)  # fmt: skip
@pytest.mark.quick_cases(1)
def test_the_size_is_that_of_the_processor_or_the_one_that_is_set(
    settings: dict[str, object], size: int | None, shape: int
) -> None:
    from transformers import AutoImageProcessor

    from hybridtrain.datasets import image_folder

    write_vit(**settings)
    write_images("pets", {"train": 1, "val": 1})
    data = image_folder("pets", image_size=size, model_source="./vit")
    assert data.eval is not None
    image, _ = data.eval[0]  # type: ignore[index]
    assert image.shape == (3, shape, shape)
    assert data.train[0][0].shape == (3, shape, shape)  # type: ignore[index]
    if size is None:
        given = AutoImageProcessor.from_pretrained("vit")
        first = Image.open("pets/val/blue/0.png")
        assert torch.equal(image, given(images=first, return_tensors="pt")["pixel_values"][0])


def test_a_model_without_a_processor_leaves_the_preset_as_it_is() -> None:
    from hybridtrain.datasets import image_folder

    write_images("pets", {"train": 1, "val": 1})
    Path("bare").mkdir()
    plain, other = (image_folder("pets", model_source=name) for name in (None, "./bare"))
    assert plain.metadata == other.metadata
    assert plain.metadata["image_size"] == 224
