"""What a new length costs a process with some of the stages: a rehearsal of a Llama's forward."""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybridtrain._base.precision import ThreadState
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import Planner
from hybridtrain.pipeline import PartsHere
from hybridtrain.pipeline.engine import Step
from hybridtrain.schedule import make_schedule
from hybridtrain.world import World
from scripts.bench.common import print_footer, print_table

STAGES = 2


def llama(layers: int) -> LlamaForCausalLM:
    """A narrow model: without values, the width costs nothing."""
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config)


def texts(length: int) -> dict[str, Any]:
    """Two texts, one of them padded, with labels."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, -3:] = 0
    ids = torch.randint(1000, (2, length))
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def engine_of_last_process(net: LlamaForCausalLM) -> Any:
    """The engine of the last of the processes, of which all are threads of this one."""
    options, inputs = PipelineOptions(chunks=1), texts(16)
    device = torch.device("cpu")
    world = World(
        size=STAGES, devices=(device,), engine="distributed", processes_per_replica=STAGES
    )
    planner = Planner(net, options, inputs, world.stage_owners)
    planned = planner.layers_of(planner.plan())
    copies = [copy.deepcopy((net, planned.stages)) for _ in range(STAGES)]
    parts = [(own, replace(planned, stages=stages, net=own)) for own, stages in copies]
    return PartsHere(parts, device, options)._engines[-1]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--lengths", type=int, default=14)
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine = engine_of_last_process(llama(options.layers))
    schedule = make_schedule("1f1b", STAGES, 1, 1)
    times = []
    for number in range(3 + options.lengths):
        inputs = texts(10 + 3 * number)
        state = ThreadState.capture()
        step = Step(schedule, lambda _, inputs=inputs: inputs, lambda *_: None, state)
        start = time.perf_counter()
        engine.rehearse(step)
        times.append(1e3 * (time.perf_counter() - start))
    rows = [[f"length {n + 1}", f"{times[n]:.0f}"] for n in range(3)]
    rows.append(["each further one, median", f"{statistics.median(times[3:]):.0f}"])
    print_table(["", "ms"], rows)
    print_footer(f"A Llama of {options.layers} layers, with mask and labels; one thread.")


if __name__ == "__main__":
    main()
