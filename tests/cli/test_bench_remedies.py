"""`python -m scripts.bench.remedies`: its table, with the smallest sizes."""

import os
import sys

import pytest
from cli_runs import succeed

from scripts.bench import remedies

SIZES = ["--steps", "2", "--vocabulary", "128", "--layers", "2", "--width", "64", "--tokens", "32"]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["with `pipeline.offload=inputs`"], id="one"),
        pytest.param(list(remedies.REMEDIES), id="all", marks=pytest.mark.thorough),
    ],
)
def test_each_remedy_has_a_row_with_its_memory_its_time_and_its_loss(names, monkeypatch, capfd):
    pytest.importorskip("transformers")
    if len(names) > 1:
        pytest.importorskip("bitsandbytes")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # is restored
    printed = []
    monkeypatch.setattr(remedies, "hybridtrain", lambda words: succeed(capfd, *words))
    monkeypatch.setattr(remedies, "print_table", lambda head, rows: printed.extend(rows))
    monkeypatch.setattr(sys, "argv", ["remedies", *SIZES, "--only", *names])
    remedies.main()
    assert [row[0] for row in printed] == [
        name for name in remedies.REMEDIES if any(part in name for part in names)
    ]
    assert all(float(number) > 0 for row in printed for number in row[2:])
