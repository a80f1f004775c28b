"""Messages between GPUs overlap with what the GPUs compute.

The GPUs and NCCL are stand-ins (see `support.stand_in_gpus` and `support.stand_in_nccl`).
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from support.compare import assert_same, copied, micro_batches
from support.nets import CASES
from support.stand_in_gpus import Gate, on_host, stand_in_gpus
from support.stand_in_nccl import OverThreads, stand_in_nccl
from torch import nn

from hybridtrain.launch import LaneActivity
from hybridtrain.pipeline.message_wire import Lane, MessageWire
from hybridtrain.pipeline.messages import pack
from hybridtrain.pipeline.ties import AliasElsewhere, OwnerElsewhere
from hybridtrain.schedule import Action, make_schedule

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

SENDER, RECEIVER = PEERS = [0, 1]
PATIENCE_S = 10


def on(gpus, device, value):
    return gpus.copy(torch.full((8,), value), gpus.devices[device])


def forward(microbatch):
    return Action("F", 1, microbatch)


class Wires:
    """The wires of processes with a stage each, which know the formats of their messages."""

    def __init__(self, gpus, nccl):
        ranks = range(len(gpus.devices))
        message = [(on(gpus, SENDER, 0.0),)]
        form = pack(message, unique=True)[0]
        actions = [
            Action(kind, stage, microbatch)
            for kind in "FB"
            for stage in ranks
            for microbatch in range(4)
        ]
        schedule = make_schedule("gpipe", len(ranks), 4)
        lanes = [Lane.of(schedule, rank) for rank in ranks]
        self.first_receives = [lane.receives[0] for lane in lanes]
        self._doing = doing = LaneActivity()
        self.of = [
            MessageWire(
                {rank: SimpleNamespace(offload=None, module=nn.Module())},
                lanes[rank],
                nccl.world(rank),
                dict.fromkeys(actions, form),
                doing,
            )
            for rank in ranks
        ]

    def send(self, microbatch, value):
        self.of[SENDER].send(forward(microbatch), [(value,)])

    def begin_receive(self, microbatch):
        self.of[RECEIVER].begin_receives(microbatch + 1)

    def receive(self, microbatch):
        ((value,),) = self.of[RECEIVER].receive(forward(microbatch), self._doing)
        return value


@pytest.fixture
def gpus():
    with stand_in_gpus(2) as gpus:
        yield gpus


@pytest.fixture
def nccl(gpus):
    with stand_in_nccl(gpus) as nccl:
        yield nccl


@pytest.fixture
def wires(gpus, nccl):
    return Wires(gpus, nccl)


def test_a_message_arrives_while_the_receiver_computes(gpus, nccl, wires):
    with Gate(gpus.default_stream(gpus.devices[RECEIVER])):
        wires.begin_receive(0)
        wires.send(0, on(gpus, SENDER, 1.0))
        assert nccl.messages_of_edge(SENDER, RECEIVER, at=RECEIVER).record_event().comes(PATIENCE_S)
    assert torch.equal(on_host(wires.receive(0)), torch.ones(8))


def test_a_device_waits_for_a_message_where_it_uses_the_value_and_not_before(gpus, nccl, wires):
    computing = gpus.default_stream(gpus.devices[RECEIVER])
    wires.begin_receive(0)
    assert computing.record_event().comes(PATIENCE_S)
    value = wires.receive(0) + 0
    used = computing.record_event()
    assert not used.comes(0.1)
    wires.send(0, on(gpus, SENDER, 1.0))
    assert used.comes(PATIENCE_S)
    assert torch.equal(on_host(value), torch.ones(8))


def test_a_sender_goes_on_computing_while_nobody_receives(gpus, nccl, wires):
    wires.send(0, on(gpus, SENDER, 1.0))
    assert gpus.default_stream(gpus.devices[SENDER]).record_event().comes(PATIENCE_S)
    wires.begin_receive(0)
    assert torch.equal(on_host(wires.receive(0)), torch.ones(8))


def test_a_receive_takes_no_memory_that_the_device_still_reads(gpus, nccl, wires):
    with Gate(gpus.default_stream(gpus.devices[RECEIVER])):
        value = on(gpus, RECEIVER, 3.0)
        read = value + 0
        del value  # its memory is free for what this stream does later
        wires.begin_receive(0)
        wires.send(0, on(gpus, SENDER, 1.0))
        assert nccl.messages_of_edge(SENDER, RECEIVER, at=RECEIVER).record_event().comes(PATIENCE_S)
    assert torch.equal(on_host(read), torch.full((8,), 3.0))
    assert torch.equal(on_host(wires.receive(0)), torch.ones(8))


def test_a_received_value_stays_until_the_device_has_read_it(gpus, nccl, wires):
    wires.begin_receive(0)
    wires.send(0, on(gpus, SENDER, 1.0))
    with Gate(gpus.default_stream(gpus.devices[RECEIVER])):
        read = wires.receive(0) + 0  # the value itself is dropped
        wires.begin_receive(1)
        wires.send(1, on(gpus, SENDER, 2.0))
        assert nccl.messages_of_edge(SENDER, RECEIVER, at=RECEIVER).record_event().comes(PATIENCE_S)
    assert torch.equal(on_host(read), torch.ones(8))
    assert torch.equal(on_host(wires.receive(1)), torch.full((8,), 2.0))


@pytest.mark.parametrize("late", [0, 2])
def test_a_late_process_delays_only_messages_to_it(late):
    with stand_in_gpus(3) as gpus, stand_in_nccl(gpus) as nccl:
        wires = Wires(gpus, nccl)
        first, middle, _ = wires.of
        waiting = wires.first_receives[late]
        middle.send(waiting, [(on(gpus, 1, 2.0),)])
        middle.begin_receives(1)
        first.send(forward(0), [(on(gpus, 0, 3.0),)])
        ((value,),) = middle.receive(forward(0), LaneActivity())
        read = value + 0
        assert gpus.default_stream(gpus.devices[1]).record_event().comes(PATIENCE_S)
        assert not nccl.messages_of_edge(1, late, at=1).record_event().comes(0)
        wires.of[late].begin_receives(1)
        ((value,),) = wires.of[late].receive(waiting, LaneActivity())
        assert torch.equal(on_host(read), torch.full((8,), 3.0))
        assert torch.equal(on_host(value), torch.full((8,), 2.0))


def test_tied_parameters_use_the_communicator_that_is_there(gpus, nccl):
    owned, alias = (nn.Parameter(on(gpus, device, float(device))) for device in PEERS)
    owner = AliasElsewhere(owned, nccl.world(SENDER), RECEIVER)
    user = OwnerElsewhere(alias, nccl.world(RECEIVER), SENDER)
    owner.refresh()
    user.refresh()
    alias.grad = on(gpus, RECEIVER, 5.0)
    user.accumulate_into_owner()
    owner.accumulate_into_owner()
    assert torch.equal(on_host(alias.detach()), torch.zeros(8))
    assert torch.equal(on_host(owned.grad), torch.full((8,), 5.0))


CELLS = [
    ("linear", {"schedule": "1f1b"}),
    ("u_net", {"schedule": "1f1b", "recompute": "always"}),
    ("conv", {"schedule": "zb-v", "stages_per_device": 2}),
    ("pytree", {"schedule": "gpipe"}),
]


@pytest.mark.parametrize(("kind", "settings"), CELLS, ids=str)
@pytest.mark.quick_cases(1)
def test_a_step_equals_the_unsplit_model(gpus, nccl, kind, settings):
    case = CASES[kind]
    net = case.net()
    plain = copy.deepcopy(net)
    inputs, targets = case.batch(10, 0)
    model = OverThreads(net, inputs, nccl, gpus, chunks=4, **settings)
    for _ in range(2):  # the first step sends formats as well
        model.zero_grad()
        model.step(inputs, targets, case.loss)
    found = {name: on_host(gradient) for name, gradient in model.gradients().items()}
    for x, y in micro_batches(inputs, targets, 4):
        # a device has copies, which are aligned unlike views of the batch
        (case.loss(plain(copied(x)), y.clone()) * (len(y) / 10)).backward()
    theirs = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_same(found, theirs, kind)
