"""torch.distributed.pipelining, with DistributedDataParallel over the replicas of a stage.

Stages are made by hand, the first of the two ways that its documentation gives. A model with tied
weights or a skip connection goes through `pipeline()`, the second way, which takes it unchanged.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from scripts.bench.exactness.cases import LEARNING_RATE, MOMENTUM, Case, Keep, WithSkip, share
from scripts.bench.exactness.plain import values
from scripts.bench.exactness.systems.data_parallel import Recomputed
from scripts.bench.exactness.systems.system import System, Trained

_SUM = (
    "`scale_grads=False`, documented for sums, and the sum divided by the count of the whole step, "
    "from an all-reduce"
)


def train(case: Case, remedied: bool) -> Trained:
    """Trains this process's stage."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (case.replicas, case.stages), mesh_dim_names=("dp", "pp"))
    replica, place = mesh.get_coordinate()
    pp, dp = mesh.get_group("pp"), mesh.get_group("dp")
    layers = case.model()
    chunks = case.microbatches_per_replica
    device = torch.device("cpu")
    is_traced = any(isinstance(layer, Keep) for layer in layers) or (
        len({id(p) for layer in layers for p in layer.parameters()})
        < sum(len(list(layer.parameters())) for layer in layers)
    )
    starts = [-(-len(layers) * number // case.stages) for number in range(case.stages + 1)]
    if is_traced:
        stages = _traced_stages(case, layers)
    else:
        stages = [nn.Sequential(*layers[a:b]) for a, b in itertools.pairwise(starts)]
    module = stages[place]
    shapes = _shapes(case, stages, place)
    own = layers[starts[place] : starts[place + 1]]
    if case.recompute:
        module = Recomputed(module)
    parameters = [p for p in module.parameters() if p.requires_grad]
    submodule: nn.Module = module
    if case.replicas > 1 and parameters:
        # a traced stage also has the copy of a tied weight that it does not use
        submodule = DistributedDataParallel(
            module, process_group=dp, find_unused_parameters=remedied and is_traced
        )
    stage = PipelineStage(submodule, place, case.stages, device, group=pp, **shapes)
    total = torch.ones(())  # of the step, for the remedy

    def mean(output: Tensor, targets: Tensor) -> Tensor:
        return case.loss()(output, targets) / case.accumulate

    def sum_over_count(output: Tensor, targets: Tensor) -> Tensor:
        # DDP takes the mean over the replicas
        return case.loss_sum()(output, targets) / total * case.replicas

    by_count = remedied and case.clip is None
    schedule = Schedule1F1B(
        stage, chunks, loss_fn=sum_over_count if by_count else mean, scale_grads=not by_count
    )
    optimizer = torch.optim.SGD(parameters, LEARNING_RATE, MOMENTUM) if parameters else None
    torch.manual_seed(1)
    for batches in _steps(case, replica):
        if optimizer is not None:
            optimizer.zero_grad()
        if by_count:
            total = torch.stack([case.count(targets) for _, targets in batches]).sum()
            dist.all_reduce(total, group=dp)
        for inputs, targets in batches:
            if place == 0:
                schedule.step(inputs)
            elif place == case.stages - 1:
                schedule.step(target=targets, losses=[])
            else:
                schedule.step()
        if case.clip is not None:
            _clip(parameters, case.clip, pp if remedied else None)
        if optimizer is not None:
            optimizer.step()
    dist.barrier()
    state = _state(module) if is_traced else values(own, starts[place])
    result = Trained(state, replica)
    dist.destroy_process_group()
    return result


def _steps(case: Case, replica: int) -> Any:
    if not case.short:
        return [[share(batch, replica, case.replicas) for batch in step] for step in case.steps()]
    dataset = case.dataset()
    sampler = DistributedSampler(dataset, case.replicas, replica, shuffle=False)
    size = case.batch_size // case.replicas
    return [[tuple(batch)] for batch in DataLoader(dataset, size, sampler=sampler)]


def _shapes(case: Case, stages: list[nn.Module], place: int) -> dict[str, Any]:
    """Returns the arguments that tell a stage the shapes of its input and output.

    Without them the first step runs a backward to find them, after which DDP fails.
    """
    batch = share(next(iter(case.steps()))[0], 0, case.replicas)
    value: Any = share(batch, 0, case.microbatches_per_replica)[0]
    shapes, trains = {}, False
    for number, stage in enumerate(stages[: place + 1]):
        if number == place:
            shapes["input_args"] = _that_train(value, trains)
        trains = trains or any(p.requires_grad for p in stage.parameters())
        training = stage.training
        stage.train(False)  # keeps the running statistics
        with torch.no_grad():
            value = stage(*value) if isinstance(value, tuple) else stage(value)
        stage.train(training)
    shapes["output_args"] = _that_train(value, trains)
    return shapes


def _that_train(value: Any, trains: bool) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return tuple(v.detach().clone().requires_grad_(trains) for v in values)


def _traced_stages(case: Case, layers: list[nn.Module]) -> list[nn.Module]:
    """Returns the stages of `pipeline()`; their weights have the names of the model."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    whole = any(isinstance(layer, Keep) for layer in layers)
    net = WithSkip(layers) if whole else nn.Sequential(*layers)
    prefix, suffix = ("layers.", ".module") if whole else ("", "")
    cut = f"{prefix}{-(-len(layers) // case.stages)}{suffix}"
    batch = share(next(iter(case.steps()))[0], 0, case.replicas)
    inputs, _ = share(batch, 0, case.microbatches_per_replica)
    pipe = pipeline(net, mb_args=(inputs,), split_spec={cut: SplitPoint.BEGINNING})
    return [pipe.get_stage_module(place) for place in range(case.stages)]


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("layers."): value.detach().clone()
        for name, value in module.state_dict().items()
    }


def _clip(parameters: list[nn.Parameter], max_norm: float, group: Any) -> None:
    """Clips by the norm of this stage, or with a group by that of all stages."""
    if group is None:
        nn.utils.clip_grad_norm_(parameters, max_norm)
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients) ** 2
    dist.all_reduce(norm, group=group)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm**0.5)


SYSTEM = System(
    "torch.distributed.pipelining with DDP",
    "torch",
    "torch.distributed.pipelining",
    processes=lambda case: case.stages * case.replicas,
    train=train,
    description="`Schedule1F1B` over manually created `PipelineStage`s, each in "
    "`DistributedDataParallel`; `pipeline()`, which traces a model unchanged, for tied "
    "embeddings and the skip connection.",
    remedies={
        "tied": "`find_unused_parameters=True`, as the error suggests",
        "padded": _SUM,
        "class-weights": _SUM,
        "accumulation": _SUM,
        "clipping": "a norm over all stages, all-reduced as "
        "[torchtitan](https://github.com/pytorch/torchtitan/tree/main/torchtitan/distributed) does",
    },
)
