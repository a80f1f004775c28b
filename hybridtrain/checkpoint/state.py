"""The content of a checkpoint, under the user's own names, so that any split can load it.

    step_00000100/
        model.safetensors       the parameters and buffers of `net.state_dict()`; in shards if large
        model_extra.json        what get_extra_state() returned, unless that is a tensor
        optimizer.json          the optimizer's state by parameter name, not by number,
        optimizer.safetensors   and its tensors
        ema.json, ...           the same for each of a trainer's `states`, of which `callbacks` and
                                `data` are its own
        state.json              the progress of the run: step, epoch, sample, random state, scale
        manifest.json           sizes and checksums of the above (see `manifest`)

Rank 0 writes all of it, or each process a share, as a `StateTable` says. A state is loaded tensor
by tensor from memory-mapped files, by each process or by rank 0 for all (`CheckpointReader`), so
there is never a second copy of the model or of the optimizer's state.
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

from hybridtrain.checkpoint.base import checkpoint_weights, open_base, record_of_base
from hybridtrain.checkpoint.host_copies import HostCopies
from hybridtrain.checkpoint.init_from import base_of, under_all_names
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
    """Returns the names of a checkpoint's files, each with the function that writes it.

    Args:
        model: whose parameters, buffers and random state are saved.
        optimizer: over the parameters of `model`; None: no optimizer's state is saved.
        progress: what else is saved in `state.json`: JSON's types, under keys that no other has.
        states: state dicts by name, such as `{"ema": ema.state_dict()}`: tensors and plain values,
            each in files with that name. Rank 0's are saved, and so are its `progress`.
        table: who writes what; the files are this process's. If all write, this is a collective
            call. None: this process has and writes everything.
        copies: copy all tensors to host memory now, so that training may go on while they are
            written; None: they are read when they are written.
        shard_bytes: the tensors of a file, at most; the others go into further files.

    Raises:
        CheckpointError: a value is of a type that is not saved; names its place.
        ValueError: two of `progress` use the same key, or a name in `states` cannot be that of a
            file.
    """
    table = table or StateTable(model, optimizer)

    def of_rank_0() -> dict[str, Any]:
        documents, tensors = _packed(model, progress, table, states)
        for name, own_tensors in tensors.items():
            table.add(name, own_tensors)
        return documents

    all_write = table.form == "joint"
    documents = (model.world.on_main(of_rank_0) if all_write else of_rank_0()) or {}
    value: Callable[[Key], Tensor] = table.value
    if copies is not None:
        own = [key for key, rank in table.written_by.items() if rank == table.rank]
        value = copies.take({key: table.value(key) for key in own}).__getitem__
    infos: dict[str, dict[str, TensorInfo]] = {"model": {}}  # without tensors it has a file too
    for (stem, name), info in table.infos.items():
        infos.setdefault(stem, {})[name] = info
    # of the files in the manifest
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
        content = json.dumps(document, indent=1, allow_nan=name == "state").encode()
        files[f"{name}.json"] = partial(_write_content, content)
    return files


def _packed(
    model: HybridModel,
    progress: Mapping[str, Stateful],
    table: StateTable,
    states: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Returns the content of the JSON files by name, and the tensors that the table lacks."""
    # `draws_step` is what the random numbers of layers such as dropout are drawn for
    saved: dict[str, Any] = {"torch": torch.__version__, "draws_step": model.rng.step}
    if (base := model.base) is not None:
        saved["base"] = {
            "source": base.source,
            "digest": base.digest,
            "prefix": base.prefix,
        }
    for name, entry in progress.items():
        own = entry.state_dict()
        if own.keys() & saved.keys():
            raise ValueError(f"{name} saves {own.keys() & saved.keys()}, as another state does")
        saved |= own
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
    """Loads the checkpoint at `path` into what is given; a collective call.

    Args:
        path: its directory.
        model: gets its weights, buffers and random state. If the base of an adapter's checkpoint
            was moved, call `init_from` with its new place before.
        optimizer: gets its state.
        progress: what `state.json` is for.
        states: as of `checkpoint_files`.
        evaluated: load the weights that the run has evaluated: see `evaluated_average`.

    Returns:
        all of `state.json`; with `evaluated` also `averaged`, whether they are an average.

    Raises:
        CheckpointError: it is missing or damaged, or is of another model; names the tensor.
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
            weights = {**under_all_names(model.net, of_base), **weights}
        check_fits(path, weights | extra, model.net.state_dict())
        average = evaluated_average(path, files) if evaluated else {}
        weights = with_average(weights, average)
        trees: dict[str, Any] = {}
        if optimizer is not None:
            trees["optimizer"] = read_tree(path, "optimizer", files)
            check_groups(path, model, optimizer, trees["optimizer"])
        for name in states:
            if f"{name}.json" not in files:
                if getattr(states[name], "optional", False):  # it is loaded from None
                    continue
                raise CheckpointError(
                    f"{path} has no state {name!r}: it was saved without it. Leave {name!r} out of "
                    f"states=, or resume a checkpoint that has it"
                )
            trees[name] = read_tree(path, name, files)
        if optimizer is not None and world.is_main:
            known = {f"{name}.json" for name in (*_OWN_FILES, *states)}
            for name in files:
                if name.endswith(".json") and ".safetensors" not in name and name not in known:
                    _log.warning("%s of the checkpoint %s is not in states=: left out", name, path)
        saved = read_tree(path, "state", files)
        saved |= {"averaged": bool(average)} if evaluated else {}
        return weights, extra, base, trees, saved

    # From here on every process makes the same calls in the same order: each of them communicates.
    if reader.shared:  # each process a part of the files
        world.on_all(lambda: verify(path, world.rank, world.size))
    weights, extra, base, trees, saved = reader.read(read) or ({}, {}, None, {}, {})
    saved, model.base = world.broadcast((saved, base))
    for entry in progress.values():  # first, because it refuses a run of another kind
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
    """Checks that a run has not ended before its checkpoint.

    Args:
        saved: the `state_dict` of a `Trainer`.
        total_steps: the length of the run that is resumed.

    Raises:
        CheckpointError: it has, or it is not a `Trainer`'s.
    """
    if "rows_per_step" not in saved:  # words: ok
        raise CheckpointError(
            "the checkpoint was saved by a Session or by your own loop, and has no position of "
            "a Trainer: resume it there, or start from its weights with init_from"
        )
    if saved["step"] > total_steps:
        raise CheckpointError(
            f"the checkpoint is of step {saved['step']}, and this run has "
            f"{setting('steps', total_steps)}: give it at least as many steps, or resume an "
            "earlier checkpoint"
        )
