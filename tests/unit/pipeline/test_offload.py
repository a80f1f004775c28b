"""Activations that wait in the host's memory: the same bits, and about two micro-batches left."""

import pytest
import torch
from support.compare import assert_same, hybrid
from support.stand_in_gpus import on_host, stand_in_gpus
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from hybridtrain import HybridModel, PipelineOptions, World, pipelined
from hybridtrain.errors import ConfigError
from hybridtrain.schedule import fullest_moments, make_schedule

pytestmark = pytest.mark.usefixtures("seeded")

WIDTH, ROWS, CHUNKS = 64, 32, 16

# Micro-batches that each device holds: without offloading, with it, and while copies take time.
HELD = {
    ("gpipe", 1): ([16, 16, 16, 16], [2, 2, 2, 2], [3, 3, 3, 3]),
    ("1f1b", 1): ([4, 3, 2, 1], [2, 2, 2, 1], [3, 3, 2, 1]),
    ("zb-h1", 1): ([4, 4, 4, 4], [2, 2, 2, 2], [3, 3, 3, 3]),
    ("1f1b", 2): ([11, 9, 7, 5], [2, 2, 2, 2], [3, 3, 3, 2]),
    ("v-half", 2): ([6, 6, 6, 6], [2, 2, 2, 2], [3, 3, 3, 3]),
}


class Block(nn.Module):
    """Saves five tensors that can leave, each of as many bytes as its output."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.linear(F.layer_norm(x, (WIDTH,)))))


def pipeline(devices=4, **options):
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(2 * devices)), nn.Linear(WIDTH, 10))
    options = {"chunks": CHUNKS, "self_check": False, **options}
    return hybrid(net, devices, **options)


def batch(chunks=CHUNKS, seed=0):
    torch.manual_seed(seed)
    return torch.randn(chunks * ROWS, WIDTH), torch.randint(10, (chunks * ROWS,))


def gradients(model, steps=2, chunks=CHUNKS):
    for step in range(steps):
        model.zero_grad()
        model.train_step(*batch(chunks, step), F.cross_entropy)
    return {name: on_host(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize(("schedule", "per_device"), HELD)
@pytest.mark.quick_cases(3)
def test_a_device_holds_two_micro_batches_and_computes_the_same(schedule, per_device):
    options = {"schedule": schedule, "stages_per_device": per_device}
    expected = gradients(pipeline(**options), 1)
    model = pipeline(**options, offload="all")
    assert_same(gradients(model, 1), expected)
    table = make_schedule(schedule, 4, CHUNKS, per_device, None)
    most = [
        [max(sum(moment.on_device) for moment in of_device) for of_device in moments]
        for moments in (
            fullest_moments(table),
            fullest_moments(table, offloading="instant"),
            fullest_moments(table, offloading="overlapped"),
        )
    ]
    assert most == list(HELD[schedule, per_device])
    for device, moments in enumerate(fullest_moments(table, offloading="instant")):
        stages = [stage for stage in model.stages if table.lane_of[stage.index] == device]
        for number, stage in enumerate(stages):
            held = max(moment.on_device[number] for moment in moments)
            of_one = 2 * ROWS * WIDTH * 4 * 5 // per_device
            # the value of a border is held by the stage that still has to read it, too
            assert stage.offload.most_on_device <= (held + 1) * of_one


@pytest.mark.parametrize(
    ("schedule", "recompute", "offload"),
    [
        ("gpipe", "always", "inputs"),
        ("1f1b", {"every": 2}, "inputs"),
        ("gpipe", "except_last", "all"),
        ("zb-h1", {"every": 3}, "all"),
    ],
)
@pytest.mark.quick_cases(2)
def test_recomputed_layers_start_from_inputs_that_were_away(schedule, recompute, offload):
    options = {"schedule": schedule, "recompute": recompute, "chunks": 6}
    expected = gradients(pipeline(3, **options), 1, 6)
    model = pipeline(3, **options, offload=offload)
    assert_same(gradients(model, 1, 6), expected)
    assert model.stages[0].offload.memory.host.most_nbytes


def test_the_inputs_of_recomputed_layers_leave_the_device():
    model = pipeline(2, schedule="gpipe", recompute="always", offload="inputs", chunks=6)
    gradients(model, 1, 6)
    for stage in model.stages:
        assert 2 * 2 * ROWS * WIDTH * 4 <= stage.offload.most_on_device <= 3 * 2 * ROWS * WIDTH * 4


class Noting(nn.Module):
    """Notes the order in which the gradients of its input and of its weight are there."""

    def __init__(self):
        super().__init__()
        self.order = []
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.register_post_accumulate_grad_hook(lambda _: self.order.append("W"))

    def forward(self, x):
        x = torch.tanh(x)
        if x.requires_grad:
            x.register_hook(lambda _: self.order.append("I"))
        return self.linear(x)


def test_a_backward_in_two_parts_stays_in_two_parts():
    orders = []
    for offload in ("none", "all"):
        net = nn.Sequential(*(Noting() for _ in range(4)))
        model = hybrid(net, 4, chunks=8, schedule="zb-h1", self_check=False, offload=offload)
        targets = torch.zeros(8 * ROWS, WIDTH)
        model.train_step(torch.randn(8 * ROWS, WIDTH), targets, F.mse_loss)
        orders.append(net[3].order)
    assert orders[0] == orders[1]
    assert orders[0][:4] == ["I"] * 4, "in a whole backward, W follows each I"


class ChangesWhatItSaved(nn.Module):
    def forward(self, x):
        y = torch.sigmoid(x)
        y.mul_(2)
        return y


class ChangesItsBuffer(nn.Module):
    """The backward of a micro-batch would use the buffer of the next one's forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        self.scale.mul_(0.9)
        return x * self.scale


@pytest.mark.parametrize("kind", [ChangesWhatItSaved, ChangesItsBuffer])
def test_a_saved_tensor_that_is_changed_in_place_is_an_error(kind):
    for offload in ("none", "all"):
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, 10))
        model = hybrid(net, 1, chunks=4, schedule="gpipe", self_check=False, offload=offload)
        with pytest.raises(Exception, match=r"inplace operation|needs the values of its own"):
            model.train_step(*batch(4), F.cross_entropy)


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = 0

    def forward(self, x):
        self.left -= 1
        if self.left == 0:
            raise ValueError("as asked")
        return x


def test_a_layer_that_fails_frees_all_that_was_away():
    net = nn.Sequential(*(Block(0.0) for _ in range(3)), Fails(), nn.Linear(WIDTH, 10))
    model = hybrid(net, 2, chunks=8, schedule="gpipe", self_check=False, offload="all")
    seen = []
    net[0].register_forward_hook(
        lambda *arguments: seen.append(StorageWeakRef(arguments[2].untyped_storage()))
    )
    expected = gradients(model, 1, 8)
    net[3].left = 6
    with pytest.raises(ValueError, match="as asked"):
        model.train_step(*batch(8), F.cross_entropy)
    hosts = {stage.offload.memory.host for stage in model.stages}
    assert all(storage.expired() for storage in seen)
    assert all(host.in_use == 0 for host in hosts)
    assert_same(gradients(model, 1, 8), expected)


class ChangesUnseen(nn.Module):
    """Changes a buffer through `.data`, for which the first steps compare saved tensors."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.data.add_(1)
        return torch.tanh(x)


def test_steps_that_are_compared_hold_no_more():
    def step(offload):
        torch.manual_seed(0)
        net = nn.Sequential(*(ChangesUnseen() for _ in range(4)), nn.Linear(WIDTH, 10))
        net.insert(0, nn.Linear(WIDTH, WIDTH))
        model = hybrid(net, 1, chunks=8, schedule="gpipe", self_check=False, offload=offload)
        return model, gradients(model, 3, 8)

    expected = step("none")[1]
    model, found = step("all")
    assert_same(found, expected)
    assert model.stages[0].offload.most_on_device <= 3 * 4 * ROWS * WIDTH * 4


def test_what_stays_alive_anyway_is_not_moved():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    model = hybrid(net, 1, chunks=8, schedule="gpipe", self_check=False, offload="all")
    model.train_step(torch.randn(8 * ROWS, WIDTH), torch.randn(8 * ROWS, WIDTH), F.mse_loss)
    # the outputs of both layers, of 7 micro-batches; weights, samples and targets stay
    assert model.stages[0].offload.memory.host.most_nbytes == 7 * 2 * ROWS * WIDTH * 4


def test_a_shorter_batch_and_an_evaluation_between_steps_work():
    model, plain = pipeline(2, schedule="gpipe", offload="all"), pipeline(2, schedule="gpipe")
    for each in (model, plain):
        each.train_step(*batch(), F.cross_entropy)
        each(batch(3)[0])
        each.train_step(*batch(2, seed=1), F.cross_entropy)
    assert_same(
        {name: p.grad for name, p in model.named_parameters()},
        {name: p.grad for name, p in plain.named_parameters()},
    )


def test_the_hosts_memory_shrinks_with_the_batch():
    model = pipeline(2, schedule="gpipe", offload="all")
    model.train_step(*batch(), F.cross_entropy)
    host = model.stages[0].offload.memory.host
    of_large = host.nbytes
    model.train_step(*batch(4), F.cross_entropy)
    assert host.nbytes < of_large / 2
    assert host.most_nbytes == of_large


def test_activations_wait_between_the_calls_of_a_pipelined_module_and_their_backward():
    def gradients_of_calls(**options):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, WIDTH))
        net = pipelined(net, nb_part=2, devices="cpu", chunks=6, **options)
        first, second = net(batch(6)[0]), net(batch(6, seed=1)[0])
        (first.sum() * 2 + second.square().sum()).backward()
        return {name: p.grad for name, p in net.named_parameters()}

    assert_same(gradients_of_calls(offload="all"), gradients_of_calls())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offload": "inputs"}, "set recompute="),
        ({"offload": "some"}, "none, inputs, all"),
        ({"offload": "all", "schedule": "1f1b"}, "schedule=gpipe and chunks=8"),
    ],
)
def test_an_offload_without_an_effect_is_an_error_with_a_way_out(options, words):
    with pytest.raises(ConfigError, match=words):
        gradients(pipeline(2, **{"chunks": 4, **options}), 1, 4)
    gradients(pipeline(2, chunks=8, schedule="gpipe", offload="all"), 1, 8)


def test_hooks_of_the_caller_are_an_error():
    model = pipeline(2, chunks=4, schedule="gpipe", offload="all")
    with (
        torch.autograd.graph.save_on_cpu(),
        pytest.raises(ConfigError, match="remove the hooks, or set offload=none"),
    ):
        model.train_step(*batch(4), F.cross_entropy)


@pytest.mark.parametrize(("schedule", "devices"), [("gpipe", 2), ("zb-h1", 4)])
@pytest.mark.quick_cases(1)
def test_copies_beside_the_computation_keep_the_bits_and_the_limit(schedule, devices):
    peaks, found = [], []
    for offload in ("none", "all"):
        torch.manual_seed(0)
        net = nn.Sequential(*(Block() for _ in range(devices)))
        with stand_in_gpus(devices, copy_s=3e-4) as gpus:
            world = World.from_env(devices, [str(device) for device in gpus.devices])
            options = PipelineOptions(chunks=8, schedule=schedule, offload=offload)
            model = HybridModel(net, world, options, self_check=False)
            found.append(gradients(model, 1, 8))
            peaks.append([gpus.peak_memory(device).allocated for device in gpus.devices])
    assert_same(found[1], found[0])
    table = make_schedule(schedule, devices, 8, 1, None)
    for kept, moved, alive, on_device in zip(
        *peaks, fullest_moments(table), fullest_moments(table, offloading="overlapped"), strict=True
    ):
        fewer = max(m.inputs[0] for m in alive) - max(m.on_device[0] for m in on_device)
        # the outputs of a layer norm and of tanh
        assert kept - moved >= (fewer - 1) * 2 * ROWS * WIDTH * 4
