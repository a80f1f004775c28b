"""Small real files, in the formats of the public data sets, that a model can learn from."""

import random
import struct
import tarfile
from pathlib import Path

import torch
import torch.nn.functional as F

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
