"""Without `example_inputs`, the first batch decides where a model is split."""

import copy

import pytest
import torch
from support.compare import assert_same, cpu_world, grads, plain_step, square_loss
from support.nets import WIDTH, Traced
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import EvalLoader, HybridModel, Loader, Session, Trainer, TrainerOptions
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.errors import UserError
from hybridtrain.loop import evaluate


class Optional(nn.Module):
    """Draws, and has a parameter and an argument that not every call uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = Traced()
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x, scaled=None):
        y = self.head(self.body(x))
        return y if scaled is None else y * self.scale


def new(**options):
    return HybridModel(Optional(), cpu_world(2), chunks=2, **options)


INPUTS = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
BATCH = {"x": INPUTS, "scaled": torch.ones(4)}


@pytest.mark.parametrize("split", ["uniform", "size", "time", "balanced"])
def test_the_first_batch_splits_as_the_same_example_inputs_do(split):
    model, example = new(split=split), new(split=split, example_inputs=BATCH)
    for each in (model, example):
        each.train_step(BATCH, None, square_loss)
    assert model.is_split
    assert len(model.stages) == 2
    if split in ("uniform", "size"):  # measured times differ
        assert model.plan.counts == example.plan.counts
    assert_same(grads(model), grads(example))


def test_an_optimizer_made_before_the_first_batch_trains_the_model():
    model, plain = new(), Optional()
    for each in (model, plain):
        each.eval()  # no dropout
    optimizers = [torch.optim.AdamW(each.parameters(), 0.1) for each in (model, plain)]
    for _ in range(2):
        model.train_step(BATCH, None, square_loss)
        for part in (slice(0, 2), slice(2, 4)):
            output = plain(**{name: value[part] for name, value in BATCH.items()})
            (square_loss(output) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(dict(model.named_parameters()), dict(plain.named_parameters()))


def test_before_its_first_batch_a_model_has_its_weights_and_no_stages():
    model, plain = new(), Optional()
    assert "not split yet" in repr(model)
    assert model.owns_output
    assert [name for name, _ in model.named_parameters()] == [
        n for n, _ in plain.named_parameters()
    ]
    model.load_state_dict(plain.state_dict())
    assert_same(model.state_dict(), plain.state_dict())
    for name in ("plan", "stages", "pipeline", "planned"):
        with pytest.raises(
            UserError, match=rf"no {name} before its first batch.*split_for"
        ) as told:
            getattr(model, name)
    assert "example_inputs=" in str(told.value)
    model.split_for(BATCH)  # as the error says
    assert len(model.plan.stages) == 2
    assert [len(part) for part in model.planned.stages] == model.plan.counts


@pytest.mark.parametrize("first", ["evaluate", "call", "verify", "step_weights"])
def test_any_use_of_a_batch_may_be_the_first(first):
    model, batch = new(), (BATCH, None)
    if first == "evaluate":
        data = EvalLoader(TensorDataset(INPUTS, INPUTS[:, :3]), 4, model.world)
        assert evaluate(model, data, nn.functional.mse_loss, {})["samples"] == 4
    elif first == "call":
        with torch.no_grad():
            assert model(**BATCH).shape == (4, 3)
    elif first == "verify":
        assert model.verify(*batch, square_loss).exact
    else:
        weights = model.step_weights([batch], square_loss)
        model.train_step(*batch, square_loss, weight=weights[0])
    assert model.is_split


def test_a_run_resumed_before_the_first_batch_continues_as_if_uninterrupted(tmp_path):
    def trainer(steps, **options):
        model = new()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        loader = Loader(TensorDataset(torch.randn(16, WIDTH), torch.randn(16, 3)), 4, model.world)
        return Trainer(
            model, optimizer, nn.functional.mse_loss, loader, TrainerOptions(steps=steps), **options
        )

    torch.manual_seed(1)
    whole = trainer(4)
    whole.fit()
    torch.manual_seed(1)
    trainer(2, store=CheckpointStore(tmp_path)).fit()
    torch.manual_seed(1)
    continued = trainer(4, store=CheckpointStore(tmp_path))
    continued.resume(tmp_path / "step_00000002")
    assert not continued.model.is_split
    continued.fit()
    assert_same(whole.model.state_dict(), continued.model.state_dict())


def test_a_trainer_trains_a_model_that_its_first_batch_splits(tmp_path):
    data = [(INPUTS, INPUTS[:, :3]), (INPUTS.flip(0), INPUTS[:, 3:])]
    results = []
    for options in ({}, {"example_inputs": INPUTS}):
        model = new(**options)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = Trainer(model, optimizer, nn.functional.mse_loss, data, TrainerOptions(epochs=2))
        summary = trainer.fit()
        assert len(summary["stages"]) == 2
        results.append(dict(model.state_dict()))
    assert_same(*results)


def test_a_session_takes_a_model_that_its_first_batch_splits():
    loader = DataLoader(TensorDataset(INPUTS, INPUTS[:, :3]), 4)
    with Session(world=cpu_world(2), chunks=2) as session:
        model = session.prepare(Optional())
        loader = session.prepare(loader)
        optimizer = session.prepare(torch.optim.SGD(model.parameters(), 0.1))
        for inputs, targets in loader:
            session.train_step(inputs, targets, nn.functional.mse_loss)
            optimizer.step()
    assert len(model.hybrid.stages) == 2


def test_a_copy_of_the_module_splits_anew():
    model = new()
    model.train_step(BATCH, None, square_loss)
    other = HybridModel(copy.deepcopy(model.net), cpu_world(3), chunks=2)
    other.zero_grad()
    plain = copy.deepcopy(model.net).eval()
    plain.zero_grad()
    other.eval()
    other.train_step(INPUTS, None, square_loss)
    plain_step(plain, INPUTS, None, square_loss, chunks=2)
    assert_same(grads(other), grads(plain))
