"""`share_gpus=True`: several ranks on one GPU over NCCL, with a stand-in for NCCL's version."""

import os

import pytest
import torch
import torch.distributed as dist

from hybridtrain import World
from hybridtrain import world as world_module
from hybridtrain._base.shared_gpus import nccl_variables
from hybridtrain.errors import WorldError
from hybridtrain.launch import Launch

OLD, NEW = (2, 28, 9), (2, 30, 7)
ONE_HOST = [["a 1"], ["a 1"], ["a 2"]]


@pytest.fixture
def join(monkeypatch):
    """Returns a function in which rank 1 of three joins; it returns what NCCL would be told.

    NCCL reads its variables in the first collective.
    """
    told = []

    def first_collective(*_, **__):
        told.append({k: v for k, v in os.environ.items() if k.startswith("NCCL_")})

    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(world_module, "physical_gpus", lambda devices: [])
    monkeypatch.setattr(torch, "zeros", lambda count, device: device)
    monkeypatch.setattr(dist, "all_reduce", first_collective)

    def join(gpus, version, **settings):
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
        monkeypatch.setattr(World, "gather", lambda *_: gpus)
        world = World(rank=1, size=3, backend="nccl", devices=(torch.device("cuda", 0),))
        vars(world).update(settings)
        world._with_pipeline_groups()
        return told[0]

    return join


def test_nccl_2_30_is_told_that_ranks_share_a_gpu_before_its_first_communicator(join):
    told = join(ONE_HOST, NEW, share_gpus=True)
    assert told["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "NCCL_HOSTID" not in told


def test_older_releases_of_nccl_get_a_host_for_each_rank_and_the_loopback_interface(join):
    told = join(ONE_HOST, OLD, share_gpus=True)
    assert told["NCCL_SOCKET_IFNAME"] == "lo"
    assert told["NCCL_IB_DISABLE"] == "1"
    assert told["NCCL_HOSTID"] == nccl_variables(OLD, 1, True)["NCCL_HOSTID"]
    assert len({nccl_variables(OLD, rank, True)["NCCL_HOSTID"] for rank in range(3)}) == 3


def test_ranks_on_several_hosts_do_not_connect_by_the_loopback_interface(join):
    told = join([["a 1"], ["a 1"], ["b 1"]], OLD, share_gpus=True)
    assert "NCCL_SOCKET_IFNAME" not in told


def test_variables_of_the_environment_stay(join):
    os.environ["NCCL_MAX_CTAS"] = "4"
    assert join(ONE_HOST, NEW, share_gpus=True)["NCCL_MAX_CTAS"] == "4"


@pytest.mark.parametrize("version", [OLD, NEW])
def test_nccl_is_told_nothing_if_each_rank_has_a_gpu(join, version, caplog):
    assert join([["a 1", "a 1"], ["a 2"], ["b 1"]], version, share_gpus=True, rank=0) == {}
    assert not caplog.records


def test_one_line_says_that_the_speed_means_nothing(join, caplog):
    join(ONE_HOST, NEW, share_gpus=True)
    assert not caplog.records  # rank 0 says it
    join(ONE_HOST, NEW, share_gpus=True, rank=0)
    assert [record.getMessage() for record in caplog.records] == [
        "up to 2 ranks share a GPU (share_gpus=True): results are as with a GPU for each rank, but "
        "the speed means nothing"
    ]


def test_without_the_option_a_shared_gpu_is_refused_and_the_option_is_named(join):
    with pytest.raises(WorldError, match=r"ranks 0 and 1 use the same GPU.*share_gpus=True"):
        join(ONE_HOST, NEW)


def devices_of(gpus, processes, nb_part=1, **settings):
    return [
        list(
            map(
                str,
                World.of_launch(
                    Launch("torchrun", rank, processes, rank, processes, None),
                    gpus,
                    nb_part,
                    backend="gloo",
                    **settings,
                ).devices,
            )
        )
        for rank in range(processes)
    ]


@pytest.mark.parametrize("devices", [None, "auto", "cuda"])
def test_ranks_take_turns_where_there_are_fewer_gpus(devices):
    shared = devices_of(2, 3, devices=devices, share_gpus=True)
    assert shared == [["cuda:0"], ["cuda:1"], ["cuda:0"]]
    two_stages = devices_of(1, 2, nb_part=2, devices=devices, share_gpus=True)
    assert two_stages == [["cuda:0"] * 2] * 2
    assert devices_of(2, 2, devices=devices, share_gpus=True) == [["cuda:0"], ["cuda:1"]]


def test_fewer_gpus_than_ranks_are_refused_without_the_option():
    with pytest.raises(WorldError, match="need 3 GPUs, but there are 2"):
        devices_of(2, 3, devices="cuda")
