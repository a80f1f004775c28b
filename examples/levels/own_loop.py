"""The tutorial's network with its own loop: `World`, `HybridModel`, `OptimizerStep`.

python examples/levels/own_loop.py
HYBRIDTRAIN_NB_PART=2 torchrun --standalone --nproc-per-node 2 examples/levels/own_loop.py
"""

import torch
import torch.nn.functional as F
from common import BasicNet, datasets
from torch import optim

from hybridtrain import EvalLoader, HybridModel, Loader, OptimizerStep, World


def main(epochs: int = 1) -> list[float]:
    """Trains, prints the mean loss of each epoch and the accuracy; returns the losses of steps."""
    world = World.from_env()
    torch.manual_seed(0)
    train_dset, test_dset, image_size = datasets()
    train_loader = Loader(train_dset, batch_size=64, world=world)
    test_loader = EvalLoader(test_dset, batch_size=64, world=world)
    model = HybridModel(BasicNet(image_size), world, chunks=4)
    step = OptimizerStep(model, optim.AdamW(model.parameters(), lr=1e-3))
    losses = []

    for epoch in range(epochs):
        model.train()
        for batch in train_loader.batches():
            step.run([batch], F.nll_loss)
            losses.append(step.mean_loss())  # over all replicas
        if world.is_main:
            print(f"epoch {epoch + 1}  loss of the last step {losses[-1]:.6f}")

    model.eval()
    correct = torch.zeros((), dtype=torch.float64)
    for data, target in test_loader:
        output = model(data)
        if model.owns_output:
            correct += (output.argmax(dim=1).cpu() == target).sum()
    correct = model.reduce_loss(correct)
    if world.is_main:
        print(f"Accuracy: {100.0 * float(correct) / len(test_dset):.2f}")
    world.close()
    return losses


if __name__ == "__main__":
    main()
