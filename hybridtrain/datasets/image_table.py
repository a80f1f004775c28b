"""A table of image files and their classes."""

from __future__ import annotations

import os
from pathlib import Path

from hybridtrain.data import DataSplits, for_trained_models
from hybridtrain.datasets.held_out import note_without_held_out
from hybridtrain.datasets.hf_datasets import number_classes
from hybridtrain.datasets.image_folder import (
    Images,
    image_metadata,
    image_notes,
    image_transform,
    only_to_predict,
    training_images,
)
from hybridtrain.datasets.sample_files import SampleFiles, check_columns
from hybridtrain.errors import DataError, argument, setting


@for_trained_models(only_to_predict, skips_training=True, path="eval_path")
def image_table(
    path: str,
    root: str | None = None,
    image: str = "image",
    target: str = "label",
    image_size: int | None = None,
    augment: bool = True,
    rand_augment: int | None = None,
    mixup: float = 0.0,
    eval_path: str | None = None,
    eval_share: float = 0.1,
    split_seed: int = 0,
    stratify: bool | str = False,
    separator: str | None = None,
    drop_missing: bool = False,
    classes: list[str] | None = None,
    predict_path: str | None = None,
    model_source: str | None = None,
) -> DataSplits:
    """Returns the images listed in a table, with their classes.

    Items, metadata and transforms are the same as for `image_folder`. Text classes are numbered in
    the order of their names.

    Args:
        path: a .csv, .tsv, .jsonl or .parquet file with one line per image; a pattern, or a folder
            of such files named after their splits.
        root: the folder of relative paths; None: the folder of the table.
        image: the column of the paths.
        target: the column of the classes.
        image_size: see `image_folder`.
        augment: random crops and flips in training; False: as in evaluation.
        rand_augment: see `image_folder`.
        mixup: see `image_folder`.
        eval_path: the path of the evaluation split, like `path`; None: a split of `path`, or a
            held-out share of it.
        eval_share: the share to hold out if there is no evaluation split, 0 to 1.
        split_seed: the seed for choosing held-out images.
        stratify: whether to hold out the share of each class; `auto`: if each class has
            enough samples.
        separator: see `hf_datasets`.
        drop_missing: whether to leave out images without a path or a class; False: an error.
        classes: the class names in index order; None: sorted.
        predict_path: see `image_folder`.
        model_source: see `image_folder`.

    Raises:
        DataError: the table, a column or an image file is missing, the splits have different
            classes, or a number is out of range.
    """
    if not path:
        raise DataError(f"{argument('path')} is not set: set it to a table of images and classes")
    prepared = image_metadata(image_size, model_source)
    files = SampleFiles(
        *(path, None, eval_path, "train", None, eval_share, split_seed),
        stratify=stratify,
        classes=target,
        separator=separator,
        drop_missing=drop_missing,
    )
    source = files.read({image: "image", target: "target"}, blank_targets=False)
    check_columns(source.samples, "image", [image], "text")
    numbering = number_classes(source, [target], classes, path)
    listed: dict[str, list[tuple[str, int]]] = {}
    places = {"train": path, "eval": path if eval_path is None else eval_path}
    for split, samples in source.samples.items():
        folder = Path(root) if root is not None else _folder_of(places[split])
        names = [os.path.join(folder, name) for name in samples[image]]
        numbers = numbering.numbers[split]
        missing = next((name for name in names if not os.path.isfile(name)), None)
        if missing is not None:
            raise DataError(
                f"{setting('image', image)}: no such file: {missing}. Set {argument('root')} to "
                f"the folder that the paths in {places[split]} are relative to"
            )
        listed[split] = [
            (name, numbers[value]) for name, value in zip(names, samples[target], strict=True)
        ]
    metadata = {"num_classes": numbering.count, **prepared}
    if numbering.names is not None:
        metadata["classes"] = numbering.names
    alone = only_to_predict(prepared, predict_path=predict_path)
    return DataSplits(
        predict=alone.predict,
        train=training_images(
            listed["train"], prepared, augment, rand_augment, mixup, numbering.count
        ),
        eval=Images(listed["eval"], image_transform(prepared)),
        metadata=metadata,
        held_out=source.held_out,
        notes=[
            *(
                note_without_held_out(numbering.without_held_out(), stratify)
                if source.held_out
                else []
            ),
            *image_notes(prepared, model_source),
            *source.notes,
        ],
        digest=source.digest,
        without_samples=numbering.without_samples,
    )


def _folder_of(path: str) -> Path:
    """Returns the folder of a table or pattern (up to its first wildcard), or a folder itself."""
    place = Path(path).expanduser()
    if place.is_dir():
        return place
    while any(sign in str(place) for sign in "*?["):
        place = place.parent
        if place.is_dir():
            return place
    return place.parent
