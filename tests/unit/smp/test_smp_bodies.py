"""The body of a step, in a thread of its own."""

import threading

import pytest
import torch

from hybridtrain._base.precision import ThreadState
from hybridtrain.smp.bodies import Body, current_body


def test_a_body_that_runs_while_its_start_is_interrupted_ends_at_the_call_of_the_model(monkeypatch):
    may_go_on, has_ended = threading.Event(), threading.Event()

    def function():
        assert may_go_on.wait(60)
        try:
            current_body().call_model((), {})
        finally:
            has_ended.set()

    body = Body(function, "step", ThreadState.capture())

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(body, "_answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        body.start()
    body.abandon()
    may_go_on.set()
    assert has_ended.wait(60)


def test_a_body_makes_tensors_on_the_default_device_of_its_caller():
    def made_on(device):
        with torch.device(device):
            body = Body(lambda: torch.zeros(1).device.type, "step", ThreadState.capture())
            return body.start().value

    assert made_on("meta") == "meta"
    assert made_on("cpu") == "cpu"
