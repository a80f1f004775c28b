"""A small decoder-only language model like GPT-2."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from hybridtrain.models.check import check_dropout, check_heads, check_length, check_sizes


class Embed(nn.Module):
    """Token plus learned position embedding, then dropout.

    Takes int64 ids of shape (N, T), T at most `seq_len`; returns (N, T, d_model).
    """

    def __init__(self, vocab_size: int, seq_len: int, d_model: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, d_model)
        self.position = nn.Embedding(seq_len, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        length = tokens.shape[1]
        check_length(length, "seq_len", self.position.num_embeddings)
        x: Tensor = self.dropout(self.token(tokens) + self.position.weight[:length])
        return x


class Attention(nn.Module):
    """Causal multi-head self-attention, (N, T, d_model) to the same shape."""

    def __init__(self, d_model: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.n_head = n_head
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        # (N, T, 3 d) -> 3 of (N, heads, T, d / heads), the layout that SDPA expects.
        heads = self.qkv(x).unflatten(-1, (3, self.n_head, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        mixed: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """Attention and a GELU MLP, each after a LayerNorm and added to x; keeps (N, T, d_model)."""

    def __init__(self, d_model: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attention = Attention(d_model, n_head, dropout)
        self.norm2 = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential()
        self.mlp.expand = nn.Linear(d_model, 4 * d_model)
        self.mlp.gelu = nn.GELU()
        self.mlp.proj = nn.Linear(4 * d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        y: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return y


def gpt(
    vocab_size: int,
    seq_len: int,
    n_layer: int = 4,
    n_head: int = 4,
    d_model: int = 128,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Returns a pre-norm decoder with learned positions: n_layer + 3 elements.

    It takes int64 ids of shape (N, T), T at most `seq_len`, and returns logits of shape
    (N, T, vocab_size); the logits at position t depend only on the ids up to t. The output layer
    does not share the embedding's weights, so the first and the last stage of a pipeline share
    nothing. Parameters are named `embed.*`, `blocks.0.*` ..., `head.*`.

    Weights are initialized as in GPT-2: normal with standard deviation 0.02, divided by
    sqrt(2 n_layer) for the two projections of a block that add to the residual stream; biases 0.
    Source: A. Radford et al., Language Models are Unsupervised Multitask Learners, 2019, section
    2.3. Raises `ConfigError` if the arguments are inconsistent.
    """
    check_sizes(vocab_size=vocab_size, seq_len=seq_len)
    check_sizes(n_layer=n_layer, n_head=n_head, d_model=d_model)
    check_heads(d_model, "n_head", n_head)
    check_dropout(dropout)
    model = nn.Sequential()
    model.embed = Embed(vocab_size, seq_len, d_model, dropout)
    model.blocks = nn.Sequential(*(Block(d_model, n_head, dropout) for _ in range(n_layer)))
    model.head = nn.Sequential()
    model.head.norm = nn.LayerNorm(d_model)
    model.head.linear = nn.Linear(d_model, vocab_size, bias=False)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):  # a LayerNorm starts as the identity
            adds_to_residual = name.endswith(".proj")
            nn.init.normal_(
                module.weight, 0.0, 0.02 / math.sqrt(2 * n_layer if adds_to_residual else 1)
            )
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
