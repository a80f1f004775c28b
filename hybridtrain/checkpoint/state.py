"""The content of a checkpoint, under the user's own names, so that any split can load it.

    step_00000100/
        model.safetensors       the parameters and buffers of `net.state_dict()`; sharded if large
        model_extra.json        non-tensor results of get_extra_state()
        optimizer.json          the optimizer's state by parameter name, not by number,
        optimizer.safetensors   and its tensors
        ema.json, ...           the same for each of a trainer's `states`, including its built-in
                                `callbacks` and `data`
        state.json              the progress of the run: step, epoch, sample, random state, scale
        manifest.json           sizes and checksums of the above (see `manifest`)

Rank 0 writes all files, or each process a share, as its `StateTable` says. Loading goes tensor by
tensor from memory-mapped files, by each process or by rank 0 on behalf of all (`CheckpointReader`),
so there is never a second copy of the model or the optimizer state.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor
from torch.optim import Optimizer

from hybridtrain.checkpoint.base import (
    check_quantization,
    checkpoint_weights,
    open_base,
    record_of_base,
)
from hybridtrain.checkpoint.host_copies import HostCopies
from hybridtrain.checkpoint.init_from import base_of, loadable_state, under_all_names
from hybridtrain.checkpoint.json_tree import pack
from hybridtrain.checkpoint.manifest import MANIFEST, FileWriter, read_manifest, verify
from hybridtrain.checkpoint.read import CheckpointReader
from hybridtrain.checkpoint.state_table import (
    Key,
    StateTable,
    check_groups,
    load_optimizer_by_name,
)
from hybridtrain.checkpoint.tensor_files import (
    SHARD_BYTES,
    TensorInfo,
    share_writers,
)
from hybridtrain.checkpoint.weight_sources import files_of
from hybridtrain.checkpoint.weights import (
    check_fits,
    evaluated_average,
    load_weights,
    read_tree,
    with_average,
)
from hybridtrain.errors import CheckpointError, setting
from hybridtrain.model import HybridModel

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

_OWN_FILES = ("model", "model_extra", "optimizer", "state", "manifest")

_log = logging.getLogger(__name__)


def checkpoint_files(
    model: HybridModel,
    optimizer: Optimizer | None,
    progress: Mapping[str, Stateful],
    states: Mapping[str, Mapping[str, Any]] = {},
    *,
    table: StateTable | None = None,
    copies: HostCopies | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, FileWriter]:
    """Returns the names of a checkpoint's files, each with a function that writes it.

    Args:
        model: its parameters, buffers and random state are saved.
        optimizer: an optimizer of the parameters of `model`; None: save no optimizer state.
        progress: further content for `state.json`: JSON types, under unique keys.
        states: state dicts by name, such as `{"ema": ema.state_dict()}`: tensors and plain values,
            each in files of that name. Rank 0's `states` and `progress` are saved.
        table: which process writes what; this process's files are returned. If all processes
            write, this is a collective call. None: this process has and writes everything.
        copies: copy all tensors to host memory now, so that training can continue while they are
            written; None: read them when they are written.
        shard_bytes: the maximum size of a tensor file; further tensors go into further files.

    Raises:
        CheckpointError: a value has a type that cannot be saved; the message names its place.
        ValueError: two of `progress` use the same key, or a name in `states` is not a valid file
            name.
    """
    table = table or StateTable(model, optimizer)

    def of_rank_0() -> dict[str, Any]:
        documents, tensors = _packed(model, progress, table, states)
        for name, own_tensors in tensors.items():
            table.add(name, own_tensors)
        return documents

    all_write = table.form == "joint"
    # A failure there must end the save everywhere, before anyone writes.
    documents = (model.world.on_main(of_rank_0) if all_write else of_rank_0()) or {}
    value: Callable[[Key], Tensor] = table.value
    if copies is not None:
        owned_keys = [key for key, rank in table.written_by.items() if rank == table.rank]
        # Now, in the caller's thread: the next step changes the tensors.
        value = copies.take({key: table.value(key) for key in owned_keys}).__getitem__
    infos: dict[str, dict[str, TensorInfo]] = {"model": {}}  # its file exists even without tensors
    for (stem, name), info in table.infos.items():
        infos.setdefault(stem, {})[name] = info
    # the file names in the manifest
    order = ["model", *(["optimizer"] if all_write else []), "model_extra", "optimizer", *infos]
    files: dict[str, FileWriter] = {}
    for stem in (stem for stem in dict.fromkeys(order) if stem in infos):
        files |= share_writers(
            stem,
            infos[stem],
            {name: table.written_by[stem, name] for name in infos[stem]},
            table.rank,
            partial(lambda stem, name: value((stem, name)), stem),
            table.aliases[stem],
            shard_bytes,
        )
    for name, document in documents.items():
        # Rendered now, for a background save, since the values change with the next step.
        content = json.dumps(document, indent=1, allow_nan=name == "state").encode()
        files[f"{name}.json"] = partial(_write_content, content)
    return files


def _packed(
    model: HybridModel,
    progress: Mapping[str, Stateful],
    table: StateTable,
    states: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Returns the content of the JSON files by name, and the tensors missing in the table."""
    # `draws_step` seeds the random numbers of layers such as dropout
    saved: dict[str, Any] = {"torch": torch.__version__, "draws_step": model.rng.step}
    if (base := model.base) is not None:
        saved["base"] = {
            "source": base.source,
            "digest": base.digest,
            "prefix": base.prefix,
            **({"quantization": base.quantization} if base.quantization else {}),
        }
    for name, entry in progress.items():
        entry_state = entry.state_dict()
        if entry_state.keys() & saved.keys():
            raise ValueError(
                f"{name} saves the keys {entry_state.keys() & saved.keys()} of another state"
            )
        saved |= entry_state
    for name in states:
        if name in _OWN_FILES or not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(
                f"states= has the name {name!r}: use letters, digits, - and _, and none of "
                f"{', '.join(_OWN_FILES)}"
            )
    extra = {"model_extra": table.extra} if table.extra else {}
    documents: dict[str, Any] = {"state": saved}
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, tree in {**extra, "optimizer": table.optimizer, **states}.items():
        documents[name], tensors[name] = pack(name, tree)
    del tensors["optimizer"]
    return documents, tensors


def restore_checkpoint(
    path: Path,
    model: HybridModel,
    optimizer: Optimizer | None = None,
    progress: Mapping[str, Stateful] = {},
    states: Mapping[str, Stateful] = {},
    *,
    evaluated: bool = False,
) -> dict[str, Any]:
    """Loads the checkpoint at `path` into the given objects; a collective call.

    Args:
        path: the directory of the checkpoint.
        model: gets its weights, buffers and random state. If the base of an adapter was moved, call
            `init_from` with its new location first.
        optimizer: gets its state.
        progress: objects that load from `state.json`.
        states: as in `checkpoint_files`.
        evaluated: load the weights that the run evaluates with; see `evaluated_average`.

    Returns:
        the content of `state.json`; with `evaluated` also `averaged`, True if the loaded weights
        are an average.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of another model; the message names
            the tensor.
    """
    world = model.world
    path = world.broadcast(path)
    now = None if model.base is None else model.base.source
    base_files = world.from_main(lambda: _files_of_base(path, now))
    reader = CheckpointReader(world, [path / MANIFEST, *base_files])

    def read() -> tuple[dict[str, Tensor], dict[str, Any], Any, dict[str, Any], dict[str, Any]]:
        files = (read_manifest(path) if reader.shared else verify(path))["files"]
        weights, extra, source, of_base, prefix = checkpoint_weights(path, files, now)
        base = None
        if source:
            base = base_of(model.net, source, of_base, prefix)
            check_quantization(path, base)
            weights = {**under_all_names(model.net, of_base), **weights}
        # Before anything is loaded, so that a wrong checkpoint changes nothing.
        check_fits(path, weights | extra, loadable_state(model.net, weights))
        average = evaluated_average(path, files) if evaluated else {}
        weights = with_average(weights, average)
        trees: dict[str, Any] = {}
        if optimizer is not None:
            trees["optimizer"] = read_tree(path, "optimizer", files)
            check_groups(path, model, optimizer, trees["optimizer"])
        for name in states:
            if f"{name}.json" not in files:
                if getattr(states[name], "optional", False):  # then it loads None
                    continue
                raise CheckpointError(
                    f"{path} has no state {name!r}, because it was saved without it: remove "
                    f"{name!r} from states=, or resume a checkpoint that has it"
                )
            trees[name] = read_tree(path, name, files)
        if optimizer is not None and world.is_main:
            known_files = {f"{name}.json" for name in (*_OWN_FILES, *states)}
            for name in files:
                if (
                    name.endswith(".json")
                    and ".safetensors" not in name
                    and name not in known_files
                ):
                    _log.warning("%s of the checkpoint %s is not in states=: ignored", name, path)
        saved = read_tree(path, "state", files)
        saved |= {"averaged": bool(average)} if evaluated else {}
        return weights, extra, base, trees, saved

    # From here on, every process makes the same calls in the same order, because each communicates.
    if reader.shared:  # each process verifies a part of the files
        world.on_all(lambda: verify(path, world.rank, world.size))
    weights, extra, base, trees, saved = reader.read(read) or ({}, {}, None, {}, {})
    saved, model.base = world.broadcast((saved, base))
    for entry in progress.values():  # first, because it refuses runs of another kind
        entry.load_state_dict(saved)
    load_weights(model, reader, weights, extra)
    if optimizer is not None:
        load_optimizer_by_name(model, optimizer, reader, trees.get("optimizer", {}))
    for name, entry in states.items():
        entry.load_state_dict(reader.tree(trees.get(name)))
    model.rng.step = saved["draws_step"]
    return saved


def _files_of_base(checkpoint: Path, now: str | None) -> list[Path]:
    record = record_of_base(checkpoint)
    return [] if record is None else files_of(open_base(checkpoint, record, now).place)


def _write_content(content: bytes, file: BinaryIO) -> None:
    file.write(content)


def check_progress(saved: Mapping[str, Any], total_steps: int) -> None:
    """Checks that a run is not shorter than its checkpoint's step.

    Args:
        saved: the `state_dict` of a `Trainer`.
        total_steps: the length of the resumed run.

    Raises:
        CheckpointError: it is shorter, or the state is not a `Trainer`'s.
    """
    if "rows_per_step" not in saved:  # words: ok
        raise CheckpointError(
            "the checkpoint was saved by a Session or a custom loop and has no Trainer position: "
            "resume it there, or start from its weights with init_from"
        )
    if saved["step"] > total_steps:
        raise CheckpointError(
            f"the checkpoint is at step {saved['step']}, but this run has "
            f"{setting('steps', total_steps)}: raise it to at least that, or resume an earlier "
            "checkpoint"
        )
