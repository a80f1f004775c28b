"""From a model and what was asked for to the layers of each stage, equal on every rank."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrain.errors import SplitError
from hybridtrain.graph.chain import Chain, ChainBuilder, ExampleInputsNeeded, can_expand
from hybridtrain.graph.layer import Layer, is_chain
from hybridtrain.graph.mode_graphs import TraceGuards
from hybridtrain.pipeline.engines.threads import threads_per_lane
from hybridtrain.planning.balance import INFINITY, best_cut, range_sums, too_few_layers
from hybridtrain.planning.by_hand import counts_by_marks
from hybridtrain.planning.costs import LayerCost, LayerProfiler, count
from hybridtrain.planning.marks import marked_stage, spans_stages, strip_call_index
from hybridtrain.planning.objective import GIB, Objective, cut_by_costs, stage_tables
from hybridtrain.planning.plan import Plan, counts_for
from hybridtrain.planning.split_spec import SplitSpec, split_layers
from hybridtrain.world import World

log = logging.getLogger("hybridtrain")

# A stage this much above the mean is not balanced, or this much by times taken at a glance; layers
# this large, as a share of the mean stage, are looked into if that would help.
TOLERANCE = 0.05
COARSE_TOLERANCE = 0.15
LARGE_LAYER = 0.1

# How often layers are expanded and the cut is looked for anew, at most.
MAX_EXPANSIONS = 5

# How long the layers of a chain that is even enough at a glance are timed, in seconds.
SECONDS = 3.0


@dataclass(frozen=True)
class Ask:
    """What the model is divided for.

    TraceGuards:
        split: how; see `HybridModel`.
        world: its devices and ranks.
        stages_per_device: stages on each device.
        schedule: its name.
        chunks: micro-batches a step.
        in_flight: for each stage, how many micro-batches it keeps alive at most.
        memory_weight: for `balanced`: 0 for time alone, 1 for memory alone.
        memory_limit_gib: what a device can hold.
        default_partition: the stage of what is in none, for `manual`.
        optimizer_tensors_per_param: tensors that the optimizer keeps for a parameter.
        precision: what the model computes under.
        recomputes: whether stages are computed once more instead of kept.
    """

    split: SplitSpec
    world: World
    stages_per_device: int
    schedule: str
    chunks: int
    in_flight: Sequence[int]
    memory_weight: float = 0.2
    memory_limit_gib: float | None = None
    default_partition: int | None = None
    optimizer_tensors_per_param: int = 2
    precision: Callable[[], AbstractContextManager[object]] | None = None
    recomputes: bool = False

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.world.nb_part * self.stages_per_device

    @property
    def goal(self) -> Objective | None:
        """What the costs are balanced for; None if the split does not go by measured costs."""
        weights = {"time": 0.0, "memory": 1.0, "balanced": self.memory_weight}
        if not isinstance(self.split, str) or self.split not in weights:
            return None
        limit = None if self.memory_limit_gib is None else self.memory_limit_gib * GIB
        return Objective(weights[self.split], limit, self.recomputes, self.stages_per_device)


@dataclass(frozen=True)
class Division:
    """A model in stages.

    TraceGuards:
        parts: the layers of each stage.
        units: see `Chain.units`.
        attributes: what the graphs have taken from the model's modules once and for all.
        plan: what was decided, and from what costs.
    """

    parts: list[list[Layer]]
    units: list[tuple[int, int]]
    attributes: TraceGuards
    plan: Plan


def divide(net: nn.Module, ask: Ask, example_inputs: Any = None) -> Division:
    """The stages of `net`; a collective call, in which rank 0 decides.

    Args:
        net: any module.
        ask: what it is divided for.
        example_inputs: the inputs of a micro-batch.

    Raises:
        SplitError: the model cannot be divided so.
        ExampleInputsNeeded: `example_inputs` is None, and needed.
    """
    source = _Source(net, ask, example_inputs)
    if example_inputs is None and ask.goal is not None:
        raise ExampleInputsNeeded
    decision = ask.world.broadcast(ask.world.on_main(lambda: _decide(source)))
    assert decision is not None
    expand, costs, counts = decision
    chain = source.chain(expand)
    _check_cuts(chain, counts)
    bounds = list(pairwise(accumulate(counts, initial=0)))
    devices = [ask.world.devices[stage % ask.world.nb_part] for stage in range(ask.stages)]
    return Division(
        parts=[chain.layers[start:end] for start, end in bounds],
        units=chain.units,
        attributes=TraceGuards(chain.expanded, chain.flags),
        plan=Plan(
            model=type(net).__name__,
            split=ask.split if isinstance(ask.split, str) else "by hand",
            schedule=ask.schedule,
            chunks=ask.chunks,
            nb_part=ask.world.nb_part,
            stages_per_device=ask.stages_per_device,
            recomputes=ask.recomputes,
            expand=sorted(expand),
            stages=[costs[start:end] for start, end in bounds],
            in_flight=list(ask.in_flight),
            devices=[str(device) for device in devices],
        ),
    )


def _check_cuts(chain: Chain, counts: Sequence[int]) -> None:
    """Makes sure that what must stay together does, also where the user has cut.

    Raises:
        SplitError: it does not; names the layers on both sides.
    """
    for cut in accumulate(counts[:-1]):
        if cut in chain.no_cut_before:
            before, after = chain.layers[cut - 1].name, chain.layers[cut].name
            raise SplitError(
                f"there can be no cut between {before!r} and {after!r}: a module is used before "
                f"and after it, or a tensor is changed in place there. Cut elsewhere, or let two "
                f"modules share the parameters instead (b.weight = a.weight)"
            )


class _Source:
    """The chains of a model and what their layers cost."""

    def __init__(self, net: nn.Module, ask: Ask, example_inputs: Any) -> None:
        self.net = net
        self.ask = ask
        self._example_inputs = example_inputs
        self._chains = ChainBuilder(net, example_inputs, ask.precision)

    def chain(self, expand: Collection[str] = ()) -> Chain:
        """The chain in which the modules in `expand` are looked into."""
        try:
            return self._chains.chain(expand)
        except SplitError:
            if self.ask.stages > 1:
                raise
            return self._chains.one_layer()

    def should_expand(self, path: str) -> bool:
        """Whether the module there may be looked into for a better balance."""
        if is_chain(self.net) and self.ask.goal is None:
            return False  # a chain is cut as such
        try:
            return can_expand(self.net.get_submodule(path))
        except AttributeError:
            return False  # a layer without a module of its own

    def counted(self, chain: Chain) -> list[LayerCost]:
        """What its layers cost without a run."""
        return count(chain.layers, optimizer_tensors_per_param=self.ask.optimizer_tensors_per_param)

    def costs(self, chain: Chain) -> Iterator[tuple[list[LayerCost], float]]:
        """What its layers cost, as the split asks for it: at a glance, then more exactly.

        With it, how far above the mean a stage may be by these costs.
        """
        ask = self.ask
        if ask.goal is None:
            yield self.counted(chain), TOLERANCE
            return
        devices = ask.world.devices
        with _intra_op_threads(threads_per_lane(len(devices))):
            measurement = LayerProfiler(
                chain.layers,
                self._example_inputs,
                devices[0],
                crossing_device=devices[-1],
                precision=ask.precision,
                visit=self._visit,
            )
        costs = measurement.costs(optimizer_tensors_per_param=ask.optimizer_tensors_per_param)
        if ask.goal.memory_weight == 1:
            yield costs, TOLERANCE  # times do not matter
            return
        yield costs, COARSE_TOLERANCE
        with _intra_op_threads(threads_per_lane(len(devices))):
            measurement.repeat(SECONDS)
        yield (
            measurement.costs(optimizer_tensors_per_param=ask.optimizer_tensors_per_param),
            TOLERANCE,
        )

    @contextmanager
    def _visit(self, layer: Layer) -> Iterator[None]:
        """Has the layer's weights on the device where it is measured, and not all layers' there."""
        first, *others = self.ask.world.devices
        layer.module.to(first)
        try:
            yield
        finally:
            if any(device != first for device in others):
                layer.module.to("cpu")


@contextmanager
def _intra_op_threads(threads: int) -> Iterator[None]:
    """As many intra-op threads as a stage will have."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Decision = tuple[list[str], list[LayerCost], list[int]]


def _decide(source: _Source) -> Decision:
    """Which modules to look into, what the layers cost, and how many each stage gets."""
    ask, net = source.ask, source.net
    split = ask.split
    expand: set[str] = set()
    if isinstance(split, str) and split.lower().endswith((".yaml", ".yml")):
        plan = Plan.read(split)
        chain = source.chain(plan.expand)
        counts = counts_for(plan, [layer.name for layer in chain.layers], ask.stages)
        if plan.chunks != ask.chunks:
            log.info("the costs in %s are of micro-batches of %d chunks", split, plan.chunks)
        return plan.expand, plan.costs, counts
    if split == "manual":
        expand = {
            name
            for name, part in net.named_modules()
            if spans_stages(part, marked_stage(net, name, ask.default_partition))
        }
        chain = source.chain(expand)
        counts = counts_by_marks(net, chain.layers, ask.stages, ask.default_partition)
        return sorted(expand), source.counted(chain), counts
    if isinstance(split, str):
        return _decide_by_costs(source)
    expand = _named_inside(net, [item for item in split if not isinstance(item, int)])
    chain = source.chain(expand)
    counts = split_layers(chain.layers, ask.stages, split)
    return sorted(expand), source.counted(chain), counts


def _decide_by_costs(source: _Source) -> Decision:
    """The best cut, looking into layers that are too large for a good one."""
    ask = source.ask
    expand: set[str] = set()
    best: Decision | None = None
    for openings_left in reversed(range(1 + MAX_EXPANSIONS)):
        chain = source.chain(expand)
        more: set[str] = set()
        for costs, tolerance in source.costs(chain):
            tables = _tables(costs, chain, ask)
            counts: list[int] | None = None
            failure: SplitError | None = None
            try:
                counts = _cut(tables, costs, chain, ask)
            except SplitError as error:
                failure = error
            else:
                best = sorted(expand), costs, counts
            if openings_left:
                more = _too_large(source, chain, tables, counts, tolerance) - expand
            if more or failure:
                break  # better times would not change that
        if not more:
            break
        expand |= more
    if best is None:
        assert failure is not None
        raise SplitError(f"{failure}{_hints(chain)}") from failure
    return best


def _too_large(
    source: _Source,
    chain: Chain,
    tables: Sequence[Tensor],
    counts: Sequence[int] | None,
    tolerance: float,
) -> set[str]:
    """The modules to look into for a better cut than `counts`, or for one at all."""
    ask = source.ask
    sizes = [tables[0][i, i + 1].item() for i in range(len(chain.layers))]
    mean = sum(sizes) / ask.stages
    if counts is not None:
        stages = zip(tables, pairwise(accumulate(counts, initial=0)), strict=True)
        largest = max(table[start, end].item() for table, (start, end) in stages)
        # a number of layers is even enough
        if ask.split == "uniform" or largest <= (1 + tolerance) * mean:
            return set()
    return {
        path
        for layer, size in zip(chain.layers, sizes, strict=True)
        if size > LARGE_LAYER * mean and source.should_expand(path := strip_call_index(layer.name))
    }


def _hints(chain: Chain) -> str:
    """Why there are not more places to cut."""
    hints = [
        f"; {name} could not be looked into: {why}"
        for name, why in list(chain.unexpanded.items())[-3:]
    ]
    if chain.no_cut_before:
        first = min(chain.no_cut_before)
        last = (
            next(i for i in range(first, len(chain.layers) + 1) if i not in chain.no_cut_before) - 1
        )
        begin, end = chain.layers[first - 1].name, chain.layers[last].name
        hints.insert(
            0,
            f"; {begin!r} to {end!r} stay together, since they use one module or one of them "
            f"changes in place what another has",
        )
    return "".join(hints)


_NAMES = ("uniform", "size", "time", "memory", "balanced", "manual")


def _tables(costs: Sequence[LayerCost], chain: Chain, ask: Ask) -> list[Tensor]:
    """For each stage, its size by its first layer and the layer after its last."""
    if ask.goal is not None:
        return stage_tables(costs, ask.in_flight, ask.goal, chain.no_cut_before)
    if ask.split not in ("uniform", "size"):
        close = difflib.get_close_matches(str(ask.split), _NAMES, n=1)
        hint = f"did you mean {close[0]!r}? There are" if close else "use"
        raise SplitError(
            f"pipeline.split={ask.split!r} is unknown: {hint} {', '.join(_NAMES)}, the path of a "
            f"plan (.yaml), or a list of layer counts, cut points, layer names or name patterns"
        )
    table = range_sums([1 if ask.split == "uniform" else cost.parameters for cost in costs])
    table[list(chain.no_cut_before), :] = table[:, list(chain.no_cut_before)] = INFINITY
    return [table] * ask.stages


def _cut(tables: Sequence[Tensor], costs: Sequence[LayerCost], chain: Chain, ask: Ask) -> list[int]:
    if ask.goal is not None:
        return cut_by_costs(costs, ask.in_flight, ask.goal, chain.no_cut_before)
    counts = best_cut(tables) if len(costs) >= ask.stages else None
    if counts is None:
        raise SplitError(too_few_layers(len(costs), ask.stages, len(chain.no_cut_before)))
    return counts


def _named_inside(net: nn.Module, split: Sequence[Any]) -> set[str]:
    """The modules that must be looked into to find the layers that `split` names."""
    given = [name for item in split for name in ([item] if isinstance(item, str) else item)]
    parts = {name for name, _ in net.named_modules()}
    inside: set[str] = set()
    for name in given:
        literal = re.split(r"[*?\[]", name)[0].split(".")[:-1]
        inside |= {".".join(literal[:end]) for end in range(1, len(literal) + 1)} & parts
    return inside
