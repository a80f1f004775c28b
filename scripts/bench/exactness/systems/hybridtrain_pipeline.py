"""hybridtrain, with either engine: docs/custom-steps.md."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import torch
from torch import nn

from hybridtrain import HybridModel, Loader, OptimizerStep, World
from hybridtrain.data import next_step
from scripts.bench.exactness.cases import LEARNING_RATE, MOMENTUM, Case, Keep, WithSkip
from scripts.bench.exactness.plain import values
from scripts.bench.exactness.systems.system import System, Trained


def train(engine: str, case: Case, remedied: bool) -> Trained:
    """Trains with an `OptimizerStep` and the library's loader."""
    with World.from_env(
        nb_part=case.stages, devices="cpu", engine=engine, replicas=case.logical_replicas
    ) as world:
        layers = case.model()
        whole = any(isinstance(layer, Keep) for layer in layers)
        model = HybridModel(
            WithSkip(layers) if whole else nn.Sequential(*layers),
            world,
            chunks=case.microbatches,
            recompute="always" if case.recompute else "never",
            example_inputs=case.dataset()[0][0][None] if whole else None,
        )
        optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)
        step = OptimizerStep(model, optimizer, clip_norm=case.clip)
        loader = Loader(case.dataset(), case.batch_size, world, shuffle=False)
        loss = case.loss()
        model.train()
        with closing(loader.batches()) as batches:
            while group := next_step(batches, case.accumulate):
                step.run(group, loss)
        state = {name: value for name, value in values(layers).items() if not value.is_meta}
        return Trained(state, world.data_parallel_rank)


LOCAL = System(
    "hybridtrain, `engine=local`",
    "hybridtrain",
    "hybridtrain",
    processes=lambda case: case.replicas,
    train=partial(train, "local"),
    description="`OptimizerStep` and `Loader`, with the model as one module, and "
    "`World.from_env(replicas=...)`.",
)
DISTRIBUTED = System(
    "hybridtrain, `engine=distributed`",
    "hybridtrain",
    "hybridtrain",
    processes=lambda case: case.stages * case.replicas,
    train=partial(train, "distributed"),
    description="The same script with one process per stage.",
)
