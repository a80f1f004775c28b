"""DeepSpeed's pipeline, as its tutorial on pipeline parallelism writes a script."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from scripts.bench.exactness.cases import (
    LEARNING_RATE,
    MOMENTUM,
    SAMPLES_PER_MICROBATCH,
    Case,
)
from scripts.bench.exactness.plain import values
from scripts.bench.exactness.systems.data_parallel import microbatches_of
from scripts.bench.exactness.systems.system import System, Trained


def train(case: Case, remedied: bool) -> Trained:
    """Trains this process's stage."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo", verbose=False)
    layers = case.model()
    net = PipelineModule(
        layers=_specs(layers),
        num_stages=case.stages,
        loss_fn=case.loss(),
        partition_method="uniform",
        activation_checkpoint_interval=1 if case.recompute else 0,
    )
    per_step = case.microbatches_per_replica * case.accumulate
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES_PER_MICROBATCH,
        "gradient_accumulation_steps": per_step,
        "steps_per_print": 10**9,
    }
    if case.clip is not None:
        config["gradient_clipping"] = case.clip
    parameters = [p for p in net.parameters() if p.requires_grad]
    torch.manual_seed(1)
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.SGD(parameters, LEARNING_RATE, MOMENTUM),
        model_parameters=parameters,
        config=config,
        training_data=case.dataset() if case.short else None,
    )
    replica = engine.grid.get_data_parallel_rank()
    batches = iter(microbatches_of(case, replica))
    for _ in case.steps():
        if case.short:
            engine.train_batch()  # reads the data set itself
        else:
            engine.train_batch(data_iter=itertools.islice(batches, per_step))
    return Trained(_state(net, layers), replica)


def _head(embedding: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.linear(x, embedding.weight)


def _specs(layers: list[nn.Module]) -> list[Any]:
    """Returns the layers; a weight that two of them share is named as the tutorial does."""
    from deepspeed.pipe import TiedLayerSpec

    first, last = layers[0], layers[-2]
    if not isinstance(first, nn.Embedding) or first.weight is not getattr(last, "weight", None):
        return list(layers)

    def embedding() -> nn.Module:
        return first

    specs: list[Any] = list(layers)
    specs[0] = TiedLayerSpec("embedding", embedding)
    specs[-2] = TiedLayerSpec("embedding", embedding, forward_fn=_head)
    return specs


def _state(net: Any, layers: list[nn.Module]) -> dict[str, Tensor]:
    start, stop = net._local_start, net._local_stop
    return values(layers[start:stop], start)


SYSTEM = System(
    "DeepSpeed pipeline",
    "deepspeed",
    processes=lambda case: case.stages * case.replicas,
    train=train,
    description="`PipelineModule` and `engine.train_batch`, a `TiedLayerSpec` for tied embeddings, "
    "`gradient_clipping` and `activation_checkpoint_interval`.",
)
