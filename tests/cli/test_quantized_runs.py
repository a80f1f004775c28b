"""Fine-tuning an adapter on a quantized base, from the files to what other programs load."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from cli_runs import fail, succeed
from safetensors.torch import load_file
from support.cases import installed
from support.launch import forked_command
from support.small_hub import write_chats, write_gpt2, write_llama
from torch import nn

installed("bitsandbytes")
peft = installed("peft")

RUN = [
    *("recipe=sft_chat", "model.source=./llama", "data.path=chats.jsonl", "model.quantize=nf4"),
    *("model.dtype=float32", "world.devices=cpu", "data.batch_size=8", "data.max_len=24"),
    *("optim.lr=1e-2", "lr_schedule=constant", "lr_schedule.warmup_steps=0"),
    *("trainer.epochs=null", "trainer.log_every=1", "trainer.eval_every=1"),
    *("checkpoint.every_steps=null", "pipeline.chunks=2", "world.replicas=2"),
    "monitor.report=false",
]


@pytest.fixture(autouse=True)
def files():
    write_llama(Path("llama"), layers=2)  # with grouped-query attention
    write_chats(Path("chats.jsonl"), 40)


def adapter(run, steps):
    return load_file(f"outputs/{run}/checkpoints/step_{steps:08d}/model.safetensors")


def base_and_adapter(folder):
    """What plain PEFT loads, with the base quantized by bitsandbytes and dequantized."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained("./llama", attn_implementation="eager")
    ops = torch.ops.bitsandbytes
    for name, layer in net.named_modules():
        is_transposed = type(layer).__name__ == "Conv1D"
        if (is_transposed or isinstance(layer, nn.Linear)) and name != "lm_head":
            weight = layer.weight.data.t() if is_transposed else layer.weight.data
            stored = ops.quantize_4bit(weight, 64, "nf4", torch.uint8)
            weight = ops.dequantize_4bit(*stored, 64, "nf4", weight.shape, weight.dtype)
            layer.weight.data = weight.t() if is_transposed else weight
    return peft.PeftModel.from_pretrained(net, folder).eval()


@pytest.mark.parametrize(
    ("processes", "layers", "more"),
    [
        (1, 14, []),
        pytest.param(2, 14, [], marks=pytest.mark.thorough, id="a-process-for-each-stage"),
        pytest.param(1, 14, ["model.lora.dora=true"], marks=pytest.mark.thorough, id="dora"),
        pytest.param(1, 8, [], marks=pytest.mark.thorough, id="conv1d"),
    ],
)
def test_a_run_goes_on_in_other_stages_and_exports_what_was_evaluated(
    processes, layers, more, capfd
):
    from transformers import AutoModelForCausalLM

    if layers == 8:
        shutil.rmtree("llama")
        write_gpt2(Path("llama"))
    run = [*RUN, *more]
    first = [*run, "trainer.steps=1", "pipeline.nb_part=2"]
    if processes == 1:
        succeed(capfd, *first)
    else:
        forked_command(processes, [*first, "world.engine=distributed"], Path("said"))
    said = succeed(capfd, *run, "trainer.steps=2", "pipeline.nb_part=3", "world.engine=local")
    assert "resumed from outputs/sft_chat/checkpoints/step_00000001" in said
    assert f"model.quantize=nf4: {layers} layers; " in said
    saved = adapter("sft_chat", 2)
    assert saved
    assert all(".lora_" in name for name in saved)
    state = Path("outputs/sft_chat/checkpoints/step_00000002/state.json")
    assert json.loads(state.read_text())["base"]["quantization"] == f"nf4, {layers} layers"

    # uninterrupted, in one stage: bitwise the same
    succeed(capfd, *run, "trainer.steps=2", "pipeline.nb_part=1", "run_name=whole")
    whole = adapter("whole", 2)
    assert list(whole) == list(saved)
    assert all(torch.equal(value, saved[name]) for name, value in whole.items())

    evaluated = json.loads(Path("outputs/sft_chat/summary.json").read_text())["eval"]["loss"]
    for form in ("peft", "transformers"):
        succeed(capfd, "export", "run_name=sft_chat", f"format={form}")
    folder = Path("outputs/sft_chat/export")
    merged = AutoModelForCausalLM.from_pretrained(
        folder / "step_00000002", attn_implementation="eager"
    ).eval()
    adapted = base_and_adapter(folder / "step_00000002_adapter")
    from hybridtrain.datasets import chat

    data = chat("chats.jsonl", "./llama", max_len=24)
    inputs, targets = data.collate([data.eval[i] for i in range(len(data.eval))])
    for net in (merged, adapted):
        with torch.no_grad():
            logits = net(**inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        assert math.isclose(loss.item(), evaluated, rel_tol=1e-5)


@pytest.mark.thorough
def test_modules_that_are_trained_as_a_whole_are_kept_by_the_words_of_the_error(capfd):
    short = [*RUN, "pipeline.nb_part=1", "trainer.steps=1", "--dry-run"]
    short += ["model.lora.modules_to_save=[gate_proj]", "model.lora.targets=[q_proj]"]
    said = fail(capfd, *short)
    (way_out,) = re.findall(r"set '(model\.quantize=.*)'", said)
    succeed(capfd, *short, way_out)
    assert "model.quantize=nf5 is unknown: did you mean 'nf4'?" in fail(
        capfd, *short, "model.quantize=nf5"
    )
    assert "model.quantize=8 must be true, or a mapping such as {kind: nf4}" in fail(
        capfd, *short, "model.quantize=8"
    )


def test_a_plan_prices_the_bytes_of_quantized_weights(capfd):
    def weights(*changes):
        said = succeed(capfd, "plan", *RUN, "trainer.steps=2", "pipeline.nb_part=1", *changes)
        (kib,) = re.findall(r"([\d.]+) KiB", said.partition("weights + state")[2])[:1]
        return float(kib)

    plain, quantized = weights("model.quantize=null"), weights()
    linear = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)  # of both layers
    assert plain - quantized == pytest.approx(linear * (4 - 0.5625) / 1024, abs=0.2)
