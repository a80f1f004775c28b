"""The training loop and its parts.

trainer        `Trainer`: the loop
session        `Session`: the same step for loops written by hand
evaluation     metrics over every sample once
callbacks/     the hooks of a run, and the callbacks, one file each
checkpoints    the last checkpoint, and the one of the best evaluation
interruption   signals, time limits, saves by the clock
run_stats      where the time of the steps goes;  throughput  the rates
advice         what would make a step shorter, with its price
checks         what is refused before or in the first step
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
