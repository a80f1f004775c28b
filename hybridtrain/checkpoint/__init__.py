"""Checkpoints: the state that a resume needs, in directories that are complete or absent."""

from hybridtrain.checkpoint.init_from import InitReport, check_exists, init_from, parse_init_from
from hybridtrain.checkpoint.manifest import MANIFEST, verify
from hybridtrain.checkpoint.pytree_json import broadcast_tree
from hybridtrain.checkpoint.saving import check_directory, finishing_saves, save_checkpoint
from hybridtrain.checkpoint.state import (
    check_fits,
    check_progress,
    evaluated_average,
    read_tree,
    read_weights,
    restore_checkpoint,
    with_average,
)
from hybridtrain.checkpoint.store import CheckpointStore, step_of
from hybridtrain.checkpoint.tensor_files import write_weights

__all__ = [
    "MANIFEST",
    "CheckpointStore",
    "InitReport",
    "broadcast_tree",
    "check_directory",
    "check_exists",
    "check_fits",
    "check_progress",
    "evaluated_average",
    "finishing_saves",
    "init_from",
    "parse_init_from",
    "read_tree",
    "read_weights",
    "restore_checkpoint",
    "save_checkpoint",
    "step_of",
    "verify",
    "with_average",
    "write_weights",
]
