"""Precision: what the worker threads see of it, and what a step does whose gradients overflow."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.checkpoint.store import CheckpointStore
from hybridtrain.data.loader import TrainLoader

WIDTH = 6
NB_PARTS = [1, 2, 4]


pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def world(nb_part):
    return World.from_env(nb_part=nb_part, devices="cpu")


# What a layer finds in the thread that runs it.
class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen = []
        self.threads = set()

    def forward(self, x):
        y = self.linear(x)
        self.threads.add(threading.current_thread().name)
        self.seen.append(
            {
                "autocast": torch.is_autocast_enabled("cpu"),
                "dtype": y.dtype,
                "grad": torch.is_grad_enabled(),
                "inference": torch.is_inference_mode_enabled(),
                "requires_grad": y.requires_grad,
            }
        )
        return y


def probed(nb_part, **options):
    net = nn.Sequential(*[Probe() for _ in range(4)])
    return net, HybridModel(net, world(nb_part), chunks=3, **options)


def data(seed=0, rows=6):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=g), torch.randn(rows, WIDTH, generator=g)


def loss_fn(output, targets):
    return F.mse_loss(output.float(), targets)


def seen_by_all(net):
    """What all layers found alike, which is forgotten."""
    found = [each for layer in net for each in layer.seen]
    assert found
    for layer in net:
        layer.seen.clear()
    assert all(each == found[0] for each in found), found
    return found[0]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_the_precision_reaches_every_stage_s_thread(nb_part, precision, checkpoint):
    net, model = probed(nb_part, precision=precision, checkpoint=checkpoint)
    training = {
        "autocast": precision != "fp32",
        "dtype": DTYPES[precision],
        "grad": True,
        "inference": False,
        "requires_grad": True,
    }
    model.train_step(*data(), loss_fn)
    assert seen_by_all(net) == training
    model(data()[0])
    assert seen_by_all(net) == {**training, "grad": False, "requires_grad": False}
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())
    threads = {name for layer in net for name in layer.threads}
    assert threads == ({f"stage-{i}" for i in range(nb_part)} if nb_part > 1 else {"MainThread"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_the_caller_s_own_autocast_is_honoured_and_does_not_stay(nb_part, dtype):
    net, model = probed(nb_part)
    for _ in range(2):
        with torch.autocast("cpu", dtype=dtype):
            model.train_step(*data(), loss_fn)
        assert (found := seen_by_all(net))["autocast"]
        assert found["dtype"] == dtype
        with torch.autocast("cpu", dtype=dtype):
            assert model(data()[0]).dtype == dtype
        assert seen_by_all(net)["dtype"] == dtype
        model.train_step(*data(), loss_fn)
        assert not (found := seen_by_all(net))["autocast"]
        assert found["dtype"] == torch.float32


@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_the_model_s_precision_wins_over_the_caller_s_autocast(nb_part):
    net, model = probed(nb_part, precision="fp16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.train_step(*data(), loss_fn)
    assert seen_by_all(net)["dtype"] == torch.float16


@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_autocast_reaches_the_loss_function(nb_part):
    _, model = probed(nb_part, precision="bf16")
    seen = []

    def loss(output, targets):
        seen.append((torch.is_autocast_enabled("cpu"), (output @ output.T).dtype))
        return loss_fn(output, targets)

    model.train_step(*data(), loss)
    assert set(seen) == {(True, torch.bfloat16)}


@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_inference_mode_reaches_every_stage_s_thread(nb_part):
    net, model = probed(nb_part)
    model.eval()
    with torch.inference_mode():
        output = model(data()[0])
    assert output.is_inference()
    found = seen_by_all(net)
    assert found["inference"]
    assert not found["grad"]
    assert not model(data()[0]).is_inference()
    assert not seen_by_all(net)["inference"]


@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_without_gradients_a_forward_has_none_and_a_training_step_has(nb_part):
    net, model = probed(nb_part)
    with torch.no_grad():
        output = model(data()[0])
        assert not output.requires_grad
        assert not seen_by_all(net)["grad"]
        model.train_step(*data(), loss_fn)
    assert seen_by_all(net)["grad"]
    assert all(p.grad is not None and p.grad.any() for p in net.parameters())


# A step whose gradients overflow.
class Overflow(nn.Module):
    """Multiplies the gradient with infinity at the steps in `at`."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.at = ()
        self.step = 0

    def forward(self, x):
        y = self.linear(x)
        if self.step in self.at and y.requires_grad:
            y.register_hook(lambda grad: grad * float("inf"))
        return y


class Steps:
    """Keeps the weights after every step, and counts them for the layers."""

    def __init__(self, net):
        self.net = net
        self.weights = {0: self._copy()}
        self.values = {}

    def _copy(self):
        return {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def start(self, *, total_steps, first_step, texts):
        self._count(first_step)

    def step(self, step, samples):
        self.weights[step] = self._copy()
        self._count(step)

    def _count(self, step):
        for layer in self.net.modules():
            if isinstance(layer, Overflow):
                layer.step = step + 1

    def scalars(self, step, values):
        self.values[step] = values

    def timeline(self, step, predicted, measured):
        pass

    def close(self):
        pass

    def moved(self, step):
        """The names of the parameters that `step` changed."""
        return {
            name
            for name, value in self.weights[step].items()
            if not torch.equal(value, self.weights[step - 1][name])
        }


def trainer(nb_part=2, at=(), layer=2, steps=6, scale=2.0**10, **options):
    torch.manual_seed(0)
    net = nn.Sequential(*[Overflow() for _ in range(4)])
    net[layer].at = at
    model = HybridModel(net, world(nb_part), chunks=2, precision="fp16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = GradScaler("cpu", init_scale=scale, growth_interval=options.pop("growth", 1000))
    loader = TrainLoader(TensorDataset(*data(rows=20)), 4, model.world, seed=1)
    return Trainer(
        model, optimizer, loss_fn, loader, steps=steps, scaler=scaler, log_every=1,
        monitor=Steps(net), **options,
    )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_an_overflow_in_one_stage_skips_the_step_in_all(nb_part, layer, options):
    ours = trainer(nb_part, at=(3,), layer=layer, **options)
    everything = set(ours.monitor.weights[0])
    ours.fit()
    for step in range(1, 7):
        assert ours.monitor.moved(step) == (set() if step == 3 else everything), step
        scale = ours.monitor.values[step]["train/loss_scale"]
        assert scale == (2.0**10 if step < 3 else 2.0**9), step
    for entry in ours.optimizer.state.values():
        assert entry["step"] == 5
        assert entry["exp_avg"].isfinite().all()
    assert ours.step == 6


def test_values_that_overflow_fp16_lower_the_scale_until_they_fit():
    # gradients of about 1 times 2**24 are infinite in fp16, whose largest number is about 2**16
    ours = trainer(steps=20, scale=2.0**24)
    ours.fit()
    moved = [bool(ours.monitor.moved(step)) for step in range(1, 21)]
    first = moved.index(True)
    assert first > 0
    assert not any(moved[:first])
    scales = [ours.monitor.values[step]["train/loss_scale"] for step in range(1, 21)]
    assert scales[:first] == [2.0 ** (23 - i) for i in range(first)]
    assert scales[-1] <= scales[first]


def test_the_scale_grows_after_enough_good_steps():
    ours = trainer(growth=3, steps=6)
    ours.fit()
    scales = [ours.monitor.values[step]["train/loss_scale"] for step in range(1, 7)]
    assert scales == [2.0**10] * 2 + [2.0**11] * 3 + [2.0**12]


@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_a_fixed_scale_stays_and_still_skips_what_overflows(nb_part):
    ours = trainer(nb_part, at=(2, 3), scale=256.0, loss_scale=256.0, growth=1)
    everything = set(ours.monitor.weights[0])
    ours.fit()
    for step in range(1, 7):
        assert ours.monitor.moved(step) == (set() if step in (2, 3) else everything), step
        assert ours.monitor.values[step]["train/loss_scale"] == 256.0


@pytest.mark.parametrize("scale", [2.0**4, 2.0**10])
def test_the_logged_norm_and_the_steps_do_not_know_the_scale(scale):
    ours, other = trainer(scale=scale), trainer(scale=1.0)
    ours.fit()
    other.fit()
    for step in range(1, 7):
        # small gradients have fewer bits in fp16
        assert ours.monitor.values[step]["train/grad_norm"] == pytest.approx(
            other.monitor.values[step]["train/grad_norm"], rel=1e-2
        )


@pytest.mark.parametrize("then_nb_part", [1, 2])
@pytest.mark.parametrize("until", [2, 3, 4])
def test_the_scale_is_in_the_checkpoint_and_comes_back(until, then_nb_part, tmp_path):
    whole = trainer(2, at=(3,), growth=2)
    whole.fit()
    store = CheckpointStore(tmp_path)
    first = trainer(2, at=(3,), growth=2, store=store, steps=until)
    first.fit()
    again = trainer(then_nb_part, at=(3,), growth=2, scale=4.0)  # not the scale it began with
    again.resume(store.newest())
    assert again.scaler.get_scale() == first.scaler.get_scale()
    again.fit()
    for step in range(until + 1, 7):
        expected = whole.monitor.values[step]["train/loss_scale"]
        assert again.monitor.values[step]["train/loss_scale"] == expected, step
    for name, value in whole.monitor.weights[6].items():
        assert torch.equal(again.monitor.weights[6][name], value), name
