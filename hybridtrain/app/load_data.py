"""The data sets of a run, loaded on one process after the other."""

from __future__ import annotations

import socket

from hybridtrain.app import instantiate
from hybridtrain.app.config import LOADER_KEYS, Config
from hybridtrain.data.splits import DataSplits
from hybridtrain.errors import DataError, UserError
from hybridtrain.world import World

# Keys of a data set that say where it is, in the order in which they are shown.
_PLACES = ("root", "path", "file", "files", "folder", "data_dir")


def check_tokenizer(config: Config) -> None:
    """Refuses a tokenizer that is the path of a function which may not be called."""
    tokenizer = str(config.data.get("tokenizer", ""))
    if "." in tokenizer or ":" in tokenizer:  # not one of torchtext's names
        instantiate.resolve("data.tokenizer", tokenizer.replace(":", "."), config.allow_targets)


def load_data(config: Config, world: World) -> DataSplits:
    """Loads the data set, first on rank 0, then on the others.

    With `data.download`, rank 0 fetches it first, then the first process of each other node if it
    is not there, since nodes may have their own disks.

    Raises:
        DataError: a process cannot load it; names rank and host.
    """

    def load(download: bool) -> DataSplits:
        settings = dict(config.data)
        if "download" in settings:
            settings["download"] = download
        check_tokenizer(config)
        try:
            return instantiate.build(
                "data", settings, DataSplits, config.allow_targets, ignore=LOADER_KEYS
            )
        except FileNotFoundError as error:
            where = ", ".join(f"data.{k}={v}" for k, v in settings.items() if k in _PLACES)
            raise DataError(
                f"the data set {config.data['_target_']} is not there: {error}"
                + (f" ({where})" if where else "")
            ) from error

    download = bool(config.data.get("download"))
    data = world.on_main(lambda: load(download))
    first_of_node = world.local_rank == 0
    for first in (True, False) if download else (None,):
        failure = None
        if not world.is_main and first in (None, first_of_node):
            try:
                data = load(download and first_of_node)
            except UserError as error:
                failure = f"rank {world.rank} on {socket.gethostname()}: {error}"
        for failed in world.gather(failure):
            if failed is not None:
                raise DataError(failed)
    assert data is not None
    return data
