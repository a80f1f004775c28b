"""One process: a pipelined step equals the unsplit model fed the same micro-batches in order.

The intra-op threads are set to one, as the stages' threads have fewer than the main thread, and
their number decides in which order a kernel adds up. Then every operation here is the same one on
the same numbers, and gradients are added up micro-batch by micro-batch, as in gradient
accumulation: the comparisons are bitwise unless a line says otherwise.
"""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from hybridtrain import HybridModel, World

NB_PARTS = [1, 2, 3, 4]
SCHEDULES = ["gpipe", "1f1b"]
CHECKPOINTS = ["never", "except_last", "always"]
SHAPES = list(itertools.product([1, 4, 7], [10, 13]))  # (chunks, rows)


pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def world(nb_part):
    return World.from_env(nb_part=nb_part, devices="cpu")


# The nets: of each, what makes the net, what makes its inputs, what makes its targets.
def linear_net():
    return nn.Sequential(
        *[nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5), nn.Linear(5, 3)]
    )


def conv_net():
    features = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)
    )
    return nn.Sequential(features, nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))


def inplace_net():
    # with 2, 3 and 4 stages at least one stage begins with a ReLU that overwrites its input
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.LayerNorm(8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 6),
        nn.ReLU(inplace=True),
        nn.Linear(6, 3),
    )


def scaling_inplace_net():
    # unlike ReLU, these give something else when they run twice on the same memory
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.LeakyReLU(0.3, inplace=True),
        nn.Linear(8, 8),
        nn.ELU(inplace=True),
        nn.Linear(8, 6),
        nn.LeakyReLU(0.3, inplace=True),
        nn.Linear(6, 3),
    )


class Open(nn.Module):
    """From a tensor to a dict with a bool mask, a number, a string and a None in it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        mask = x > 0
        return {"x": self.linear(x), "mask": mask, "skip": x, "none": None, "n": 2, "s": "text"}


class Middle(nn.Module):
    """From a dict to a tuple: some tensors used, some passed on, one used by nobody."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, d):
        assert d["none"] is None
        assert d["s"] == "text"
        h = self.linear(d["x"].masked_fill(d["mask"], 0.5)) * d["n"]
        return h, (d["mask"], None, {"skip": d["x"], "again": d["x"]}), h.exp()


class Pass(nn.Module):
    def forward(self, value):
        h, (mask, none, skips), _ = value
        return [torch.tanh(h), mask, none, skips["skip"] + skips["again"]]


class Close(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, value):
        h, mask, none, skip = value
        assert none is None
        return self.linear(h + skip * mask)


def nested_net():
    return nn.Sequential(Open(), Middle(), Pass(), Close())


class Two(nn.Module):
    """Inputs that are a pytree."""

    def forward(self, batch):
        return batch["a"] * batch["scale"] + batch["pair"][0].float()


def pytree_net():
    return nn.Sequential(Two(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def encoder(dropout):
    layers = [
        nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True, norm_first=first)
        for first in (True, False)
    ]
    return nn.Sequential(nn.Embedding(11, 8), *layers, nn.Flatten(), nn.Linear(40, 3))


def rows_of(kind, rows, seed):
    g = torch.Generator().manual_seed(seed)
    if kind == "conv":
        return torch.randn(rows, 2, 6, 6, generator=g)
    if kind == "transformer":
        return torch.randint(0, 11, (rows, 5), generator=g)
    x = torch.randn(rows, 6, generator=g)
    if kind == "pytree":
        pair = (torch.randint(0, 3, (rows, 6), generator=g), None)
        return {"a": x, "scale": torch.tensor(0.5), "pair": pair}
    return x


def targets_of(rows, seed):
    return torch.randint(0, 3, (rows,), generator=torch.Generator().manual_seed(1000 + seed))


NETS = {
    "linear": linear_net,
    "conv": conv_net,
    "inplace": inplace_net,
    "scaling_inplace": scaling_inplace_net,
    "nested": nested_net,
    "pytree": pytree_net,
    "transformer": lambda: encoder(0.0),
    "dropout": lambda: encoder(0.3),
}
# Dropout has tests of its own: plain PyTorch draws its masks from one generator, in another order.
KINDS = [kind for kind in NETS if kind != "dropout"]
CELLS = [
    (kind, *cell) for kind in KINDS for cell in itertools.product(NB_PARTS, SCHEDULES, CHECKPOINTS)
]


def make(kind):
    torch.manual_seed(0)
    return NETS[kind]()


def optimizer_of(net):
    return torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)


def sizes_of(rows, chunks):
    chunks = min(rows, chunks)
    return [rows // chunks + (i < rows % chunks) for i in range(chunks)]


def plain_step(net, inputs, targets, chunks, loss_fn=F.cross_entropy, weight=1.0):
    """Gradient accumulation, as one writes it in plain PyTorch."""
    rows = len(targets)
    total, outputs, start = 0.0, [], 0
    for size in sizes_of(rows, chunks):
        cut = slice(start, start + size)
        start += size
        part = tree_map(
            lambda t, cut=cut: t[cut] if isinstance(t, torch.Tensor) and t.dim() else t, inputs
        )
        output = net(part)
        loss = loss_fn(output, targets[cut])
        (loss * (weight * size / rows)).backward()
        outputs.append(output.detach())
        total += float(loss.detach()) * size
    return outputs, total / rows


def recording(loss_fn=F.cross_entropy):
    outputs = []

    def wrapped(output, targets):
        outputs.append(output.detach())
        return loss_fn(output, targets)

    return outputs, wrapped


def assert_same_tensors(what, ours, theirs):
    ours, theirs = dict(ours), dict(theirs)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if value is None:
            assert ours[name] is None, f"{what}: {name} is not None"
            continue
        assert ours[name] is not None, f"{what}: {name} is None"
        assert torch.equal(ours[name], value), (
            f"{what}: {name} differs by {(ours[name] - value).abs().max():.2e}"
        )


def grads(net):
    return {name: p.grad for name, p in net.named_parameters()}


@pytest.mark.parametrize(("kind", "nb_part", "schedule", "checkpoint"), CELLS)
def test_steps_equal_the_unsplit_model_on_the_same_micro_batches(
    kind, nb_part, schedule, checkpoint
):
    plain = make(kind)
    ours = copy.deepcopy(plain)
    model = HybridModel(ours, world(nb_part), schedule=schedule, checkpoint=checkpoint)
    plain_optimizer, optimizer = optimizer_of(plain), optimizer_of(model)
    for seed, (chunks, rows) in enumerate(SHAPES):
        what = f"chunks {chunks}, rows {rows}"
        model.chunks = chunks
        inputs, targets = rows_of(kind, rows, seed), targets_of(rows, seed)
        expected, expected_loss = plain_step(plain, tree_map(_copy, inputs), targets, chunks)
        outputs, loss_fn = recording()
        out = model.train_step(inputs, targets, loss_fn)

        assert out.samples == rows
        # the same losses, weighted in float32 here and in Python's double precision there
        assert float(out.loss) == pytest.approx(expected_loss, rel=1e-6), what
        assert len(outputs) == len(expected)
        for i, (a, b) in enumerate(zip(outputs, expected, strict=True)):
            assert torch.equal(a, b), f"{what}: output of micro-batch {i}"
        assert_same_tensors(f"{what}, gradient", grads(ours), grads(plain))
        for each in (plain_optimizer, optimizer):
            each.step()
            each.zero_grad()
        # weights and buffers (running statistics) alike
        assert_same_tensors(f"{what}, after the step", model.state_dict(), plain.state_dict())


def _copy(leaf):
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_gradients_add_up_over_several_steps_with_their_weights(nb_part):
    plain = make("linear")
    ours = copy.deepcopy(plain)
    model = HybridModel(ours, world(nb_part), chunks=4)
    for seed, (rows, weight) in enumerate([(10, 0.5), (13, 1.75), (3, 0.25)]):
        inputs, targets = rows_of("linear", rows, seed), targets_of(rows, seed)
        plain_step(plain, inputs, targets, 4, weight=weight)
        model.train_step(inputs, targets, F.cross_entropy, weight=weight)
        assert_same_tensors(f"after batch {seed}", grads(ours), grads(plain))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("nb_part", [2, 3, 4, 5])
def test_dropout_draws_the_same_masks_for_every_split(nb_part, checkpoint, schedule):
    states = []
    for parts, check, name in [(1, "never", "gpipe"), (nb_part, checkpoint, schedule)]:
        net = make("dropout")
        model = HybridModel(net, world(parts), chunks=4, checkpoint=check, schedule=name, seed=5)
        optimizer = optimizer_of(model)
        for step in range(3):
            model.train_step(rows_of("transformer", 10, step), targets_of(10, step), _loss)
            optimizer.step()
            found = grads(net)
            optimizer.zero_grad()
        states.append((found, model.state_dict()))
    (grads_1, state_1), (grads_n, state_n) = states
    assert_same_tensors("gradient of the last step", grads_n, grads_1)
    assert_same_tensors("weights", state_n, state_1)


def _loss(output, targets):
    return F.cross_entropy(output, targets)


class Masks(nn.Module):
    """Notes down the mask of each of its micro-batches."""

    def __init__(self, drop):
        super().__init__()
        self.drop = drop
        self.seen = []
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.seen.append((self.drop(torch.ones(4, 32)) == 0).clone())
        return x * self.weight


def masks_of(steps=2, chunks=2, layers=2, seed=0, rank=0, start=0, nb_part=1, drop=None):
    """{(step, layer, micro-batch): mask}."""
    drop = drop or nn.Dropout(0.5)
    net = nn.Sequential(*[Masks(drop) for _ in range(layers)])
    alone = world(nb_part)
    replica = World("single", rank, 1, 0, alone.devices, "gloo", 60.0, None)
    model = HybridModel(net, replica, chunks=chunks, schedule="gpipe", seed=seed)
    model.rng.step = start
    for _ in range(steps):
        model.train_step(torch.ones(chunks, 1), None, lambda output, _: output.mean())
    return {
        (start + step, layer, i): net[layer].seen[step * chunks + i]
        for step in range(steps)
        for layer in range(layers)
        for i in range(chunks)
    }


DRAWS = {
    "dropout": nn.Dropout(0.5),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], None, 0.5)[0],
    "bernoulli": lambda x: torch.bernoulli(x / 2),
    "in place": lambda x: x.clone().bernoulli_(0.5),
    "rand": lambda x: (torch.rand(x.shape) > 0.5).float(),
    "randint": lambda x: torch.randint(0, 2, x.shape),
    "feature dropout": lambda x: F.dropout1d(x[None], 0.5)[0],
}


def fingerprint(mask):
    return tuple(mask.flatten().tolist())


def test_draws_differ_by_step_layer_and_micro_batch():
    masks = masks_of(steps=3, chunks=3, layers=3)
    assert len({fingerprint(mask) for mask in masks.values()}) == len(masks) == 27


@pytest.mark.parametrize("change", [{"rank": 1}, {"seed": 1}, {"start": 5}])
def test_draws_differ_by_replica_seed_and_step(change):
    seen = {fingerprint(mask) for mask in masks_of().values()}
    assert not seen & {fingerprint(mask) for mask in masks_of(**change).values()}


@pytest.mark.parametrize("name", DRAWS)
def test_every_kind_of_draw_is_seeded_whatever_the_default_generator(name):
    class Draw(nn.Module):
        def forward(self, x):
            return DRAWS[name](x)

    results = []
    for seed, nb_part in [(1, 1), (2, 2)]:
        torch.manual_seed(seed)  # must not matter
        results.append(masks_of(drop=Draw(), nb_part=nb_part))
    assert_same_tensors(name, *results)


def test_training_leaves_the_default_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    masks_of(nb_part=2)
    masks_of(drop=lambda x: F.dropout(x, 0.5))
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_are_the_same_again_once_the_step_is_put_back():
    all_five = masks_of(steps=5)
    last_two = masks_of(steps=2, start=3)
    assert_same_tensors("masks", last_two, {k: v for k, v in all_five.items() if k[0] >= 3})


def test_a_layer_that_begins_to_draw_later_is_seeded_after_train():
    drop = nn.Dropout(0.5)

    def run(seed):
        torch.manual_seed(seed)
        net = nn.Sequential(Masks(drop))
        model = HybridModel(net, world(1), chunks=2)
        x = torch.ones(2, 1)
        model.eval()
        model.train_step(x, None, lambda output, _: output.mean())  # draws nothing
        net.train()  # as a user may, not through the model
        model.train_step(x, None, lambda output, _: output.mean())
        return net[0].seen[2:]

    assert all(map(torch.equal, run(1), run(2)))


@pytest.mark.parametrize("kind", ["linear", "conv", "transformer"])
@pytest.mark.parametrize("nb_part", [1, 3])
@pytest.mark.parametrize("how", ["precision", "around"])
def test_a_step_in_bf16_equals_the_unsplit_model_under_the_same_autocast(kind, nb_part, how):
    plain = make(kind)
    ours = copy.deepcopy(plain)
    precision = "bf16" if how == "precision" else "fp32"
    model = HybridModel(ours, world(nb_part), chunks=4, precision=precision)
    inputs, targets = rows_of(kind, 10, 0), targets_of(10, 0)
    around = torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "around")
    outputs, loss_fn = recording()
    with around:
        model.train_step(inputs, targets, loss_fn)
    start = 0
    for i, size in enumerate(sizes_of(10, 4)):
        part = slice(start, start + size)
        start += size
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = plain(inputs[part])
            loss = F.cross_entropy(output, targets[part])
        (loss * (size / 10)).backward()
        assert output.dtype == outputs[i].dtype == torch.bfloat16
        assert torch.equal(outputs[i], output)
    assert_same_tensors("gradient", grads(ours), grads(plain))
    assert all(g.dtype == torch.float32 for g in grads(ours).values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nb_part", NB_PARTS)
def test_the_forward_in_eval_mode_equals_the_net_itself(kind, nb_part):
    net = make(kind)
    if kind == "conv":  # running statistics worth the name
        for seed in range(3):
            net(rows_of(kind, 16, 50 + seed))
    reference = copy.deepcopy(net).eval()
    model = HybridModel(net, world(nb_part), chunks=4).eval()
    before = copy.deepcopy(model.state_dict())
    for rows in (10, 13, 2):
        inputs = rows_of(kind, rows, rows)
        output = model(tree_map(_copy, inputs))
        assert not output.requires_grad
        expected = reference(tree_map(_copy, inputs)).detach()
        # the kernels choose their blocks by the number of rows: the last bits differ
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    assert_same_tensors("state", model.state_dict(), before)


def test_the_forward_gives_back_pytrees_of_all_rows():
    net = nn.Sequential(Open(), Middle())
    x = rows_of("linear", 10, 0)
    h, (mask, none, skips), _ = HybridModel(net, world(2), chunks=4).eval()(x)
    expected, (expected_mask, _, expected_skips), _ = net(x)
    torch.testing.assert_close(h, expected.detach())
    assert torch.equal(mask, expected_mask)
    assert none is None
    torch.testing.assert_close(skips["again"], expected_skips["again"].detach())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "conv"])
def test_without_batchnorm_chunking_changes_nothing(kind):
    results = []
    for chunks in (1, 4, 7):
        net = make(kind)
        model = HybridModel(net, world(2), chunks=chunks)
        out = model.train_step(rows_of(kind, 13, 0), targets_of(13, 0), F.cross_entropy)
        results.append((float(out.loss), grads(net)))
    (loss, whole), *others = results
    for other_loss, parts in others:
        # the same sums over 13 rows, in another order
        assert other_loss == pytest.approx(loss, rel=1e-5)
        for name, value in whole.items():
            torch.testing.assert_close(parts[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_the_loss_of_a_ragged_batch_counts_every_row_once():
    net = nn.Sequential(nn.Identity(), nn.Linear(1, 1, bias=False))
    model = HybridModel(net, world(2), chunks=4)
    x = torch.arange(10.0)[:, None] ** 2
    out = model.train_step(x, None, lambda output, _: output.mean())
    # a mean of the means of 3, 3, 2 and 2 rows would be another number
    torch.testing.assert_close(out.loss, net(x).mean().detach())
    torch.testing.assert_close(net[1].weight.grad, x.mean().reshape(1, 1))


def test_a_net_in_double_precision_keeps_its_precision():
    net = linear_net().double()
    model = HybridModel(net, world(2), chunks=4)
    x, targets = rows_of("linear", 10, 0).double(), targets_of(10, 0)
    out = model.train_step(x, targets, F.cross_entropy)
    expected = F.cross_entropy(net(x), targets).detach()
    assert out.loss.dtype == torch.float64
    # sums of 10 rows in another order
    torch.testing.assert_close(out.loss, expected, rtol=1e-13, atol=0)


def test_frozen_layers_get_no_gradient_and_change_nothing_else():
    plain = make("linear")
    for layer in (0, 2):  # all that is in stage 0, and half of stage 1
        plain[layer].requires_grad_(False)
    ours = copy.deepcopy(plain)
    model = HybridModel(ours, world(3), chunks=4, split=[2, 2, 2])
    inputs, targets = rows_of("linear", 10, 0), targets_of(10, 0)
    plain_step(plain, inputs, targets, 4)
    model.train_step(inputs, targets, F.cross_entropy)
    assert grads(ours)["0.weight"] is None
    assert_same_tensors("gradient", grads(ours), grads(plain))


def test_tied_weights_in_two_stages_get_the_gradients_of_both_uses():
    def tied():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
        net[2].weight = net[0].weight
        return net

    plain, ours = tied(), tied()
    model = HybridModel(ours, world(2), chunks=4)
    inputs, targets = rows_of("linear", 10, 0), targets_of(10, 0)
    plain_step(plain, inputs, targets, 4)
    model.train_step(inputs, targets, F.cross_entropy)
    for name, value in grads(plain).items():
        # two threads add to the same gradient, in an order of their own
        torch.testing.assert_close(grads(ours)[name], value, rtol=1e-5, atol=1e-6)


def test_the_users_net_keeps_its_names_and_takes_the_state_back():
    net = conv_net()
    model = HybridModel(net, world(3), chunks=2)
    assert list(model.state_dict()) == list(conv_net().state_dict())
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in conv_net().named_parameters()
    ]
    other = conv_net()
    other.load_state_dict(model.state_dict())
    assert_same_tensors("state", other.state_dict(), net.state_dict())
    assert len(tree_leaves(list(model.parameters()))) == len(list(net.parameters()))


def test_the_inputs_of_the_caller_are_not_changed_where_the_net_does_not_change_them():
    x = rows_of("linear", 10, 0)
    before = x.clone()
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))
    HybridModel(net, world(3), chunks=4).train_step(x, targets_of(10, 0), F.cross_entropy)
    assert torch.equal(x, before)


@pytest.mark.parametrize("nb_part", [1, 2])
def test_a_first_layer_that_overwrites_the_batch_is_recomputed_from_the_batch(nb_part):
    def make_net():
        torch.manual_seed(0)
        return nn.Sequential(nn.LeakyReLU(0.3, inplace=True), nn.Linear(6, 6), nn.Linear(6, 3))

    plain, ours = make_net(), make_net()
    model = HybridModel(ours, world(nb_part), chunks=4, checkpoint="always")
    x, targets = rows_of("linear", 10, 0), targets_of(10, 0)
    plain_step(plain, x.clone(), targets, 4)
    model.train_step(x, targets, F.cross_entropy)
    for name, value in grads(plain).items():
        # the stage works on copies, whose memory is aligned unlike that of the batch's views
        torch.testing.assert_close(grads(ours)[name], value, rtol=1e-5, atol=1e-6, msg=name)
