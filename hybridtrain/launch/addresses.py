"""The addresses at which gloo listens: said in time where other hosts cannot reach them.

gloo takes the interface that GLOO_SOCKET_IFNAME names, or the address that the host's own name
stands for. That is 127.0.1.1 on a Debian or Ubuntu without DNS, and gloo then waits for minutes.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Mapping
from contextlib import suppress

from hybridtrain._torch_private import Store
from hybridtrain.errors import Rank0UserError, WorldError
from hybridtrain.launch.environment import Launch

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
        WorldError: one has none; names the host and the interfaces to choose from. It is a
            Rank0UserError too on the other ranks.
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
            kind = WorldError if launch.rank == 0 else _ToldByRank0
            raise kind(
                f"the name of the host {host} stands for {loopback} there, which no other host can "
                f"reach: set {_VARIABLE} to the network interface between the hosts (it has "
                f"{', '.join(interfaces)}), or mend its /etc/hosts"
            )


class _ToldByRank0(Rank0UserError, WorldError):
    """The report of rank 0, on the other ranks."""


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
