"""An exception in any stage of any micro-batch is raised as itself; the next step is right.

Every step that fails runs in another thread that is waited for a limited time only, so that a hang
is a failure and not the end of the test run.
"""

import copy
import gc
import signal
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from support.compare import CHUNKS, CLOSE, assert_same_gradients, hybrid
from support.engine import PATIENCE_S, in_time
from support.nets import floats
from torch import nn

NB_PARTS = [1, 2, 4]


class Boom(Exception):
    pass


class Switch:
    """What is to go wrong: `place` is the number of a layer or "loss"."""

    def __init__(self):
        self.off()

    def off(self):
        self.place = self.kind = self.microbatch = self.error = None

    def on(self, place, kind, microbatch, error):
        self.place, self.kind, self.microbatch, self.error = place, kind, microbatch, error

    def check(self, place, kind, microbatch):
        if (place, kind, microbatch) == (self.place, self.kind, self.microbatch):
            raise self.error


class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, switch, place, microbatch):
        ctx.args = switch, place, microbatch
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        switch, place, microbatch = ctx.args
        switch.check(place, "backward", microbatch)
        return grad, None, None, None


class Layer(nn.Module):
    """A linear layer that fails where the switch says; the first column says which micro-batch."""

    def __init__(self, place, switch):
        super().__init__()
        self.place, self.switch = place, switch
        self.linear = nn.Linear(4, 4)

    def __deepcopy__(self, memo):
        twin = Layer(self.place, self.switch)
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, value):
        x, number = value
        microbatch = int(number[0])
        self.switch.check(self.place, "forward", microbatch)
        x = Fuse.apply(torch.tanh(self.linear(x)), self.switch, self.place, microbatch)
        return x, number


def make(nb_part, schedule="1f1b", recompute="never", stages_per_device=1):
    torch.manual_seed(0)
    switch = Switch()
    net = nn.Sequential(*[Layer(i, switch) for i in range(4)])
    spare = copy.deepcopy(net)
    model = hybrid(net, nb_part, stages_per_device, schedule=schedule, recompute=recompute)
    return model, spare, switch


def batch(seed=0):
    numbers = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 3])  # 10 samples in 4 micro-batches
    return (floats(10, 4, seed=seed), numbers), floats(10, 4, seed=100 + seed)


def loss_of(switch):
    def loss_fn(output, targets):
        x, number = output
        switch.check("loss", "forward", int(number[0]))
        x = Fuse.apply(x, switch, "loss", int(number[0]))
        return F.mse_loss(x, targets)

    return loss_fn


def assert_next_step_is_right(model, spare, switch, seed=1):
    switch.off()
    fresh = hybrid(spare, model.world.nb_part)
    inputs, targets = batch(seed)
    model.zero_grad()
    fresh.zero_grad()
    for each in (model, fresh):
        outcome = in_time(lambda each=each: each.train_step(inputs, targets, loss_of(switch)))
        assert "error" not in outcome, outcome
    assert_same_gradients(model, fresh)


def place_of(place, nb_part):
    """The stage, and the name that the notes must have for it."""
    per_stage = 4 // nb_part
    stage = nb_part - 1 if place == "loss" else place // per_stage
    first, last = stage * per_stage, (stage + 1) * per_stage - 1
    return f"stage {stage} ({first})" if first == last else f"stage {stage} ({first} to {last})"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("nb_part", NB_PARTS)
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.quick_cases(2)
def test_an_exception_of_any_layer_and_micro_batch_is_raised_as_itself(kind, nb_part, schedule):
    model, spare, switch = make(nb_part, schedule)
    inputs, targets = batch()
    for place in [0, 1, 2, 3, "loss"]:
        for microbatch in range(CHUNKS):
            boom = Boom(f"{place} {microbatch}")
            switch.on(place, kind, microbatch, boom)
            outcome = in_time(lambda: model.train_step(inputs, targets, loss_of(switch)))
            cell = f"{kind} of {place}, micro-batch {microbatch}"
            assert outcome.get("error") is boom, (cell, outcome)
            notes = "\n".join(boom.__notes__)
            expected = f"in the {kind} of micro-batch {microbatch} on {place_of(place, nb_part)}"
            assert notes.count(expected) == 1, (cell, notes)
            if kind == "forward" and place != "loss":
                assert f"in layer '{place}'" in notes, (cell, notes)
                assert "float32[" in notes, (cell, notes)
    assert_next_step_is_right(model, spare, switch)


@pytest.mark.parametrize("nb_part", NB_PARTS)
@pytest.mark.quick_cases(1)
def test_a_model_trains_as_before_after_each_failure(nb_part):
    model, spare, switch = make(nb_part)
    inputs, targets = batch()
    for kind in ("forward", "backward"):
        for place in (0, 3):
            for microbatch in (0, CHUNKS - 1):
                boom = Boom()
                switch.on(place, kind, microbatch, boom)
                outcome = in_time(lambda: model.train_step(inputs, targets, loss_of(switch)))
                assert outcome.get("error") is boom
                assert_next_step_is_right(model, spare, switch)


@pytest.mark.parametrize("nb_part", [1, 2])
def test_an_exception_while_activations_are_recomputed_is_raised_as_itself(nb_part):
    model, spare, switch = make(nb_part, recompute="always")
    layer = model.net[0]
    passes = []

    def second_time_round(module, args):
        passes.append(int(args[0][1][0]))
        if passes.count(2) == 2:
            raise boom

    boom = Boom()
    handle = layer.register_forward_pre_hook(second_time_round)
    inputs, targets = batch()
    outcome = in_time(lambda: model.train_step(inputs, targets, loss_of(switch)))
    handle.remove()
    assert outcome.get("error") is boom
    assert any("in the backward of micro-batch 2 on stage 0" in note for note in boom.__notes__)
    assert_next_step_is_right(model, spare, switch)


@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_an_exception_in_a_forward_pass_is_raised_as_itself(nb_part):
    model, _, switch = make(nb_part)
    model.eval()
    inputs, _ = batch()
    for place in range(4):
        boom = Boom()
        switch.on(place, "forward", 1, boom)
        outcome = in_time(lambda: model(inputs))
        assert outcome.get("error") is boom
        assert f"micro-batch 1 on {place_of(place, nb_part)}" in "\n".join(boom.__notes__)
    switch.off()
    output, _ = in_time(lambda: model(inputs))["value"]
    torch.testing.assert_close(output, model.net(inputs)[0].detach())


def test_when_all_stages_fail_one_of_the_exceptions_is_raised():
    model, spare, switch = make(4)

    def fail(module, args):
        raise Boom(module.place)

    handles = [layer.register_forward_pre_hook(fail) for layer in model.net]
    inputs, targets = batch()
    outcome = in_time(lambda: model.train_step(inputs, targets, loss_of(switch)))
    assert isinstance(outcome["error"], Boom)
    for handle in handles:
        handle.remove()
    assert_next_step_is_right(model, spare, switch)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
@pytest.mark.parametrize("nb_part", [1, 2, 4])
@pytest.mark.quick_cases(2)
def test_an_interrupt_in_a_stage_stops_the_step(nb_part, error):
    model, spare, switch = make(nb_part)
    inputs, targets = batch()
    for place in (0, 3):
        switch.on(place, "forward", 2, error)
        outcome = in_time(lambda: model.train_step(inputs, targets, loss_of(switch)))
        assert outcome.get("error") is error
    assert_next_step_is_right(model, spare, switch)


@pytest.mark.parametrize(("nb_part", "ends_the_wait"), [(1, True), (2, True), (2, False)])
@pytest.mark.quick_cases(1)
def test_ctrl_c_stops_the_step_after_the_action_that_runs(nb_part, ends_the_wait):
    model = two_layers(nb_part, chunks=64)
    inputs, targets = floats(64, 4), floats(64, 2)
    started, noticed = threading.Event(), threading.Event()
    forwards = []

    def hold_the_first_forward(module, args):
        forwards.append(1)
        started.set()
        noticed.wait(PATIENCE_S)

    def on_interrupt(number, frame):  # in the main thread, where signals arrive
        noticed.set()
        signal.default_int_handler(number, frame)

    def press():
        started.wait(PATIENCE_S)
        # a signal that comes just before the main thread waits is like one of another thread: it
        # does not end the wait
        thread = threading.main_thread() if ends_the_wait else threading.current_thread()
        signal.pthread_kill(thread.ident, signal.SIGINT)

    handle = model.net[0].register_forward_pre_hook(hold_the_first_forward)
    before = signal.signal(signal.SIGINT, on_interrupt)
    presser = threading.Thread(target=press)
    presser.start()
    try:
        # whose sample would wait in the hook, in the main thread
        with pytest.raises(KeyboardInterrupt), model.without_self_check():
            model.train_step(inputs, targets, F.mse_loss)
    finally:
        presser.join()
        signal.signal(signal.SIGINT, before)
    handle.remove()
    assert noticed.is_set()
    assert len(forwards) < 64
    assert_trains_as_a_copy(model, inputs, targets)


def test_an_interrupt_while_a_step_is_handed_out_lets_the_next_step_run():
    model = two_layers(2)
    inputs, targets = floats(8, 4), floats(8, 2)

    def interrupt(frame, event, function):  # sees the calls of the main thread only
        if event == "c_call" and function.__name__ == "put":
            sys.setprofile(None)
            raise KeyboardInterrupt

    gc.collect()  # or threads of an earlier model get a last message
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), model.without_self_check():
            model.train_step(inputs, targets, F.mse_loss)
    finally:
        sys.setprofile(None)
    assert_trains_as_a_copy(model, inputs, targets)


def test_a_failed_step_leaves_no_messages_in_memory():
    sent = threading.Event()

    class Sends(nn.Linear):
        def forward(self, x):
            if x[0, 0] == 1:  # of the micro-batch after the one that fails
                sent.set()
            return super().forward(x)

    class Fails(nn.Linear):
        def forward(self, x):
            assert sent.wait(PATIENCE_S)
            raise Boom

    width = 37  # as nothing else has
    net = nn.Sequential(Sends(4, width), Fails(width, 4))
    model = hybrid(net, 2, schedule="gpipe", self_check=False)
    x = torch.arange(4.0).repeat_interleave(2)[:, None].expand(8, 4)
    outcome = in_time(lambda: model.train_step(x, None, lambda y, _: y.mean()))
    assert isinstance(outcome.pop("error"), Boom)
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    assert [each.shape for each in tensors if each.shape == (2, width)] == []


def assert_trains_as_a_copy(model, inputs, targets):
    fresh = hybrid(copy.deepcopy(model.net), 1, chunks=1)
    for each in (model, fresh):
        each.zero_grad()
        outcome = in_time(lambda each=each: each.train_step(inputs, targets, F.mse_loss))
        assert "error" not in outcome, outcome
    assert_same_gradients(model, fresh, **CLOSE)


def two_layers(nb_part=2, chunks=2):
    torch.manual_seed(0)
    return hybrid(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), nb_part, chunks=chunks)


def test_a_model_that_is_dropped_leaves_no_thread():
    before = set(threading.enumerate())
    model = two_layers(2)
    with model.without_self_check():
        model.train_step(torch.randn(4, 4), torch.randn(4, 2), F.mse_loss)
    new = set(threading.enumerate()) - before
    workers = {each for each in new if each.name.startswith("stages-")}
    assert len(workers) == 4  # for two micro-batches in their forwards, and a backward per device
    del model
    gc.collect()
    for worker in workers:
        worker.join(PATIENCE_S)
        assert not worker.is_alive()
