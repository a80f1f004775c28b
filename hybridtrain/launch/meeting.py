"""The rendezvous of a run's processes, in a store that only this attempt uses.

torchrun's agent serves one store for all attempts of a job, in which the addresses of dead
processes remain under the same keys; a restarted process that reads one of them cannot join. So
each attempt gets its own prefix. The restart count and the run ID cannot serve as prefix, because
an elastic job may restart without changing either. Rank 0 draws the prefix and distributes it:

    rank r   hello/r = x (drawn now)          welcome/x ?  ------------>  <prefix>/joined/r
    rank 0   hello/r ?  ->  welcome/x = <prefix>        until all of <prefix>/joined/... are there

An earlier attempt can only leave a stale hello behind, and nobody reads its answer. `joined/r`
holds the process's ID, with which rank 0 detects that a process of its host has ended while it
waits for the others. After 20 seconds it logs which ranks it waits for, and the others log that
they wait for rank 0, and at which address.

A process that fails before the meeting publishes its error in `failed/x`. Rank 0 puts that error,
or its own, into the outcome that all processes read at the end. So no process waits for another
that will not join, and an error common to all processes is printed once.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import math
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from hybridtrain._base.problem import Problem
from hybridtrain.errors import WorldError, argument
from hybridtrain.launch.activity import wait_until
from hybridtrain.launch.environment import Launch, launcher_serves_store
from hybridtrain.launch.limits import try_to_write, within
from hybridtrain.launch.process_id import ProcessId, has_ended, this_process

if TYPE_CHECKING:
    from hybridtrain._base.torch_private import Store

_log = logging.getLogger(__name__)

_POLL_S = 0.02
# the time after which a process logs for whom it waits
_SAY_AFTER_S = 20.0
# how long rank 0 waits, after a failure, for the other processes to read the outcome
_TELL_S = 4.0


def meet(launch: Launch, environ: Mapping[str, str], timeout_s: float) -> Store:
    """Waits for all processes of this attempt and returns their shared store.

    Args:
        launch: the launcher's facts about this process.
        environ: the environment variables.
        timeout_s: seconds to wait.

    Raises:
        WorldError: processes did not join within `timeout_s`, or failed; the message names them.
    """
    deadline = time.monotonic() + timeout_s

    # A timer, because `join` is blocked in the store's connect and cannot look at the time.
    said = threading.Timer(_SAY_AFTER_S, _say_waiting, [launch])
    said.daemon = True

    def join() -> tuple[Store, str, dict[str, Any]]:
        shared = _shared(launch, environ, timeout_s)
        if launch.rank == 0:
            return shared, *_welcome(shared, launch.size, deadline)
        return shared, *_arrive(shared, launch, deadline, on_welcome=said.cancel)

    if launch.rank != 0:
        said.start()
    try:
        # in another thread: a server that answers nothing, or a rank 0 that is stopped, blocks the
        # calls of the store for longer than their own limit
        # Longer than the limits inside, which give better messages: rank 0 gives up at `timeout_s`
        # and the others `_TELL_S` later.
        shared, prefix, outcome = within(timeout_s + 2 * _TELL_S, join)
    except (RuntimeError, ValueError) as error:
        raise WorldError(_not_joined(launch, timeout_s, error)) from error
    finally:
        said.cancel()
    if outcome["error"] is not None:
        raise _error(launch, outcome["error"])
    if missing := outcome["missing"]:
        several = len(missing) != 1
        raise _error(
            launch,
            f"timed out after {argument('timeout_s')}{timeout_s:g} s waiting for "
            f"rank{'s' * several} {', '.join(map(str, missing))} of the {launch.size} processes "
            f"that {launch.launcher} announced: check {'their' if several else 'its'} output "
            "(under Slurm, start all processes with srun)",
        )
    from hybridtrain._base.torch_private import PrefixStore  # imports torch

    return PrefixStore(prefix, shared)


def _say_waiting(launch: Launch) -> None:
    """Logs that this process, which is not rank 0, waits for rank 0."""
    assert launch.master is not None
    where = ":".join(map(str, launch.master))
    _log.warning("rank %d is waiting for rank 0 to serve the rendezvous at %s", launch.rank, where)


def _error(launch: Launch, message: str) -> Exception:
    """Returns the error of all processes, which rank 0 reports."""
    return WorldError(message) if launch.rank == 0 else Problem(0, WorldError, message).error()


def tell_failure(
    launch: Launch, environ: Mapping[str, str], line: str, seconds: float
) -> str | None:
    """Publishes an error that this process had before the meeting.

    Args:
        launch: the launcher's facts about this process.
        environ: the environment variables.
        line: the error message.
        seconds: the time limit.

    Returns:
        the error that rank 0 reports, or None if there is none or rank 0 is unreachable.
    """
    deadline = time.monotonic() + seconds

    def tell() -> str | None:
        shared = _shared(launch, environ, seconds)
        if launch.rank == 0:
            _welcome(shared, launch.size, deadline, line)
            return line
        rank0_error: str | None = _arrive(shared, launch, deadline, line)[1]["error"]
        return rank0_error

    try:
        return within(seconds + 2 * _TELL_S, tell)
    except (RuntimeError, ValueError, WorldError):
        return None


def _shared(launch: Launch, environ: Mapping[str, str], timeout_s: float) -> Store:
    """Returns the store that all attempts share; waits for rank 0, which may host it.

    Raises:
        WorldError: the store cannot be reached, or it belongs to another run.
    """
    from hybridtrain._base.torch_private import PrefixStore, TCPStore

    assert launch.master is not None  # with several processes
    host, port = launch.master
    hosted = launcher_serves_store(environ)
    try:
        # PyTorch would only wait for a number of workers; `_welcome` waits for the ranks and can
        # name them. Multi-tenant as PyTorch's own rendezvous, which may use the same port in this
        # process.
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
            # The `get` of the others waits for it, so they notice the server of another run before
            # they leave a hello there.
            shared.set("run", launch.run)
            return shared
        run = shared.get("run").decode()
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error):
            raise WorldError(
                f"port {port} on {host}, the rendezvous port of the processes, is in use: set "
                "MASTER_PORT to a free port, the same for all processes"
            ) from error
        raise WorldError(_not_joined(launch, timeout_s, error)) from error
    if run != launch.run:
        raise WorldError(
            f"port {port} on {host}, the rendezvous port of the processes, is used by {run}, but "
            f"this is {launch.run}: set MASTER_PORT to a free port, the same for all processes"
        )
    return shared


def _not_joined(launch: Launch, timeout_s: float, error: Exception) -> str:
    assert launch.master is not None
    host, port = launch.master
    return (
        f"rank {launch.rank} could not join the {launch.size} processes that {launch.launcher} "
        f"announced (at {host}:{port}) within {argument('timeout_s')}{timeout_s:g} s (under "
        f"Slurm, start all processes with srun): {error}"
    )


def _welcome(
    store: Store, size: int, deadline: float, error: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Runs rank 0's part of the meeting: hands out a new prefix until every rank has joined.

    Args:
        store: the store that all attempts share.
        size: the number of processes.
        deadline: when to give up, on the monotonic clock.
        error: an error of rank 0, which ends the run.

    Returns:
        the prefix, and the outcome with the keys `missing` and `error`.
    """
    prefix = uuid.uuid4().hex
    answered: dict[int, bytes] = {}
    joined: dict[int, ProcessId] = {}
    ended: list[int] = []
    pending = set(range(1, size))
    say_at = time.monotonic() + _SAY_AFTER_S
    while pending and time.monotonic() < deadline:
        for rank in sorted(pending):
            if store.check([f"hello/{rank}"]):
                # Read again in each round: a process that was restarted before it joined has drawn
                # a new one.
                hello = store.get(f"hello/{rank}")
                if answered.get(rank) != hello:
                    store.set(f"welcome/{hello.decode()}", prefix)
                    answered[rank] = hello
                failed = f"failed/{hello.decode()}"
                # Before `joined`: a process that has failed joins too, to read the outcome, and is
                # then no longer pending.
                if error is None and store.check([failed]):
                    line = store.get(failed).decode()
                    error = f"rank {rank} failed before joining the other processes: {line}"
                    # A few seconds more, in which the others join and so learn of the error.
                    deadline = min(deadline, time.monotonic() + _TELL_S)
            if store.check([f"{prefix}/joined/{rank}"]):
                joined[rank] = ProcessId(*json.loads(store.get(f"{prefix}/joined/{rank}")))
                pending.discard(rank)
        ended = [rank for rank, process in joined.items() if has_ended(process)]
        if error is None and pending and ended:
            process = joined[ended[0]]
            error = (
                f"rank {ended[0]} (process {process.pid} on {process.host}) ended before all "
                f"{size} processes had joined: check its output"
            )
            deadline = min(deadline, time.monotonic() + _TELL_S)
        if pending and time.monotonic() > say_at:
            say_at = math.inf
            ranks = f"rank{'s' * (len(pending) > 1)} {', '.join(map(str, sorted(pending)))}"
            text = f"rank 0 is waiting for {ranks} of {size} processes to join"
            try_to_write(partial(_log.warning, text))
        time.sleep(_POLL_S)
    # Set also after success: the others wait for this key, so no process leaves before all have
    # joined.
    outcome = {"missing": sorted(pending), "error": error}
    store.set(f"{prefix}/outcome", json.dumps(outcome))
    if error is not None or pending:  # the store may shut down with this process
        leave_keys = [f"{prefix}/left/{rank}" for rank in joined if rank not in ended]
        wait_until(lambda: not leave_keys or store.check(leave_keys), _TELL_S)
    return prefix, outcome


def _arrive(
    store: Store,
    launch: Launch,
    deadline: float,
    error: str | None = None,
    on_welcome: Callable[[], object] = lambda: None,
) -> tuple[str, dict[str, Any]]:
    """Runs the other ranks' part of the meeting: asks for the prefix, joins, awaits the outcome.

    Args:
        store: the store that all attempts share.
        launch: the launcher's facts about this process.
        deadline: when to give up, on the monotonic clock.
        error: an error of this process, which ends the run.
        on_welcome: called when rank 0 has answered; it then says for whom all wait.

    Returns:
        the prefix, and the outcome with the keys `missing` and `error`.
    """
    rank, hello = launch.rank, uuid.uuid4().hex
    if error is not None:
        # Before the hello: rank 0 looks for it when it reads the hello, and would otherwise let
        # this process join first.
        store.set(f"failed/{hello}", error)
    store.set(f"hello/{rank}", hello)

    def remaining() -> timedelta:
        # At least a second: a timeout of 0 means no timeout to PyTorch's stores.
        return timedelta(seconds=max(1.0, deadline - time.monotonic()))

    try:
        store.wait([f"welcome/{hello}"], remaining())
        on_welcome()
        prefix = str(store.get(f"welcome/{hello}"), "utf-8")
        # Its value is the process ID, by which rank 0 notices that this process ends before all
        # have joined.
        store.set(f"{prefix}/joined/{rank}", json.dumps(this_process()))
        # rank 0 gives up at about the same deadline
        store.wait([f"{prefix}/outcome"], remaining() + timedelta(seconds=_TELL_S))
    except RuntimeError as waited:
        raise WorldError(
            f"rank {rank} timed out ({argument('timeout_s')}) waiting for rank 0 to join; check "
            "rank 0's output"
        ) from waited
    outcome = json.loads(store.get(f"{prefix}/outcome"))
    if outcome["error"] is not None or outcome["missing"]:
        # the last access to the store: rank 0 waits for it and then ends with the store
        with suppress(RuntimeError):
            store.set(f"{prefix}/left/{rank}", "")
    return prefix, outcome


# gloo listens on the interface that this variable names, or on the address of the host name. On
# Debian or Ubuntu without DNS that address is 127.0.1.1, and gloo then waits for minutes.
_VARIABLE = "GLOO_SOCKET_IFNAME"


def check_interface(environ: Mapping[str, str]) -> None:
    """Checks the network interfaces that the environment names for gloo.

    Raises:
        WorldError: this host lacks one of them.
    """
    chosen, interfaces = environ.get(_VARIABLE, ""), _interfaces()
    missing = [name for name in chosen.split(",") if name and name not in interfaces]
    if missing:
        raise WorldError(
            f"{_VARIABLE}={chosen}: the host {socket.gethostname()} has no network interface "
            f"{missing[0]}; it has: {', '.join(interfaces)}"
        )


def check_reachable(store: Store, launch: Launch, environ: Mapping[str, str]) -> None:
    """Checks that the other hosts can reach each host's address for gloo; a collective call.

    Raises:
        WorldError: a host has only a loopback address; names it and its interfaces. Rank 0 reports
            the error, and the other ranks raise copies.
    """
    if launch.size == launch.local_size:  # on one host
        return
    address = [socket.gethostname(), _is_loopback(environ), _interfaces()]
    store.set(f"address/{launch.rank}", json.dumps(address))
    # `get` waits for each rank, and all publish before they read.
    addresses = [json.loads(store.get(f"address/{rank}")) for rank in range(launch.size)]
    # Several launchers on one host: their processes reach each other by its loopback address.
    if len({host for host, _, _ in addresses}) == 1:
        return
    for host, loopback, interfaces in addresses:
        if loopback:
            raise _error(
                launch,
                f"the host name {host} resolves to {loopback} on that host, which other hosts "
                f"cannot reach: set {_VARIABLE} to the network interface between the hosts (it "
                f"has {', '.join(interfaces)}), or fix its /etc/hosts",
            )


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _is_loopback(environ: Mapping[str, str]) -> str | None:
    """Returns the address that gloo would use if it is a loopback address, else None."""
    if environ.get(_VARIABLE):
        return None
    with suppress(OSError, ValueError):
        addresses = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        address = str(addresses[0][4][0])
        if ipaddress.ip_address(address).is_loopback:
            return address
    return None
