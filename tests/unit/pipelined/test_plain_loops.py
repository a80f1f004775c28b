"""Loops of one's own: one changed line, and the same weights as the plain model.

Every sample of a batch is different, so a micro-batch with a wrong weight shows.
"""

import copy

import pytest
import torch
from support.compare import CLOSE
from torch import nn
from torch.nn import functional as F

from hybridtrain import pipelined

pytestmark = pytest.mark.usefixtures("seeded")

DEVICES = ["cpu:0", "cpu:1"]


def mlp(width=8, outputs=3, dropout=0.0):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout)) for _ in "abc"]
    return nn.Sequential(nn.Linear(6, width), *blocks, nn.Linear(width, outputs))


class WithLoss(nn.Module):
    """Returns its loss, as models of transformers do, and other outputs."""

    def __init__(self, ignore_index=-100, reduction="mean", dropout=0.0):
        super().__init__()
        self.body = mlp(dropout=dropout)
        self.settings = {"ignore_index": ignore_index, "reduction": reduction}

    def forward(self, x, labels=None):
        logits = self.body(x)
        loss = None if labels is None else F.cross_entropy(logits, labels, **self.settings)
        return {"loss": loss, "logits": logits}


def batches(steps, rows=10, ignored=False):
    g = torch.Generator().manual_seed(1)
    for step in range(steps):
        labels = torch.randint(3, (rows,), generator=g)
        if ignored:
            labels[: 2 + step] = -100
        yield torch.randn(rows, 6, generator=g), labels


def train(net, backward, steps=4, **options):
    """Trains with `backward(net, x, labels, step)`; returns the losses and the weights."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step, (x, labels) in enumerate(batches(steps, **options)):
        losses.append(float(backward(net, x, labels, step)))
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(losses), [p.detach() for p in net.parameters()]


def assert_trains_alike(make, backward, chunks=4, **options):
    plain = train(make(), backward, **options)
    piped = train(pipelined(make(), devices=DEVICES, chunks=chunks), backward, **options)
    torch.testing.assert_close(piped, plain, **CLOSE)


def outside(net, x, labels, step):
    loss = F.cross_entropy(net(x), labels)
    loss.backward()
    return loss


def inside(net, x, labels, step):
    loss = net(x, labels=labels)["loss"]
    loss.backward()
    return loss


@pytest.mark.parametrize("chunks", [1, 3, 10])
def test_a_loss_outside_of_the_model_trains_it(chunks):
    assert_trains_alike(mlp, outside, chunks)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_the_model_trains_it(reduction):
    assert_trains_alike(lambda: WithLoss(reduction=reduction), inside)


def test_a_mean_over_labels_weights_micro_batches_by_their_labels():
    # the last batches have a micro-batch without any label
    assert_trains_alike(WithLoss, inside, ignored=True)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_is_the_same_number_for_all_samples_at_the_start(reduction):
    """Only its gradient tells what it is a mean of."""

    def zero_at_the_start():
        net = WithLoss(reduction=reduction)
        nn.init.zeros_(net.body[-1].weight)
        nn.init.zeros_(net.body[-1].bias)
        return net

    assert_trains_alike(zero_at_the_start, inside, ignored=True)


def test_two_losses_and_a_weight():
    def backward(net, x, labels, step):
        output = net(x, labels=labels)
        loss = 0.3 * output["loss"] + output["logits"].pow(2).mean()
        loss.backward()
        return loss

    assert_trains_alike(WithLoss, backward)


def test_another_factor_in_each_step():
    def backward(net, x, labels, step):
        loss = net(x, labels=labels)["loss"]
        (loss * [1.0, 0.5, 0.5, 0.0, 7.0, 2.0][step]).backward()
        return loss

    assert_trains_alike(WithLoss, backward, steps=6)


def test_an_output_that_gets_a_gradient_later():
    class Placed(WithLoss):
        """The backward needs its buffer."""

        def __init__(self):
            super().__init__()
            self.register_buffer("places", torch.arange(6))
            self.shift = nn.Embedding(6, 1)

        def forward(self, x, labels=None):
            return super().forward(x + self.shift(self.places).T, labels)

    def backward(net, x, labels, step):
        output = net(x, labels=labels)
        loss = output["loss"]
        if step in (2, 4):  # after steps in which the loss alone did
            loss = loss + output["logits"].square().mean()
        loss.backward()
        return loss

    assert_trains_alike(Placed, backward, steps=6)


def test_the_log_says_which_form_runs(caplog):
    net = pipelined(WithLoss(), nb_part=2, chunks=4, schedule="zb-h1")
    with caplog.at_level("INFO", "hybridtrain"):
        for step, (x, labels) in enumerate(batches(4)):
            output = net(x, labels=labels)
            (output["loss"] + (output["logits"].sum() if step == 3 else 0.0)).backward()
    said = [r.getMessage() for r in caplog.records if "gradient" in r.getMessage()]
    assert ["schedule=zb-h1: only" in said[0], "forwards first" in said[1], len(said)] == [1, 1, 2]


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_other_schedules(schedule):
    plain = train(WithLoss(), inside)
    piped = train(pipelined(WithLoss(), nb_part=2, chunks=4, schedule=schedule), inside)
    torch.testing.assert_close(piped, plain, **CLOSE)


@pytest.mark.parametrize("backward", [inside, outside])
def test_several_stages_per_device(backward):
    make = WithLoss if backward is inside else mlp
    settings = {"schedule": "1f1b", "stages_per_device": 2}
    piped = train(pipelined(make(), nb_part=2, chunks=4, **settings), backward)
    torch.testing.assert_close(piped, train(make(), backward), **CLOSE)


def test_a_loss_that_is_changed_in_place():
    def backward(net, x, labels, step):
        loss = net(x, labels=labels)["loss"]
        loss *= 2.0
        loss.backward()
        return loss

    assert_trains_alike(WithLoss, backward)


def test_gradients_accumulate_over_calls():
    def backward(net, x, labels, step):
        total = 0.0
        for part, of_part in zip(x.split(4), labels.split(4), strict=True):
            loss = net(part, labels=of_part)["loss"] / 3
            loss.backward()
            total += float(loss)
        return total

    assert_trains_alike(WithLoss, backward)


def test_several_calls_before_one_backward():
    def backward(net, x, labels, step):
        first, second = net(x, labels=labels), net(x.flip(1), labels=labels)
        loss = first["loss"] + 2 * second["loss"]
        loss.backward()
        return loss

    assert_trains_alike(WithLoss, backward)


def test_gradients_that_are_cleared_between_forward_and_backward():
    def backward(net, x, labels, step):
        net(x, labels=labels)["loss"].backward()  # to be cleared
        loss = net(x, labels=labels)["loss"]
        net.zero_grad()
        loss.backward()
        return loss

    assert_trains_alike(WithLoss, backward)


def test_gradients_of_inputs_alone_are_not_added_to_those_of_parameters():
    """Adversarial training."""

    def backward(net, x, labels, step):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(net(x), labels), x)
        loss = F.cross_entropy(net((x + 0.1 * gradient.sign()).detach()), labels)
        loss.backward()
        return loss

    assert_trains_alike(mlp, backward)


@pytest.mark.parametrize("form", [inside, outside])
def test_gradients_of_some_parameters_alone(form):
    def backward(net, x, labels, step):
        parameters = list(net.parameters())
        loss = net(x, labels=labels)["loss"] if form is inside else F.cross_entropy(net(x), labels)
        if step % 2:
            loss.backward(inputs=parameters[1:3])
        else:
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(loss, parameters), strict=True
            ):
                parameter.grad = gradient
        return loss

    assert_trains_alike(WithLoss if form is inside else mlp, backward)


@pytest.mark.parametrize("backward", [inside, outside])
def test_hooks_of_parameters_get_the_gradient_of_the_batch(backward):
    """One that changes it by no linear function, and one that waits for the whole gradient."""

    def make():
        net = WithLoss() if backward is inside else mlp()
        first, *_, last = net.parameters()
        first.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        optimizer = torch.optim.SGD([last], lr=0.5)

        def step(parameter):
            optimizer.step()
            parameter.grad = None

        last.register_post_accumulate_grad_hook(step)
        return net

    assert_trains_alike(make, backward)


def test_a_gradient_scaler():
    def backward(net, x, labels, step):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        loss = net(x, labels=labels)["loss"]
        scaler.scale(loss).backward()
        scaler.unscale_(torch.optim.SGD(net.parameters(), lr=0.1))
        return loss

    assert_trains_alike(WithLoss, backward)


def test_a_gan_of_two_pipelined_models():
    """The discriminator's gradient goes on into the generator, and real samples need none."""

    def run(wrap):
        torch.manual_seed(0)
        generator = wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)))
        judge = wrap(mlp(outputs=1))
        of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
        of_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
        for real, _ in batches(4):
            fake = generator(torch.randn(10, 4, generator=torch.Generator().manual_seed(2)))
            loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
            of_judge.zero_grad()
            loss.backward()
            of_judge.step()
            of_generator.zero_grad()
            (F.softplus(-judge(fake)).mean() + fake.square().mean()).backward()
            of_generator.step()
        return [p.detach() for net in (generator, judge) for p in net.parameters()]

    plain = run(lambda net: net)
    piped = run(lambda net: pipelined(net, nb_part=2, chunks=3))
    torch.testing.assert_close(piped, plain, **CLOSE)


def test_an_argument_that_all_samples_share():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x, shift):
            return self.body(x + shift)

    def backward(net, x, labels, step):
        shift = torch.full((1, 6), 0.5, requires_grad=True)
        loss = F.cross_entropy(net(x, shift), labels)
        loss.backward()
        return shift.grad.sum()

    assert_trains_alike(Shifted, backward)


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.quick_cases("always")
def test_draws_do_not_depend_on_the_form_nor_on_calls_in_between(recompute):
    """Both forms, and a step that runs again, have the masks of their step."""

    def gradients(change):
        net = WithLoss(dropout=0.4)
        net = pipelined(net, nb_part=2, chunks=4, recompute=recompute)
        for step, (x, labels) in enumerate(batches(4)):
            net.zero_grad()
            output = net(x, labels=labels)
            if change == "a call in between" and step == 3:
                net(x.flip(0), labels=labels)
            others = 0.0 if step < 3 and change != "all outputs" else output["logits"].sum() * 0
            if change == "the loss alone":
                others = 0.0
            (output["loss"] + others).backward()
        return [p.grad for p in net.parameters()]

    expected = gradients("all outputs")
    for change in ("the loss alone", "again", "a call in between"):
        torch.testing.assert_close(gradients(change), expected, **CLOSE, msg=change)


def test_running_statistics_are_updated_once_in_a_step_that_runs_again():
    def run(again):
        torch.manual_seed(0)
        net = WithLoss()
        net.body.insert(1, nn.BatchNorm1d(8))
        net = pipelined(net, nb_part=2, chunks=2)
        for step, (x, labels) in enumerate(batches(3)):
            output = net(x, labels=labels)
            others = output["logits"].sum() * 0 if again and step == 2 else 0.0
            (output["loss"] + others).backward()
        return dict(net.named_buffers())

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


def test_an_output_without_a_gradient_in_training():
    class Classes(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return self.body(x).argmax(-1)

    (x, _), *_ = batches(1)
    assert torch.equal(pipelined(Classes(), nb_part=2, chunks=4)(x), Classes()(x))


def test_a_count_among_the_outputs_is_exact():
    class Counts(WithLoss):
        def forward(self, x, labels=None):
            return {**super().forward(x, labels), "tokens": labels.sum() + labels.sum() * 2**24}

    (x, labels), *_ = batches(1)
    net = pipelined(Counts(), nb_part=2, chunks=4)
    for _ in ("forwards first", "the schedule"):
        output = net(x, labels=labels)
        assert output["tokens"] == labels.sum() * (2**24 + 1)
        output["loss"].backward()


def test_a_model_outside_of_training_is_pipelined_without_gradients():
    plain, (x, labels) = WithLoss(), next(batches(1, ignored=True))
    net = pipelined(copy.deepcopy(plain), nb_part=2, chunks=4)
    for model in (plain, net):
        model.eval()
    with torch.no_grad():
        torch.testing.assert_close(net(x, labels=labels), plain(x, labels=labels), **CLOSE)
        assert net(x)["loss"] is None


def steps_with_dropout(model, steps):
    for x, labels in steps:
        inside(model, x, labels, 0)


def test_masks_are_those_of_pytorchs_generator_which_trainers_seed_and_save():
    def model():
        return pipelined(WithLoss(dropout=0.4), devices=DEVICES, chunks=3)

    whole, first, second, other = (model() for _ in range(4))
    torch.manual_seed(5)
    steps_with_dropout(whole, batches(4))
    torch.manual_seed(5)
    steps = list(batches(4))
    steps_with_dropout(first, steps[:2])
    state = torch.get_rng_state()
    for parameter, its in zip(second.parameters(), first.parameters(), strict=True):
        parameter.grad = its.grad
    torch.manual_seed(7)
    torch.set_rng_state(state)
    steps_with_dropout(second, steps[2:])
    torch.manual_seed(6)
    steps_with_dropout(other, steps)
    gradients, resumed, of_another_seed = (
        [p.grad for p in net.parameters()] for net in (whole, second, other)
    )
    torch.testing.assert_close(resumed, gradients, rtol=0, atol=0)
    assert not torch.equal(of_another_seed[0], gradients[0])


def test_a_model_that_draws_nothing_leaves_pytorchs_generator_as_it_is():
    model = pipelined(WithLoss(), devices=DEVICES, chunks=3)
    before = torch.get_rng_state()
    steps_with_dropout(model, batches(4))
    assert torch.equal(torch.get_rng_state(), before)
