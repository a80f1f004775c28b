"""Images that a table names; RandAugment and mixup."""

from pathlib import Path

import pytest
import torch
from support.cases import installed
from support.small_data import write_images

from hybridtrain.datasets import image_folder, image_table
from hybridtrain.errors import DataError

installed("datasets")


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table of the images of a folder, whose paths begin at the table."""
    monkeypatch.chdir(tmp_path)
    write_images("data", {"train": 8, "val": 3})
    files = sorted(path for path in Path("data").rglob("*") if path.is_file())
    rows = [f"{path.relative_to('data')},{path.parent.name}" for path in files]
    Path("data/table.csv").write_text("\n".join(["image,label", *rows]) + "\n")
    return "data/table.csv"


def test_a_table_gives_the_images_and_classes_of_a_folder(table):
    ours = image_table(table, image_size=16, eval_share=0.3)
    folder = image_folder("data", image_size=16)
    assert ours.metadata == folder.metadata
    assert ours.held_out
    assert len(ours.train) + len(ours.eval) == len(folder.train) + len(folder.eval)
    path, label = ours.eval.files[0]
    assert Path(path).parent.name == ours.metadata["classes"][label]
    assert ours.eval[0][0].shape == (3, 16, 16)
    assert len(ours.train.labels()) == len(ours.train)


def test_a_file_that_is_missing_is_named_with_the_key_to_set(table):
    with pytest.raises(DataError, match=r"no such file: other/.* root="):
        image_table(table, root="other")
    with pytest.raises(DataError, match=r"image=picture: .* no such column"):
        image_table(table, image="picture")


def test_a_mixed_sample_is_a_mean_of_two_and_depends_on_its_own_draws_alone(table):
    data = image_table(table, image_size=16, augment=False, mixup=0.4, eval_share=0.3)
    torch.manual_seed(5)
    image, probabilities = data.train[2]
    assert probabilities.sum().item() == pytest.approx(1)
    assert int((probabilities > 0).sum()) <= 2
    torch.manual_seed(5)
    again, _ = data.train[2]
    assert torch.equal(image, again)
    torch.manual_seed(5)
    share = torch.distributions.Beta(0.4, 0.4).sample()
    other = int(torch.randint(len(data.train), ()))
    first, second = (data.train.dataset[i][0] for i in (2, other))
    torch.testing.assert_close(image, share * first + (1 - share) * second)
    assert torch.equal(data.train.labels(), data.train.dataset.labels())


def test_randaugment_changes_training_images_alone(table):
    plain, augmented = (
        image_table(table, image_size=16, augment=False, rand_augment=magnitude)
        for magnitude in (None, 30)
    )
    torch.manual_seed(0)
    changed = [
        not torch.equal(plain.train[i][0], augmented.train[i][0]) for i in range(len(plain.train))
    ]
    assert any(changed)
    assert torch.equal(plain.eval[0][0], augmented.eval[0][0])
    for settings in ({"rand_augment": 31}, {"mixup": -1}):
        with pytest.raises(DataError, match="must be"):
            image_table(table, **settings)
