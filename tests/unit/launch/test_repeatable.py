"""What `World.from_env(deterministic=...)` and `replicas=` set, and what they refuse over ranks."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config as inductor
from support.compare import hybrid, mean_loss
from support.nets import floats
from support.stand_in_gpus import stand_in_gpus
from torch import nn

from hybridtrain import HybridModel, World
from hybridtrain._base import repeatable
from hybridtrain._base.rank_differences import RankFacts
from hybridtrain.cli.config.schema import Config
from hybridtrain.cli.run import build
from hybridtrain.errors import ConfigError
from hybridtrain.pipeline import check_same_bits
from hybridtrain.pipeline.reducer import norm_over_devices

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture
def one_gpu(monkeypatch):
    """A machine that seems to have a GPU, and PyTorch's settings as before at the end."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv(CUBLAS, "")  # is undone afterwards
    monkeypatch.delenv(CUBLAS)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def is_set():
    return (
        torch.are_deterministic_algorithms_enabled(),
        os.environ.get(CUBLAS),
        torch.backends.cudnn.benchmark,
    )


@pytest.mark.parametrize(
    "settings",
    [{"devices": "cuda", "replicas": 2}, {"devices": "cpu", "deterministic": True}],
    ids=["replicas on a GPU", "deterministic"],
)
def test_a_world_that_promises_equal_bits_sets_what_makes_them_equal(one_gpu, settings):
    world = World.from_env(1, backend="gloo", **settings)
    assert world.deterministic
    assert world.repeats_bits
    assert is_set() == (True, ":4096:8", False)
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert inductor.deterministic  # measures nothing that decides the order of sums


@pytest.mark.parametrize(
    "settings", [{"devices": "cuda"}, {"devices": "cpu", "replicas": 2}], ids=str
)
def test_other_worlds_leave_the_settings_of_pytorch_alone(one_gpu, settings):
    world = World.from_env(1, backend="gloo", **settings)
    assert not world.deterministic
    assert is_set() == (False, None, True)


def test_the_key_of_the_command_line_is_set_before_the_processes_join(one_gpu, monkeypatch):
    config = Config()
    config.trainer.deterministic, config.world.devices = True, "cpu"
    before_joining = []
    monkeypatch.setattr(
        World, "_watched", lambda world, _: before_joining.append(is_set()) or world
    )
    assert build.join_processes(config).deterministic
    assert before_joining == [(True, ":4096:8", False)]


def test_a_rank_that_learns_of_the_key_from_rank_0_sets_it_before_the_model(one_gpu):
    config, world = Config(), World()
    config.trainer.deterministic = True
    build.set_numerics(config, world)
    assert world.repeats_bits
    assert is_set()[0]


def test_a_workspace_of_the_environment_stays(one_gpu, monkeypatch):
    monkeypatch.setenv(CUBLAS, ":16:8")
    World.from_env(1, "cpu", deterministic=True)
    assert os.environ[CUBLAS] == ":16:8"


@pytest.mark.parametrize("used", [False, True])
def test_a_gpu_that_was_used_before_the_world_is_a_warning(one_gpu, monkeypatch, caplog, used):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    World.from_env(1, "cpu", deterministic=True)
    assert ("create the World first" in caplog.text) == used


def test_an_operation_that_is_not_deterministic_is_named_with_the_way_out(one_gpu):
    class Puts(nn.Module):
        def forward(self, x):  # without an order, on the CPU too
            return x.clone().put_(torch.zeros(1, dtype=torch.int64), x.new_ones(1))

    World.from_env(1, "cpu", deterministic=True)
    model = hybrid(nn.Sequential(nn.Linear(4, 4), Puts()), 1)
    with pytest.raises(RuntimeError, match="put_") as failure:
        model.train_step(floats(2, 4), None, mean_loss)
    assert "deterministic=, and replicas= on GPUs" in " ".join(failure.value.__notes__)


def over_ranks(monkeypatch, facts_of_ranks, replicas=2):
    """Checks the facts of ranks as one of them does, with a stand-in for the others."""
    of_ranks = [RankFacts(facts, f"node{rank}") for rank, facts in enumerate(facts_of_ranks)]
    monkeypatch.setattr(World, "gather", lambda *_: of_ranks)
    check_same_bits(World(size=len(of_ranks), fixed_replicas=replicas))


CARD = {"the GPU": "NVIDIA H200, 132 multiprocessors", "the version of CUDA": "13.0"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"the GPU": "NVIDIA A100, 108 multiprocessors"},
            r"the GPU differs between the ranks: "
            r"NVIDIA H200, 132 multiprocessors on rank 0 \(node0\), "
            r"NVIDIA A100, 108 multiprocessors on rank 1 \(node1\): make it equal, or remove "
            r"replicas=",
        ),
        ({"the version of CUDA": "12.9"}, "the version of CUDA differs between the ranks"),
    ],
)
def test_ranks_that_cannot_compute_equal_bits_are_refused_in_one_line(monkeypatch, change, message):
    with pytest.raises(ConfigError, match=message):
        over_ranks(monkeypatch, [CARD, {**CARD, **change}])
    over_ranks(monkeypatch, [CARD, CARD])
    over_ranks(monkeypatch, [CARD, {**CARD, **change}], replicas=None)  # without the promise


def test_a_model_is_not_built_over_ranks_that_differ(monkeypatch):
    of_ranks = [RankFacts({"the GPU": card}, "here") for card in "ab"]
    monkeypatch.setattr(World, "gather", lambda *_: of_ranks)
    with pytest.raises(ConfigError, match="the GPU differs between the ranks"):
        HybridModel(nn.Linear(4, 4), World(size=2, fixed_replicas=2))


def test_the_facts_of_a_gpu_have_its_model_libraries_and_settings(monkeypatch):
    card = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    matmul = torch.backends.cuda.matmul
    facts = repeatable.facts_of_bits(torch.device("cuda", 0))
    assert facts["the GPU"] == "NVIDIA H200, 132 multiprocessors"
    for name, other in (
        ("fp32_precision", "tf32"),
        (
            "allow_bf16_reduced_precision_reduction",
            not matmul.allow_bf16_reduced_precision_reduction,
        ),
    ):
        before = getattr(matmul, name)
        try:
            setattr(matmul, name, other)
            assert repeatable.facts_of_bits(torch.device("cuda", 0)) != facts, name
        finally:
            setattr(matmul, name, before)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
        changed = repeatable.facts_of_bits(torch.device("cuda", 0))
    assert changed == {**facts, "the implementation of FlashAttention": "FA3"}
    assert repeatable.facts_of_bits(torch.device("cuda", 0)) == facts


def test_the_facts_can_be_read_whichever_interface_for_tf32_a_script_has_used(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")
    with pytest.raises(RuntimeError, match="allow_tf32"):
        print(torch.backends.cudnn.allow_tf32)
    assert repeatable.facts_of_bits(torch.device("cpu"))


def test_a_gradient_that_begins_anywhere_in_a_bucket_has_the_norm_of_its_own_memory(monkeypatch):
    starts = []
    norm = torch._foreach_norm

    def noted(gradients):
        starts.extend(g.storage_offset() * g.element_size() % 16 for g in gradients)
        return norm(gradients)

    monkeypatch.setattr(torch, "_foreach_norm", noted)
    with stand_in_gpus(1) as gpus:
        bucket = gpus.copy(floats(40), gpus.devices[0]).view(-1)
        norm_over_devices([bucket[:3], bucket[3:10], bucket[12:20]])
    assert starts == [0, 0, 0]
