"""Trains over two processes, the second of which is killed in the middle of its third save."""

import os
import signal
import sys
from pathlib import Path

import torch
from support.nets import CLASSES
from torch import nn
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.checkpoint import store as store_module
from hybridtrain.data import TrainLoader
from hybridtrain.loss import cross_entropy


def main(folder: Path, background: bool) -> None:
    world = World.from_env(2, "cpu", timeout_s=600, engine="distributed")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    model = HybridModel(net, world, chunks=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(40, 6), torch.randint(CLASSES, (40,)))
    write_file, files = store_module.write_file, []

    def killed(path, write):
        files.append(path)
        if world.rank == 1 and len(files) == 6:  # model and optimizer, of the third save

            def half(file):
                file.write(b"half of it")
                file._file.flush()
                os.kill(os.getpid(), signal.SIGKILL)

            return write_file(path, half)
        return write_file(path, write)

    store_module.write_file = killed
    store = CheckpointStore(folder, background=background)
    loader = TrainLoader(data, 4, world)
    Trainer(
        model, optimizer, cross_entropy, loader, steps=10, checkpoint_every_steps=1, store=store
    ).fit()
    print("the end was reached")


if __name__ == "__main__":
    main(Path(sys.argv[2]), sys.argv[3] == "background")  # the first one is for the output
