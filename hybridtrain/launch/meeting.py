"""The meeting of a run's processes in a store that this attempt alone uses.

torchrun's agent serves one store for all attempts of a job, with the addresses of processes that
have died under the same keys; a restarted process that reads one of them cannot join. So each
attempt gets its own prefix. Neither the restart count nor the run's id is one: an elastic
job may begin anew without either having changed. Rank 0 draws the prefix and hands it out:

    rank r   hello/r = x (drawn now)          welcome/x ?  ------------>  <prefix>/joined/r
    rank 0   hello/r ?  ->  welcome/x = <prefix>        until all of <prefix>/joined/... are there

What an earlier attempt has left can only be a stale hello, whose answer nobody reads.

A process that fails before says so in `failed/x`, and rank 0, failed or not, in the outcome that
all read at the end: so no process waits for one that will not come, and one mistake that all have
made is told once.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hybridtrain._base.problem import Problem
from hybridtrain.errors import WorldError
from hybridtrain.launch.activity import wait_until
from hybridtrain.launch.environment import Launch

if TYPE_CHECKING:
    from hybridtrain._base.torch_private import Store

_POLL_S = 0.02
# how long rank 0 waits, when the run has failed, for those who are still to hear of it
_TELL_S = 4.0


def meet(launch: Launch, environ: Mapping[str, str], timeout_s: float) -> Store:
    """Returns a store that is shared with the other processes of this attempt, once all are there.

    Raises:
        WorldError: some did not come within `timeout_s`, or have failed; the message names them.
    """
    deadline = time.monotonic() + timeout_s
    shared = _shared(launch, environ, timeout_s)
    try:
        if launch.rank == 0:
            prefix, outcome = _welcome(shared, launch.size, deadline)
        else:
            prefix, outcome = _arrive(shared, launch, deadline)
    except (RuntimeError, ValueError) as error:
        raise WorldError(_not_joined(launch, timeout_s, error)) from error
    if outcome["error"] is not None:
        raise _error(launch, outcome["error"])
    if missing := outcome["missing"]:
        several = len(missing) != 1
        raise _error(
            launch,
            f"rank{'s' * several} {', '.join(map(str, missing))} of the {launch.size} processes "
            f"that {launch.launcher} announced did not come within timeout_s={timeout_s:g} s: see "
            f"what {'their' if several else 'its'} own output says (under Slurm, start all with "
            f"srun)",
        )
    from hybridtrain._base.torch_private import PrefixStore  # which imports torch

    return PrefixStore(prefix, shared)


def _error(launch: Launch, message: str) -> Exception:
    """Returns the error of all processes, which rank 0 reports."""
    return WorldError(message) if launch.rank == 0 else Problem(0, WorldError, message).error()


def tell_failure(
    launch: Launch, environ: Mapping[str, str], line: str, seconds: float
) -> str | None:
    """Tells the others of an error in this process before it met them; returns what rank 0 says.

    Args:
        launch: who the processes are.
        environ: the environment.
        line: the error.
        seconds: how long this may take.
    """
    deadline = time.monotonic() + seconds
    try:
        shared = _shared(launch, environ, seconds)
        if launch.rank == 0:
            _welcome(shared, launch.size, deadline, line)
            return line
        said: str | None = _arrive(shared, launch, deadline, line)[1]["error"]
        return said
    except (RuntimeError, ValueError, WorldError):
        return None


def _shared(launch: Launch, environ: Mapping[str, str], timeout_s: float) -> Store:
    """Returns the store that all attempts share; with a wait for rank 0, which may host it.

    Raises:
        WorldError: there is none, or it is another run's.
    """
    from hybridtrain._base.torch_private import PrefixStore, TCPStore

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
        if not launch.run:
            return shared
        if launch.rank == 0:
            shared.set("run", launch.run)
            return shared
        run = shared.get("run").decode()
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error):
            raise WorldError(
                f"the port {port} of {host}, where the processes are to meet, is in use: set "
                f"MASTER_PORT to a free one, the same for all processes"
            ) from error
        raise WorldError(_not_joined(launch, timeout_s, error)) from error
    if run != launch.run:
        raise WorldError(
            f"the port {port} of {host}, where the processes are to meet, is used by {run}, and "
            f"this is {launch.run}: set MASTER_PORT to a free one, the same for all processes"
        )
    return shared


def _not_joined(launch: Launch, timeout_s: float, error: Exception) -> str:
    assert launch.master is not None
    host, port = launch.master
    return (
        f"rank {launch.rank} could not join the {launch.size} processes that {launch.launcher} "
        f"announced (at {host}:{port}) within timeout_s={timeout_s:g} s (under Slurm, start "
        f"them with srun): {error}"
    )


def _welcome(
    store: Store, size: int, deadline: float, error: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Hands out a new prefix until every rank has it; rank 0's part. Returns it and the outcome.

    `error` is rank 0's own, which ends the run.
    """
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
                failed = f"failed/{hello.decode()}"
                if error is None and store.check([failed]):
                    line = store.get(failed).decode()
                    error = f"rank {rank} failed before it had joined the others: {line}"
                    deadline = min(deadline, time.monotonic() + _TELL_S)
            if store.check([f"{prefix}/joined/{rank}"]):
                pending.discard(rank)
        time.sleep(_POLL_S)
    outcome = {"missing": sorted(pending), "error": error}
    store.set(f"{prefix}/outcome", json.dumps(outcome))
    if error is not None or pending:  # the store may end with this process
        left = [f"{prefix}/left/{rank}" for rank in range(1, size) if rank not in pending]
        wait_until(lambda: not left or store.check(left), _TELL_S)
    return prefix, outcome


def _arrive(
    store: Store, launch: Launch, deadline: float, error: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Asks for the prefix, says that it has come, and waits for the outcome; or with an `error`.

    Returns both.
    """
    rank, hello = launch.rank, uuid.uuid4().hex
    if error is not None:
        store.set(f"failed/{hello}", error)
    store.set(f"hello/{rank}", hello)

    def left() -> timedelta:
        return timedelta(seconds=max(1.0, deadline - time.monotonic()))

    try:
        store.wait([f"welcome/{hello}"], left())
        prefix = str(store.get(f"welcome/{hello}"), "utf-8")
        store.set(f"{prefix}/joined/{rank}", "")
        # rank 0 gives up at about the same deadline
        store.wait([f"{prefix}/outcome"], left() + timedelta(seconds=_TELL_S))
    except RuntimeError as waited:
        raise WorldError(
            f"rank 0 did not come, and rank {rank} has waited for it as long as timeout_s= allows: "
            f"see what the output of rank 0 says"
        ) from waited
    outcome = json.loads(store.get(f"{prefix}/outcome"))
    if outcome["error"] is not None or outcome["missing"]:
        # the last word: rank 0 ends at it, and the store with rank 0
        with suppress(RuntimeError):
            store.set(f"{prefix}/left/{rank}", "")
    return prefix, outcome


# gloo listens at the interface that this names, or at the address that the host's own name stands
# for. That is 127.0.1.1 on a Debian or Ubuntu without DNS, and gloo then waits for minutes.
_VARIABLE = "GLOO_SOCKET_IFNAME"


def check_interface(environ: Mapping[str, str]) -> None:
    """Checks the network interfaces that the environment names for gloo.

    Raises:
        WorldError: this host does not have one of them.
    """
    chosen, there = environ.get(_VARIABLE, ""), _interfaces()
    missing = [name for name in chosen.split(",") if name and name not in there]
    if missing:
        raise WorldError(
            f"{_VARIABLE}={chosen}: the host {socket.gethostname()} has no network interface "
            f"{missing[0]}; it has: {', '.join(there)}"
        )


def check_reachable(store: Store, launch: Launch, environ: Mapping[str, str]) -> None:
    """Checks that every host has an address for gloo that the others can reach; a collective call.

    Raises:
        WorldError: one has none; names the host and the interfaces to choose from. Rank 0 reports
            it, and the other ranks raise copies.
    """
    if launch.size == launch.local_size:  # on one host
        return
    own = [socket.gethostname(), _is_loopback(environ), _interfaces()]
    store.set(f"address/{launch.rank}", json.dumps(own))
    found = [json.loads(store.get(f"address/{rank}")) for rank in range(launch.size)]
    if len({host for host, _, _ in found}) == 1:
        return
    for host, loopback, interfaces in found:
        if loopback:
            raise _error(
                launch,
                f"the name of the host {host} stands for {loopback} there, which no other host can "
                f"reach: set {_VARIABLE} to the network interface between the hosts (it has "
                f"{', '.join(interfaces)}), or mend its /etc/hosts",
            )


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _is_loopback(environ: Mapping[str, str]) -> str | None:
    """Returns the address that gloo takes, if it is a loopback one."""
    if environ.get(_VARIABLE):
        return None
    with suppress(OSError, ValueError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        address = str(found[0][4][0])
        if ipaddress.ip_address(address).is_loopback:
            return address
    return None
