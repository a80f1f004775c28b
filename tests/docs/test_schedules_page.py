"""The pictures and tables of the pages on schedules are those of the schedules that there are."""

from __future__ import annotations

import pytest

from hybridtrain.schedule import registered, schedule_names
from scripts import schedules


def test_the_page_of_schedules_is_what_its_script_makes(capsys: pytest.CaptureFixture[str]) -> None:
    assert schedules.main(["--check"]) == 0, capsys.readouterr().out


def test_the_page_of_schedules_has_every_schedule_of_the_package() -> None:
    shown = {name for name, _ in schedules.SCHEDULES.values()}
    built_in = (
        n for n in schedule_names() if registered(n).builder.__module__[:11] == "hybridtrain"
    )
    assert shown == set(built_in)
