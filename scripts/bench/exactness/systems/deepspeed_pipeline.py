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
        dynamic_shape=remedied,
    )
    _copy_tied(net, layers)
    per_step = case.microbatches_per_replica * case.accumulate
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES_PER_MICROBATCH,
        "gradient_accumulation_steps": per_step,
        "gradient_clipping": case.clip or 0.0,  # the default is 1
        "steps_per_print": 10**9,
    }
    parameters = list(net.parameters())
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
    _copy_tied(net, layers, to_layers=True)
    start, stop = net._local_start, net._local_stop
    return Trained(values(layers[start:stop], start), replica)


def _head(embedding: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.linear(x, embedding.weight)


def _specs(layers: list[nn.Module]) -> list[Any]:
    """Returns the layers; a weight that two of them share is named as the tutorial does."""
    from deepspeed.pipe import TiedLayerSpec

    specs: list[Any] = list(layers)
    first, last = layers[0], layers[-2]
    if isinstance(first, nn.Embedding) and first.weight is getattr(last, "weight", None):
        shape = first.weight.shape
        specs[0] = TiedLayerSpec("embedding", nn.Embedding, *shape, dtype=first.weight.dtype)
        specs[-2] = TiedLayerSpec(
            "embedding", nn.Embedding, *shape, dtype=first.weight.dtype, forward_fn=_head
        )
    return specs


def _copy_tied(net: Any, layers: list[nn.Module], to_layers: bool = False) -> None:
    """Copies the weights of the tied modules that DeepSpeed has made, from `layers` or to them."""
    for module in net.tied_modules.values():
        target, source = module.weight, layers[0].weight
        if to_layers:
            target, source = source, target
        with torch.no_grad():
            target.copy_(source)


SYSTEM = System(
    "DeepSpeed pipeline",
    "deepspeed",
    "deepspeed.pipe",
    processes=lambda case: case.stages * case.replicas,
    train=train,
    description="`PipelineModule` and `engine.train_batch`, a `TiedLayerSpec` for tied embeddings, "
    "tuples for the skip connection, "
    "`activation_checkpoint_interval`, and `gradient_clipping`, set to 0 in the cases without "
    "clipping because its default is 1.0. Both this system and the unsplit model compute in "
    "float32, because DeepSpeed refuses to reduce float64 gradients.",
    remedies={"short-batch": "`PipelineModule(..., dynamic_shape=True)`"},
    dtype=torch.float32,
)
