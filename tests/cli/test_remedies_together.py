"""All remedies for memory in one run, typed as a user does: killed, and resumed in other stages."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from cli_runs import assert_same
from safetensors.torch import load_file
from support.cases import installed
from support.launch import environment, run_command
from support.small_hub import write_chats, write_llama

installed("bitsandbytes")
installed("peft")
pytestmark = pytest.mark.thorough

SCRIPT = str(Path(sys.executable).with_name("hybridtrain"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
STEPS = 4
RUN = [
    *("recipe=sft_chat", "model.source=./llama", "data.path=chats.jsonl", "world.devices=cpu"),
    *("model.quantize=nf4", "pipeline.head=fused", "optim=adamw8bit", "model.lora.rank=64"),
    *("pipeline.recompute=always", "pipeline.offload=inputs", "pipeline.schedule=gpipe"),
    *("pipeline.chunks=4", "pipeline.split=memory", "world.replicas=2"),
    *("data.batch_size=16", "data.max_len=24", "data.pad=max_len", "lr_schedule.warmup_steps=0"),
    *("trainer.epochs=null", f"trainer.steps={STEPS}", "trainer.eval_every=null"),
    *("checkpoint.every_steps=1", "monitor.report=false"),
]


def typed(*words: str) -> str:
    done = run_command([SCRIPT, *words], 600, None)
    assert done.returncode == 0, done.stderr
    return done.stderr


def kill_once_saved(checkpoint: Path, command: list[str]) -> None:
    """Runs a command, and kills all of its processes when it has saved this checkpoint."""
    with open("output.txt", "w") as output:
        process = subprocess.Popen(command, env=environment(), stdout=output, stderr=output)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    pids: list[int] = []
    try:
        while not checkpoint.is_dir():
            assert process.poll() is None, Path("output.txt").read_text()
            pids = [int(pid) for pid in workers.read_text().split()]
            time.sleep(0.01)
    finally:
        for pid in (process.pid, *pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    assert len(pids) == 2


def adapter(run: str) -> dict[str, object]:
    return load_file(f"outputs/{run}/checkpoints/step_{STEPS:08d}/model.safetensors")


@pytest.mark.timeout(1200)  # two launches of torchrun
def test_a_killed_run_with_all_remedies_resumes_in_other_stages_to_the_same_bits() -> None:
    write_llama(Path("llama"), vocab_size=131_072, hidden_size=64, intermediate_size=128)
    write_chats(Path("chats.jsonl"), 60)
    run = Path("outputs/killed")
    words = [*RUN, "run_name=killed"]
    saved = run / "checkpoints/step_00000002"
    kill_once_saved(saved, [*TORCHRUN, "-m", "hybridtrain", *words, "pipeline.nb_part=2"])
    assert not (run / "summary.json").exists()
    said = typed(*words, "pipeline.nb_part=3")
    assert re.search(r"resumed from outputs/killed/checkpoints/step_0000000[23]", said)

    whole = [*TORCHRUN, "-m", "hybridtrain", *RUN, "run_name=whole", "pipeline.nb_part=2"]
    done = run_command(whole, 600, None)
    assert done.returncode == 0, done.stderr
    assert_same(adapter("killed"), adapter("whole"))

    for name, stages in (("killed", 3), ("whole", 2)):
        summary = json.loads(Path(f"outputs/{name}/summary.json").read_text())
        predicted, measured = (summary[side]["memory_bytes"] for side in ("predicted", "measured"))
        assert len(measured) == stages
        assert predicted == pytest.approx(measured, rel=0.1)
