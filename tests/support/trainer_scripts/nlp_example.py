"""Fine-tunes a classifier of pairs of sentences in a loop with Accelerate.

In the structure of accelerate's examples/nlp_example.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
    set_seed,
)

MAX_BATCH_SIZE = 4
EVAL_BATCH_SIZE = 8


def get_dataloaders(accelerator, args, batch_size):
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    files = {"train": args.train_file, "validation": args.validation_file}
    datasets = load_dataset("json", data_files=files, cache_dir=args.cache_dir)

    def tokenize_function(examples):
        return tokenizer(examples["sentence1"], examples["sentence2"], truncation=True)

    with accelerator.main_process_first():
        datasets = datasets.map(
            tokenize_function, batched=True, remove_columns=["sentence1", "sentence2"]
        )
    datasets = datasets.rename_column("label", "labels")

    def collate_fn(examples):
        return tokenizer.pad(examples, padding="longest", return_tensors="pt")

    train = DataLoader(
        datasets["train"], shuffle=True, collate_fn=collate_fn, batch_size=batch_size
    )
    evaluation = DataLoader(
        datasets["validation"], collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE
    )
    return train, evaluation


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    batch_size = config["batch_size"]
    gradient_accumulation_steps = 1
    if batch_size > MAX_BATCH_SIZE:
        gradient_accumulation_steps = batch_size // MAX_BATCH_SIZE
        batch_size = MAX_BATCH_SIZE
    set_seed(config["seed"])
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, args, batch_size)
    model = AutoModelForSequenceClassification.from_pretrained(args.model_name_or_path)
    # <- the line
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=2,
        num_training_steps=len(train_dataloader)
        * config["num_epochs"]
        // gradient_accumulation_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    losses = []
    for epoch in range(config["num_epochs"]):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch.to(accelerator.device)
            outputs = model(**batch)
            loss = outputs.loss / gradient_accumulation_steps
            accelerator.backward(loss)
            losses.append(loss.item())
            if step % gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = []
        for batch in eval_dataloader:
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right.append((predictions == references).float())
        accuracy = float(torch.cat(right).mean())
        accelerator.print(f"epoch {epoch}:", {"accuracy": accuracy})
    accelerator.unwrap_model(model).save_pretrained(args.output_dir)
    state = {"log_history": [{"losses": losses, "eval_accuracy": accuracy}]}
    Path(args.output_dir, "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--train_file")
    parser.add_argument("--validation_file")
    parser.add_argument("--output_dir")
    parser.add_argument("--cache_dir")
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    training_function({"lr": 1e-3, "num_epochs": 2, "seed": 42, "batch_size": 8}, args)


if __name__ == "__main__":
    main()
