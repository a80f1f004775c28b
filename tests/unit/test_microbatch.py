"""A batch in micro-batches and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten

from hybridtrain.errors import BatchError
from hybridtrain.microbatch import batch_size, chunk_sizes, merge, split


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


def test_merging_stacks_scalars_and_takes_other_values_from_the_first():
    outputs = [(torch.full((2, 1), i), torch.tensor(float(i)), i, None) for i in range(3)]
    rows, scalars, number, none = merge(outputs)
    assert rows.flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert scalars.tolist() == [0.0, 1.0, 2.0]
    assert (number, none) == (0, None)


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
