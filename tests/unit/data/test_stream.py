"""Iterable data sets: every sample once, the same batches for any division, exact resume."""

import itertools
import json
import random
from itertools import chain

import datasets
import numpy as np
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import thinned, thorough
from support.loaders import Replicas, counted, take, world_of
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    get_worker_info,
)

from hybridtrain import shared
from hybridtrain._base.construction import default_generators, rewind
from hybridtrain.data import EvalLoader, OwnLoader, StreamLoader, TrainLoader
from hybridtrain.data.same_data import digest_of
from hybridtrain.errors import CheckpointError, DataError
from hybridtrain.options import LoaderOptions, TrainerOptions


class Numbers(IterableDataset):
    """Sample i is (i + 1000 epoch, 10 times that)."""

    def __init__(self, samples, replica=None, replicas=1):
        self.samples, self.replica, self.replicas = samples, replica, replicas
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def numbers(self):
        """All of them, or those of this replica and worker."""
        if self.replica is None:
            return range(self.samples)
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        mine = range(self.samples)[self.replica :: self.replicas]
        return mine[worker::workers]

    def sample(self, number):
        number += 1000 * self.epoch
        return torch.tensor(number), torch.tensor(10 * number)

    def __iter__(self):
        for number in self.numbers():
            yield self.sample(number)


class Stateful(Numbers):
    """Knows where it stands; what was read before a resume is not read again."""

    def __init__(self, *args):
        super().__init__(*args)
        self.at = 0
        self.read = []

    def __iter__(self):
        numbers = self.numbers()
        while self.at < len(numbers):
            self.at += 1
            self.read.append(numbers[self.at - 1])
            yield self.sample(numbers[self.at - 1])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def shares(count, batch_size, replicas, make, **options):
    """Returns the batches of each replica."""
    options = LoaderOptions(**options)

    def run(world):
        data = make(world)
        return take(StreamLoader(data, batch_size, world, options=options), count)

    return Replicas(replicas).run(run)


def check_agreed(found):
    """Checks that all replicas say the same of each batch; returns the samples of each."""
    batches = []
    for together in zip(*found, strict=True):
        total = sum(batch.samples for batch in together)
        assert {batch.total for batch in together} == {total}
        assert len({batch.last for batch in together}) == 1
        assert all(len(batch.inputs) == batch.samples or not batch.samples for batch in together)
        batches.append(sorted(chain.from_iterable(map(counted, together))))
    return batches


@settings(max_examples=25)
@given(st.integers(1, 30), st.integers(1, 9), st.sampled_from([1, 2, 3]), st.booleans())
def test_batches_are_consecutive_samples_for_any_number_of_replicas(
    samples, batch_size, replicas, drop_last
):
    if drop_last and samples < batch_size:
        return
    per_epoch = samples // batch_size if drop_last else -(-samples // batch_size)
    found = check_agreed(
        shares(per_epoch + 1, batch_size, replicas, lambda _: Numbers(samples),
               drop_last=drop_last)
    )  # fmt: skip
    for number, batch in enumerate(found[:-1]):
        assert batch == list(range(samples))[number * batch_size :][:batch_size]
    assert found[-1] == [1000 + i for i in range(samples)][:batch_size]  # of the next epoch


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.quick_cases(1)
def test_worker_processes_make_the_same_batches_epoch_after_epoch(workers):
    plain = take(StreamLoader(Numbers(22), 4, world_of(0, 1)), 14)
    options = LoaderOptions(workers=workers)
    ours = take(StreamLoader(Numbers(22), 4, world_of(0, 1), options=options), 14)
    for a, b in zip(plain, ours, strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert (a.samples, a.total, a.last) == (b.samples, b.total, b.last)
    assert [batch.last for batch in plain] == ([False] * 5 + [True]) * 2 + [False] * 2


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("replicas", [2, 3])
def test_uneven_ends_of_a_data_set_that_divides_itself_lose_and_repeat_nothing(replicas, drop_last):
    lengths = [11, 5, 1][:replicas]

    class Uneven(Numbers):
        def numbers(self):
            return range(100 * self.replica, 100 * self.replica + lengths[self.replica])

    count = 1 if drop_last and replicas == 3 else 4
    if drop_last and replicas == 3:  # the third has less than its share of one batch
        with pytest.raises(DataError, match="less than one batch of samples in epoch 0"):
            shares(1, 6, 3, lambda w: Uneven(0, w.data_parallel_rank), divided=True, drop_last=True)
        return
    found = shares(
        count,
        6,
        replicas,
        lambda w: Uneven(0, w.data_parallel_rank),
        divided=True,
        drop_last=drop_last,
    )
    batches = check_agreed(found)
    lasts = [batch.last for batch in found[0]]
    epoch = batches[: lasts.index(True) + 1] if True in lasts else batches
    seen = sorted(chain.from_iterable(epoch))
    everything = [100 * r + i for r in range(replicas) for i in range(lengths[r])]
    if drop_last:
        assert [len(batch) for batch in epoch] == [6]
        assert set(seen) < set(everything)
    else:
        long = shares(8, 6, replicas, lambda w: Uneven(0, w.data_parallel_rank), divided=True)
        epoch = check_agreed(long)[: [batch.last for batch in long[0]].index(True) + 1]
        assert sorted(chain.from_iterable(epoch)) == everything


def test_a_replica_without_any_sample_takes_part():
    class First(Numbers):
        def numbers(self):
            return range(4 if self.replica == 0 else 0)

    found = shares(3, 2, 2, lambda w: First(0, w.data_parallel_rank), divided=True)
    assert [batch.samples for batch in found[1]] == [0, 0, 0]
    assert check_agreed(found) == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("at", "workers", "kind"),
    thinned(list(itertools.product([1, 4, 5, 6, 9], [0, 2], [Numbers, Stateful])), 3),
)
@pytest.mark.quick_cases("6-0-Numbers", "5-0-Stateful")
def test_a_stream_goes_on_where_it_was(at, workers, kind):
    options = LoaderOptions(workers=workers)

    def loader():
        return StreamLoader(kind(22), 4, world_of(0, 1), options=options)

    whole = take(loader(), 15)
    first = loader()
    take(first, at)
    again = loader()
    again.load_state_dict(first.state_dict())
    assert (again.epoch, again.batch) == divmod(at, 6)
    rest = take(again, 15 - at)
    assert [counted(batch) for batch in rest] == [counted(batch) for batch in whole[at:]]
    assert [batch.last for batch in rest] == [batch.last for batch in whole[at:]]
    if kind is Stateful and workers == 0:
        assert first.dataset.read[0] == 0
        assert again.dataset.read[0] == 4 * (at % 6)


def test_a_state_is_the_same_for_any_number_of_replicas_and_workers():
    def begin(world):
        loader = StreamLoader(Stateful(40), 4, world, options=LoaderOptions(workers=2))
        take(loader, 3)
        return loader.state_dict()

    states = Replicas(2).run(begin)
    source = {"epoch": 0, "batch": 3, "states": [{"state": {"at": 12}, "ended": False}]}
    assert states[0] == states[1] == {"epoch": 0, "batch": 3, "batch_size": 4, "source": source}
    alone = StreamLoader(Stateful(40), 6, world_of(0, 1))
    alone.load_state_dict(states[0])
    assert counted(take(alone, 1)[0]) == [12, 13, 14, 15, 16, 17]
    assert alone.dataset.read[0] == 12


@pytest.mark.parametrize("at", [5, *thorough([1, 2, 13])])
@pytest.mark.thorough
def test_a_data_set_that_divides_itself_goes_on_in_every_worker(at):
    options = LoaderOptions(workers=2, divided=True)

    def loader(world):
        return StreamLoader(Stateful(46, world.data_parallel_rank, 2), 4, world, options=options)

    def whole(world):
        return [counted(batch) for batch in take(loader(world), 16)]

    def resumed(world):
        first, again = loader(world), loader(world)
        begun = take(first, at)
        again.load_state_dict(first.state_dict())
        return [counted(batch) for batch in [*begun, *take(again, 16 - at)]]

    assert Replicas(2).run(resumed) == Replicas(2).run(whole)

    def on_other_workers(world, older):
        first = loader(world)
        take(first, 1)
        state = {**first.state_dict(), **({"order": {}} if older else {})}
        StreamLoader(
            Stateful(46, world.data_parallel_rank, 2), 4, world, options=LoaderOptions(divided=True)
        ).load_state_dict(state)

    with pytest.raises(CheckpointError, match=r"depends on workers=2, but this run has workers=0"):
        Replicas(2).run(lambda world: on_other_workers(world, False))
    with pytest.raises(CheckpointError, match=r"for 2 replicas with workers=2, not for 2 with wor"):
        Replicas(2).run(lambda world: on_other_workers(world, True))


def test_a_stream_that_was_left_goes_on_at_the_next_batch_and_not_where_it_had_read_ahead():
    loader = StreamLoader(Stateful(22), 4, world_of(0, 1))
    seen = [counted(batch) for number in (1, 4, 2, 5) for batch in take(loader, number)]
    assert seen == [counted(batch) for batch in take(loader.at_start(), 12)]


def test_a_data_set_that_divides_itself_unasked_is_refused():
    with pytest.raises(DataError, match=r"replicas read different samples .*set divided=True"):
        shares(1, 4, 2, lambda w: Numbers(40, w.data_parallel_rank, 2))
    options = LoaderOptions(workers=2)
    with pytest.raises(DataError, match="worker processes read different samples from Numbers"):
        take(StreamLoader(Numbers(40, 0), 4, world_of(0, 1), options=options), 3)


def test_a_data_set_that_was_to_divide_itself_and_does_not_is_refused():
    with pytest.raises(DataError, match=r"replicas .*same samples"):
        shares(1, 4, 2, lambda _: Numbers(40), divided=True)


@pytest.mark.parametrize(("replicas", "workers"), [(1, 0), (1, 2), (2, 0), (3, 0)])
@pytest.mark.quick_cases(2)
def test_an_iterable_evaluation_set_is_counted_exactly_once(replicas, workers):
    for samples in (0, 1, 7):

        def seen(world):
            options = LoaderOptions(workers=workers)
            data = EvalLoader(Numbers(samples), 3, world, options=options)  # noqa: B023
            return [x for _ in range(2) for inputs, _ in data for x in inputs.tolist()]

        found = chain.from_iterable(Replicas(replicas).run(seen))
        assert sorted(found) == sorted([*range(samples)] * 2)


class Broken(Numbers):
    def __iter__(self):
        yield from itertools.islice(super().__iter__(), 7)
        raise ValueError("the shard is cut off")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_is_one_line(workers):
    options = LoaderOptions(workers=workers)
    stream = StreamLoader(Broken(9), 2, world_of(0, 1), options=options).stream()
    assert counted(next(stream)) == [0, 1]
    message = r"^sample 7 of Broken cannot be read: ValueError: the shard is cut off \(.*test_stre"
    with pytest.raises(DataError, match=message):
        list(stream)


def test_a_stream_that_gives_nothing_or_can_be_read_once_is_refused():
    with pytest.raises(DataError, match=r"Numbers .*less than one batch of samples in epoch 0"):
        take(StreamLoader(Numbers(0), 2, world_of(0, 1)), 1)
    with pytest.raises(DataError, match="generator can be read only once"):
        StreamLoader((i for i in range(3)), 2, world_of(0, 1))
    with pytest.raises(DataError, match=r"Numbers .*`__getitem__` .*StreamLoader"):
        TrainLoader(Numbers(3), 2, world_of(0, 1))


@pytest.mark.parametrize("error", [TypeError, NotImplementedError])
def test_a_stream_that_refuses_to_tell_its_length_has_none(error):
    class Filtered(Numbers):
        def __len__(self):
            raise error("no valid length")

    assert StreamLoader(Filtered(3), 2, world_of(0, 1)).batches_per_epoch is None
    assert OwnLoader(Filtered(3), world_of(0, 1)).batches_per_epoch is None


def test_objects_in_an_array_are_compared_by_their_values():
    texts = [np.array(["".join(["ab", end])], dtype=object) for end in ("c", "c", "d")]
    same, again, other = map(digest_of, texts)
    assert same == again != other


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_joined_shares_of_replicas_can_be_put_in_the_order_of_the_data(replicas):
    def share(world):
        loader = StreamLoader(Numbers(14), 6, world)
        return [(counted(batch), loader.order_of_shares(batch.total)) for batch in take(loader, 3)]

    found = []
    for parts in zip(*Replicas(replicas).run(share), strict=True):
        joined = torch.tensor([number for numbers, _ in parts for number in numbers])
        order = parts[0][1]
        found.append((joined if order is None else joined[order]).tolist())
    assert found == [list(range(6)), list(range(6, 12)), [12, 13]]


def hub_stream(samples=48):
    rows = datasets.Dataset.from_dict({"number": list(range(samples))})
    return rows.to_iterable_dataset(num_shards=4)


def hub_loader(stream, world):
    def collate(rows):
        numbers = torch.tensor([row["number"] for row in rows])
        return numbers, 10 * numbers

    return StreamLoader(stream, 4, world, collate=collate)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("buffer", [None, 20])
def test_a_hub_stream_resumes_without_losing_rows_also_with_a_shuffle_buffer(
    buffer, mapped, caplog
):
    stream = hub_stream()
    stream = stream if buffer is None else stream.shuffle(seed=1, buffer_size=buffer)
    stream = datasets.concatenate_datasets([stream.map(dict), hub_stream(8)]) if mapped else stream
    whole = [counted(batch) for batch in hub_loader(stream, world_of(0, 1)).batches()]
    first, again = hub_loader(stream, world_of(0, 1)), hub_loader(stream, world_of(0, 1))
    begun = [counted(batch) for batch in take(first, 5)]
    again.load_state_dict(first.state_dict())
    with caplog.at_level("INFO", "hybridtrain"):
        rest = [counted(batch) for batch in again.batches()]
    assert begun + rest == whole
    assert sorted(chain(*whole)) == sorted([*range(48), *(range(8) if mapped else ())])
    line = "reading IterableDataset again up to batch 5, because its state lacks its shuffle buffer"
    assert [line in text for text in caplog.messages] == ([] if buffer is None else [True])


def test_a_hub_stream_that_the_script_has_divided_is_not_divided_again():
    def seen(world):
        part = split_dataset_by_node(hub_stream(), world.data_parallel_rank, 2)
        return [number for batch in hub_loader(part, world).batches() for number in counted(batch)]

    assert sorted(chain(*Replicas(2).run(seen))) == list(range(48))
    for replicas in (1, 3):
        message = rf"is part 1 of 2 by split_dataset_by_node, but .* part 0 of {replicas}: pass the"
        with pytest.raises(DataError, match=message):
            hub_loader(split_dataset_by_node(hub_stream(), 1, 2), world_of(0, replicas))


# Loaders of one's own.
def table(samples=10):
    x = torch.arange(samples)
    return TensorDataset(x, 10 * x)


class Stepwise:
    """A loader of batches of different sizes, in another order each epoch, with a state."""

    def __init__(self, replica=0, replicas=1):
        self.replica, self.replicas, self.epoch, self.at = replica, replicas, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(20))
        random.Random(self.epoch).shuffle(order)
        batches = [order[:3], order[3:8], order[8:9], order[9:15], order[15:]]
        batches = batches[self.replica :: self.replicas]
        while self.at < len(batches):
            self.at += 1
            x = torch.tensor(batches[self.at - 1])
            yield x, 10 * x
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("at", range(1, 8))
def test_a_loader_of_ones_own_goes_on_where_it_was(at, replicas):
    per_epoch = -(-5 // replicas)

    def whole(world):
        loader = OwnLoader(Stepwise(world.data_parallel_rank, replicas), world)
        return take(loader, 9)

    def resumed(world):
        first = OwnLoader(Stepwise(world.data_parallel_rank, replicas), world)
        begun = take(first, at)
        again = OwnLoader(Stepwise(world.data_parallel_rank, replicas), world)
        again.load_state_dict(first.state_dict())
        assert (again.epoch, again.batch) == divmod(at, per_epoch)
        return [*begun, *take(again, 9 - at)]

    expected = check_agreed(Replicas(replicas).run(whole))
    assert check_agreed(Replicas(replicas).run(resumed)) == expected
    assert sorted(chain.from_iterable(expected[:per_epoch])) == list(range(20))


def test_replicas_with_loaders_of_different_lengths_take_equally_many_steps():
    def lengths(world):
        batches = [[2 * i + world.data_parallel_rank] for i in range(3 + world.data_parallel_rank)]
        loader = OwnLoader(DataLoader(table(), batch_sampler=batches), world)
        options = TrainerOptions(epochs=2)
        return options.total_steps(loader.batches_per_epoch), len(take(loader, 8))

    assert Replicas(2).run(lengths) == [(8, 8), (8, 8)]


@pytest.mark.parametrize("first", [0, 1])
def test_a_replica_that_has_run_out_pads_with_a_whole_batch_of_any_values(first):
    class Pairs:
        def __init__(self, world):
            self.numbers = range(first + 2 * world.data_parallel_rank)

        def __iter__(self):
            for number in self.numbers:
                x = torch.arange(3.0) + 10 * number + 100 * len(self.numbers)
                mask, rows = shared(torch.eye(4)), np.arange(3) + number
                yield {"x": x, "mask": mask, "rows": rows}, 10 * x

    found = Replicas(2).run(lambda world: take(OwnLoader(Pairs(world), world), 2 + first))
    donor = found[0] if first else found[1]
    for padding in found[0][first:]:
        assert (padding.samples, padding.total) == (0, 3)
        assert torch.equal(padding.inputs["x"], donor[0].inputs["x"])
        assert torch.equal(padding.inputs["mask"].value, torch.eye(4))
        assert padding.inputs["rows"].tolist() == [0, 1, 2]
        assert torch.equal(padding.targets, donor[0].targets)
    assert [batch.samples for batch in found[1]] == [3] * (2 + first)


def test_a_loader_without_state_goes_on_at_the_same_batch():
    loader = DataLoader(table(), batch_sampler=[[0, 1, 2], [3], [4, 5, 6, 7], [8, 9]])
    own = OwnLoader(loader, world_of(0, 1))
    assert own.batches_per_epoch == 4
    assert [counted(x) for x in take(own, 3, 2, 2)] == [[4, 5, 6, 7], [8, 9], [0, 1, 2]]


class Drawn:
    """A sampler whose order is drawn anew in each epoch."""

    def __init__(self, shuffle, **attributes):
        self.shuffle = shuffle
        vars(self).update(attributes)

    def __iter__(self):
        order = list(range(10))
        self.shuffle(order)
        yield from order

    def __len__(self):
        return 10


def own_shuffled(kind):
    own = torch.Generator().manual_seed(3)
    samplers = {
        "python": Drawn(random.shuffle),
        "numpy": Drawn(np.random.shuffle),
        "the batch sampler's": BatchSampler(RandomSampler(table(), generator=own), 3, False),
    }
    settings = {
        "torch": {"batch_size": 3, "shuffle": True},
        "the loader's": {"batch_size": 3, "shuffle": True, "generator": own},
        "python": {"batch_size": 3, "sampler": samplers["python"]},
        "numpy": {"batch_size": 3, "sampler": samplers["numpy"]},
        "the batch sampler's": {"batch_sampler": samplers["the batch sampler's"]},
    }
    return OwnLoader(DataLoader(table(), **settings[kind]), world_of(0, 1))


@pytest.mark.parametrize("at", [0, 1, 4, 6])  # epochs of 4 batches
@pytest.mark.parametrize(
    "kind", ["torch", "the loader's", "python", "numpy", "the batch sampler's"]
)
@pytest.mark.quick_cases("torch-6", "torch-4")
def test_a_shuffled_loader_of_ones_own_goes_on_in_the_same_order(kind, at):
    default = default_generators()
    whole = [counted(batch) for batch in take(own_shuffled(kind), 11)]
    rewind(default)
    first = own_shuffled(kind)
    begun = [counted(batch) for batch in take(first, at)]
    state = json.loads(json.dumps(first.state_dict()))
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1234)
    again = own_shuffled(kind)
    again.load_state_dict(state)
    rest = [counted(batch) for batch in take(again, 11 - at)]
    assert begun + rest == whole
    assert sorted(chain(*whole[:4])) == sorted(chain(*whole[4:8])) == list(range(10))
    assert whole[:4] != whole[4:8]


def own_part(world):
    """A loader that each replica shuffles with a generator of another seed."""
    replica, replicas = world.data_parallel_rank, world.data_parallel_size
    own = torch.Generator().manual_seed(replica)
    part = Subset(table(24), range(24)[replica::replicas])
    batches = BatchSampler(RandomSampler(part, generator=own), 3, False)
    return OwnLoader(DataLoader(part, batch_sampler=batches), world)


def test_each_replica_resumes_with_its_own_generators():
    def whole(world):
        return [counted(batch) for batch in take(own_part(world), 12)]

    def resumed(world):
        first, again = own_part(world), own_part(world)
        begun = take(first, 6)
        again.load_state_dict(first.state_dict())
        return [counted(batch) for batch in [*begun, *take(again, 6)]]

    assert Replicas(2).run(resumed) == Replicas(2).run(whole)


def test_a_loader_of_ones_own_has_other_replicas_from_the_next_epoch_on():
    def states(world):
        loader = own_part(world)
        take(loader, 2)
        middle = loader.state_dict()
        take(loader, 2)
        return middle, loader.state_dict()

    middle, end = Replicas(2).run(states)[0]
    alone = own_part(world_of(0, 1))
    with pytest.raises(CheckpointError, match="depends on 2 replicas, but this run has 1 replica:"):
        alone.load_state_dict(middle)
    alone.load_state_dict(end)
    assert (alone.epoch, alone.batch) == (1, 0)
    assert sorted(chain(*map(counted, take(alone, 8)))) == list(range(24))


def test_a_loader_that_has_got_or_lost_a_state_is_read_again():
    class Plain:
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            batches = Stepwise()
            batches.set_epoch(self.epoch)
            return iter(batches)

    whole = [counted(batch) for batch in take(OwnLoader(Stepwise(), world_of(0, 1)), 10)]
    for before, after in ((Stepwise, Plain), (Plain, Stepwise)):
        for at in (3, 5):
            first, again = (OwnLoader(kind(), world_of(0, 1)) for kind in (before, after))
            take(first, at)
            again.load_state_dict(first.state_dict())
            assert [counted(batch) for batch in take(again, 10 - at)] == whole[at:]


def test_every_sampler_of_a_loader_gets_each_epoch_once():
    class Sampler(DistributedSampler):
        epochs = ()

        def set_epoch(self, epoch):
            super().set_epoch(epoch)
            self.epochs = (*self.epochs, epoch)

    sampler, data = Sampler(table(), 1, 0), table()
    data.set_epoch = (epochs := []).append
    batches = BatchSampler(sampler, 4, False)
    loader = DataLoader(Subset(data, range(10)), batch_sampler=batches)
    found = [counted(batch) for batch in take(OwnLoader(loader, world_of(0, 1)), 6)]
    assert sampler.epochs == (0, 1)
    assert epochs == [0, 1]
    assert found[:3] != found[3:]


def test_a_loader_that_gives_every_replica_all_samples_is_refused():
    with pytest.raises(DataError, match=r"all samples .*2 replicas: .*DistributedSampler"):
        OwnLoader(DataLoader(table(), batch_size=2), world_of(0, 2))
    with pytest.raises(DataError, match=r"replicas .*same samples .*Stepwise"):
        Replicas(2).run(lambda world: take(OwnLoader(Stepwise(), world), 1))
