"""Fixtures for every folder."""

# Before anything that imports PyTorch: it hides the GPUs.
from support.gpus import show_gpus  # isort: skip

import collections
import gc
import os
import signal
import threading
from collections.abc import Iterator

import numpy
import pytest
import torch
from hypothesis import settings
from support.browser import browser_page  # noqa: F401
from support.launch import logging_as_before
from tqdm import tqdm

from hybridtrain.schedule import registry

# An example may take any time: no verdict depends on how busy the machine is. The quick command
# draws fewer than Hypothesis' 100.
settings.register_profile("--all", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=15)
settings.load_profile("quick")

# Files that take half a minute and more, also with `--all`. They begin first, so that none is left
# over at the end for one process alone.
LONG = (
    "test_faults",
    "test_core",
    "test_soak",
    "test_first_commands",
    "test_hub",
    "test_two_processes",
    "test_reading",
    "test_number_of_processes",
    "test_torchrun",
    "test_smp",
    "test_across_processes",
    "test_hf_trainer",
    "test_places",
    "test_readme",
    "test_base_files",
    "test_predict",
    "test_fine_tuning",
    "test_real_files",
    "test_command_line",
    "test_parts_of_commands",
    "test_stuck",
    "test_gpu_check",
    "test_monitors",
    "test_step_account",
    "test_strangers_files",
    "test_recipes",
    "test_own_config",
    "test_search",
    "test_plan_for_hardware",
    "test_output_loss",
    "test_submit",
    "test_check",
    "test_plan_answers",
    "test_compose",
    "test_commands",
    "test_resumed_runs",
    "test_one_process",
    "test_run_errors",
    "test_targets",
    "test_zoo",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--all` and `--gpu`."""
    parser.addoption("--all", action="store_true", help="the tests that are marked `thorough`, too")
    parser.addoption("--gpu", action="store_true", help="only the tests that are marked `gpu`")


def pytest_configure(config: pytest.Config) -> None:
    """Shows the GPUs with `--gpu`, and draws more examples with `--all`.

    Has Ctrl-C raise, also where a shell has started the tests in its background.
    """
    if config.getoption("--all"):
        settings.load_profile("--all")
    if config.getoption("--gpu"):  # workers of pytest-xdist start later, and get the option too
        show_gpus()
        # cuBLAS repeats its results with a fixed workspace only
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collects the test modules without collecting garbage.

    Their imports leave much that lives and little that dies, which Python would look through again
    and again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_unconfigure() -> None:
    """Ends what `_collections_leave_out_what_was_imported` has begun."""
    gc.unfreeze()  # or extension modules report at exit that their objects leak


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts the files; the order within a file stays.

    Leaves the thorough tests to `--all` and the tests of a GPU to `--gpu`.
    """
    on_gpu = config.getoption("--gpu")
    chosen = [item for item in items if (item.get_closest_marker("gpu") is not None) == on_gpu]
    if not config.getoption("--all"):
        chosen = [item for item in chosen if item.get_closest_marker("thorough") is None]
        chosen = chosen_cases(chosen, complete=not any("[" in path for path in config.args))
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen
    if on_gpu and not torch.cuda.is_available():
        reason = f"PyTorch {torch.__version__} sees no GPU on this machine"
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))
    rank = {name: index for index, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONG)))


def chosen_cases(items: list[pytest.Item], complete: bool = True) -> list[pytest.Item]:
    """Returns the items without the cases that `quick_cases` leaves to `--all`.

    `@pytest.mark.quick_cases(3)` keeps three cases of a parametrized test, from all over its list;
    `@pytest.mark.quick_cases("digits", "mnist")` keeps those with these ids,
    which must exist if the items are `complete`.
    """
    cases: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    left_out = set()
    for of_one_test in cases.values():
        marker = of_one_test[0].get_closest_marker("quick_cases")
        if marker is None:
            continue
        if isinstance(marker.args[0], int):
            count, kept = len(of_one_test), min(marker.args[0], len(of_one_test))
            chosen = {of_one_test[number * count // kept] for number in range(kept)}
        else:
            by_id = {item.nodeid.partition("[")[2][:-1]: item for item in of_one_test}
            unknown = [name for name in marker.args if name not in by_id]
            if unknown and complete:
                raise pytest.UsageError(f"quick_cases of {of_one_test[0].nodeid}: no {unknown}")
            chosen = {by_id[name] for name in marker.args if name in by_id}
        left_out |= set(of_one_test) - chosen
    return [item for item in items if item not in left_out]


@pytest.fixture(autouse=True, scope="module")
def _collections_leave_out_what_was_imported() -> None:
    """Has `gc.collect`, which the library calls too, not look through all modules each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def log_of_other_files() -> Iterator[None]:
    """Takes off what a run has hung onto the log, which the next file would write to.

    Nor does the next file wait for the lock of the terminal's lines: the default one is shared with
    forked processes, and remains held by one that is killed; any remains held by a thread whose bar
    could not be drawn. Each compilation of PyTorch takes it.
    """
    tqdm.set_lock(threading.RLock())
    with logging_as_before():
        yield


@pytest.fixture(autouse=True)
def schedules_of_one_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves a test the package's schedules and those of its file, so that `auto` searches no more.

    What it registers itself is forgotten at its end.
    """
    here = request.module.__name__
    schedules = {
        name: entry
        for name, entry in registry._REGISTERED.items()
        if entry.builder.__module__ == here or entry.builder.__module__.startswith("hybridtrain.")
    }
    monkeypatch.setattr(registry, "_REGISTERED", schedules)


@pytest.fixture
def one_intra_op_thread() -> Iterator[None]:
    """Adds up in one order on any machine, for bitwise comparisons.

    The threads of stages have fewer intra-op threads than the main thread, and their number decides
    in which order a kernel adds up.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def seeded(one_intra_op_thread: None) -> None:
    """Draws the same weights in each run of a test, and adds up in one order."""
    torch.manual_seed(0)
    numpy.random.seed(0)
