"""The devices of a pipeline, shared by one process or several."""

import pytest

from hybridtrain.cluster import Cluster
from hybridtrain.errors import ConfigError


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("per_device", [1, 3])
def test_every_stage_is_on_one_device_and_owned_by_one_process(processes, per_device):
    cluster = Cluster(("cuda:0", "cuda:1", "cuda:2", "cuda:3"), processes)
    owned = [cluster.stages_of(process, per_device) for process in range(processes)]
    assert sorted(stage for stages in owned for stage in stages) == list(range(4 * per_device))
    for process, stages in enumerate(owned):
        assert len({cluster.device_of(stage) for stage in stages}) == 4 // processes
        assert {cluster.process_of(stage) for stage in stages} == {process}


def test_devices_that_processes_cannot_share_equally_are_refused():
    with pytest.raises(ConfigError, match="3 devices cannot be shared equally by 2 processes"):
        Cluster(("cpu",) * 3, processes=2)
    with pytest.raises(ConfigError, match="0 devices"):
        Cluster(())
