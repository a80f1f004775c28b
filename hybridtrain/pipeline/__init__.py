"""The pipeline: micro-batches, a schedule as data, and the engine that executes it.

pipeline               the stages of this process, and operations on the whole model
own_stages             builds a process's part of a model without the rest
agreement              checks that processes have the same batch, weights and frozen parameters
same_settings          checks that processes have the same modules, loss and optimizers
forward/               the engines, which run the model's own forward, and its stages
stage_backward         the backwards of a stage, whole or in two parts
split_backward         a backward in two parts: for the input, and for the weights
autograd_graph         where a backward starts, and the nodes that it leads to
layer_errors           errors that name the layer
layer_rng              the random numbers of a layer
layer_state            state that the forwards of a stage change
replicas               logical replicas in a process: their state, and the sum of gradients
recomputation_proof    compares recomputations with their forwards
tensor_digest          a digest of a tensor's bits
recompute              recomputation of activations in the backward
offload                activations that wait for their backward outside of the device
host_memory            the host's buffers for them
engine                 the interface of engines, and the step that they run
run_ahead              how far the host runs ahead of accelerators
transfer               copies to another device
messages               what a message to another process has, and its format
message_wire           the messages of a step, in the schedule's one order
point_to_point         sends and receives between two processes
reducer                one stage's DDP; the norm of the gradients, the fp16 loss scale
ties, batch_norm       parameters of several stages; statistics of several micro-batches
device_speeds          the relative speeds of the devices
model_watch            detects changes to a model after wrapping
step_kind              which steps run the same code, and so which checks are due
timeline               when each action ran, in all processes
summaries              what a run reports about the stages: layers, parameters, memory
"""

from hybridtrain.pipeline.agreement import (
    BatchCheck,
    batch_digest,
    check_replicas,
    check_same_bits,
    check_schedule,
)
from hybridtrain.pipeline.batch_norm import with_sync_batch_norm
from hybridtrain.pipeline.device_speeds import with_device_speeds
from hybridtrain.pipeline.engine import Head, HeadOutput
from hybridtrain.pipeline.forward import (
    ForwardStage,
    PartsHere,
    net_of_trip,
    own_values,
    uninstall,
    unwatched,
)
from hybridtrain.pipeline.layer_rng import (
    DrawsOf,
    LayerRNG,
    ReplayedDraws,
    default_generator_lock,
    seed_of,
)
from hybridtrain.pipeline.message_wire import messages_of
from hybridtrain.pipeline.own_stages import construct_own_stages, plan_without_values
from hybridtrain.pipeline.pipeline import HeldGraphs, Pipeline
from hybridtrain.pipeline.reducer import unscale_
from hybridtrain.pipeline.same_settings import (
    SettingsCheck,
    check_same_modules,
    settings_of,
)
from hybridtrain.pipeline.step_kind import StepKind
from hybridtrain.pipeline.summaries import (
    device_memory,
    memory_bytes,
    reset_peak_memory,
    stage_summaries,
)
from hybridtrain.pipeline.ties import remove_aliases
from hybridtrain.pipeline.timeline import Phases, Timeline, measured_ms, read_timelines

__all__ = [
    "BatchCheck",
    "DrawsOf",
    "ForwardStage",
    "Head",
    "HeadOutput",
    "HeldGraphs",
    "LayerRNG",
    "PartsHere",
    "Phases",
    "Pipeline",
    "ReplayedDraws",
    "SettingsCheck",
    "StepKind",
    "Timeline",
    "batch_digest",
    "check_replicas",
    "check_same_bits",
    "check_same_modules",
    "check_schedule",
    "construct_own_stages",
    "default_generator_lock",
    "device_memory",
    "measured_ms",
    "memory_bytes",
    "messages_of",
    "net_of_trip",
    "own_values",
    "plan_without_values",
    "read_timelines",
    "remove_aliases",
    "reset_peak_memory",
    "seed_of",
    "settings_of",
    "stage_summaries",
    "uninstall",
    "unscale_",
    "unwatched",
    "with_device_speeds",
    "with_sync_batch_norm",
]
