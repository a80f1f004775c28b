"""The training loop and its parts.

trainer        `Trainer`: the loop
session        `Session`: the same step for hand-written loops
evaluation     loss and metrics, each sample counted once
generation     texts of a language model, for metrics and samples
callbacks/     the hooks of a run, and one file per callback
checkpoints    the latest checkpoint, and the one with the best evaluation
interruption   signals, time limits, periodic saves
run_stats      step time breakdown;  throughput  samples and tokens per second
advice         suggestions that would make a step shorter
checks         argument checks before and during the first step
"""

from hybridtrain.loop.callbacks import CALLBACKS
from hybridtrain.loop.callbacks.base import Callback, CallbackStates
from hybridtrain.loop.callbacks.mfu import Mfu
from hybridtrain.loop.callbacks.tracker import Run, Tracker, call_hook, parts_of_account
from hybridtrain.loop.checkpoints import BestCheckpoint, RunCheckpoints
from hybridtrain.loop.checks import (
    batch_norms_watched,
    check_arguments,
    check_eval_loader,
    check_hooks,
    check_last_batch,
    check_state_names,
)
from hybridtrain.loop.evaluation import evaluate, predict
from hybridtrain.loop.interruption import Interruptions
from hybridtrain.loop.run_stats import RunStats
from hybridtrain.loop.session import Session
from hybridtrain.loop.throughput import Throughput
from hybridtrain.loop.trainer import Trainer, TrainerOptions

__all__ = [
    "CALLBACKS",
    "BestCheckpoint",
    "Callback",
    "CallbackStates",
    "Interruptions",
    "Mfu",
    "Run",
    "RunCheckpoints",
    "RunStats",
    "Session",
    "Throughput",
    "Tracker",
    "Trainer",
    "TrainerOptions",
    "batch_norms_watched",
    "call_hook",
    "check_arguments",
    "check_eval_loader",
    "check_hooks",
    "check_last_batch",
    "check_state_names",
    "evaluate",
    "parts_of_account",
    "predict",
]
