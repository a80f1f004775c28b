"""Colour and the last lines of a run, on a terminal and elsewhere."""

import io
import re
from contextlib import redirect_stderr

import pytest
import torch
from cli_runs import succeed
from support.launch import SMALL

from hybridtrain.cli import main

RED_ERROR = "\x1b[1;31merror:\x1b[0m "


class Screen(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _that_takes_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def shown_by(*words: str, code: int = 0) -> str:
    """Returns what a command that ends with `code` writes to a terminal."""
    with redirect_stderr(Screen()) as screen:
        assert main(words) == code
    return screen.getvalue()


def test_the_result_of_a_run_is_last_bold_and_apart_from_the_advice() -> None:
    lines = re.split(r"[\r\n]", shown_by(*SMALL, "monitor.report=false").rstrip("\n"))
    assert re.fullmatch(r"\x1b\[1mdone: 6 steps, loss \S+  accuracy \S+\x1b\[0m", lines[-1])
    assert lines[-2] == ""
    assert lines[-3].startswith("dashboard: ")


@pytest.mark.thorough
def test_the_word_error_is_red_on_a_terminal() -> None:
    assert shown_by("recipe=digit", code=2).startswith(f"{RED_ERROR}recipe=digit is unknown")
    said = shown_by(*SMALL, "optim.lr=-1,-2", "--multirun", code=2)
    assert said.count(f"\n{RED_ERROR}optim.lr") == 2


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
@pytest.mark.quick_cases(1)
def test_no_colour_where_the_user_or_the_terminal_wants_none(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert shown_by("recipe=digit", code=2).startswith("error: recipe=digit is unknown")


@pytest.mark.thorough
def test_no_colour_in_a_file(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "monitor.report=false"]) == 0
    said = capfd.readouterr().err
    assert "\x1b" not in said
    assert re.search(r"\n\ndone: 6 steps, loss \S+  accuracy \S+\n$", said)


def test_a_run_that_leaves_the_only_gpu_out_says_how_to_use_it(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    words = ["trainer.steps=1", "world.devices=auto", f"output_dir={tmp_path}"]
    told = succeed(capfd, *SMALL, *words)
    line = (
        "training on the CPU: pipeline.nb_part=2 needs 2 GPUs, but this machine has 1 GPU; to "
        "train on it, set pipeline.nb_part=1 or world.devices=[cuda:0,cuda:0]"
    )
    assert told.count(line) == 1
