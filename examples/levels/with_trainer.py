"""The tutorial's network with `Trainer`, which runs the training loop.

python examples/levels/with_trainer.py
HYBRIDTRAIN_NB_PART=2 torchrun --standalone --nproc-per-node 2 examples/levels/with_trainer.py
"""

import torch
import torch.nn.functional as F
from common import BasicNet, datasets
from torch import Tensor, optim

from hybridtrain import Callback, EvalLoader, HybridModel, Loader, Trainer, World
from hybridtrain.loss import accuracy


class MyTrainer(Trainer):
    """A Trainer with its own loss."""

    def compute_loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss of a micro-batch."""
        return F.nll_loss(output, targets)


class Losses(Callback):
    """Keeps the loss of each logged step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, trainer: Trainer, values: dict[str, float]) -> None:
        """Keeps the loss."""
        self.values.append(values["train/loss"])


def main(epochs: int = 1) -> list[float]:
    """Trains, prints the last loss and the accuracy; returns the losses of the steps."""
    world = World.from_env()
    torch.manual_seed(0)
    train_dset, test_dset, image_size = datasets()
    model = HybridModel(BasicNet(image_size), world, chunks=4)
    losses = Losses()
    trainer = MyTrainer(
        model,
        optim.AdamW(model.parameters(), lr=1e-3),
        None,
        Loader(train_dset, batch_size=64, world=world),
        epochs=epochs,
        evaluation=EvalLoader(test_dset, batch_size=64, world=world),
        metrics={"accuracy": accuracy()},
        callbacks=[losses],
        log_every=1,
    )
    summary = trainer.fit()
    if world.is_main:
        print(f"epoch {epochs}  loss of the last step {losses.values[-1]:.6f}")
        print(f"Accuracy: {100.0 * summary['eval']['accuracy']:.2f}")
    world.close()
    return losses.values


if __name__ == "__main__":
    main()
