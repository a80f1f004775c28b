"""Published runs beside the planner's price: `python -m scripts.bench.planning.literature`.

The runs are pipelines, data parallel or fully sharded, which a plan of this project prices without
tensor parallelism. Each is priced with its own schedule, micro-batch and recomputation, on a preset
with the network that the source names and everything else as it is. Runs with tensor parallelism
have the fastest plan without it. The table in docs/benchmarks-tables.md is what this prints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Any

import torch
import transformers
from torch import nn

from hybridtrain._base.construction import construct_on_meta
from hybridtrain._base.hardware import Hardware
from hybridtrain._base.text_table import markdown_table
from hybridtrain.cli.config.compose import compose_config
from hybridtrain.cli.run.hardware import hardware_of
from hybridtrain.loss import cross_entropy
from hybridtrain.models import gpt
from hybridtrain.partitioning import (
    CostTable,
    LossOfStep,
)
from hybridtrain.price import (
    Choices,
    ParallelLayout,
    StepWork,
    find_layouts,
    fully_sharded,
    model_costs,
)
from hybridtrain.price.price import price

MEGATRON_1 = "Megatron-LM, table 1"
MEGATRON_2 = "the same, table 2: ZeRO-3"
MOSAIC_A100 = "MosaicML, A100"
MOSAIC_H100 = "MosaicML, H100"
ZERO_BUBBLE = "Zero Bubble, table 4"
TITAN = "torchtitan, H100"
MPT = "MPT-7B"
TINY_LLAMA = "TinyLlama"
META = "LLaMA"
META_2 = "Llama 2"
PYTHIA = "Pythia"
BLOOM = "BLOOM"
NEOX = "GPT-NeoX-20B"
STARCODER = "StarCoder"

# layers, width, heads
SIZES = {
    "0.4B": (24, 1024, 16),
    "760M": (24, 1536, 12),
    "1.3B": (24, 2048, 16),
    "1.4B": (24, 2048, 16),
    "1.5B": (22, 2304, 24),
    "1.7B": (24, 2304, 24),
    "2.7B": (32, 2560, 20),
    "2.8B": (32, 2560, 32),
    "6.2B": (30, 4096, 32),
    "6.7B": (32, 4096, 32),
    "13B": (40, 5120, 40),
    "14.6B": (46, 5120, 40),
    "20B": (44, 6144, 64),
    "28.3B": (62, 6144, 48),
    "30B": (48, 7168, 56),
    "65B": (80, 8192, 64),
    "175B": (96, 12288, 96),
    "176B": (70, 14336, 112),
}
VOCABULARY = {"176B": 250_880}

# layers, width, heads, heads of keys and values, width within a block, vocabulary
LLAMAS = {
    "8B, Llama 3.1": (32, 4096, 32, 8, 14336, 128256),
    "1.1B, Llama": (22, 2048, 32, 4, 5632, 32000),
    "6.7B, Llama": (32, 4096, 32, 32, 11008, 32000),
    "65B, Llama": (80, 8192, 64, 64, 22016, 32000),
    # StarCoder's sizes: its heads share keys and values, and its blocks have as many products
    "15.5B, multi-query": (40, 6144, 48, 1, 16384, 49152),
}

STEPS, WHOLE_RUN = "steps", "whole run"


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        microbatch: samples of it; a `plan` chooses its own.
        recomputes: whether all layers are recomputed; a `plan` chooses.
        published: tokens per second and GPU.
        spread: `DDP`, `FSDP`, `ZeRO-1` (DDP with a sharded optimizer), `plan` (the fastest without
            tensor parallelism), or the schedule of a pipeline over all GPUs; `interleaved` is 1F1B
            with a stage for each block.
        rate_of: `STEPS`, a speed that the authors saw in training, or `WHOLE_RUN`, the tokens over
            all GPU hours, with restarts, evaluations and checkpoints.
        memory_gib: of a GPU; only a `plan` has to fit.
        nb_part: the GPUs of a pipeline of a `plan`, as found by a search over all numbers.
    """

    source: str
    size: str
    gpus: int
    samples: int
    microbatch: int
    recomputes: bool
    published: float
    seq_len: int = 2048
    spread: str = "FSDP"
    rate_of: str = STEPS
    memory_gib: float = 80
    nb_part: int | None = None

    @property
    def layout(self) -> ParallelLayout:
        """What is priced, unless it is sharded."""
        chunks = self.samples // self.microbatch
        recompute = "always" if self.recomputes else "never"
        if self.spread in ("DDP", "ZeRO-1"):
            shard = "none" if self.spread == "DDP" else "optimizer"
            return ParallelLayout(
                replicas=self.gpus, chunks=chunks // self.gpus, recompute=recompute, shard=shard
            )
        # the first and the last stage have a block less
        blocks = SIZES[self.size][0] + 2
        v = blocks // self.gpus if self.spread == "interleaved" else 1
        schedule = "1f1b" if self.spread == "interleaved" else self.spread
        return ParallelLayout(self.gpus, 1, "distributed", chunks, schedule, v, recompute)

    @property
    def counts(self) -> list[int]:
        """The layers of each stage: embedding, blocks, and the two of the head in the last one."""
        stages = self.layout.stages
        counts = [(SIZES[self.size][0] + 2) // stages] * stages
        counts[-1] += 1
        return counts

    @property
    def hardware(self) -> Hardware:
        """The machine, without a limit of its memory unless a plan has to be found."""
        nodes, in_node = max(1, self.gpus // 8), min(8, self.gpus)
        one, memory_gib = machine_in(self.source), 1e6
        if self.spread == "plan":
            memory_gib = self.memory_gib
        return replace(one, nodes=nodes, devices_per_node=in_node, memory_gib=memory_gib)


def tokens_of(tflops: float, layers: int, width: int, seq_len: int = 2048) -> float:
    """Returns the tokens/s of a rate in TFLOP/s per GPU, by Megatron's formula with recomputation:
    96 l h^2 (1 + s / 6h + V / 16lh) FLOPs for a token.
    """
    terms = 1 + seq_len / (6 * width) + 51200 / (16 * layers * width)
    return tflops * 1e12 / (96 * layers * width**2 * terms)


def in_gpu_hours(tokens: float, hours: float) -> float:
    """Returns the tokens/s of each GPU of a run that took so many GPU hours."""
    return tokens / hours / 3600


RUNS = [
    Run(MEGATRON_1, "1.7B", 32, 512, 16, True, tokens_of(137, 24, 2304), spread="DDP"),
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
    # half of the products are recomputed there (selective checkpointing), and none here
    Run(TITAN, "8B, Llama 3.1", 8, 16, 2, False, 5762, 8192),
    Run(TITAN, "8B, Llama 3.1", 128, 256, 2, False, 5605, 8192),
    # the fewest micro-batches of each size, where the schedules differ most
    *(
        Run(ZERO_BUBBLE, size, gpus, m * microbatch, microbatch, False, 1024 * rate, 1024, spread)
        for size, gpus, microbatch, m, rates in [
            ("1.5B", 8, 6, 24, (11.8, 13.1, 12.9)),
            ("6.2B", 8, 3, 24, (3.50, 4.01, 3.88)),
            ("14.6B", 16, 1, 48, (1.40, 1.54, 1.61)),
            ("28.3B", 32, 1, 96, (0.76, 0.82, 0.87)),
        ]
        for spread, rate in zip(("1f1b", "interleaved", "zb-h1"), rates, strict=True)
    ),
    Run(TINY_LLAMA, "1.1B, Llama", 16, 1024, 8, False, 24_000),
    Run(META, "65B, Llama", 2048, 2048, 1, True, 380),
    Run(MPT, "6.7B", 440, 1760, 4, False, in_gpu_hours(1e12, 9.5 * 24 * 440), rate_of=WHOLE_RUN),
    Run(META, "6.7B, Llama", 256, 2048, 4, False, in_gpu_hours(1e12, 82_432), rate_of=WHOLE_RUN),
    Run(
        META_2,
        "6.7B, Llama",
        256,
        1024,
        2,
        False,
        in_gpu_hours(2e12, 184_320),
        4096,
        rate_of=WHOLE_RUN,
    ),
    *(
        Run(
            PYTHIA,
            size,
            gpus,
            1024,
            16,
            True,
            in_gpu_hours(299.9e9, hours),
            spread=spread,
            rate_of=WHOLE_RUN,
        )
        for size, gpus, hours, spread in [
            ("0.4B", 32, 2_540, "DDP"),
            ("1.4B", 64, 7_120, "ZeRO-1"),
            ("2.8B", 64, 14_240, "ZeRO-1"),
        ]
    ),
    Run(
        STARCODER,
        "15.5B, multi-query",
        512,
        512,
        1,
        True,
        in_gpu_hours(1e12, 320_256),
        8192,
        "plan",
        WHOLE_RUN,
        nb_part=4,
    ),
    # 105 s a step; 117 TFLOP/s with 8 FLOPs for a parameter and token
    Run(BLOOM, "176B", 384, 2048, 1, True, 2048 * 2048 / 105 / 384, spread="plan", nb_part=48),
    Run(
        NEOX,
        "20B",
        96,
        1536,
        1,
        True,
        117e12 / (8 * 20.6e9),
        spread="plan",
        memory_gib=40,
        nb_part=8,
    ),
]


@cache
def machine_in(source: str) -> Hardware:
    """Returns the preset of a source's GPUs, with the network that it names: 200 Gb/s for an A100,
    400 for an H100. Zero Bubble names none, and BLOOM ran on the machine of the preset. The memory
    of torchtitan's H100s has 2.4 TB/s.
    """
    on_h100 = source in (MOSAIC_H100, TITAN)
    name = "h100" if on_h100 else "jean-zay-a100"
    hardware = compose_config(["recipe=digits", f"hardware={name}"]).hardware
    assert hardware is not None
    hardware = hardware_of(hardware)
    if source not in (ZERO_BUBBLE, BLOOM):
        network = 400e9 if on_h100 else 200e9
        hardware = replace(hardware, network_bytes_per_s=network, network_cards=8)
    return replace(hardware, memory_bytes_per_s=2.4e12) if source == TITAN else hardware


def model(size: str, seq_len: int) -> nn.Module:
    """Returns a GPT or a Llama."""
    if size in LLAMAS:
        layers, width, heads, kv_heads, within, vocabulary = LLAMAS[size]
        config = transformers.LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=within,
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
            max_position_embeddings=seq_len, use_cache=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
    layers, width, heads = SIZES[size]
    vocabulary = VOCABULARY.get(size, 51200)
    return gpt(vocab_size=vocabulary, seq_len=seq_len, n_layer=layers, d_model=width, n_head=heads)


def loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy of logits, or of an output of transformers."""
    return cross_entropy(getattr(output, "logits", output), targets)


@cache
def costs(size: str, seq_len: int, source: str) -> CostTable:
    """Returns the costs in bf16."""
    net = construct_on_meta(lambda: model(size, seq_len))
    tokens = torch.zeros(4, seq_len, dtype=torch.long)
    hardware, ending = machine_in(source), LossOfStep(loss, tokens)
    return model_costs(net, tokens, hardware, precision="bf16", loss=ending)


def predicted(run: Run) -> float:
    """Returns the tokens per second and GPU that the planner says."""
    hardware = run.hardware
    table = costs(run.size, run.seq_len, run.source)
    job = StepWork(run.samples, tokens_per_sample=run.seq_len)
    if run.spread == "FSDP":
        chunks = run.samples // run.gpus // run.microbatch
        found = fully_sharded(table, hardware, job, 2, chunks=chunks, recomputes=run.recomputes)
        assert found is not None
        step_ms = found.step_ms
    elif run.spread == "plan":
        choices = Choices(
            nb_part=[run.nb_part] if run.nb_part else None,
            engine=["distributed"],
            schedule=["1f1b"],
            stages_per_device=(1, 2),
        )
        step_ms = find_layouts(table, hardware, job, choices)[0].step_ms
    else:
        step_ms = price(table, hardware, job, run.layout, run.counts).step_ms
    return run.samples * run.seq_len / step_ms * 1e3 / run.gpus


def main() -> None:
    """Prints the table, and the median and the range of the ratios."""
    head = ["run", "parameters", "GPUs", "spread", "samples", "micro-batch", "recomputed"]
    lines = [[*head, "rate of", "published", "predicted", "ratio"]]
    ratios = []
    for run in RUNS:
        ours = predicted(run)
        ratios.append(ours / run.published)
        chosen = [str(run.microbatch), "yes" if run.recomputes else "no"]
        if run.spread == "plan":
            chosen = ["as found"] * 2
        numbers = [str(run.gpus), run.spread, str(run.samples), *chosen, run.rate_of]
        speeds = [f"{run.published:,.0f}", f"{ours:,.0f}", f"{ratios[-1]:.2f}"]
        lines.append([run.source, run.size, *numbers, *speeds])
    print(markdown_table(lines))
    print(f"\nratios {min(ratios):.2f} to {max(ratios):.2f}, median {median(ratios):.2f}")


if __name__ == "__main__":
    main()
