"""Replicas, processes and stages: who owns what, for one process or several per replica."""

import pytest
import torch

from hybridtrain.errors import ConfigError
from hybridtrain.partitioning import StageOwners
from hybridtrain.world import World


def test_one_process_owns_every_stage_of_its_replica():
    world = World(rank=3, size=6, devices=(torch.device("cpu"),) * 2)
    assert (
        world.data_parallel_rank,
        world.data_parallel_size,
        world.pipeline_rank,
        world.nb_part,
    ) == (3, 6, 0, 2)
    assert world.stage_owners.stages_of(world.pipeline_rank, stages_per_device=2) == [0, 1, 2, 3]


def test_processes_with_one_device_each_share_a_replica():
    worlds = [World(rank=rank, size=8, processes_per_replica=4) for rank in range(8)]
    assert [world.data_parallel_rank for world in worlds] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {world.data_parallel_size for world in worlds} == {2}
    assert {world.nb_part for world in worlds} == {4}
    owned = [world.stage_owners.stages_of(world.pipeline_rank, 2) for world in worlds]
    assert owned == [[0, 4], [1, 5], [2, 6], [3, 7]] * 2
    assert [world.is_main for world in worlds] == [True] + [False] * 7


def test_every_stage_belongs_to_one_process():
    owners = StageOwners(("cuda:0", "cuda:1", "cuda:0", "cuda:1"), processes=2)
    owned = [owners.stages_of(process, 3) for process in range(2)]
    assert sorted(owned[0] + owned[1]) == list(range(12))
    assert owned[0] == [0, 1, 4, 5, 8, 9]
    assert [owners.device_of(stage) for stage in owned[1]] == ["cuda:0", "cuda:1"] * 3


def test_in_a_v_the_second_half_of_the_stages_comes_back_over_the_devices():
    owners = StageOwners(("cuda:0", "cuda:1", "cuda:0", "cuda:1"), processes=2).placed("v")
    assert [owners.stages_of(process, 2) for process in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [owners.device_of(stage) for stage in (0, 7, 3, 4)] == [
        "cuda:0", "cuda:0", "cuda:1", "cuda:1",
    ]  # fmt: skip
    assert [owners.local_index(stage) for stage in range(8)] == [0, 1, 0, 1, 1, 0, 1, 0]


def test_devices_that_processes_cannot_share_equally_are_refused():
    with pytest.raises(ConfigError, match="3 devices cannot be shared equally by 2 processes"):
        StageOwners(("cpu",) * 3, processes=2)
    with pytest.raises(ConfigError, match="0 devices"):
        StageOwners(())


@pytest.mark.parametrize(
    ("per_replica", "place", "ranks"),
    [(1, 0, [0, 1, 2, 3]), (2, 0, [0, 2]), (2, 1, [1, 3])],
)
def test_the_group_of_a_stage_has_one_process_of_every_replica(
    monkeypatch, per_replica, place, ranks
):
    made = []
    monkeypatch.setattr(
        "hybridtrain.world._new_group", lambda backend, timeout, ranks: made.append(list(ranks))
    )
    World(size=4, processes_per_replica=per_replica).new_stage_group(place)
    assert made == [ranks]
