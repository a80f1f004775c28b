"""The meeting of a run's processes in a store that this attempt alone uses.

torchrun's agent serves one store for all attempts of a job, with the addresses of processes that
have died under the same keys; a restarted process that reads one of them cannot join. So each
attempt gets its own prefix. Neither the restart count nor the run's id is one: an elastic
job may begin anew without either having changed. Rank 0 draws the prefix and hands it out:

    rank r   hello/r = x (drawn now)          welcome/x ?  ------------>  <prefix>/joined/r
    rank 0   hello/r ?  ->  welcome/x = <prefix>        until all of <prefix>/joined/... are there

What an earlier attempt has left can only be a stale hello, whose answer nobody reads.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta

from hybridtrain._torch_private import PrefixStore, Store, TCPStore
from hybridtrain.errors import WorldError
from hybridtrain.launch.environment import Launch

_POLL_S = 0.02


def meet(launch: Launch, environ: Mapping[str, str], timeout_s: float) -> Store:
    """Returns a store that is shared with the other processes of this attempt, once all are there.

    Raises:
        WorldError: some did not come within `timeout_s`; the message names their ranks.
    """
    deadline = time.monotonic() + timeout_s
    assert launch.master is not None  # with several processes
    host, port = launch.master
    hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            host,
            port,
            launch.size,
            is_master=launch.rank == 0 and not hosted,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
        shared = PrefixStore("hybridtrain", store)
        prefix = _welcome(shared, launch.size, deadline) if launch.rank == 0 else None
        prefix = prefix or _arrive(shared, launch.rank, deadline)
    except (RuntimeError, ValueError) as error:
        raise WorldError(
            f"rank {launch.rank} could not join the {launch.size} processes that {launch.launcher} "
            f"announced (at {host}:{port}) within timeout_s={timeout_s:g} s (under Slurm, start "
            f"them with srun): {error}"
        ) from error
    own = PrefixStore(prefix, shared)
    missing = json.loads(own.get("missing"))
    if missing:
        several = len(missing) != 1
        raise WorldError(
            f"rank{'s' * several} {', '.join(map(str, missing))} of the {launch.size} processes "
            f"that {launch.launcher} announced did not come within timeout_s={timeout_s:g} s: see "
            f"what {'their' if several else 'its'} own output says (under Slurm, start all with "
            f"srun)"
        )
    return own


def _welcome(store: Store, size: int, deadline: float) -> str:
    """Hands out a new prefix until every rank has it; rank 0's part."""
    prefix = uuid.uuid4().hex
    answered: dict[int, bytes] = {}
    pending = set(range(1, size))
    while pending and time.monotonic() < deadline:
        for rank in sorted(pending):
            if store.check([f"hello/{rank}"]):
                hello = store.get(f"hello/{rank}")
                if answered.get(rank) != hello:
                    store.set(f"welcome/{hello.decode()}", prefix)
                    answered[rank] = hello
            if store.check([f"{prefix}/joined/{rank}"]):
                pending.discard(rank)
        time.sleep(_POLL_S)
    store.set(f"{prefix}/missing", json.dumps(sorted(pending)))
    return prefix


def _arrive(store: Store, rank: int, deadline: float) -> str:
    """Asks for the prefix and says that it has come."""
    hello = uuid.uuid4().hex
    store.set(f"hello/{rank}", hello)
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    try:
        store.wait([f"welcome/{hello}"], left)
    except RuntimeError as error:
        raise WorldError(
            f"rank 0 did not come, and rank {rank} has waited for it as long as timeout_s= allows: "
            f"see what the output of rank 0 says"
        ) from error
    prefix = str(store.get(f"welcome/{hello}"), "utf-8")
    store.set(f"{prefix}/joined/{rank}", "")
    return prefix
