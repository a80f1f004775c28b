"""PyTorch's lowering of a schedule, by a private name: what an engine over processes relies on."""

import pytest

from hybridtrain._torch_private import lowered
from hybridtrain.schedule import forward_only, make_schedule


@pytest.mark.parametrize(("devices", "per_device"), [(2, 1), (4, 1), (2, 2), (3, 3)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "forward_only"])
def test_sends_and_receives_are_added_in_an_order_in_which_none_waits_in_a_circle(
    name: str, devices: int, per_device: int
) -> None:
    if name == "forward_only":
        schedule = forward_only(devices, 5, per_device)
    else:
        schedule = make_schedule(name, devices, 5, per_device, None)
    lanes = lowered(schedule.lanes, lambda stage: stage % devices, schedule.stages)
    for lane, own in zip(lanes, schedule.lanes, strict=True):
        assert [action for action in lane if len(action[0]) == 1] == [tuple(a) for a in own]
    # a send waits for its receive here, as with NCCL: each process is at its next action
    at = [0] * devices
    met = 0
    while any(place < len(lane) for place, lane in zip(at, lanes, strict=True)):
        before = list(at)
        for process, lane in enumerate(lanes):
            if at[process] == len(lane):
                continue
            kind, stage, microbatch = lane[at[process]]
            if not kind.startswith("SEND"):
                at[process] += not kind.startswith("RECV")
                continue
            to = stage + (1 if kind == "SEND_F" else -1)
            peer = to % devices
            receive = ("RECV" + kind[4:], to, microbatch)
            if at[peer] < len(lanes[peer]) and lanes[peer][at[peer]] == receive:
                at[process] += 1
                at[peer] += 1
                met += 1
        assert at != before, [lane[place:][:1] for place, lane in zip(at, lanes, strict=True)]
    borders = schedule.stages - 1
    assert met == 5 * borders * (1 if name == "forward_only" else 2)
