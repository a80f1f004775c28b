"""Lightning's Trainer and Fabric with a pipelined model inside, the loss in it or outside."""

import pytest
import torch
from support.cases import installed
from support.compare import CLOSE
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import pipelined

installed("lightning")

pytestmark = pytest.mark.usefixtures("seeded")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return logits if labels is None else F.cross_entropy(logits, labels)


def loader():
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(30, 6, generator=g), torch.randint(3, (30,), generator=g))
    return DataLoader(data, batch_size=7)


def piped(net):
    return pipelined(net, devices=["cpu:0", "cpu:1"], chunks=3)


@pytest.mark.parametrize("loss", ["inside", "outside"])
def test_a_trainer(tmp_path, loss):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def training_step(self, batch, index):
            x, labels = batch
            return self.net(x, labels) if loss == "inside" else F.cross_entropy(self.net(x), labels)

        def validation_step(self, batch, index):
            self.log("eval", self.net(*batch))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def run(wrap):
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        module = Module(wrap(Net()))
        trainer.fit(module, loader(), loader())
        return module.state_dict(), {k: float(v) for k, v in trainer.callback_metrics.items()}

    torch.testing.assert_close(run(piped), run(lambda net: net), **CLOSE)


@pytest.mark.parametrize("loss", ["inside", "outside"])
def test_fabric(loss):
    import lightning

    def run(wrap):
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        net = wrap(Net())
        net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for number, (x, labels) in enumerate(fabric.setup_dataloaders(loader())):
            with fabric.no_backward_sync(net, enabled=number % 2 == 0):
                value = net(x, labels) if loss == "inside" else F.cross_entropy(net(x), labels)
                fabric.backward(value / 2)
            if number % 2:
                fabric.clip_gradients(net, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
        return net.state_dict()

    torch.testing.assert_close(run(piped), run(lambda net: net), **CLOSE)
