"""Precision: what the worker threads see of it, and what a step does whose gradients overflow."""

import threading

import pytest
import torch
from support.compare import assert_same, hybrid
from support.engine import LOSS_SCALE, float_mse, fp16_trainer
from support.nets import WIDTH, regression
from torch import nn

from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.errors import DivergedError

NB_PARTS = [1, 2, 4]

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Probe(nn.Module):
    """Notes down what it finds in the thread that runs it."""

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
    return net, hybrid(net, nb_part, chunks=3, **options)


def seen_by_all(net):
    """Returns what all layers found alike, and forgets it."""
    found = [each for layer in net for each in layer.seen]
    assert found
    for layer in net:
        layer.seen.clear()
    assert all(each == found[0] for each in found), found
    return found[0]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("nb_part", NB_PARTS)
@pytest.mark.quick_cases(5)
def test_the_precision_reaches_the_thread_of_every_stage(nb_part, precision, recompute):
    net, model = probed(nb_part, precision=precision, recompute=recompute)
    training = {
        "autocast": precision != "fp32",
        "dtype": DTYPES[precision],
        "grad": True,
        "inference": False,
        "requires_grad": True,
    }
    model.train_step(*regression(6), float_mse)
    assert seen_by_all(net) == training
    model(regression(6)[0])
    assert seen_by_all(net) == {**training, "grad": False, "requires_grad": False}
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())
    threads = {name for layer in net for name in layer.threads}
    assert ("MainThread" in threads) == (nb_part == 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nb_part", NB_PARTS)
@pytest.mark.quick_cases(2)
def test_the_autocast_of_the_caller_is_honoured_and_does_not_stay(nb_part, dtype):
    net, model = probed(nb_part)
    for _ in range(2):
        with torch.autocast("cpu", dtype=dtype):
            model.train_step(*regression(6), float_mse)
        assert (found := seen_by_all(net))["autocast"]
        assert found["dtype"] == dtype
        with torch.autocast("cpu", dtype=dtype):
            assert model(regression(6)[0]).dtype == dtype
        assert seen_by_all(net)["dtype"] == dtype
        model.train_step(*regression(6), float_mse)
        assert not (found := seen_by_all(net))["autocast"]
        assert found["dtype"] == torch.float32


@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_the_precision_of_the_model_wins_over_the_autocast_of_the_caller(nb_part):
    net, model = probed(nb_part, precision="fp16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.train_step(*regression(6), float_mse)
    assert seen_by_all(net)["dtype"] == torch.float16


@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_autocast_reaches_the_loss_function(nb_part):
    _, model = probed(nb_part, precision="bf16")
    seen = []

    def loss(output, targets):
        seen.append((torch.is_autocast_enabled("cpu"), (output @ output.T).dtype))
        return float_mse(output, targets)

    model.train_step(*regression(6), loss)
    assert set(seen) == {(True, torch.bfloat16)}


@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_inference_mode_reaches_the_thread_of_every_stage(nb_part):
    net, model = probed(nb_part)
    model.eval()
    with torch.inference_mode():
        output = model(regression(6)[0])
    assert output.is_inference()
    found = seen_by_all(net)
    assert found["inference"]
    assert not found["grad"]
    assert not model(regression(6)[0]).is_inference()
    assert not seen_by_all(net)["inference"]


@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_without_gradients_a_forward_has_none_and_a_training_step_has(nb_part):
    net, model = probed(nb_part)
    with torch.no_grad():
        output = model(regression(6)[0])
        assert not output.requires_grad
        assert not seen_by_all(net)["grad"]
        model.train_step(*regression(6), float_mse)
    assert seen_by_all(net)["grad"]
    assert all(p.grad is not None and p.grad.any() for p in net.parameters())


OPTIONS = [{}, {"clip_norm": 0.1}, {"fused": True}, {"accumulate": 2}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("nb_part", NB_PARTS)
@pytest.mark.quick_cases(2)
def test_an_overflow_in_one_stage_skips_the_step_in_all(nb_part, layer, options):
    ours = fp16_trainer(nb_part, at=(3,), layer=layer, **options)
    ours.fit()
    assert_skipped(ours, [3])
    assert scales_of(ours) == [LOSS_SCALE] * 2 + [LOSS_SCALE / 2] * 4
    for entry in ours.optimizer.state.values():
        assert entry["step"] == 5
        assert entry["exp_avg"].isfinite().all()
    assert ours.step == 6


def assert_skipped(trainer, skipped):
    everything = set(trainer.recorder.weights[0])
    for step in range(1, 7):
        assert trainer.recorder.moved(step) == (set() if step in skipped else everything), step


def scales_of(trainer):
    return trainer.recorder.of("train/loss_scale")


def test_values_that_overflow_fp16_lower_the_scale_until_they_fit():
    # gradients of about 1 times 2**24 are infinite in fp16, whose largest number is about 2**16
    ours = fp16_trainer(steps=20, scale=2.0**24)
    ours.fit()
    moved = [bool(ours.recorder.moved(step)) for step in range(1, 21)]
    first = moved.index(True)
    assert first > 0
    scales = scales_of(ours)
    assert scales[:first] == [2.0 ** (23 - i) for i in range(first)]
    assert scales[-1] <= scales[first]


def test_the_scale_grows_after_enough_good_steps():
    ours = fp16_trainer(growth=3)
    ours.fit()
    assert scales_of(ours) == [LOSS_SCALE] * 2 + [LOSS_SCALE * 2] * 3 + [LOSS_SCALE * 4]


@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_a_fixed_scale_stays_and_still_skips_what_overflows(nb_part):
    ours = fp16_trainer(nb_part, at=(2, 3), scale=256.0, loss_scale=256.0, growth=1)
    ours.fit()
    assert_skipped(ours, [2, 3])
    assert scales_of(ours) == [256.0] * 6


@pytest.mark.parametrize("scale", [2.0**4, 2.0**10])
def test_the_logged_norm_is_independent_of_the_scale(scale):
    ours, other = fp16_trainer(scale=scale), fp16_trainer(scale=1.0)
    norms = []
    for trainer in (ours, other):
        trainer.fit()
        norms.append(trainer.recorder.of("train/grad_norm"))
    assert len(norms[0]) == 6
    # small gradients have fewer bits in fp16
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


def test_a_run_that_has_diverged_can_be_fitted_again():
    ours = fp16_trainer(at=(2,), loss_scale=LOSS_SCALE, max_skipped=1)
    with pytest.raises(DivergedError):
        ours.fit()
    ours.model.net[2].at = ()
    ours.fit()
    assert ours.step == 6


@pytest.mark.parametrize("then_nb_part", [1, 2])
@pytest.mark.parametrize("until", [2, 3, 4])
@pytest.mark.quick_cases(2)
def test_the_scale_is_in_the_checkpoint_and_comes_back(until, then_nb_part, tmp_path):
    options = {"at": (3,), "growth": 2}
    whole = fp16_trainer(2, **options)
    whole.fit()
    store = CheckpointStore(tmp_path)
    first = fp16_trainer(2, store=store, steps=until, **options)
    first.fit()
    again = fp16_trainer(then_nb_part, scale=4.0, **options)  # not the scale it began with
    again.resume(store.newest())
    assert again.scaler.get_scale() == first.scaler.get_scale()
    again.fit()
    assert scales_of(again) == scales_of(whole)[until:]
    assert_same(again.recorder.weights[6], whole.recorder.weights[6])


class Backward(torch.autograd.Function):
    """Identity; notes whether its backward runs under autocast."""

    under_autocast: list[bool]

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Backward.under_autocast.append(torch.is_autocast_enabled("cpu"))
        return gradient


class Island(nn.Module):
    """A layer in fp32, whatever the autocast around it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return Backward.apply(self.linear(x.float()))


@pytest.mark.parametrize("nb_part", NB_PARTS)
@pytest.mark.parametrize("autocast", ["option", "caller"])
def test_a_backward_runs_without_autocast_wherever_the_stage_is(nb_part, autocast):
    def trained(nb_part):
        torch.manual_seed(0)
        net = nn.Sequential(
            *[part for _ in range(2) for part in (nn.Linear(WIDTH, WIDTH), Island())]
        )
        options = {"precision": "bf16"} if autocast == "option" else {}
        model = hybrid(net, nb_part, chunks=3, **options, split=[4] if nb_part == 1 else "uniform")
        Backward.under_autocast = []
        inputs, targets = regression(6)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast == "caller"):
            model.train_step(inputs, targets, float_mse)
        assert Backward.under_autocast == [False] * 6
        return {name: p.grad for name, p in net.named_parameters()}

    assert_same(trained(nb_part), trained(1))
