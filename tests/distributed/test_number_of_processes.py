"""With a fixed number of logical replicas a run is the same on any number of processes."""

import json

import pytest
from safetensors.torch import load_file
from support.cases import thorough
from support.checkpoint_files import optimizer_in
from support.launch import forked_script, worker_module

worker = worker_module("replicas")
STEPS = worker.STEPS


def marked(names, quick):
    return [
        pytest.param(name, marks=[] if name in quick else pytest.mark.thorough) for name in names
    ]


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """Returns the results of the cases that are tested, by engine and number of processes."""
    items = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    folder, known = tmp_path_factory.mktemp("replicas"), {}

    def results(engine, processes):
        names = [
            name
            for name in worker.CASES
            if any(each.get("name") == name and each["engine"] == engine for each in params)
        ]
        if (engine, processes) not in known:
            known[engine, processes] = {}  # a launch that fails is not repeated
            status, output = forked_script(processes, "replicas.py", folder, engine, *names)
            assert status == 0, output
            known[engine, processes] = json.loads(
                (folder / f"{engine}_{processes}.json").read_text()
            )
        return known[engine, processes]

    return results


@pytest.mark.parametrize("processes", [2, *thorough([3, 4])])
@pytest.mark.parametrize("name", marked(worker.CASES, worker.QUICK))
@pytest.mark.parametrize("engine", ["local"])
def test_several_processes_train_the_same_bits_as_one(engine, name, processes, trained):
    assert trained(engine, processes)[name] == trained(engine, 1)[name]


@pytest.mark.thorough
@pytest.mark.parametrize("name", worker.DISTRIBUTED)
@pytest.mark.parametrize("engine", ["distributed"])
def test_two_pipelines_of_processes_train_the_same_bits_as_one(engine, name, trained):
    assert trained(engine, 4)[name] == trained(engine, 2)[name]


def saved(path):
    progress = json.loads((path / "state.json").read_text())
    return load_file(path / "model.safetensors"), optimizer_in(path), progress


@pytest.mark.parametrize(("first", "then"), [(1, 2), *thorough([(2, 3), (2, 1)])])
def test_a_run_that_is_resumed_on_other_numbers_of_processes_is_the_same_run(first, then, tmp_path):
    def run(name, processes, until, since=0):
        status, output = forked_script(
            processes, "replicas.py", tmp_path, "trainer", name, until, since
        )
        assert status == 0, output

    run("whole", 1, STEPS)
    run("moved", first, STEPS // 2)
    run("moved", then, STEPS, STEPS // 2)
    whole, moved = (saved(tmp_path / name / f"step_{STEPS:08d}") for name in ("whole", "moved"))
    for tensors, others in zip(whole[:2], moved[:2], strict=True):
        assert flat(tensors).keys() == flat(others).keys()
        assert all(value.equal(flat(others)[name]) for name, value in flat(tensors).items())
    assert whole[2] == moved[2]
    first, second = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "moved")
    )
    assert [first[key] for key in ("samples", "eval")] == [
        second[key] for key in ("samples", "eval")
    ]


def flat(state):
    """Returns the tensors of a model's or an optimizer's state by name."""
    entries = state.get("state", state)
    if not all(isinstance(value, dict) for value in entries.values()):
        return entries
    return {(name, key): v for name, entry in entries.items() for key, v in entry.items()}
