"""The two scripts of smp 1.x's documentation, automatic and manual, byte for byte.

Source: "Modifier un script d'entraînement PyTorch", Amazon SageMaker Developer Guide. What they
leave open is filled in by `completed`: the body of GroupedNet; and the data.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torchvision import datasets, transforms

from support.small_data import write_mnist

_MNIST = datasets.MNIST

_HEAD = """\
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torchnet.dataset import SplitDataset
from torchvision import datasets
import smdistributed.modelparallel.torch as smp

class GroupedNet(nn.Module):
    def __init__(self):
        super(GroupedNet, self).__init__()
"""

_LAYERS = {
    "auto": "        # define layers\n",
    "manual": """\
        with smp.partition(0):
            # define child modules on device 0
        with smp.partition(1):
            # define child modules on device 1
""",
}

_TAIL = """
    def forward(self, x):
        # define forward pass and return model outputs

# smdistributed: Define smp.step. Return any tensors needed outside.
@smp.step
def train_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="mean")
    model.backward(loss)
    return output, loss

def train(model, device, train_loader, optimizer):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        # smdistributed: Move input tensors to the GPU ID used by the current process,
        # based on the set_device call.
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        # Return value, loss_mb is a StepOutput object
        _, loss_mb = train_step(model, data, target)
        # smdistributed: Average the loss across microbatches.
        loss = loss_mb.reduce_mean()
        optimizer.step()

# smdistributed: initialize the backend
smp.init()
# smdistributed: Set the device to the GPU ID used by the current process.
# Input tensors should be transferred to this device.
torch.cuda.set_device(smp.local_rank())
device = torch.device("cuda")
# smdistributed: Download only on a single process per instance.
# When this is not present, the file is corrupted by multiple processes trying
# to download and extract at the same time
dataset = datasets.MNIST("../data", train=True, download=False)
# smdistributed: Shard the dataset based on data-parallel ranks
if smp.dp_size() > 1:
    partitions_dict = {f"{i}": 1 / smp.dp_size() for i in range(smp.dp_size())}
    dataset = SplitDataset(dataset, partitions=partitions_dict)
    dataset.select(f"{smp.dp_rank()}")
# smdistributed: Set drop_last=True to ensure that batch size is always divisible
# by the number of microbatches
train_loader = torch.utils.data.DataLoader(dataset, batch_size=64, drop_last=True)
model = GroupedNet()
optimizer = optim.Adadelta(model.parameters(), lr=4.0)
# smdistributed: Use the DistributedModel container to provide the model
# to be partitioned across different ranks. For the rest of the script,
# the returned DistributedModel object should be used in place of
# the model provided for DistributedModel class instantiation.
model = smp.DistributedModel(model)
optimizer = smp.DistributedOptimizer(optimizer)
train(model, device, train_loader, optimizer)
"""

_FIRST = """\
torch.manual_seed(3)
self.conv1 = nn.Conv2d(1, 4, 5, 2)
self.norm = nn.BatchNorm2d(4)
self.conv2 = nn.Conv2d(4, 8, 5, 2)
"""
_SECOND = """\
self.fc1 = nn.Linear(128, 32)
self.fc2 = nn.Linear(32, 10)
"""
_FORWARD = """\
x = F.relu(self.norm(self.conv1(x)))
x = torch.flatten(F.relu(self.conv2(x)), 1)
return F.log_softmax(self.fc2(F.relu(self.fc1(x))), 1)
"""


def original(kind: str) -> str:
    """Returns the script as the documentation has it; `kind` is auto or manual."""
    return _HEAD + _LAYERS[kind] + _TAIL


def completed(kind: str) -> str:
    """Returns the script with what it leaves open filled in."""

    def indented(text: str, spaces: int) -> str:
        return "".join(" " * spaces + line + "\n" for line in text.splitlines())

    filled = {
        "        # define layers\n": indented(_FIRST + _SECOND, 8),
        "            # define child modules on device 0\n": indented(_FIRST, 12),
        "            # define child modules on device 1\n": indented(_SECOND, 12),
        "        # define forward pass and return model outputs\n": indented(_FORWARD, 8),
    }
    script = original(kind)
    for placeholder, text in filled.items():
        script = script.replace(placeholder, text)
    return script


def run(kind: str, folder: Path) -> dict[str, Any]:
    """Runs the completed script in this process; returns its variables.

    `folder` has the script and the data; what `python -m hybridtrain.smp` provides and the samples'
    transform are put in place.
    """
    from hybridtrain.smp.__main__ import provide_modules

    provide_modules()
    script = folder / f"{kind}.py"
    script.write_text(completed(kind), encoding="utf-8")
    datasets.MNIST = lambda _, **options: mnist(folder, **options)
    try:
        return runpy.run_path(str(script), run_name="__main__")
    finally:
        datasets.MNIST = _MNIST


def mnist(folder: Path, **options: Any) -> Any:
    """Returns the data set in `folder`, whose samples are tensors."""
    return _MNIST(folder / "data", transform=transforms.ToTensor(), **options)


def write_data(folder: Path) -> None:
    """Writes the data set that `mnist` reads."""
    write_mnist(folder / "data", n_train=520)


def plain_losses(folder: Path, replicas: int, microbatches: int) -> tuple[list[Any], nn.Module]:
    """Returns each replica's losses, by step, and the model after training, in plain PyTorch.

    The model is whole, and gradients are accumulated over the micro-batches.
    """
    namespace: dict[str, Any] = {"nn": nn, "torch": torch, "F": F}
    head = completed("auto").partition("class GroupedNet")[2].partition("# smdistributed")[0]
    exec("class GroupedNet" + head, namespace)
    net = namespace["GroupedNet"]()
    optimizer = torch.optim.Adadelta(net.parameters(), lr=4.0)
    data = mnist(folder, train=True)
    samples = len(data) // replicas
    loaders = []
    for replica in range(replicas):
        part = torch.utils.data.Subset(data, range(replica * samples, (replica + 1) * samples))
        loaders.append(torch.utils.data.DataLoader(part, batch_size=64, drop_last=True))
    losses: list[list[torch.Tensor]] = [[] for _ in range(replicas)]
    buffers = None
    for batches in zip(*loaders, strict=True):
        gradients = []
        before = {name: buffer.clone() for name, buffer in net.named_buffers()}
        for replica, (inputs, targets) in enumerate(batches):
            for name, buffer in net.named_buffers():
                buffer.copy_(before[name])  # each replica begins with the first one's
            net.zero_grad()
            own = []
            for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
                loss = F.nll_loss(net(x), y)
                (loss / microbatches).backward()
                own.append(loss.detach())
            gradients.append([p.grad / replicas for p in net.parameters()])
            losses[replica].append(torch.stack(own).mean(dim=0))
            if replica == 0:
                buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        for name, buffer in net.named_buffers():
            buffer.copy_(buffers[name])
        for parameter, *parts in zip(net.parameters(), *gradients, strict=True):
            parameter.grad = sum(parts)
        optimizer.step()
    return losses, net
