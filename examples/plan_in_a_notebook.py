"""Plans the split of a model for four devices, without devices or processes.

python examples/plan_in_a_notebook.py
"""

# %%
from itertools import pairwise

import torch
from torch import nn

from hybridtrain import PipelineOptions, StageOwners
from hybridtrain.partitioning import plan

# %% A model whose first layers are the largest
widths = [512, 512, 256, 256, 128, 128, 64, 64, 10]
layers = (layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU()))
net = nn.Sequential(*layers)
batch = torch.randn(64, 512)

# %% The same number of layers, or the same number of parameters per stage
for split in ("uniform", "size"):
    found = plan(
        net,
        PipelineOptions(chunks=8, split=split),
        example_inputs=batch,
        owners=StageOwners.of_cpus(4),
    )
    parameters = [stage.parameters for stage in found.stage_costs()]
    print(f"{split:8} layers {found.counts}  parameters {parameters}")

# %% A file to edit; `split="plan.yaml"` uses it
print(found.to_yaml())
