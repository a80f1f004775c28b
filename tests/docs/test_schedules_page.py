"""The pictures and tables of the pages on schedules are those of the schedules that there are."""

from __future__ import annotations

import pytest
from support.schedules import BUILT_IN

from scripts import schedules


def test_the_page_of_schedules_is_what_its_script_makes(capsys: pytest.CaptureFixture[str]) -> None:
    assert schedules.main(["--check"]) == 0, capsys.readouterr().out


def test_the_page_of_schedules_has_every_schedule_of_the_package() -> None:
    shown = {name for name, _ in schedules.SCHEDULES.values()}
    assert shown == set(BUILT_IN)
