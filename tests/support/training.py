"""A small trainer for the tests of the training loop, and how two runs are compared."""

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.data import EvalLoader, TrainLoader
from hybridtrain.loop import Tracker
from hybridtrain.loss import accuracy, cross_entropy

# in batches of 4 or 6, no micro-batch of these has one sample, which BatchNorm refuses
SAMPLES = 28
RAGGED = 22


def plain_net():
    """A net without random layers or buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def rich_net():
    """A net with what a resume can forget: running statistics and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.3),
        nn.ReLU(inplace=True),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.3),
        nn.Linear(8, 3),
    )


def data(samples=SAMPLES, seed=0):
    """Random samples of 6 features in 3 classes."""
    g = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=g)
    return TensorDataset(inputs, torch.randint(3, (samples,), generator=g))


class Recorder(Tracker):
    """A tracker that keeps what is reported, on each rank."""

    main_only = False

    def __init__(self):
        self.values = {}
        self.steps = []
        self.started = None

    def on_start(self, run):
        self.started = run.total_steps, run.step

    def on_step(self, run, samples):
        self.steps.append((run.step, samples))

    def on_log(self, run, values):
        for name, value in values.items():
            self.values[run.step, name] = value

    def reproducible(self):
        """The values that are not times."""
        names = ("train/loss", "train/lr", "train/grad_norm", "train/epoch", "eval/")
        return {key: value for key, value in self.values.items() if key[1].startswith(names)}


def trainer(
    net=None,
    *,
    nb_part=2,
    chunks=2,
    batch_size=4,
    optimizer=None,
    lr=None,
    recorder=None,
    callbacks=(),
    **options,
):
    """Returns a trainer with a Recorder, `recorder`; `lr` makes the schedule from the optimizer."""
    world = World.from_env(nb_part=nb_part, devices="cpu")
    model = HybridModel(net or plain_net(), world, chunks=chunks, seed=3)
    make = optimizer or (lambda p: torch.optim.AdamW(p, lr=0.02))
    made = make(model.parameters())
    options = {"log_every": 1, **options}
    recorder = recorder or Recorder()
    if "epochs" not in options:
        options.setdefault("steps", 9)
    trainer = Trainer(
        model,
        made,
        cross_entropy,
        TrainLoader(options.pop("data", data()), batch_size, world, seed=1),
        lr_schedule=lr(made) if lr else None,
        evaluation=EvalLoader(data(11, seed=9), 4, world),
        metrics={"accuracy": accuracy()},
        callbacks=[*callbacks, recorder],
        **options,
    )
    trainer.recorder = recorder
    return trainer


def assert_same(ours, theirs, what):
    """Asserts that two dicts of tensors are bitwise equal."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), f"{what}: {name}"


def moments(trainer):
    """Returns the optimizer's state by parameter name."""
    names = [name for name, _ in trainer.model.named_parameters()]
    state = trainer.optimizer.state_dict()["state"]
    return {(names[i], key): value for i, entry in state.items() for key, value in entry.items()}


def assert_same_run(ours, theirs):
    """Asserts that two trainers are in bitwise the same state."""
    assert_same(ours.model.state_dict(), theirs.model.state_dict(), "weights and buffers")
    assert_same(moments(ours), moments(theirs), "optimizer")
    assert (ours.step, ours.samples, ours.epoch, ours.batch) == (
        theirs.step,
        theirs.samples,
        theirs.epoch,
        theirs.batch,
    )
    assert ours.optimizer.param_groups[0]["lr"] == theirs.optimizer.param_groups[0]["lr"]


def cosine(warmup_steps, total):
    """Returns a function that makes this schedule for an optimizer."""

    def schedule(optimizer):
        decay = CosineAnnealingLR(optimizer, total - warmup_steps)
        if not warmup_steps:
            return decay
        rise = LinearLR(optimizer, 1 / (warmup_steps + 1), total_iters=warmup_steps)
        return SequentialLR(optimizer, [rise, decay], milestones=[warmup_steps])

    return schedule
