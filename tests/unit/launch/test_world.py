"""World: launchers, devices and backends, from an environment given as a plain mapping."""

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from hybridtrain import world as world_module
from hybridtrain._base.devices import check_nb_part, choose_devices, gpus_left_out
from hybridtrain.errors import WorldError
from hybridtrain.launch import Launch, detect
from hybridtrain.launch.environment import first_host
from hybridtrain.world import World, edges_of

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "there",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
}
SLURM = {
    "SLURM_PROCID": "7",
    "SLURM_NTASKS": "12",
    "SLURM_LOCALID": "3",
    "SLURM_NNODES": "3",
    "SLURM_JOB_NODELIST": "node[012-014,020],x1",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
}
CPU = torch.device("cpu")


class ReadOnly(dict):
    """An environment that notices if someone writes to it."""

    def _refuse(self, *args, **kwargs):
        raise AssertionError("the environment was written")

    __setitem__ = __delitem__ = pop = update = setdefault = clear = _refuse


def launch(local_rank=0, local_size=1):
    return Launch("torchrun", local_rank, local_size, local_rank, local_size, None)


def cuda(*indices):
    return tuple(torch.device("cuda", index) for index in indices)


def test_the_variables_of_torchrun_are_understood():
    assert detect(ReadOnly(TORCHRUN)) == Launch("torchrun", 5, 6, 1, 2, ("there", 29500))


def test_torchrun_with_one_process_needs_no_process_group():
    alone = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert detect(ReadOnly(alone)).master is None


def test_the_variables_of_slurm_are_understood():
    found = detect(ReadOnly({**SLURM, "SLURM_RESTART_COUNT": "2", "SLURM_GPUS_ON_NODE": "8"}))
    assert found == Launch(
        "slurm",
        7,
        12,
        3,
        4,
        ("node012", 10000 + 123456 % 20000),
        node_gpus=8,
        gpus_given="SLURM_GPUS_ON_NODE=8",
        run="Slurm job 123456, step 0, attempt 2",
    )


@pytest.mark.parametrize(
    ("counts", "node", "tasks"),
    [("2,1", 0, 2), ("2,1", 1, 1), ("1(x2),3", 1, 1), ("1(x2),3", 2, 3), ("4(x12)", 11, 4)],
)
def test_the_tasks_of_the_step_on_this_node_are_counted_exactly(counts, node, tasks):
    # a smaller step inherits SLURM_NTASKS_PER_NODE from its job
    step = {"SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": str(node)}
    assert detect({**SLURM, "SLURM_NTASKS_PER_NODE": "9", **step}).local_size == tasks


def test_a_count_of_tasks_that_cannot_be_read_is_shown():
    with pytest.raises(WorldError, match=r"cannot read SLURM_STEP_TASKS_PER_NODE='2\(y3\)'"):
        detect({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(y3)"})


# a batch script's shell, and that of an interactive job
@pytest.mark.parametrize("step", [None, 0xFFFFFFFB, 0xFFFFFFFA])
def test_a_batch_script_without_srun_is_an_error_at_once(monkeypatch, step):
    clean(monkeypatch)
    shell = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}
    for key, value in {**shell, **({"SLURM_STEP_ID": str(step)} if step else {})}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(WorldError, match=r"12 tasks .*srun -n 1"):
        World.from_env(devices="cpu")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert World.from_env(devices="cpu").size == 1


def test_two_steps_of_a_job_have_two_ports():
    ports = {detect({**SLURM, "SLURM_STEP_ID": str(step)}).master[1] for step in range(200)}
    assert len(ports) == 200


def test_the_address_of_the_store_can_be_given_under_slurm_too():
    assert detect({**SLURM, "MASTER_ADDR": "here"}).master == ("here", 10000 + 123456 % 20000)
    assert detect({**SLURM, "MASTER_PORT": "4000"}).master == ("node012", 4000)


@pytest.mark.parametrize("environ", [TORCHRUN, SLURM])
@pytest.mark.parametrize("port", ["0", "99999"])
def test_a_number_that_is_no_port_is_an_error_that_names_the_variable(environ, port):
    with pytest.raises(WorldError, match=f"MASTER_PORT={port}"):
        detect({**environ, "MASTER_PORT": port})


def test_tasks_per_node_of_slurm_win_over_the_division():
    assert detect({**SLURM, "SLURM_NTASKS_PER_NODE": "5"}).local_size == 5
    assert detect({**SLURM, "SLURM_NTASKS": "10"}).local_size == 4  # 10 tasks on 3 nodes: 4, 3, 3


def test_one_slurm_task_needs_no_process_group_and_no_host_list():
    assert detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).master is None


def test_two_slurm_jobs_have_two_ports_all_above_the_reserved_ones():
    def port(job):
        return detect({**SLURM, "SLURM_JOB_ID": str(job)}).master[1]

    assert port(123456) != port(123457)
    assert all(1024 < port(job) < 65536 for job in (1, 19999, 20000, 123456, 99999999))


def test_the_host_list_of_the_slurm_step_wins_over_that_of_the_job():
    step = {**SLURM, "SLURM_STEP_NODELIST": "node020"}
    assert detect(step).master[0] == "node020"


def test_without_a_launcher_there_is_one_process():
    assert detect(ReadOnly({"PATH": "/bin"})) == Launch("single", 0, 1, 0, 1, None)


def test_torchrun_wins_inside_a_slurm_job():
    both = detect(ReadOnly({**SLURM, **TORCHRUN}))
    assert both == detect(TORCHRUN)
    assert both.launcher == "torchrun"


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
@pytest.mark.parametrize("value", ["", "two", "1.5", "0x1"])
def test_a_variable_that_is_not_a_number_is_named_with_its_value(launcher, value):
    environ, keys = {
        "torchrun": (TORCHRUN, ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
        "slurm": (SLURM, ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID"]),
    }[launcher]
    for key in keys:
        with pytest.raises(WorldError, match=rf"variable {key}='{value}' must be an integer"):
            detect({**environ, key: value})


def test_slurm_without_a_host_list_says_to_use_srun():
    environ = {key: value for key, value in SLURM.items() if key != "SLURM_JOB_NODELIST"}
    with pytest.raises(WorldError, match=r"SLURM_JOB_NODELIST is not set.*srun"):
        detect(environ)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node[012-014,020],x1", "node012"),
        ("node[7,9-12]", "node7"),
        ("x1,node[012-014]", "x1"),
        ("single", "single"),
        ("a-b-c,d", "a-b-c"),
        ("jean-zay-iam[03-04]", "jean-zay-iam03"),
        ("r1i0n[3,5]", "r1i0n3"),
        ("rack[1-2]n[03-04],z", "rack1n03"),
        ("node[01-02].cluster.org", "node01.cluster.org"),
    ],
)
def test_the_master_is_the_first_host_of_the_list(nodelist, host):
    assert first_host(nodelist) == host


def test_a_host_list_that_cannot_be_read_is_shown():
    with pytest.raises(WorldError, match=r"cannot read the Slurm host list ',,'"):
        first_host(",,")


@pytest.mark.parametrize("devices", [None, "auto", "cuda"])
def test_each_process_gets_the_next_nb_part_gpus(devices):
    assert choose_devices(2, devices, launch(0, 2), 4) == cuda(0, 1)
    assert choose_devices(2, devices, launch(1, 2), 4) == cuda(2, 3)
    assert choose_devices(1, devices, launch(3, 4), 4) == cuda(3)


@pytest.mark.parametrize("devices", [None, "auto", "cpu"])
def test_without_gpus_the_stages_are_on_the_cpu(devices):
    assert choose_devices(3, devices, launch(1, 2), 0) == (CPU,) * 3


@pytest.mark.parametrize("devices", [None, "auto", "cuda"])
@pytest.mark.parametrize("launcher", [{}, SLURM, TORCHRUN])
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CUDA_VISIBLE_DEVICES", "0,1"),
        ("CUDA_VISIBLE_DEVICES", "GPU-8932f937"),
        ("SLURM_GPUS_ON_NODE", "2"),
        ("SLURM_JOB_GPUS", "0,3"),
    ],
)
def test_gpus_that_were_given_and_that_pytorch_does_not_see_are_an_error(
    devices, launcher, variable, value
):
    here = detect({**launcher, variable: value})
    with pytest.raises(
        WorldError,
        match=rf"{variable}={value} assigns GPUs to this process, .*PyTorch .* sees none .*"
        rf"set \S*devices=cpu",
    ):
        choose_devices(1, devices, here, 0)
    assert choose_devices(1, "cpu", here, 0) == (CPU,)
    assert choose_devices(1, None, replace(here, local_rank=0), 8) == cuda(0)


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_gpus_that_the_user_hides_are_none_that_were_given(hidden):
    here = detect({**SLURM, "SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": hidden})
    assert choose_devices(2, None, here, 0) == (CPU,) * 2
    assert detect({"SLURM_GPUS_ON_NODE": "0", "SLURM_JOB_GPUS": ""}).gpus_given == ""


def test_auto_takes_the_cpu_when_there_are_too_few_gpus():
    assert choose_devices(2, "auto", launch(0, 2), 3) == (CPU,) * 2
    assert choose_devices(2, "cpu", launch(0, 2), 8) == (CPU,) * 2


@pytest.mark.parametrize(
    ("processes", "nb_part", "gpus", "says", "processes_then", "nb_part_then"),
    [
        (1, 2, 1, "nb_part=2 needs 2 GPUs, but this machine has 1 GPU; to train on it, set "
         "nb_part=1 or devices=[cuda:0,cuda:0]", 1, 1),
        (1, 4, 3, "set nb_part=3 or devices=", 1, 3),
        (2, 2, 3, "2 processes on this node x nb_part=2 need 4 GPUs, but this machine has 3 GPUs; "
         "to train on GPUs, set nb_part=1", 2, 1),
        (4, 1, 3, "start 3 processes with nb_part=1", 3, 1),
        (2, 2, 1, "start 1 process with nb_part=1", 1, 1),
    ],
)  # fmt: skip
def test_auto_says_that_it_leaves_gpus_out_and_its_advice_uses_them(
    processes, nb_part, gpus, says, processes_then, nb_part_then
):
    line = gpus_left_out(nb_part, launch(0, processes), gpus)
    assert line.startswith("training on the CPU: ")
    assert says in line
    devices = choose_devices(nb_part_then, "auto", launch(0, processes_then), gpus)
    assert devices == cuda(*range(nb_part_then))
    if processes == 1:
        listed = line.rpartition("devices=[")[2].rstrip("]").split(",")
        assert choose_devices(nb_part, listed, launch(0, 1), gpus) == cuda(*[0] * nb_part)


@pytest.mark.parametrize(
    ("nb_part", "gpus", "devices"), [(2, 1, "auto"), (2, 0, "auto"), (2, 1, "cpu")]
)
def test_a_world_on_the_cpu_says_that_there_is_a_gpu(monkeypatch, nb_part, gpus, devices):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    world = World.from_env(nb_part, devices)
    assert world.devices == (CPU,) * nb_part
    assert (world.unused_gpus is not None) == (devices == "auto" and gpus > 0)


@pytest.mark.parametrize("devices", [None, "auto", "cuda"])
def test_a_task_that_slurm_shows_its_own_gpus_alone_takes_them(devices):
    """As --gpus-per-task and --gpu-bind=single do."""
    bound = Launch("slurm", 3, 4, 3, 4, None, node_gpus=8)
    assert choose_devices(2, devices, bound, 2) == cuda(0, 1)
    assert choose_devices(1, ["cuda:0"], replace(bound, node_gpus=4), 1) == cuda(0)
    # all see the same two
    assert choose_devices(1, devices, Launch("slurm", 1, 2, 1, 2, None, node_gpus=2), 2) == cuda(1)
    # two tasks for one GPU
    with pytest.raises(WorldError, match="need 2 GPUs, but there are 1"):
        choose_devices(1, "cuda", Launch("slurm", 1, 2, 1, 2, None, node_gpus=1), 1)


@pytest.mark.parametrize(("devices", "gpus"), [(None, 3), ("cuda", 3), ("cuda", 0)])
def test_too_few_gpus_are_an_error_that_counts_them_and_the_needed_ones(devices, gpus):
    with pytest.raises(
        WorldError,
        match=rf"2 processes on this node x \S*nb_part=2 need 4 GPUs, but there are {gpus}",
    ):
        choose_devices(2, devices, launch(1, 2), gpus)


def test_a_list_of_devices_is_for_each_process_or_for_all_of_the_node():
    assert choose_devices(2, ["cpu", "cpu"], launch(1, 2), 0) == (CPU, CPU)
    assert choose_devices(2, [1, "cuda:3"], launch(0, 1), 4) == cuda(1, 3)
    whole_node = ["cuda:3", "cuda:2", "cuda:1", "cuda:0"]
    assert choose_devices(2, whole_node, launch(0, 2), 4) == cuda(3, 2)
    assert choose_devices(2, whole_node, launch(1, 2), 4) == cuda(1, 0)
    assert choose_devices(1, "cuda:2", launch(0, 1), 4) == cuda(2)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cpu"] * 3, r"3 devices; list \S*nb_part=2, or 4 for the 2 processes"),
        (["cpu"], r"1 devices; list \S*nb_part=2"),
        ([], r"0 devices; list"),
        (["cuda:0", "cpu"], r"mixes device types"),
        (["cuda:0", "cuda:9"], r"devices=cuda:9 .*: this machine has 4 GPUs"),
        ([0, 7], r"devices=cuda:7 .*: this machine has 4 GPUs"),
        ("gpu", r"'gpu' is .* cpu and cuda:0"),
        (["meta", "meta"], r"'meta' is not supported"),
    ],
)
def test_a_list_of_devices_that_does_not_fit_is_refused_with_the_reason(devices, message):
    with pytest.raises(WorldError, match=message):
        choose_devices(2, devices, launch(0, 2), 4)


@pytest.mark.parametrize("nb_part", [0, -1, 1.5, True, "2"])
def test_nb_part_must_be_a_positive_number(nb_part):
    with pytest.raises(WorldError, match=rf"nb_part={nb_part} must be a positive"):
        check_nb_part(nb_part)


def clean(monkeypatch):
    for key in os.environ:
        if key.startswith("SLURM_") or key in TORCHRUN:
            monkeypatch.delenv(key)


def test_a_single_process_is_a_world_of_size_1(monkeypatch):
    clean(monkeypatch)
    before = dict(os.environ)
    world = World.from_env(nb_part=3, devices="cpu")
    assert dict(os.environ) == before
    assert (world.launcher, world.rank, world.size, world.nb_part) == ("single", 0, 1, 3)
    assert (world.is_main, world.backend, world.devices) == (True, "gloo", (CPU,) * 3)
    assert world.new_stage_group(0) is None
    assert world.broadcast(3) == 3
    assert world.gather("a") == ["a"]
    assert world.sum(torch.tensor([2.0])).tolist() == [2.0]
    assert world.on_main(lambda: 7) == world.from_main(lambda: 7) == 7
    world.close()


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("mpi2", r"backend=mpi2 is not available; this build of PyTorch has: gloo"),
        ("nccl", r"backend=nccl (needs GPUs|is not available)"),
    ],
)
def test_a_backend_that_does_not_fit_is_refused(monkeypatch, backend, message):
    clean(monkeypatch)
    with pytest.raises(WorldError, match=message):
        World.from_env(devices="cpu", backend=backend)


def test_nccl_connects_all_processes_when_they_join_and_not_at_their_first_sum(monkeypatch):
    made = []
    monkeypatch.setattr(world_module, "physical_gpus", lambda devices: [])
    monkeypatch.setattr(World, "gather", lambda self, value: [value])
    monkeypatch.setattr(torch, "zeros", lambda count, device: device)
    monkeypatch.setattr(world_module, "_new_group", lambda *_: "a group")
    monkeypatch.setattr(dist, "all_reduce", lambda where, group: made.append((where, group)))
    monkeypatch.setattr(dist, "P2POp", lambda operation, *_, **where: (operation, where))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda messages: made.extend(messages) or [])
    World(size=2, backend="nccl", devices=cuda(0, 1, 2))._with_pipeline_groups()
    assert made == [(device, None) for device in cuda(0, 2)]
    made.clear()
    one = World(size=2, backend="nccl", devices=cuda(0), processes_per_replica=2)
    one._with_pipeline_groups()
    other_end = {"group": "a group", "group_peer": 1}
    edges = [(dist.isend, other_end), (dist.irecv, other_end)]
    assert made == [(*cuda(0), None), (*cuda(0), "a group"), *edges]
    assert list(one.edge_groups) == [(0, 1), (1, 0)]
    made.clear()
    World(size=2, devices=cuda(0))._with_pipeline_groups()
    assert made == []


@pytest.mark.parametrize("processes", range(2, 9))
def test_a_process_has_two_edges_at_most_and_the_first_and_the_last_are_neighbors(processes):
    edges = edges_of(processes)
    assert len(edges) == len(set(edges)) == (2 if processes == 2 else 2 * processes)
    assert set(edges) == {(receiver, sender) for sender, receiver in edges}
    assert {(0, processes - 1), (processes - 1, 0)} <= set(edges)
    for place in range(processes):
        assert sum(place in edge for edge in edges) <= 4


def test_missing_processes_are_an_error_that_counts_the_expected_ones(monkeypatch):
    clean(monkeypatch)
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for key, value in {**environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(key, value)
    before = dict(os.environ)
    with pytest.raises(WorldError, match=r"rank 1 could not join the 2 processes.*torchrun"):
        World.from_env(devices="cpu", timeout_s=1)
    assert dict(os.environ) == before
