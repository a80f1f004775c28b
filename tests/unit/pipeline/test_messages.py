"""Messages between processes: what arrives is what was sent, in values, types and layout."""

import enum
import pickle
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hybridtrain._base.codec import CodecError, allow, encode
from hybridtrain.errors import SplitError
from hybridtrain.pipeline.messages import (
    MessageFormat,
    dense,
    empty,
    format_buffer,
    from_bytes,
    pack,
    to_bytes,
    unpack,
)


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    name: str


allow([Output])  # as a model does whose layers are defined in this module


def sent(message, unique=True):
    """What a receiver gets that knows nothing but the bytes of the format and of the tensors."""
    form, tensors = pack(message, unique)
    form = from_bytes(to_bytes(form))
    received = [empty(one, torch.device("cpu")) for one in form.tensors]
    for source, target, one in zip(tensors, received, form.tensors, strict=True):
        target.as_strided((target.numel(),), (1,)).copy_(dense(source, one).view(-1))
    return unpack(form, received, torch.device("cpu"))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, 8)[::2, 1:5],
        torch.randn(1).expand(4),
        torch.tensor(3),
        torch.zeros(0, 5),
        torch.randn(3) > 0,
        torch.randn(3, dtype=torch.complex64),
        torch.randn(3).bfloat16(),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}-{tensor.stride()}",
)
def test_a_tensor_arrives_with_its_values_and_dense_layout(tensor):
    received = sent([tensor])[0]
    assert torch.equal(received, tensor)
    assert received.dtype == tensor.dtype
    assert received.stride() == torch.empty_like(tensor).stride()


@pytest.mark.parametrize("unique", [True, False])
def test_tuples_and_lists_of_tensors_arrive_as_such_also_in_a_message_of_a_known_format(unique):
    message = [(torch.randn(2), torch.randn(3, 1)), [torch.arange(4)], (), [torch.randn(())]]
    form = pack(message, unique)[0]
    known, tensors = pack(message, unique, form)
    assert known is form
    arrived = unpack(form, tensors, torch.device("cpu"))
    assert [type(part) for part in arrived] == [tuple, list, tuple, list]
    assert [list(map(id, part)) for part in arrived] == [list(map(id, part)) for part in message]


@pytest.mark.parametrize("value", [np.array([1]), np.arange(3.0)], ids=repr)
def test_a_value_that_equals_the_place_of_a_tensor_arrives_as_itself(value):
    tensor = torch.randn(1)
    ((first, second),) = sent([(tensor, value)])
    assert torch.equal(first, tensor)
    assert type(second) is type(value)
    assert list(second) == list(value)


def test_requires_grad_arrives():
    message = [torch.randn(2, requires_grad=True), torch.randn(2)]
    assert [tensor.requires_grad for tensor in sent(message)] == [True, False]


def test_what_is_in_cpu_memory_stays_there_at_a_receiver_with_another_device():
    lengths = torch.tensor([3, 1])
    form, _ = pack([lengths, torch.empty(2, device="meta")], unique=True)
    form = from_bytes(to_bytes(form))
    gpu = torch.device("meta")
    received = [empty(one, gpu) for one in form.tensors]
    assert [one.device.type for one in received] == ["cpu", "meta"]
    # a wire of gloo has all of them in CPU memory
    received = [empty(one, torch.device("cpu")) for one in form.tensors]
    assert [one.device.type for one in unpack(form, received, gpu)] == ["cpu", "meta"]
    known, _ = pack([torch.tensor([2, 1]), torch.empty(2, device="meta")], True, form)
    assert known is form
    known, _ = pack([torch.tensor([2, 1]), torch.empty(2)], True, form)
    assert known is not form


def test_nested_values_and_dataclasses_arrive():
    message = (
        {"a": [torch.ones(2), None, 3, "text"]},
        Output(torch.zeros(1), (torch.ones(1),), "x"),
    )
    first, second = sent(message)
    assert first["a"][1:] == [None, 3, "text"]
    assert isinstance(second, Output)
    assert (second.name, len(second.hidden)) == ("x", 1)


def test_a_tensor_that_occurs_twice_travels_once_and_is_one_tensor():
    tensor = torch.randn(3)
    first, second = sent([tensor, tensor])
    assert first is second
    assert len(pack([tensor, tensor], unique=True)[1]) == 1


def test_gradients_travel_each_by_itself():
    # whether autograd gives two inputs the same tensor changes from step to step
    tensor = torch.randn(3)
    forms = [
        pack([one, other], unique=False)[0] for one, other in [(tensor, tensor), (tensor, -tensor)]
    ]
    assert forms[0] == forms[1]


def test_strides_of_dimensions_of_one_sample_do_not_make_another_format():
    one, other = torch.zeros(1, 4), torch.zeros(1, 9)[:, :4]
    assert one.stride() != other.stride()
    assert pack([one], True)[0] == pack([other], True)[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([torch.ones(2)], [torch.ones(3)]),
        ([torch.ones(2)], [torch.ones(2).double()]),
        ([torch.ones(2)], [torch.ones(2, requires_grad=True)]),
        ([torch.ones(2), 1], [torch.ones(2), 2]),
        ([torch.ones(2), None], [torch.ones(2), torch.ones(2)]),
        ([torch.ones(2, 3)], [torch.ones(3, 2).t()]),
        ([(torch.ones(2),)], [[torch.ones(2)]]),
        ([(torch.ones(2), torch.ones(2))], [(torch.ones(2),), (torch.ones(2),)]),
        ([(torch.ones(2), torch.ones(2))], [(torch.ones(2),) * 2]),
        ([(torch.ones(2),)], [(1,)]),
    ],
    ids=[
        *("shape", "dtype", "requires_grad", "value", "None", "strides"),
        *("kind of part", "lengths", "twice", "no tensor"),
    ],
)
def test_formats_tell_messages_apart(one, other):
    assert pack(one, True)[0] != pack(other, True)[0]
    form = pack(one, True)[0]
    assert pack(pickle.loads(pickle.dumps(one)), True, form)[0] is form
    assert pack(other, True, form)[0] is not form
    assert len(tree_leaves(sent(other))) == len(tree_leaves(other))


@pytest.mark.parametrize("kind", ["to_sparse_coo", "to_sparse_csr"])
def test_a_sparse_tensor_does_not_go_to_another_process_and_the_error_says_what_to_do(kind):
    first, _ = pack((torch.eye(3),), True)
    for known in (None, first):
        with pytest.raises(SplitError, match=r"torch\.sparse.* shape \(3, 3\).*engine=local"):
            pack((getattr(torch.eye(3), kind)(),), True, known)


def test_a_value_of_a_local_class_does_not_go_to_another_process_and_the_error_says_what_to_do():
    class Color(enum.Enum):
        RED = 1

    with pytest.raises(SplitError, match=r"Color.*engine=local"):
        to_bytes(pack((torch.eye(3), Color.RED), True)[0])


def test_a_format_that_does_not_fit_its_own_parts_is_refused():
    form, _ = pack([torch.randn(2, 3), 1], True)
    tensor = form.tensors[0]
    incomplete = object.__new__(MessageFormat)
    object.__setattr__(incomplete, "structure", form.structure)
    for hostile in (
        incomplete,
        replace(form, tensors=[]),
        replace(form, leaves=form.leaves[:1]),
        replace(form, structure=3),
        replace(form, tensors=[tensor._replace(shape=(1 << 40, 1 << 40), stride=(1 << 40, 1))]),
        replace(form, tensors=[tensor._replace(stride=(0, 0))]),
        replace(form, tensors=[tensor._replace(shape=(-2, 3))]),
        replace(form, tensors=[tensor._replace(shape=(2,))]),
        replace(form, tensors=["text"]),
    ):
        with pytest.raises(CodecError, match="not the format"):
            from_bytes(torch.frombuffer(bytearray(encode(hostile)), dtype=torch.uint8))


@pytest.mark.parametrize("size", [-1, 0, 1 << 25, 1 << 62])
def test_no_memory_is_reserved_for_a_format_of_an_impossible_size(size):
    with pytest.raises(CodecError, match="announces"):
        format_buffer(size)
