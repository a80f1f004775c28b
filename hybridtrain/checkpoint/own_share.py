"""The files of a checkpoint that one process writes, where all of them write.

Each tensor of the whole state is in a file of one process:

    model-00001-of-00004.safetensors       rank 0 of 4
    model-00002-of-00004.safetensors       rank 1 ...
    model.safetensors.index.json           rank 0, and so are all other JSON files
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hybridtrain.checkpoint.host_copies import HostCopies
from hybridtrain.checkpoint.manifest import Writer
from hybridtrain.checkpoint.state import document_writers, packed
from hybridtrain.checkpoint.state_table import StateTable
from hybridtrain.checkpoint.tensor_files import (
    SHARD_BYTES,
    check_storable,
    file_names,
    index_writers,
    shards_of,
    share_writers,
    tensor_writers,
)
from hybridtrain.model import HybridModel

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

_STEMS = ("model", "optimizer")


def share_of_state(
    model: HybridModel,
    table: StateTable,
    progress: Mapping[str, Stateful],
    states: Mapping[str, Mapping[str, Any]] = {},
    *,
    copies: HostCopies | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Writer]:
    """Returns this process's files of a checkpoint that all processes write; a collective call.

    Args:
        model: see `writers`, and so `progress` and `states`, which only rank 0 needs to have.
        table: what each process has; every tensor is in the files of one of them.
        progress: see `writers`.
        states: see `writers`.
        copies: where tensors are copied that this process writes, so that training may go on while
            they are written; None: they are not copied.
        shard_bytes: see `writers`.

    Raises:
        CheckpointError, ValueError: see `writers`; on all processes.
    """
    rank, size = model.world.rank, model.world.size
    by_rank: list[dict[str, dict[str, Tensor]]] = [{} for _ in range(size)]
    writer = table.assigned()
    mine = [key for key in table.infos if writer[key] == rank]
    for (stem, name), info in table.infos.items():
        by_rank[writer[stem, name]].setdefault(stem, {})[name] = info.meta()
    if all("model" not in shares for shares in by_rank):
        by_rank[0]["model"] = {}  # a model without tensors has the file too
    values = {key: table.value(key) for key in mine}
    if copies is not None:
        copies.drop_others(_STEMS, values)
        for (stem, name), tensor in values.items():
            values[stem, name] = copies.take(stem, {name: tensor})[name]
    files: dict[str, Writer] = {}
    for stem in _STEMS:
        shards = [
            (owner, shard)
            for owner, shares in enumerate(by_rank)
            if stem in shares
            for shard in shards_of(shares[stem], shard_bytes)
        ]
        names = file_names(stem, len(shards))
        own = {
            file: {name: values[stem, name] for name in shard}
            for file, (owner, shard) in zip(names, shards, strict=True)
            if owner == rank
        }
        files |= share_writers(own, table.aliases[stem])
        if rank == 0:
            files |= index_writers(stem, dict(zip(names, [s for _, s in shards], strict=True)))

    def of_rank_0() -> dict[str, Writer]:
        documents, tensors = packed(model, progress, table.extra, table.optimizer, states)
        del tensors["optimizer"]
        of_states: dict[str, Writer] = {}
        for name, own_tensors in tensors.items():
            check_storable(own_tensors)
            if own_tensors:
                kept = own_tensors if copies is None else copies.take(name, own_tensors)
                of_states |= tensor_writers(name, kept, shard_bytes)
        return {**of_states, **document_writers(documents)}

    files |= model.world.on_main(of_rank_0) or {}
    if copies is not None:
        copies.wait()
    return files
