"""Checks on a machine with GPUs: exactness, host cost, memory, and a GPT's speed. One table.

Run it by `scripts/gpu_check.sh`. The stages share the one GPU where there is only one, else they
are dealt out over all. The exit status is 1 if a result of a split model is not the unsplit one's.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtrain.losses import cross_entropy
from hybridtrain.model import HybridModel
from hybridtrain.models.gpt import gpt
from hybridtrain.models.transformer import transformer
from hybridtrain.skip import pop, stash
from hybridtrain.world import World
from scripts.bench.common import print_table

# The largest difference of a tensor, relative to its largest entry. In fp32 (TF32 off) only the
# order of additions may differ; a bf16 number has 8 bits, an fp16 one 11.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3}
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = {"fp32": 1.0, "bf16": 1.0, "fp16": 1024.0}

# Dense bf16 peak in FLOP/s, as the vendor states it; fp16 where a GPU has no bf16.
PEAK = {
    "B200": 2250e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
    "A40": 150e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}

LossFn = Callable[[Any, Any], Tensor]


@dataclass
class Check:
    """What all parts share.

    Attributes:
        device: `cuda` or `cpu`.
        small: sizes for a try without a GPU.
        deadline: when the whole must be done.
        rows: the table so far.
        failed: whether a split model differed.
    """

    device: str
    small: bool
    deadline: float
    rows: list[list[str]] = field(default_factory=list)
    failed: bool = False

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def world(self, stages: int, shared: bool = False) -> World:
        """Stages on one device (`shared`), or on all there are."""
        if self.device == "cpu":
            return World.from_env(stages, devices="cpu")
        gpus = 1 if shared else torch.cuda.device_count()
        return World.from_env(stages, devices=[f"cuda:{i % gpus}" for i in range(stages)])

    def wait(self) -> None:
        """Until all devices have done what they were told."""
        if self.device == "cuda":
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)

    def autocast(self, precision: str) -> AbstractContextManager[object]:
        """The context of a plain forward."""
        dtype = AUTOCAST[precision]
        return nullcontext() if dtype is None else torch.autocast(self.device, dtype=dtype)

    def add(
        self, what: str, setting: str, result: str, beside: str = "", verdict: str = ""
    ) -> None:
        """A row of the table, also said at once."""
        self.rows.append([what, setting, result, beside, verdict])
        print("   ".join([what, setting, result, beside, verdict]), file=sys.stderr, flush=True)


# ---- exactness


class Down(nn.Module):
    """Halves the image and keeps what it had for `Up`."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.stashes = (name,)
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C, H/2, W/2)."""
        x = torch.tanh(self.conv(x))
        stash(self.stashes[0], x)
        return F.avg_pool2d(x, 2)


class Up(nn.Module):
    """Doubles the image and adds what `Down` kept."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.pops = (name,)
        self.conv = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C, 2H, 2W)."""
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        return torch.tanh(self.conv(torch.cat([x, pop(self.pops[0])], dim=1)))


Case = tuple[nn.Sequential, Any, Any, LossFn]


def linear_net() -> Case:
    """Eight linear layers."""
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*layers), torch.randn(12, 32), torch.randn(12, 32), F.mse_loss


def conv_net() -> Case:
    """Convolutions with batch norm, whose statistics move."""
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(4):
        layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return net, torch.randn(12, 3, 8, 8), torch.randint(10, (12,)), cross_entropy


def dropout_transformer() -> Case:
    """A transformer whose dropout must draw the same whatever the split."""
    net = transformer(50, max_len=12, d_model=32, nhead=4, d_hid=64, nlayers=6, dropout=0.2)
    tokens = torch.randint(2, 50, (12, 12))
    mask = torch.arange(12) >= torch.randint(6, 13, (12, 1))
    return net, (tokens, mask), torch.randint(2, (12,)), cross_entropy


def u_net() -> Case:
    """Values that skip stages."""
    width = 8
    net = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        Down("a", width),
        Down("b", width),
        Down("c", width),
        nn.Conv2d(width, width, 3, padding=1),
        Up("c", width),
        Up("b", width),
        Up("a", width),
        nn.Conv2d(width, 2, 1),
    )
    return net, torch.randn(12, 3, 16, 16), torch.randn(12, 2, 16, 16), F.mse_loss


def tied_gpt() -> Case:
    """A GPT whose first and last layer share a parameter."""
    net = gpt(64, 16, n_layer=6, n_head=4, d_model=32)
    net.head.linear.weight = net.embed.token.weight
    tokens = torch.randint(64, (12, 17))
    return net, tokens[:, :-1], tokens[:, 1:], cross_entropy


CASES: dict[str, Callable[[], Case]] = {
    "linear": linear_net,
    "convnet, BatchNorm": conv_net,
    "transformer, dropout": dropout_transformer,
    "U-Net, skips": u_net,
    "GPT, tied": tied_gpt,
}

# Four micro-batches a step, the last one short: 12 samples are 4 x 3, 11 are 3, 3, 3, 2.
CHUNKS, STEPS = 4, 2
MODES = [
    (stages, schedule, per_device, checkpoint)
    for stages, (schedule, per_device), checkpoint in itertools.product(
        (1, 2, 4), (("gpipe", 1), ("1f1b", 1), ("1f1b", 2)), ("never", "except_last", "always")
    )
]


Trained = dict[str, Tensor]


def build(case: str) -> Case:
    """The same weights and data each time."""
    torch.manual_seed(0)
    net, inputs, targets, loss_fn = CASES[case]()
    return net, inputs, targets, loss_fn


def moved(value: Any, device: str) -> Any:
    """A pytree on `device`."""
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to(device), value)


def cut(value: Any, rows: slice) -> Any:
    """Some samples of a pytree."""
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t[rows], value)


def steps_of(inputs: Any, targets: Any) -> Iterator[tuple[Any, Any, int]]:
    """The batches: a full one, then one with a sample less."""
    for step in range(STEPS):
        rows = slice(0, 12 - step)
        yield cut(inputs, rows), cut(targets, rows), 12 - step


def noted(result: Trained, step: int, loss: Tensor, net: nn.Module) -> None:
    """Puts all that a step gave into `result`, on the CPU."""
    result[f"step {step} loss"] = loss.detach().float().cpu()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        result[f"step {step} gradient of {name}"] = parameter.grad.float().cpu()


def ended(result: Trained, net: nn.Module) -> Trained:
    """Adds the weights and buffers after the last step."""
    for name, tensor in net.state_dict().items():
        result[f"{name} at the end"] = tensor.float().cpu().clone()
    return result


def plain_run(check: Check, case: str, precision: str) -> Trained:
    """The unsplit model in a plain loop, with gradients added up over the same micro-batches."""
    net, inputs, targets, loss_fn = build(case)
    net.to(check.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 / SCALE[precision])
    result: Trained = {}
    batches = steps_of(moved(inputs, check.device), moved(targets, check.device))
    for step, (x, y, rows) in enumerate(batches):
        losses, sizes, start = [], [], 0
        for index in range(CHUNKS):
            size = rows // CHUNKS + (index < rows % CHUNKS)
            part = slice(start, start + size)
            start += size
            with check.autocast(precision):
                loss = loss_fn(net(cut(x, part)), cut(y, part))
            (loss * (size / rows) * SCALE[precision]).backward()
            losses.append(loss.detach().float())
            sizes.append(float(size))
        weights = torch.tensor(sizes, device=check.device)
        noted(result, step, (torch.stack(losses) * weights).sum() / rows, net)
        optimizer.step()
        optimizer.zero_grad()
    return ended(result, net)


def split_run(
    check: Check,
    case: str,
    precision: str,
    stages: int,
    schedule: str = "1f1b",
    per_device: int = 1,
    checkpoint: str = "never",
) -> Trained:
    """The same by this project."""
    net, inputs, targets, loss_fn = build(case)
    model = HybridModel(
        net,
        check.world(stages),
        chunks=CHUNKS,
        schedule=schedule,
        stages_per_device=per_device,
        checkpoint=checkpoint,
        precision=precision,
        seed=7,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / SCALE[precision])
    scale = SCALE[precision]
    result: Trained = {}
    for step, (x, y, _) in enumerate(steps_of(inputs, targets)):
        out = model.train_step(x, y, loss_fn, scale_loss=lambda loss: loss * scale)
        noted(result, step, out.loss, net)
        optimizer.step()
        optimizer.zero_grad()
    return ended(result, net)


def difference(one: Trained, other: Trained) -> tuple[float, str]:
    """The largest relative difference, and of what."""
    assert one.keys() == other.keys()
    worst, where = 0.0, ""
    for name, tensor in one.items():
        scale = max(float(tensor.abs().max()), 1e-6)
        relative = float((tensor - other[name]).abs().max()) / scale
        if not relative <= worst:  # also for a NaN
            worst, where = relative, name
    return worst, where


def exactness(check: Check, until: float) -> None:
    """Every model in every precision, split in every way, against the unsplit one."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    for case, precision in itertools.product(CASES, TOLERANCE):
        dropout = "dropout" in case
        # dropout draws by layer and micro-batch here, so a plain loop has other masks
        expected = (
            split_run(check, case, precision, 1) if dropout else plain_run(check, case, precision)
        )
        worst, equal, done, where, errors = 0.0, 0, 0, "", []
        for mode in MODES:
            if check.left < until:
                break
            try:
                found, name = difference(expected, split_run(check, case, precision, *mode))
            except Exception as error:  # one broken mode is a line, not the end
                errors.append(f"{mode}: {type(error).__name__}: {error}")
                continue
            done += 1
            equal += found == 0.0
            if not found <= worst:
                worst, where = found, f"{mode}, {name}"
        good = worst <= TOLERANCE[precision] and not errors
        check.failed |= not good
        check.add(
            f"exact: {case}",
            f"{precision}, {done} of {len(MODES)} modes",
            f"differs by {worst:.1e}, {equal} bitwise equal",
            f"at most {TOLERANCE[precision]:.0e}",
            "ok" if good else f"FAILED {where} {' '.join(errors[:2])}",
        )


# ---- host cost and memory


def mean_of(output: Tensor, targets: object) -> Tensor:
    """Some loss."""
    return output.mean()


def several(check: Check, step: Callable[[], object], times: int, repeats: int) -> float:
    """Seconds of a step: the median of `repeats`, each of so many in a row."""
    seconds = []
    for turn in range(repeats + 1):
        check.wait()
        start = time.perf_counter()
        for _ in range(times):
            step()
        check.wait()
        if turn:
            seconds.append((time.perf_counter() - start) / times)
    return statistics.median(seconds)


def host_cost(check: Check) -> None:
    """Stages that do next to nothing, on the device."""
    chunks = 32

    def layers(stages: int) -> nn.Sequential:
        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(stages)])

    x = torch.randn(chunks, 4, device=check.device)
    for stages in (1, 2, 4, 8):
        net = layers(stages).to(check.device)

        def plain(net: nn.Sequential = net) -> None:
            for sample in x.split(1):
                (net(sample).mean() / chunks).backward()

        cells = stages * chunks
        beside = several(check, plain, 3, 7) / cells * 1e6
        for schedule in ("gpipe", "1f1b"):
            world = check.world(stages, shared=True)
            model = HybridModel(layers(stages), world, chunks=chunks, schedule=schedule)

            def step(model: HybridModel = model) -> None:
                model.train_step(x, None, mean_of)

            cost = several(check, step, 3, 7) / cells * 1e6
            check.add(
                "host cost",
                f"{schedule}, P={stages}, m={chunks}",
                f"{cost:.0f} us per stage and micro-batch",
                f"plain loop {beside:.0f} us",
            )


def memory(check: Check) -> None:
    """What the allocator of the device had given out at the peak of a step."""
    if check.device != "cuda":
        check.add("memory", "", "no counter on a CPU")
        return
    width, rows, stages = 1024, 512, 4
    modes = (
        ("gpipe", 1, "never"),
        ("1f1b", 1, "never"),
        ("1f1b", 2, "never"),
        ("gpipe", 1, "always"),
        ("1f1b", 1, "always"),
    )
    for schedule, per_device, checkpoint in modes:
        peaks = []
        for chunks in (4, 8, 16, 32):
            net = nn.Sequential(
                *[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(16)]
            )
            model = HybridModel(
                net,
                check.world(stages, shared=True),
                chunks=chunks,
                schedule=schedule,
                stages_per_device=per_device,
                checkpoint=checkpoint,
            )
            x = torch.randn(chunks * rows, width, device="cuda")
            model.train_step(x, None, mean_of)  # gradients are there from now on
            check.wait()
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model.train_step(x, None, mean_of)
            check.wait()
            peaks.append((torch.cuda.max_memory_allocated() - before) / 2**20)
            del model, net, x
        check.add(
            "memory, 4 stages on one GPU",
            f"{schedule}, {per_device} a device, checkpoint {checkpoint}",
            " / ".join(f"{peak:.0f}" for peak in peaks) + " MiB",
            "m = 4 / 8 / 16 / 32",
        )


# ---- a GPT


@dataclass(frozen=True)
class Size:
    """A GPT and its batch."""

    layers: int = 24
    width: int = 1024
    heads: int = 16
    length: int = 1024
    vocabulary: int = 50304
    rows: int = 4
    chunks: int = 8
    steps: int = 10


def speed(check: Check) -> None:
    """A GPT in bf16: a plain loop, and 1, 2 and 4 stages on the one device."""
    size = Size()
    precision, peak = "bf16", None
    if check.small:
        size = Size(2, 64, 4, 64, 512, 1, 4, 2)
    if check.device == "cuda":
        name = torch.cuda.get_device_name(0)
        peak = next((flops for key, flops in PEAK.items() if key in name), None)
        if torch.cuda.get_device_capability(0) < (8, 0):
            precision = "fp16"
        if torch.cuda.get_device_properties(0).total_memory < 40e9 and not check.small:
            size = Size(rows=1, chunks=8)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.deterministic = False
    tokens = size.rows * size.chunks * size.length
    device = "cuda:0" if check.device == "cuda" else "cpu"
    ids = torch.randint(size.vocabulary, (size.rows * size.chunks, size.length + 1), device=device)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    base = 0.0
    for stages in (0, 1, 2, 4):
        if check.left < 25 and not check.small:
            check.add("GPT", f"{stages} stages", "left out: no time")
            continue
        torch.manual_seed(0)
        net = gpt(size.vocabulary, size.length, size.layers, size.heads, size.width)
        net.head.linear.weight = net.embed.token.weight
        parameters = sum(p.numel() for p in net.parameters())
        # 6 a parameter that multiplies (the tied one does, as the output layer; the positions do
        # not), and attention: Chowdhery et al., arXiv:2204.02311, appendix B
        flops = tokens * (
            6 * (parameters - net.embed.position.weight.numel())
            + 12 * size.layers * size.width * size.length
        )
        model = None
        if stages:
            model = HybridModel(
                net,
                check.world(stages, shared=True),
                chunks=size.chunks,
                split="size",
                precision=precision,
            )
        else:
            net.to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=check.device == "cuda")

        def step(
            net: nn.Sequential = net,
            model: HybridModel | None = model,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> None:
            if model is not None:
                model.train_step(x, y, cross_entropy)
            else:
                for rows, targets in zip(x.split(size.rows), y.split(size.rows), strict=True):
                    with check.autocast(precision):
                        loss = cross_entropy(net(rows), targets)
                    (loss / size.chunks).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        if check.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = several(check, step, max(1, size.steps // 5), 5)
        rate = tokens / seconds
        base = base or rate
        used = "" if peak is None else f", MFU {flops / seconds / peak:.1%}"
        if check.device == "cuda":
            used += f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        check.add(
            f"GPT {parameters / 1e6:.0f}M, {precision}",
            f"{stages} stages on one device" if stages else "plain loop",
            f"{rate:,.0f} tokens/s{used}",
            f"{rate / base:.3f} of the plain loop" if stages else "",
        )
        del step, model, net, optimizer
        gc.collect()
        if check.device == "cuda":
            torch.cuda.empty_cache()


def main() -> int:
    """Runs all and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny GPT, to try the script")
    parser.add_argument("--seconds", type=float, default=450.0, help="for all of it")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu --small tries the script without")
    start = time.monotonic()
    check = Check(options.device, options.small, start + options.seconds)
    if options.device == "cpu":
        torch.set_num_threads(1)
    # the parts that come later keep at least the last half of the time
    exactness(check, until=options.seconds / 2)
    host_cost(check)
    memory(check)
    speed(check)
    gpus = (
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        if options.device == "cuda"
        else "no GPU"
    )
    print(
        f"\nGPU check: {gpus}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"Python {platform.python_version()}, {time.monotonic() - start:.0f} s\n"
    )
    print_table(["check", "setting", "result", "beside", "verdict"], check.rows)
    print("FAILED" if check.failed else "exact in all modes")
    return int(check.failed)


if __name__ == "__main__":
    sys.exit(main())
