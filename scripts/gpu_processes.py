"""Checks of several ranks on GPUs: every schedule, replicas, saves, failing and late ranks.

Run it by `scripts/gpu_check.sh --processes N`. It launches N ranks by torchrun, first for the
checks, then once for each fault. Ranks share the GPUs if there are fewer (`share_gpus`), over NCCL:
that shows that messages arrive in order and errors end a run, and not how fast it is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel, Trainer, World
from hybridtrain._base.precision import AUTOCAST
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.data import TrainLoader
from hybridtrain.loss import cross_entropy
from hybridtrain.models.gpt import gpt
from hybridtrain.options import PipelineOptions
from hybridtrain.pipeline.point_to_point import begin_receive, begin_send, wait
from scripts.bench.common import print_table
from scripts.gpu_check import COLUMNS, Size, facts_of

# Each schedule with its stages per device.
SCHEDULES = (
    *(("1f1b", 1), ("gpipe", 1), ("1f1b", 2), ("zb-h1", 1)),
    *(("zb-v", 2), ("v-half", 2), ("v-min", 2)),
)
FAULTS = ("error", "hang")

Row = tuple[str, str, str, str, str]
"""A row of the table: see `COLUMNS`."""

_STALL_S = 15.0  # a rank that hangs ends the run after that
_LATE_S = 2.0
_STEPS = 4  # of a run that is compared
_FAULT_STEP = 6  # the first steps may take longer before they count as stalled


def join(device: str, **settings: Any) -> World:
    """Returns the World of all ranks, on the GPUs that there are."""
    on_gpu = device == "cuda"
    return World.from_env(devices=device, deterministic=True, share_gpus=on_gpu, **settings)


def plain_step(
    net: nn.Module, optimizer: torch.optim.Optimizer, size: Size, precision: str, ids: Tensor
) -> None:
    """Does a step of the unsplit model, with the gradients of all micro-batches added up."""
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    for part in zip(x.split(size.samples), y.split(size.samples), strict=True):
        with torch.autocast(ids.device.type, AUTOCAST[precision], precision != "fp32"):
            loss = cross_entropy(net(part[0]), part[1])
        (loss / size.chunks).backward()
    optimizer.step()
    optimizer.zero_grad()


def build(size: Size) -> nn.Sequential:
    """Returns a GPT without tied weights, which are added up in another order."""
    torch.manual_seed(0)
    return gpt(size.vocabulary, size.length, size.layers, size.heads, size.width)


def tokens(size: Size) -> Tensor:
    """Returns the batch of all micro-batches."""
    torch.manual_seed(1)
    return torch.randint(size.vocabulary, (size.samples * size.chunks, size.length + 1))


def differs(world: World, model: HybridModel, expected: dict[str, Tensor]) -> float:
    """Returns by how much the weights of any rank differ; a collective call."""
    own = [
        float((value.detach().cpu() - expected[name].cpu()).abs().max())
        for name, value in model.named_parameters()
        if not value.is_meta
    ]
    return max(world.gather(max(own, default=0.0)))


def verdict(check: str, setting: str, most: float, beside: str) -> Row:
    """Returns the row of a comparison."""
    said = "bitwise equal" if most == 0 else f"differs by {most:.2e}"
    return check, setting, said, beside, "ok" if most == 0 else "FAILED"


def pipelines(world: World) -> Iterator[Row]:
    """Compares weights of a pipeline over all ranks with the unsplit model, in every schedule."""
    cases = [(schedule, per_device, "fp32", None) for schedule, per_device in SCHEDULES]
    cases += [("1f1b", 1, "bf16", None)]
    cases += [("1f1b", 1, "fp32", late) for late in range(1, world.size)][:1]
    size = Size(2 * world.nb_part, 64, 4, 32, 256, 2, 2 * world.nb_part)
    ids = tokens(size).to(world.devices[0])
    expected: dict[str, dict[str, Tensor]] = {}
    for schedule, per_device, precision, late in cases:
        if precision not in expected:
            plain = build(size).to(world.devices[0])
            own = torch.optim.SGD(plain.parameters(), lr=0.1)
            for _ in range(_STEPS):
                plain_step(plain, own, size, precision, ids)
            expected[precision] = {n: p.detach() for n, p in plain.named_parameters()}
        options = PipelineOptions(
            chunks=size.chunks,
            schedule=schedule,
            stages_per_device=per_device,
            split="size",
            precision=precision,
        )
        model = HybridModel(build(size), world, options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(_STEPS):
            if step == 2 and world.rank == late:
                time.sleep(_LATE_S)
            x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
            model.train_step(x, y, cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        setting = f"{schedule}, {per_device} a device, {precision}"
        if late is not None:
            setting += f", rank {late} is late"
        most = differs(world, model, expected[precision])
        yield verdict(f"pipeline of {world.size}", setting, most, "the unsplit model")


def late_peer(world: World) -> Iterator[Row]:
    """Lets rank 2 come late to a message of rank 1, which receives one of rank 0 meanwhile."""
    if world.size < 3:
        return
    sent, received = (torch.zeros(2**20, device=world.wire_device) for _ in range(2))
    waited = 0.0
    world.gather(None)  # all are here
    began = time.monotonic()
    if world.rank == 0:
        wait(begin_send([sent], world, 1))
    elif world.rank == 1:
        sending = begin_send([sent], world, 2)
        wait(begin_receive([received], world, 0))
        if received.is_cuda:
            torch.cuda.current_stream().synchronize()
        waited = time.monotonic() - began
        wait(sending)
    elif world.rank == 2:
        time.sleep(_LATE_S)
        wait(begin_receive([received], world, 1))
    waited = world.gather(waited)[1]
    verdict = "ok" if waited < _LATE_S / 2 else "FAILED"
    setting = f"rank 2, by {_LATE_S:.0f} s"
    yield "a late peer", setting, f"the other edge took {waited * 1e3:.0f} ms", "", verdict


def communicators(world: World) -> Iterator[Row]:
    """Measures the GPU memory of the communicators of a pipeline, by creating another set."""
    if world.backend != "nccl" or world.size == 1:
        return
    world.gather(None)  # ranks may share a GPU
    before, _ = torch.cuda.mem_get_info()
    world.divided(world.nb_part)
    world.gather(None)
    taken = max(world.gather((before - torch.cuda.mem_get_info()[0]) / 2**20))
    result = f"{taken:.0f} MiB on a GPU, for all of its ranks"
    yield "communicators", f"{2 + len(world.edge_groups)} per rank", result, "", "ok"


def trained(world: World, size: Size, folder: Path | None = None, steps: int = _STEPS) -> Trainer:
    """Returns a Trainer that has trained a GPT, from the newest checkpoint in `folder` on."""
    ids = tokens(size)
    data = TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    model = HybridModel(build(size), world, chunks=2, split="size")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = None if folder is None else CheckpointStore(folder, writers="all")
    loader = TrainLoader(data, size.samples * size.chunks // 2, world, seed=1)
    trainer = Trainer(model, optimizer, cross_entropy, loader, steps=steps, store=store)
    if store is not None and store.steps():
        newest = store.newest()
        assert newest is not None
        trainer.resume(newest)
    trainer.fit()
    return trainer


def replicas(world: World, folder: Path) -> Iterator[Row]:
    """Compares replicas with the same number of them in one process, also after a resume."""
    count = world.logical_replicas
    size = Size(2 * world.nb_part, 64, 4, 32, 256, 2, 2 * count)
    alone = World(devices=world.devices, fixed_replicas=count, deterministic=True)
    expected = {n: p.detach() for n, p in trained(alone, size).model.named_parameters()}
    where = f"{world.nb_part} stages, inner={world.inner}" if world.nb_part > 1 else "1 stage"
    whole = trained(world, size)
    most = differs(world, whole.model, expected)
    yield verdict(f"{count} replicas of {world.size} ranks", where, most, "one process")
    trained(world, size, folder, _STEPS // 2)
    most = differs(world, trained(world, size, folder).model, expected)
    yield verdict("save and resume", where, most, "one process, in one go")


def fault(device: str, kind: str) -> None:
    """Trains until the last rank raises or hangs."""
    world = join(device, nb_part=int(os.environ["WORLD_SIZE"]), engine="distributed",
                 stall_s=_STALL_S, timeout_s=4 * _STALL_S)  # fmt: skip
    size = Size(2 * world.nb_part, 64, 4, 32, 256, 2, 2 * world.nb_part)
    ids = tokens(size).to(world.devices[0])
    model = HybridModel(build(size), world, chunks=size.chunks, split="size")
    for step in range(_FAULT_STEP + 2):

        def loss(output: Any, targets: Tensor, step: int = step) -> Tensor:  # on the last rank
            if step == _FAULT_STEP and kind == "error":
                raise ValueError("planted by gpu_check")
            if step == _FAULT_STEP:
                time.sleep(3600)
            return cross_entropy(output, targets)

        model.train_step(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), loss)


def shapes(ranks: int) -> list[dict[str, Any]]:
    """Returns the settings of the Worlds with replicas."""
    found: list[dict[str, Any]] = [{"nb_part": 1, "replicas": ranks}]
    if ranks >= 4 and ranks % 2 == 0:
        found += [
            {"nb_part": ranks // 2, "replicas": 2, "engine": "distributed", "inner": inner}
            for inner in ("pp", "dp")
        ]
    return found


def checks(device: str, until: float, add: Callable[[Row], None]) -> list[str]:
    """Runs the checks of a rank, as far as there is time; returns those that were left out."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    world = join(device, nb_part=ranks, engine="distributed" if ranks > 1 else "local")
    world.watch(Path(tempfile.gettempdir()) / "hybridtrain-stalls")
    left_out = []
    with tempfile.TemporaryDirectory() as own:
        shared = Path(world.broadcast(own))
        parts = [
            (part.__name__.replace("_", " "), partial(part, world))
            for part in (pipelines, late_peer, communicators)
        ]
        for number, settings in enumerate(shapes(ranks)):

            def of_shape(
                number: int = number, settings: dict[str, Any] = settings
            ) -> Iterator[Row]:
                return replicas(join(device, **settings), shared / str(number))

            parts.append((f"replicas, {settings}", of_shape))
        for name, part in parts:
            if world.broadcast(time.time() > until):
                left_out.append(name)
                continue
            for row in part():
                if world.is_main:
                    add(row)
        world.broadcast(None)  # the folder goes once all have read it
    world.close()
    return left_out


def launch(options: argparse.Namespace, *arguments: str) -> list[str]:
    """Returns the command that runs this script in as many ranks as asked for."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.processes}", __file__, f"--device={options.device}"]
    return [*command, *arguments]


def fault_row(options: argparse.Namespace, kind: str) -> Row:
    """Returns the row of a run in which the last rank fails: it ends, and names that rank."""
    began = time.monotonic()
    done = subprocess.run(
        launch(options, f"--fault={kind}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seconds, rank = time.monotonic() - began, options.processes - 1
    said = "planted by gpu_check" if kind == "error" else "has made no progress"
    named = re.search(rf"rank {rank} .*{said}", done.stdout) is not None
    good = done.returncode != 0 and named
    result = f"ended after {seconds:.0f} s, {'names' if named else 'does not name'} rank {rank}"
    return (
        f"{kind} of one rank",
        "1f1b",
        result,
        "",
        "ok" if good else f"FAILED {done.stdout[-500:]}",
    )


def main() -> int:
    """Launches the ranks and prints the table; in a rank, runs the checks or the fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=1, help="how many ranks")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--small", action="store_true", help="without the faults, to try the script"
    )
    parser.add_argument("--seconds", type=float, default=450.0, help="for all of it")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="the table")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--fault", choices=FAULTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu --small tries the script without")
    torch.set_num_threads(1)
    if options.fault:
        fault(options.device, options.fault)
        return 0
    table: dict[str, Any] = {"rows": [], "cut_off": [], "failed": False}

    def write() -> None:
        table["failed"] = any(row["verdict"] != "ok" for row in table["rows"])
        options.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")

    def add(row: Row) -> None:
        table["rows"].append(dict(zip(COLUMNS, row, strict=True)))
        print("   ".join(row), file=sys.stderr, flush=True)
        write()

    if options.until is not None:  # a rank
        table["cut_off"] += checks(options.device, options.until, add)
        if table["rows"]:  # rank 0
            write()
        return 0
    write()  # no rows of an earlier run
    share = 1.0 if options.small else 0.6  # of the time, for the checks
    until = time.time() + share * options.seconds
    done = subprocess.run(launch(options, f"--until={until}", f"--json={options.json.resolve()}"))
    table |= json.loads(options.json.read_text(encoding="utf-8"))
    table |= {
        **facts_of(options.device),
        "note": f"{options.processes} ranks.",
        "not_shown": ["speed, where ranks share a GPU"],
    }
    if done.returncode:
        add(("ranks", "", "", "", f"FAILED exit status {done.returncode}"))
    for kind in () if options.small else FAULTS:
        add(fault_row(options, kind))
    write()
    print(f"\n{options.processes} ranks, {table['gpus']}, torch {torch.__version__}\n")
    print_table(COLUMNS, [list(row.values()) for row in table["rows"]])
    print("FAILED" if table["failed"] else "exact")
    return int(table["failed"])


if __name__ == "__main__":
    sys.exit(main())
