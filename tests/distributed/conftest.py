"""The launches that the cells of a file share."""

import collections

import pytest
from support.launch import Results


@pytest.fixture(scope="module")
def launched(request, tmp_path_factory):
    """Launches a worker script once for each number of processes, with the cells to be tested."""
    cells = collections.defaultdict(list)
    for item in request.session.items:
        of = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and "cell" in of:
            cells[of["worker"], of["processes"]].append(of["cell"])
    found = {}

    def results(worker, processes):
        key = worker, processes
        if key not in found:
            found[key] = None  # a launch that fails is not repeated for every cell
            found[key] = Results(worker, processes, tmp_path_factory.mktemp(worker), cells[key])
        return found[key] or pytest.fail(f"{worker} has failed before", pytrace=False)

    return results
