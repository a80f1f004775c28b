"""The scripts of examples/levels as functions, and a small Session."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from hybridtrain import Session, World
from hybridtrain.loss import cross_entropy
from support.training import data, rich_net

FOLDER = Path(__file__).parents[2] / "examples" / "levels"
NAMES = ("own_loop", "with_session", "with_trainer")


def losses_of(name):
    """Returns the losses of all steps of a script, which runs in this process."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    module = __import__(name)
    return module.main()


class Small:
    """A session with a small net; `step` trains on a batch."""

    def __init__(self, world=None, *, samples=22, batch_size=4, accumulate=1, made=None, **options):
        world = world or World.from_env(nb_part=2, devices="cpu")
        self.session = Session(world=world, accumulate=accumulate, seed=1, chunks=2, **options)
        net = rich_net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
        train = DataLoader(
            made or data(samples), batch_size=batch_size, shuffle=True, drop_last=True
        )
        evaluation = DataLoader(data(11, seed=9), batch_size=4)
        prepared = self.session.prepare(net, optimizer, schedule, train, evaluation)
        self.model, self.optimizer, self.schedule, self.train, self.evaluation = prepared
        self.losses = []

    def fit(self, steps):
        """Trains until `steps` optimizer steps are done."""
        session = self.session
        self.model.train()
        while session.steps < steps:
            for inputs, targets in self.train:
                session.forward_backward(inputs, targets, cross_entropy)
                session.clip_grad_norm_(1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.schedule.step()
                if session.sync_gradients:
                    self.losses.append(session.mean_loss())
                    if session.steps == steps:
                        break
        return self

    def state(self):
        """Returns the weights and buffers, copied."""
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def gathered(self):
        """Returns the targets and predictions of all samples of the evaluation, in order."""
        self.model.eval()
        found = [
            self.session.gather_for_metrics((targets, self.model(inputs).argmax(1)))
            for inputs, targets in self.evaluation
        ]
        return [torch.cat(parts) for parts in zip(*found, strict=True)]
