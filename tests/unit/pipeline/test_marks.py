"""Marks: which modules `partition` and `set_partition` reach, and which stages marks describe."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from hybridtrain.errors import SplitError
from hybridtrain.graph import Layer, layers_of
from hybridtrain.partitioning import partition, set_partition
from hybridtrain.partitioning.manual_split import (
    counts_by_marks,
    has_marks,
    marked_stage,
    spans_stages,
)


def mark(module):
    return marked_stage(module, "", None)


def marks(net):
    return {name: marked_stage(net, name, None) for name, _ in net.named_modules()}


class Grouped(nn.Module):
    """As in a user's file: `self` is made outside, its parts inside."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(2)
        with partition(0):
            self.encoder = nn.Linear(2, 2)
            self.scale = nn.Parameter(torch.ones(2))
            self.register_buffer("shift", torch.zeros(2))
        with partition(1):
            self.decoder = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
            self.act = nn.ReLU()


def test_modules_made_in_a_partition_are_marked_and_the_one_around_them_is_not():
    assert marks(Grouped()) == {
        "": None,
        "norm": None,
        "encoder": 0,
        "decoder": 1,
        "decoder.0": 1,
        "decoder.1": 1,
        "act": 1,
    }


def test_the_default_stage_is_for_modules_with_no_mark_around_them_either():
    net = Grouped()
    assert marked_stage(net, "norm", 3) == 3
    assert marked_stage(net, "decoder.0", 3) == 1
    assert marked_stage(net, "encoder@2", 3) == 0
    net.decoder.append(nn.Tanh())
    assert marked_stage(net, "decoder.2", 3) == 1


def test_an_operation_in_a_forward_goes_with_the_module_around_it():
    assert marked_stage(Grouped(), "decoder.add_1", 3) == 1
    assert marked_stage(Grouped(), "add_1", 3) == 3


def test_the_innermost_partition_counts_also_for_parts_of_a_module_further_out():
    with partition(0):
        with partition(1):
            inner, act = nn.Linear(2, 2), nn.ReLU()
        outer = nn.Sequential(inner, act, nn.Linear(2, 2))
    assert marks(outer) == {"": 0, "0": 1, "1": 1, "2": 0}


def test_a_mark_depends_on_where_a_module_is_made_not_on_where_it_is_assigned():
    net, outside = nn.Module(), nn.ReLU()
    with partition(1):
        net.outside = outside
        inside = nn.ReLU()
    net.inside = inside
    assert marks(net) == {"": None, "outside": None, "inside": 1}


def test_modules_that_a_function_makes_in_a_partition_are_marked_with_all_their_parts():
    def build():
        return nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2), 2, enable_nested_tensor=False
        )

    with partition(2):
        net = build()
    assert set(marks(net).values()) == {2}
    assert all(part.__dict__["_pipeline_stage"] == 2 for part in net.modules())


def test_a_copy_keeps_the_marks_outside_a_partition():
    net = Grouped()
    assert marks(copy.deepcopy(net)) == marks(net)
    assert mark(copy.copy(net.act)) == 1
    assert marks(pickle.loads(pickle.dumps(net))) == marks(net)


def test_a_copy_made_in_a_partition_is_marked_for_that_one():
    with partition(0):
        lower = nn.Sequential(nn.Linear(2, 2))
    with partition(1):
        upper = copy.deepcopy(lower)
        restored = pickle.loads(pickle.dumps(lower))
        gru = copy.deepcopy(nn.GRU(2, 2))
    assert set(marks(upper).values()) == set(marks(restored).values()) == {1}
    assert set(marks(lower).values()) == {0}
    assert mark(gru) == 1


def test_a_mark_shows_in_no_state_dict_and_no_repr():
    with partition(1):
        marked = nn.Linear(2, 2)
    plain = nn.Linear(2, 2)
    assert list(marked.state_dict()) == list(plain.state_dict())
    assert repr(marked) == repr(plain)
    plain.load_state_dict(marked.state_dict())
    assert mark(plain) is None


def test_a_compiled_module_has_the_mark_of_the_module_it_wraps():
    with partition(1):
        module = nn.Linear(2, 2)
    assert mark(torch.compile(module, backend="eager")) == 1
    with partition(2):
        assert mark(torch.compile(module, backend="eager")) == 2
        assert mark(torch.fx.symbolic_trace(module)) == 2


def test_tied_modules_share_a_mark_and_tied_parameters_have_those_of_their_modules():
    net = nn.Module()
    with partition(0):
        net.embed = nn.Linear(2, 2, bias=False)
    with partition(1):
        net.head = nn.Linear(2, 2, bias=False)
        net.decoder = nn.Sequential(net.embed, nn.Linear(2, 2))
        net.head.weight = net.embed.weight
    assert marked_stage(net, "decoder.0", None) == marked_stage(net, "embed", None) == 0
    assert spans_stages(net.decoder)
    layers = [Layer("embed", net.embed), Layer("head", net.head)]
    assert counts_by_marks(net, layers, 2, None) == [1, 1]


def test_an_exception_in_a_partition_leaves_no_patched_method_behind():
    init, setstate = nn.Module.__init__, nn.Module.__setstate__

    def fail():
        with partition(0), partition(1):
            assert nn.Module.__init__ is not init
            raise RuntimeError("in the model")

    with pytest.raises(RuntimeError, match="in the model"):
        fail()
    assert nn.Module.__init__ is init
    assert nn.Module.__setstate__ is setstate
    assert mark(nn.ReLU()) is None
    with partition(0):
        with pytest.raises(RuntimeError, match="in the model"):
            fail()
        assert mark(nn.ReLU()) == 0
    assert nn.Module.__init__ is init


def test_a_partition_marks_only_modules_that_its_own_thread_makes():
    init = nn.Module.__init__
    made = {}
    entered, left = threading.Event(), threading.Event()

    def other():
        made["none"] = nn.ReLU()
        with partition(2):
            entered.set()
            assert left.wait(60)
            made["two"] = nn.ReLU()

    with partition(1):
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(60)
        made["one"] = nn.ReLU()
    # the first to enter is not the last to leave
    made["after"] = nn.ReLU()
    left.set()
    thread.join()
    assert {name: mark(module) for name, module in made.items()} == {
        "none": None,
        "one": 1,
        "two": 2,
        "after": None,
    }
    assert nn.Module.__init__ is init


def test_set_partition_marks_the_parts_of_a_module_unless_they_are_marked_otherwise():
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    set_partition(net[1], 2)
    set_partition(net, 1)
    assert marks(net) == {"": 1, "0": 1, "1": 2, "1.0": 2}


def test_set_partition_moves_modules_that_were_made_in_one_partition_together():
    with partition(0):
        net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
        with partition(2):
            net.append(nn.Linear(2, 2))
    set_partition(net, 1)
    assert marks(net) == {"": 1, "0": 1, "1": 1, "1.0": 1, "2": 2}


@pytest.mark.parametrize("index", [-1, 1.0, "1", True, None])
def test_a_partition_that_is_not_an_index_is_refused(index):
    with pytest.raises(SplitError, match=r"partition .*: give the index of a stage, 0 for"):
        set_partition(nn.ReLU(), index)
    with pytest.raises(SplitError, match="give the index"), partition(index):
        pass
    assert mark(nn.ReLU()) is None


def test_has_marks_looks_at_every_depth():
    net = nn.Sequential(nn.Sequential(nn.ReLU()))
    assert not has_marks(net)
    set_partition(net[0][0], 0)
    assert has_marks(net)


def test_a_module_spans_stages_if_it_has_state_or_marks_for_several():
    net = Grouped()
    assert spans_stages(net)
    assert not spans_stages(net.decoder)
    assert not spans_stages(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))

    with partition(0):
        container = nn.Sequential()
        with partition(1):
            container.append(nn.Linear(2, 2))
    assert not spans_stages(container), "a container without parameters is nowhere itself"
    container.scale = nn.Parameter(torch.ones(2))
    assert spans_stages(container), "its own parameters are"

    wrapped = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))
    set_partition(wrapped[1], 1)
    assert not spans_stages(wrapped), "what has neither state nor mark goes anywhere"
    set_partition(wrapped[0], 0)
    assert spans_stages(wrapped), "a mark is meant, also without state"


def test_state_without_a_mark_counts_for_the_default_stage():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    set_partition(net[1], 1)
    assert spans_stages(net)
    assert spans_stages(net, default=0)
    assert not spans_stages(net, default=1)


def chain(*stages):
    """Linear layers marked for `stages` or, for None, not; `~i` and `...` are ReLUs."""
    modules = []
    for stage in stages:
        if stage is ... or (stage is not None and stage < 0):
            modules.append(nn.ReLU())
        else:
            modules.append(nn.Linear(2, 2))
        if stage is not None and stage is not ...:
            set_partition(modules[-1], stage if stage >= 0 else ~stage)
    return nn.Sequential(*modules)


def counts(net, stages, default=None):
    return counts_by_marks(net, layers_of(net), stages, default)


@pytest.mark.parametrize(
    ("stages", "default", "expected"),
    [
        ([0, 0, 1, 1, 1], None, [2, 3]),
        ([0, 1, 2], None, [1, 1, 1]),
        ([0, ~0, ~1, 1], None, [2, 2]),
        ([None, 0, 1], 0, [2, 1]),
        ([0, None, 2], 1, [1, 1, 1]),
        ([0, 0, 0], None, [3]),
    ],
)
def test_layers_go_where_their_marks_say_and_the_others_to_the_default(stages, default, expected):
    assert counts(chain(*stages), len(expected), default) == expected


@pytest.mark.parametrize(
    ("stages", "default", "expected"),
    [
        ([..., 0, ..., 1, ...], None, [3, 2]),
        ([..., 0, ..., ..., 1, ...], 0, [4, 2]),
        ([..., 0, ..., 1, ...], 1, [2, 3]),
        ([0, ..., 2], 1, [1, 1, 1]),
        ([0, ...], 1, [1, 1]),
    ],
)
def test_a_layer_without_state_or_mark_is_as_near_to_the_default_as_the_order_allows(
    stages, default, expected
):
    assert counts(chain(*stages), len(expected), default) == expected


@pytest.mark.parametrize("suffix", ["", "@2"])
def test_a_stateless_layer_that_runs_again_stays_on_the_later_stage(suffix):
    net = chain(0, ~0, 1)
    layers = layers_of(net)
    again = net[1] if not suffix else nn.Sequential(net[1])
    assert counts_by_marks(net, [*layers, Layer(f"1{suffix}", again)], 2, None) == [2, 2]


def test_a_module_with_state_that_runs_again_cannot_be_on_two_stages():
    net = chain(0, 1)
    layers = [*layers_of(net), Layer("0@2", net[0])]
    with pytest.raises(SplitError, match=r"layer '0@2' .*stage 0 .*'1'"):
        counts_by_marks(net, layers, 2, None)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.act = nn.ReLU()


def test_a_layer_goes_where_the_marks_of_its_parts_say():
    net = nn.Sequential(nn.Linear(2, 2), Whole())
    set_partition(net[0], 0)
    set_partition(net[1].inner, 1)
    assert counts(net, 2) == [1, 1]


def test_a_segment_of_a_forward_goes_with_the_modules_and_parameters_in_it():
    net = Grouped()
    set_partition(net.norm, 0)
    first = nn.Module()
    first.deep = nn.Module()
    first.deep.norm = net.norm
    second = nn.Module()
    second.graph = nn.Module()
    second.graph.weight = net.decoder[0].weight
    second.graph.register_buffer("constant", torch.ones(2))
    layers = [Layer("first", first), Layer("mul", nn.Module()), Layer("decoder.1", second)]
    assert counts_by_marks(net, layers, 2, None) == [2, 1]
    layers.insert(2, Layer("decoder.add", nn.Module()))
    assert counts_by_marks(net, layers, 2, None) == [2, 2]


def test_a_layer_without_state_goes_with_the_marks_in_it():
    net = nn.Sequential(nn.Linear(2, 2), Whole())
    net[1].inner = nn.Tanh()
    set_partition(net[0], 0)
    set_partition(net[1], 0)
    set_partition(net[1].inner, 1)
    set_partition(net[1].act, 1)
    assert counts(net, 2) == [1, 1]


def test_a_mark_on_a_group_of_layers_is_for_each_of_them():
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.ReLU()))
    set_partition(net[0], 0)
    set_partition(net[1], 1)
    assert counts(net, 2) == [2, 1]


@pytest.mark.parametrize(
    ("stages", "default", "message"),
    [
        ([None, None], None, r"no module of the model has a partition: make modules inside `with"),
        (
            [0, None, 1],
            None,
            r"layer '1' has no partition: put its construction into `with partition\(i\):`, call "
            r"set_partition, or set default_partition=$",
        ),
        (
            [0, 1, 0],
            None,
            r"layer '2' .*stage 0 .*'1' on stage 1: .*'2' .*'1'",
        ),
        (
            [0, 1, ~0],
            None,
            r"layer '2' .*stage 0 .*'1'",
        ),
        ([0, 2], None, r"layer '1' .*stage 2, .*stages 0 and 1"),
        ([..., 1], None, r"2 stages .*stage 0: .*nb_part="),
        ([0, 0], None, r"2 stages .*stage 1: .*nb_part="),
        ([0, None], 2, r"^default_partition=2, but there are stages 0 and 1"),
        ([0, None], -1, r"^default_partition=-1, but there are stages 0 and 1"),
    ],
)
def test_marks_that_do_not_fit_say_what_would(stages, default, message):
    with pytest.raises(SplitError, match=message):
        counts(chain(*stages), 2, default)


def test_layers_without_a_mark_go_as_near_to_the_default_as_the_order_allows(caplog):
    with caplog.at_level("INFO", logger="hybridtrain"):
        assert counts(chain(None, 0, None, 1, None, None), 2, 0) == [3, 3]
        assert counts(chain(None, 0, None, 1, None), 2, 1) == [2, 3]
    said = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert said == [
        "4 has no partition and goes to stage 1",
        "5 has no partition and goes to stage 1",
        "0 has no partition and goes to stage 0",
    ]


def test_an_error_names_the_possible_stages_whatever_their_number():
    with pytest.raises(SplitError, match=r"there is only stage 0"):
        counts(chain(0, 1), 1)
    with pytest.raises(SplitError, match=r"there are stages 0 to 3"):
        counts(chain(0, 4), 4)
    with pytest.raises(SplitError, match=r"stage 1 and 3:"):
        counts(chain(0, 2), 4)


def test_a_layer_with_parts_for_several_stages_is_refused():
    net = nn.Sequential(nn.Linear(2, 2), Whole())
    net[1].outer = nn.Linear(2, 2)
    set_partition(net[0], 0)
    set_partition(net[1].inner, 1)
    set_partition(net[1].outer, 0)
    with pytest.raises(SplitError, match=r"'1' .*stages 0 and 1:"):
        counts(net, 2)
    net[1].third = nn.Linear(2, 2)
    set_partition(net[1].third, 3)
    with pytest.raises(SplitError, match=r"'1' .*stages 0, 1 and 3:"):
        counts(net, 4)
