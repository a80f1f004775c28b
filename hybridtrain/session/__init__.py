"""A thin wrapper around PyTorch's objects, for loops of the user's own.

session            `Session`; prepared: what it returns in the place of the user's objects
"""

from hybridtrain.session.session import Session

__all__ = [
    "Session",
]
