"""The API of SageMaker's model parallel library 1.x (smp), on top of this project's pipelines.

    import hybridtrain.smp as smp  # was: import smdistributed.modelparallel.torch as smp

Scripts run under torchrun, on CPUs and GPUs. docs/smp-names.md lists all names and parameters.

config             the configuration of smp 1.x, and the torchrun line of a `distribution`
runtime            the state that `init` has set up in this process
ranks              ranks, sizes, groups of processes; messages between them
model              `DistributedModel`, partitioned when the first step calls it
division           how it is partitioned, and which modules are recomputed
step               `@smp.step`: a function that runs once per micro-batch
bodies             these runs, each suspended at its call of the model
reads              what forwards read, which a step must not change
microbatches       splitting the arguments of a step
optimizer          `DistributedOptimizer`; amp: `GradScaler`; optimizers: LAMB, NovoGrad
nn                 `FusedLayerNorm`
saving             checkpoints, and partial files
words              the library's messages in the terms of smp
"""

from typing import Any

import hybridtrain
from hybridtrain.partitioning import partition, set_partition
from hybridtrain.smp import amp, nn, optimizers
from hybridtrain.smp.config import config_from_distribution
from hybridtrain.smp.division import (
    checkpoint,
    checkpoint_sequential,
    default_partition,
    delay_param_initialization,
    get_partition,
    model_creation,
    set_activation_checkpointing,
    set_tensor_parallelism,
    tensor_parallelism,
)
from hybridtrain.smp.microbatches import SplitDataset
from hybridtrain.smp.model import NAMES, DistributedModel, refuse
from hybridtrain.smp.optimizer import DistributedOptimizer
from hybridtrain.smp.ranks import (
    CommGroup,
    RankType,
    allgather,
    barrier,
    broadcast,
    device,
    dp_barrier,
    dp_rank,
    dp_size,
    get_dp_group,
    get_dp_process_group,
    get_mp_group,
    get_mp_process_group,
    get_pp_group,
    get_pp_process_group,
    get_rdp_group,
    get_rdp_process_group,
    get_tp_group,
    get_tp_process_group,
    get_world_process_group,
    local_rank,
    local_size,
    mp_barrier,
    mp_rank,
    mp_size,
    pp_barrier,
    pp_rank,
    pp_size,
    rank,
    rdp_barrier,
    rdp_rank,
    rdp_size,
    recv_from,
    reduce_scatter,
    send,
    size,
    tp_barrier,
    tp_rank,
    tp_size,
)
from hybridtrain.smp.runtime import init, is_initialized, is_tracing, shutdown
from hybridtrain.smp.saving import load, resume_from_checkpoint, save, save_checkpoint
from hybridtrain.smp.step import StepOutput, step

__all__ = [
    "DP_GROUP",
    "DP_RANK",
    "MP_GROUP",
    "MP_RANK",
    "NAMES",
    "PP_GROUP",
    "PP_RANK",
    "RDP_GROUP",
    "RDP_RANK",
    "TP_GROUP",
    "TP_RANK",
    "WORLD",
    "WORLD_RANK",
    "CommGroup",
    "DistributedModel",
    "DistributedOptimizer",
    "RankType",
    "SplitDataset",
    "StepOutput",
    "allgather",
    "amp",
    "barrier",
    "broadcast",
    "checkpoint",
    "checkpoint_sequential",
    "config_from_distribution",
    "default_partition",
    "delay_param_initialization",
    "device",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_partition",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_process_group",
    "init",
    "is_initialized",
    "is_tracing",
    "load",
    "local_rank",
    "local_size",
    "model_creation",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "nn",
    "optimizers",
    "partition",
    "pp_barrier",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_barrier",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "reduce_scatter",
    "refuse",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "send",
    "set_activation_checkpointing",
    "set_partition",
    "set_tensor_parallelism",
    "shutdown",
    "size",
    "step",
    "tensor_parallelism",
    "tp_barrier",
    "tp_rank",
    "tp_size",
]

__version__ = hybridtrain.__version__

WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP
WORLD_RANK = RankType.WORLD_RANK
MP_RANK = RankType.MP_RANK
DP_RANK = RankType.DP_RANK
PP_RANK = RankType.PP_RANK
TP_RANK = RankType.TP_RANK
RDP_RANK = RankType.RDP_RANK


def __getattr__(name: str) -> Any:
    if name in NAMES:
        refuse(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
