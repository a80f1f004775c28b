"""Models with code of their own between layers, trained in stages, and compared bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hybridtrain import HybridModel, World
from hybridtrain._base.microbatch import chunk_sizes, split

WIDTH, SAMPLES, CHUNKS = 6, 7, 3


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def samples(seed=0, count=SAMPLES) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(output: Any, _: Any = None) -> Tensor:
    """Every tensor of the output counts, each in its own measure."""
    leaves = [t for t in tree_leaves(plain(output)) if isinstance(t, Tensor)]
    return sum(((k + 1) * t.float().tanh().mean() for k, t in enumerate(leaves)), torch.zeros(()))


def plain(output: Any) -> Any:
    """A dataclass as the dict of its fields."""
    return vars(output) if hasattr(output, "__dataclass_fields__") else output


def call(net: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return net(**inputs)
    return net(*inputs) if isinstance(inputs, tuple) else net(inputs)


def hybrid(net: nn.Module, stages: int, **options: Any) -> HybridModel:
    world = World.from_env(nb_part=stages, devices="cpu")
    return HybridModel(net, world, chunks=CHUNKS, **{"example_inputs": samples()} | options)


def assert_same(net: nn.Module, inputs: Any, stages: int, **options: Any) -> HybridModel:
    """`net` in `stages` gives bit for bit what it gives whole: outputs, gradients, buffers."""
    whole = copy.deepcopy(net)
    model = hybrid(net, stages, **{"example_inputs": inputs} | options)
    model.train_step(inputs, None, loss_of)
    count = len(tree_leaves(inputs)[0])
    sizes = chunk_sizes(count, CHUNKS)
    for part, size in zip(split(inputs, sizes), sizes, strict=True):
        loss_of(call(whole, part)).backward(torch.tensor(size / count))
    assert len(model.stages) == stages
    assert list(model.state_dict()) == list(whole.state_dict())
    for (name, ours), (same, theirs) in zip(
        net.named_parameters(), whole.named_parameters(), strict=True
    ):
        assert name == same
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name
    for name, buffer in whole.named_buffers():
        assert torch.equal(net.get_buffer(name), buffer), name
    model.eval()
    whole.eval()
    with torch.no_grad():
        outputs = [call(whole, part) for part in split(inputs, sizes)]
    ours = tree_leaves(plain(model(inputs)))
    theirs = [tree_leaves(plain(output)) for output in outputs]
    assert type(model(inputs)) is type(outputs[0])
    for got, *parts in zip(ours, *theirs, strict=True):
        assert torch.equal(got, torch.cat(parts) if parts[0].dim() else torch.stack(parts))
    model.train()
    return model


def names(model: HybridModel) -> list[str]:
    return [layer.name for stage in model.stages for layer in stage.layers]


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.both = linear(), linear(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, left, right, *, scale=1.0, mask=None):
        both_sides = torch.cat([self.left(left), self.right(right)], dim=1)
        out = self.both(both_sides) * scale
        return out if mask is None else out * mask


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.drop = linear(), linear(), nn.Dropout(0.5)

    def forward(self, x):
        x = F.dropout(self.first(x), 0.5, self.training)
        return self.drop(self.second(self.drop(x)))


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = linear(), Dropping(), Dropping()
        self.rest = nn.Sequential(*(linear() for _ in range(30)))

    def forward(self, x):
        return F.dropout(self.rest(self.c(self.b(self.a(x)))), 0.5, self.training)


class Body(nn.Module):
    """Three layers and a forward of the test's."""

    def __init__(self, body, **attributes):
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.body = body
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x):
        return self.body(self, x)


class Shapes(nn.Module):
    """Its code between layers looks at shapes and types."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.drop = linear(), linear(), nn.Dropout(0.0)

    def forward(self, x, mask=None):
        if x.dim() == 3 and x.dtype == torch.float32:
            x = x.flatten(0, 1).unflatten(0, (x.shape[0], x.shape[1]))
        positions = torch.arange(x.shape[1], device=x.device)
        x = self.first(x) + positions[None, :, None]
        if mask is not None:
            x = x * mask[..., None]
        return {"out": self.drop(self.second(x.relu())), "hidden": x}


def sequences(length=5) -> Tensor:
    return torch.randn(SAMPLES, length, WIDTH, generator=torch.Generator().manual_seed(length))
