"""Stages compile one after another, and run compiled code while another one compiles."""

import functools
import threading
import time
from collections import Counter

import pytest
import torch
from support.compare import assert_same_gradients, hybrid, plain_step
from support.nets import TanhLinear, regression
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Compiler:
    """A backend that notes when compilations overlap.

    Attributes:
        count: how many forwards and backwards it has compiled.
        threads: the names of the threads that have compiled.
        overlaps: whether two compilations have run at the same time.
        pause: called in each compilation, inside PyTorch's own tracing.
        note_run: called when compiled code runs.
    """

    def __init__(self):
        self.count = Counter()
        self.threads = set()
        self.overlaps = False
        self.pause = lambda: time.sleep(0.05)
        self.note_run = lambda: None
        self._active = 0

    def compile(self, kind, graph, inputs):
        self._active += 1
        self.overlaps |= self._active > 1
        self.count[kind] += 1
        self.threads.add(threading.current_thread().name)

        def traced(x):
            self.pause()
            return x

        make_fx(traced)(torch.ones(1))
        self.overlaps |= self._active > 1
        self._active -= 1

        def run(*args):
            self.note_run()
            return graph(*args)

        return run


@pytest.fixture
def compiler(monkeypatch):
    compiler = Compiler()
    backend = aot_autograd(
        fw_compiler=functools.partial(compiler.compile, "forward"),
        bw_compiler=functools.partial(compiler.compile, "backward"),
    )
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    yield compiler
    torch._dynamo.reset()


class Block(TanhLinear):
    """Is compiled for each factor."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return super().forward(x) * self.factor


def net(stages):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(1 + number / 10) for number in range(stages)))


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_stages_never_compile_at_the_same_time(compiler, recompute):
    ours, plain = net(3), net(3)
    model = hybrid(ours, 3, compile=True, recompute=recompute)
    for seed, rows in enumerate((11, 11, 22)):  # micro-batches of 3 and 2, and then of new sizes
        x, y = regression(rows, seed)
        ours.zero_grad()
        plain.zero_grad()
        plain_step(plain, x, y)
        model.train_step(x, y, F.mse_loss)
        assert_same_gradients(ours, plain)
    assert not compiler.overlaps
    # threads of the pipeline; how many of them is left to the scheduler
    assert compiler.threads
    assert all(name.startswith("stages-") for name in compiler.threads)
    assert compiler.count["forward"] == compiler.count["backward"] >= 3


def test_a_stage_runs_compiled_code_while_another_compiles(compiler):
    compiles, has_run = threading.Event(), threading.Event()
    runs = []

    def note_run():
        runs.append(None)  # of the first stage, as long as the second one compiles
        if len(runs) == 2:
            assert compiles.wait(60), "the other stage does not compile"
        elif len(runs) == 3:  # began after that
            has_run.set()

    def pause():
        if compiler.count["forward"] == 2 and not compiles.is_set():
            compiles.set()
            assert has_run.wait(60), "a stage waits until another has compiled"

    compiler.note_run, compiler.pause = note_run, pause
    model = hybrid(net(3), 3, compile=True, self_check=False, schedule="gpipe")
    model.train_step(*regression(8), F.mse_loss)
    assert has_run.is_set()


@torch.compile(backend="eager")
def gated(x, skip):
    return x * torch.sigmoid(x) + 0.5 * skip


class Gated(nn.Linear):
    def forward(self, x, skip):
        return gated(super().forward(x), skip)


class Skips(nn.Module):
    """A compiled function in a layer of the second stage, and one between layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.c, self.d = Gated(6, 6), TanhLinear(6)

    def forward(self, x):
        h = self.a(x).tanh()
        y = self.c(self.b(h).tanh(), h)
        return self.d(gated(y, h))


def test_a_function_that_the_user_has_compiled_sees_the_values_of_its_stage():
    torch._dynamo.reset()
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    plain = Skips()
    model = hybrid(Skips(), nb_part=2, chunks=2, split=["c"], example_inputs=x)
    for _ in range(9):  # some steps look inside of layers, and others do not
        model.zero_grad()
        plain.zero_grad()
        loss = model.train_step(x, y, F.mse_loss).loss
        pairs = zip(x.split(3), y.split(3), strict=True)
        expected = sum(F.mse_loss(plain(part), target) / 2 for part, target in pairs)
        expected.backward()
        torch.testing.assert_close(loss.as_subclass(torch.Tensor), expected.detach())
        assert_same_gradients(model.net, plain)
