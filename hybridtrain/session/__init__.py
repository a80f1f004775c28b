"""A thin wrapper around PyTorch's objects, for loops of the user's own."""

from hybridtrain.session.session import Session

__all__ = [
    "Session",
]
