"""How processes meet: who is another run's, who has failed before, what is told once."""

import gc
import re
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import socket

import pytest

from hybridtrain._base import torch_private as _torch_private
from hybridtrain._base.problem import copied_problem
from hybridtrain._base.torch_private import HashStore
from hybridtrain.errors import WorldError
from hybridtrain.launch import Launch, environment, free_port, meet, meeting, tell_failure
from hybridtrain.launch.process_id import this_process


def launches(size, run="Slurm job 1, step 0, attempt 0"):
    port = free_port()
    return [Launch("slurm", r, size, r, size, ("127.0.0.1", port), run=run) for r in range(size)]


def test_a_port_to_meet_at_is_none_that_linux_gives_to_connections():
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not any(first <= free_port() <= last for _ in range(50))


def test_a_host_without_a_free_port_is_an_error(monkeypatch):
    with socket() as other:
        other.bind(("", free_port()))
        monkeypatch.setattr(environment, "_PORTS", [other.getsockname()[1]])
        with pytest.raises(WorldError, match="no free port among 100"):
            free_port()


def together(*calls):
    """The results of functions that are called at once, or their exceptions."""

    def call(function):
        try:
            return function()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(call, calls))


def joins(launch, timeout_s=30):
    return lambda: meet(launch, {}, timeout_s)


def fails(launch, line, seconds=10):
    return lambda: tell_failure(launch, {}, line, seconds)


def test_processes_of_one_run_share_a_store():
    first, second = together(*map(joins, launches(2)))
    first.set("x", "of rank 0")
    assert second.get("x") == b"of rank 0"


def test_a_process_of_another_run_that_finds_the_store_is_told_whose_it_is():
    here, _ = launches(2)
    stranger = Launch("slurm", 1, 2, 1, 2, here.master, run="Slurm job 1, step 1, attempt 0")
    stop = threading.Event()

    def rank_0():
        with pytest.raises(WorldError, match="rank 1 of the 2"):
            meet(here, {}, 2)
        stop.set()

    _, found = together(rank_0, joins(stranger))
    assert isinstance(found, WorldError)
    assert re.search(r"used by Slurm job 1, step 0, .* this is Slurm job 1, step 1", str(found))
    assert "set MASTER_PORT" in str(found)
    assert stop.is_set()


def test_a_port_that_another_program_uses_is_named():
    here, _ = launches(2)
    with socket() as other:
        other.bind(("", here.master[1]))
        other.listen()
        with pytest.raises(WorldError, match=rf"port {here.master[1]} on .* set MASTER_PORT"):
            meet(here, {}, 2)


def test_a_mistake_of_all_processes_is_told_by_rank_0_alone():
    said = together(*(fails(each, "no such key") for each in launches(3)))
    assert said == ["no such key"] * 3


def test_rank_0_hears_of_a_process_that_fails_before_it_joins():
    zero, one, two = launches(3)
    found = together(joins(zero), fails(one, "its disk is full"), joins(two))
    assert isinstance(found[0], WorldError)
    assert copied_problem(found[0]) is None
    assert re.match(r"rank 1 failed before .*: its disk is full", str(found[0]))
    assert copied_problem(found[2]) is not None  # rank 0 tells it
    assert isinstance(found[2], WorldError)
    assert "its disk is full" in found[1]


def test_a_process_that_ends_while_the_others_are_awaited_is_named_at_once(monkeypatch):
    child = subprocess.Popen(["true"])
    child.wait()
    dead = this_process()._replace(pid=child.pid)
    monkeypatch.setattr(meeting, "this_process", lambda: dead)
    monkeypatch.setattr(meeting, "_TELL_S", 0.5)
    zero, one, _ = launches(3)
    error, _ = together(joins(zero, timeout_s=600), joins(one, timeout_s=600))
    assert isinstance(error, WorldError)
    assert f"rank 1 (process {child.pid} on {dead.host}) ended before all 3" in str(error)


def test_the_others_say_that_they_wait_for_rank_0_and_where(monkeypatch, caplog):
    monkeypatch.setattr(meeting, "_SAY_AFTER_S", 0.0)
    _, one = launches(2)
    with pytest.raises(WorldError, match="rank 1 could not join"):
        meet(one, {}, 0.5)
    where = ":".join(map(str, one.master))
    assert f"rank 1 is waiting for rank 0 to serve the rendezvous at {where}" in caplog.text


def test_a_server_that_answers_nothing_is_waited_for_no_longer_than_the_limit(monkeypatch):
    monkeypatch.setattr(meeting, "_TELL_S", 0.1)
    _, one = launches(2)
    with socket() as mute:
        mute.bind(one.master)
        mute.listen()
        with pytest.raises(WorldError, match="rank 1 could not join"):
            meet(one, {}, 0.5)


def test_rank_0_says_which_ranks_it_waits_for(monkeypatch, caplog):
    monkeypatch.setattr(meeting, "_SAY_AFTER_S", 0.0)
    zero, one, _ = launches(3)
    together(joins(zero, timeout_s=1), joins(one, timeout_s=1))
    (line,) = [
        record.getMessage() for record in caplog.records if "rank 0 is waiting" in record.msg
    ]
    assert line in (
        "rank 0 is waiting for ranks 1, 2 of 3 processes to join",
        "rank 0 is waiting for rank 2 of 3 processes to join",
    )


def test_an_error_of_rank_0_reaches_those_that_wait_for_it():
    zero, one = launches(2)
    _, found = together(fails(zero, "its disk is full"), joins(one))
    assert copied_problem(found) is not None
    assert str(found) == "its disk is full"


@pytest.mark.parametrize("joiner", [joins, lambda launch: fails(launch, "the same")])
def test_an_error_of_rank_0_reaches_a_process_that_looks_when_rank_0_has_ended(monkeypatch, joiner):
    ended = threading.Event()

    class Slow(_torch_private.PrefixStore):
        """Goes on after its last word to rank 0 when that has ended, and the store with it."""

        def set(self, key, value):
            super().set(key, value)
            if "/left/" in key:
                assert ended.wait(30)

    def rank_0():
        tell_failure(zero, {}, "its disk is full", 10)
        gc.collect()
        ended.set()

    zero, one = launches(2)
    monkeypatch.setattr(_torch_private, "PrefixStore", Slow)
    _, found = together(rank_0, joiner(one))
    assert str(found) == "its disk is full"


def test_a_process_that_does_not_come_is_named_once():
    zero, one, _ = launches(3)
    found = together(joins(zero, 1), joins(one, 1))
    assert "rank 2 of the 3 processes" in str(found[0])
    assert copied_problem(found[1]) is not None


def test_an_interface_that_this_host_lacks_is_an_error_that_lists_the_others(monkeypatch):
    monkeypatch.setattr(meeting.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    meeting.check_interface({})
    meeting.check_interface({"GLOO_SOCKET_IFNAME": "eth0,lo"})
    with pytest.raises(WorldError, match=r"_IFNAME=ib0: .* interface ib0; it has: lo, eth0"):
        meeting.check_interface({"GLOO_SOCKET_IFNAME": "ib0"})


@pytest.mark.parametrize("hosts", [("n1", "n1"), ("n1", "n2")])
def test_a_host_whose_name_stands_for_itself_alone_is_an_error_between_hosts(monkeypatch, hosts):
    here = threading.local()
    address = {"n1": "10.0.0.1", "n2": "127.0.1.1"}
    monkeypatch.setattr(meeting.socket, "gethostname", lambda: here.name)
    monkeypatch.setattr(
        meeting.socket, "getaddrinfo", lambda name, *_, **__: [(0, 0, 0, "", (address[name], 0))]
    )
    store = HashStore()

    def check(rank, environ):
        here.name = hosts[rank]
        meeting.check_reachable(store, Launch("slurm", rank, 2, 0, 1, None), environ)

    found = together(lambda: check(0, {}), lambda: check(1, {}))
    if hosts == ("n1", "n1"):
        assert found == [None, None]
        return
    for error in found:
        assert isinstance(error, WorldError)
        assert re.search(r"host.* n2 .* 127\.0\.1\.1", str(error))
        assert "set GLOO_SOCKET_IFNAME" in str(error)
    assert [copied_problem(error) is not None for error in found] == [False, True]
    store = HashStore()
    chosen = {"GLOO_SOCKET_IFNAME": "lo"}
    assert together(lambda: check(0, chosen), lambda: check(1, chosen)) == [None, None]
