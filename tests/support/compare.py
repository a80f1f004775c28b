"""The unsplit model beside the pipeline: plain steps, and comparisons that name what differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridtrain import HybridModel, World

CHUNKS = 4
# The same sums over the same samples, in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-7}


def cpu_world(nb_part: int = 1, replica: int | None = None, engine: str = "local") -> World:
    """The World of this process on CPUs; with `replica`, as if there were others before it."""
    world = World.from_env(nb_part=nb_part, devices="cpu", timeout_s=60, engine=engine)
    return world if replica is None else dataclasses.replace(world, rank=replica)


def hybrid(
    net: nn.Module,
    nb_part: int = 2,
    stages_per_device: int = 1,
    engine: str = "local",
    **options: Any,
) -> Any:
    """`net` as a pipeline over `nb_part` CPU devices, with 4 micro-batches unless `chunks=`."""
    options = {"chunks": CHUNKS, "stages_per_device": stages_per_device, **options}
    return HybridModel(net, cpu_world(nb_part, engine=engine), **options)


def micro_batches(inputs: Any, targets: Any, chunks: int) -> Iterator[tuple[Any, Any]]:
    """Views of the samples of each micro-batch; independent of the library's `split`."""
    rows = max(len(t) for t in tree_leaves((inputs, targets)) if isinstance(t, Tensor) and t.dim())
    for part in torch.arange(rows).tensor_split(min(rows, chunks)):
        where = slice(int(part[0]), int(part[-1]) + 1)
        yield tree_map_only(
            Tensor, lambda t, where=where: t[where] if t.dim() else t, (inputs, targets)
        )


def plain_step(
    net: nn.Module,
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], Tensor] = F.mse_loss,
    chunks: int = CHUNKS,
    weight: float = 1.0,
) -> tuple[list[Any], float]:
    """Gradient accumulation, as one writes it in plain PyTorch.

    Returns the output of each micro-batch, and the mean of the loss over the samples.
    """
    outputs, losses, sizes = [], [], []
    parts = list(micro_batches(inputs, targets, chunks))
    for x, _ in parts:
        sizes.append(next(len(t) for t in tree_leaves(x) if isinstance(t, Tensor) and t.dim()))
    for (x, y), size in zip(parts, sizes, strict=True):
        output = net(x)
        loss = loss_fn(output, y)
        (loss * (weight * size / sum(sizes))).backward()
        outputs.append(tree_map_only(Tensor, torch.detach, output))
        losses.append(float(loss.detach()) * size)
    return outputs, sum(losses) / sum(sizes)


def square_loss(output: Tensor, _: Any = None) -> Tensor:
    return output.square().mean()


def mean_loss(output: Tensor, _: Any = None) -> Tensor:
    return output.mean()


def floats_and_classes(rows: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A batch of 8 features and 3 classes; 7 rows are micro-batches of 2, 2, 2 and 1."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 8, generator=generator)
    return inputs, torch.randint(0, 3, (rows,), generator=generator)


def copied(batch: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, batch)


def grads(net: Any) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def aliases(net: nn.Module) -> list[Tensor]:
    """What layers of later stages compute with in place of a parameter of an earlier stage."""
    found: dict[int, Tensor] = {}
    for path, parameter in net.named_parameters(remove_duplicate=False):
        owner, _, name = path.rpartition(".")
        used = getattr(net.get_submodule(owner), name)
        if used is not parameter:
            found[id(used)] = used
    return list(found.values())


def assert_same(
    ours: Mapping[str, Any] | Iterable[tuple[str, Any]],
    theirs: Mapping[str, Any] | Iterable[tuple[str, Any]],
    what: str = "",
    **tolerance: float,
) -> None:
    """Compares by name: bit for bit, or with a tolerance `rtol=..., atol=...`."""
    ours, theirs = dict(ours), dict(theirs)
    assert ours.keys() == theirs.keys(), what
    for name, value in theirs.items():
        where = f"{what}: {name}"
        if not isinstance(value, Tensor):
            assert ours[name] == value, f"{where} is {ours[name]}, not {value}"
            continue
        assert ours[name] is not None, f"{where} is None"
        if tolerance:
            torch.testing.assert_close(
                ours[name], value, **tolerance, msg=lambda text, where=where: f"{where}\n{text}"
            )
        elif not torch.equal(ours[name], value):
            difference = (ours[name].double() - value.double()).abs().max()
            raise AssertionError(f"{where} differs by {difference:.2e}")


def assert_same_gradients(ours: Any, theirs: Any, what: str = "", **tolerance: float) -> None:
    assert_same(grads(ours), grads(theirs), f"{what} gradient", **tolerance)


def assert_same_on_all_ranks(world: World, tensors: Mapping[str, Any], what: str = "") -> None:
    mine = {name: t.detach().clone() for name, t in tensors.items() if t is not None}
    for rank, other in enumerate(world.gather(mine)):
        assert_same(other, mine, f"{what} on rank {rank}")


# Batches of several replicas: `rows` has the number of samples of each.


def share(batch: tuple[Tensor, ...], rows: Sequence[int], rank: int) -> tuple[Tensor, ...]:
    """The part of a global batch that the replica `rank` has."""
    return tuple(tensor.split(list(rows))[rank] for tensor in batch)


def replica_step(
    model: Any,
    batch: tuple[Tensor, ...],
    rows: Sequence[int],
    loss_fn: Callable[[Any, Any], Tensor] = F.cross_entropy,
    **options: Any,
) -> Any:
    """One `train_step` of this replica with its share of `batch`, weighted by its samples."""
    inputs, targets = share(batch, rows, model.world.rank)
    weight = rows[model.world.rank] * len(rows) / sum(rows)
    return model.train_step(inputs, targets, loss_fn, weight=weight, **options)
