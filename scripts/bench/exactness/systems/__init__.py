"""The systems of the table, one module for each.

system               their interface
hybridtrain_pipeline hybridtrain, with the stages of a replica in one process and in several
pipelining           torch.distributed.pipelining with DistributedDataParallel
deepspeed_pipeline   DeepSpeed's `PipelineModule`
fabric_ddp           Lightning Fabric with DDP
accelerate_ddp       Accelerate with DDP
data_parallel        what the last two share
"""

from scripts.bench.exactness.systems import (
    accelerate_ddp,
    deepspeed_pipeline,
    fabric_ddp,
    hybridtrain_pipeline,
    pipelining,
)

SYSTEMS = {
    "hybridtrain": hybridtrain_pipeline.LOCAL,
    "hybridtrain-distributed": hybridtrain_pipeline.DISTRIBUTED,
    "pipelining": pipelining.SYSTEM,
    "deepspeed": deepspeed_pipeline.SYSTEM,
    "fabric": fabric_ddp.SYSTEM,
    "accelerate": accelerate_ddp.SYSTEM,
}
