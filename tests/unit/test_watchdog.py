"""The judgement of the watchdog: who has ended, how long what may take, what it waits for."""

from hybridtrain.launch import processes
from hybridtrain.launch.processes import has_ended, is_stopped, kill, this_process


def test_a_process_of_another_container_is_never_taken_for_one_of_this_host(monkeypatch):
    # the pid of nobody here, and this process's own pid
    gone = this_process()._replace(pid=2**22 + 1, namespace="pid:[1]")
    same = this_process()._replace(namespace="pid:[1]")
    killed = []
    monkeypatch.setattr(processes.os, "kill", lambda pid, number: killed.append(pid))
    assert not has_ended(gone)
    assert not has_ended(same)
    assert not is_stopped(same)
    kill(same)
    assert not killed
    assert has_ended(this_process()._replace(pid=2**22 + 1))
