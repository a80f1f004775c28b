"""Predicted cells: the planner's price of each layout on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import nn

from hybridtrain._base.construction import construct_on_meta
from hybridtrain._base.hardware import GIB, Hardware
from hybridtrain.cli.config import targets as instantiate
from hybridtrain.cli.config.compose import compose_config
from hybridtrain.cli.config.schema import Config
from hybridtrain.cli.run.components import optimizer_state
from hybridtrain.cli.run.hardware import hardware_of
from hybridtrain.data.stream import example_batch
from hybridtrain.partitioning import LayerCost, layer_sizes, observed_chain, state_of
from hybridtrain.partitioning.cost_table import (
    CostTable,
    counted_costs,
    given_costs,
    measured_costs,
)
from hybridtrain.price.layout import ParallelLayout, StepWork
from hybridtrain.price.price import Price, price
from scripts.bench.grid.cells import Cell, stage_layers, why_impossible
from scripts.bench.grid.results import MEMORY, Outcome
from scripts.bench.grid.reviews import synthetic_reviews

RECIPE = "recipe=imdb_transformer"

# Samples of a micro-batch that layers are counted or measured with.
_SAMPLES = 16


@dataclass(frozen=True)
class Predictor:
    """The prices of cells.

    Attributes:
        config: the recipe's, with the hardware.
        table: the costs of the model's layers.
        hardware: the nodes; a cell has as many of them as it needs.
        schedule: `1f1b` or `gpipe`.
    """

    config: Config
    table: CostTable
    hardware: Hardware
    schedule: str

    @property
    def layers(self) -> int:
        """The layers of the model, embedding and classifier included."""
        return len(self.table.sizes)

    def why_impossible(self, cell: Cell) -> str:
        """Returns why a cell has no value on this machine; an empty string if it can run."""
        return why_impossible(cell, self.layers, self.hardware.devices_per_node)

    def machine_for(self, cell: Cell) -> Hardware:
        """Returns the machine with the devices of a cell."""
        in_node = min(cell.devices, self.hardware.devices_per_node)
        return replace(self.hardware, nodes=-(-cell.devices // in_node), devices_per_node=in_node)

    def layout(self, cell: Cell) -> ParallelLayout:
        """Returns the layout of a cell: as on the page, one process per pipeline."""
        return ParallelLayout(cell.nb_part, cell.ntasks, "local", cell.chunks, self.schedule)

    def price(self, cell: Cell, host: float = 1.0) -> Price:
        """Returns the planner's price of a cell that is not impossible.

        Args:
            cell: which one.
            host: how many times as long the host takes for its part.
        """
        job = StepWork(cell.samples)
        counts = stage_layers(self.layers, cell.nb_part)
        hardware = self.machine_for(cell)
        hardware = replace(
            hardware, action_s=host * hardware.action_s, message_s=host * hardware.message_s
        )
        calls = [(host * forward, host * backward) for forward, backward in self.table.host_ms]
        table = replace(self.table, host_ms=calls)
        return price(table, hardware, job, self.layout(cell), counts)

    def outcome(self, cell: Cell) -> Outcome:
        """Returns the predicted time of a cell, or why there is none."""
        if reason := self.why_impossible(cell):
            return Outcome(cell, reason=reason)
        priced = self.price(cell)
        memory = priced.peak_bytes / GIB
        facts = {"binds": priced.binds, "bubble": priced.bubble, "memory_gib": memory}
        usable = self.hardware.usable_bytes / GIB
        if memory > usable:
            reason = f"{memory:.1f} GiB of {usable:.1f} GiB that may be used"
            return Outcome(cell, failure=MEMORY, reason=reason, facts=facts)
        if "host" in priced.binds:
            facts["host_ms"] = [self.price(cell, factor).step_ms for factor in (2.0, 0.5)]
        return Outcome(cell, priced.step_ms, facts=facts)

    def stage_ms(self, cell: Cell) -> tuple[list[float], list[float]]:
        """Returns the milliseconds of each stage's forward and backward, without the host's."""
        costs = self.table.costs_at(cell.micro_batch)
        bounds = list(pairwise(accumulate(stage_layers(self.layers, cell.nb_part), initial=0)))
        forward = [sum(cost.forward_ms for cost in costs[a:b]) for a, b in bounds]
        return forward, [sum(cost.backward_ms for cost in costs[a:b]) for a, b in bounds]

    def emulated_ms(self, cell: Cell) -> float:
        """Returns the planner's price of devices that sleep for `stage_ms` and do nothing else."""
        stages = list(zip(*self.stage_ms(cell), strict=True))
        costs = [LayerCost(str(number), 0, *times) for number, times in enumerate(stages)]
        hardware = Hardware(device="cpu", devices_per_node=cell.nb_part, action_s=0.0)
        table = given_costs(lambda samples: costs)
        return price(
            table, hardware, StepWork(cell.samples), self.layout(cell), [1] * cell.nb_part
        ).step_ms


def make_predictor(
    hardware: str, overrides: Sequence[str] = (), schedule: str = "1f1b"
) -> Predictor:
    """Counts the model of the recipe, or measures its layers for `hardware.costs=measured`.

    Args:
        hardware: a value of the config group `hardware`.
        overrides: Hydra overrides of the recipe.
        schedule: `1f1b` or `gpipe`.
    """
    config = compose_config([RECIPE, f"hardware={hardware}", *overrides])
    assert config.hardware is not None
    hardware = hardware_of(config.hardware)
    data = synthetic_reviews(config, _SAMPLES)
    inputs = example_batch(data.train, _SAMPLES, data.collate)[0]

    def build() -> nn.Module:
        return instantiate.build("model", config.model, nn.Module, defaults=data.metadata)

    measured = config.hardware.costs == "measured"
    # layers with buffers cannot be measured without values
    net = build() if measured else construct_on_meta(build)
    chain = observed_chain(net, inputs)
    precision, tf32 = config.trainer.precision, config.trainer.tf32
    if measured:
        device = torch.device("cuda:0" if hardware.device == "cuda" else "cpu")
        table = measured_costs(chain, inputs, device, precision)
    else:
        table = counted_costs(chain, inputs, hardware, precision, tf32)
    state = state_of(optimizer_state(config.optim), net)
    table = replace(table, sizes=layer_sizes(chain.layers, state))
    return Predictor(config, table, hardware, schedule)
