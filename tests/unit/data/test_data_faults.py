"""A data set that fails, ends its process or hangs: one line that names sample and place."""

import multiprocessing
import os
import signal
import sys
import time

import pytest
import torch
from support.compare import hybrid
from support.loaders import world_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from hybridtrain import Trainer
from hybridtrain.data import EvalLoader, TrainLoader
from hybridtrain.errors import DataError
from hybridtrain.launch import activity
from hybridtrain.launch.process_id import process_state
from hybridtrain.options import LoaderOptions

INPUTS = torch.arange(12.0).view(12, 1)


class Failing(Dataset):
    """12 samples; sample 7 does something."""

    def __init__(self, happens):
        self.happens = happens

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 7:
            return self.happens()
        return INPUTS[index], index


def evaluation(dataset, **options):
    return iter(EvalLoader(dataset, 4, world_of(0, 1), options=LoaderOptions(**options)))


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_real_time():
    os.kill(os.getpid(), signal.SIGRTMIN + 3)


def ended():
    os._exit(3)


def hangs():
    time.sleep(60)


def raises():
    return {}["label"]


@pytest.fixture(autouse=True)
def no_handler_of_another_test():
    """Takes torch's handler of SIGCHLD away, which raises wherever the main thread is.

    A DataLoader that is iterated in the main thread sets it, for the rest of the process.
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize(
    ("happens", "message"),
    [
        (killed, r"worker process 1 \(pid \d+\) .* SIGKILL .*samples "
                 r"4, 5, 6, 7 of Failing.* memory, .*workers="),
        (killed_in_real_time, r"worker process 1 .* was killed by SIGRTMIN\+3 while loading"),
        (ended, r"worker process 1 \(pid \d+\) .* code 3 .*samples 4, 5, 6, 7 "
                r"of Failing"),
        (hangs, r"worker process 1 .*samples 4, 5, 6, 7 of Failing .*timeout_s=1 sec"),
        (raises, r"sample 7 of Failing cannot be read: KeyError: 'label' "
                 r"\(.*test_data_faults.py:\d+, in raises\), in worker process 1$"),
    ],
)  # fmt: skip
@pytest.mark.quick_cases(2)
def test_a_worker_that_fails_is_one_line_and_no_hang(happens, message):
    batches = evaluation(Failing(happens), workers=2, timeout_s=1 if happens is hangs else 60)
    assert next(batches)[1].tolist() == [0, 1, 2, 3]
    with pytest.raises(DataError, match=message) as caught:
        next(batches)
    assert "\n" not in str(caught.value)
    for name in ("DataLoader", "Traceback"):
        assert name not in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell a process's end")
def test_a_worker_that_is_stopped_ends_with_a_process_that_is_killed():
    read_end, write_end = os.pipe()

    def stops():
        os.write(write_end, f"{os.getpid()}\n".encode())
        os.kill(os.getpid(), signal.SIGSTOP)

    def reads():
        list(evaluation(Failing(stops), workers=1))

    process = multiprocessing.get_context("fork").Process(target=reads)
    process.start()
    with open(read_end) as pids:
        worker = int(pids.readline())
    os.close(write_end)
    process.kill()
    process.join()
    deadline = time.monotonic() + 20
    while (state := process_state(worker)) is not None and state[0] != "Z":
        assert time.monotonic() < deadline, state
        time.sleep(0.02)


def test_without_workers_the_error_keeps_its_cause():
    batches = evaluation(Failing(raises))
    next(batches)
    with pytest.raises(DataError, match=r"sample 7 of Failing cannot be read: KeyError") as caught:
        next(batches)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("item", "message"),
    [
        ((torch.zeros(2), 0), r"samples 4, 5, 6, 7 of Failing .*\(.*"
                              r"collate= that pads\): RuntimeError: .*\[1\] at entry 0 and \[2\]"),
        (None, "samples 4, 5, 6, 7 of Failing .*: TypeError"),
    ],
)  # fmt: skip
def test_an_item_of_another_form_is_one_line_that_names_the_batch(item, message, workers):
    batches = evaluation(Failing(lambda: item), workers=workers)
    next(batches)
    with pytest.raises(DataError, match=message) as caught:
        next(batches)
    assert "\n" not in str(caught.value)


def test_a_full_shared_memory_is_not_blamed_on_the_form_of_the_samples():
    def collate(items):  # what PyTorch says in a worker process, in a /dev/shm of 600 kB
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_28_43_0>: No space left on "
            "device (28)"
        )

    batches = iter(
        EvalLoader(
            Items((torch.zeros(2), 0)), 3, world_of(0, 1), options=LoaderOptions(collate=collate)
        )
    )
    with pytest.raises(DataError, match=r"\(shared memory is full: lower workers=, .*/dev/shm\)"):
        next(batches)


class Items(Dataset):
    def __init__(self, item):
        self.item = item

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self.item


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"input_ids": torch.arange(5), "labels": 1},
         r"Items .*pairs `\(inputs, target\)`, .* a dict {'input_ids': a tensor of "
         r"shape \[3, 5\], 'labels': a tensor of shape \[3\]}; for a model that takes the whole "
         r"dict .*return `\(item, item\['labels'\]\)`"),
        ({"text": "good", "label": "pos"}, r"Items .*`\(inputs, target\)`.*'text': a list of 3"),
        ((1, 2, 3), r"Items .*`\(inputs, target\)`.* a list of 3: \(a tensor of shape \[3\]"),
        (("a text", "pos"), r"a batch of Items has no tensor .*dim 0: it is a list "
                            r"of 2.*Return tensors or numbers"),
    ],
)  # fmt: skip
def test_items_that_are_no_pairs_of_tensors_are_told_what_to_return(item, message):
    with pytest.raises(DataError, match=message):
        next(evaluation(Items(item)))
    loader = TrainLoader(Items(item), 3, world_of(0, 1))
    with pytest.raises(DataError, match=message):
        next(loader.stream())


def test_fewer_samples_than_replicas_and_more_in_a_batch_than_there_are():
    data = TensorDataset(INPUTS[:2], INPUTS[:2])
    shares = [next(TrainLoader(data, 8, world_of(r, 4)).stream()) for r in range(4)]
    assert [share.samples for share in shares] == [1, 1, 0, 0]
    assert {share.total for share in shares} == {2}
    assert all(share.last for share in shares)


class Whole(Dataset):
    """12 samples for a model of 2 features."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return INPUTS[index].repeat(2), INPUTS[index]


@pytest.fixture(scope="module")
def forks():
    """Notes at each fork of this process whether a stage executes something."""
    seen = []
    os.register_at_fork(before=lambda: seen.append(any(lane.action for lane in activity.lanes)))
    return seen


def test_worker_processes_are_forked_while_no_stage_computes(forks):
    model = hybrid(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), 2, chunks=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = LoaderOptions(workers=1)
    train = TrainLoader(Whole(), 4, model.world, options=options)
    evaluation = EvalLoader(Whole(), 4, model.world, options=options)
    forks.clear()
    trainer = Trainer(
        model, optimizer, F.mse_loss, train, evaluation=evaluation, steps=4, eval_every=2
    )
    trainer.fit()
    # for the batch before the first step, the training, and each evaluation
    assert forks == [False] * 4


IMPORTED_BY = os.getpid()


class WhoImported(Dataset):
    """Tells whether the process that reads it has imported this module itself."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.zeros(1), torch.tensor(os.getpid() == IMPORTED_BY)


@pytest.mark.parametrize(("method", "imports"), [("fork", False), ("spawn", True)])
def test_worker_processes_are_started_by_the_method_that_python_is_set_to(method, imports):
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    try:
        [(_, found)] = evaluation(WhoImported(), workers=1)
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert found.tolist() == [imports] * 2


@pytest.mark.thorough
def test_a_data_set_that_cannot_be_pickled_works_in_worker_processes():
    dataset = Failing(lambda: (INPUTS[7], 7))  # a lambda
    assert sum(len(inputs) for inputs, _ in evaluation(dataset, workers=1)) == 12


def test_more_workers_than_cores_are_one_warning_of_a_line(caplog, monkeypatch, recwarn):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    for _ in range(2):
        assert sum(
            len(inputs) for inputs, _ in evaluation(TensorDataset(INPUTS, INPUTS), workers=2)
        )
    (said,) = [r.getMessage() for r in caplog.records if "workers=2" in r.getMessage()]
    assert "1 core" in said
    assert not [warning for warning in recwarn if "DataLoader" in str(warning.message)]
