"""What a training loop adds to each step of a tiny MLP, over a raw PyTorch loop.

All train the same network from the same weights on the same batches in the same order (a
`DataLoader` with the same batch sampler over samples in memory), report the loss every 10 steps
into a list, and must end with the same weights. The clock is in the network: its first layer notes
when it is called, so that everything is timed alike and from within, without set-up and tear-down.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hybridtrain.data.loader import LoaderOptions, TrainLoader, permutation
from hybridtrain.data.splits import InMemoryDataset, already_batched
from hybridtrain.loop import Run as TrackedRun
from hybridtrain.loop import Tracker, Trainer
from hybridtrain.model import HybridModel
from hybridtrain.world import World
from scripts.bench.common import interleave, optional, print_footer, print_table, shown

ROWS, WIDTH, CLASSES, EVERY, SKIP = 32, 64, 10, 10, 100


class Clock(nn.Module):
    """Passes its input on and notes the time."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """The input."""
        self.times.append(time.perf_counter())
        return x


def network() -> nn.Sequential:
    """Three linear layers, the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        Clock(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, CLASSES),
    )


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """The same for all."""
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


@dataclass
class Batches:
    """The batches that this project's loader takes in its first epoch; a torch batch sampler."""

    samples: int
    batch_size: int = ROWS
    drop_last: bool = False

    def __post_init__(self) -> None:
        self.sampler = range(self.samples)

    def __len__(self) -> int:
        return self.samples // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = permutation(self.samples, 0, 0)
        for start in range(0, self.samples, self.batch_size):
            yield order[start : start + self.batch_size].tolist()


@dataclass
class Run:
    """The data of a run, and the network that it trains."""

    data: InMemoryDataset
    steps: int
    net: nn.Sequential

    def loader(self, collate: Callable[[Any], Any] = already_batched) -> DataLoader[Any]:
        """What the peers read."""
        sampler: Any = Batches(self.steps * ROWS)
        return DataLoader(self.data, batch_sampler=sampler, collate_fn=collate)


def train(
    net: Any,
    optimizer: Any,
    loader: Any,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> None:
    """The loop to compare with."""
    log = []
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(net(x), y)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            log.append(loss.item())


def raw(run: Run) -> None:
    """PyTorch alone."""
    train(run.net, optimizer_of(run.net), run.loader())


class InMemory(Tracker):
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Mapping[str, float]] = []

    def on_log(self, run: TrackedRun, values: Mapping[str, float]) -> None:
        """Keeps the values."""
        self.told.append(values)


def hybrid(run: Run) -> None:
    """This project."""
    world = World.from_env(devices="cpu")
    options = LoaderOptions(collate=already_batched)
    Trainer(
        HybridModel(run.net, world),
        optimizer_of(run.net),
        F.cross_entropy,
        TrainLoader(run.data, ROWS, world, options=options),
        steps=run.steps,
        log_every=EVERY,
        callbacks=[InMemory()],
    ).fit()


def fabric(run: Run) -> None:
    """Lightning Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    net, optimizer = fabric.setup(run.net, optimizer_of(run.net))
    loader = fabric.setup_dataloaders(run.loader(), use_distributed_sampler=False)
    train(net, optimizer, loader, fabric.backward)


def accelerate(run: Run) -> None:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(run.net, optimizer_of(run.net), run.loader())
    train(*prepared, accelerator.backward)


def lightning_trainer(run: Run) -> None:
    """The Lightning Trainer."""
    import lightning
    from lightning.pytorch.loggers.logger import DummyLogger

    told: list[Mapping[str, float]] = []

    class InList(DummyLogger):
        def log_metrics(self, metrics: Mapping[str, float], *args: Any, **kwargs: Any) -> None:
            told.append(metrics)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = run.net

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("train/loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.net)

    lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=InList(),
        log_every_n_steps=EVERY,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    ).fit(Module(), run.loader())


def hugging_face_trainer(run: Run) -> None:
    """The Hugging Face Trainer."""
    import transformers

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = run.net

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.net(x), labels)}

    def collate(batch: Any) -> dict[str, Tensor]:
        x, y = already_batched(batch)
        return {"x": x, "labels": y}

    class WithLoader(transformers.Trainer):
        def get_train_dataloader(self) -> DataLoader[Any]:
            return self.accelerator.prepare(run.loader(collate))

    optimizer = optimizer_of(run.net)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=run.steps,
            per_device_train_batch_size=ROWS,
            logging_steps=EVERY,
            max_grad_norm=0.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = WithLoader(
            WithLoss(), arguments, train_dataset=run.data, optimizers=(optimizer, constant)
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


PEERS: dict[str, tuple[str, Callable[[Run], None]]] = {
    "Fabric": ("lightning", fabric),
    "Accelerate": ("accelerate", accelerate),
    "Lightning Trainer": ("lightning", lightning_trainer),
    "HF Trainer": ("transformers", hugging_face_trainer),
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    rows = options.steps * ROWS
    data = InMemoryDataset(
        torch.randn(rows, WIDTH, generator=generator),
        torch.randint(CLASSES, (rows,), generator=generator),
    )
    final: dict[str, Tensor] = {}

    def job(name: str, loop: Callable[[Run], None]) -> Callable[[], float]:
        def measured() -> float:
            run = Run(data, options.steps, network())
            loop(run)
            times = run.net[0].times
            assert len(times) == options.steps, f"{name}: {len(times)} steps"
            final[name] = torch.cat([p.detach().flatten() for p in run.net.parameters()])
            return 1e6 * (times[-1] - times[SKIP]) / (len(times) - 1 - SKIP)

        return measured

    jobs = {"raw PyTorch": job("raw PyTorch", raw), "hybridtrain": job("hybridtrain", hybrid)}
    jobs |= {
        name: job(name, loop) if optional(needs) else None for name, (needs, loop) in PEERS.items()
    }
    for name in ("lightning.pytorch", "lightning.fabric", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)  # after the imports, which set it too
    results = interleave(jobs, options.repeats)
    for name, weights in final.items():
        torch.testing.assert_close(
            weights, final["raw PyTorch"], msg=lambda m, name=name: f"{name}: {m}"
        )
    base = results["raw PyTorch"]
    table = []
    for name, values in results.items():
        added = [value - raw for value, raw in zip(values, base, strict=False)]
        best = min(values, default=0.0) - min(base)
        cells = [f"{statistics.median(added):+.0f}", f"{best:+.0f}"] if added else ["", ""]
        table.append([name, shown(values, "{:.0f}", min), *cells])
    print_table(["", "us per step", "added", "added, best to best"], table)
    print_footer(
        f"MLP of three layers of {WIDTH}, {ROWS} samples, SGD, {options.steps} steps; median of "
        f"{options.repeats} runs, in brackets the best; `added` is the median of the differences "
        f"to the raw loop's run of the same round."
    )


if __name__ == "__main__":
    main()
