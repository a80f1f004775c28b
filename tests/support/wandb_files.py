"""What an offline run of W&B has in its files, which wandb itself has no reader for."""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

_BLOCK = 2**15
_HEAD = (
    7  # of the file; also of each piece: checksum, length, and whether it is whole or which part
)


class OfflineRun(NamedTuple):
    """The run's record, the last value of each key of its config, and the rows of its curves.

    `ended`: it has the record of its end, which is the last one.
    """

    run: Any
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    ended: bool


def offline_runs(directory: Path) -> list[OfflineRun]:
    """Returns the attempts of the run in a run directory, the oldest first.

    Waits for their ends: W&B's own process may write them after `finish` has returned.
    """
    for _ in range(600):
        paths = directory.glob("wandb/offline-run-*/*.wandb")
        files = sorted(paths, key=lambda file: file.stat().st_mtime)
        found = [_read(file.read_bytes()) for file in files]
        if all(run.ended for run in found):
            break
        time.sleep(0.05)
    return found


def _read(data: bytes) -> OfflineRun:
    from wandb.proto.wandb_internal_pb2 import Record

    run, config, rows, ended = None, {}, [], False
    for piece in _pieces(data):
        record = Record.FromString(piece)
        kind = record.WhichOneof("record_type")
        ended |= kind == "exit"
        if kind == "run":
            run = record.run
        if kind in ("run", "config"):
            updates = record.run.config.update if kind == "run" else record.config.update
            config |= {each.key: json.loads(each.value_json) for each in updates}
        if kind == "history":
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return OfflineRun(run, config, rows, ended)


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
