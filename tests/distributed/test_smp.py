"""Scripts of smp 1.x, in two and four processes; each cell in all of them."""

import pytest
import torch
from support.cases import thorough
from support.launch import each_cell, forked_script, torchrun_script
from torch import nn


@each_cell({"smp_rules": [2], "smp_scripts": [4, 2], "smp_aws": [4, 2]})
def test_smp(worker, processes, cell, launched):
    launched(worker, processes).check(cell)


def test_replicas_with_other_numbers_of_batches_end_with_one_clear_error(tmp_path):
    status, output = forked_script(2, "smp_unequal.py", tmp_path)
    assert status == 1
    said = "a replica ended after 2 training steps, "
    lines = [line for line in output.splitlines() if said in line]
    raised = [line for line in lines if "BatchError" in line]
    assert len(raised) == 1  # the others are the last lines of both
    assert all(f"rank 1 failed: {said}" in line for line in lines if line not in raised)
    assert "step 3: every replica needs the same number of batches" in output
    assert "drop_last=True" in output


def test_an_optimizer_step_inside_a_step_ends_both_processes_of_a_pipeline_with_its_error(tmp_path):
    status, output = forked_script(2, "smp_hanging.py", tmp_path, timeout=60)
    assert status == 1, output
    assert "rank 1" in output
    assert "optimizer.step() inside a step would run for every micro-batch" in output
    assert "call it after the step" in output


# The names that a script or library may look for, and transformers with its SageMaker switch on.
LOOKS_FOR_NAMES = """
import importlib.util
import sys

names = [
    "smdistributed.modelparallel.torch.nn.huggingface.gpt2",
    "smdistributed.modelparallel.torch.nn",
    "smdistributed.modelparallel.torch.amp",
    "smdistributed.modelparallel.torch",
    "smdistributed.modelparallel",
    "smdistributed",
]
for name in names:  # before and after the import
    assert importlib.util.find_spec(name) is not None, name
    module = importlib.import_module(name)
    assert module.__spec__ is not None, name
    assert importlib.util.find_spec(name) is module.__spec__, name
    assert importlib.reload(module) is module, name
import smdistributed
import smdistributed.modelparallel.torch as smp
import hybridtrain.smp
from smdistributed.modelparallel import __version__
from torchnet.dataset import SplitDataset

assert smp is hybridtrain.smp is smdistributed.modelparallel.torch
assert smp.__spec__.name == "hybridtrain.smp"
assert SplitDataset is smp.SplitDataset
for name in ("smdistributed.dataparallel", "smdistributed.modelparallel.torch.missing"):
    assert importlib.util.find_spec(name) is None, name

sys.modules["peft"] = None  # transformers would import it, for seconds
from transformers import BertConfig, TrainingArguments
from transformers.utils.import_utils import is_sagemaker_mp_enabled

assert is_sagemaker_mp_enabled()
assert smp.is_initialized()  # by transformers
print("the end was reached")
"""


def test_transformers_and_importlib_find_the_names_that_the_runner_provides(tmp_path, monkeypatch):
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"partitions": 1, "microbatches": 2}')
    monkeypatch.setenv("SM_FRAMEWORK_PARAMS", '{"sagemaker_mpi_enabled": true}')
    script = tmp_path / "train.py"
    script.write_text(LOOKS_FOR_NAMES)
    status, output = forked_script(1, "smp_unchanged.py", tmp_path, script)
    assert (status, output.count("the end was reached")) == (0, 1), output


def test_the_groups_of_a_single_process_are_of_it_alone(tmp_path):
    status, output = forked_script(1, "smp_alone.py", tmp_path)
    assert (status, output.count("the end was reached")) == (0, 1), output


# As AWS's scripts of GPT-2, GPT-NeoX, GPT-J, T5 and Falcon call `smp.init`, with their defaults.
PUBLISHED = """
import torch
import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp

smp_config = {
    "ddp": True,
    "tensor_parallel_degree": 1,
    "pipeline_parallel_degree": 2,
    "microbatches": 2,
    "shard_optimizer_state": False,
    "prescaled_batch": True,
    "fp16": False,
    "bf16": False,
    "offload_activations": False,
    "delayed_parameter_initialization": False,
    "optimize": "speed",
    "placement_strategy": "cluster",
    "activation_loading_horizon": 4,
    "skip_tracing": False,
    "auto_partition": True,
    "default_partition": 0,
    "static_mode": False,
    "fast_mode": False,
    "sharded_data_parallel_degree": 1,
    "ddp_dist_backend": "auto",
    "sdp_hierarchical_allgather": False,
    "sdp_gradient_clipping": 1.0,
}
smp.init(smp_config)
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
model = smp.DistributedModel(net)
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

@smp.step
def train_step(model, data, target):
    loss = torch.nn.functional.cross_entropy(model(data), target)
    model.backward(loss)
    return loss

data, target = torch.randn(8, 4), torch.arange(8) % 2
for _ in range(2):
    optimizer.zero_grad()
    loss = train_step(model, data, target).reduce_mean()
    optimizer.step()
print(f"<{smp.pp_rank()} of {smp.pp_size()}: {float(loss)!r}>\\n", end="", flush=True)
"""


@pytest.mark.parametrize("launcher", ["fork", *thorough(["torchrun"])])
def test_an_unchanged_script_starts_with_the_configuration_that_awss_scripts_pass(
    launcher, tmp_path
):
    script = tmp_path / "train.py"
    script.write_text(PUBLISHED)
    if launcher == "torchrun":
        output = torchrun_script(2, "-m", "hybridtrain.smp", script)
    else:
        status, output = forked_script(2, "smp_unchanged.py", tmp_path, script)
        assert status == 0, output
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data, target = torch.randn(8, 4), torch.arange(8) % 2
    for _ in range(2):
        optimizer.zero_grad()
        parts = zip(data.chunk(2), target.chunk(2), strict=True)
        losses = [nn.functional.cross_entropy(net(x), y) for x, y in parts]
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
    said = sorted(line for line in output.splitlines() if line.startswith("<"))
    assert said == [f"<{rank} of 2: {float(loss.detach())!r}>" for rank in range(2)]
