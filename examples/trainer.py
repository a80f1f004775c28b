"""Trains and evaluates on the digits of the package with `Trainer`, and saves checkpoints.

python examples/trainer.py
torchrun --standalone --nproc-per-node 2 examples/trainer.py
"""

import sys
import tempfile
from pathlib import Path

import torch
from torchmetrics.classification import MulticlassAccuracy

from hybridtrain import HybridModel, Trainer, TrainerOptions, World
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.data import EvalLoader, TrainLoader
from hybridtrain.datasets import digits
from hybridtrain.loss import nll
from hybridtrain.models import basicnet
from hybridtrain.options import LoaderOptions


def main(folder: Path) -> None:
    """Trains for two epochs; checkpoints go to `folder`."""
    world = World.from_env(nb_part=2, devices="cpu")
    data = digits()
    fetch = LoaderOptions(collate=data.collate)
    torch.manual_seed(0)
    net = basicnet(num_classes=10, image_size=8, channels=1)
    model = HybridModel(net, world, chunks=4)
    options = TrainerOptions(epochs=2, clip_norm=1.0, log_every=20, checkpoint_every_steps=20)
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        nll,  # the network ends in log_softmax
        TrainLoader(data.train, 64, world, options=fetch),
        options,
        evaluation=EvalLoader(data.eval, 64, world, options=fetch),
        metrics={"accuracy": MulticlassAccuracy(num_classes=10, average="micro")},
        store=CheckpointStore(folder, keep=2),
    )
    summary = trainer.fit()
    if world.is_main:
        print(f"accuracy {summary['eval']['accuracy']:.3f}, checkpoint {summary['checkpoint']}")
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
