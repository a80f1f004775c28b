"""A Transformer encoder that classifies texts: the model of the IDRIS page on hybrid parallelism.

The padding mask is passed along with the activations, because a layer of a pipeline gets only the
output of the previous layer:

    (tokens, mask) -> encoder -> (x, mask) -> layers.0 -> (x, mask) -> ... -> decoder -> logits
"""

import math

import torch
from torch import Tensor, nn

from hybridtrain.errors import ConfigError, setting
from hybridtrain.models.check import check_dropout, check_heads, check_length, check_sizes

Masked = tuple[Tensor, Tensor]


class Encoder(nn.Module):
    """Token embedding times sqrt(d_model), plus sinusoidal positions, then dropout.

    Takes `(tokens, mask)`, int64 and bool of shape (N, L), L at most `max_len`; returns `(x, mask)`
    with x (N, L, d_model). Source: A. Vaswani et al., Attention Is All You Need, 2017, 3.4 and 3.5.
    """

    positions: Tensor

    def __init__(
        self, vocab_size: int, max_len: int, d_model: int, dropout: float, pad_index: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model, padding_idx=pad_index)
        self.dropout = nn.Dropout(dropout)
        # Computed, not learned: not in checkpoints, so these load with another max_len.
        self.register_buffer("positions", sinusoids(max_len, d_model), persistent=False)
        # torch's N(0, 1), times sqrt(d_model), would drown out the positions, which stay within 1.
        with torch.no_grad():
            self.embedding.weight.uniform_(-0.1, 0.1)
            self.embedding.weight[pad_index].zero_()

    def forward(self, inputs: Masked) -> Masked:
        """See the class."""
        tokens, mask = inputs
        length = tokens.shape[1]
        check_length(length, "max_len", len(self.positions))
        x = self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim)
        return self.dropout(x + self.positions[:length]), mask


class Layer(nn.TransformerEncoderLayer):
    """torch's encoder layer (post-norm, ReLU), which takes and returns `(x, mask)`.

    It is a subclass to keep the parameters' names of an `nn.TransformerEncoder`.
    """

    def __init__(self, d_model: int, nhead: int, d_hid: int, dropout: float) -> None:
        # In evaluation, torch would run a fused kernel on a layer with the activation F.relu, with
        # other arithmetic and zeros at padding. torch.relu, the same function, prevents that.
        super().__init__(d_model, nhead, d_hid, dropout, activation=torch.relu, batch_first=True)

    def forward(self, inputs: Masked) -> Masked:  # type: ignore[override]
        """Takes and returns shapes (N, L, d_model) and (N, L); padding is never attended to."""
        x, mask = inputs
        return super().forward(x, src_key_padding_mask=mask), mask


class Decoder(nn.Module):
    """The mean over the tokens that are not padding, and a linear classifier.

    Takes `(x, mask)` of shapes (N, L, d_model) and (N, L); returns logits (N, num_classes).
    """

    def __init__(self, d_model: int, num_classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(d_model, num_classes)

    def forward(self, inputs: Masked) -> Tensor:
        """See the class."""
        x, mask = inputs
        # masked_fill, not a product with 0: padding must not matter, even if it contains NaN.
        total = x.masked_fill(mask.unsqueeze(-1), 0.0).sum(dim=1)
        count = (~mask).sum(dim=1, keepdim=True).clamp(min=1)
        logits: Tensor = self.classifier(total / count)
        return logits


def sinusoids(length: int, width: int) -> Tensor:
    """Returns the positions of Attention Is All You Need, section 3.5: float32 (length, width).

    Column 2i is sin(p / 10000^(2i/width)) at position p, and column 2i+1 the cosine of the same.
    """
    position = torch.arange(length, dtype=torch.float32).unsqueeze(1)
    rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angle = position * rate
    return torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)[:, :width]


def transformer(
    vocab_size: int,
    num_classes: int = 2,
    max_len: int = 256,
    d_model: int = 128,
    nhead: int = 4,
    d_hid: int = 256,
    nlayers: int = 4,
    dropout: float = 0.1,
    pad_index: int = 1,
) -> nn.Sequential:
    """Returns an encoder, `nlayers` Transformer layers and a classifier: nlayers + 2 elements.

    It takes `(tokens, mask)`: int64 ids and bool, True at padding, both of shape (N, L) with L at
    most `max_len`, and returns logits of shape (N, num_classes), for `F.cross_entropy`, which do
    not depend on the padding. `pad_index` is the padding id; its embedding stays zero.
    Parameters are named `encoder.*`, `layers.0.*` ..., `decoder.*`.

    Source: Encoder, Layer and Decoder of IDRIS, *PyTorch: parallelisme hybride (modele et
    donnees)*. Raises `ConfigError` if the arguments are inconsistent.
    """
    check_sizes(vocab_size=vocab_size, num_classes=num_classes, max_len=max_len)
    check_sizes(d_model=d_model, nhead=nhead, d_hid=d_hid, nlayers=nlayers)
    check_heads(d_model, "nhead", nhead)
    check_dropout(dropout)
    if pad_index is None or not 0 <= pad_index < vocab_size:
        raise ConfigError(
            f"{setting('pad_index', pad_index)} must be at least 0 and below "
            f"{setting('vocab_size', vocab_size)}"
        )
    layers = nn.Sequential(*(Layer(d_model, nhead, d_hid, dropout) for _ in range(nlayers)))
    model = nn.Sequential()
    model.encoder = Encoder(vocab_size, max_len, d_model, dropout, pad_index)
    model.layers = layers
    model.decoder = Decoder(d_model, num_classes)
    return model
