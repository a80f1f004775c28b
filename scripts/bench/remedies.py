"""What each remedy for memory gives and costs: a Llama that is fine-tuned, alone and together.

Each row is a run of `hybridtrain recipe=sft_chat` on two CPU stages: a Llama with grouped-query
attention, 6 layers of width 256 and a vocabulary of 65,536, and a LoRA adapter. Memory is the
largest of the stages, counted between layers; the time is that of a step, without the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from scripts.bench.common import print_footer, print_table

RUN = (
    *("recipe=sft_chat", "model.source=./llama", "data.path=chats.jsonl", "world.devices=cpu"),
    *("data.batch_size=8", "data.pad=max_len", "pipeline.chunks=4"),
    *("pipeline.schedule=gpipe", "trainer.epochs=null", "trainer.log_every=1"),
    *("trainer.eval_every=null", "checkpoint.every_steps=null", "monitor=[csv]"),
    *("lr_schedule.warmup_steps=0", "pipeline.self_check=false"),
)
RECOMPUTED = ("pipeline.recompute=always",)
OFFLOADED = (*RECOMPUTED, "pipeline.offload=inputs")
REMEDIES = {
    "none": ("pipeline.head=plain",),
    "`pipeline.head=fused`": ("pipeline.head=fused",),
    "`model.quantize=nf4`": ("pipeline.head=plain", "model.quantize=nf4"),
    "`optim=adamw8bit`": ("pipeline.head=plain", "optim=adamw8bit"),
    "`pipeline.recompute=always`": ("pipeline.head=plain", *RECOMPUTED),
    "the same with `pipeline.offload=inputs`": ("pipeline.head=plain", *OFFLOADED),
    "all": ("pipeline.head=fused", "model.quantize=nf4", "optim=adamw8bit", *OFFLOADED),
}


def write_files(vocabulary: int, layers: int, width: int, tokens: int) -> None:
    """Writes the model, its tokenizer and conversations into the current folder.

    Args:
        vocabulary: the size of the model's vocabulary, at least 103.
        layers: its layers.
        width: its width.
        tokens: the most tokens of a conversation.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<s>", "</s>"]
    words = {word: number for number, word in enumerate([*special, *(f"w{n}" for n in range(99))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
    )
    turn = "{{ message.role + ' ' + message.content + ' </s> ' }}"
    tokenizer.chat_template = f"{{% for message in messages %}}{turn}{{% endfor %}}"
    tokenizer.save_pretrained("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, intermediate_size=2 * width, max_position_embeddings=tokens,
        pad_token_id=0, bos_token_id=2, eos_token_id=3, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained("llama")
    text = " ".join(f"w{number}" for number in range(min(50, tokens // 2 - 8)))
    chat = [{"role": role, "content": text} for role in ("user", "assistant")]
    Path("chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 200)


def hybridtrain(words: Sequence[str]) -> None:
    """Runs the command line in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hybridtrain", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def run(name: str, changes: Sequence[str], steps: int) -> tuple[float, float, float]:
    """Returns MiB of the largest stage, ms per step, and the last loss."""
    words = [*RUN, *changes, f"run_name={name}", f"trainer.steps={steps}", "monitor.report=false"]
    hybridtrain(words)
    folder = Path("outputs") / name
    stages = json.loads((folder / "summary.json").read_text())["stages"]
    lines = (folder / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    times = [float(row["train/step_ms"]) for row in rows if row["train/step_ms"]]
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    most = max(stage["peak_memory_bytes"] for stage in stages)
    return most / 2**20, statistics.median(times[1:] or times), losses[-1]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=65_536)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="of a sample")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of remedies")
    options = parser.parse_args()
    table = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
        os.chdir(folder)
        write_files(options.vocabulary, options.layers, options.width, options.tokens)
        for number, (name, changes) in enumerate(REMEDIES.items()):
            if not any(part in name for part in options.only):
                continue
            changes = (*changes, f"data.max_len={options.tokens}")
            mib, ms, loss = run(f"run{number}", changes, options.steps)
            table.append([name, f"{mib:.0f}", f"{ms:.0f}", f"{loss:.5f}"])
            print(*table[-1], file=sys.stderr)
    print_table(["remedy", "MiB", "ms per step", f"loss of step {options.steps}"], table)
    print_footer(
        f"Fine-tuning a Llama of {options.layers} layers of {options.width}, 2 CPU stages, "
        f"8 x {options.tokens} tokens per step."
    )


if __name__ == "__main__":
    main()
