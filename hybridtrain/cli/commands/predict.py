"""The command `predict`: writes one line per sample, with its class or the model's outputs."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hybridtrain._base.files import atomic_file, check_replaceable
from hybridtrain._base.microbatch import batch_size
from hybridtrain.cli.commands.predicted_words import words_of
from hybridtrain.cli.commands.result import Result
from hybridtrain.cli.commands.trained_run import load_trained_run
from hybridtrain.cli.config.resolve import Settings
from hybridtrain.cli.run.context import RunContext
from hybridtrain.cli.run.errors import finite, print_result
from hybridtrain.cli.run.run_record import had_class_targets
from hybridtrain.data import EvalLoader, is_stream
from hybridtrain.errors import ConfigError
from hybridtrain.loop import predict as predict_model
from hybridtrain.loss import field_of, main_output

_log = logging.getLogger(__name__)


def predict(settings: Settings) -> Result:
    """Writes one line per sample of `data.predict_path` or the evaluation split, in order."""
    output = settings.config.output
    if output is not None:
        check_output(output)
    _refuse_generation(settings)
    context, loader, checkpoint, _ = load_trained_run(settings, RunContext.predict_loader)
    path = Path(output or context.directory.folder("predictions") / f"{checkpoint.name}.jsonl")
    outputs = predict_model(context.model, loader)

    def write() -> None:
        if path.suffix == ".npy":
            write_array(path, outputs)
        else:
            has_classes = had_class_targets(checkpoint, context.config)
            lines = _predictions(context, loader, outputs, has_classes)
            write_samples(path, map(finite, lines))
        _log.info("wrote %s, predictions of %s", path, checkpoint)
        print_result({"checkpoint": str(checkpoint), "file": str(path)})

    context.world.on_main(write)
    context.world.close()
    return {}


def _refuse_generation(settings: Settings) -> None:
    config = settings.config
    if config.data.get("task") == "seq2seq":
        raise ConfigError(
            "predict runs one forward per sample and generates no text, which data.task=seq2seq "
            f"needs: run `hybridtrain export run_name={config.run_name} format=transformers`, load "
            "the folder with transformers and call generate (docs/export.md, 'Generate text')"
        )


def check_output(path: str) -> None:
    """Rejects unsupported file formats.

    Raises:
        ConfigError: names the supported suffixes.
    """
    if Path(path).suffix not in (".jsonl", ".npy", ".parquet"):
        raise ConfigError(f"output={path}: the suffix must be .jsonl, .npy or .parquet")
    if Path(path).suffix == ".parquet" and find_spec("pyarrow") is None:
        raise ConfigError(f"output={path} needs pyarrow: pip install pyarrow")


def _predictions(
    context: RunContext, loader: EvalLoader, outputs: Any, has_class_targets: bool
) -> Iterator[dict[str, Any]]:
    """Yields a line for each sample: its number, its fields from the data, and its result.

    The result is the class and all probabilities, by name, or the labels with a probability above
    one half; for classes of words, the class and probability of each word. Without class names, it
    is the model's output.
    """
    dataset = loader.dataset
    numbered = not is_stream(dataset) or context.world.data_parallel_size == 1
    describe = getattr(dataset, "describe", None)
    names: Sequence[str] = context.data.metadata.get("classes") or ()
    first_tokens = getattr(dataset, "first_tokens", None)
    several = context.data.metadata.get("task") == "multilabel"
    logits = None
    if first_tokens is not None:
        outputs = main_output(outputs) if outputs is not None else None
    elif names and several:
        logits = main_output(outputs)
    elif names and has_class_targets:
        logits = _logits(outputs, len(names))
    scores = None if logits is None else logits.double()
    if scores is not None:
        scores = scores.sigmoid() if several else scores.softmax(1)
    values = _by_sample(outputs if scores is None else scores)
    for number, value in enumerate(values):
        line: dict[str, Any] = {"sample": number} if numbered else {}
        if describe is not None:
            line |= describe(number)
        if first_tokens is not None:
            tokens = torch.tensor(value)
            line |= words_of(tokens, first_tokens(number), names or range(tokens.shape[-1]))
        elif logits is not None:
            by_name = dict(zip(names, value, strict=True))
            if several:
                line |= {"labels": [name for name, p in by_name.items() if p > 0.5]}
            else:
                line |= {"class": max(by_name, key=by_name.__getitem__)}
            line |= {"probabilities": by_name}
        else:
            line |= value if isinstance(value, dict) else {"output": value}
        yield line


def _logits(outputs: Any, classes: int) -> Tensor | None:
    """Returns outputs of shape (samples, classes) that softmax turns into probabilities.

    These may be log-probabilities. None: the outputs have a different shape.
    """
    logits = outputs
    if not isinstance(outputs, Tensor):
        fields = outputs if isinstance(outputs, dict) else getattr(outputs, "__dict__", {})
        logits = fields.get("logits")
    fits = isinstance(logits, Tensor) and logits.dim() == 2 and logits.shape[1] == classes
    return logits if fits else None


def write_array(path: Path, outputs: Any) -> None:
    """Writes a model's outputs as one array (`.npy`), atomically.

    Args:
        path: the file to write.
        outputs: a tensor with the samples in dim 0, or an output with such `logits`.

    Raises:
        ConfigError: the outputs are not one tensor, or the file cannot be written.
    """
    outputs = field_of(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor):
        raise ConfigError(
            f"output={path} can hold only one tensor, but the model returns a "
            f"{type(outputs).__name__}: use the suffix .jsonl"
        )
    # numpy has no bfloat16
    array = outputs.float() if outputs.dtype is torch.bfloat16 else outputs
    with _written(path) as file:
        np.save(file, array.numpy())


def write_samples(path: Path, samples: Iterable[Mapping[str, Any]]) -> None:
    """Writes one mapping per sample, as lines of JSON or as a table (`.parquet`).

    Raises:
        ConfigError: the file cannot be written.
    """
    with _written(path) as file:
        if path.suffix == ".parquet":
            import pyarrow
            from pyarrow.parquet import write_table

            write_table(pyarrow.Table.from_pylist(list(samples)), file)
        else:
            file.writelines((json.dumps(x, allow_nan=False) + "\n").encode() for x in samples)


# An array and a table have no mark of their own: the format counts.
_ARE_PREDICTIONS: dict[str, Callable[[bytes], bool]] = {
    ".jsonl": lambda head: bool(
        re.match(rb'\{"(sample|path|id|text|class|labels|output|logits)', head)
    ),
    ".npy": lambda head: head.startswith(b"\x93NUMPY"),
    ".parquet": lambda head: head.startswith(b"PAR1"),
}


@contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """Opens the output file of `predict`, which is written atomically."""
    check_replaceable(path, _ARE_PREDICTIONS[path.suffix], "a file of predictions")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            yield file
    except OSError as error:
        raise ConfigError(f"cannot write output={path}: {error.strerror}") from error


def _by_sample(outputs: Any) -> Iterator[Any]:
    """Yields the outputs for each sample as plain values."""
    for sample in range(0 if outputs is None else batch_size(outputs)):
        values = tree_map_only(Tensor, itemgetter(sample), outputs)
        values = tree_map_only(Tensor, Tensor.tolist, values)
        if is_dataclass(values):
            values = {name: value for name, value in vars(values).items() if value is not None}
        yield values
