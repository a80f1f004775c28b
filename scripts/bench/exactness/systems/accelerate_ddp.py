"""Accelerate with DDP, as its guide on gradient accumulation writes a loop."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
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

_GUIDE = "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"
_COUNT = (
    f"loss sums divided by the count of the step from `accelerator.gather`, and multiplied by the "
    f"number of processes ([guide]({_GUIDE}), *training samples of variable size*)"
)


def train(case: Case, remedied: bool) -> Trained:
    """Trains the whole model in each process."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    per_step = case.microbatches_per_replica * case.accumulate
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=per_step,
        dataloader_config=DataLoaderConfiguration(even_batches=not remedied),
    )
    layers = case.model()
    net = whole_model(case, layers)
    set_seed(1, device_specific=remedied)
    parameters = [p for p in net.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(
        net, torch.optim.SGD(parameters, LEARNING_RATE, MOMENTUM)
    )
    model.train()
    if remedied and (case.padded or case.class_weights):
        _train_by_count(accelerator, model, optimizer, case, per_step)
        return Trained(values(layers), accelerator.process_index)
    loss_fn = case.loss()
    batches: Any = microbatches_of(case, accelerator.process_index)
    joined: Any = contextlib.nullcontext()
    if case.short:
        batches = accelerator.prepare(DataLoader(case.dataset(), SAMPLES_PER_MICROBATCH))
        if remedied:
            joined = accelerator.join_uneven_inputs([model])
    with joined:
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model(inputs), targets))
                if accelerator.sync_gradients and case.clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
                optimizer.zero_grad()
    return Trained(values(layers), accelerator.process_index)


def _train_by_count(
    accelerator: Any, model: Any, optimizer: Any, case: Case, per_step: int
) -> None:
    loss_sum = case.loss_sum()
    batches = microbatches_of(case, accelerator.process_index)
    for start in range(0, len(batches), per_step):
        samples = batches[start : start + per_step]
        counts: Tensor = torch.stack([case.count(targets) for _, targets in samples]).sum()
        total = accelerator.gather(counts).sum()
        for number, (inputs, targets) in enumerate(samples):
            is_last = number + 1 == len(samples)
            no_sync = getattr(model, "no_sync", contextlib.nullcontext)
            with contextlib.nullcontext() if is_last else no_sync():
                loss = loss_sum(model(inputs), targets)
                loss = loss * accelerator.num_processes * per_step / total
                accelerator.backward(loss)  # divides by per_step
        optimizer.step()
        optimizer.zero_grad()


SYSTEM = System(
    "Accelerate with DDP",
    "accelerate",
    "accelerate",
    processes=lambda case: case.replicas,
    train=train,
    description="`accelerator.accumulate`, `accelerator.clip_grad_norm_`, `set_seed`; whole "
    "models, without stages.",
    remedies={
        "padded": _COUNT,
        "class-weights": _COUNT,
        "short-batch": "`even_batches=False` and `accelerator.join_uneven_inputs`",
        "dropout": "`set_seed(..., device_specific=True)`",
    },
    not_applicable=dict.fromkeys(
        ("three-stages", "three-stages-dropout"), "it has no pipeline stages"
    ),
)
