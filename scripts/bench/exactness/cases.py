"""The cases of the table: a small model, its data, and what a training step has to do.

Every case trains in float64, so that a difference of rounding (about 1e-15) and a wrong gradient
cannot be confused (in float32 where a system has no float64), with SGD and momentum, whose update
is proportional to the gradient: AdamW would hide a gradient that is wrong by a factor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

FEATURES, WIDTH, CLASSES = 12, 32, 5
TOKENS, LENGTH = 20, 6
SAMPLES_PER_MICROBATCH = 4
LEARNING_RATE, MOMENTUM = 0.1, 0.9

Masks = dict[str, list[Tensor]]


class Recorder:
    """Records the masks that dropout layers draw in training, but not those of recomputations.

    A recomputation has the input of its forward, bit for bit, so that it is recognized. Copies of a
    model, such as those that hybridtrain compares before the first step, are not recorded.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._inputs: set[tuple[str, bytes]] = set()
        self.masks: Masks = {}

    def watch(self, layers: Sequence[nn.Module]) -> None:
        """Records the dropout layers among `layers` from now on, each under its position."""
        for position, layer in enumerate(layers):
            if isinstance(layer, Dropout):
                self._names[id(layer)] = str(position)

    def record(self, layer: nn.Module, x: Tensor, mask: Tensor) -> None:
        """Records a mask that `layer` has drawn for the input `x`."""
        name = self._names.get(id(layer))
        if name is None or not layer.training:
            return
        key = name, hashlib.sha256(x.detach().numpy().tobytes()).digest()
        if key not in self._inputs:
            self._inputs.add(key)
            self.masks.setdefault(name, []).append(mask.detach().clone())


RECORDER = Recorder()


class Dropout(nn.Module):
    """Dropout that shows its masks to the recorder, or replays given masks in order."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Drops elements of `x` and scales the others up, in training."""
        mask = nn.functional.dropout(torch.ones_like(x), self.rate, self.training)
        RECORDER.record(self, x, mask)
        return x * mask


class Replayed(nn.Module):
    """Dropout with given masks, one for each call."""

    def __init__(self, masks: Sequence[Tensor]) -> None:
        super().__init__()
        self._masks = iter(masks)

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies `x` by the next mask."""
        return x * next(self._masks)


class Transpose(nn.Module):
    """From (samples, tokens, classes) to the (samples, classes, tokens) of `cross_entropy`."""

    def forward(self, x: Tensor) -> Tensor:
        """Swaps dims 1 and 2."""
        return x.transpose(1, 2).contiguous()


class Keep(nn.Module):
    """Returns its input twice: for the next layer, and for the layer where it is added again."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `(x, x)`."""
        return x, x.clone()


class Beside(nn.Module):
    """Applies a module to the first of two values, and passes the second on."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the pair after this layer."""
        return self.module(pair[0]), pair[1]


class Add(nn.Module):
    """Adds the two values."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        """Returns their sum."""
        return pair[0] + pair[1]


class WithSkip(nn.Module):
    """The layers of `skip()` as one would write them: a value used again five layers later."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Runs the layers; `Keep`, `Beside` and `Add` are spelled out."""
        kept = x
        for layer in self.layers:
            if isinstance(layer, Keep):
                kept = x
            elif isinstance(layer, Beside):
                x = layer.module(x)
            elif isinstance(layer, Add):
                x = x + kept
            else:
                x = layer(x)
        return x


def perceptron() -> list[nn.Module]:
    """Four linear layers."""
    return [
        nn.Linear(FEATURES, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, CLASSES),
    ]


def with_dropout() -> list[nn.Module]:
    """Dropout in the first and in the last stage."""
    layers = perceptron()
    layers[1:1] = [Dropout(0.2)]
    layers[6:6] = [Dropout(0.3)]
    return layers


def with_batch_norm() -> list[nn.Module]:
    """Batch norm in the first and in the last stage."""
    layers = perceptron()
    layers[1:1] = [nn.BatchNorm1d(WIDTH)]
    layers[6:6] = [nn.BatchNorm1d(WIDTH)]
    return layers


def language_model() -> list[nn.Module]:
    """Predicts a token at each position."""
    return [
        nn.Embedding(TOKENS, WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, TOKENS, bias=False),
        Transpose(),
    ]


def tied() -> list[nn.Module]:
    """Uses the embedding's weight in the last layer, too."""
    layers = language_model()
    embedding, output = layers[0], layers[4]
    assert isinstance(embedding, nn.Embedding)
    assert isinstance(output, nn.Linear)
    output.weight = embedding.weight
    return layers


def frozen() -> list[nn.Module]:
    """Trains the last two linear layers alone; the first stage has nothing to train."""
    layers = perceptron()
    for layer in layers[:4]:
        layer.requires_grad_(False)
    return layers


def skip() -> list[nn.Module]:
    """Adds the output of the first layer to the input of the last one."""
    first, *middle, last = perceptron()
    return [first, Keep(), *map(Beside, middle), Add(), last]


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: the row.
        layers: makes the model, a sequence of layers, under a seed that the caller sets.
        tokens: the data are sequences of tokens with a label each, not vectors with one label.
        padded: some labels are -100, unevenly over micro-batches and replicas.
        class_weights: weigh the classes in the loss.
        short: the number of samples of a fourth, last batch; 0: it is full.
        accumulate: batches per optimizer step.
        clip: the largest norm of the gradient.
        recompute: recompute the activations of all layers in the backward.
        stages: of the pipelines.
        replicas: of the model, that a system runs at a time.
        same_draws: must draw the masks of the case `dropout`.
        microbatches: micro-batches per batch and logical replica.
        logical_replicas: shares of a batch in the reference.
        dtype: of the weights.
    """

    name: str
    layers: Callable[[], list[nn.Module]] = perceptron
    tokens: bool = False
    padded: bool = False
    class_weights: bool = False
    short: int = 0
    accumulate: int = 1
    clip: float | None = None
    recompute: bool = False
    stages: int = 2
    replicas: int = 2
    same_draws: bool = False
    microbatches: int = 2
    logical_replicas: int = 2
    dtype: torch.dtype = torch.float64

    @property
    def batch_size(self) -> int:
        """Samples of a full batch, over all replicas."""
        return SAMPLES_PER_MICROBATCH * self.microbatches * self.logical_replicas

    @property
    def sizes(self) -> list[int]:
        """Samples of each batch."""
        return [self.batch_size] * (4 * self.accumulate - bool(self.short)) + [self.short] * bool(
            self.short
        )

    @property
    def microbatches_per_replica(self) -> int:
        """Micro-batches per batch that each copy of the model has to run."""
        return self.microbatches * self.logical_replicas // self.replicas

    def model(self) -> list[nn.Module]:
        """The layers with their first weights; the dropout layers are recorded."""
        torch.manual_seed(0)
        layers = [layer.to(self.dtype) for layer in self.layers()]
        RECORDER.watch(layers)
        return layers

    def loss(self) -> nn.Module:
        """The loss as one writes it without a pipeline: a mean."""
        return nn.CrossEntropyLoss(self._weights())

    def loss_sum(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss as a sum, for those who divide by a count themselves."""
        return partial(nn.functional.cross_entropy, weight=self._weights(), reduction="sum")

    def count(self, targets: Tensor) -> Tensor:
        """What the mean of `loss` over `targets` is divided by."""
        targets = targets[targets != -100]
        weights = self._weights()
        if weights is None:
            return torch.tensor(targets.numel(), dtype=self.dtype)
        return weights[targets].sum()

    def dataset(self) -> TensorDataset:
        """All samples in the order of their batches."""
        generator = torch.Generator().manual_seed(1)
        samples = sum(self.sizes)
        if self.tokens:
            inputs = torch.randint(TOKENS, (samples, LENGTH), generator=generator)
            targets = torch.randint(TOKENS, (samples, LENGTH), generator=generator)
        else:
            inputs = torch.randn(samples, FEATURES, generator=generator, dtype=self.dtype)
            targets = torch.randint(CLASSES, (samples,), generator=generator)
        if self.padded:
            # sample i has a length from 1 to LENGTH; later samples of a batch are shorter
            place = torch.arange(samples) % self.batch_size
            lengths = LENGTH - place * LENGTH // self.batch_size
            targets[torch.arange(LENGTH) >= lengths[:, None]] = -100
        return TensorDataset(inputs, targets)

    def steps(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yields the batches of each optimizer step, for all replicas."""
        batches = list(zip(*(t.split(self.sizes) for t in self.dataset().tensors), strict=True))
        for start in range(0, len(batches), self.accumulate):
            yield batches[start : start + self.accumulate]

    def _weights(self) -> Tensor | None:
        if not self.class_weights:
            return None
        return torch.tensor([0.1, 0.7, 0.33, 1.9, 0.77], dtype=self.dtype)


def share(batch: tuple[Tensor, Tensor], number: int, parts: int) -> tuple[Tensor, Tensor]:
    """Returns one of the parts, as equal as possible, that a batch is cut into."""
    inputs, targets = (tensor.tensor_split(parts)[number] for tensor in batch)
    return inputs, targets


CASES = {
    "dropout": Case("dropout", with_dropout),
    "recomputed-dropout": Case("dropout in recomputed layers", with_dropout, recompute=True),
    "batch-norm": Case("batch norm", with_batch_norm),
    "recomputed-batch-norm": Case(
        "batch norm in recomputed layers", with_batch_norm, recompute=True
    ),
    "padded": Case("padded labels (-100)", language_model, tokens=True, padded=True),
    "class-weights": Case("class-weighted loss", class_weights=True),
    "short-batch": Case("short last batch", short=11),
    "accumulation": Case("accumulation over 2 batches", accumulate=2),
    "clipping": Case("gradient clipping over stages", clip=0.05),
    "tied": Case("tied embeddings", tied, tokens=True),
    "frozen": Case("first stage frozen", frozen),
    "skip": Case("skip connection over the cut", skip),
    "three-stages": Case("3 stages", stages=3, replicas=1, microbatches=4, logical_replicas=1),
    "three-stages-dropout": Case(
        "3 stages, with the dropout masks of 2 stages and 2 replicas",
        with_dropout,
        stages=3,
        replicas=1,
        same_draws=True,
    ),
    "one-replica": Case("1 replica instead of 2", replicas=1),
    "one-replica-dropout": Case(
        "1 replica instead of 2, with the same dropout masks",
        with_dropout,
        replicas=1,
        same_draws=True,
    ),
}
