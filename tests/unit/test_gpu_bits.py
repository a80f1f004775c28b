"""`scripts/gpu_bits.py` in its small form, on the CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import forked
from support.launch import environment

from scripts import gpu_bits

SMALL = ("--device", "cpu", "--small", "--steps", "4")


def test_the_small_form_ends_with_the_same_bits_on_one_and_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_ranks(processes: int, arguments: Any) -> int:
        status, output = forked.run(
            processes, Path(gpu_bits.__file__), arguments, environment(), timeout=200
        )
        assert status == 0, output
        return status

    monkeypatch.setattr(gpu_bits, "run_ranks", run_ranks)
    table = tmp_path / "bits.json"
    assert gpu_bits.main([*SMALL, "--processes", "1", "2", "--json", str(table)]) == 0
    assert "the same bits" in capsys.readouterr().out
    rows = json.loads(table.read_text())["rows"]
    assert [(row["setting"], row["verdict"]) for row in rows] == [
        *(("1 process", "ok"), ("2 processes", "ok"), ("1 process", ""))
    ]


def result(digest: str, seconds: float) -> dict[str, Any]:
    return {"digest": digest, "step_s": seconds, "loss": 2.0}


@pytest.mark.parametrize(
    ("digest", "seconds", "failed"),
    [("a", 1.04, []), ("b", 1.04, ["4 processes"]), ("a", 1.06, ["1 process"])],
)
def test_other_bits_and_too_high_a_cost_are_failures(
    digest: str, seconds: float, failed: list[str]
) -> None:
    results = {"default": result("of another run", 1.0), "1": result("a", seconds)}
    results["4"] = result(digest, 9.0)  # processes share the GPU
    rows = gpu_bits.rows_of(results, 50, gpu_bits.MOST_COST)
    assert [row[1] for row in rows if row[-1] != "ok"] == failed
