"""The parts of the GPU check that look at what only a GPU has; each is tried by itself.

On the CPU (`--device cpu`) all of them run, to try the script; there are no streams to check.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel, Trainer, World
from hybridtrain._base.tensors import resident_bytes
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.data import TrainLoader
from hybridtrain.pipeline import device_memory, reset_peak_memory
from hybridtrain.pipeline.reducer import StageReducer
from scripts.bench.common import mean_loss
from tests.support.matrix import Cell, compared, difference

WIDTH = 64


def _net(layers: int = 8, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers - 1)]
    return nn.Sequential(*parts, nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH))


def _model(device: str, stages: int = 2, **options: Any) -> HybridModel:
    world = World.from_env(stages, [device] * stages)
    return HybridModel(_net(), world, **{"chunks": 4, **options})


def _batch(device: str, samples: int = 32) -> Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)


def copies(device: str) -> str:
    """Stages on the device and on the CPU in turn, whose values are copied, against the unsplit
    model."""
    worst = 0.0
    for case in ("linear", "u_net", "tied_gpt"):
        for stages, schedule, recompute in ((2, "1f1b", "never"), (4, "gpipe", "always")):
            cell = Cell(case, stages, 1, 4, schedule, None, recompute, "fp32", 12, 1)
            for at, mine, theirs, _ in compared(cell, devices=[device, "cpu"] * (stages // 2)):
                found = difference(mine.cpu(), theirs.cpu())
                assert found <= 1e-5, f"{cell}, {at} differs by {found:.1e}"
                worst = max(worst, found)
    return f"differs by {worst:.1e}"


# The first four steps of each kind compare results on the host, and so do step 8, step 16 and later
# powers of two, and each 128th.
COMPARING_STEPS = 12
STEPS_WITHOUT_WAITS = 3


@contextmanager
def forbidding_waits(device: str) -> Iterator[None]:
    """Has PyTorch raise in the block where the host would wait for a GPU."""
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")


def no_waits(device: str) -> str:
    """Steps while PyTorch forbids that the host waits for the device, after the comparing ones."""
    for recompute in ("never", "always"):
        model, x = _model(device, recompute=recompute), _batch(device)
        for _ in range(COMPARING_STEPS):
            model.train_step(x, None, mean_loss)
        with forbidding_waits(device):
            for _ in range(STEPS_WITHOUT_WAITS):
                model.train_step(x, None, mean_loss)
    return f"the host waited for nothing in {2 * STEPS_WITHOUT_WAITS} steps"


def replicas(device: str) -> str:
    """DDP's reducer of a stage, in a group of this process alone."""
    backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        net, x = _net().to(device), _batch(device)
        plain = torch.autograd.grad(net(x).mean(), list(net.parameters()))
        names = dict(net.named_parameters())
        reducer = StageReducer(net, names, dist.group.WORLD, False, World())
        root = net(x).mean()
        reducer.prepare_for_backward([root])
        root.backward()
        reducer.check_reduced()
        for own, parameter in zip(plain, net.parameters(), strict=True):
            assert parameter.grad is not None
            assert torch.equal(own, parameter.grad), "a gradient differs"
    finally:
        dist.destroy_process_group()
    return f"gradients as without it, over {backend}"


def resume(device: str) -> str:
    """A Trainer in fp16 with a scaler and the pinned loader, in one go and with a resume."""
    kind = torch.device(device).type

    def trainer(folder: str, steps: int) -> Trainer:
        model = _model(device, precision="fp16")
        data = TensorDataset(_batch("cpu", 64), _batch("cpu", 64))
        return Trainer(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            lambda output, targets: F.mse_loss(output.float(), targets),
            TrainLoader(data, 16, model.world, seed=1),
            steps=steps,
            scaler=GradScaler(kind),
            store=CheckpointStore(Path(folder)),
            timeline_every=2,
        )

    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        whole = trainer(one, 6)
        whole.fit()
        first = trainer(two, 3)
        first.fit()
        second = trainer(two, 6)
        newest = second.store and second.store.newest_up_to(3)
        assert newest is not None, "nothing was saved"
        second.resume(newest)
        second.fit()
        for name, value in whole.model.state_dict().items():
            assert torch.equal(value, second.model.state_dict()[name]), f"{name} differs"
    return "a resumed run ends bitwise as one in one go"


def timelines(device: str) -> str:
    """The times of a step's actions, by events."""
    model, x = _model(device), _batch(device)
    model.train_step(x, None, mean_loss)
    out = model.train_step(x, None, mean_loss, timeline=True)
    assert out.timeline is not None
    spans = [span for lane in out.timeline.spans() for span in lane]
    assert len(spans) == 16, f"{len(spans)} spans for 16 actions"
    assert all(0 <= span.start <= span.end for span in spans), "an action ends before it starts"
    return f"{len(spans)} actions in {max(span.end for span in spans) * 1e3:.2f} ms"


def compiled(device: str) -> str:
    """Compiled layers against plain ones."""
    gradients = []
    for compile_ in (False, True):
        model = _model(device, compile=compile_, recompute="always")
        for _ in range(2):
            model.zero_grad()
            model.train_step(_batch(device), None, mean_loss)
        gradients.append([p.grad for p in model.parameters()])
    summary = model.stage_summaries(torch.optim.SGD(model.parameters(), lr=0.1))
    worst = max(difference(a, b) for a, b in zip(*gradients, strict=True))
    assert worst < 1e-3, f"differs by {worst:.1e}"
    return f"{sum(s['compiled_layers'] for s in summary)} layers, differs by {worst:.1e}"


def measured(device: str) -> str:
    """A split by measured times and memory."""
    cuts = []
    for split in ("time", "memory"):
        model = _model(device, split=split, example_inputs=_batch("cpu"))
        model.train_step(_batch(device), None, mean_loss)
        cuts.append(f"{split} {[len(stage.layers) for stage in model.stages]}")
    return ", ".join(cuts)


def peak(device: str) -> str:
    """The allocator's peak of a step against what is counted."""
    model, x = _model(device, stages=1, chunks=4), _batch(device, 4096)
    model.train_step(x, None, mean_loss)
    reset_peak_memory(model.pipeline)
    model.train_step(x, None, mean_loss)
    (stage,), (held,) = model.stages, model.plan.in_flight
    counted = resident_bytes(stage.module) + stage.bytes_in_flight(held)
    memory = device_memory(model.pipeline).get(device)
    if memory is None:
        return "no counter on a CPU"
    allocated, reserved = memory["allocated"] / 2**20, memory["reserved"] / 2**20
    return f"{allocated:.0f} MiB, reserved {reserved:.0f}, counted {counted / 2**20:.0f}"


PARTS: dict[str, Callable[[str], str]] = {
    "copies on side streams": copies,
    "no waits in a step": no_waits,
    "DDP, one rank": replicas,
    "fp16 Trainer, resume": resume,
    "timeline": timelines,
    "compile": compiled,
    "measured splits": measured,
    "peak memory": peak,
}


def run_parts(
    device: str, left: Callable[[], float], add: Callable[..., None]
) -> tuple[list[str], list[str]]:
    """Runs all parts on `device`; returns the names of those that failed and of those cut off.

    Args:
        device: `cuda:0` or `cpu`.
        left: returns the seconds that are left; a part begins only with 20 or more.
        add: adds a row to the table: check, setting, result, beside, verdict.
    """
    failed, left_out = [], []
    on_gpu = torch.device(device).type == "cuda"
    for name, part in PARTS.items():
        if left() < 20:
            left_out.append(name)
            add(name, device, "", "", "cut off: no time")
            continue
        try:
            with torch.cuda.device(device) if on_gpu else nullcontext():
                add(name, device, part(device), "", "ok")
        except Exception as error:  # a part that fails is a line, not the end
            failed.append(name)
            add(name, device, "", "", f"FAILED {type(error).__name__}: {str(error)[:300]}")
    return failed, left_out
