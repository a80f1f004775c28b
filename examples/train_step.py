"""Trains a small network with a hand-written loop: one step is forward, loss and backward.

python examples/train_step.py
torchrun --standalone --nproc-per-node 2 examples/train_step.py
"""

import torch
from torch import nn

from hybridtrain import HybridModel, World


def main() -> None:
    """Trains for 20 steps and prints the loss on rank 0."""
    world = World.from_env(nb_part=2, devices="cpu")
    torch.manual_seed(0)  # the same initial weights in every process
    net = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    model = HybridModel(net, world, chunks=4, schedule="1f1b", split="size")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    generator = torch.Generator().manual_seed(world.rank)  # each replica has its own batches
    inputs = torch.randn(32, 64, generator=generator)
    targets = torch.randint(10, (32,), generator=generator)
    for step in range(20):
        out = model.train_step(inputs, targets, nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
        if world.is_main and step % 5 == 4:
            print(f"step {step + 1}  loss {float(out.loss):.3f}")

    model.eval()
    logits = model(inputs)  # a pipelined forward
    if world.is_main:
        print(f"logits {tuple(logits.shape)}")
    world.close()


if __name__ == "__main__":
    main()
