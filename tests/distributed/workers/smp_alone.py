"""The process groups of smp in a process without others."""

import torch
import torch.distributed as dist

import hybridtrain.smp as smp

own = {"engine": "local", "devices": "cpu"}
smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "hybridtrain": own})
for name in ("world", "mp", "pp", "dp", "rdp", "tp"):
    total = torch.tensor(3.0)
    dist.all_reduce(total, group=getattr(smp, f"get_{name}_process_group")())
    assert total == 3.0, name
smp.shutdown()
assert not dist.is_initialized()
print("the end was reached")
