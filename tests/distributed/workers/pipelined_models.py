"""Each process has its own pipeline, and all have the gradients of one on the samples of all."""

import importlib.util
import sys

import pytest
import torch
import torch.distributed as dist
from support.compare import CLOSE, assert_same_on_all_ranks
from support.hf import Texts, bert, llama, padded
from support.launch import Cells
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import pipelined
from hybridtrain.errors import ConfigError

cells = Cells()


def with_lightning(name):
    """Adds a cell, where Lightning is installed: only `scripts/test.sh --all` installs it."""
    return cells.add(name) if importlib.util.find_spec("lightning") else lambda cell: cell


DEVICES = ["cpu:0", "cpu:1"]


def make(rank=0, norm=False):
    """A net; different on each rank, so that rank 0's values must be sent."""
    torch.manual_seed(rank)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers[:3], *([nn.BatchNorm1d(8)] if norm else []), *layers[3:])


def batch(rank, step):
    g = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 6, generator=g), torch.randint(3, (6,), generator=g)


def train(net, rank, steps=4, accumulate=1):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, labels = batch(rank, step)
        last = (step + 1) % accumulate == 0
        with torch.enable_grad() if last else net.no_sync():
            (F.cross_entropy(net(x), labels) / accumulate).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def ddp_and_pipelined(world, **options):
    plain = DistributedDataParallel(make())
    piped = pipelined(make(world.rank), devices=DEVICES, chunks=3)
    for net in (plain, piped):
        train(net, world.rank, **options)
    return plain.module, piped


@cells.add("a loop equals DistributedDataParallel")
def _(world):
    plain, piped = ddp_and_pipelined(world)
    torch.testing.assert_close(piped.state_dict(), plain.state_dict(), **CLOSE)
    assert_same_on_all_ranks(world, piped.state_dict())


@cells.add("no_sync accumulates as in DistributedDataParallel")
def _(world):
    plain, piped = ddp_and_pipelined(world, accumulate=2)
    torch.testing.assert_close(piped.state_dict(), plain.state_dict(), **CLOSE)


@cells.add("a parameter that one process's batch does not use is averaged")
def _(world):
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.more, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x, more):
            x = self.first(x).tanh()
            return self.last(self.more(x) if more else x)

    x, labels = batch(world.rank, 0)
    uses = world.rank == 0
    plain, piped = Sometimes(), pipelined(Sometimes(), devices=DEVICES, chunks=3)
    for net in (plain, piped):
        F.cross_entropy(net(x, uses), labels).backward()
    for p, q in zip(plain.parameters(), piped.parameters(), strict=True):
        total = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(q.grad, total / world.size, **CLOSE)


@cells.add("gradients of inputs alone do not count, and a hook gets the gradient of a process")
def _(world):
    plain, piped = DistributedDataParallel(make()), pipelined(make(), devices=DEVICES, chunks=3)
    x, labels = batch(world.rank, 0)
    for net in (plain, piped):
        first = next(net.parameters())
        first.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
        F.cross_entropy(net(x), labels).backward()
        first._backward_hooks.clear()
    torch.autograd.grad(piped(x.requires_grad_()).sum(), x)
    for p, q in zip(plain.parameters(), piped.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, **CLOSE)


@cells.add("a hook that waits for the whole gradient is refused")
def _(world):
    net = pipelined(make(), devices=DEVICES, chunks=3)
    net[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ConfigError, match=r"0\.weight has a hook"):
        net(batch(world.rank, 0)[0])


@cells.add("buffers are those of rank 0")
def _(world):
    plain = DistributedDataParallel(make(norm=True))
    piped = pipelined(make(world.rank, norm=True), devices=DEVICES, chunks=1)
    for net in (plain, piped):
        train(net, world.rank)
    of_plain, of_piped = (dict(n.named_buffers()) for n in (plain.module, piped))
    torch.testing.assert_close(of_piped, of_plain, **CLOSE)


@cells.add("dropout differs between the processes")
def _(world):
    net = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5))
    net = pipelined(net, devices=DEVICES, chunks=2)
    zeros = (net(torch.ones(4, 6)) == 0).float()
    gathered = [torch.zeros_like(zeros) for _ in range(world.size)]
    dist.all_gather(gathered, zeros.detach())
    assert not torch.equal(gathered[0], gathered[1])


@cells.add("Accelerate's loop equals the same with DistributedDataParallel", thorough=True)
def _(world):
    accelerate = pytest.importorskip("accelerate")

    def run(wrap):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        data = DataLoader(Texts(24), 3, collate_fn=padded)
        net = wrap(llama())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net, optimizer, data = accelerator.prepare(net, optimizer, data)
        losses = []
        for _ in range(2):
            for values in data:
                with accelerator.accumulate(net):
                    loss = net(**values).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(net.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(accelerator.gather_for_metrics(loss.detach().reshape(1)))
        return torch.cat(losses), accelerator.unwrap_model(net).state_dict()

    plain = run(lambda net: net)
    piped = run(lambda net: pipelined(net, devices=DEVICES, chunks=3))
    torch.testing.assert_close(piped, plain, rtol=1e-5, atol=1e-6)


def with_trainer(make, classes):
    def run(transformers, wrap):
        args = transformers.TrainingArguments(
            output_dir="unused",
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            learning_rate=0.1,
            optim="sgd",
            max_grad_norm=0.5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            ddp_backend="gloo",
        )
        trainer = transformers.Trainer(
            model=wrap(make()),
            args=args,
            train_dataset=Texts(24, classes=classes),
            data_collator=padded,
        )
        trainer.train()
        return trainer.model.state_dict()

    def check(world):
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
        plain = run(transformers, lambda net: net)
        piped = run(transformers, lambda net: pipelined(net, devices=DEVICES, chunks=3))
        torch.testing.assert_close(piped, plain, rtol=1e-5, atol=1e-6)

    return check


for _name, _make, _classes in (("a decoder", llama, None), ("an encoder with classes", bert, 3)):
    cells.add(
        f"Trainers of transformers equal the same with DistributedDataParallel: {_name}",
        thorough=_make is bert,
    )(with_trainer(_make, _classes))


@cells.add("a trained parameter outside of the pipelined model is refused")
def _(world):
    accelerate = pytest.importorskip("accelerate")
    net = nn.Sequential(pipelined(make(), devices=DEVICES), nn.Linear(3, 3))
    with pytest.raises(ConfigError, match=r"trains 1.weight outside of it"):
        accelerate.Accelerator(cpu=True).prepare(net)


def samples():
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(24, 6, generator=g), torch.randint(3, (24,), generator=g))


@with_lightning("Fabric's loop equals the same with DistributedDataParallel")
def _(world):
    import lightning

    def run(wrap):
        fabric = lightning.Fabric(accelerator="cpu", devices=world.size, strategy="ddp")
        fabric.launch()
        net = wrap(make())
        net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        data = fabric.setup_dataloaders(DataLoader(samples(), 4))
        for number, (x, labels) in enumerate(data):
            with fabric.no_backward_sync(net, enabled=number % 2 == 0):
                fabric.backward(F.cross_entropy(net(x), labels) / 2)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return net.state_dict()

    plain = run(lambda net: net)
    piped = run(lambda net: pipelined(net, devices=DEVICES, chunks=3))
    torch.testing.assert_close(piped, plain, **CLOSE)


@with_lightning("Lightning's Trainer equals the same with DistributedDataParallel")
def _(world):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def training_step(self, batch, index):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def run(wrap):
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=world.size,
            strategy="ddp",
            accumulate_grad_batches=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Module(wrap(make()))
        trainer.fit(module, DataLoader(samples(), 4))
        return module.state_dict()

    plain = run(lambda net: net)
    piped = run(lambda net: pipelined(net, devices=DEVICES, chunks=3))
    torch.testing.assert_close(piped, plain, **CLOSE)


if __name__ == "__main__":
    sys.modules["peft"] = None  # transformers would import it, for seconds
    cells.main(*sys.argv[1:])
