"""The page on the configuration has every key, with its default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from pages import ROOT

from hybridtrain.app.compose import compose_config
from scripts import options

PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
OPEN_GROUPS = ("model", "data", "optim", "lr_schedule")


def rows(first: str) -> list[list[str]]:
    """Returns the cells of the tables whose first column is headed `first`."""
    tables = re.findall(rf"^\| {first} \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", PAGE, re.M)
    lines = [line for table in tables for line in table.splitlines()]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def documented() -> dict[str, object]:
    """Returns each key of the page with its default."""
    cells = {key.strip("`"): default.strip("`") for key, default, *_ in rows("key")}
    return {key: yaml.safe_load(default) for key, default in cells.items()}


def test_every_key_is_on_the_page_with_its_default() -> None:
    config = OmegaConf.to_container(OmegaConf.structured(compose_config([])))
    actual: dict[str, object] = {"recipe": None}
    for name, value in config.items():
        if name not in OPEN_GROUPS:
            inner = value.items() if isinstance(value, dict) else [(None, value)]
            actual |= {f"{name}.{key}" if key else name: default for key, default in inner}
    actual["run_name"] = None  # composed: `run`
    # `data=digits` has no keys but the loader's
    common = {"data": config["data"], "lr_schedule": {"warmup_steps": 0}}
    for group, keys in common.items():
        actual |= {f"{group}.{k}": v for k, v in keys.items() if k != "_target_"}
    assert documented() == actual


def test_a_key_is_told_by_one_text_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert options.main(check=True) == 0, capsys.readouterr().out


@pytest.mark.parametrize("group", OPEN_GROUPS)
def test_every_option_of_a_group_is_on_the_page_with_its_keys(group: str) -> None:
    shared = {key.partition(".")[2] for key in documented() if key.startswith(f"{group}.")}
    actual = {
        path.stem: sorted(set(yaml.safe_load(path.read_text())) - {"_target_"} - shared)
        for path in Path(ROOT / "configs" / group).glob("*.yaml")
    }
    listed = {
        cells[0].strip("`").partition("=")[2]: sorted(re.findall(r"`(\w+)`", cells[1]))
        for cells in rows("option")
        if cells[0].startswith(f"`{group}=")
    }
    assert listed == actual
