"""Signals outside of training: one line, also where an error is being reported already."""

import json
import os
import signal
from types import SimpleNamespace
from typing import NoReturn

import pytest

from hybridtrain._base.torch_private import HashStore
from hybridtrain.cli.run import errors as error_report
from hybridtrain.launch import Failure, ProcessStore, Watchdog, signals, this_process


@pytest.fixture
def caught():
    signals.raise_on_signals()
    yield
    signals.restore_signals()


def test_a_signal_ends_the_command_with_its_name(caught: None) -> None:
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_while_an_error_is_reported_does_not_hide_it(
    caught: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def log(error: BaseException) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # as a launcher does when another process has died

    monkeypatch.setattr(error_report, "_write_to_log", log)
    assert error_report.report(ArithmeticError("boom")) == 1
    assert "ArithmeticError: boom" in capsys.readouterr().err


class Ended(BaseException):
    """In place of the end of this process."""


def test_a_signal_while_the_cause_is_looked_for_in_other_processes_does_not_hide_the_error(
    caught: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(code: int) -> NoReturn:
        raise Ended(code)

    store = HashStore()
    store.set("process/1", json.dumps(this_process()))
    store.set("heard/1", "")
    watchdog = Watchdog(ProcessStore(store, 0, 2), 10, 600)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(error_report, "current", lambda: watchdog)
    monkeypatch.setattr(error_report, "_launch", lambda: SimpleNamespace(rank=0, size=2))

    def signalled(failure: Failure, *_: object) -> tuple[Failure, bool]:
        os.kill(os.getpid(), signal.SIGTERM)
        return failure, False

    monkeypatch.setattr(error_report, "first_failure", signalled)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(Ended, match="1"):
            error_report.report(ArithmeticError("boom"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "ArithmeticError: boom" in capsys.readouterr().err
