"""The parts of the training loop, which `hybridtrain.trainer` puts together.

checkpoints        the last one, and the one of the best evaluation
interruption       signals, time limits, saves by the clock
run_stats          where the time goes, times and memory of the stages
advice             what would make a step shorter, with its price
checks             what is refused before or in the first step
"""

from hybridtrain.training.checkpoints import BestCheckpoint, RunCheckpoints
from hybridtrain.training.checks import (
    batch_norms_watched,
    check_arguments,
    check_eval_loader,
    check_hooks,
    check_last_batch,
    check_state_names,
)
from hybridtrain.training.interruption import Interruptions
from hybridtrain.training.run_stats import RunStats

__all__ = [
    "BestCheckpoint",
    "Interruptions",
    "RunCheckpoints",
    "RunStats",
    "batch_norms_watched",
    "check_arguments",
    "check_eval_loader",
    "check_hooks",
    "check_last_batch",
    "check_state_names",
]
