"""Which linear layer is a model's head, and whether its loss is computed without logits."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from hybridtrain._base.output_layer import output_embeddings
from hybridtrain.errors import setting

LARGE_VOCABULARY = 65_536
"""With at least this many outputs, `head=auto` computes the loss without logits.

Below it, the logits of a micro-batch take little memory next to a model that has them."""


class HeadChoice(NamedTuple):
    """How the head of a model and its loss are computed.

    Attributes:
        names: the linear layers whose outputs are lazy, by their names in the model: the head, and
            those that an adapter adds to it; none if the head is plain.
        reason: the choice in words.
    """

    names: tuple[str, ...] = ()
    reason: str = ""


def head_of(net: nn.Module, head: str) -> HeadChoice:
    """Returns the choice for a model, which depends on nothing but its modules.

    The head is what `net.get_output_embeddings()` returns, or else the last `nn.Linear`.

    Args:
        net: the model, also on the meta device.
        head: `auto`, `fused` or `plain`.
    """
    if head == "plain":
        return HeadChoice((), setting("head", "plain"))
    linears = {name: m for name, m in net.named_modules() if isinstance(m, nn.Linear)}
    output = output_embeddings(net)
    inside = set() if output is None else set(map(id, output.modules()))
    names = [name for name, module in linears.items() if id(module) in inside] or list(linears)
    if not names:
        return HeadChoice((), "the model has no nn.Linear")
    # In the order of registration, which most models share with their forward.
    last = names[-1]
    classes = linears[last].out_features
    if head == "auto" and classes < LARGE_VOCABULARY:
        return HeadChoice((), f"{last!r} has {classes:,} outputs, fewer than {LARGE_VOCABULARY:,}")
    group = [
        name
        for name, module in linears.items()
        if name == last or (module.out_features == classes and _adapts(net, name, last))
    ]
    return HeadChoice(tuple(group), f"{last!r} has {classes:,} outputs")


def _adapts(net: nn.Module, name: str, other: str) -> bool:
    """Returns whether two linear layers belong to one layer of an adapter, such as LoRA."""
    parts = name.split(".")
    for length in range(len(parts)):
        path = ".".join(parts[:length])
        is_shared = not path or other.startswith(f"{path}.")
        if is_shared and hasattr(net.get_submodule(path), "base_layer"):
            return True
    return False
