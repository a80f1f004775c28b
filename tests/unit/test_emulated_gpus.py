"""`scripts/bench/emulated_gpus.py`, without a GPU: stand-ins for streams and for CUDA's driver."""

import copy
import enum
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybridtrain.schedule import make_schedule
from scripts.bench import emulated_gpus as bench

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

WIDTH, CHUNKS = 8, 4


class Streams:
    """Notes what each device does, and checks that it waits for the others' values."""

    def __init__(self):
        self.current, self.waits = None, set()

    @contextmanager
    def on(self, lane):
        self.current = lane
        yield
        self.current = None

    def mark(self, lane):
        assert lane == self.current
        return lane

    def wait(self, lane, event):
        assert lane == self.current
        self.waits.add((event, lane))

    def synchronize(self):
        pass


def stages_and_inputs(count):
    stages = bench.stages_of(count, count, WIDTH, "cpu", torch.float32)
    return stages, list(torch.randn(CHUNKS, 2, WIDTH))


@pytest.mark.parametrize(("name", "per_device"), bench.OURS)
@pytest.mark.quick_cases(2)
def test_a_step_on_streams_has_the_gradients_of_the_whole_model(name, per_device):
    schedule = make_schedule(name, 2, CHUNKS, per_device)
    stages, inputs = stages_and_inputs(schedule.stages)
    plain = copy.deepcopy(nn.Sequential(*stages))
    streams = Streams()
    loop = bench.StreamLoop(schedule, stages, inputs, streams)
    loop.step()
    for x in inputs:
        (plain(x).mean() / CHUNKS).backward()
    for own, theirs in zip(nn.Sequential(*stages).parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, theirs.grad)
    assert streams.waits == {(0, 1), (1, 0)}


@pytest.mark.parametrize("name", bench.TORCH)
def test_the_orders_of_torch_train_the_same_stages(name):
    schedule = bench.torch_order(name, 2, CHUNKS)
    per_device = bench.TORCH[name][1]
    assert (schedule.stages, schedule.chunks) == (2 * per_device, CHUNKS)
    stages, inputs = stages_and_inputs(schedule.stages)
    bench.StreamLoop(schedule, stages, inputs, Streams()).step()
    assert all(p.grad is not None for stage in stages for p in stage.parameters())


def test_the_ideal_time_is_simulated_with_the_times_of_actions_alone(monkeypatch):
    schedule = make_schedule("zb-v", 2, CHUNKS, 2)
    stages, inputs = stages_and_inputs(4)
    clock, costs = [0.0], {"F": 1.0, "B": 3.0, "I": 2.0, "W": 2.0}
    run = bench.StreamLoop.run

    def timed(self, lane, action):
        clock[0] += costs[action.kind]
        run(self, lane, action)

    monkeypatch.setattr(bench.StreamLoop, "run", timed)
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    found = bench.durations_alone(schedule, stages, inputs, Streams(), 1)
    assert found.forward == (1.0,) * 4
    assert found.backward == (3.0,) * 4
    assert found.in_parts == (4.0,) * 4
    assert found.weight == (2.0,) * 4


class Result(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 1


def driver_of(sets):
    """Stands in for `cuda.bindings.driver`, on a GPU with 132 multiprocessors in so many sets."""

    def split(count, whole, flags, least):
        made = min(count, sets, whole.sm.smCount // least)
        return list(range(made)), made, "rest"

    def succeeding(function):
        def run(*arguments):
            results = function(*arguments)
            return Result.CUDA_SUCCESS, *(results if isinstance(results, tuple) else (results,))

        return run

    functions = {
        "cuDeviceGet": lambda ordinal: "device",
        "cuDeviceGetDevResource": lambda device, kind: SimpleNamespace(
            sm=SimpleNamespace(smCount=132)
        ),
        "cuDevSmResourceSplitByCount": split,
        "cuDevResourceGenerateDesc": lambda resources, count: resources[0],
        "cuGreenCtxCreate": lambda description, device, flags: description,
        "cuGreenCtxStreamCreate": lambda context, flags, priority: 100 + context,
    }
    return SimpleNamespace(
        CUresult=Result,
        CUdevResourceType=SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM="sm"),
        CUgreenCtxCreate_flags=SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1),
        CUstream_flags=SimpleNamespace(CU_STREAM_NON_BLOCKING=1),
        **{name: succeeding(function) for name, function in functions.items()},
    )


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.usefixtures("one_gpu")
def test_each_device_has_a_stream_on_its_own_multiprocessors():
    made = []
    streams = bench.GreenStreams(4, driver_of(16), made.append)
    assert made == [100, 101, 102, 103]
    assert streams.multiprocessors == 32
    assert [bench.share_of(132, count) for count in (1, 2, 8)] == [128, 64, 16]


@pytest.mark.usefixtures("one_gpu")
def test_an_error_of_the_driver_names_its_function():
    driver = driver_of(16)

    def failing(*_):
        return Result.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, None

    driver.cuGreenCtxCreate = failing
    with pytest.raises(RuntimeError, match=r"failing: .*INVALID_RESOURCE_CONFIGURATION"):
        bench.GreenStreams(4, driver, lambda handle: handle)


@pytest.mark.usefixtures("one_gpu")
def test_fewer_sets_of_multiprocessors_than_devices_are_an_error():
    with pytest.raises(RuntimeError, match="into 3 sets, not 4"):
        bench.GreenStreams(4, driver_of(3), lambda handle: handle)


@pytest.mark.thorough
def test_the_script_can_be_tried_on_a_cpu(capsys):
    small = ["--layers", "4", "--width", "8", "--rows", "2", "--chunks", "4", "--repeats", "1"]
    assert bench.main(["--device", "cpu", "--devices", "2", *small]) == 0
    said = capsys.readouterr().out
    assert "ScheduleZBVZeroBubble" in said
    assert "An emulation of 2 GPUs" in said
