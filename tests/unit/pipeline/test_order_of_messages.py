"""The order in which the processes of a pipeline send, receive and compute."""

from collections import deque
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hybridtrain import World
from hybridtrain.launch import LaneActivity
from hybridtrain.pipeline.message_wire import (
    RECEIVES_AHEAD,
    Lane,
    MessageWire,
    messages_of,
    order_of,
)
from hybridtrain.pipeline.messages import pack
from hybridtrain.schedule import forward_only, make_schedule, receiver_of

SHAPES = [("gpipe", 2, 1), ("gpipe", 3, 3), ("1f1b", 4, 1), ("1f1b", 2, 2), ("1f1b", 3, 3)]
SHAPES += [
    ("zb-h1", 4, 1),
    ("zb-v", 3, 2),
    ("v-half", 4, 2),
    ("v-min", 4, 2),
    ("forward_only", 4, 1),
    ("forward_only", 3, 3),
]


def made(name: str, devices: int, per_device: int):
    if name == "forward_only":
        return forward_only(devices, 5, per_device)
    return make_schedule(name, devices, 5, per_device)


@pytest.mark.parametrize(("name", "devices", "per_device"), SHAPES)
def test_no_process_waits_in_a_circle_even_if_sends_wait_for_their_receives(
    name: str, devices: int, per_device: int
) -> None:
    schedule = made(name, devices, per_device)
    orders = [order_of(schedule, lane) for lane in range(devices)]
    for order, own in zip(orders, schedule.lanes, strict=True):
        assert tuple(action for is_own, action in order if is_own) == own
    # what each process does: ("run", action), ("send", what it is for), ("receive", what for)
    left = []
    for lane, order in enumerate(orders):
        events = deque()
        for is_own, action in order:
            events.append(("run" if is_own else "receive", action))
            to = receiver_of(action, schedule.stages) if is_own else None
            if to is not None and schedule.lane_of[to.stage] != lane:
                events.append(("send", to))
        left.append(events)
    met = 0
    moved = True
    while moved:
        moved = False
        for events in left:
            if not events:
                continue
            kind, action = events[0]
            peer = left[schedule.lane_of[action.stage]]
            if kind == "run":
                events.popleft()
            elif kind == "send" and peer and peer[0] == ("receive", action):
                events.popleft()
                peer.popleft()
                met += 1
            else:
                continue
            moved = True
    assert not any(left)
    borders = sum(
        schedule.lane_of[stage] != schedule.lane_of[stage + 1]
        for stage in range(schedule.stages - 1)
    )
    assert met == 5 * borders * (1 if name == "forward_only" else 2)
    assert messages_of(schedule) == met


@pytest.mark.parametrize(("name", "devices", "per_device"), SHAPES)
def test_the_receive_of_a_message_begins_before_the_action_that_needs_it(
    name: str, devices: int, per_device: int
) -> None:
    schedule = made(name, devices, per_device)
    for number in range(devices):
        lane = Lane.of(schedule, number)
        assert tuple(action for _, action in lane.actions) == schedule.lanes[number]
        begins = dict.fromkeys(lane.receives, 0)
        for due, action in lane.actions:
            message = action._replace(kind="B") if action.kind == "I" else action
            if message in begins:
                begins[message] = due
        for place, due in enumerate(begins.values()):
            assert due > place


def test_receives_begin_ahead_where_a_process_waits_and_delay_no_action_that_needs_none() -> None:
    begun: list[torch.Tensor] = []

    def recv(tensors: list[torch.Tensor], peer: int, tag: int) -> SimpleNamespace:
        begun.extend(tensors)
        return SimpleNamespace(wait=lambda: tensors[0].fill_(len(begun)))

    lane = Lane.of(make_schedule("1f1b", 2, 16), 0)
    form, _ = pack([torch.zeros(3)], unique=False)
    group = cast("dist.ProcessGroup", SimpleNamespace(recv=recv))
    world = World(size=2, engine="distributed", processes_per_replica=2, pipeline_group=group)
    formats = dict.fromkeys(lane.receives, form)
    stages = {0: SimpleNamespace(offload=None, module=nn.Module())}
    wire = MessageWire(stages, lane, world, formats, LaneActivity())
    waits = 0
    for due, action in lane.actions:
        wire.begin_receives(due)
        if action.kind == "F" and not waits:
            assert not begun
        elif action.kind == "B":
            (gradient,) = wire.receive(action, LaneActivity())
            assert torch.equal(gradient, torch.full((3,), float(len(begun))))
            waits += 1
            assert len(begun) == min(waits - 1 + RECEIVES_AHEAD, 16)
    assert waits == 16
