"""The command `export`: writes the weights of a checkpoint for other programs.

safetensors    one file; load it into the plain module with `load_file(path)`
torch          the same as a `torch.save` file, the format of torchvision and timm
transformers   a folder that `from_pretrained` and `pipeline` load: config, sharded weights, and
               the tokenizer or image processor
torch_export   the model for inference, from `torch.export`, for any number of samples
onnx           the same as an ONNX file, from `torch.onnx`
peft           only the adapter of `model.lora`: a folder that PEFT loads, with the tokenizer

All formats except `peft` merge an adapter into the base's weights, under the base's names.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hybridtrain import __version__
from hybridtrain._base.adapter import adapter_of
from hybridtrain._base.files import (
    atomic_file,
    atomic_folder,
    read_json,
    reading,
    write_atomically,
)
from hybridtrain.checkpoint import (
    CheckpointStore,
    Source,
    checkpoint_weights,
    evaluated_average,
    step_of,
    under_all_names,
    verify,
    with_average,
    without_aliases,
    write_weights,
)
from hybridtrain.cli.commands.trained_run import AVERAGED
from hybridtrain.cli.config.resolve import Settings
from hybridtrain.cli.config.schema import WRAPPER_KEYS, Config
from hybridtrain.cli.run.components import build_model
from hybridtrain.cli.run.directory import RunDirectory
from hybridtrain.cli.run.errors import print_result
from hybridtrain.cli.run.moved_base import place_of_base
from hybridtrain.cli.run.resume import checkpoint_to_read
from hybridtrain.cli.run.run_data import (
    check_same_classes,
    classes_of,
    load_data,
    load_for_trained,
)
from hybridtrain.cli.run.run_record import recorded_inputs
from hybridtrain.data import DataSplits, example_batch
from hybridtrain.errors import CheckpointError, ConfigError, check_choice
from hybridtrain.launch import detect
from hybridtrain.models.image_processors import processor_from
from hybridtrain.models.transformers_models import as_published
from hybridtrain.world import World

FORMATS = {
    "safetensors": ".safetensors",
    "torch": ".pth",
    "transformers": "",
    "torch_export": ".pt2",
    "onnx": ".onnx",
    "peft": "_adapter",
}
"""The formats, and the suffixes of their files."""

_log = logging.getLogger(__name__)


def export(settings: Settings) -> dict[str, Any]:
    """Writes a checkpoint's weights into `export/` of the run directory.

    It reads only the files of the checkpoint, and of its base if the checkpoint has only an
    adapter. `torch_export` and `onnx` also run the model once.

    Raises:
        ConfigError: the format is unknown, or does not fit the model.
    """
    if detect(os.environ).rank != 0:
        return {}
    config = settings.config
    check_choice("format", config.format, list(FORMATS))
    if config.push_to is not None and config.format != "transformers":
        raise ConfigError("push_to= uploads a transformers folder: set format=transformers too")
    directory = RunDirectory(config)
    directory.log_to_files(0, settings.quiet)
    for note in settings.notes:
        _log.info("%s", note)
    checkpoint = checkpoint_to_read(config.resume, CheckpointStore(directory.checkpoints), World())
    files = verify(checkpoint)["files"]
    saved = checkpoint_weights(checkpoint, files, place_of_base(config))
    evaluated = evaluated_average(checkpoint, files)
    average = evaluated if config.ema else {}
    saved = saved._replace(tensors=with_average(saved.tensors, average))
    path = directory.folder("export") / f"{checkpoint.name}{FORMATS[config.format]}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _WRITE[config.format](path, _Trained(settings, checkpoint, saved))
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error
    if average:
        _log.info(AVERAGED)
    _log.info("wrote %s from %s", path, checkpoint)
    print_result({"checkpoint": str(checkpoint), "file": str(path)})
    if config.push_to is not None:
        values = {} if evaluated and not config.ema else _evaluation(directory, checkpoint)
        _push(path, config.push_to, _card(checkpoint, config, values))
    return {}


class _Trained:
    """The weights of a checkpoint, with an adapter or without.

    Args:
        settings: the settings of the command.
        checkpoint: the checkpoint to export.
        saved: its weights, without its base's weights.

    Attributes:
        checkpoint: the checkpoint.
        plain: the settings without an adapter.
    """

    def __init__(self, settings: Settings, checkpoint: Path, saved: Source) -> None:
        self.checkpoint = checkpoint
        self._settings, self._saved = settings, saved
        model = {k: v for k, v in settings.config.model.items() if k not in WRAPPER_KEYS}
        self.plain = replace(settings, config=replace(settings.config, model=model))

    @cached_property
    def data(self) -> DataSplits:
        """The metadata and tokenizer that the model takes from the data."""
        return load_for_trained(self._settings, World(), self.checkpoint)

    @cached_property
    def state(self) -> dict[str, Any]:
        """The state of the model with the adapter merged into its weights."""
        saved = {**self._saved.tensors, **self._saved.extra}
        if all(self._settings.config.model.get(key) in (None, False) for key in WRAPPER_KEYS):
            return saved
        net = build_model(self._settings.config, self.data)
        base = under_all_names(net, self._saved.base_tensors)
        net.load_state_dict({**base, **saved})
        adapter = adapter_of(net)
        return dict(net.state_dict() if adapter is None else adapter.merged(net).state_dict())

    def write_adapter(self, folder: Path) -> None:
        """Writes the adapter's own files.

        Raises:
            ConfigError: the model has none.
        """
        with torch.device("meta"):
            net = build_model(self._settings.config, self.data)
        adapter = adapter_of(net)
        if adapter is None:
            raise ConfigError(
                "format=peft writes the adapter of model.lora, but this run has none: set "
                "format=transformers or format=safetensors"
            )
        adapter.write(folder, net, self._saved.tensors, self._saved.base)


def _evaluation(directory: RunDirectory, checkpoint: Path) -> dict[str, Any]:
    """Returns the evaluation at the end of the run; empty if the checkpoint is an earlier one."""
    path = directory.path / "summary.json"
    summary = read_json(path)
    if summary is None or checkpoint.resolve().parent != directory.checkpoints.resolve():
        return {}
    with reading(path):
        return dict(summary["eval"] or {}) if summary["steps"] == step_of(checkpoint) else {}


def _card(checkpoint: Path, config: Config, evaluation: Mapping[str, Any]) -> str:
    """Returns a model card with the training settings, the data and the evaluation."""
    lines = [f"- {key}: `{value}`" for key, value in config.model.items() if value is not None]
    data = {k: v for k, v in config.data.items() if k in ("_target_", "path", "root", "task")}
    lines += [f"- data.{key}: `{value}`" for key, value in data.items() if value is not None]
    head = f"\n| evaluation at step {step_of(checkpoint)} | |\n|---|---|"
    table = [f"| {name} | {value} |" for name, value in evaluation.items()]
    return "\n".join(
        [
            "---\nlibrary_name: transformers\ntags: [hybridtrain]\n---",
            f"# {config.run_name}",
            f"Trained with hybridtrain {__version__}, {checkpoint.name}, seed {config.seed}.\n",
            *lines,
            *([head, *table] if table else []),
            "",
        ]
    )


def _push(folder: Path, name: str, card: str) -> None:
    """Uploads a folder to the Hub, in one commit.

    Raises:
        ConfigError: the Hub rejects it or is unreachable; the folder remains.
    """
    from huggingface_hub import HfApi

    write_atomically(folder / "README.md", card)
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        made = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder)
    except Exception as error:  # the network, the Hub, or a wrong name
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"push_to={name}: {reason}. The export in {folder} remains") from error
    _log.info("uploaded to %s", made)


def _write_safetensors(path: Path, trained: _Trained) -> None:
    """Writes tied tensors under all their names, for `load_state_dict(load_file(path))`.

    The metadata has the class names in the order of their numbers, as a JSON list.
    """
    state = trained.state
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    aliases = without_aliases(tensors)[1]
    names = classes_of(trained.checkpoint)
    metadata = {} if names is None else {"classes": json.dumps(names)}
    write_weights(path, {**state, **{name: state[name].clone() for name in aliases}}, metadata)


def _write_torch(path: Path, trained: _Trained) -> None:
    state = trained.state
    with atomic_file(path) as file:
        torch.save(state, file)


def _write_transformers(folder: Path, trained: _Trained) -> None:
    """Writes config.json, sharded safetensors, and the tokenizer or image processor."""
    data, state = trained.data, trained.state
    check_same_classes(trained.checkpoint, data)
    with torch.device("meta"):
        net: Any = build_model(trained.plain.config, data)
    if not hasattr(net, "save_pretrained"):
        raise ConfigError(
            f"format=transformers needs a transformers model, but this is a "
            f"{type(net).__name__}: set format=safetensors or format=torch"
        )
    net = as_published(net)
    with atomic_folder(folder) as new:
        # copies, because a tensor with several names can be written only once
        net.save_pretrained(new, state_dict={name: value.clone() for name, value in state.items()})
        if data.tokenizer is not None:
            data.tokenizer.save_pretrained(new)
        if {"image_size", "image_mean", "image_std"} <= data.metadata.keys():
            _image_processor(data.metadata).save_pretrained(new)


def _write_peft(folder: Path, trained: _Trained) -> None:
    """Writes adapter_config.json, adapter_model.safetensors and the tokenizer."""
    data = trained.data
    check_same_classes(trained.checkpoint, data)
    with atomic_folder(folder) as new:
        trained.write_adapter(new)
        if data.tokenizer is not None:
            data.tokenizer.save_pretrained(new)


def _image_processor(metadata: Mapping[str, Any]) -> Any:
    """Returns the image processor of the base, or one with the preprocessing of the evaluation."""
    if (of_base := metadata.get("image_processor")) is not None:
        return processor_from(of_base)
    from transformers import CLIPImageProcessor  # resizes, center-crops and normalizes

    side = metadata["image_size"]
    return CLIPImageProcessor(
        do_resize=metadata.get("image_resize") is not None,
        size={"shortest_edge": metadata.get("image_resize") or side},
        resample=Image.Resampling.BILINEAR,
        do_center_crop=True,
        crop_size={"height": side, "width": side},
        image_mean=[*metadata["image_mean"]],
        image_std=[*metadata["image_std"]],
        do_convert_rgb=True,
    )


def _write_program(path: Path, trained: _Trained) -> None:
    """Writes a file for `torch.export.load`; its inputs may have any number of samples."""
    program = _exported(*_net_and_inputs(trained), "torch_export")
    with atomic_file(path) as file:
        torch.export.save(program, file)


def _write_onnx(path: Path, trained: _Trained) -> None:
    """Writes an ONNX file with the weights in it; its inputs may have any number of samples."""
    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise ConfigError(
            f"format=onnx needs {' and '.join(missing)}: pip install 'hybridtrain[onnx]'"
        )
    program = _exported(*_net_and_inputs(trained), "onnx")
    try:
        written = torch.onnx.export(program, dynamo=True, verbose=False)
    except Exception as error:
        raise ConfigError(
            f"format=onnx: torch.onnx cannot export this model: {_first_line(error)}"
        ) from error
    assert written is not None
    with atomic_file(path) as file:
        file.write(written.model_proto.SerializeToString())


def _net_and_inputs(trained: _Trained) -> tuple[nn.Module, Any]:
    """Returns the model with its weights, in evaluation mode, and inputs of two samples."""
    config, data = trained.plain.config, trained.data
    inputs = recorded_inputs(trained.checkpoint, 2)
    if inputs is None:  # by an earlier release, or of a different type
        data = load_data(config, World())
        inputs, _ = example_batch(data.train, 2, data.collate)
    net = build_model(config, data)
    net.load_state_dict(trained.state)
    return net.eval(), inputs


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _exported(net: nn.Module, inputs: Any, form: str) -> Any:
    """Returns the exported model, for a format.

    Raises:
        ConfigError: PyTorch cannot export it; the message has its reason.
    """
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    named: dict[str, Any] = {}
    if isinstance(inputs, dict):
        arguments, named = (), inputs
    auto = torch.export.Dim.AUTO  # any size that the model accepts
    any_number = tree_map_only(
        Tensor, lambda leaf: dict.fromkeys(range(leaf.dim()), auto), named or arguments
    )
    try:
        return torch.export.export(net, arguments, named, dynamic_shapes=any_number)
    except Exception as error:
        raise ConfigError(
            f"format={form}: PyTorch cannot export this model: {_first_line(error)}"
        ) from error


_WRITE: dict[str, Callable[[Path, _Trained], None]] = {
    "safetensors": _write_safetensors,
    "torch": _write_torch,
    "transformers": _write_transformers,
    "torch_export": _write_program,
    "onnx": _write_onnx,
    "peft": _write_peft,
}
