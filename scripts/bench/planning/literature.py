"""Published runs beside the planner's price: `python -m scripts.bench.planning.literature`.

The runs are data parallel or fully sharded, which a plan of this project prices without tensor
parallelism. Each is priced with its own micro-batch and recomputation, on a preset with the network
of that machine and everything else as it is. The table of docs/planning.md is what this prints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from statistics import median

import torch

from hybridtrain.app.compose import compose_config
from hybridtrain.app.pricing import machine_of
from hybridtrain.construction import construct_on_meta
from hybridtrain.losses import cross_entropy
from hybridtrain.machine import Machine
from hybridtrain.models import gpt
from hybridtrain.planning import CostTable, Job, Layout, LossOfStep, fully_sharded, model_costs
from hybridtrain.planning.price import price
from hybridtrain.text_table import markdown_table

MEGATRON_1 = "Megatron-LM, table 1"
MEGATRON_2 = "the same, table 2: ZeRO-3"
MOSAIC_A100 = "MosaicML, A100"
MOSAIC_H100 = "MosaicML, H100"

# layers, width, heads
SIZES = {
    "760M": (24, 1536, 12),
    "1.3B": (24, 2048, 16),
    "1.7B": (24, 2304, 24),
    "2.7B": (32, 2560, 20),
    "6.7B": (32, 4096, 32),
    "13B": (40, 5120, 40),
    "30B": (48, 7168, 56),
    "65B": (80, 8192, 64),
    "175B": (96, 12288, 96),
}


@dataclass(frozen=True)
class Run:
    """A published run; `published` is in tokens per second and GPU."""

    source: str
    size: str
    gpus: int
    samples: int
    microbatch: int
    recomputes: bool
    published: float
    seq_len: int = 2048
    sharded: bool = True

    @property
    def preset(self) -> str:
        """The option of `cluster`."""
        return "h100" if self.source == MOSAIC_H100 else "jean-zay-a100"

    @property
    def machine(self) -> Machine:
        """The preset, with nodes of 8 and the network that the source names: 200 Gb/s a GPU for
        A100s, 400 for H100s.
        """
        network = 400e9 if self.preset == "h100" else 200e9
        nodes, in_node = max(1, self.gpus // 8), min(8, self.gpus)
        return replace(
            preset(self.preset), nodes=nodes, devices_per_node=in_node, memory_gib=1e6,
            network_bytes_per_s=network, network_cards=8,
        )  # fmt: skip


def tokens_of(tflops: float, layers: int, width: int, seq_len: int = 2048) -> float:
    """Returns the tokens/s of a rate in TFLOP/s per GPU, by Megatron's formula with recomputation:
    96 l h^2 (1 + s / 6h + V / 16lh) FLOPs for a token.
    """
    terms = 1 + seq_len / (6 * width) + 51200 / (16 * layers * width)
    return tflops * 1e12 / (96 * layers * width**2 * terms)


RUNS = [
    Run(MEGATRON_1, "1.7B", 32, 512, 16, True, tokens_of(137, 24, 2304), sharded=False),
    Run(MEGATRON_2, "175B", 384, 1536, 4, True, tokens_of(144, 96, 12288)),
    Run(MEGATRON_2, "175B", 768, 1536, 2, True, tokens_of(88, 96, 12288)),
    Run(MEGATRON_2, "175B", 1536, 1536, 1, True, tokens_of(44, 96, 12288)),
    Run(MOSAIC_A100, "760M", 8, 384, 24, False, 32434),
    Run(MOSAIC_A100, "1.3B", 8, 448, 14, False, 20513),
    Run(MOSAIC_A100, "65B", 64, 2048, 8, True, 410),
    Run(MOSAIC_H100, "760M", 32, 768, 24, False, 67971),
    Run(MOSAIC_H100, "1.3B", 64, 1280, 20, False, 44402),
    Run(MOSAIC_H100, "2.7B", 64, 1152, 6, False, 22525),
    Run(MOSAIC_H100, "6.7B", 8, 48, 6, False, 10643),
    Run(MOSAIC_H100, "6.7B", 128, 768, 6, False, 10475),
    Run(MOSAIC_H100, "6.7B", 512, 3072, 6, False, 9670),
    Run(MOSAIC_H100, "13B", 64, 128, 2, False, 4800),
    Run(MOSAIC_H100, "30B", 32, 1344, 14, True, 2308),
    Run(MOSAIC_H100, "65B", 64, 2048, 8, True, 1039),
]


@cache
def preset(name: str) -> Machine:
    """Returns the machine of an option of `cluster`."""
    cluster = compose_config(["recipe=digits", f"cluster={name}"]).cluster
    assert cluster is not None
    return machine_of(cluster)


@cache
def costs(size: str, seq_len: int, machine: str) -> CostTable:
    """Returns the costs of a GPT in bf16."""
    layers, width, heads = SIZES[size]
    net = construct_on_meta(
        lambda: gpt(vocab_size=51200, seq_len=seq_len, n_layer=layers, d_model=width, n_head=heads)
    )
    tokens = torch.zeros(4, seq_len, dtype=torch.long)
    return model_costs(
        net, tokens, preset(machine), precision="bf16", loss=LossOfStep(cross_entropy, tokens)
    )


def predicted(run: Run) -> float:
    """Returns the tokens per second and GPU that the planner says."""
    machine = run.machine
    table = costs(run.size, run.seq_len, run.preset)
    chunks = run.samples // run.gpus // run.microbatch
    job = Job(run.samples, tokens_per_sample=run.seq_len)
    if run.sharded:
        found = fully_sharded(table, machine, job, 2, chunks=chunks, recomputes=run.recomputes)
        assert found is not None
        step_ms = found.step_ms
    else:
        layout = Layout(
            nb_part=1, replicas=run.gpus, chunks=chunks,
            checkpoint="always" if run.recomputes else "never",
        )  # fmt: skip
        step_ms = price(table, machine, job, layout, [len(table.sizes)]).step_ms
    return run.samples * run.seq_len / step_ms * 1e3 / run.gpus


def main() -> None:
    """Prints the table, and the median and the range of the ratios."""
    head = ["run", "parameters", "GPUs", "samples", "micro-batch", "recomputed"]
    lines = [[*head, "published", "predicted", "ratio"]]
    ratios = []
    for run in RUNS:
        ours = predicted(run)
        ratios.append(ours / run.published)
        numbers = [str(run.gpus), str(run.samples), str(run.microbatch)]
        again = "yes" if run.recomputes else "no"
        speeds = [f"{run.published:,.0f}", f"{ours:,.0f}", f"{ratios[-1]:.2f}"]
        lines.append([run.source, run.size, *numbers, again, *speeds])
    print(markdown_table(lines))
    print(f"\nratios {min(ratios):.2f} to {max(ratios):.2f}, median {median(ratios):.2f}")


if __name__ == "__main__":
    main()
