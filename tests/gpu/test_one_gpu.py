"""A model trained on one GPU: exact, compiled, recomputed, resumed, and from the command line.

Stages share the GPU, so these tests pass on any machine that has one. scripts/gpu_check.sh checks
more cells of the exactness matrix, and measures.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.launch import environment
from support.matrix import TOLERANCE, Cell, check_cell, difference
from torch import Tensor, nn

from hybridtrain import HybridModel, World
from hybridtrain.loss import cross_entropy
from hybridtrain.models.gpt import gpt
from scripts import gpu_parts

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
STAGES = 2
VOCABULARY, LENGTH = 64, 32
DIGITS = ["recipe=digits", f"world.devices=[{DEVICE},{DEVICE}]", "trainer.epochs=null"]


@pytest.fixture(autouse=True)
def comparable_sums(one_intra_op_thread: None) -> Iterator[None]:
    """Computes products in full precision, and with kernels that add up in one order."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    as_before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = False, False, True
    yield
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = as_before


def cell(case: str, recompute: str, precision: str, schedule: str = "1f1b", **changes: int) -> Cell:
    axes: dict[str, Any] = {"stages": STAGES, "per_device": 1, "chunks": 4, **changes}
    return Cell(
        *(case, axes["stages"], axes["per_device"], axes["chunks"], schedule, None),
        *(recompute, precision, 12, 1),
    )


@pytest.mark.parametrize(
    "cell",
    [
        cell("linear", "never", "fp32"),
        cell("conv", "never", "fp32", "gpipe"),
        cell("conv", "always", "bf16"),
        cell("dropout", "never", "fp32"),
        cell("dropout", "every-2", "fp16"),
        cell("dropout", "always", "bf16", per_device=2),
        cell("u_net", "except_last", "fp32", stages=4),
        cell("tied_gpt", "always", "fp32"),
        cell("tied_gpt", "except_last", "bf16"),
        cell("tied_gpt", "every-2", "fp16"),
        cell("linear", "never", "fp32", "zb-h1"),
        cell("linear", "never", "fp32", "zb-v", per_device=2),
    ],
    ids=str,
)
def test_stages_on_one_gpu_train_as_the_unsplit_model(cell: Cell) -> None:
    check_cell(cell, devices=[DEVICE] * cell.nb_part)


def ids(samples: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator).to(DEVICE)


def gradients(dropout: float = 0.0, steps: int = 2, **options: Any) -> list[Tensor]:
    """Returns the gradients of a GPT with attention after a few steps with the same weights."""
    torch.manual_seed(0)
    net = gpt(VOCABULARY, LENGTH, n_layer=4, n_head=4, d_model=64, dropout=dropout)
    world = World.from_env(STAGES, [DEVICE] * STAGES)
    model = HybridModel(net, world, chunks=4, seed=3, **options)
    inputs, targets = ids()[:, :-1].contiguous(), ids()[:, 1:].contiguous()
    for _ in range(steps):
        model.zero_grad()
        model.train_step(inputs, targets, cross_entropy)
    values = [parameter.grad for parameter in model.parameters()]
    assert all(value is not None for value in values)
    return [value for value in values if value is not None]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("recompute", ["always", "except_last", {"every": 2}], ids=str)
def test_recomputed_attention_has_the_gradients_of_stored_activations(
    recompute: Any, precision: str, dropout: float
) -> None:
    """Without dropout, the kernels' saved seeds are uninitialized memory, which must not matter."""
    stored = gradients(dropout, precision=precision)
    recomputed = gradients(dropout, precision=precision, recompute=recompute)
    # the backward of attention may add up in any order on a GPU
    worst = max(difference(*pair) for pair in zip(recomputed, stored, strict=True))
    assert worst <= TOLERANCE[precision]


@pytest.mark.parametrize("recompute", ["never", "always", "except_last", {"every": 2}], ids=str)
def test_compiled_layers_have_the_gradients_of_eager_ones(recompute: Any) -> None:
    eager = gradients(precision="bf16")
    compiled = gradients(precision="bf16", recompute=recompute, compile=True)
    # a compiled kernel rounds less often
    worst = max(difference(*pair) for pair in zip(compiled, eager, strict=True))
    assert worst <= TOLERANCE["bf16"]


def test_dropout_draws_the_same_masks_for_any_number_of_stages() -> None:
    outputs = []
    for stages in (1, 2, 4):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)) for _ in range(4)]
        world = World.from_env(stages, [DEVICE] * stages)
        model = HybridModel(nn.Sequential(*layers), world, chunks=4, seed=3, split="size")
        x = torch.ones(8, 16, device=DEVICE)
        model.train_step(x, None, lambda output, _: output.square().mean())
        outputs.append([parameter.grad for parameter in model.parameters()])
    for other in outputs[1:]:
        assert max(difference(*pair) for pair in zip(other, outputs[0], strict=True)) <= 1e-5


@pytest.mark.parametrize("part", gpu_parts.PARTS)
def test_a_part_of_the_gpu_check_passes(part: str) -> None:
    with torch.cuda.device(DEVICE):
        assert gpu_parts.PARTS[part](DEVICE)


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("hybridtrain")), *words],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env=environment({"XDG_CACHE_HOME": str(folder / "cache")}),
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_command_line_trains_on_the_gpu(tmp_path: Path, precision: str) -> None:
    run(tmp_path, *DIGITS, "trainer.steps=6", f"trainer.precision={precision}", "run_name=gpu")
    summary = json.loads((tmp_path / "outputs" / "gpu" / "summary.json").read_text())
    assert set(summary["device_memory"]) == {DEVICE}  # it leaves out CPUs
    assert summary["device_memory"][DEVICE]["allocated"] > 0


def test_one_stage_uses_the_gpu_without_being_told(tmp_path: Path) -> None:
    run(tmp_path, "recipe=digits", "pipeline.nb_part=1", "trainer.epochs=null", "trainer.steps=2",
        "run_name=auto")  # fmt: skip
    summary = json.loads((tmp_path / "outputs" / "auto" / "summary.json").read_text())
    assert set(summary["device_memory"]) == {DEVICE}


def test_measure_machine_measures_the_host_and_what_cuda_libraries_keep(tmp_path: Path) -> None:
    rates = yaml.safe_load(run(tmp_path, "measure-machine", "seconds=0.1").stdout)
    assert 0 < rates["library_gib_per_stage"] < 1
    assert 0 <= rates["library_gib"] < 1
    assert rates["operator_s"] > 0
    assert rates["backward_operator_s"] > 0
