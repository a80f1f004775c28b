"""Signals outside of training: one line, also where an error is being reported already."""

import os
import signal

import pytest

from hybridtrain.app import error_report
from hybridtrain.launch import early_signals


@pytest.fixture
def caught():
    early_signals.catch()
    yield
    early_signals.restore()


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
