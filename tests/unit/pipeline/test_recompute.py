"""Recomputation: the recomputed layers, and that nothing but memory and time can tell."""

import copy
import weakref
from collections import OrderedDict
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from support.compare import (
    CHUNKS,
    assert_same,
    assert_same_gradients,
    grads,
    hybrid,
    plain_step,
)
from support.engine import float_mse
from support.nets import WIDTH, floats, regression
from torch import nn

from hybridtrain.errors import ConfigError
from hybridtrain.graph import layers_of
from hybridtrain.partitioning import recompute_policy

RECOMPUTING = ["except_last", "always", {"every": 1}, {"every": 2}, ["1"]]
NB_PARTS = [1, 2, 4]

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

NAMES = ["embed", "blocks.0", "blocks.1", "blocks.10", "blocks2.0", "head"]


@pytest.mark.parametrize(
    ("spec", "whole"),
    [
        ("never", [False] * 4),
        ("except_last", [True, True, True, False]),
        ("always", [True] * 4),
        ({"every": 2}, [False] * 4),
        (["head"], [False] * 4),
    ],
    ids=str,
)
def test_whole_stages_are_recomputed_for_the_micro_batches_of_the_mode(spec, whole):
    policy = recompute_policy(spec, NAMES)
    assert [i in policy.whole_stages(4) for i in range(4)] == whole
    assert bool(policy.whole_stages(1)) is (spec == "always")


@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        ("never", set()),
        ("except_last", set()),
        ("always", set()),
        ({"every": 1}, {0, 1, 2, 3, 4, 5}),
        ({"every": 2}, {0, 2, 4}),
        ({"every": 4}, {0, 4}),
        ({"every": 99}, {0}),
        (["head"], {5}),
        (["blocks"], {1, 2, 3}),
        (["blocks.1"], {2}),
        (["blocks2", "embed"], {0, 4}),
        (["blocks", "blocks.0"], {1, 2, 3}),
        (("embed",), {0}),
        ([], set()),
    ],
    ids=str,
)
def test_every_kth_layer_and_names_of_layers_and_groups_choose_layers(spec, layers):
    assert recompute_policy(spec, NAMES).layers == layers


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sometimes", r"recompute=sometimes is unknown: use never, except_last, always"),
        ({"every": 0}, r"use \{every: k\} with k of 1 or more"),
        ({"every": -1}, r"use \{every: k\} with k of 1 or more"),
        ({"every": "2"}, r"use \{every: k\} with k of 1 or more"),
        ({"every": 1.5}, r"use \{every: k\} with k of 1 or more"),
        ({"each": 2}, r"use \{every: k\} with k of 1 or more"),
        ({"every": 2, "first": 1}, r"use \{every: k\} with k of 1 or more"),
        ({}, r"use \{every: k\} with k of 1 or more"),
        (["block"], r"there is no layer 'block'; did you mean 'blocks\.1'"),
        (["head", "tail"], r"there is no layer 'tail'"),
        (["blocks.2"], r"there is no layer 'blocks\.2'"),
    ],
    ids=str,
)
def test_an_unknown_policy_is_refused_with_the_known_ones(spec, message):
    blocks = {name: nn.Linear(6, 6) for name in ("0", "1", "10")}
    groups = {"blocks": nn.Sequential(OrderedDict(blocks)), "blocks2": nn.Sequential(nn.Tanh())}
    net = nn.Sequential(OrderedDict(embed=nn.Linear(6, 6), **groups, head=nn.Linear(6, 6)))
    assert [layer.name for layer in layers_of(net)] == NAMES
    with pytest.raises(ConfigError, match=message):
        hybrid(net, recompute=spec)


class Log:
    """What layers note for the test; their own lists and objects are restored for a second run."""

    __slots__ = ("entries",)  # nothing restores what has no `__dict__`

    def __init__(self):
        self.entries = []

    def append(self, entry):
        self.entries.append(entry)

    def clear(self):
        self.entries.clear()

    def __len__(self):
        return len(self.entries)

    def __iter__(self):
        return iter(self.entries)

    def __getitem__(self, index):
        return self.entries[index]


class Counted(nn.Module):
    """Notes down, at each of its runs, what `look` finds there."""

    def __init__(self, look=lambda x: None):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.look = look
        self.seen = Log()

    def forward(self, x):
        self.seen.append(self.look(x))
        return torch.tanh(self.linear(x))


def counted(look=lambda x: None, layers=4):
    torch.manual_seed(0)
    return nn.Sequential(*[Counted(look) for _ in range(layers)])


@pytest.mark.parametrize("nb_part", NB_PARTS)
@pytest.mark.parametrize(
    ("recompute", "runs"),
    [
        ("never", [4, 4, 4, 4]),
        ("except_last", [7, 7, 7, 7]),
        ("always", [8, 8, 8, 8]),
        ({"every": 2}, [8, 4, 8, 4]),
        ({"every": 3}, [8, 4, 4, 8]),
        (["1", "3"], [4, 8, 4, 8]),
    ],
    ids=str,
)
@pytest.mark.quick_cases(5)
def test_layers_that_the_policy_chose_run_twice_and_the_rest_once(recompute, runs, nb_part):
    net = counted()
    model = hybrid(net, nb_part, recompute=recompute)
    model.train_step(*regression(10), F.mse_loss)
    assert [len(layer.seen) for layer in net] == runs


@pytest.mark.parametrize("recompute", RECOMPUTING, ids=str)
def test_a_forward_alone_recomputes_nothing(recompute):
    net = counted()
    hybrid(net, recompute=recompute)(regression(10)[0])
    assert [len(layer.seen) for layer in net] == [CHUNKS] * 4


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("recompute", ["never", *RECOMPUTING], ids=str)
@pytest.mark.parametrize("nb_part", NB_PARTS)
@pytest.mark.quick_cases(3)
def test_autocast_is_the_same_when_layers_are_recomputed(nb_part, recompute, precision):
    def look(x):
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), x.dtype

    results = []
    for check in ("never", recompute):
        net = counted(look)
        model = hybrid(net, nb_part, recompute=check, precision=precision)
        model.train_step(*regression(10), float_mse)
        results.append((grads(net), [set(layer.seen) for layer in net]))
    (expected, seen), (mine, seen_twice) = results
    assert seen == seen_twice
    assert {enabled for each in seen for enabled, *_ in each} == {precision != "fp32"}
    assert_same(mine, expected)


@pytest.mark.parametrize("recompute", RECOMPUTING, ids=str)
@pytest.mark.parametrize("nb_part", NB_PARTS)
@pytest.mark.quick_cases(2)
def test_random_draws_are_the_same_when_layers_are_recomputed(nb_part, recompute):
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.seen = Log()

        def forward(self, x):
            mask = F.dropout(torch.ones(64), 0.5)
            self.seen.append(mask)
            return self.linear(F.dropout(x, 0.3)) * mask[:WIDTH] + torch.rand(WIDTH)

    torch.manual_seed(0)
    net = nn.Sequential(*[Drops() for _ in range(4)])
    twin = copy.deepcopy(net)
    model = hybrid(net, nb_part, recompute=recompute, seed=3)
    never = hybrid(twin, nb_part, seed=3)
    for seed in range(2):
        for layer in net:
            layer.seen.clear()
        model.train_step(*regression(10, seed), F.mse_loss)
        never.train_step(*regression(10, seed), F.mse_loss)
        for layer in net:
            drawn = {tuple(mask.tolist()) for mask in layer.seen}
            assert len(drawn) == CHUNKS
    assert_same(grads(net), grads(twin))


def normed(momentum):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH, momentum=momentum),
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
        nn.BatchNorm1d(WIDTH, momentum=momentum),
        nn.Linear(WIDTH, WIDTH),
    )


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("recompute", ["never", *RECOMPUTING, ["1", "3"]], ids=str)
@pytest.mark.parametrize("nb_part", NB_PARTS)
@pytest.mark.quick_cases(3)
def test_batch_norm_statistics_move_once_per_micro_batch(nb_part, recompute, momentum):
    net = normed(momentum)
    plain = copy.deepcopy(net)
    model = hybrid(net, nb_part, recompute=recompute)
    for seed in range(2):
        x, y = regression(10, seed)
        plain_step(plain, x, y)
        model.train_step(x, y, F.mse_loss)
        assert_same(net.state_dict(), plain.state_dict())
        # a stage that may work in place gets copies, whose memory is aligned otherwise
        assert_same_gradients(net, plain, rtol=1e-5, atol=1e-6)
    assert int(net[1].num_batches_tracked) == 2 * CHUNKS


@pytest.mark.parametrize("recompute", RECOMPUTING, ids=str)
@pytest.mark.parametrize("which", [(1,), (1, 3)], ids=str)
@pytest.mark.quick_cases(3)
def test_norms_frozen_in_eval_mode_stay_as_they_are(which, recompute):
    net = normed(0.1)
    plain = copy.deepcopy(net)
    model = hybrid(net, 2, recompute=recompute)
    for each in (net, plain):
        for index in which:
            each[index].eval()
    before = {i: {k: v.clone() for k, v in net[i].named_buffers()} for i in which}
    x, y = regression(10)
    plain_step(plain, x, y)
    model.train_step(x, y, F.mse_loss)
    for index in which:
        assert_same(net[index].named_buffers(), before[index])
    assert_same(net.state_dict(), plain.state_dict())
    assert_same_gradients(net, plain)


@pytest.mark.parametrize("recompute", ["never", *RECOMPUTING], ids=str)
def test_instance_norm_statistics_move_once_per_micro_batch(recompute):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv1d(2, 2, 1), nn.InstanceNorm1d(2, track_running_stats=True), nn.Conv1d(2, 2, 1)
    )
    plain = copy.deepcopy(net)
    x, y = floats(10, 2, 5) + 3, floats(10, 2, 5, seed=1)
    plain_step(plain, x, y)
    hybrid(net, 3, recompute=recompute).train_step(x, y, F.mse_loss)
    assert_same(net.state_dict(), plain.state_dict())


class Keeps(nn.Module):
    """Makes one tensor that its backward needs, beside its input and output."""

    alive: ClassVar = []  # of all layers

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        inner = self.first(x)
        self.alive.append(weakref.ref(inner))
        return self.last(inner.sin())


def kept(recompute):
    """What is alive of eight layers, four micro-batches, before the first backward of GPipe."""
    Keeps.alive = []
    net = nn.Sequential(*[Keeps() for _ in range(8)])
    model = hybrid(net, 1, recompute=recompute, schedule="gpipe")
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
    x, counts, sizes = torch.randn(16, 64), [], []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            sizes.append(tensor.nbytes)
        return tensor

    def counting(output, y):
        counts.append((sum(ref() is not None for ref in Keeps.alive), sum(sizes)))
        return F.mse_loss(output, y)

    model.train_step(x, x, F.mse_loss)  # the model counts in the first step, with hooks too
    Keeps.alive = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.train_step(x, x, counting)
    return *counts[-1], model.memory_bytes()[0]


def test_activations_that_are_recomputed_are_not_kept():
    specs = ["never", {"every": 2}, "except_last", "always"]
    tensors, saved, told = zip(*map(kept, specs), strict=True)
    assert tensors == (32, 16, 8, 0)
    assert saved[0] > saved[1] > saved[2] > saved[3] >= 0
    # the model tells from a single micro-batch, which `except_last` does not recompute
    assert told[0] > told[1] > told[3]
