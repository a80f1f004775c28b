"""Lightning Fabric with DDP, as its guides on gradient accumulation and clipping write a loop."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from scripts.bench.exactness.cases import (
    LEARNING_RATE,
    MOMENTUM,
    SAMPLES_PER_MICROBATCH,
    Case,
)
from scripts.bench.exactness.plain import values
from scripts.bench.exactness.systems.data_parallel import microbatches_of, whole_model
from scripts.bench.exactness.systems.system import System, Trained


def train(case: Case, remedied: bool) -> Trained:
    """Trains the whole model in each process."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=case.replicas, strategy="ddp")
    fabric.launch()
    layers = case.model()
    net = whole_model(case, layers)
    fabric.seed_everything(1, verbose=False)
    parameters = [p for p in net.parameters() if p.requires_grad]
    model, optimizer = fabric.setup(net, torch.optim.SGD(parameters, LEARNING_RATE, MOMENTUM))
    loss_fn = case.loss()
    per_step = case.microbatches_per_replica * case.accumulate
    if case.short:
        batches = fabric.setup_dataloaders(DataLoader(case.dataset(), SAMPLES_PER_MICROBATCH))
    else:
        batches = microbatches_of(case, fabric.global_rank)
    last = len(batches) - 1
    model.train()
    for number, (inputs, targets) in enumerate(batches):
        is_accumulating = (number + 1) % per_step != 0 and number != last
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = loss_fn(model(inputs), targets)
            fabric.backward(loss / per_step)
        if not is_accumulating:
            if case.clip is not None:
                fabric.clip_gradients(model, optimizer, max_norm=case.clip)
            optimizer.step()
            optimizer.zero_grad()
    return Trained(values(layers), fabric.global_rank)


SYSTEM = System(
    "Fabric with DDP",
    "lightning",
    "lightning.fabric",
    processes=lambda case: case.replicas,
    train=train,
    description="`fabric.no_backward_sync`, the loss divided by the number of micro-batches, "
    "`fabric.clip_gradients`, `fabric.seed_everything`; whole models, without stages.",
    not_applicable=dict.fromkeys(
        ("three-stages", "three-stages-dropout"), "it has no pipeline stages"
    ),
)
