"""The runs that the tests of this folder start."""

from __future__ import annotations

import json
import sys

from cluster.slurm import Slurm

HYBRIDTRAIN = [sys.executable, "-m", "hybridtrain"]

# without dropout, whose masks would differ with the number of replicas
NET = """
import os, signal, torch
from torch import nn

class Dies(nn.Module):
    steps = 0
    def forward(self, x):
        Dies.steps += self.training
        if Dies.steps == 20 and os.environ.get("DIES", "") == os.environ.get("SLURM_PROCID"):
            os.kill(os.getpid(), signal.SIGKILL)
        return x

def build():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), Dies(), nn.Linear(48, 32), nn.ReLU(),
        nn.Linear(32, 10), nn.LogSoftmax(1),
    )
"""
GPUS = """
import os
from hybridtrain._base.devices import choose_devices
from hybridtrain.launch.environment import detect
seen = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
launch = detect(os.environ)
own = choose_devices(1, "cuda", launch, len(seen))
print(os.environ["SLURMD_NODENAME"], seen[own[0].index])
"""
SMALL = [
    "recipe=digits",
    "allow_targets=[net]",
    "model._target_=net.build",
    "world.devices=cpu",
    "data.batch_size=36",
    "pipeline.chunks=3",
    "lr_schedule.warmup_steps=0",
    "trainer.epochs=null",
    "trainer.steps=10",
    "trainer.log_every=1",
    "trainer.eval_every=null",
    "monitor.tensorboard=false",
    "monitor.progress=false",
]
ENDLESS = ["trainer.steps=1000000", "trainer.log_every=5", "checkpoint.every_steps=null"]
DISTRIBUTED = "world.engine=distributed"


def command(name: str, *overrides: str) -> list[str]:
    """Returns the command of a small run."""
    return [*HYBRIDTRAIN, *SMALL, f"run_name={name}", *overrides]


def losses(slurm: Slurm, name: str) -> list[float]:
    """Returns the losses that a run has logged, in the order of its steps."""
    path = slurm.work / "outputs" / name / "metrics.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["train/loss"] for line in found if "train/loss" in line]


def gpus_of_tasks(slurm: Slurm, *binding: str) -> list[str]:
    """Returns node and GPU of each of two tasks on n1 and n2, with options of srun for the GPUs."""
    (slurm.work / "gpus.py").write_text(GPUS)
    tasks = ["-N2", "-w", "n1,n2", "--ntasks-per-node=2", *binding]
    said = slurm.run("srun", *tasks, sys.executable, "gpus.py")
    return sorted(line for line in said.splitlines() if not line.startswith("srun:"))
