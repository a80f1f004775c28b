"""Makes a plan for a model, and rebuilds the layers of each stage from a plan.

One process makes the plan, and every process rebuilds its layers. This module needs no engine,
process group or GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from hybridtrain._base.microbatch import Microbatch, batch_size, chunk_sizes
from hybridtrain._base.microbatch import split as split_batch
from hybridtrain._base.precision import autocast, forward_context
from hybridtrain.errors import ConfigError, SplitError, did_you_mean, setting
from hybridtrain.graph import (
    Chain,
    Layer,
    is_chain,
)
from hybridtrain.head import HeadChoice, head_of
from hybridtrain.options import PipelineOptions, check_device_lists
from hybridtrain.partitioning.costs import CalledLayers, LayerCost, StateOf, count, state_of
from hybridtrain.partitioning.cut_search import cut_by_costs
from hybridtrain.partitioning.estimates import estimate_costs
from hybridtrain.partitioning.manual_split import (
    counts_by_marks,
    marked_stage,
    modules_around,
    spans_stages,
    split_layers,
    strip_call_index,
)
from hybridtrain.partitioning.measurements import LayerProfiler
from hybridtrain.partitioning.objective import (
    MEASURED_SPLITS,
    Objective,
    by_stage,
    stage_tables,
)
from hybridtrain.partitioning.observed_calls import ObservedChains
from hybridtrain.partitioning.plan import Plan, StagePlan, counts_for
from hybridtrain.partitioning.recompute import recomputes_stages
from hybridtrain.partitioning.stage_owners import StageOwners
from hybridtrain.schedule import (
    Schedule,
    actions_as_text,
    fullest_moments,
    make_schedule,
    offloading_on,
    peak_in_flight,
)

log = logging.getLogger("hybridtrain")

Item = TypeVar("Item")

# Layers larger than this share of the mean stage are expanded if that may even the stages out.
LARGE_LAYER = 0.1
# The most times that layers are expanded and a new cut is computed.
MAX_EXPANSIONS = 5

# A stage this much above the mean is uneven: the noise of repeated times, and of a single pass.
# Counts and estimates have no noise, but use the same limit.
COUNT_NOISE = 0.05
FIRST_PASS_NOISE = 0.15
# How long the layers of a chain are timed repeatedly, in seconds.
CAREFUL_SECONDS = 3.0

COST_SOURCES = ("estimated", "measured")

# A caller's cost function: `costs(layers, inputs)` for a chain and a micro-batch.
CostFunction = Callable[[Sequence[Layer], Any], Sequence[LayerCost]]


class Costs(NamedTuple):
    """The costs of a chain's layers, and their noise as a share of the mean stage."""

    layers: Sequence[LayerCost]
    noise: float = COUNT_NOISE


def plan(
    net: nn.Module,
    options: PipelineOptions,
    example_inputs: Any = None,
    owners: StageOwners | None = None,
    *,
    costs: str | CostFunction = "measured",
) -> Plan:
    """Decides how to cut `net` into stages, and which device gets each stage.

    Args:
        net: any module, also on the meta device unless its layers are to be measured.
        options: the pipeline options, such as split, schedule and chunks.
        example_inputs: the inputs of one batch, of which the first micro-batch is used, or a
            `Microbatch`. Needed unless the model is an `nn.Sequential` that is split without costs.
        owners: the devices of the pipeline and the processes that own them; None: one CPU.
        costs: the source of costs for a split by `time`, `memory` or `balanced`. `measured` runs
            a copy of the model on the first device. `estimated` counts FLOPs and bytes for a
            data-center GPU, without running a kernel. A function of the layers and a micro-batch
            returns the costs, such as `partial(estimate_costs, flops_per_s=...)`.

    Raises:
        ConfigError: `example_inputs` are missing, or `costs` is unknown.
        SplitError: the model cannot be cut like this; the message says what is possible.
    """
    owners = owners or StageOwners()
    return Planner(net, options, example_inputs, owners, costs=costs).plan()


def balance_by_time(net: nn.Module, example_inputs: Any, stages: int) -> list[int]:
    """Returns the number of layers of each stage that minimizes the time of the slowest stage.

    Layers run on the CPU, with `example_inputs` as one micro-batch.
    """
    options = PipelineOptions(split="time")
    return plan(net, options, example_inputs, StageOwners.of_cpus(stages)).counts


def balance_by_size(net: nn.Module, stages: int, example_inputs: Any = None) -> list[int]:
    """Returns the number of layers of each stage that balances their bytes.

    Those are the bytes of weights, gradients and optimizer state.
    A model other than an `nn.Sequential` needs `example_inputs`.
    """
    owners = StageOwners.of_cpus(stages)
    return plan(net, PipelineOptions(split="size"), example_inputs, owners).counts


@dataclass(frozen=True)
class PlannedLayers:
    """The layers of each stage of a plan.

    Attributes:
        stages: the layers of each stage.
        look_inside: the layers, by index, known to use values of earlier stages besides their
            arguments; found by steps that run the forward.
        recast: the parameters, by name, that several stages cast under an autocast of the forward;
            found by the same steps.
        net: the model.
        head: how the head and its loss are computed.

    The other attributes come from the `Chain`.
    """

    stages: list[list[Layer]]
    units: list[tuple[int, int]]
    net: nn.Module
    first_uses: Mapping[str, int] = field(default_factory=dict)
    opened: Mapping[int, str] = field(default_factory=dict)
    look_inside: set[int] = field(default_factory=set)
    recast: set[str] = field(default_factory=set)
    head: HeadChoice = field(default_factory=HeadChoice)

    @property
    def layers(self) -> list[Layer]:
        """The layers of all stages; their work can be counted."""
        layers = [layer for stage in self.stages for layer in stage]
        return CalledLayers(layers, self.net, self.first_uses)


class _Decision(NamedTuple):
    """The expanded modules, the costs of the layers, and the number of layers of each stage.

    `speeds` come from a plan file, by stage, and `costs_per_stage`, whose layers may be finer or
    coarser than the model's.
    """

    expand: Collection[str]
    costs: Sequence[LayerCost]
    counts: list[int]
    costs_from: str = "counted"
    speeds: Sequence[float] = ()
    costs_per_stage: Sequence[int] = ()


class Planner:
    """Makes a plan, and rebuilds the layers of a plan without observing the forward again.

    Args:
        net: any module, also on the meta device unless its layers are to be measured.
        options: the pipeline options.
        example_inputs: the inputs of one batch, or a `Microbatch`.
        owners: the devices of the pipeline and the processes that own them; None: one CPU.
        costs: `measured`, `estimated`, or a function of the layers and a micro-batch.
    """

    def __init__(
        self,
        net: nn.Module,
        options: PipelineOptions,
        example_inputs: Any = None,
        owners: StageOwners | None = None,
        *,
        costs: str | CostFunction = "measured",
    ) -> None:
        self._net = net
        self._modules = dict(net.named_modules(remove_duplicate=False))
        self._options = options
        self._owners = (owners or StageOwners()).placed(options.placement)
        if isinstance(costs, str) and costs not in COST_SOURCES:
            raise ConfigError(
                f"costs={costs!r} is neither a function of the layers and a micro-batch nor a "
                f"known source; {did_you_mean(costs, COST_SOURCES, 'sources')}"
            )
        check_device_lists(options, self._owners.nb_part)
        self._costs = costs
        self._stages = self._owners.nb_part * options.stages_per_device
        if example_inputs is None and options.split in MEASURED_SPLITS:
            raise ConfigError(
                f"{setting('split', options.split, repr)} needs layer costs for a micro-batch: "
                "pass example_inputs=<the inputs of a batch>"
            )
        if isinstance(example_inputs, Microbatch):
            example_inputs = example_inputs.inputs
        elif example_inputs is not None:
            sizes = chunk_sizes(batch_size(example_inputs), options.chunks)
            example_inputs = split_batch(example_inputs, sizes)[0]
        self._microbatch = example_inputs
        device = torch.device(self._owners.devices[0])
        precision = partial(autocast, options.precision, device.type)
        self._chains = ObservedChains(net, example_inputs, precision)
        self._last: tuple[frozenset[str], Chain] | None = None

    @torch.inference_mode(False)  # layers are measured with their backward
    def plan(self) -> Plan:
        """Decides on the stages."""
        options, owners = self._options, self._owners
        nb_part, chunks, per_device = owners.nb_part, options.chunks, options.stages_per_device
        shape = options.schedule, nb_part, chunks, per_device, options.max_inflight
        order = make_schedule(*shape)
        in_flight = peak_in_flight(order)
        on_device = self._on_device(order)
        held = [some or alive for some, alive in zip(on_device, in_flight, strict=True)]
        decision = self._decide(held)
        chain = self._chain(decision.expand)
        _runs_of(chain.layers, decision.counts, chain)  # no cut separates what belongs together
        ends = accumulate(decision.costs_per_stage or decision.counts, initial=0)
        runs = [list(decision.costs[start:end]) for start, end in pairwise(ends)]
        speeds = by_stage(options, options.device_speeds) or decision.speeds
        speeds = speeds or [1.0] * len(in_flight)
        return Plan(
            model=type(self._net).__name__,
            split=options.split if isinstance(options.split, str) else "by hand",
            schedule=options.schedule,
            chunks=chunks,
            nb_part=nb_part,
            stages_per_device=per_device,
            recompute=options.recompute,
            expand=sorted(decision.expand),
            costs_from=decision.costs_from,
            stages=[
                StagePlan(
                    device=owners.device_of(stage),
                    process=owners.process_of(stage),
                    in_flight=alive,
                    layers=costs,
                    speed=speed / speeds[0],  # the costs are for the first device
                    on_device=some if some < alive else 0,
                )
                for stage, (alive, costs, speed, some) in enumerate(
                    zip(in_flight, runs, speeds, on_device, strict=True)
                )
            ],
            actions=actions_as_text(order),
        )

    def _on_device(self, order: Schedule) -> list[int]:
        """Returns, for each stage, how many micro-batches its device holds at most; 0: all.

        Of single recomputed layers, whose inputs alone are moved, the plan has no costs.
        """
        options = self._options
        moves_all = options.offload == "all" or recomputes_stages(options.recompute)
        most = [0] * order.stages
        if options.offload != "none" and moves_all:
            copies = offloading_on(torch.device(self._owners.devices[0]).type)
            for lane, moments in zip(
                order.lanes, fullest_moments(order, offloading=copies), strict=True
            ):
                for number, stage in enumerate(sorted({action.stage for action in lane})):
                    most[stage] = max(moment.on_device[number] for moment in moments)
        return most

    def layers_of(self, plan: Plan) -> PlannedLayers:
        """Rebuilds the layers of `plan`, on any process.

        Raises:
            SplitError: the plan does not fit the model, or separates layers that must be together.
        """
        chain = self._chain(plan.expand)
        counts = counts_for(plan, [layer.name for layer in chain.layers], self._stages)
        stages = _runs_of(chain.layers, counts, chain)
        return PlannedLayers(
            stages,
            chain.units,
            self._net,
            chain.first_uses,
            chain.opened,
            head=self._head_in(stages),
        )

    def _head_in(self, stages: Sequence[Sequence[Layer]]) -> HeadChoice:
        """Returns how the head is computed where it is; see `HeadChoice`."""
        choice = head_of(self._net, self._options.head)
        heads = {id(self._modules[name]) for name in choice.names}
        layers = [layer for stage in stages for layer in stage]
        if any(id(m) in heads for stage in stages[:-1] for k in stage for m in k.module.modules()):
            return HeadChoice((), f"{choice.reason}, and a cut separates it from its loss")
        if self._options.compile and not heads <= {id(layer.module) for layer in layers}:
            return HeadChoice((), f"{choice.reason}, and is compiled with the layer around it")
        return choice

    @cached_property
    def _state(self) -> StateOf:
        """The bytes of optimizer state of a parameter."""
        return state_of(self._options.optimizer_tensors_per_param, self._net)

    def _chain(self, expand: Collection[str] = ()) -> Chain:
        key = frozenset(expand)
        if self._last is None or self._last[0] != key:
            try:
                chain = self._chains.chain(key)
            except SplitError:
                if self._stages > 1:
                    raise
                chain = self._chains.one_layer()
            self._last = key, chain
        return self._last[1]

    def _decide(self, in_flight: Sequence[int]) -> _Decision:
        net, split = self._net, self._options.split
        expand: Collection[str]
        if isinstance(split, str) and split.lower().endswith((".yaml", ".yml")):
            plan = Plan.read(split)
            names = [layer.name for layer in self._chain(plan.expand).layers]
            counts = counts_for(plan, names, self._stages)
            if plan.chunks != self._options.chunks:
                log.info("the costs in %s are for batches of %d micro-batches", split, plan.chunks)
            return _Decision(
                plan.expand, plan.costs, counts, plan.costs_from, plan.speeds, plan.counts
            )
        if split == "manual":
            default = self._options.default_partition
            stage_of = partial(marked_stage, net, default=default)
            expand = [n for n, part in self._modules.items() if spans_stages(part, stage_of(n))]
            chain = self._chain(expand)
            counts = counts_by_marks(net, chain.layers, self._stages, default)
        elif isinstance(split, str):
            return self._by_objective(in_flight)
        else:
            items = [item for item in split if not isinstance(item, int)]
            expand = modules_around(self._modules, items)
            chain = self._chain(expand)
            counts = split_layers(chain.layers, self._stages, split)
        return _Decision(expand, count(chain.layers, self._state), counts)

    def _by_objective(self, in_flight: Sequence[int]) -> _Decision:
        """Finds the best cut, and expands layers that are too large for an even cut.

        Raises:
            SplitError: no cut is possible; the message says why.
        """
        goal = Objective.of(self._options)
        source = self._costs if isinstance(self._costs, str) else "given"
        costs_from = source if goal.unit == "costs" else "counted"
        expand: set[str] = set()
        best: _Decision | None = None
        for expansions_left in reversed(range(1 + MAX_EXPANSIONS)):
            chain = self._chain(expand)
            further: set[str] = set()
            for costs in self._costs_of(chain.layers, goal):
                counts: list[int] | None = None
                failure: SplitError | None = None
                try:
                    counts = self._cut(chain, costs.layers, in_flight, goal)
                    best = _Decision(sorted(expand), costs.layers, counts, costs_from)
                except SplitError as error:
                    failure = error
                if expansions_left:
                    large = _too_large(chain, costs, in_flight, goal, counts)
                    further = {path for path in large if self._may_expand(path, goal)} - expand
                if further or failure:
                    break  # more accurate times would not change the cut
            if not further:
                break
            expand |= further
        if best is None:
            assert failure is not None
            raise SplitError(f"{failure}{_hints(chain)}") from failure
        return best

    def _cut(
        self, chain: Chain, costs: Sequence[LayerCost], in_flight: Sequence[int], goal: Objective
    ) -> list[int]:
        """Returns the best cut; not between a head and its loss, if another one is possible."""
        names = head_of(self._net, self._options.head).names
        heads = {id(self._modules[name]) for name in names}
        has_head = [any(id(m) in heads for m in layer.module.modules()) for layer in chain.layers]
        if any(has_head):
            together = range(has_head.index(True) + 1, len(chain.layers))
            with suppress(SplitError):
                return cut_by_costs(costs, in_flight, goal, chain.no_cut_before.union(together))
        return cut_by_costs(costs, in_flight, goal, chain.no_cut_before)

    def _may_expand(self, path: str, goal: Objective) -> bool:
        if is_chain(self._net) and goal.unit != "costs":
            return False  # a chain is cut between its elements
        # not every layer is a module of the model
        return path in self._modules and any(True for _ in self._modules[path].children())

    def _costs_of(self, layers: Sequence[Layer], goal: Objective) -> Iterator[Costs]:
        """Yields the costs of a chain with increasing accuracy.

        The caller requests more accurate costs only while they may change the cut.
        """
        precision, tensors = self._options.precision, self._state
        if goal.unit != "costs":
            yield Costs(count(layers, tensors))
        elif not isinstance(self._costs, str):
            yield Costs(_given(self._costs, layers, self._microbatch))
        elif self._costs == "estimated":  # for a data-center GPU, independent of the devices
            estimate = partial(estimate_costs, precision=partial(autocast, precision, "cpu"))
            inputs = self._microbatch
            yield Costs(estimate(layers, inputs, optimizer_tensors_per_param=tensors))
        else:
            stages = self._owners.stages_of(0)
            devices = [torch.device(self._owners.device_of(stage)) for stage in stages]
            profiler = LayerProfiler(
                layers,
                self._microbatch,
                devices,
                precision=partial(
                    forward_context, precision, self._options.attention, devices[0].type
                ),
                optimizer_tensors_per_param=tensors,
            )
            times_matter = goal.memory_weight < 1
            yield Costs(profiler.costs(), FIRST_PASS_NOISE if times_matter else COUNT_NOISE)
            if times_matter:
                profiler.repeat(CAREFUL_SECONDS)
                yield Costs(profiler.costs())


def _given(function: CostFunction, layers: Sequence[Layer], inputs: Any) -> Sequence[LayerCost]:
    costs = list(function(layers, inputs))
    if [cost.name for cost in costs] != [layer.name for layer in layers]:
        raise ConfigError(
            f"costs= must return a LayerCost for each of the {len(layers)} layers, in order and "
            f"with their names, not {[cost.name for cost in costs]}"
        )
    return costs


def _too_large(
    chain: Chain, costs: Costs, in_flight: Sequence[int], goal: Objective, counts: list[int] | None
) -> set[str]:
    """Returns the layers whose size prevents a better cut than `counts`, or any cut."""
    tables = stage_tables(costs.layers, in_flight, goal, chain.no_cut_before)
    largest_limit = max(goal.stage_limits(len(in_flight))) * goal.stages_per_device
    equal = replace(goal, speeds=(), memory_limit=largest_limit)
    equal_tables = stage_tables(costs.layers, in_flight, equal, chain.no_cut_before)
    sizes = equal_tables[0].diagonal(1).tolist()
    mean = sum(sizes) / len(in_flight)
    if counts is not None:
        stages = zip(tables, pairwise(accumulate(counts, initial=0)), strict=True)
        largest = max(table[bounds].item() for table, bounds in stages)
        # a number of layers is even enough
        if goal.unit == "layers" or largest <= (1 + costs.noise) * mean:
            return set()
    return {
        strip_call_index(layer.name)
        for layer, size in zip(chain.layers, sizes, strict=True)
        if size > LARGE_LAYER * mean
    }


_SHARE = "Two modules may share their parameters instead of being one (b.weight = a.weight)"


def _hints(chain: Chain) -> str:
    """Returns the reasons why there are not more places to cut, for an error message."""
    hints = ""
    if chain.no_cut_before:
        first = last = min(chain.no_cut_before)
        while last + 1 in chain.no_cut_before:
            last += 1
        hints = (
            f"; {chain.layers[first - 1].name!r} to {chain.layers[last].name!r} stay together, "
            f"because they use one module. "
            f"{_SHARE} (or call a module once for several inputs, with torch.cat)"
        )
    return hints


def _runs_of(items: Sequence[Item], counts: Sequence[int], chain: Chain) -> list[list[Item]]:
    """Returns the items of each stage, from one item per layer of `chain`.

    Raises:
        SplitError: a cut separates layers that must be together; the message names them.
    """
    for cut in accumulate(counts[:-1]):
        if cut in chain.no_cut_before:
            last_before, first_after = chain.layers[cut - 1].name, chain.layers[cut].name
            raise SplitError(
                f"cannot cut between {last_before!r} and {first_after!r}: the same module is used "
                f"before and after, or a tensor is changed in place there. Cut elsewhere. "
                f"{_SHARE}"
            )
    return [list(items[start:end]) for start, end in pairwise(accumulate(counts, initial=0))]
