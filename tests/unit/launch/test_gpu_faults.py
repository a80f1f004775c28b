"""What would go wrong on GPUs alone, checked without one: draws, norms, memory, shared devices."""

import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.compare import assert_same, cpu_world, grads, hybrid, mean_loss
from support.nets import WIDTH, GPUGenerator, floats
from support.stand_in_gpus import on_host, stand_in_gpus
from torch import nn

from hybridtrain import HybridModel, World
from hybridtrain._base.accelerator import Cuda
from hybridtrain._base.shared_gpus import check_not_shared
from hybridtrain.checkpoint.host_copies import HostCopies
from hybridtrain.checkpoint.state import checkpoint_files
from hybridtrain.cli.config.schema import Config
from hybridtrain.cli.run import build
from hybridtrain.data import as_loader
from hybridtrain.errors import BatchError, WorldError
from hybridtrain.graph import layers_of
from hybridtrain.loop import RunStats
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning.measurements import LayerProfiler
from hybridtrain.pipeline import LayerRNG, device_memory, layer_rng, reset_peak_memory
from hybridtrain.pipeline.reducer import norm_over_devices, norm_over_processes


class ForeignDropout(nn.Module):
    """Draws as a CUDA extension does: from the device's default generator, which nobody sees."""

    generator = GPUGenerator()

    def forward(self, x):
        return x * (self.generator.rand(x.shape) > 0.5) * x


def have_own_generator(monkeypatch, generator):
    """Gives the threads of the models made from here on a generator, as a GPU of their own does."""

    def of_world(seed, world, probes_compiled=False):
        return LayerRNG(seed, world.owned_replicas.start, probes_compiled, lambda: generator)

    monkeypatch.setattr(LayerRNG, "of_world", of_world)


def foreign_gradients(monkeypatch, recompute, steps=2):
    have_own_generator(monkeypatch, ForeignDropout.generator)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), ForeignDropout(), nn.Linear(WIDTH, WIDTH))
    model = hybrid(net, 1, chunks=2, seed=7, recompute=recompute)
    for step in range(steps):
        ForeignDropout.generator.manual_seed(step)  # as others leave it
        ForeignDropout.generator.set_offset(8)
        model.train_step(floats(8, seed=step), None, mean_loss)
    return grads(net)


def test_a_foreign_kernel_draws_the_same_mask_in_a_recomputation(monkeypatch):
    kept = foreign_gradients(monkeypatch, "never")
    assert_same(foreign_gradients(monkeypatch, "always"), kept)


def test_the_default_generator_is_where_it_was_after_a_step(monkeypatch):
    foreign_gradients(monkeypatch, "always", steps=1)
    generator = ForeignDropout.generator
    assert (generator.initial_seed(), generator.get_offset()) == (0, 8)


class Drops(nn.Module):
    """Calls what a dropout is on a GPU, which takes no generator."""

    def forward(self, x):
        return torch.native_dropout(x, 0.5, True)[0]


class DefaultGenerator(GPUGenerator):
    """The CPU's default generator as if it were a GPU's."""

    device = torch.device("cpu")

    def manual_seed(self, seed):
        super().manual_seed(seed)
        torch.default_generator.manual_seed(seed)


def test_a_dropout_draws_from_a_generator_of_its_own_thread_without_a_lock(monkeypatch):
    found = []
    for owns in (False, True):
        if owns:
            generator = DefaultGenerator()
            generator.set_offset(8)
            have_own_generator(monkeypatch, generator)
            monkeypatch.setattr(layer_rng, "default_generator_lock", None)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Drops(), nn.Linear(WIDTH, WIDTH), Drops())
        model = hybrid(net, 1, chunks=2, seed=7, recompute="always")
        model.train_step(floats(8), None, mean_loss)
        found.append(grads(net))
    assert_same(*found)
    assert (generator.initial_seed(), generator.get_offset()) == (0, 8)


def test_the_host_sleeps_where_it_waits_for_an_event_of_a_gpu(monkeypatch):
    made = []

    def event(**settings):
        made.append(settings)
        return SimpleNamespace(record=lambda stream: None)

    monkeypatch.setattr(torch.cuda, "Event", event)
    Cuda().record_event(None)
    Cuda().record_event(None, timing=True)
    assert [settings["blocking"] for settings in made] == [True, True]
    assert [settings["enable_timing"] for settings in made] == [False, True]


def test_the_norm_over_processes_waits_for_no_device(monkeypatch):
    own = [floats(5, seed=seed) * 10**seed for seed in range(4)]
    expected = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(own)))
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: None)
    with stand_in_gpus(1) as gpus:
        device = gpus.devices[0]
        gradients = [gpus.copy(one, device) for one in own]
        elsewhere = SimpleNamespace(grad=None, dtype=torch.float32)
        parameters = [SimpleNamespace(grad=one, dtype=torch.float32) for one in gradients]
        parameters[2:2] = [elsewhere]
        norm = norm_over_processes(parameters, None, device, device)
        none = norm_over_processes([elsewhere] * 2, None, device, device)
        assert gpus.syncs == 0
        assert torch.equal(on_host(norm), expected)
        assert on_host(none) == 0


def test_the_norm_over_devices_is_bitwise_that_of_one_device():
    own = [floats(5, seed=seed) * 10**seed for seed in range(5)]
    expected = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(own)))
    with stand_in_gpus(2) as gpus:
        moved = [gpus.copy(one, gpus.devices[k in (1, 2, 4)]) for k, one in enumerate(own)]
        norm = norm_over_devices(moved)
        assert gpus.syncs == 0
        assert torch.equal(on_host(norm), expected)


def test_a_deleted_model_frees_its_memory_without_the_garbage_collector():
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    model = hybrid(net, 2)
    gc.collect()
    gc.disable()
    try:
        model.train_step(floats(8), None, mean_loss)
        parts = [weakref.ref(model), weakref.ref(model.pipeline), weakref.ref(net[0].weight)]
        del model, net
        for _ in range(500):  # the threads end their last action
            if not any(part() for part in parts):
                break
            time.sleep(0.01)
        assert [part() for part in parts] == [None, None, None]
    finally:
        gc.enable()


def test_received_values_are_freed_without_the_garbage_collector():
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    seen = []
    net[1].register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0])))
    model = hybrid(net, 2)
    gc.collect()
    gc.disable()
    try:
        model.train_step(floats(8), None, mean_loss)
        for _ in range(500):
            if not any(value() is not None for value in seen):
                break
            time.sleep(0.01)
        assert all(value() is None for value in seen)
    finally:
        gc.enable()


def test_a_tied_parameter_is_copied_to_the_host_once():
    copies = HostCopies()
    net = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    net[1].weight = net[0].weight
    with stand_in_gpus(1) as gpus:
        weight = gpus.copy(floats(5), gpus.devices[0])
        average = {"embedding": weight, "head": weight.detach()}
        model = HybridModel(net, cpu_world())
        checkpoint_files(
            model, torch.optim.SGD(net.parameters()), {}, {"ema": average}, copies=copies
        )
    biases, shared = 2 * 5 * 4, 5 * 5 * 4
    assert copies.nbytes == biases + shared + average["head"].nbytes


def test_no_other_process_takes_part_in_a_measurement(monkeypatch):
    def collective(self, x):
        raise AssertionError("the others do not measure")

    monkeypatch.setattr(nn.SyncBatchNorm, "forward", collective)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SyncBatchNorm(WIDTH))
    LayerProfiler(layers_of(net), floats(4), [torch.device("cpu")])
    with pytest.raises(AssertionError, match="the others"):
        net(floats(4))


def test_a_batch_with_fewer_micro_batches_than_others_is_refused():
    model = HybridModel(nn.Sequential(nn.Linear(WIDTH, 2)), cpu_world(), chunks=4)
    # the option needs GPUs
    model.options = PipelineOptions(chunks=4, sync_batch_norm=True)
    replicas = {"data_parallel_size": 2, "fixed_replicas": None, "owned_replicas": range(1)}
    model.world = SimpleNamespace(**replicas, size=1, nb_part=1)
    with pytest.raises(BatchError, match=r"3 samples for chunks=4.*drop_last=True"):
        model.train_step(floats(3), None, mean_loss)


def test_two_processes_on_one_gpu_are_refused_with_the_way_out():
    check_not_shared([["a 1"], ["a 2"], ["b 1"]])
    with pytest.raises(WorldError, match=r"ranks 0 and 2 use the same GPU.*backend=gloo"):
        check_not_shared([["a 1"], ["a 2"], ["a 1"]])


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_for_matrix_products_and_convolutions_alike(monkeypatch, tf32):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not tf32)
    before = torch.get_float32_matmul_precision()
    try:
        config = Config()
        config.trainer.tf32 = tf32
        build.set_numerics(config, World())
        assert torch.backends.cudnn.allow_tf32 is tf32
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("nb_part", [1, 2])
def test_each_action_has_its_device_as_the_current_one_and_uses_its_one_stream(
    monkeypatch, nb_part
):
    with stand_in_gpus(nb_part) as gpus:
        current = {}
        monkeypatch.setattr(
            gpus, "set_device", lambda device: current.update({threading.get_ident(): device})
        )
        world = World.from_env(nb_part, list(map(str, gpus.devices)))
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(nb_part)]
        found = {"forward": [], "backward": []}

        def note(kind):
            device = current[threading.get_ident()]
            assert gpus.current_stream(device) is gpus.default_stream(device)
            found[kind].append(device)

        def after_forward(layer, args, output):
            note("forward")
            output.register_hook(lambda gradient: note("backward"))

        for layer in layers:
            layer.register_forward_hook(after_forward)
        model = HybridModel(nn.Sequential(*layers), world, chunks=2, self_check=False)
        current.clear()  # of the placement
        for _ in range(2):
            model.train_step(floats(4), None, mean_loss)
            current[threading.get_ident()] = "another, which the caller's code has chosen"
        for devices in found.values():
            assert sorted(devices, key=str) == sorted(gpus.devices * 4, key=str)


def test_the_peak_of_a_device_begins_with_the_run_and_tells_what_is_reserved():
    with stand_in_gpus(1) as gpus:
        world = World.from_env(1, [str(gpus.devices[0])])
        model = HybridModel(nn.Sequential(nn.Linear(WIDTH, WIDTH)), world)
        big = gpus.copy(torch.zeros(1 << 20), gpus.devices[0])
        del big
        reset_peak_memory(model.pipeline)
        memory = device_memory(model.pipeline)["cpu:0"]
        assert memory["allocated"] < 1 << 20 < memory["reserved"]


def test_the_memory_of_a_stage_is_logged_beside_what_its_device_has():
    with stand_in_gpus(1) as gpus:
        world = World.from_env(1, [str(gpus.devices[0])])
        model = HybridModel(nn.Sequential(nn.Linear(WIDTH, WIDTH)), world)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        stats = RunStats(model, as_loader([(floats(4), floats(4))], world))
        stats.begin_step(recorded=False)  # no phases: its times are of no interest
        stats.record([model.train_step(floats(4), None, mean_loss, timeline=True)])
        values = stats.read(optimizer)
        share = values["stage0/memory_bytes"] / gpus.total_memory(gpus.devices[0])
        assert 0 < values["stage0/memory_percent"] == pytest.approx(100 * share)
