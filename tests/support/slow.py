"""Layers and data that take a known time for each sample: devices that are emulated by sleeping."""

import time

import torch
from torch import nn


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, seconds):
        ctx.seconds = seconds
        time.sleep(seconds * len(value))
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds * len(gradient))
        return gradient, None


class SlowLinear(nn.Linear):
    """A layer that takes `seconds` for a sample forward, and twice as long backward."""

    def __init__(self, seconds, width=4):
        super().__init__(width, width)
        self.seconds = seconds

    def forward(self, value):
        return _Sleep.apply(super().forward(value), self.seconds)


class SlowData(torch.utils.data.Dataset):
    """Samples that take `seconds` each to load."""

    def __init__(self, seconds, samples=640, width=4):
        drawn = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(samples, width, generator=drawn)
        self.targets = torch.randint(0, width, (samples,), generator=drawn)
        self.seconds = seconds

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if self.seconds:
            time.sleep(self.seconds)
        return self.inputs[index], self.targets[index]
