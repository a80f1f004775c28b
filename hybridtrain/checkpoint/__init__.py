"""Checkpoints: the state that a resume needs, in directories that are complete or absent.

The arrows show how data flows in a save:

model, optimizer -> state_table -> state -> saving -> store -> step_00000100/
                                            joint_save

run                save a run, find its newest checkpoint, restore it and go on
state_table        which process has which tensor, and which one writes it; the optimizer's by name
state              the files of a checkpoint, and its restore
saving             a save by all processes: rank 0 alone, gathered by rank 0, or joint
joint_save         each process writes its files into one directory
store              publishes, keeps, writes in the background
host_copies        what is written while training goes on
read               reading by all processes, or by rank 0 for all
shared_files       which files the processes of several hosts share
broadcast          a tree of values from rank 0
manifest           sizes and sums of all files
directory          the names of checkpoints, the renames of a save, the mark of the best
tensor_files       safetensors
json_tree          JSON for everything else
weights            the model's tensors in a checkpoint: read, checked, loaded
weight_sources     files and folders of weights, of this library and of others
base               the frozen weights that a checkpoint of an adapter leaves out
init_from          weights from elsewhere
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
