"""Tensors in CPU memory between two processes: the small ones together, all as they were sent."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch

from hybridtrain.pipeline.point_to_point import SMALL_BYTES, begin_receive, begin_send, wait
from hybridtrain.world import World


class Group:
    """Both ends of a gloo group: the messages on their way, in order."""

    def __init__(self):
        self.on_their_way = deque()

    def send(self, tensors, peer, tag):
        (tensor,) = tensors
        self.on_their_way.append((tag, tensor.clone()))
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors, peer, tag):
        (tensor,) = tensors

        def arrive():
            sent_tag, sent = self.on_their_way.popleft()
            assert (sent_tag, sent.dtype, sent.shape) == (tag, tensor.dtype, tensor.shape)
            tensor.copy_(sent)

        return SimpleNamespace(wait=arrive)


def numbers(size, dtype):
    """`size` different values whose bytes are valid in every dtype."""
    return torch.arange(size, dtype=torch.float32).to(dtype)


SMALL = [numbers(3, torch.uint8), numbers(5, torch.float64), numbers(7, torch.bfloat16)]
LARGE = [numbers(SMALL_BYTES // 4 + 1, torch.float32)]


@pytest.mark.parametrize(
    ("tensors", "messages"),
    [
        (SMALL, 1),
        ([*SMALL, *LARGE], 2),
        ([SMALL[0], *LARGE, SMALL[1], torch.empty(0), *LARGE, numbers(2, torch.bool)], 3),
        (SMALL[:1], 1),
        ([numbers(SMALL_BYTES // 8, torch.complex64), numbers(2, torch.int64)], 1),
        ([torch.empty(0)], 0),
        ([numbers(6, torch.float32).view(2, 3), torch.tensor(7.0), torch.ones(2, 5)[:1, 3]], 1),
    ],
)
def test_small_tensors_travel_in_one_message_and_arrive_as_they_were_sent(tensors, messages):
    group = Group()
    world = World(size=2, engine="distributed", processes_per_replica=2, pipeline_group=group)
    sent = [tensor.clone() for tensor in tensors]
    sending = begin_send(sent, world, 1, tag=3)
    assert len(group.on_their_way) == messages
    received = [torch.zeros_like(tensor) for tensor in tensors]
    receiving = begin_receive(received, world, 0, tag=3)
    assert len(receiving) == len(sending) == messages
    wait(receiving)
    wait(sending)
    for mine, theirs in zip(received, tensors, strict=True):
        assert mine.dtype is theirs.dtype
        assert torch.equal(mine, theirs)
