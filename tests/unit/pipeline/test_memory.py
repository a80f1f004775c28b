"""A stage keeps as many micro-batches alive as its schedule says; bytes are counted by storage."""

import time
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridtrain import HybridModel, World
from hybridtrain._base.tensors import count_saved, storage_id
from hybridtrain.schedule import peak_in_flight

CHUNKS = [4, 8, 16, 32]
WIDTH = 4


class Probe(nn.Module):
    """The only layer of its stage: counts the micro-batches whose activations are alive."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.alive = []
        self.outputs = []
        self.inners = []

    def forward(self, x):
        inner = self.linear(x)  # the backward of sin needs it
        y = inner.sin()
        self.inners.append(weakref.ref(inner))
        self.outputs.append(weakref.ref(y))
        self.alive.append(living(self.inners))
        return y


def living(refs):
    return sum(ref() is not None for ref in refs)


def probed(devices, chunks, v=1, **options):
    torch.manual_seed(0)
    net = nn.Sequential(*[Probe() for _ in range(devices * v)])
    world = World.from_env(nb_part=devices, devices="cpu")
    model = HybridModel(net, world, chunks=chunks, stages_per_device=v, **options)
    return net, model


def step(model, samples, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(samples, WIDTH, generator=g), torch.randn(samples, WIDTH, generator=g)
    model.train_step(x, y, F.mse_loss)


def peaks(net):
    """The most micro-batches that each stage kept alive at one time."""
    return [max(layer.alive) for layer in net]


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.quick_cases(1)
def test_1f1b_holds_no_more_micro_batches_than_there_are_stages_to_come(devices):
    for chunks in CHUNKS:
        net, model = probed(devices, chunks)
        for seed in range(2):
            step(model, chunks, seed=seed)
        assert peaks(net) == [min(chunks, devices - s) for s in range(devices)], chunks


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.quick_cases(1)
def test_gpipe_holds_all_micro_batches(devices):
    for chunks in CHUNKS:
        net, model = probed(devices, chunks, schedule="gpipe")
        step(model, chunks)
        assert peaks(net) == [chunks] * devices


@pytest.mark.parametrize(("devices", "v"), [(2, 2), (2, 3), (3, 2), (1, 3)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.quick_cases(2)
def test_interleaved_stages_hold_what_their_schedule_says(devices, v, schedule):
    for chunks in (4, 16):
        net, model = probed(devices, chunks, v, schedule=schedule)
        step(model, chunks)
        assert peaks(net) == list(peak_in_flight(model.schedule(chunks)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("devices", "v"), [(1, 1), (2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.quick_cases(2)
def test_no_more_than_max_inflight_are_held_anywhere(limit, devices, v, schedule):
    for chunks in (4, 7, 16):
        net, model = probed(devices, chunks, v, schedule=schedule, max_inflight=limit)
        step(model, chunks)
        assert max(peaks(net)) <= limit
        assert peaks(net)[0] == min(limit, peak_in_flight(model.schedule(chunks))[0])


def test_a_short_batch_holds_no_more_than_its_samples():
    net, model = probed(2, 8, schedule="gpipe")
    step(model, 3)
    assert peaks(net) == [3, 3]


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("devices", "v"), [(1, 1), (2, 1), (4, 1), (2, 2)])
@pytest.mark.quick_cases(5)
def test_nothing_of_a_step_is_alive_after_it(devices, v, schedule, recompute):
    net, model = probed(devices, 8, v, schedule=schedule, recompute=recompute)
    step(model, 8)
    refs = [ref for layer in net for ref in (*layer.outputs, *layer.inners)]
    assert len(refs) >= 2 * 8 * devices * v
    _wait_until(lambda: living(refs) == 0)


@pytest.mark.parametrize("devices", [2, 4])
def test_a_sent_activation_is_freed_after_its_backward_within_the_step(devices):
    chunks = 16
    net, model = probed(devices, chunks)
    counts = []

    def loss(output, y):
        # by then, the last stage has done the backwards of all micro-batches before
        counts.append(living(net[-1].outputs))
        return F.mse_loss(output, y)

    x = torch.randn(chunks, WIDTH)
    model.train_step(x, x, loss)
    assert counts == [1] * chunks


def test_nothing_of_a_failed_step_is_alive_after_it():
    net, model = probed(2, 8)

    def loss(output, y):
        if len(net[-1].outputs) == 4:
            raise ArithmeticError("boom")
        return F.mse_loss(output, y)

    x = torch.randn(8, WIDTH)
    with pytest.raises(ArithmeticError):
        model.train_step(x, x, loss)
    refs = [ref for layer in net for ref in (*layer.outputs, *layer.inners)]
    _wait_until(lambda: living(refs) == 0)


@pytest.mark.parametrize("devices", [1, 2])
def test_an_evaluation_holds_nothing(devices):
    net, model = probed(devices, 8)
    with torch.no_grad():
        output = model(torch.randn(8, WIDTH))
    assert peaks(net) == [1] * devices
    refs = [ref for layer in net for ref in (*layer.outputs, *layer.inners)]
    _wait_until(lambda: living(refs) == 0)
    assert output.shape == (8, WIDTH)


# Bytes by storage ------------------------------------------------------------------------------


def test_saved_tensors_are_counted_once_per_storage_without_weights_and_given_ones():
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(5, WIDTH, requires_grad=True)
    with count_saved(layer, [x]) as saved:
        y = layer(x).sigmoid()
        (y * y.view(-1, WIDTH)).sum()
    assert saved.bytes == 5 * WIDTH * 4  # the sigmoid's output, which three operations keep


@pytest.mark.parametrize("fake", [False, True])
def test_views_share_the_id_of_their_storage_also_without_memory(fake):
    with FakeTensorMode() if fake else nullcontext():
        x, y = torch.empty(4, 4), torch.empty(4, 4)
    assert storage_id(x) == storage_id(x[1:].view(-1)) != storage_id(y)


def _wait_until(done):
    """The threads release a step right after they have reported its end."""
    for _ in range(500):
        if done():
            return
        time.sleep(0.01)
    pytest.fail("something of the step is alive")
