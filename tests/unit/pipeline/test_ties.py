"""Parameters that layers of different stages share: one parameter, wherever the model is cut."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, load_model
from support.checkpoint_files import optimizer_in
from support.compare import (
    CLOSE,
    aliases,
    assert_same,
    assert_same_gradients,
    grads,
    hybrid,
    plain_step,
    square_loss,
)
from support.engine import Steps
from support.nets import VOCABULARY, WIDTH, floats, tied_gpt, token_loss, tokens
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import TensorDataset

from hybridtrain import Trainer
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.data import TrainLoader

SPLITS = [(2, 1), (3, 1), (4, 1), (2, 2)]  # (nb_part, stages_per_device)

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def gpt(uses=3, **options):
    """Layers 0, 3 and, of three uses, 2 share one weight."""
    torch.manual_seed(0)
    return tied_gpt(uses, **options)


def forwards_agree(model, plain):
    x, _ = tokens(8, 1)
    torch.testing.assert_close(model.eval()(x), plain.eval()(x).detach(), rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("recompute", ["never", "always", {"every": 1}], ids=str)
@pytest.mark.parametrize("uses", [2, 3])
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.quick_cases(2)
def test_the_gradient_of_a_tied_parameter_is_the_sum_over_its_uses(split, uses, recompute):
    net, untied = gpt(uses), gpt(uses, tied=False)
    model = hybrid(net, *split, recompute=recompute)
    for seed in range(2):  # the second step adds to the gradient of the first
        x, y = tokens(8, seed)
        plain_step(untied, x, y, token_loss)
        model.train_step(x, y, token_loss)
        expected = untied[0].weight.grad + untied[3].weight.grad
        if uses == 3:
            expected += untied[2].weight.grad
        # the sums over two steps are taken in another order
        torch.testing.assert_close(net[0].weight.grad, expected, **CLOSE)
        apart = {name: grad for name, grad in grads(untied).items() if "linear" in name}
        assert_same({name: grads(net)[name] for name in apart}, apart)
    assert all(alias.grad is None for alias in aliases(net))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("uses", [2, 3])
def test_a_sparse_gradient_of_one_use_and_the_dense_ones_of_others_add_up(uses, schedule):
    net, plain = gpt(uses, sparse=True), gpt(uses, sparse=True)
    model = hybrid(net, 4, schedule=schedule)
    for seed in range(2):  # the second step adds a sparse gradient to a dense one
        plain_step(plain, *tokens(8, seed), token_loss)
        model.train_step(*tokens(8, seed), token_loss)
        assert not net[0].weight.grad.is_sparse
        # the sums over the micro-batches of each use are taken in another order
        assert_same_gradients(net, plain, **CLOSE)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("nb_part", [1, 2, 3, 4])
def test_the_gradients_of_the_uses_are_added_in_the_order_of_plain_pytorch(nb_part, schedule):
    net, plain = gpt(), gpt()
    model = hybrid(net, nb_part, schedule=schedule)
    for seed in range(2):
        plain_step(plain, *tokens(8, seed), token_loss)
        model.train_step(*tokens(8, seed), token_loss)
    assert_same_gradients(net, plain)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_all_uses_of_a_tied_parameter_are_the_parameter_itself(split):
    net = gpt()
    hybrid(net, *split).train_step(*tokens(8), token_loss)
    assert net[0].weight is net[2].weight is net[3].weight


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_the_state_has_a_tied_parameter_under_all_its_names_and_the_plain_module_loads_it(split):
    net = gpt()
    model = hybrid(net, *split)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.train_step(*tokens(8), token_loss)
    optimizer.step()
    state = model.state_dict()
    assert list(state) == list(gpt().state_dict())
    assert {"0.weight", "2.weight", "3.weight"} <= set(state)
    assert torch.equal(state["0.weight"], state["3.weight"])
    plain = gpt()
    plain.load_state_dict(state)
    forwards_agree(model, plain)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_loaded_state_reaches_every_use_of_a_tied_parameter(split):
    net, other = gpt(), gpt()
    model = hybrid(net, *split)
    with torch.no_grad():
        other[0].weight.normal_()
    model.load_state_dict(other.state_dict())
    assert all(torch.equal(alias, other[0].weight) for alias in aliases(net))
    forwards_agree(model, other)


def test_a_new_tensor_as_data_of_a_tied_parameter_reaches_every_use():
    net, other = gpt(), gpt()
    model = hybrid(net, 4)
    value = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1))
    net[0].weight.data = value.clone()
    with torch.no_grad():
        other[0].weight.copy_(value)
    x, y = tokens(8)
    plain_step(other, x, y, token_loss)
    model.train_step(x, y, token_loss)
    torch.testing.assert_close(net[0].weight.grad, other[0].weight.grad)
    forwards_agree(model, other)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.quick_cases(3)
def test_tied_weights_stay_tied_after_optimizer_steps(split, optimizer):
    net, plain = gpt(), gpt()
    model = hybrid(net, *split)
    optimizers = [getattr(torch.optim, optimizer)(m.parameters(), lr=0.05) for m in (net, plain)]
    for seed in range(4):
        x, y = tokens(8, seed)
        model.train_step(x, y, token_loss)
        plain_step(plain, x, y, token_loss)
        for each in optimizers:
            each.step()
            each.zero_grad()
        assert all(torch.equal(alias, net[0].weight) for alias in aliases(net))
        assert all(alias.data_ptr() == net[0].weight.data_ptr() for alias in aliases(net))
    # the gradient's terms are added in another order, and Adam divides by small ones
    assert_same(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nb_part", [1, 2])
def test_a_tie_within_one_stage_needs_no_alias(nb_part):
    def make():
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        net[1].weight = net[0].weight
        return net

    net, plain = make(), make()
    model = hybrid(net, nb_part)
    assert aliases(net) == []
    x = floats(6)
    plain_step(plain, x, None, square_loss)
    model.train_step(x, None, square_loss)
    assert_same_gradients(net, plain)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_frozen_tied_parameter_gets_no_gradient_and_stays(split):
    net, plain = gpt(frozen=True), gpt(frozen=True)
    model = hybrid(net, *split)
    before = net[0].weight.clone()
    x, y = tokens(8)
    plain_step(plain, x, y, token_loss)
    model.train_step(x, y, token_loss)
    assert_same_gradients(net, plain)
    assert [name for name, grad in grads(net).items() if grad is None] == ["0.weight"]
    assert torch.equal(net[0].weight, before)
    assert all(alias.grad is None and not alias.requires_grad for alias in aliases(net))


def test_a_net_that_is_cut_again_does_not_keep_the_aliases_of_the_first_cut():
    net, plain = gpt(), gpt()
    hybrid(net, 4)
    x, y = tokens(8)
    plain_step(plain, x, y, token_loss)
    for nb_part in (1, 2, 3):
        net.zero_grad()
        model = hybrid(net, nb_part)
        model.train_step(x, y, token_loss)
        assert all(alias.grad is None for alias in aliases(net))
        assert_same_gradients(net, plain, **CLOSE)


def trainer(net, nb_part, steps, **options):
    model, recorder = hybrid(net, nb_part), Steps(net)
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.05),
        token_loss,
        TrainLoader(TensorDataset(*tokens(40)), 8, model.world, seed=1),
        steps=steps,
        log_every=1,
        callbacks=[recorder],
        **options,
    )
    trainer.recorder = recorder
    return trainer


@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize("nb_part", [2, 3, 4])
@pytest.mark.quick_cases(2)
def test_a_tied_parameter_counts_once_in_the_norm_of_the_gradient(nb_part, clip_norm):
    ours, plain = trainer(gpt(), nb_part, 1, clip_norm=clip_norm), gpt()
    batch = next(ours.train.at_start().stream())
    plain_step(plain, batch.inputs, batch.targets, token_loss)
    expected = clip_grad_norm_(plain.parameters(), 1.0)
    ours.fit()
    assert ours.recorder.of("train/grad_norm") == [pytest.approx(float(expected), rel=1e-5)]
    apart = [*plain.parameters(), plain[3].weight]
    twice = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in apart]))
    assert float(twice) != pytest.approx(float(expected), rel=1e-3), "the test cannot fail"


def test_the_saved_optimizer_state_has_a_tied_parameter_once(tmp_path):
    ours = trainer(gpt(), 3, 2, store=CheckpointStore(tmp_path))
    ours.fit()
    folder = tmp_path / "step_00000002"
    saved = optimizer_in(folder)
    names = [name for name, _ in gpt().named_parameters()]
    assert list(saved["state"]) == names
    assert [name for group in saved["param_groups"] for name in group["params"]] == names
    weights = load_file(folder / "model.safetensors")
    tied = {"2.weight", "3.weight"}  # is there once, as 0.weight
    assert weights.keys() == gpt().state_dict().keys() - tied
    load_model(gpt(), folder / "model.safetensors")
    assert json.loads((folder / "state.json").read_text())["step"] == 2


@pytest.mark.parametrize("then_nb_part", [1, 2, 4])
@pytest.mark.parametrize("nb_part", [1, 2, 4])
@pytest.mark.quick_cases(2)
def test_a_resumed_run_with_tied_weights_equals_the_uninterrupted_one(
    nb_part, then_nb_part, tmp_path
):
    whole = trainer(gpt(), nb_part, 6)
    whole.fit()
    trainer(gpt(), nb_part, 3, store=CheckpointStore(tmp_path)).fit()
    net = gpt()
    for p in net.parameters():
        nn.init.uniform_(p)
    rest = trainer(net, then_nb_part, 6)
    rest.resume(tmp_path / "step_00000003")
    rest.fit()
    assert rest.step == 6
    # with another split the terms of the tied gradient are added in another order
    tolerance = {} if nb_part == then_nb_part else {"rtol": 1e-4, "atol": 1e-4}
    assert_same(rest.model.state_dict(), whole.model.state_dict(), **tolerance)
    assert all(torch.equal(alias, net[0].weight) for alias in aliases(net))


def test_a_copy_of_the_net_is_tied_and_separate_from_the_original():
    net = gpt()
    hybrid(net, 4)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin[0].weight.normal_()
    assert torch.equal(twin[3].weight, twin[0].weight)
    assert not torch.equal(net[0].weight, twin[0].weight)
    plain = gpt()
    plain.load_state_dict(twin.state_dict())
    x, _ = tokens(8)
    assert torch.equal(twin(x), plain(x))
    assert torch.equal(net[3].weight, net[0].weight)
