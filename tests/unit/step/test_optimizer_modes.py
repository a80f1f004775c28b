"""Optimizers that train on other weights than they evaluate, and those that need a closure."""

import copy

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.compare import cpu_world
from support.schedule_free import AsksForClosure, ScheduleFree
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import Callback, HybridModel, Session, Trainer
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.data import Batch, EvalLoader, Loader
from hybridtrain.errors import BatchError, ConfigError
from hybridtrain.loop import evaluate
from hybridtrain.step import CombinedOptimizer, OptimizerStep

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

BATCH = 8


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def data(samples=24):
    g = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(samples, 6, generator=g), torch.randint(5, (samples,), generator=g)
    )


def plain(steps, save_at=()):
    """Trains without a pipeline; returns the weights and losses of each evaluation."""
    module, tensors = net(), data().tensors
    optimizer = ScheduleFree(module.parameters())
    found = {}
    for step in range(steps):
        rows = slice(step % 3 * BATCH, step % 3 * BATCH + BATCH)
        optimizer.train()
        optimizer.zero_grad()
        for part in (slice(0, 4), slice(4, 8)):  # as two micro-batches
            x, y = tensors[0][rows][part], tensors[1][rows][part]
            F.cross_entropy(module(x), y).backward(torch.tensor(0.5))
        optimizer.step()
        if step + 1 in save_at:
            optimizer.eval()
            found[step + 1] = copy.deepcopy(module.state_dict())
    optimizer.eval()
    found[steps] = copy.deepcopy(module.state_dict())
    return found


def assert_equal_weights(mine, expected):
    assert mine.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(mine[name], value), name


def hybrid():
    return HybridModel(net(), cpu_world(2), chunks=2)


def trainer(root, steps, optimizer=ScheduleFree, **options):
    model = hybrid()
    loaders = Loader(data(), BATCH, model.world, shuffle=False)
    evaluation = EvalLoader(data(), batch_size=BATCH, world=model.world)
    return Trainer(
        model, optimizer(model.parameters()), F.cross_entropy, loaders,
        steps=steps, evaluation=evaluation, store=CheckpointStore(str(root)), **options,
    )  # fmt: skip


def test_a_trainer_evaluates_and_saves_the_weights_for_it_and_trains_on_the_others(tmp_path):
    seen, watch = [], Callback()
    watch.on_evaluate = lambda run, values: seen.append(copy.deepcopy(run.model.state_dict()))
    run = trainer(tmp_path, 5, checkpoint_every_steps=2, callbacks=[watch])
    run.fit()
    expected = plain(5, save_at=(2, 4))
    for step in (2, 4, 5):
        saved = load_file(tmp_path / f"step_{step:08d}" / "model.safetensors")
        assert_equal_weights(saved, expected[step])
    assert_equal_weights(seen[-1], expected[5])
    assert_equal_weights(run.model.state_dict(), expected[5])  # which one exports
    assert run.test(run.evaluation)["loss"] == run.results["eval"]["loss"]


def test_a_resumed_trainer_goes_on_with_the_same_bits(tmp_path):
    trainer(tmp_path / "whole", 6, checkpoint_every_steps=2).fit()
    first = trainer(tmp_path / "parts", 4, checkpoint_every_steps=2)
    first.fit()
    second = trainer(tmp_path / "parts", 6, checkpoint_every_steps=2)
    assert second.resume(tmp_path / "parts" / "step_00000004")
    assert [group["k"] for group in second.optimizer.param_groups] == [4]
    second.fit()
    whole, parts = (
        load_file(tmp_path / name / "step_00000006" / "model.safetensors")
        for name in ("whole", "parts")
    )
    assert_equal_weights(parts, whole)
    first.resume(tmp_path / "parts" / "step_00000002")  # a run that has trained on goes back
    first.total_steps = 6
    first.fit()
    assert_equal_weights(first.model.state_dict(), whole)


def session_run(root, steps, resume=None):
    """Runs a script that knows nothing of the optimizer; returns what it evaluated last."""
    with Session(world=cpu_world(2), chunks=2) as session:
        model, loader = session.prepare(net(), DataLoader(data(), BATCH))
        optimizer = session.prepare(ScheduleFree(model.parameters()))
        if resume is not None:
            session.resume(resume)
        while session.steps < steps:
            for inputs, targets in loader:
                if session.steps == steps:
                    break
                model.train()
                session.forward_backward(inputs, targets, F.cross_entropy)
                optimizer.step()
                optimizer.zero_grad()
                if session.steps % 2 == 0:
                    session.save(root)
        model.eval()
        return copy.deepcopy(session.unwrap(model).state_dict())


def test_a_session_evaluates_and_saves_the_weights_for_it_and_resumes_exactly(tmp_path):
    expected = plain(5, save_at=(2, 4))
    assert_equal_weights(session_run(tmp_path, 5), expected[5])
    saved = load_file(tmp_path / "step_00000004" / "model.safetensors")
    assert_equal_weights(saved, expected[4])
    resumed = session_run(tmp_path / "more", 5, resume=tmp_path / "step_00000002")
    assert_equal_weights(resumed, expected[5])


def test_an_own_loop_evaluates_with_the_weights_for_it():
    model = hybrid()
    half = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = CombinedOptimizer([ScheduleFree(half), torch.optim.SGD(rest, lr=0.1)])
    step = OptimizerStep(model, optimizer)
    loader = Loader(data(), BATCH, model.world, shuffle=False)
    evaluation = EvalLoader(data(), batch_size=BATCH, world=model.world)
    for batch in loader.batches():
        step.run([batch], F.cross_entropy)
    before = copy.deepcopy(model.state_dict())
    trained = evaluate(model, evaluation, F.cross_entropy, {})["loss"]
    with step.evaluation_weights():
        averaged = evaluate(model, evaluation, F.cross_entropy, {})["loss"]
    assert averaged != trained
    torch.testing.assert_close(dict(model.state_dict()), dict(before))  # up to their own rounding
    assert optimizer.param_groups[0]["trains"]


class Asks(torch.optim.SGD):
    def step(self, closure=None):
        return closure()


NEED_CLOSURES = [torch.optim.LBFGS, AsksForClosure, Asks]


def in_optimizer_step(make):
    model = hybrid()
    step = OptimizerStep(model, make(model.parameters(), lr=0.1))
    step.run([next(iter(Loader(data(), BATCH, model.world).batches()))], F.cross_entropy)


def in_session(make):
    with Session(world=cpu_world(2), chunks=2) as session:
        model, loader = session.prepare(net(), DataLoader(data(), BATCH))
        optimizer = session.prepare(make(model.parameters(), lr=0.1))
        inputs, targets = next(iter(loader))
        session.forward_backward(inputs, targets, F.cross_entropy)
        optimizer.step()


def in_trainer(make):
    model = hybrid()
    optimizer = make(model.parameters(), lr=0.1)
    Trainer(model, optimizer, F.cross_entropy, Loader(data(), BATCH, model.world), steps=2).fit()


def in_combined(make):
    model = hybrid()
    first, *rest = model.parameters()
    optimizers = [make([first], lr=0.1), torch.optim.SGD(rest, lr=0.1)]
    step = OptimizerStep(model, CombinedOptimizer(optimizers))
    step.run([next(iter(Loader(data(), BATCH, model.world).batches()))], F.cross_entropy)


@pytest.mark.parametrize("where", [in_optimizer_step, in_session, in_trainer, in_combined])
@pytest.mark.parametrize("make", NEED_CLOSURES)
def test_an_optimizer_that_needs_a_closure_is_one_line_with_the_way_out(make, where):
    with pytest.raises(ConfigError, match=r"closure.* loop over model\.train"):
        where(make)


def test_another_error_of_an_optimizer_stays_what_it_is():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        in_optimizer_step(Broken)


def test_a_trainer_scales_the_loss_of_fp16_by_default_and_by_loss_scale():
    def run(**options):
        model = HybridModel(net(), cpu_world(2), chunks=2, precision="fp16")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = Loader(data(), BATCH, model.world)
        own = Trainer(model, optimizer, F.cross_entropy, loader, steps=2, **options)
        scales = [own.scaler.get_scale()]
        own.fit()
        return [*scales, own.scaler.get_scale()], own.scaler.is_enabled()

    assert run() == ([2.0**16, 2.0**16], True)
    assert run(loss_scale=128.0) == ([128.0, 128.0], True)


def test_a_trainer_without_fp16_scales_nothing():
    model = hybrid()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = Loader(data(), BATCH, model.world)
    assert not Trainer(model, optimizer, F.cross_entropy, loader, steps=1).scaler.is_enabled()


def test_batches_that_are_tuples_name_the_loaders_batches():
    model = hybrid()
    step = OptimizerStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, targets = data().tensors
    batch = Batch(inputs, targets, len(inputs), len(inputs))
    for wrong in ([(inputs, targets)], batch, iter([batch])):
        with pytest.raises(BatchError, match=r"for batch in loader\.batches\(\): step\.run"):
            step.run(wrong, F.cross_entropy)
    step.run((batch,), F.cross_entropy)


def test_a_store_takes_its_directory_as_a_text(tmp_path):
    assert CheckpointStore(str(tmp_path)).newest() is None
