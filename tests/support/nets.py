"""Small models, each of which stresses one thing that a pipeline could get wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybridtrain import loss as losses
from hybridtrain._base.skip import pop, stash
from hybridtrain.loss import SumLoss
from hybridtrain.models import transformer

WIDTH = 6
VOCABULARY = 11
CLASSES = 3


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8), nn.GELU(),
        nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, CLASSES),
    )  # fmt: skip


def inplace_net() -> nn.Sequential:
    """With 2, 3 and 4 stages at least one stage begins with a ReLU that overwrites its input."""
    return nn.Sequential(
        nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.ReLU(inplace=True),
        nn.Linear(8, 8), nn.ReLU(inplace=True),
        nn.Linear(8, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, CLASSES),
    )  # fmt: skip


def scaling_inplace_net() -> nn.Sequential:
    """Unlike ReLU, these give another result when they run twice on the same memory."""
    return nn.Sequential(
        nn.Linear(WIDTH, 8), nn.LeakyReLU(0.3, inplace=True), nn.Linear(8, 8), nn.ELU(inplace=True),
        nn.Linear(8, WIDTH), nn.LeakyReLU(0.3, inplace=True), nn.Linear(WIDTH, CLASSES),
    )  # fmt: skip


def conv_net(**batch_norm: Any) -> nn.Sequential:
    """Convolutions with batch norm, for images of shape (2, 6, 6). Layers 1 and 4 are the norms.

    No bias before a norm: its gradient would be rounding noise alone.
    """
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4, **batch_norm), nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, bias=False),
        nn.BatchNorm2d(4, **batch_norm), nn.ReLU(inplace=True),
        nn.Flatten(), nn.Linear(64, CLASSES),
    )  # fmt: skip


def dropout_transformer(dropout: float = 0.2, nlayers: int = 6) -> nn.Sequential:
    return transformer(
        vocab_size=13, num_classes=CLASSES, max_len=6, d_model=8, nhead=2, d_hid=16,
        nlayers=nlayers, dropout=dropout, pad_index=1,
    )  # fmt: skip


class TanhLinear(nn.Module):
    """The plain layer that fills the gaps of a chain."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


# Tied weights


class Traced(nn.Module):
    """A residual net that is not a Sequential; its graph looks inside of `inner`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.inner(x))


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Reuse(nn.Module):
    """Uses the weight of the embedding a third time, between embedding and head."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        return x + torch.sigmoid(x @ self.weight.T) @ self.weight


def tied_gpt(
    uses: int = 2,
    tied: bool = True,
    frozen: bool = False,
    blocks: Sequence[nn.Module] | None = None,
    sparse: bool = False,
) -> nn.Sequential:
    """A language model whose head has the weight of its embedding; 4 layers without `blocks`.

    Args:
        uses: 2, or 3 for a layer in between that has it too.
        tied: False for the same numbers in a separate parameter for each use.
        frozen: whether the tied weight needs no gradient.
        blocks: the layers between embedding and head.
        sparse: whether the embedding gives a sparse gradient.
    """
    embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    last = Reuse(embedding.weight) if uses == 3 else TanhLinear()
    net = nn.Sequential(embedding, *(blocks or [TanhLinear(), last]), head)
    head.weight = embedding.weight
    embedding.weight.requires_grad_(not frozen)
    if not tied:
        head.weight = nn.Parameter(embedding.weight.detach().clone())
        if uses == 3:
            last.weight = nn.Parameter(embedding.weight.detach().clone())
    return net


# Layers that change themselves in their forward


class Counting(TanhLinear):
    """Its output depends on how often it has run, which a buffer and an attribute count."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.runs += 1
        return super().forward(x) * (1 + 0.1 * self.count)


class Codebook(nn.Module):
    """Vector quantization; the codes follow moving averages, and are changed through .data."""

    codes: Tensor
    sizes: Tensor

    def __init__(self, codes: int = 4) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(codes, WIDTH, generator=generator(7)))
        self.register_buffer("sizes", torch.ones(codes))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        quantized = self.codes[nearest]
        if self.training:
            chosen = F.one_hot(nearest, len(self.codes)).to(self.codes)
            self.sizes.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            sums = chosen.T @ x.detach().to(self.codes)
            self.codes.data.mul_(0.9).add_(sums / self.sizes[:, None], alpha=0.1)
        return x + (quantized - x).detach() + 0.1 * (x - quantized)


def stateful_net() -> nn.Sequential:
    hook, parametrization = nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm
    return nn.Sequential(
        hook(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), Counting(), Codebook(),
        parametrization(nn.Linear(WIDTH, WIDTH)), nn.LayerNorm(WIDTH), Counting(),
        nn.Linear(WIDTH, CLASSES),
    )  # fmt: skip


# Values that skip layers


class Stash(TanhLinear):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.stashes = (name,)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        stash(self.stashes[0], y)
        return y * 0.5


class Pop(TanhLinear):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.pops = (name,)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + pop(self.pops[0])


def skip_chain(stasher: int, popper: int, length: int = 8) -> nn.Sequential:
    """`length` layers, of which one stashes what another pops."""
    layers: list[nn.Module] = [TanhLinear() for _ in range(length)]
    layers[stasher], layers[popper] = Stash("a"), Pop("a")
    return nn.Sequential(*layers)


class Down(nn.Module):
    def __init__(self, inputs: int, outputs: int, name: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.stashes = (name,)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        stash(self.stashes[0], x)
        return F.max_pool2d(x, 2)


class Up(nn.Module):
    def __init__(self, inputs: int, outputs: int, name: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.pops = (name,)

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=2)
        return F.relu(self.conv(torch.cat([x, pop(self.pops[0])], dim=1)))


def u_net() -> nn.Sequential:
    return nn.Sequential(
        Down(1, 3, "a"), Down(3, 4, "b"), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=1), Up(8, 3, "b"), Up(6, 3, "a"), nn.Conv2d(3, 1, 1),
    )  # fmt: skip


# Values that are pytrees


class ToDict(nn.Module):
    """From a tensor to a dict with a bool mask, a number, a string and a None in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        mask = x > 0
        return {"x": self.linear(x), "mask": mask, "skip": x, "none": None, "n": 2, "s": "text"}


class DictToTuple(nn.Module):
    """Some tensors are used, some passed on, one used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, d: dict[str, Any]) -> tuple[Any, ...]:
        assert d["none"] is None
        assert d["s"] == "text"
        h = self.linear(d["x"].masked_fill(d["mask"], 0.5)) * d["n"]
        return h, (d["mask"], None, {"skip": d["x"], "again": d["x"]}), h.exp()


class TupleToList(nn.Module):
    def forward(self, value: tuple[Any, ...]) -> list[Any]:
        h, (mask, none, skips), _ = value
        return [torch.tanh(h), mask, none, skips["skip"] + skips["again"]]


class ListToTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, value: list[Any]) -> Tensor:
        h, mask, none, skip = value
        assert none is None
        return self.linear(h + skip * mask)


def nested_net() -> nn.Sequential:
    return nn.Sequential(ToDict(), DictToTuple(), TupleToList(), ListToTensor())


class FromPytree(nn.Module):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        return batch["a"] * batch["scale"] + batch["pair"][0].float()


def pytree_net() -> nn.Sequential:
    """Its inputs are a pytree, with a 0-dim tensor and a None in it."""
    return nn.Sequential(
        FromPytree(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
    )


# Batches


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def floats(rows: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, *shape or (WIDTH,), generator=generator(seed))


def labels(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(CLASSES, (rows,), generator=generator(1000 + seed))


def regression(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return floats(rows, seed=seed), floats(rows, seed=1000 + seed)


def classification(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return floats(rows, seed=seed), labels(rows, seed)


def tokens(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    both = torch.randint(VOCABULARY, (2, rows, 4), generator=generator(seed))
    return both[0], both[1]


def token_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def padded_tokens(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Targets of -100, another number in every sample; the seed's digits are step, part, replica.

    In step 0 the first half of the samples has no target at all, in step 1 replica 1, and in step 2
    the second of the batches that are accumulated.
    """
    inputs, targets = tokens(rows, seed)
    step, part, replica = seed // 100, seed // 10 % 10, seed % 10
    lengths = torch.randint(1, 5, (rows, 1), generator=generator(2000 + seed))
    if step == 0:
        lengths[: rows // 2] = 0
    if (step, replica) == (1, 1) or (step, part) == (2, 1):
        lengths[:] = 0
    return inputs, targets.masked_fill(torch.arange(4) >= lengths, -100)


def masked_tokens(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Targets at about a quarter of the places, as of a masked language model; one at least."""
    inputs, targets = tokens(rows, seed)
    chosen = torch.rand(targets.shape, generator=generator(3000 + seed)) < 0.25
    chosen[rows // 2, seed % 4] = True
    return inputs.masked_fill(chosen, 0), targets.masked_fill(~chosen, -100)


def weighted_samples(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Labels and weights side by side in the targets; some samples weigh nothing."""
    inputs, classes = classification(rows, seed)
    weights = torch.rand(rows, generator=generator(4000 + seed)) - 0.3
    weights[-1] = 0.7
    return inputs, torch.stack([classes.float(), weights.clamp(min=0)], dim=1)


def weighted_sum(output: Tensor, targets: Tensor) -> Tensor:
    each = F.cross_entropy(output, targets[:, 0].long(), reduction="none")
    return (each * targets[:, 1]).sum()


def valid_sum(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


def valid_count(targets: Tensor) -> float:
    return float((targets != -100).sum())


def _images(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    return floats(rows, 2, 6, 6, seed=seed), labels(rows, seed)


def _reviews(rows: int, seed: int) -> tuple[Any, Tensor]:
    g = generator(seed)
    words = torch.randint(2, 13, (rows, 6), generator=g)
    mask = torch.arange(6).expand(rows, 6) >= torch.randint(2, 7, (rows, 1), generator=g)
    return (words.masked_fill(mask, 1), mask), labels(rows, seed)


def _pytree(rows: int, seed: int) -> tuple[Any, Tensor]:
    pair = (labels(rows, seed)[:, None].expand(rows, WIDTH), None)
    x, targets = classification(rows, seed)
    return {"a": x, "scale": torch.tensor(0.5), "pair": pair}, targets


def _token_net() -> nn.Sequential:
    return tied_gpt(tied=False, blocks=[Attention() for _ in range(6)])


def _planes(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    return floats(rows, 1, 8, 8, seed=seed), floats(rows, 1, 8, 8, seed=1000 + seed)


@dataclass(frozen=True)
class Case:
    """A model, `batch(rows, seed)` of inputs and targets for it, and its loss.

    For a loss that is not a mean over samples, `loss_sum` and `count(targets)` are what the unsplit
    model divides over the whole global batch.
    """

    make: Callable[[], nn.Sequential]
    batch: Callable[[int, int], tuple[Any, Tensor]] = classification
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    loss_sum: Callable[[Tensor, Tensor], Tensor] | None = None
    count: Callable[[Tensor], float] = len

    def net(self) -> nn.Sequential:
        torch.manual_seed(0)
        return self.make()


CASES = {
    "linear": Case(mlp),
    "conv": Case(conv_net, _images),
    "inplace": Case(inplace_net),
    "scaling_inplace": Case(scaling_inplace_net),
    "nested": Case(nested_net),
    "pytree": Case(pytree_net, _pytree),
    "transformer": Case(lambda: dropout_transformer(0.0, nlayers=2), _reviews),
    "dropout": Case(dropout_transformer, _reviews),
    "stateful": Case(stateful_net),
    "u_net": Case(u_net, _planes, F.mse_loss),
    "padded": Case(_token_net, padded_tokens, losses.cross_entropy, valid_sum, valid_count),
    "masked_lm": Case(
        _token_net,
        masked_tokens,
        SumLoss(valid_sum, lambda _, targets: (targets != -100).sum()),
        valid_sum,
        valid_count,
    ),
    "weighted": Case(
        mlp,
        weighted_samples,
        SumLoss(weighted_sum, lambda _, targets: targets[:, 1].sum()),
        weighted_sum,
        lambda targets: float(targets[:, 1].double().sum()),
    ),
    "tied_gpt": Case(lambda: tied_gpt(blocks=[Attention() for _ in range(6)]), tokens, token_loss),
}


class GPUGenerator:
    """A GPU's default generator: a seed, and an offset that counts what was drawn from it."""

    def __init__(self):
        self.manual_seed(0)

    def manual_seed(self, seed):
        self.seed, self.offset = seed, 0

    def initial_seed(self):
        return self.seed

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        self.offset = offset

    def rand(self, shape):
        self.offset += 4
        generator = torch.Generator().manual_seed(self.seed + self.offset)
        return torch.rand(shape, generator=generator)
