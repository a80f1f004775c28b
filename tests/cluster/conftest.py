"""The cluster of the tests in this folder, which `scripts/cluster_check.sh` runs."""

import os
from collections.abc import Iterator

import pytest
from cluster.slurm import Slurm, what_is_missing


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm of three nodes with two GPUs each, which are not real; down when the tests end."""
    if (missing := what_is_missing()) is not None:
        if "HYBRIDTRAIN_CLUSTER_REQUIRED" in os.environ:
            pytest.fail(missing, pytrace=False)
        pytest.skip(missing)
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.down()
