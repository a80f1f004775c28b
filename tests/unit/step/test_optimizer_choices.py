"""Muon, state in 8 bits, and optimizers that are refused: in the Trainer and in custom loops."""

import logging
from functools import partial
from itertools import pairwise

import pytest
import torch
from support.training import assert_same, cosine, data
from torch import nn
from torch.nn.functional import cross_entropy

from hybridtrain import HybridModel, OptimizerStep, Session, ShardedOptimizer, Trainer, World
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.data import TrainLoader
from hybridtrain.errors import ConfigError
from hybridtrain.step import MuonAdamW, muon_groups, parameter_groups, state_bytes

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class TextNet(nn.Module):
    """An embedding, a table with `embed` in its name, two matrices with biases, a norm, a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(7, 8)
        self.position_embed = nn.Parameter(torch.randn(1, 8))
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        x = self.tokens(tokens).mean(1) + self.position_embed
        return self.head(self.second(self.norm(self.first(x).tanh())))


def wide_net():
    """A net with a matrix that has 8-bit state, and with parameters that are too small for it."""
    torch.manual_seed(0)
    sizes = (6, 64, 80, 24)
    layers = [(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)]
    return nn.Sequential(*(part for pair in layers for part in pair), nn.Linear(24, 3))


def muon(model):
    return MuonAdamW(muon_groups(model), lr=0.02, adamw_lr=0.01)


def adamw8bit(model):
    optim = pytest.importorskip("bitsandbytes").optim
    return optim.AdamW8bit(model.parameters(), lr=0.02)


@pytest.mark.parametrize("make", [muon, adamw8bit])
def test_muon_and_state_in_8_bits_resume_on_other_stages_and_another_schedule_bitwise(
    make, tmp_path
):
    def trainer(nb_part, schedule, **more):
        world = World.from_env(nb_part=nb_part, devices="cpu")
        model = HybridModel(wide_net(), world, chunks=4, schedule=schedule)
        optimizer = make(model)
        loader = TrainLoader(data(), 4, world, seed=1)
        rates = cosine(2, 8)(optimizer)
        return Trainer(model, optimizer, cross_entropy, loader, lr_schedule=rates, **more)

    whole = trainer(2, "1f1b", steps=8)
    whole.fit()
    store = CheckpointStore(tmp_path)
    trainer(2, "1f1b", steps=4, store=store).fit()
    again = trainer(3, "zb-h1", steps=8)
    again.resume(store.newest())
    again.fit()
    assert_same(again.model.state_dict(), whole.model.state_dict(), "weights")
    states = [each.optimizer.state_dict()["state"] for each in (again, whole)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    rates = [[g["lr"] for g in each.optimizer.param_groups] for each in (again, whole)]
    assert rates[0] == rates[1]
    assert all(rate < 0.01 for rate in rates[0])
    kinds = {v.dtype for state in again.optimizer.state.values() for v in state.values()
             if isinstance(v, torch.Tensor)}  # fmt: skip
    assert (torch.uint8 in kinds) == (make is adamw8bit)


def test_muon_takes_the_matrices_between_embeddings_and_head_and_says_how_many(caplog):
    caplog.set_level(logging.INFO)
    ours = HybridModel(TextNet(), World.from_env(nb_part=2, devices="cpu"), chunks=2)
    tokens, targets = torch.randint(7, (8, 5)), torch.randint(3, (8,))
    ours.split_for(tokens)
    step = OptimizerStep(ours, muon(ours))
    by_muon, by_adamw = step.optimizer.param_groups
    names = {id(p): name for name, p in ours.named_parameters()}
    assert [names[id(p)] for p in by_muon["params"]] == ["first.weight", "second.weight"]
    assert len(by_adamw["params"]) == len(names) - 2
    assert "Muon updates 2 of 10 weights (128 of 251 parameters), AdamW the others" in caplog.text

    plain = TextNet()
    own = dict(plain.named_parameters())
    matrices = [own.pop(name) for name in ("first.weight", "second.weight")]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(own.values(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
    ]
    for _ in range(3):
        ours.train_step(tokens, targets, cross_entropy)
        step.optimizer.step()
        step.optimizer.zero_grad()
        for half in (slice(4), slice(4, 8)):
            (cross_entropy(plain(tokens[half]), targets[half]) / 2).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    for name, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_a_model_without_matrices_for_muon_is_refused():
    ours = HybridModel(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), World.from_env(devices="cpu"))
    with pytest.raises(ConfigError, match=r"Sequential trains none: use AdamW \(optim=adamw\)"):
        muon(ours)


class FromTorchao(torch.optim.SGD):
    """Stands for the optimizers of torchao, which are known by their module."""


FromTorchao.__module__ = "torchao.optim.adam"


def test_optimizers_of_torchao_are_refused_with_the_reason_and_another_one():
    def sgd(params):
        return FromTorchao(params, lr=0.1)

    world = World.from_env(devices="cpu")
    model = HybridModel(wide_net(), world)
    sharded = HybridModel(wide_net(), world, shard="optimizer")
    session = Session(world=world)
    session.prepare(wide_net())
    tries = [
        lambda: Trainer(model, sgd(model.parameters()), cross_entropy, [], steps=1),
        lambda: OptimizerStep(model, sgd(model.parameters())),
        lambda: ShardedOptimizer(sharded, sgd),
        lambda: session.prepare(sgd(session.model.parameters())),
    ]
    for attempt in tries:
        with pytest.raises(ConfigError, match="cannot store, and round with draws from the glob"):
            attempt()


def test_a_split_by_memory_counts_the_bytes_of_state_that_it_is_told():
    def matrices_alone(net):
        return {name: 100 * p.nbytes for name, p in net.named_parameters() if name == "0.weight"}

    counts = []
    for state in (2, matrices_alone, partial(state_bytes, make=all_at_once)):
        model = HybridModel(
            nn.Sequential(*(nn.Linear(16, 16) for _ in range(8))),
            World.from_env(nb_part=2, devices="cpu"),
            split="memory",
            example_inputs=torch.randn(4, 16),
            optimizer_tensors_per_param=state,
        )
        counts.append(model.plan.counts)
    assert counts == [[4, 4], [1, 7], [4, 4]]


def all_at_once(parameters):
    return torch.optim.AdamW(parameters.values())


def test_groups_for_muon_are_the_same_in_a_process_without_matrices():
    class Part:
        """A process that has the bias of the head alone."""

        net = TextNet()
        world = World()
        named_parameters = staticmethod(lambda: [("head.bias", Part.net.head.bias)])

    optimizer = MuonAdamW(muon_groups(Part))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
    assert [group["params"][0].numel() for group in optimizer.param_groups] == [0, 3]
    Part.net.head.bias.grad = torch.ones(3)
    optimizer.step()
    assert len(parameter_groups(Part, matrices=[])) == 1
