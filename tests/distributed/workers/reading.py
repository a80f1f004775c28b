"""Pipelines of three processes, of which the middle one uses neither inputs nor targets."""

import sys

import pytest
import torch
from support.launch import Cells
from support.training import Recorder, assert_same, rich_net
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from hybridtrain import HybridModel, Trainer, World
from hybridtrain._base.microbatch import Unread
from hybridtrain.data import EvalLoader, TrainLoader
from hybridtrain.errors import BatchError
from hybridtrain.loop import predict
from hybridtrain.loss import MeanLoss, accuracy, cross_entropy
from hybridtrain.options import LoaderOptions

torch.set_num_threads(1)
cells = Cells()


class Vectors(Dataset):
    """22 samples, so that the last batch of 6 is short; a third of the labels are ignored."""

    def __init__(self):
        drawn = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(22, 6, generator=drawn)
        self.labels = torch.randint(3, (22,), generator=drawn)
        self.labels[::3] = -100
        self.reads = 0

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        self.reads += 1
        return self.inputs[index], self.labels[index]


class Texts(Vectors):
    """Token ids of 2 to 9 tokens, so that batches are padded to different lengths."""

    def __getitem__(self, index):
        self.reads += 1
        drawn = torch.Generator().manual_seed(index)
        return torch.randint(1, 20, (2 + index % 8,), generator=drawn), self.labels[index]


def padded(samples):
    inputs, labels = zip(*samples, strict=True)
    return pad_sequence(inputs, batch_first=True), torch.stack(labels)


def labels_inside(samples):
    inputs, labels = zip(*samples, strict=True)
    return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}, None


class Mean(nn.Module):
    def forward(self, value):
        return value.mean(1)


def text_net():
    torch.manual_seed(0)
    layers = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), Mean()
    return nn.Sequential(*layers, nn.Linear(8, 3))


class WithLoss(nn.Module):
    """Computes its loss, as the models of transformers do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.third = nn.Linear(8, 3)

    def forward(self, inputs, labels):
        values = self.third(torch.tanh(self.second(torch.tanh(self.first(inputs)))))
        return nn.functional.cross_entropy(values, labels)


def own_loss(output, targets):
    return output


def counted_labels(inputs, targets):
    return (inputs["labels"] != -100).sum()


def run_of(engine, net, data, loss, collate=None, trainer=Trainer, options=None, **settings):
    world = World.from_env(3, "cpu", engine=engine)
    reading = LoaderOptions(collate=collate)
    example = None if collate is not labels_inside else collate([data[i] for i in range(1, 5)])[0]
    # one batch for a pipeline: the processes of this job are three pipelines with engine=local
    alone = world if engine == "distributed" else World(devices=world.devices)
    settings_of_model = {"chunks": 2, "seed": 3, "split": "uniform", **(options or {})}
    model = HybridModel(net, alone, example_inputs=example, **settings_of_model)
    data.reads = 0
    recorder = Recorder()
    made = trainer(
        model,
        torch.optim.AdamW(model.parameters(), 0.02),
        loss,
        TrainLoader(data, 6, alone, seed=1, options=reading),
        evaluation=EvalLoader(data, 6, alone, options=reading),
        metrics={} if collate is labels_inside else {"accuracy": accuracy()},
        callbacks=[recorder],
        log_every=1,
        **settings,
    )
    made.recorder = recorder
    made.fit()
    return made


CASES = {
    "ignored labels": (rich_net, Vectors, cross_entropy, None),
    "padding": (text_net, Texts, cross_entropy, padded),
    "a loss of the model's": (
        WithLoss,
        Vectors,
        MeanLoss(own_loss, counted_labels),
        labels_inside,
    ),
}

for name, (net, dataset, loss, collate) in CASES.items():
    for accumulate in (1, 2):

        @cells.add(
            f"the middle process reads nothing, and the run is the same: {name}, "
            f"accumulate={accumulate}",
            thorough=(name, accumulate) not in (("ignored labels", 2), ("padding", 1)),
        )
        def _(world, net=net, dataset=dataset, loss=loss, collate=collate, accumulate=accumulate):
            data = dataset()
            settings = {"epochs": 2, "accumulate": accumulate, "clip_norm": 0.5}
            ours = run_of("distributed", net(), data, loss, collate, **settings)
            assert (data.reads == 0) == (world.rank == 1)
            theirs = run_of("local", net(), dataset(), loss, collate, **settings)
            assert_same(ours.model.state_dict(), theirs.model.state_dict(), "weights")
            assert (ours.step, ours.samples) == (theirs.step, theirs.samples)
            if world.rank == 0:
                assert ours.recorder.reproducible() == theirs.recorder.reproducible()


@cells.add("in a V the first process has both ends, and it alone reads")
def _v(world):
    data, options = Vectors(), {"schedule": "zb-v", "stages_per_device": 2}
    ours = run_of("distributed", rich_net(), data, cross_entropy, options=options, epochs=1)
    assert (data.reads == 0) == (world.rank > 0)
    theirs = run_of("local", rich_net(), Vectors(), cross_entropy, options=options, epochs=1)
    assert_same(ours.model.state_dict(), theirs.model.state_dict(), "weights")


@cells.add("the outputs of all samples are predicted without a batch in the middle process")
def _predicted(world):
    data = Vectors()
    ours = run_of("distributed", rich_net(), data, cross_entropy, steps=2)
    theirs = run_of("local", rich_net(), Vectors(), cross_entropy, steps=2)
    data.reads = 0
    outputs = predict(ours.model, EvalLoader(data, 6, ours.world))
    assert (data.reads == 0) == (world.rank == 1)
    assert torch.equal(outputs, predict(theirs.model, EvalLoader(data, 6, theirs.world)))


class LooksAtBatches(Trainer):
    def training_step(self, batches, timeline):
        self.seen = [batch.inputs.shape for batch in batches]
        return super().training_step(batches, timeline)


def two_views(samples):
    inputs, labels = torch.utils.data.default_collate(samples)
    return torch.cat([inputs, inputs.flip(1)]), torch.cat([labels, labels])


@cells.add("a collate function may add samples that the middle process does not know of")
def _two_views(world):
    ours = run_of("distributed", rich_net(), Vectors(), cross_entropy, two_views, steps=3)
    theirs = run_of("local", rich_net(), Vectors(), cross_entropy, two_views, steps=3)
    assert_same(ours.model.state_dict(), theirs.model.state_dict(), "weights")


def pipeline_of_three():
    world = World.from_env(3, "cpu", timeout_s=30, engine="distributed")
    return HybridModel(rich_net(), world, chunks=2, seed=3, split="uniform")


def batch_here(world, seed):
    """The batch, without its values in the middle process."""
    drawn = torch.Generator().manual_seed(seed)
    batch = torch.randn(4, 6, generator=drawn), torch.randint(3, (4,), generator=drawn)
    return (Unread(4), Unread(4)) if world.rank == 1 else batch


@cells.add("batches that differ between the readers in a later step are refused in all processes")
def _different(world):
    model = pipeline_of_three()
    model.train_step(*batch_here(world, 0), cross_entropy)
    for seed in (1, 2):
        with pytest.raises(BatchError, match="different batches"):
            model.train_step(*batch_here(world, seed + world.rank), cross_entropy)
        model.train_step(*batch_here(world, seed), cross_entropy)


@cells.add("a new loss in a later step learns in all processes whether there are targets")
def _new_loss(world):
    model, steps = pipeline_of_three(), []
    for seed in range(6):

        def loss(output, targets, scale=1 + seed // 2):
            steps.append(targets is not None)
            return scale * nn.functional.cross_entropy(output, targets)

        model.train_step(*batch_here(world, seed), cross_entropy if seed % 2 else loss)
    assert all(steps)
    assert bool(steps) == model.owns_output


@cells.add("a training_step of one's own gets whole batches in every process")
def _own_step(world):
    data = Vectors()
    ours = run_of("distributed", rich_net(), data, cross_entropy, trainer=LooksAtBatches, steps=1)
    assert ours.seen == [(6, 6)]
    assert data.reads


@cells.add("a loader gives whole batches to a loop of one's own in every process")
def _own_loop(world):
    world = World.from_env(3, "cpu", engine="distributed")
    shapes = {inputs.shape for inputs, _ in TrainLoader(Vectors(), 11, world)}
    assert shapes == {(11, 6)}


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
