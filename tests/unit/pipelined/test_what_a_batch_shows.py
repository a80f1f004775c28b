"""A later batch decides what the first one leaves open, such as what a loss is a mean of."""

import copy

import pytest
import torch
from support.compare import CLOSE
from support.stand_in_gpus import on_host, stand_in_gpus
from torch import nn
from torch.nn import functional as F

from hybridtrain import pipelined, unpipelined
from hybridtrain._base.accelerator import put
from hybridtrain.errors import BatchError

pytestmark = pytest.mark.usefixtures("seeded", "one_intra_op_thread")

ROWS, LENGTH, CLASSES = 8, 5, 11


def pipeline(net, **options):
    return pipelined(copy.deepcopy(net), **{"nb_part": 2, "chunks": 4} | options)


def mlp(inputs=6, outputs=3):
    return nn.Sequential(
        nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, outputs)
    )


def gradients_of(net):
    return {name: p.grad for name, p in net.named_parameters()}


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.body = nn.Embedding(CLASSES, 8), mlp(8, CLASSES)

    def scores(self, ids):
        return self.body(self.embedding(ids))


class OtherNames(Tokens):
    """As in nanoGPT: `targets`, of which -1 is ignored."""

    def forward(self, ids, targets):
        y = self.scores(ids)
        return y, F.cross_entropy(y.flatten(0, 1), targets.flatten(), ignore_index=-1)


class PaddingIgnored(Tokens):
    def forward(self, ids, labels):
        y = self.scores(ids)
        return {"loss": F.cross_entropy(y.flatten(0, 1), labels.flatten(), ignore_index=0), "y": y}


class Shifted(Tokens):
    def forward(self, batch):
        ids, mask = batch["ids"], batch["mask"][:, 1:]
        y = self.scores(ids)[:, :-1]
        each = F.cross_entropy(y.transpose(1, 2), ids[:, 1:], reduction="none")
        return (each * mask).sum() / mask.sum()


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x, weight):
        each = self.body(x).square().mean(-1)
        return (each * weight).sum() / weight.sum()


class PerSample(nn.Module):
    """A mean over samples, whatever the mask selects in each of them."""

    def __init__(self):
        super().__init__()
        self.body = mlp(1, 1)

    def forward(self, x, mask):
        each = self.body(x[..., None])[..., 0].square() * mask
        return (each.sum(1) / mask.sum(1)).mean()


def ids(low=0):
    return torch.randint(low, CLASSES, (ROWS, LENGTH))


def with_targets(later):
    targets = ids()
    if later:
        targets[torch.arange(ROWS)[:, None] + torch.arange(LENGTH) > 7] = -1
    return ids(), targets


def with_padding(later):
    labels = ids(1)
    if later:
        labels[:5, 2:] = 0
    return ids(1), labels


def with_mask(later):
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    if later:
        mask[:3, 2:] = 0
    return ({"ids": ids(), "mask": mask},)


def with_weights(later):
    weight = torch.ones(ROWS)
    if later:
        weight[:3], weight[5] = 0, 2.5  # the first micro-batch counts nothing
    return torch.randn(ROWS, 6), weight


def with_bools(later):
    x, weight = with_weights(later)
    return x, weight > 0


def with_mask_of_samples(later):
    mask = torch.ones(ROWS, LENGTH)
    if later:
        mask[:3, 2:] = 0
    return torch.randn(ROWS, LENGTH), mask


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (OtherNames, with_targets),
        (PaddingIgnored, with_padding),
        (Shifted, with_mask),
        (Weighted, with_weights),
        (Weighted, with_bools),
        (PerSample, with_mask_of_samples),
    ],
    ids=["targets", "padding", "shifted mask", "weights", "bools", "mean of each sample"],
)
def test_a_loss_that_ignores_nothing_in_its_first_batches_is_weighted_right_in_later_ones(
    make, arguments
):
    net = make()
    piped = pipeline(net)
    for step in range(6):
        batch = arguments(later=step >= 2)
        for model in (net, piped):
            model.zero_grad()
            out = model(*batch)
            loss = out["loss"] if isinstance(out, dict) else out[1] if type(out) is tuple else out
            loss.backward()
        torch.testing.assert_close(gradients_of(piped), gradients_of(net), **CLOSE)


class IgnoresSeven(Tokens):
    def forward(self, ids, targets):
        y = self.scores(ids)
        return F.cross_entropy(y.flatten(0, 1), targets.flatten(), ignore_index=7)


def test_a_loss_that_follows_no_rule_in_a_later_batch_is_refused():
    piped = pipeline(IgnoresSeven(), chunks=2)
    for _ in range(3):
        targets = torch.randint(7, (ROWS, LENGTH))
        piped(ids(), targets).backward()
    targets[0, 1:], targets[1:4] = 7, 7
    with pytest.raises(BatchError, match=r"output of 8 samples is .* neither a sum, nor a mean"):
        piped(ids(), targets)  # call 4, which compares


def test_a_loss_over_nothing_in_the_first_batch_is_proved_in_the_next():
    net = OtherNames()
    piped = pipeline(net)
    for step in range(3):
        inputs, targets = with_targets(later=True)
        targets = targets if step else torch.full_like(targets, -1)
        losses = []
        for model in (net, piped):
            model.zero_grad()
            losses.append(model(inputs, targets)[1])
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0], equal_nan=True, **CLOSE)
        if step:
            torch.testing.assert_close(gradients_of(piped), gradients_of(net), **CLOSE)


class LookedUp(nn.Module):
    """Takes labels for indices, where -100 would end a process with a GPU."""

    def __init__(self):
        super().__init__()
        self.body, self.prices = mlp(), nn.Parameter(torch.rand(3))
        self.seen = set()

    def forward(self, x, labels):
        self.seen |= set(on_host(labels).tolist())
        prices = self.prices[labels.clamp(min=0)]
        return (F.cross_entropy(self.body(x), labels, reduction="none") * prices).mean()


def test_on_a_gpu_a_model_gets_no_labels_that_it_may_take_for_classes():
    x, labels = torch.randn(ROWS, 6), torch.randint(3, (ROWS,))
    net = LookedUp()
    with stand_in_gpus(2) as gpus:
        devices = [str(device) for device in gpus.devices]
        piped = pipelined(copy.deepcopy(net), devices=devices, chunks=3, split=["body.2"])
        piped(put(x, gpus.devices[0]), put(labels, gpus.devices[0])).backward()
        found = {name: on_host(p.grad) for name, p in piped.named_parameters()}
    assert min(piped.seen) >= 0
    net(x, labels).backward()
    torch.testing.assert_close(found, gradients_of(net), **CLOSE)


class WithAccuracy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x, labels):
        y = self.body(x)
        right = (y.argmax(-1) == labels).float().mean()
        return {"loss": F.cross_entropy(y, labels), "accuracy": right}


def test_a_metric_that_is_zero_at_first_is_a_mean_later():
    net = WithAccuracy()
    piped = pipeline(net)
    x = torch.randn(ROWS, 6)
    best = net.body(x).argmax(-1)
    for labels in ((best + 1) % 3, best, torch.where(torch.arange(ROWS) < 3, best, (best + 1) % 3)):
        found, expected = (float(model(x, labels)["accuracy"]) for model in (piped, net))
        assert found == pytest.approx(expected)


class SaysRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        return {"y": self.body(x), "row": torch.arange(len(x))}


def test_whole_numbers_that_depend_on_the_batch_are_refused():
    with pytest.raises(BatchError, match=r"output\['row'\] .* values for some samples depend"):
        pipeline(SaysRows())(torch.randn(ROWS, 6))


class Mixes(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, weights):
        states = []
        for block in self.blocks:
            x = block(x).tanh()
            states.append(x)
        return weights[0] * states[-2] + weights[-1] * states[-1]


def test_a_list_that_is_by_chance_as_long_as_a_batch_is_refused_there():
    net = Mixes()
    piped = pipeline(net)
    for rows in (8, 5):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(piped(x, [0.7, 0.3]), net(x, [0.7, 0.3]), **CLOSE)
    with pytest.raises(BatchError, match="not the concatenation"):
        piped(torch.randn(2, 6), [0.7, 0.3])


class ReturnsMore(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.more = False

    def forward(self, x, labels):
        y = self.body(x)
        loss = F.cross_entropy(y, labels)
        return (y, loss, y.square().mean()) if self.more else (loss, y)


@pytest.mark.parametrize("trains", [True, False])
def test_an_attribute_that_changes_what_the_model_returns_is_named(trains):
    piped = pipeline(ReturnsMore().train(trains))
    x, labels = torch.randn(ROWS, 6), torch.randint(3, (ROWS,))
    with torch.set_grad_enabled(trains):
        for _ in range(3):  # the third call with gradients runs the whole schedule
            loss = piped(x, labels)[0]
            if trains:
                loss.backward()
        piped.more = True
        with pytest.raises(BatchError, match=r"because of an attribute.*pipelined\(unpipelined\("):
            piped(x, labels)
        again = pipelined(unpipelined(piped), nb_part=2, chunks=4)
        assert len(again(x, labels)) == 3


class ReturnsMoreInTraining(ReturnsMore):
    def forward(self, x, labels):
        self.more = self.training
        return super().forward(x, labels)


def test_a_model_that_returns_more_in_training_is_refused_by_name():
    x, labels = torch.randn(ROWS, 6), torch.randint(3, (ROWS,))
    with pytest.raises(BatchError, match="another in training mode than in evaluation mode"):
        pipeline(ReturnsMoreInTraining())(x, labels)
    assert len(pipeline(ReturnsMoreInTraining(), chunks=1)(x, labels)) == 3  # its advice


class OfDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(6, 1)

    def forward(self, batch):
        return self.body(batch["x"])


def test_a_frozen_model_passes_gradients_to_inputs_inside_of_a_container():
    net = OfDict().requires_grad_(False)
    found = []
    for critic in (net, pipeline(net)):
        x = torch.arange(48.0).reshape(8, 6).div(48).requires_grad_()
        (critic({"x": x * 2}).mean() + x.square().mean()).backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], **CLOSE)


def test_after_a_first_call_that_fails_the_model_can_be_called():
    net = mlp()
    piped = pipeline(net)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        piped(torch.randn(2, 5))
    x = torch.randn(ROWS, 6)
    torch.testing.assert_close(piped(x), net(x), **CLOSE)


class Config:
    use_cache = True


class WantsCache(nn.Module):
    """As language models of transformers do in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.config = Config()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x, labels=None, use_cache=None):
        return self.last(self.middle(self.first(x).tanh()).tanh())


def test_in_evaluation_mode_every_stage_has_its_gradient():
    net = WantsCache().eval()
    x = torch.randn(ROWS, 6)
    with stand_in_gpus(2) as gpus:
        devices = [str(device) for device in gpus.devices]
        piped = pipelined(copy.deepcopy(net), devices=devices, chunks=3, split=[1, 2])
        piped(x).square().mean().backward()
        found = {name: on_host(p.grad) for name, p in piped.named_parameters()}
    net(x).square().mean().backward()
    torch.testing.assert_close(found, gradients_of(net), **CLOSE)


def test_outputs_without_a_gradient_of_their_own_may_be_part_of_a_graph():
    first, second = pipeline(mlp()), pipeline(mlp(3))
    out = first(torch.randn(ROWS, 6))
    second(out.detach() + 0 * out.detach()).mean().backward()
    (second(out).detach().mean() * nn.Parameter(torch.ones(()))).backward()
    assert all(p.grad is None for p in first.parameters())
    out.mean().backward()
    assert all(p.grad is not None for p in first.parameters())


class CountsRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.rows = mlp(), 0
        self.body[0].register_forward_pre_hook(self.count)

    def count(self, layer, args):
        self.rows += len(args[0])

    def forward(self, x, factor=1.0):
        y = self.body(x) * factor
        return {"a": y.square().mean(), "b": y.abs().mean()}


def test_two_losses_by_turns_run_each_forward_once():
    piped = pipeline(CountsRows())
    rows = []
    for step in range(12):
        piped.rows = 0
        piped(torch.randn(ROWS, 6))["ab"[step % 2]].backward()
        rows.append(piped.rows)
    assert [rows[step] for step in (4, 5, 6, 8, 9, 10, 11)] == [ROWS] * 7  # calls 4 and 8 compare


def test_a_factor_that_changes_with_each_call_starts_no_comparison():
    piped = pipeline(CountsRows())
    rows = []
    for step in range(7):
        piped.rows = 0
        piped(torch.randn(ROWS, 6), factor=step / 10)["a"].backward()
        rows.append(piped.rows)
    assert [rows[step] for step in (2, 4, 5, 6)] == [ROWS] * 4


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: torch.func.vmap(net)(x[:, None]),
        lambda net, x: torch.func.grad(lambda x: net(x).sum())(x),
        lambda net, x: torch.func.jvp(net, (x,), (x,)),
        lambda net, x: torch.jit.trace(net, x, check_trace=False)(x),
        lambda net, x: torch.export.export(net, (x,)).module()(x),
    ],
    ids=["vmap", "grad", "jvp", "trace", "export"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_transforms_and_traces_see_the_plain_model(function):
    net = mlp().requires_grad_(False)
    piped, x = pipeline(net), torch.randn(ROWS, 6)
    piped(x)
    torch.testing.assert_close(function(piped, x), function(net, x), **CLOSE)


class DrawsAndNotes(CountsRows):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return F.dropout(self.body(self.norm(x)), 0.5, self.training).square().mean()


def test_a_comparison_in_a_later_call_changes_nothing():
    net = DrawsAndNotes()
    piped, norm = pipeline(net), net.norm
    torch.manual_seed(3)
    batches = torch.randn(4, ROWS, 6)
    torch.manual_seed(4)
    for call, x in enumerate(batches):
        piped.rows = 0
        piped(x).backward()
        assert piped.rows > ROWS or call == 2  # calls 1, 2 and 4 compare
        for part in x.split(2):
            norm(part)
    drawn = torch.rand(())
    torch.testing.assert_close(dict(piped.norm.named_buffers()), dict(norm.named_buffers()))
    torch.manual_seed(4)
    for _ in batches:
        torch.randint(2, ())  # one number for each call
    assert torch.equal(drawn, torch.rand(()))
