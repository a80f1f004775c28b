"""A batch in micro-batches and back."""

from collections import UserDict
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten

from hybridtrain import shared
from hybridtrain._base.microbatch import batch_size, chunk_sizes, merge, split
from hybridtrain.errors import BatchError


def batch_of(rows):
    return (
        torch.arange(rows * 3.0).reshape(rows, 3),
        {"ids": torch.arange(rows), "mask": torch.arange(rows) % 2 == 0, "none": None},
        [torch.arange(rows * 4).reshape(rows, 2, 2), 7, "name"],
    )


def assert_same(a, b):
    (leaves_a, spec_a), (leaves_b, spec_b) = tree_flatten(a), tree_flatten(b)
    assert spec_a == spec_b
    for x, y in zip(leaves_a, leaves_b, strict=True):
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)
        else:
            assert x == y


@given(st.integers(1, 60), st.integers(1, 40))
def test_micro_batches_are_even_and_not_empty_and_at_most_chunks(rows, chunks):
    sizes = chunk_sizes(rows, chunks)
    assert sum(sizes) == rows
    assert len(sizes) == min(rows, chunks)
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(1, 30), st.integers(1, 12))
def test_merging_what_was_split_gives_the_batch_back(rows, chunks):
    batch = batch_of(rows)
    sizes = chunk_sizes(rows, chunks)
    parts = split(batch, sizes)
    assert len(parts) == len(sizes)
    assert [batch_size(part) for part in parts] == sizes
    assert_same(merge(parts), batch)


@given(st.integers(1, 30), st.integers(1, 12))
def test_a_batch_of_a_single_tensor_is_split_and_merged(rows, chunks):
    batch = torch.arange(rows * 2).reshape(rows, 2)
    parts = split(batch, chunk_sizes(rows, chunks))
    assert [len(part) for part in parts] == chunk_sizes(rows, chunks)
    assert torch.equal(merge(parts), batch)


def test_splitting_keeps_the_order_of_samples():
    parts = split({"x": torch.arange(10)}, [3, 3, 2, 2])
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


def test_splitting_copies_nothing():
    x = torch.zeros(6, 2)
    for part in split((x,), [2, 2, 2]):
        part[0].add_(1)
    assert torch.equal(x, torch.ones(6, 2))


@pytest.mark.parametrize("value", [None, 3, "text", (), {}, {"a": None}, torch.tensor(5.0)])
def test_values_without_a_batch_dimension_go_to_every_micro_batch(value):
    parts = split(value, [2, 2, 1])
    assert len(parts) == 3
    for part in parts:
        assert_same(part, value)


def test_merging_stacks_scalars_and_keeps_constants_that_are_equal():
    nan = float("nan")
    outputs = [(torch.full((2, 1), i), torch.tensor(float(i)), 7, None, nan) for i in range(3)]
    rows, scalars, number, none, not_a_number = merge(outputs)
    assert rows.flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert scalars.tolist() == [0.0, 1.0, 2.0]
    assert (number, none) == (7, None)
    assert not_a_number != not_a_number


class Bag(dict):
    """A subclass of dict, which pytree functions do not enter."""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((2, 3), r"output\['n'\] is 2 in one micro-batch and 3 in another"),
        ((1, True), "is 1 in one micro-batch and True in another"),
        (("a", "b"), "'a' in one micro-batch and 'b'"),
        ((None, torch.zeros(2)), "is a Tensor"),
        ((numpy.zeros(2), numpy.zeros(2)), "is a ndarray"),
        ((Bag(x=1), Bag(x=1)), "is a Bag"),
        ((torch.zeros(2, 3), torch.zeros(2, 4)), r"has the shapes \(2, 3\), \(2, 4\)"),
    ],
    ids=str,
)
def test_what_only_one_micro_batch_could_give_is_refused_by_name(values, message):
    with pytest.raises(BatchError, match=message):
        merge([{"n": value} for value in values])


def test_outputs_of_different_structure_cannot_be_merged():
    with pytest.raises(BatchError, match="different structure"):
        merge([(torch.zeros(1),), [torch.zeros(1)]])


@pytest.mark.parametrize(
    ("batches", "leaf"),
    [
        (({"x": torch.zeros(4, 2), "mask": torch.zeros(3)},), r"batch\['mask'\] has shape \(3,\)"),
        (((torch.zeros(4), [torch.zeros(4), torch.zeros(5, 1)]),), r"batch\[1\]\[1\] has shape"),
        ((torch.zeros(4, 2), torch.zeros(3)), r"has shape \(3,\), others have 4"),
        ((torch.zeros(4, 2), {"label": torch.zeros(6)}), r"batch\['label'\] has shape \(6,\)"),
    ],
)
def test_tensors_of_different_numbers_of_samples_are_refused_by_name(batches, leaf):
    with pytest.raises(BatchError, match=leaf):
        batch_size(*batches)


@pytest.mark.parametrize(
    "batches",
    [
        (None,),
        ((),),
        ({"n": 3},),
        (torch.tensor(1.0),),
        (torch.zeros(0, 3),),
        ({"x": torch.zeros(0, 3)}, torch.zeros(0)),
    ],
)
def test_a_batch_without_samples_is_refused(batches):
    with pytest.raises(BatchError, match="at least one tensor with at least one"):
        batch_size(*batches)


def test_the_batch_size_is_the_one_that_all_tensors_share():
    assert batch_size(torch.zeros(5, 2)) == 5
    assert batch_size((None, 3, torch.tensor(1.0), {"x": torch.zeros(7)}), torch.zeros(7, 1)) == 7
    assert batch_size(torch.zeros(4), None) == 4


def test_names_and_arrays_of_the_samples_are_cut_with_them():
    batch = {
        "x": torch.arange(5),
        "names": list("abcde"),
        "rows": [{"id": number} for number in range(5)],
        "weights": numpy.arange(5.0),
        "size": [32, 32],
    }
    first, second = split(batch, [3, 2])
    assert (first["names"], second["names"]) == (["a", "b", "c"], ["d", "e"])
    assert [row["id"] for row in second["rows"]] == [3, 4]
    assert second["weights"].tolist() == [3.0, 4.0]
    assert first["size"] == second["size"] == [32, 32]


def test_what_is_shared_goes_whole_to_every_micro_batch():
    mask, names = torch.ones(5, 5), ["a", "b", "c", "d"]
    batch = ({"x": torch.arange(4), "mask": shared(mask)}, shared(names), shared({"t": mask}))
    assert batch_size(batch) == 4
    for sizes in ([3, 1], [4]):
        for inputs, own_names, table in split(batch, sizes):
            assert inputs["mask"] is mask
            assert own_names is names
            assert table["t"] is mask


def test_a_tensor_that_is_not_cut_has_the_way_out_in_its_error():
    with pytest.raises(BatchError, match=r"mask.\] has shape \(5, 5\).*hybridtrain\.shared"):
        batch_size({"x": torch.zeros(4, 2), "mask": torch.zeros(5, 5), "t": shared(numpy.ones(3))})
    with pytest.raises(BatchError, match=r"batch\['w'\] has shape \(3,\).*hybridtrain\.shared"):
        batch_size({"x": torch.zeros(4, 2), "w": numpy.zeros(3)})


def test_mappings_are_taken_as_dicts_and_other_objects_are_refused():
    tokens = UserDict(ids=torch.arange(4), more=Bag(mask=torch.arange(4)))
    first, second = split(tokens, [3, 1])
    assert type(second) is type(second["more"]) is dict
    assert (second["ids"].tolist(), first["more"]["mask"].tolist()) == ([3], [0, 1, 2])
    batch = {"x": torch.zeros(4), "odd": SimpleNamespace(y=torch.zeros(4))}
    with pytest.raises(BatchError, match=r"batch\['odd'\] holds a SimpleNamespace.*shared"):
        split(batch, [3, 1])
    given = split({"x": torch.zeros(4), "odd": shared(batch["odd"])}, [3, 1])[1]["odd"]
    assert given is batch["odd"]
