"""The tutorial's network with `Session`: the script handles no processes, devices or stages.

python examples/levels/with_session.py
HYBRIDTRAIN_NB_PART=2 torchrun --standalone --nproc-per-node 2 examples/levels/with_session.py
"""

import torch
import torch.nn.functional as F
from common import BasicNet, datasets
from torch import optim
from torch.utils.data import DataLoader

from hybridtrain import Session


def main(epochs: int = 1) -> list[float]:
    """Trains, prints the mean loss of each epoch and the accuracy; returns the losses of steps."""
    session = Session(chunks=4)
    torch.manual_seed(0)
    train_dset, test_dset, image_size = datasets()
    train_loader = DataLoader(train_dset, shuffle=True, batch_size=64)
    test_loader = DataLoader(test_dset, shuffle=False, batch_size=64)
    model = BasicNet(image_size)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    train_loader, test_loader, model, optimizer = session.prepare(
        train_loader, test_loader, model, optimizer
    )
    losses = []

    for epoch in range(epochs):
        model.train()
        for data, target in train_loader:
            session.forward_backward(data, target, F.nll_loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(session.mean_loss())
        session.print(f"epoch {epoch + 1}  loss of the last step {losses[-1]:.6f}")

    model.eval()
    correct = total = 0
    for data, target in test_loader:
        output = model(data)
        pred, target = session.gather_for_metrics((output.argmax(dim=1), target))
        correct += int((pred == target).sum())
        total += len(target)
    session.print(f"Accuracy: {100.0 * correct / total:.2f}")
    session.close()
    return losses


if __name__ == "__main__":
    main()
