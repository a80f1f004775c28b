"""The worlds of loaders: replicas that are asked one after the other, or side by side."""

from types import SimpleNamespace

import torch


def world_of(replica, replicas):
    """Returns the part of a World that a loader reads, for a loader that sends nothing."""
    return SimpleNamespace(replica=replica, replicas=replicas, devices=(torch.device("cpu"),))
