"""Functions on the pytrees that layers pass to one another, dataclasses included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES, register_dataclass, tree_leaves, tree_map_only


def leaves_of(tree: Any) -> list[Any]:
    """Returns the leaves of `tree`, and registers its dataclasses for all pytree functions.

    Types that are registered already, such as the outputs of `transformers`, are left alone.
    """
    while True:
        leaves = tree_leaves(tree)
        unknown = {type(leaf) for leaf in leaves if is_dataclass(leaf)} - set(SUPPORTED_NODES)
        if not unknown:
            return leaves
        for kind in unknown:
            register_dataclass(kind)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Returns `tree` with `function` of its tensors; one that occurs twice stays one tensor."""
    if type(tree) is tuple and len(tree) == 1 and type(tree[0]) is Tensor:
        return (function(tree[0]),)  # by far the most frequent
    done: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in done:
            done[id(tensor)] = function(tensor)
        return done[id(tensor)]

    return tree_map_only(Tensor, once, tree)


def hides_tensors(leaf: Any, depth: int = 3) -> bool:
    """Returns whether `leaf`, an object that pytree functions do not enter, contains tensors."""
    if isinstance(leaf, Tensor):
        return True
    if depth == 0 or not hasattr(leaf, "__dict__") or isinstance(leaf, type):
        return False
    return any(hides_tensors(inner, depth - 1) for inner in tree_leaves(vars(leaf)))
