"""The pipeline: a batch in micro-batches, a schedule as data, and the engine that executes it.

pipeline           the stages of this process; placement puts layers on their devices
stage              layers on a device, and what they keep between forward and backward
boundary           what comes into a stage as a leaf, and leaves it detached
split_backward     a backward in two parts: to the input, and to the weights
layer_runner       runs the layers: seeded, checkpointed, with errors that name them
layer_rng          the random numbers of a layer; layer_state: what a forward changes in it
links              what crosses a border, and what a stage passes on; transfer, messages
engines            who runs which actions in which order, over one of two wires
reducer            one stage's DDP, told when to average; gradients: norm and fp16 scale
ties, batch_norm, activation_checkpoint, compilation
process_checks     do all processes have the same batch, the same weights?
own_stages         the part of a model that a process constructs
model_watch        a model that was changed after wrapping
timeline           when each action ran, in all processes
"""

from hybridtrain.pipeline.batch_norm import with_sync_batch_norm
from hybridtrain.pipeline.engines import ENGINES
from hybridtrain.pipeline.engines.threads import threads_per_lane
from hybridtrain.pipeline.layer_rng import ReplayedDraws, default_generator_lock
from hybridtrain.pipeline.links import Head, HeadOutput
from hybridtrain.pipeline.own_stages import (
    BatchCheck,
    check_replicas,
    construct_own_stages,
    plan_without_values,
)
from hybridtrain.pipeline.pipeline import Pipeline
from hybridtrain.pipeline.reducer import unscale_
from hybridtrain.pipeline.ties import remove_aliases
from hybridtrain.pipeline.timeline import Phases, Timeline, stage_times

__all__ = [
    "ENGINES",
    "BatchCheck",
    "Head",
    "HeadOutput",
    "Phases",
    "Pipeline",
    "ReplayedDraws",
    "Timeline",
    "check_replicas",
    "construct_own_stages",
    "default_generator_lock",
    "plan_without_values",
    "remove_aliases",
    "stage_times",
    "threads_per_lane",
    "unscale_",
    "with_sync_batch_norm",
]
