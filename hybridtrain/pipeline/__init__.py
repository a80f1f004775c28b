"""The pipeline: a batch in micro-batches, a schedule as data, and the engine that executes it."""

from hybridtrain.pipeline.batch_norm import with_sync_batch_norm
from hybridtrain.pipeline.engines import ENGINES
from hybridtrain.pipeline.engines.threads import threads_per_lane
from hybridtrain.pipeline.gradients import unscale_
from hybridtrain.pipeline.layer_rng import ReplayedDraws, default_generator_lock
from hybridtrain.pipeline.own_stages import construct_own_stages, plan_without_values
from hybridtrain.pipeline.pipeline import Pipeline
from hybridtrain.pipeline.process_checks import BatchCheck, check_replicas
from hybridtrain.pipeline.step import Head, HeadOutput
from hybridtrain.pipeline.ties import remove_aliases
from hybridtrain.pipeline.timeline import Timeline, stage_times

__all__ = [
    "ENGINES",
    "BatchCheck",
    "Head",
    "HeadOutput",
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
