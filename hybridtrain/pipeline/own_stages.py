"""The part of a model that a process has, and checks that the processes agree on what they have.

Where stages are in several processes, none of these steps holds the whole model:

    rank 0       build() without values  ->  plan, which all processes receive
    each process build() without values  ->  the layers of the plan  ->  the names that it owns
    each process construct_part(build)   ->  the values of its stages

Layers that are measured for the plan have random values, one layer at a time.

Three checks find what would train on wrongly without a word. The first stage takes the inputs and
the last one the targets, so the processes of a pipeline must be given one batch (`BatchCheck`). The
weights of replicas begin equal, and averaged gradients keep them equal to the last bit, unless a
replica leaves out a step or changes a weight by itself (`check_replicas`). And all must freeze the
same parameters before the same step (`check_frozen_alike`).
"""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hybridtrain.construction import (
    construct_on_meta,
    construct_part,
    default_generators,
    drop_values,
    give_back_memory,
    rewind,
)
from hybridtrain.errors import BatchError, ConfigError, SplitError, UserError
from hybridtrain.graph import Layer
from hybridtrain.options import PipelineOptions
from hybridtrain.planning import Plan, PlannedLayers, Planner, needs_costs
from hybridtrain.world import World

log = logging.getLogger("hybridtrain")


class OwnStages(NamedTuple):
    """A model with the values of this process's stages; the others are meta tensors.

    Attributes:
        net: the model.
        plan: how it is divided.
        planned: its layers, by stage.
    """

    net: nn.Module
    plan: Plan
    planned: PlannedLayers


def construct_own_stages(
    build: Callable[[], nn.Module], world: World, options: PipelineOptions, example_inputs: Any
) -> OwnStages | None:
    """Returns `build()` with the values of this process's stages; a collective call.

    None if all stages are in this process, or the model cannot be made in parts: it must be built
    whole then, for which the default generators are as they were.

    Args:
        build: makes the model on the CPU, a new one at each call.
        world: the processes.
        options: how the model is divided.
        example_inputs: see `Planner`.

    Raises:
        SplitError, ConfigError: the model cannot be divided like this.
    """
    if world.processes_per_replica == 1:
        return None
    draws = default_generators()
    make_planner = partial(
        Planner, options=options, example_inputs=example_inputs, cluster=world.cluster
    )
    plan = world.broadcast(world.on_main(lambda: plan_without_values(build, options, make_planner)))
    assert plan is not None
    rewind(draws)
    own, problem = None, ""
    try:
        own = _own_part(build, plan, world, options, make_planner)
    except Exception as error:  # building it whole works, or shows the error
        problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    gc.collect()  # a traced model is in cycles
    give_back_memory()
    if problems := [problem for problem in world.gather(problem) if problem]:
        if world.is_main:
            log.info("each process builds the whole model at first: %s", problems[0])
        rewind(draws)
        return None
    return own


def plan_without_values(
    build: Callable[[], nn.Module],
    options: PipelineOptions,
    make_planner: Callable[[nn.Module], Planner],
) -> Plan:
    """Returns the plan for a model of which as little is built as the split allows.

    Args:
        build: see `construct_own_stages`.
        options: how the model is divided.
        make_planner: makes a planner for a model.

    Raises:
        SplitError, ConfigError: the model cannot be divided like this.
    """
    draws = default_generators()
    try:
        return make_planner(_without_values(build, options)).plan()
    except Exception as error:
        log.debug("no plan for a model without values: %r", error)
    rewind(draws)
    gc.collect()
    return make_planner(build()).plan()


def _without_values(build: Callable[[], nn.Module], options: PipelineOptions) -> nn.Module:
    """Returns `build()` on the meta device; where layers are measured, buffers have values."""
    outline = construct_on_meta(build)
    if not needs_costs(options):
        return outline
    parameters = dict(outline.named_parameters(remove_duplicate=False))
    return construct_part(build, lambda name: name not in parameters)


def _own_part(
    build: Callable[[], nn.Module],
    plan: Plan,
    world: World,
    options: PipelineOptions,
    make_planner: Callable[[nn.Module], Planner],
) -> OwnStages:
    outline = construct_on_meta(build)
    expected = make_planner(outline).layers_of(plan)
    cluster = world.cluster.placed(options.placement)
    owned = cluster.stages_of(world.pipeline_rank, options.stages_per_device)
    kept = {id(tensor) for tensor in _kept(outline, expected.stages, owned)}
    named = (outline.named_parameters, outline.named_buffers)
    names = {
        name
        for each in named
        for name, tensor in each(remove_duplicate=False)
        if id(tensor) in kept
    }
    net = construct_part(build, names.__contains__)
    planned = make_planner(net).layers_of(plan)
    if planned.units != expected.units:
        raise SplitError("its layers depend on values")
    return OwnStages(net, plan, planned)


def drop_other_stages(
    net: nn.Module, parts: Sequence[Sequence[Layer]], owned: Sequence[int]
) -> None:
    """Frees what the stages of other processes have: meta tensors take its place.

    Args:
        net: the model.
        parts: the layers of all its stages.
        owned: the stages of this process.
    """
    layers = [layer.module for part in parts for layer in part]
    drop_values([net, *layers], _kept(net, parts, owned))


def _kept(net: nn.Module, parts: Sequence[Sequence[Layer]], owned: Sequence[int]) -> list[Tensor]:
    """Returns the parameters and buffers of the stages `owned`, and those that no stage uses."""
    own: dict[int, Tensor] = {}
    others: set[int] = set()
    for index, part in enumerate(parts):
        modules = nn.ModuleList(layer.module for layer in part)
        for tensor in (*modules.parameters(), *modules.buffers()):
            # the first stage that has a parameter owns it; a buffer is in each that has it
            if index in owned and not (isinstance(tensor, nn.Parameter) and id(tensor) in others):
                own[id(tensor)] = tensor
            elif id(tensor) not in own:
                others.add(id(tensor))
    unused = [t for t in (*net.parameters(), *net.buffers()) if id(t) not in others]
    return [*own.values(), *unused]


_LOOKED_AT = 64  # numbers of each tensor

# A process whose parameters have not changed is in the step already, and never comes.
_AGREEMENT_S = 30.0

# Whole numbers of as many bytes.
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BatchCheck:
    """Compares the batches of the processes of a pipeline, which all call it together.

    Shapes and some numbers of each tensor are compared, while the step runs. Of tensors on a GPU
    only the shapes are, since the host would wait for them.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._found: Tensor | None = None
        self._work: Any = None
        self._is_first = True

    def begin(self, inputs: Any, targets: Any) -> None:
        """Begins to compare a batch; waits for the result of the first, before it is run.

        Raises:
            BatchError: as of `finish`.
        """
        if self._world.pipeline_group is None:
            return
        digest = _digest((inputs, targets))
        self._found = torch.tensor([digest, -digest])
        group = self._world.pipeline_group
        self._work = dist.all_reduce(self._found, dist.ReduceOp.MAX, group=group, async_op=True)
        if self._is_first:
            self.finish()
            self._is_first = False

    def finish(self) -> None:
        """Waits for the result of `begin`.

        Raises:
            BatchError: the processes were given different batches.
        """
        if self._found is None:
            return
        self._work.wait()
        largest, minus_smallest = self._found.tolist()
        self._found = None
        if largest != -minus_smallest:
            world = self._world
            places = range(world.processes_per_replica)
            ranks = [str(world.rank_of(world.replica, place)) for place in places]
            raise BatchError(
                f"ranks {', '.join(ranks)} are one pipeline, and were given different batches: "
                f"with engine=distributed samples are divided over the replicas (world.replica of "
                f"world.replicas; in smp, dp_rank() of dp_size()), not over the processes, and "
                f"each process needs the same order"
            )


def _digest(batch: Any) -> int:
    """Returns a number of 62 bits."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(batch):
        if not isinstance(leaf, Tensor):
            digest.update(type(leaf).__name__.encode())
            continue
        digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
        if leaf.device.type == "cpu" and leaf.numel() and leaf.layout == torch.strided:
            plain = leaf.detach().reshape(-1)[:: max(1, leaf.numel() // _LOOKED_AT)]
            plain = plain.resolve_conj().resolve_neg().contiguous()
            digest.update(plain.view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "little") >> 2


def check_replicas(net: nn.Module, world: World) -> None:
    """Compares a checksum of each parameter over the replicas; all processes call it together.

    Reads the weights once, and waits for the devices.

    Raises:
        UserError: a parameter differs; names the first one, and the ranks.
    """
    if world.replicas == 1:
        return
    mine = {name: int(checksum(p)) for name, p in net.named_parameters() if not p.is_meta}
    everyones = world.gather((world.replica, mine))
    first: dict[str, int] = {}
    for replica, sums in everyones:
        if replica == 0:
            first |= sums
    for name, expected in first.items():
        ranks = [
            rank for rank, (_, sums) in enumerate(everyones) if sums.get(name, expected) != expected
        ]
        if ranks:
            raise UserError(
                f"the replicas are apart: {name} of rank{'s' * (len(ranks) > 1)} "
                f"{', '.join(map(str, ranks))} differs from replica 0's. Each rank must take the "
                f"same optimizer steps, and change no weight by itself"
            )


def check_frozen_alike(names: Sequence[str], world: World) -> None:
    """Makes sure that all processes have frozen or freed the same parameters before this step.

    Raises:
        ConfigError: they have not.
    """
    if world.size == 1:
        return
    text = f"requires_grad of {', '.join(names)} has changed"
    if not world.all_arrive(min(_AGREEMENT_S, world.timeout_s / 2)):
        raise ConfigError(
            f"{text} on rank {world.rank}, but not on all ranks: change it on all of them before "
            f"the same step"
        )
    texts = world.gather(text)
    for rank, other in enumerate(texts):
        if other != texts[0]:
            raise ConfigError(
                f"on rank 0 {texts[0]}, on rank {rank} {other}: freeze the same on all of them"
            )


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Returns the sum of the bits of each number in `tensor`, a 0-dim int64 tensor, which wraps."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return values.contiguous().view(_WORDS[values.element_size()]).sum(dtype=torch.int64)
