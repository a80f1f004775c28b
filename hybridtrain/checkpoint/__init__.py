"""Checkpoints: the state needed to resume a run, in directories that are complete or absent.

The arrows show how data flows in a save:

model, optimizer -> state_table -> state -> saving -> store -> step_00000100/
                                            joint_save

run                saves a run, finds its newest checkpoint, restores it
state_table        which process has which tensor and which one writes it; optimizer state by name
state              the files of a checkpoint, and how to restore them
saving             a save by all processes: rank 0 alone, gathered by rank 0, or joint
joint_save         each process writes its files into one directory
store              publishes, prunes, writes in the background
host_copies        copies in host memory, written while training continues
read               reading by all processes, or by rank 0 on behalf of all
shared_files       which files the processes on several hosts share
broadcast          a tree of values from rank 0
manifest           sizes and checksums of all files
directory          checkpoint names, the renames of a save, the mark of the best checkpoint
tensor_files       safetensors
json_tree          JSON for everything else
weights            the model's tensors in a checkpoint: reading, checking, loading
weight_sources     files and folders of weights, from this library and others
base               the frozen weights that an adapter's checkpoint omits
init_from          initial weights from another source
"""

from hybridtrain.checkpoint.base import Source, checkpoint_weights, is_moved, source_of_base
from hybridtrain.checkpoint.broadcast import broadcast_tree
from hybridtrain.checkpoint.init_from import (
    InitReport,
    check_weights,
    init_from,
    parse_init_from,
    under_all_names,
)
from hybridtrain.checkpoint.manifest import check_sizes, read_manifest, verify
from hybridtrain.checkpoint.run import (
    FixedState,
    SavableStep,
    find_checkpoint,
    replay,
    restore_run,
    resume_run,
    save_run,
    save_step,
)
from hybridtrain.checkpoint.saving import check_directory, finishing_saves, save_checkpoint
from hybridtrain.checkpoint.state import check_progress, restore_checkpoint
from hybridtrain.checkpoint.store import CheckpointStore, NoSpaceError, step_of
from hybridtrain.checkpoint.tensor_files import without_aliases, write_weights
from hybridtrain.checkpoint.weight_sources import find_weights, locate_weights
from hybridtrain.checkpoint.weights import (
    check_fits,
    evaluated_average,
    read_tree,
    read_weights,
    with_average,
)

__all__ = [
    "CheckpointStore",
    "FixedState",
    "InitReport",
    "NoSpaceError",
    "SavableStep",
    "Source",
    "broadcast_tree",
    "check_directory",
    "check_fits",
    "check_progress",
    "check_sizes",
    "check_weights",
    "checkpoint_weights",
    "evaluated_average",
    "find_checkpoint",
    "find_weights",
    "finishing_saves",
    "init_from",
    "is_moved",
    "locate_weights",
    "parse_init_from",
    "read_manifest",
    "read_tree",
    "read_weights",
    "replay",
    "restore_checkpoint",
    "restore_run",
    "resume_run",
    "save_checkpoint",
    "save_run",
    "save_step",
    "source_of_base",
    "step_of",
    "under_all_names",
    "verify",
    "with_average",
    "without_aliases",
    "write_weights",
]
