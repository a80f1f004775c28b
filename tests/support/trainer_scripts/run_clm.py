"""Fine-tunes or trains a causal language model on a text file, with transformers' Trainer.

In the structure of transformers' examples/pytorch/language-modeling/run_clm.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain

from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class ModelArguments:
    model_name_or_path: str | None = None
    config_name: str | None = None
    tokenizer_name: str | None = None
    cache_dir: str | None = None


@dataclass
class DataTrainingArguments:
    train_file: str
    validation_file: str
    block_size: int = 16
    max_eval_samples: int | None = None
    early_stopping_patience: int | None = field(default=None)


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw = load_dataset("text", data_files=files, cache_dir=model_args.cache_dir)
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.tokenizer_name or model_args.model_name_or_path
    )
    if model_args.model_name_or_path:
        model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    else:
        config = AutoConfig.from_pretrained(model_args.config_name)
        model = AutoModelForCausalLM.from_config(config)
    # <- the line
    embedding_size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embedding_size:
        model.resize_token_embeddings(len(tokenizer))

    def tokenize(examples):
        return tokenizer(examples["text"])

    def group_texts(examples):
        joined = {name: list(chain(*examples[name])) for name in examples}
        total = len(joined["input_ids"]) // data_args.block_size * data_args.block_size
        result = {
            name: [
                tokens[i : i + data_args.block_size] for i in range(0, total, data_args.block_size)
            ]
            for name, tokens in joined.items()
        }
        result["labels"] = result["input_ids"].copy()
        return result

    tokenized = raw.map(tokenize, batched=True, remove_columns=["text"])
    blocks = tokenized.map(group_texts, batched=True)
    eval_dataset = blocks["validation"]
    if data_args.max_eval_samples is not None:
        eval_dataset = eval_dataset.select(range(data_args.max_eval_samples))

    def preprocess_logits_for_metrics(logits, labels):
        if isinstance(logits, tuple):
            logits = logits[0]
        return logits.argmax(dim=-1)

    def compute_metrics(prediction):
        predicted, labels = prediction
        return {"accuracy": float((predicted[:, :-1] == labels[:, 1:]).mean())}

    patience = data_args.early_stopping_patience
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks["train"] if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        callbacks=[EarlyStoppingCallback(patience)] if patience else None,
    )

    if training_args.do_train:
        checkpoint = training_args.resume_from_checkpoint
        if checkpoint == "last":
            checkpoint = get_last_checkpoint(training_args.output_dir)
        result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        metrics = result.metrics | {"train_samples": len(blocks["train"])}
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
