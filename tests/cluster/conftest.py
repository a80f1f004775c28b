"""The cluster of the tests in this folder.

`test_core.py` is in every run of the tests with `--all`, the rest in `scripts/cluster_check.sh`
alone, which also makes a missing cluster a failure.
"""

import os
from collections.abc import Iterator

import pytest
from cluster.runs import NET
from cluster.slurm import NoClusterError, Slurm, what_is_missing

REQUIRED = "HYBRIDTRAIN_CLUSTER_REQUIRED" in os.environ

collect_ignore = [] if REQUIRED else ["test_slurm.py"]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm of three nodes with two GPUs each, which are not real, and two nodes beside it.

    It is down when the tests end.
    """
    refuse = pytest.fail if REQUIRED else pytest.skip
    if (missing := what_is_missing()) is not None:
        refuse(missing)
    try:
        cluster = Slurm(tmp_path_factory.mktemp("slurm"), nodes=3, spare=2)
    except NoClusterError as error:
        refuse(str(error))
    (cluster.work / "net.py").write_text(NET)
    yield cluster
    cluster.down()
