"""Compiled code of a run that must repeat its bits depends on its inputs, not on earlier ones."""

import functools

import pytest
import torch
import torch._dynamo.config as dynamo
import torch._inductor.config as inductor
from support.compare import mean_loss
from torch import nn

from hybridtrain import HybridModel, World
from hybridtrain.errors import ConfigError

WIDTH = 4
WORLDS = {
    "deterministic": World(deterministic=True),
    "replicas": World(fixed_replicas=1),
}


@pytest.fixture
def code_of(monkeypatch):
    """Returns a function that trains batches of some sizes, and returns the code of each.

    The code is the shapes that it was compiled for, None for a symbol; the result has those that
    ran for each batch.
    """
    ran = []

    def backend(graph, inputs):
        shape = [None if isinstance(n, torch.SymInt) else n for x in inputs for n in sizes(x)]

        def run(*args):
            ran.append(shape)
            return graph(*args)

        return run

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))

    def train(world, batches):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = HybridModel(nn.Sequential(nn.Linear(WIDTH, WIDTH)), world, compile=True)
        codes = []
        for samples in batches:
            ran.clear()
            model.train_step(torch.ones(samples, WIDTH), None, mean_loss)
            codes.append([list(shape) for shape in ran])
        return codes

    with (
        dynamo.patch(recompile_limit=8, accumulated_recompile_limit=64),
        inductor.patch(max_autotune_gemm=False),
    ):
        yield train
    torch._dynamo.reset()


def sizes(value):
    return value.shape if isinstance(value, torch.Tensor) else [value]


@pytest.mark.parametrize("kind", WORLDS)
def test_a_batch_runs_the_same_code_whichever_batches_the_process_has_seen(code_of, kind):
    whole = code_of(WORLDS[kind], [8, 8, 6, 8, 6])
    assert whole[0] == whole[1] == whole[3]
    assert whole[2] == whole[4] == code_of(WORLDS[kind], [6])[0]  # a resume before the short batch
    assert all(None not in shape for code in whole for shape in code)


def test_without_the_promise_a_short_batch_makes_the_code_fit_any_size(code_of):
    _, short, other = code_of(World(), [8, 6, 7])
    assert short == other
    assert short != code_of(World(), [6])[0]


def test_as_many_shapes_as_a_run_has_are_compiled(code_of):
    codes = code_of(WORLDS["deterministic"], range(2, 14))
    assert all(codes), "a batch ran uncompiled"


def test_kernels_chosen_by_their_time_are_refused_with_the_way_out(code_of):
    inductor.max_autotune_gemm = True
    code_of(World(), [4])
    message = (
        r"torch._inductor.config.max_autotune_gemm chooses kernels by their time.*"
        r"TORCHINDUCTOR_MAX_AUTOTUNE_GEMM=0"
    )
    with pytest.raises(ConfigError, match=message):
        code_of(WORLDS["deterministic"], [4])
    inductor.max_autotune_gemm = False
    assert code_of(WORLDS["deterministic"], [4])[0]
