"""The engine on devices that compute while the host runs ahead, each with streams of its own.

What fails on several GPUs and never on a CPU: memory that is reused too early, a stream that waits
for the wrong device, a host that waits, memory that grows with the micro-batches. The devices are
stand-ins (see `support.stand_in_gpus`); an operation on tensors of two of them is an error.
"""

import copy

import pytest
import torch
from support.compare import assert_same, copied, micro_batches
from support.nets import (
    CASES,
    VOCABULARY,
    WIDTH,
    TanhLinear,
    floats,
    generator,
    regression,
    tokens,
)  # fmt: skip
from support.stand_in_gpus import Gate, on_host, stand_in_gpus
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel, Loader, OptimizerStep, World
from hybridtrain.pipeline import Timeline
from hybridtrain.pipeline.recomputation_proof import FIRST_STEPS
from hybridtrain.pipeline.transfer import Inputs, receive, send
from hybridtrain.schedule import make_schedule

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

KINDS = ["linear", "conv", "inplace", "nested", "pytree", "transformer", "u_net", "tied_gpt"]
SETTINGS = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe", "recompute": "always"},
    {"schedule": "1f1b", "stages_per_device": 2, "recompute": {"every": 2}},
    {"schedule": "zb-h1"},
    {"schedule": "zb-v", "stages_per_device": 2},
    {"schedule": "v-min", "stages_per_device": 2},
]


def model_on(gpus, net, **options):
    world = World.from_env(len(gpus.devices), [str(device) for device in gpus.devices])
    return HybridModel(net, world, **{"chunks": 4, **options})


def step_of(gpus, net, batch, loss, steps=1, **options):
    """The gradients and the loss of some steps, in CPU memory."""
    model = model_on(gpus, net, **options)
    gpus.syncs = 0  # of the placement
    for _ in range(steps):
        out = model.train_step(*batch, loss)
    found = {name: on_host(p.grad) for name, p in model.named_parameters()}
    return found, on_host(out.loss)


CELLS = [
    *((kind, SETTINGS[0]) for kind in KINDS),
    *((kind, settings) for kind in ("conv", "u_net") for settings in SETTINGS[1:]),
]


@pytest.mark.parametrize(("kind", "settings"), CELLS, ids=str)
@pytest.mark.quick_cases(1)
def test_a_step_equals_the_unsplit_model(kind, settings):
    case = CASES[kind]
    plain = case.net()
    inputs, targets = case.batch(10, 0)
    with stand_in_gpus(3 if len(settings) < 3 else 2, copy_s=1e-3) as gpus:
        found, _ = step_of(gpus, copy.deepcopy(plain), (inputs, targets), case.loss, **settings)
    for x, y in micro_batches(inputs, targets, 4):
        # a device has copies, which are aligned unlike views of the batch
        (case.loss(plain(copied(x)), y.clone()) * (len(y) / 10)).backward()
    theirs = {name: parameter.grad for name, parameter in plain.named_parameters()}
    # both uses of the tied weight are added up in another order
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if kind == "tied_gpt" else {}
    assert_same(found, theirs, kind, **tolerance)


@pytest.mark.thorough
def test_draws_are_those_of_the_cpu():
    case = CASES["dropout"]
    net = case.net()
    with stand_in_gpus(2) as gpus:
        found, _ = step_of(gpus, copy.deepcopy(net), case.batch(8, 0), case.loss, seed=5)
    model = HybridModel(net, World.from_env(1, "cpu"), chunks=4, seed=5)
    model.train_step(*case.batch(8, 0), case.loss)
    theirs = {name: parameter.grad for name, parameter in net.named_parameters()}
    assert_same(found, theirs, rtol=1e-5, atol=1e-6)


STEPS, BATCH = FIRST_STEPS + 2, 4
SETTINGS_OF_STEPS = [
    ("linear", {"schedule": "1f1b", "stages_per_device": 2, "recompute": {"every": 2}}),
    ("tied_gpt", {"schedule": "1f1b", "recompute": "always"}),
    ("conv", {"schedule": "zb-v", "stages_per_device": 2, "batch_norm": "deferred"}),
    ("inplace", {"schedule": "gpipe"}),
    ("stateful", {"schedule": "zb-h1"}),
]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS_OF_STEPS, ids=str)
@pytest.mark.quick_cases(1)
def test_the_host_waits_for_no_device_in_a_step_that_compares_nothing(kind, settings):
    case = CASES[kind]
    with stand_in_gpus(2) as gpus:
        world = World.from_env(2, [str(device) for device in gpus.devices])
        model = HybridModel(case.net(), world, chunks=2, self_check=False, **settings)
        model.train()
        # fused: the device decides whether the gradient is finite
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        step = OptimizerStep(model, optimizer, clip_norm=1.0)
        loader = Loader(TensorDataset(*case.batch(STEPS * BATCH, 0)), BATCH, world, seed=1)
        for number, batch in enumerate(loader.batches()):
            if number == FIRST_STEPS:
                assert gpus.syncs > 0, "the stand-ins count no waits"
                gpus.syncs = 0
            step.run([batch], case.loss)
        assert step.number == STEPS
        assert gpus.syncs == 0


def on(gpus, device, value):
    return gpus.copy(torch.full((8,), value), gpus.devices[device])


def sent_and_overwritten(gpus):
    """What arrives of ones whose memory the sender drops while the copy is on its way."""
    source, target = gpus.devices[:2]
    # the copy's own stream is found by a first message
    receive(send(on(gpus, 0, 0.0), source, target, "F"), target)
    gpus.synchronize(source)
    outbound = next(s for s in reversed(gpus._streams) if s.device == source)
    value = on(gpus, 0, 1.0)
    with Gate(outbound):
        transfer = send(value, source, target, "F")
        del value
        later = on(gpus, 0, 2.0)  # takes that memory, if it is free
        gpus.default_stream(source).record_event().synchronize()
    return on_host(receive(transfer, target)), on_host(later)


def test_memory_that_was_sent_is_not_reused_before_it_is_copied():
    with stand_in_gpus(2) as gpus:
        arrived, _ = sent_and_overwritten(gpus)
    assert torch.equal(arrived, torch.ones(8))


def test_the_stand_in_would_show_memory_that_is_reused_too_early(monkeypatch):
    with stand_in_gpus(2) as gpus:
        monkeypatch.setattr(gpus, "record_stream", lambda tensor, stream: None)
        arrived, _ = sent_and_overwritten(gpus)
    assert torch.equal(arrived, torch.full((8,), 2.0))


def test_an_arrival_waits_for_its_own_source_alone():
    with stand_in_gpus(3) as gpus:
        first, middle, last = gpus.devices
        # one message each before, so that all streams are there
        activation, gradient = on(gpus, 0, 1.0), on(gpus, 2, 2.0)
        with Gate(gpus.default_stream(first)):
            early = send(activation, first, middle, "F")
            late = send(gradient, last, middle, "B")
            assert late.ready_event.comes(10)
            assert not early.ready_event.done
        assert torch.equal(on_host(receive(late, middle)), torch.full((8,), 2.0))


def test_two_kinds_of_values_from_one_device_do_not_wait_for_each_other():
    with stand_in_gpus(2) as gpus:
        source, target = gpus.devices
        activation, gradient = on(gpus, 0, 1.0), on(gpus, 0, 2.0)
        gpus.synchronize(source)
        send(activation, source, target, "F")
        gpus.synchronize(source)
        outbound = [s for s in gpus._streams if s.device == source][1]
        with Gate(outbound):
            send(activation, source, target, "F")
            assert send(gradient, source, target, "B").ready_event.comes(10)


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.thorough
def test_memory_does_not_grow_with_the_number_of_micro_batches(trains):
    peaks = []
    # an evaluation has up to 2 micro-batches in the pipeline for each of the 3 stages, and has
    # them, since the last stage is slow
    for chunks in (6, 18) if trains else (12, 36):
        net = nn.Sequential(*[TanhLinear() for _ in range(6 if trains else 16)])
        x, y = regression(chunks * 64)
        with stand_in_gpus(3, operation_s=1e-3, copy_s=5e-3) as gpus:
            split = "uniform" if trains else [2, 2, 12]
            model = model_on(gpus, net, chunks=chunks, split=split)
            if trains:
                model.train_step(x, y, F.mse_loss)
            else:
                model.eval()
                model.map_outputs(x, y, F.mse_loss)
            gpus.synchronize(gpus.devices[0])
            peaks.append([gpus.peak_memory(device).allocated for device in gpus.devices[:2]])
    # but for the losses and a few blocks, whatever the threads' order
    assert all(many < 1.3 * few for few, many in zip(*peaks, strict=True)), peaks


def test_a_timeline_has_one_zero_for_all_devices():
    with stand_in_gpus(2) as gpus:
        with Gate(gpus.default_stream(gpus.devices[0])):
            timeline = Timeline(make_schedule("1f1b", 2, 2), gpus.devices)
            assert not timeline._zero[1].comes(0.2)
        assert timeline._zero[1].comes(10)


def test_inputs_are_copied_while_the_device_computes():
    with stand_in_gpus(1) as gpus:
        device = gpus.devices[0]
        inputs = Inputs(lambda i: torch.full((4,), float(i)), 2, device)
        first = inputs.take(0)
        with Gate(gpus.default_stream(device)):
            assert inputs._begun[1].ready_event.comes(10)
        assert torch.equal(on_host(inputs.take(1)), torch.ones(4))
        assert torch.equal(on_host(first), torch.zeros(4))


def test_outputs_that_a_caller_reads_in_a_stream_of_its_own_are_not_overwritten():
    x, _ = regression(8)
    with stand_in_gpus(2) as gpus:
        model = model_on(gpus, nn.Sequential(TanhLinear(), TanhLinear()), chunks=2).eval()

        def outputs(inputs):
            return model.map_outputs(inputs, None, lambda output, _: output)

        expected = on_host(outputs(x))
        device = gpus.devices[1]
        default, own = gpus.default_stream(device), gpus.new_stream(device)
        with gpus.using([own]):
            given = outputs(x)
            with Gate(own):
                read = [output + 0 for output in given]
                del given
                with gpus.using([default]):
                    outputs(x + 1)  # takes their memory, if it is free
                    default.record_event().synchronize()
        for output, same in zip(on_host(read), expected, strict=True):
            assert torch.equal(output, same)


class WithLengths(nn.Module):
    """Hands on the lengths that `pack_padded_sequence` takes, in CPU memory."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x), torch.tensor([2, 1])


class Shortened(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        x, lengths = value
        assert lengths.device == torch.device("cpu")
        return self.linear(x) * float(lengths[0])


class Encoder(nn.Module):
    """Adds up what a layer makes of the words of a sentence, whose lengths are among the inputs.

    A cell of one step in place of an LSTM, whose kernels for the CPU read a stand-in's memory.
    """

    def __init__(self, to_cpu=True):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.cell = TanhLinear()
        self.to_cpu = to_cpu

    def forward(self, batch):
        tokens, lengths = batch
        lengths = lengths.cpu() if self.to_cpu else lengths
        packed = pack_padded_sequence(
            self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        packed = packed._replace(data=self.cell(packed.data))
        return pad_packed_sequence(packed, batch_first=True)[0].sum(1)


def sentences(rows):
    lengths = torch.randint(1, 5, (rows,), generator=generator(5))
    return (tokens(rows)[0], lengths), floats(rows, seed=1)


def test_a_model_that_takes_lengths_to_the_cpu_trains_as_the_unsplit_model():
    net = nn.Sequential(Encoder(), TanhLinear(), TanhLinear())
    plain = copy.deepcopy(net)
    with stand_in_gpus(2) as gpus:
        found, _ = step_of(gpus, net, sentences(8), F.mse_loss)
    for x, y in micro_batches(*sentences(8), 4):
        (F.mse_loss(plain(copied(x)), y.clone()) / 4).backward()
    assert_same(found, {name: p.grad for name, p in plain.named_parameters()})


def test_lengths_on_a_gpu_are_refused_with_the_way_out():
    with stand_in_gpus(2) as gpus:
        net = nn.Sequential(Encoder(to_cpu=False), TanhLinear(), TanhLinear())
        with pytest.raises(RuntimeError, match="lengths") as info:
            step_of(gpus, net, sentences(8), F.mse_loss)
    assert any("lengths.cpu()" in note for note in info.value.__notes__)


def test_values_in_cpu_memory_cross_a_cut_as_they_are():
    net = nn.Sequential(WithLengths(), Shortened())
    plain = copy.deepcopy(net)
    x, y = regression(2)
    with stand_in_gpus(2) as gpus:
        found, _ = step_of(gpus, copy.deepcopy(net), (x, y), F.mse_loss, chunks=1)
        model = model_on(gpus, net, chunks=1)
        for _ in range(FIRST_STEPS + 1):
            gpus.syncs = 0
            model.train_step(x, y, F.mse_loss)
        assert gpus.syncs == 0
    F.mse_loss(plain(x.clone()), y).backward()
    assert_same(found, {name: p.grad for name, p in plain.named_parameters()})


def test_the_peak_of_memory_is_that_of_the_device():
    with stand_in_gpus(2) as gpus:
        model = model_on(gpus, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
        model.train_step(floats(8), floats(8, seed=1), F.mse_loss)
        assert model.memory_bytes() == [gpus.peak_memory(d).allocated for d in gpus.devices]
