"""Fine-tunes a classifier of pairs of sentences, with transformers' Trainer.

In the structure of transformers' examples/pytorch/text-classification/run_glue.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class DataTrainingArguments:
    train_file: str
    validation_file: str
    max_seq_length: int = 24
    pad_to_max_length: bool = False


@dataclass
class ModelArguments:
    model_name_or_path: str
    cache_dir: str | None = None


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw = load_dataset("json", data_files=files, cache_dir=model_args.cache_dir)
    labels = sorted(map(str, raw["train"].unique("label")))

    config = AutoConfig.from_pretrained(model_args.model_name_or_path, num_labels=len(labels))
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(
        model_args.model_name_or_path, config=config, ignore_mismatched_sizes=True
    )
    # <- the line
    model.config.label2id = {label: number for number, label in enumerate(labels)}
    model.config.id2label = dict(enumerate(labels))

    def preprocess(examples):
        result = tokenizer(
            examples["sentence1"],
            examples["sentence2"],
            padding="max_length" if data_args.pad_to_max_length else False,
            max_length=data_args.max_seq_length,
            truncation=True,
        )
        result["label"] = [model.config.label2id[str(label)] for label in examples["label"]]
        return result

    data = raw.map(preprocess, batched=True)

    def compute_metrics(prediction):
        logits = prediction.predictions
        logits = logits[0] if isinstance(logits, tuple) else logits
        return {"accuracy": float((np.argmax(logits, axis=1) == prediction.label_ids).mean())}

    collator = DataCollatorWithPadding(tokenizer)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=default_data_collator if data_args.pad_to_max_length else collator,
        compute_metrics=compute_metrics,
    )
    if training_args.do_train:
        result = trainer.train()
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if training_args.do_eval:
        trainer.save_metrics("eval", trainer.evaluate(eval_dataset=data["validation"]))
    if training_args.do_predict:
        predict_dataset = data["validation"].remove_columns("label")
        logits = trainer.predict(predict_dataset, metric_key_prefix="predict").predictions
        lines = [labels[number] for number in np.argmax(logits, axis=1)]
        path = Path(training_args.output_dir) / "predict_results.txt"
        path.write_text("\n".join(map(str, lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
