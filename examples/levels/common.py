"""The network and the data of the three scripts in this folder."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtrain.datasets import digits, mnist
from hybridtrain.errors import DataError


class BasicNet(nn.Module):
    """Two convolutions and two linear layers, as in PyTorch's example for MNIST."""

    def __init__(self, image_size: int = 28) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(64 * ((image_size - 4) // 2) ** 2, 128)
        self.fc2 = nn.Linear(128, 10)
        self.act = F.relu

    def forward(self, x: Tensor) -> Tensor:
        """Returns log-probabilities (N, 10) of images (N, 1, height, width)."""
        x = self.act(self.conv1(x))
        x = self.act(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = self.act(self.fc1(x))
        x = self.dropout2(x)
        x = self.fc2(x)
        return F.log_softmax(x, dim=1)


def datasets(root: str = "data") -> tuple[Any, Any, int]:
    """Returns training set, test set and image size: MNIST if it is in `root`, else the digits."""
    try:
        data = mnist(root=root)
    except DataError:
        data = digits()
    return data.train, data.eval, data.metadata["image_size"]
