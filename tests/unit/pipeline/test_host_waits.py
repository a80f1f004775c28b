"""After the first steps, which compare values, the host queues work and waits for no device."""

import pytest
import torch
from support.nets import CASES
from support.stand_in_gpus import stand_in_gpus
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel, Loader, OptimizerStep, World
from hybridtrain.pipeline.recomputation_proof import FIRST_STEPS

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

STEPS, ROWS = FIRST_STEPS + 2, 4
SETTINGS = [
    ("linear", {"schedule": "1f1b", "stages_per_device": 2, "recompute": {"every": 2}}),
    ("tied_gpt", {"schedule": "1f1b", "recompute": "always"}),
    ("conv", {"schedule": "zb-v", "stages_per_device": 2, "batch_norm": "deferred"}),
    ("inplace", {"schedule": "gpipe"}),
    ("stateful", {"schedule": "zb-h1"}),
]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS, ids=str)
@pytest.mark.quick_cases(1)
def test_the_host_waits_for_no_device_in_a_step_that_compares_nothing(kind, settings):
    case = CASES[kind]
    with stand_in_gpus(2) as gpus:
        world = World.from_env(2, [str(device) for device in gpus.devices])
        model = HybridModel(case.net(), world, chunks=2, self_check=False, **settings)
        model.train()
        # fused: the device decides whether the gradient is finite
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        step = OptimizerStep(model, optimizer, clip_norm=1.0)
        loader = Loader(TensorDataset(*case.batch(STEPS * ROWS, 0)), ROWS, world, seed=1)
        for number, batch in enumerate(loader.batches()):
            if number == FIRST_STEPS:
                assert gpus.syncs > 0, "the stand-ins count no waits"
                gpus.syncs = 0
            step.run([batch], case.loss)
        assert step.number == STEPS
        assert gpus.syncs == 0
