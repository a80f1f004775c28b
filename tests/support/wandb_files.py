"""What an offline run of W&B has in its files, which wandb itself has no reader for."""

import json
from pathlib import Path
from typing import Any, NamedTuple

_BLOCK = 2**15
_HEAD = (
    7  # of the file; also of each piece: checksum, length, and whether it is whole or which part
)


class OfflineRun(NamedTuple):
    """The run's record, the last value of each key of its config, and the rows of its curves."""

    run: Any
    config: dict[str, Any]
    rows: list[dict[str, Any]]


def offline_runs(directory: Path) -> list[OfflineRun]:
    """Returns the attempts of the run in a run directory, the oldest first."""
    files = sorted(directory.glob("wandb/offline-run-*/*.wandb"), key=lambda f: f.stat().st_mtime)
    return [_read(file.read_bytes()) for file in files]


def _read(data: bytes) -> OfflineRun:
    from wandb.proto.wandb_internal_pb2 import Record

    run, config, rows = None, {}, []
    for piece in _pieces(data):
        record = Record.FromString(piece)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
        if kind in ("run", "config"):
            updates = record.run.config.update if kind == "run" else record.config.update
            config |= {each.key: json.loads(each.value_json) for each in updates}
        if kind == "history":
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return OfflineRun(run, config, rows)


def _pieces(data: bytes) -> list[bytes]:
    """Returns the records of a log in LevelDB's format."""
    found, part, at = [], b"", _HEAD
    while at + _HEAD <= len(data):
        if _BLOCK - at % _BLOCK < _HEAD:
            at += _BLOCK - at % _BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + _HEAD : at + _HEAD + length]
        at += _HEAD + length
        if kind in (1, 4):  # whole, or the last part
            found.append(part)
            part = b""
    return found
