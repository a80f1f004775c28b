"""Scripts of smp 1.x, in two and four processes; each cell in all of them."""

import subprocess
import sys

from support.launch import each_cell, environment, forked_script


@each_cell({"smp_rules": [2], "smp_scripts": [2, 4], "smp_aws": [4, 2]})
def test_smp(worker, processes, cell, launched):
    launched(worker, processes).check(cell)


def test_replicas_with_other_numbers_of_batches_end_with_one_clear_error(tmp_path):
    status, output = forked_script(2, "smp_unequal.py", tmp_path)
    assert status == 1
    said = "a replica has ended after 2 training steps, and this one is in its"
    lines = [line for line in output.splitlines() if said in line]
    raised = [line for line in lines if "BatchError" in line]
    assert len(raised) == 1  # the others are the last lines of both
    assert all(f"rank 1 failed: {said}" in line for line in lines if line not in raised)
    assert "step 3: every replica needs the same number of batches" in output
    assert "drop_last=True" in output


ALONE = """
import torch, torch.distributed as dist, hybridtrain.smp as smp
own = {"engine": "local", "devices": "cpu"}
smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "hybridtrain": own})
for name in ("world", "mp", "pp", "dp", "rdp", "tp"):
    total = torch.tensor(3.0)
    dist.all_reduce(total, group=getattr(smp, f"get_{name}_process_group")())
    assert total == 3.0, name
smp.shutdown()
assert not dist.is_initialized()
"""


def test_the_groups_of_a_single_process_are_of_it_alone():
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
