"""Parameters that layers of different stages share: one parameter, wherever the model is cut."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.checkpoint.store import CheckpointStore
from hybridtrain.data.loader import TrainLoader

VOCABULARY, WIDTH, LENGTH, CHUNKS = 11, 8, 4, 3
SPLITS = [(2, 1), (3, 1), (4, 1), (2, 2)]  # (nb_part, stages_per_device)


pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Middle(nn.Module):
    """Uses the embedding's weight a third time, if it is given it."""

    def __init__(self, weight=None):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = weight

    def forward(self, x):
        x = torch.tanh(self.linear(x))
        return x if self.weight is None else x + torch.sigmoid(x @ self.weight.T) @ self.weight


def gpt(uses=2, tied=True, frozen=False):
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    third = Middle(embedding.weight) if uses == 3 else Middle()
    net = nn.Sequential(embedding, Middle(), third, head)
    head.weight = embedding.weight
    if frozen:
        embedding.weight.requires_grad_(False)
    if not tied:  # the same numbers, each use with a parameter of its own
        head.weight = nn.Parameter(embedding.weight.detach().clone())
        if uses == 3:
            third.weight = nn.Parameter(embedding.weight.detach().clone())
    return net


def loss_fn(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def data(seed, rows=8):
    g = torch.Generator().manual_seed(seed)
    shape = (rows, LENGTH)
    return (
        torch.randint(VOCABULARY, shape, generator=g),
        torch.randint(VOCABULARY, shape, generator=g),
    )


def hybrid(net, nb_part=2, stages_per_device=1, **options):
    world = World.from_env(nb_part=nb_part, devices="cpu")
    return HybridModel(net, world, chunks=CHUNKS, stages_per_device=stages_per_device, **options)


def plain_step(net, x, y):
    for a, b in zip(x.tensor_split(CHUNKS), y.tensor_split(CHUNKS), strict=True):
        (loss_fn(net(a), b) * (len(a) / len(x))).backward()


def aliases(model):
    return [alias.alias for stage in model.stages for alias in stage.aliases]


@pytest.mark.parametrize("uses", [2, 3])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_tied_parameter_is_one_and_has_one_name(split, uses):
    net = gpt(uses)
    model = hybrid(net, *split)
    names = [name for name, _ in gpt(uses).named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    assert names.count("0.weight") == 1
    assert "3.weight" not in names
    assert len(list(model.parameters())) == len(names)
    assert dict(model.named_parameters())["0.weight"] is net[0].weight


@pytest.mark.parametrize("checkpoint", ["never", "always", {"every": 1}], ids=str)
@pytest.mark.parametrize("uses", [2, 3])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_its_gradient_is_the_sum_over_its_uses(split, uses, checkpoint):
    net, untied = gpt(uses), gpt(uses, tied=False)
    model = hybrid(net, *split, checkpoint=checkpoint)
    for seed in range(2):  # the second step adds to the gradient of the first
        x, y = data(seed)
        plain_step(untied, x, y)
        model.train_step(x, y, loss_fn)
        expected = untied[0].weight.grad + untied[3].weight.grad
        if uses == 3:
            expected += untied[2].weight.grad
        # the sums over two steps are taken in another order
        torch.testing.assert_close(net[0].weight.grad, expected, rtol=1e-5, atol=1e-7)
        for name, p in untied.named_parameters():
            if name.endswith("linear.weight"):
                assert torch.equal(net.get_parameter(name).grad, p.grad)
    assert all(alias.grad is None for alias in aliases(model))


def test_its_gradient_is_bitwise_the_uses_in_the_order_of_the_stages():
    net, untied = gpt(3), gpt(3, tied=False)
    x, y = data(0)
    plain_step(untied, x, y)
    hybrid(net, 4).train_step(x, y, loss_fn)
    first, second, third = (untied[index].weight.grad for index in (0, 2, 3))
    assert torch.equal(net[0].weight.grad, first + second + third)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_there_is_no_copy_of_it_in_memory(split):
    net = gpt(3)
    parameters = sum(p.nbytes for p in net.parameters())
    model = hybrid(net, *split)
    assert aliases(model)
    assert all(alias.data_ptr() == net[0].weight.data_ptr() for alias in aliases(model))
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for stage in model.stages
        for t in [*stage.module.parameters(), *stage.module.buffers()]
    }
    assert sum(storages.values()) == parameters


def test_the_last_stage_computes_with_its_alias():
    net = gpt()
    model = hybrid(net, 2)
    (alias,) = aliases(model)
    assert net[3].weight is alias
    assert net[3]._parameters["weight"] is net[0].weight is not alias


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_its_state_has_both_names_and_the_plain_module_loads_it(split):
    net = gpt(3)
    model = hybrid(net, *split)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.train_step(*data(0), loss_fn)
    optimizer.step()
    state = model.state_dict()
    assert list(state) == list(gpt(3).state_dict())
    assert {"0.weight", "2.weight", "3.weight"} <= set(state)
    assert torch.equal(state["0.weight"], state["3.weight"])
    plain = gpt(3)
    plain.load_state_dict(state)
    x, _ = data(1)
    torch.testing.assert_close(model.eval()(x), plain.eval()(x).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_loaded_state_reaches_every_use(split):
    model, other = hybrid(gpt(3), *split), gpt(3)
    with torch.no_grad():
        other[0].weight.normal_()
    model.load_state_dict(other.state_dict())
    assert all(torch.equal(alias, other[0].weight) for alias in aliases(model))
    x, _ = data(1)
    torch.testing.assert_close(model.eval()(x), other.eval()(x).detach(), rtol=1e-5, atol=1e-6)


def test_a_value_that_is_put_elsewhere_in_memory_reaches_every_use():
    net, other = gpt(3), gpt(3)
    model = hybrid(net, 4)
    value = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1))
    net[0].weight.data = value.clone()
    with torch.no_grad():
        other[0].weight.copy_(value)
    x, y = data(0)
    plain_step(other, x, y)
    model.train_step(x, y, loss_fn)
    torch.testing.assert_close(net[0].weight.grad, other[0].weight.grad)
    torch.testing.assert_close(model.eval()(x), other.eval()(x).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_the_weights_stay_tied_after_optimizer_steps(split, optimizer):
    net, plain = gpt(3), gpt(3)
    model = hybrid(net, *split)
    optimizers = [getattr(torch.optim, optimizer)(m.parameters(), lr=0.05) for m in (net, plain)]
    for seed in range(4):
        x, y = data(seed)
        model.train_step(x, y, loss_fn)
        plain_step(plain, x, y)
        for each in optimizers:
            each.step()
            each.zero_grad()
        assert all(torch.equal(alias, net[0].weight) for alias in aliases(model))
        assert all(alias.data_ptr() == net[0].weight.data_ptr() for alias in aliases(model))
    for name, value in plain.state_dict().items():
        # the gradient's terms are added in another order, and Adam divides by small ones
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("nb_part", [1, 2])
def test_a_tie_within_one_stage_needs_no_alias(nb_part):
    def make():
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        net[1].weight = net[0].weight
        return net

    net, plain = make(), make()
    model = hybrid(net, nb_part)
    assert aliases(model) == []
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))
    for part in x.tensor_split(CHUNKS):
        (plain(part).square().mean() * (len(part) / len(x))).backward()
    model.train_step(x, None, lambda output, _: output.square().mean())
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_frozen_tied_parameter_gets_no_gradient_and_stays(split):
    net, plain = gpt(3, frozen=True), gpt(3, frozen=True)
    model = hybrid(net, *split)
    before = net[0].weight.clone()
    x, y = data(0)
    plain_step(plain, x, y)
    model.train_step(x, y, loss_fn)
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None) is (name == "0.weight")
        assert p.grad is None or torch.equal(p.grad, q.grad)
    assert torch.equal(net[0].weight, before)
    assert all(alias.grad is None and not alias.requires_grad for alias in aliases(model))


def test_a_net_that_is_cut_again_does_not_keep_the_aliases_of_the_first_cut():
    net, plain = gpt(3), gpt(3)
    hybrid(net, 4)
    x, y = data(0)
    plain_step(plain, x, y)
    for nb_part in (1, 2, 3):
        net.zero_grad()
        model = hybrid(net, nb_part)
        model.train_step(x, y, loss_fn)
        assert all(alias.grad is None for alias in aliases(model))
        for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=name)


# In the trainer.
class Norms:
    def __init__(self):
        self.norms = []

    def start(self, *, total_steps, first_step, texts):
        pass

    def step(self, step, samples):
        pass

    def scalars(self, step, values):
        self.norms += [values["train/grad_norm"]] if "train/grad_norm" in values else []

    def timeline(self, step, predicted, measured):
        pass

    def close(self):
        pass


def trainer(net, nb_part, steps, store=None, clip_norm=None, lr=0.05):
    model = hybrid(net, nb_part)
    x, y = data(0, rows=40)
    loader = TrainLoader(TensorDataset(x, y), 8, model.world, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return Trainer(
        model, optimizer, loss_fn, loader, steps=steps, store=store, clip_norm=clip_norm,
        log_every=1, monitor=Norms(),
    )  # fmt: skip


@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize("nb_part", [2, 3, 4])
def test_it_counts_once_in_the_norm_of_the_gradient(nb_part, clip_norm):
    ours, plain = trainer(gpt(3), nb_part, 1, clip_norm=clip_norm), gpt(3)
    batch = next(ours.train.stream())
    plain_step(plain, batch.inputs, batch.targets)
    expected = clip_grad_norm_(plain.parameters(), 1.0)
    ours.fit()
    assert ours.monitor.norms == [pytest.approx(float(expected), rel=1e-5)]
    apart = [*plain.parameters(), plain[3].weight]
    twice = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in apart]))
    assert float(twice) != pytest.approx(float(expected), rel=1e-3), "the test cannot fail"


def test_the_optimizer_s_file_has_it_once(tmp_path):
    ours = trainer(gpt(3), 3, 2, CheckpointStore(tmp_path))
    ours.fit()
    folder = tmp_path / "step_00000002"
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    names = [name for name, _ in gpt(3).named_parameters()]
    assert list(saved["state"]) == names
    assert [name for group in saved["param_groups"] for name in group["params"]] == names
    weights = torch.load(folder / "model.pt", weights_only=True)
    gpt(3).load_state_dict(weights)
    assert torch.equal(weights["0.weight"], weights["3.weight"])
    assert json.loads((folder / "state.json").read_text())["step"] == 2


@pytest.mark.parametrize("then_nb_part", [1, 2, 4])
@pytest.mark.parametrize("nb_part", [1, 2, 4])
def test_a_resumed_run_equals_the_uninterrupted_one(nb_part, then_nb_part, tmp_path):
    whole = trainer(gpt(3), nb_part, 6)
    whole.fit()
    trainer(gpt(3), nb_part, 3, CheckpointStore(tmp_path)).fit()
    net = gpt(3)
    for p in net.parameters():
        nn.init.uniform_(p)
    rest = trainer(net, then_nb_part, 6)
    rest.resume(tmp_path / "step_00000003")
    rest.fit()
    assert rest.step == 6
    for name, value in whole.model.state_dict().items():
        mine = rest.model.state_dict()[name]
        if nb_part == then_nb_part:
            assert torch.equal(mine, value), name
        else:  # the terms of the tied gradient are added in another order
            torch.testing.assert_close(mine, value, rtol=1e-4, atol=1e-4, msg=name)
    assert all(torch.equal(alias, net[0].weight) for alias in aliases(rest.model))


def test_a_copy_of_the_net_is_tied_and_apart_from_it():
    net = gpt(3)
    model = hybrid(net, 4)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin[0].weight.normal_()
    assert torch.equal(twin[3].weight, twin[0].weight)
    assert not torch.equal(net[0].weight, twin[0].weight)
    plain = gpt(3)
    plain.load_state_dict(twin.state_dict())
    x, _ = data(0)
    assert torch.equal(twin(x), plain(x))
    assert torch.equal(net[3].weight, aliases(model)[0])
