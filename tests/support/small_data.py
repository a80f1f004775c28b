"""Small real files, in the formats of the public data sets, that a model can learn from."""

import hashlib
import pickle
import random
import shutil
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from hybridtrain.datasets import digits

_GOOD = ["wonderful", "superb", "moving", "brilliant", "charming", "delightful", "masterful"]
_BAD = ["dreadful", "boring", "clumsy", "pointless", "tedious", "lifeless", "forgettable"]
_EITHER = [
    *("the", "a", "this", "film", "movie", "plot", "actor", "scene", "story", "ending", "music"),
    *("of", "and", "with", "in", "it", "was", "is", "director", "dialogue", "cast", "script"),
]


def write_mnist(root: str | Path, n_train: int = 200, n_test: int = 50, seed: int = 0) -> Path:
    """Write the four IDX files of MNIST under `root`, and return their folder `root/MNIST/raw`.

    The images are the package's own digits, enlarged to 24x24 in a border of 2, so that a model
    learns from them as it would from MNIST. At most 1,442 for training and 355 for testing.
    """
    raw = Path(root) / "MNIST" / "raw"
    raw.mkdir(parents=True)
    splits = digits()
    generator = torch.Generator().manual_seed(seed)
    for prefix, half, count in (("train", splits.train, n_train), ("t10k", splits.eval, n_test)):
        assert count <= len(half)
        chosen = torch.randperm(len(half), generator=generator)[:count].tolist()
        images, labels = half.__getitems__(chosen)
        lowest, highest = images.min(), images.max()
        grey = (images - lowest) / (highest - lowest) * 255
        grey = F.pad(F.interpolate(grey, scale_factor=3), (2, 2, 2, 2)).round().to(torch.uint8)
        # IDX: two zero bytes, the type (8: bytes), the number of dimensions, then each dimension.
        head = struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(head + grey.numpy().tobytes())
        head = struct.pack(">4B1I", 0, 0, 8, 1, count)
        body = labels.to(torch.uint8).numpy().tobytes()
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(head + body)
    return raw


def write_imdb(root: str | Path, n: int = 40, seed: int = 0, archive: bool = False) -> Path:
    """Write `n` reviews for training and `n` for testing under `root`, half of each positive.

    They are in `root/aclImdb/{train,test}/{pos,neg}/<id>_<stars>.txt` or, with `archive`, in
    `root/aclImdb_v1.tar.gz`, beside the unlabelled ones and the read-me that the real one has.
    Returns that folder or file. Three or four words of a review give its label away.
    """
    root = Path(root)
    rng = random.Random(seed)
    reviews = {"README": "Large Movie Review Dataset v1.0\n", "train/unsup/0_0.txt": "Hm.\n"}
    for half in ("train", "test"):
        for label, telling, stars in (("pos", _GOOD, 9), ("neg", _BAD, 2)):
            for i in range(n // 2):
                words = rng.choices(_EITHER, k=rng.randint(8, 60))
                for word in rng.sample(telling, k=rng.randint(3, 4)):
                    words.insert(rng.randrange(min(8, len(words))), word)
                text = " ".join(words).capitalize() + ".<br /><br />" + "That's all!"
                reviews[f"{half}/{label}/{i}_{stars}.txt"] = text
    folder = root / "aclImdb"
    for name, text in reviews.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if not archive:
        return folder
    packed = root / "aclImdb_v1.tar.gz"
    with tarfile.open(packed, "w:gz") as tar:
        tar.add(folder, arcname="aclImdb")
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    return packed


def write_images(
    root: str | Path, counts: Mapping[str, int] | None = None, per_class: int = 0
) -> Path:
    """Write PNG files of three colours, `blue`, `green` and `red`, and return their folder `root`.

    With `counts` there are so many of each class in each split, `root/<split>/<class>/<i>.png`,
    else `per_class` in `root/<class>/<i>.png`. All images differ, and are not square.
    """
    rng = np.random.default_rng(0)
    for split, count in (counts or {".": per_class}).items():
        for number, colour in enumerate(("blue", "green", "red")):
            folder = Path(root) / split / colour
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = rng.integers(0, 90, (40 + i % 5, 50, 3), dtype=np.uint8)
                pixels[..., 2 - number] += 150
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return Path(root)


def write_cifar10(
    root: str | Path, monkeypatch: pytest.MonkeyPatch, n: int = 20, archive: bool = False
) -> Path:
    """Write CIFAR-10's files with `n` images in each of its six, and return their folder.

    They are in `root/cifar-10-batches-py` or, with `archive`, in `root/cifar-10-python.tar.gz`.
    torchvision compares MD5 sums before it unpickles a file, so these files' are put into it.
    """
    from torchvision.datasets import CIFAR10

    root, rng = Path(root), np.random.default_rng(0)
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    lists: dict[str, list[list[str]]] = {"train_list": [], "test_list": []}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        labels = [i % 10 for i in range(n)]
        pixels = rng.integers(0, 100, (n, 3072), dtype=np.uint8)
        pixels += (np.asarray(labels, dtype=np.uint8) * 15)[:, None]
        content = pickle.dumps({"data": pixels, "labels": labels}, protocol=2)
        (folder / name).write_bytes(content)
        key = "test_list" if name == "test_batch" else "train_list"
        lists[key].append([name, hashlib.md5(content).hexdigest()])
    meta = pickle.dumps({"label_names": list("abcdefghij")}, protocol=2)
    (folder / "batches.meta").write_bytes(meta)
    for key, value in lists.items():
        monkeypatch.setattr(CIFAR10, key, value)
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": hashlib.md5(meta).hexdigest()})
    if not archive:
        return folder
    packed = root / "cifar-10-python.tar.gz"
    with tarfile.open(packed, "w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    shutil.rmtree(folder)
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(packed.read_bytes()).hexdigest())
    return packed


def write_texts(root: str | Path, files: int = 4, words: int = 400) -> Path:
    """Write text files `root/<i>.txt` and `root/more/<i>.txt`, and return `root`."""
    rng = random.Random(0)
    for i in range(files):
        path = Path(root) / ("more" if i % 2 else ".") / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{i}: " + " ".join(rng.choices(_EITHER + _GOOD, k=words)) + "\n")
    return Path(root)


def rows_of_texts(n: int = 40, seed: int = 0) -> list[dict[str, Any]]:
    """Returns rows with `text`, `other` (its words backwards), `label` and `score`."""
    rng, rows = random.Random(seed), []
    for i in range(n):
        words = rng.choices(_EITHER, k=rng.randint(3, 20))
        words.insert(rng.randrange(3), rng.choice((_BAD, _GOOD)[i % 2]))
        row = {"text": " ".join(words), "other": " ".join(reversed(words))}
        rows.append({**row, "label": ("neg", "pos")[i % 2], "score": i % 2 + rng.random() / 10})
    return rows


def write_tokenizer(path: str | Path, **without: bool) -> Path:
    """Train a tokenizer of whole words on the words of these texts, and return its file.

    It puts [CLS] before and [SEP] behind a text, as BERT's; `mask=False` leaves out its mask.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(["[MASK]"] * without.get("mask", True))]
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([" ".join(_GOOD + _BAD + _EITHER)], trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(path))
    return Path(path)
