"""The samples of each replica: the same global batches for any number of replicas."""

import gc
import itertools
import multiprocessing
import threading
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.loaders import counted, take, world_of
from torch.utils.data import Dataset, IterableDataset

from hybridtrain.data import (
    Batch,
    EvalLoader,
    InMemoryDataset,
    Loader,
    TrainLoader,
    example_batch,
)
from hybridtrain.data import fetch as fetching
from hybridtrain.data.fetch import WatchedLoader, prefetch
from hybridtrain.data.loader import permutation
from hybridtrain.errors import ConfigError, DataError
from hybridtrain.options import LoaderOptions

SAMPLES = st.integers(1, 40)
REPLICAS = st.sampled_from([1, 2, 4])


class Numbers(Dataset):
    """Sample i is (i, 10 i); sample `bad` raises."""

    def __init__(self, samples, bad=None):
        self.samples, self.bad = samples, bad

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        assert 0 <= index < self.samples
        if index == self.bad:
            raise OSError(f"sample {index} cannot be read")
        return torch.tensor(index), torch.tensor(10 * index)


def prefetched(source):
    class Source(IterableDataset):
        def __iter__(self):
            return source

    options, world = LoaderOptions(), world_of(0, 1)
    return prefetch(WatchedLoader(Source(), options, world, str, batch_size=None))


def loader(samples, batch_size, replica=0, replicas=1, seed=0, **options):
    world, options = world_of(replica, replicas), LoaderOptions(**options)
    return TrainLoader(Numbers(samples), batch_size, world, seed=seed, options=options)


@given(SAMPLES, st.integers(1, 12), REPLICAS, st.booleans(), st.integers(0, 3))
def test_the_shares_of_all_replicas_in_order_are_the_batch_of_one_process(
    samples, batch_size, replicas, drop_last, seed
):
    if drop_last and samples < batch_size:
        return
    options = {"seed": seed, "drop_last": drop_last}
    alone = loader(samples, batch_size, **options)
    steps = 2 * alone.batches_per_epoch + 1  # into the third epoch
    loaders = [
        loader(samples, batch_size, replica, replicas, **options) for replica in range(replicas)
    ]
    assert {each.batches_per_epoch for each in loaders} == {alone.batches_per_epoch}
    expected = take(alone, steps)
    shares = [take(each, steps) for each in loaders]
    for step in range(steps):
        union = [sample for share in shares for sample in counted(share[step])]
        assert union == counted(expected[step]), step
        assert sum(share[step].samples for share in shares) == expected[step].total
        for share in shares:
            assert share[step].total == expected[step].total == expected[step].samples
            assert len(share[step].inputs) == max(1, share[step].samples)


@given(SAMPLES, st.integers(1, 12), st.booleans(), st.integers(0, 2))
def test_an_epoch_is_every_sample_once(samples, batch_size, drop_last, epoch):
    if drop_last and samples < batch_size:
        return
    each = loader(samples, batch_size, drop_last=drop_last)
    batches = take(each, each.batches_per_epoch, epoch)
    seen = [sample for batch in batches for sample in counted(batch)]
    assert len(set(seen)) == len(seen)
    if drop_last:
        assert len(seen) == samples // batch_size * batch_size
        assert {batch.total for batch in batches} == {batch_size}
    else:
        assert set(seen) == set(range(samples))
    assert seen == permutation(samples, 0, epoch).tolist()[: len(seen)]


def test_a_replica_without_a_sample_of_a_short_batch_gets_one_that_counts_0():
    # 9 samples in batches of 4: the last global batch has one sample, for 4 replicas
    last = [take(loader(9, 4, replica, 4), 3)[2] for replica in range(4)]
    assert [share.samples for share in last] == [1, 0, 0, 0]
    assert [share.total for share in last] == [1, 1, 1, 1]
    assert all(len(share.inputs) == len(share.targets) == 1 for share in last)
    assert sum(share.samples / share.total for share in last) == 1


@given(SAMPLES, st.integers(1, 9), st.integers(0, 3), REPLICAS, st.data())
def test_a_stream_that_starts_anywhere_is_the_tail_of_the_full_one(
    samples, batch_size, epoch, replicas, data
):
    replica = data.draw(st.integers(0, replicas - 1))
    each = loader(samples, batch_size, replica, replicas)
    batch = data.draw(st.integers(0, each.batches_per_epoch - 1))
    skipped = epoch * each.batches_per_epoch + batch
    full = take(each, skipped + 5)
    for a, b in zip(take(each, 5, epoch, batch), full[skipped:], strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert (a.samples, a.total) == (b.samples, b.total)


def test_the_order_depends_on_seed_and_epoch_alone():
    orders = {
        (seed, epoch): tuple(permutation(50, seed, epoch).tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(set(orders.values())) == len(orders)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    assert {key: tuple(permutation(50, *key).tolist()) for key in orders} == orders
    assert torch.equal(torch.get_rng_state(), state)
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    permutation(3, 2**63 - 1, 2**31)  # any seed will do


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_cover_all_samples_in_order_and_differ_by_one_at_most(total, replicas):
    lengths = world_of(0, replicas).samples_by_replica(total)
    assert sum(lengths) == total
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 5])
@pytest.mark.quick_cases(2)
def test_evaluation_covers_every_sample_exactly_once_in_order(replicas):
    for samples in range(18):
        for batch_size in (1, 3, 8):
            seen = []
            for replica in range(replicas):
                for inputs, targets in EvalLoader(
                    Numbers(samples), batch_size, world_of(replica, replicas)
                ):
                    assert len(inputs) <= max(1, batch_size // replicas)
                    assert torch.equal(targets, 10 * inputs)
                    seen += inputs.tolist()
            assert seen == list(range(samples)), (samples, batch_size)


def test_evaluation_can_be_repeated():
    each = EvalLoader(Numbers(7), 3, world_of(0, 1))
    assert [x.tolist() for x, _ in each] == [x.tolist() for x, _ in each]


def test_less_than_one_batch_of_data_is_an_error_that_names_the_argument():
    with pytest.raises(DataError, match=r"has 3 samples, less than one batch of batch_size=4"):
        loader(3, 4, drop_last=True)
    with pytest.raises(DataError, match="has 0 samples"):
        loader(0, 4)
    assert loader(3, 4).batches_per_epoch == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_of_the_data_set_is_raised_after_the_batches_before_it(workers):
    order = permutation(12, 0, 0).tolist()
    data = Numbers(12, bad=order[7])  # in the second batch of 4
    options = LoaderOptions(workers=workers)
    stream = TrainLoader(data, 4, world_of(0, 1), options=options).stream()
    assert next(stream).inputs.tolist() == order[:4]
    with pytest.raises(DataError, match=f"^sample {order[7]} of Numbers cannot be read: OSError"):
        next(stream)
    evaluation = iter(EvalLoader(Numbers(12, bad=5), 4, world_of(0, 1), options=options))
    assert next(evaluation)[0].tolist() == [0, 1, 2, 3]
    with pytest.raises(DataError, match=r"^sample 5 of Numbers cannot be read: OSError"):
        next(evaluation)


@pytest.mark.parametrize("how", ["exception", "close", "drop"])
@pytest.mark.quick_cases(1)
def test_worker_processes_end_with_their_stream(how):
    # not when the garbage is collected: that may be in a process forked later, which then waits
    # for workers that are not its own
    class Gated(Numbers):
        """The bad sample is read once the workers are counted: they end when it has been."""

        def __getitem__(self, index):
            if index == self.bad:
                counted.wait(60)
            return super().__getitem__(index)

    counted = multiprocessing.Event()
    data = Gated(12, bad=permutation(12, 0, 0).tolist()[7] if how == "exception" else None)
    gc.collect()
    gc.disable()
    try:
        stream = TrainLoader(data, 4, world_of(0, 1), options=LoaderOptions(workers=2)).stream()
        next(stream)
        assert len(multiprocessing.active_children()) == 2
        counted.set()
        if how == "exception":
            with suppress(DataError):
                next(stream)
        elif how == "close":
            stream.close()
        del stream
        assert not multiprocessing.active_children()
    finally:
        gc.enable()


def test_worker_processes_give_the_same_batches():
    plain = take(loader(10, 4, 1, 2), 7)
    fetched = take(loader(10, 4, 1, 2, workers=2), 7)
    for a, b in zip(plain, fetched, strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert (a.samples, a.total) == (b.samples, b.total)


def prefetchers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("how", ["close", "drop", "before the first item"])
def test_an_iterator_closed_early_leaves_no_thread(how):
    assert not prefetchers()
    stream = loader(10, 2).stream()
    if how != "before the first item":
        next(stream)
        assert prefetchers()
    if how == "drop":
        del stream
    else:
        stream.close()
    assert not prefetchers()


def test_an_evaluation_left_early_leaves_no_thread():
    for _ in EvalLoader(Numbers(10), 2, world_of(0, 1)):
        break
    assert not prefetchers()
    evaluation = iter(EvalLoader(Numbers(10), 2, world_of(0, 1)))
    next(evaluation)
    evaluation.close()
    assert not prefetchers()


def test_the_next_batch_is_fetched_while_this_one_is_used():
    fetched = threading.Semaphore(0)

    def source():
        for i in range(10):
            fetched.release()
            yield i

    stream = prefetched(source())
    assert next(stream) == 0
    for _ in range(3):  # the one in hand and two ahead; nobody asks for them
        assert fetched.acquire(timeout=20)
    stream.close()


def test_prefetching_stays_within_its_depth():
    produced = []

    def source():
        for i in range(100):
            produced.append(i)
            yield i

    stream = prefetched(source())
    for i in range(20):
        assert next(stream) == i
        # what was used, two that wait, one in the thread's hand
        assert len(produced) <= i + 1 + 3
    stream.close()
    assert len(produced) < 100


def test_batches_are_made_by_the_given_collate_function():
    def collate(items):
        return torch.tensor([len(items)] * len(items)), [y for _, y in items]

    batch = take(loader(6, 3, collate=collate), 1)[0]
    assert batch.inputs.tolist() == [3, 3, 3]
    assert len(batch.targets) == 3


def doubled(inputs, targets):
    return 2 * inputs, targets


def shifted(batch):
    inputs, targets = batch
    return inputs + 100, targets


@pytest.mark.parametrize("prepare", [None, doubled])
@pytest.mark.parametrize("collate", [None, shifted])
def test_samples_in_memory_are_collated_alike_with_and_without_preparation(prepare, collate):
    dataset = InMemoryDataset(torch.arange(4.0), torch.arange(4), prepare)
    world, options = world_of(0, 1), LoaderOptions(collate=collate)
    found = take(TrainLoader(dataset, 4, world, options=options), 1)[0]
    expected = (2 if prepare else 1) * found.targets + (100 if collate else 0)
    assert torch.equal(found.inputs, expected.float())
    inputs, targets = example_batch(dataset, 2, collate)
    assert inputs.shape == targets.shape == (2,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": -1}, "workers=-1 must be a number of processes, 0 or more"),
        ({"workers": True}, "workers=True must be a number of processes"),
        ({"timeout_s": 0}, "timeout_s=0 must be a positive number of seconds"),
        ({"drop_last": "maybe"}, "drop_last=maybe must be true or false"),
    ],
)
def test_a_setting_out_of_its_range_is_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        LoaderOptions(**settings)


def test_the_end_of_a_stream_does_not_wait_for_a_slow_source(monkeypatch):
    monkeypatch.setattr(fetching, "_END_S", 0.01)
    answer = threading.Event()

    def source():
        yield 1
        answer.wait()
        yield 2

    stream = prefetched(source())
    assert next(stream) == 1
    stream.close()
    (thread,) = prefetchers()
    assert thread.daemon  # so that it keeps no process from ending
    answer.set()
    thread.join(20)
    assert not prefetchers()


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (torch.zeros(3, 7, dtype=torch.int64), 84),
        ({"mask": torch.zeros(3, 7), "ids": torch.zeros(3, 7, dtype=torch.int32)}, 84),
        (torch.zeros(3, 7), 0),  # features
        (torch.zeros(3, 7, dtype=torch.uint8), 0),  # pixels
        (torch.zeros(3, 1, 7, dtype=torch.int64), 0),
        ((torch.zeros(3, 7), torch.zeros(3, dtype=torch.int64)), 0),
    ],
)
def test_a_batch_has_tokens_where_its_samples_are_sequences_of_ids(inputs, expected):
    assert Batch(inputs, torch.zeros(3), samples=3, total=12).tokens == expected


@pytest.mark.parametrize(("stream", "replicas"), [(False, 1), (False, 2), (True, 1)])
def test_the_first_batches_alone_are_trained_on_in_every_epoch(replicas, stream):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(torch.tensor(i), torch.tensor(10 * i)) for i in range(11)])

    data = Stream() if stream else Numbers(11)
    for epoch in range(3):
        found = []
        for replica in range(replicas):
            world = world_of(replica, replicas)
            loader = Loader(data, 4, world, first_batches=2)
            loader.seek(epoch, 0)
            epoch_batches = itertools.islice(loader.stream(), 2)
            found += [i for batch in epoch_batches for i in batch.inputs.tolist()]
        assert sorted(found) == list(range(8))
    options = LoaderOptions(first_batches=2)
    evaluated = [
        EvalLoader(data, 4, world_of(r, replicas), options=options) for r in range(replicas)
    ]
    found = [i for loader in evaluated for inputs, _ in loader for i in inputs.tolist()]
    assert sorted(found) == list(range(8))
    assert len(Loader(Numbers(3), 4, world_of(0, 1), first_batches=2)) == 1
