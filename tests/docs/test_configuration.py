"""The pages and files that are made of the keys' own texts."""

from __future__ import annotations

import re

import pytest
from omegaconf import OmegaConf
from pages import ROOT

from hybridtrain.cli.config.compose import compose_config
from scripts import options


def test_a_key_is_told_by_one_text_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert options.main(check=True) == 0, capsys.readouterr().out


def test_the_page_of_options_has_every_key_and_every_option_of_a_group() -> None:
    page = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([\w.]+)` \|", page, re.M))
    config = OmegaConf.to_container(OmegaConf.structured(compose_config([])))
    assert isinstance(config, dict)
    for group, value in config.items():
        keys = [f"{group}.{key}" for key in value] if isinstance(value, dict) else [group]
        told = {
            *listed,
            *(f"{each}._target_" for each in ("model", "data", "optim", "lr_schedule")),
        }
        assert set(keys) <= told or group == "hardware"
    for group in ("model", "data", "optim", "lr_schedule"):
        for path in (ROOT / "configs" / group).glob("*.yaml"):
            assert f"### {group}={path.stem}\n" in page


def test_every_key_of_an_option_says_what_it_means() -> None:
    page = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    silent = re.findall(r"^\| `([\w.]+)` \| [^|]*\| `[^`]*` \| \|$", page, re.M)
    assert silent == []
