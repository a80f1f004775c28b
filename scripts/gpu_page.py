"""Writes what was measured on GPUs into docs/benchmarks.md: `python scripts/gpu_page.py [FILES]`.

The source is docs/assets/gpu.json, a list of runs. FILES are tables of `scripts/gpu_check.sh`
(gpu_check.json, gpu_check_processes.json), which are added to it. `--check` writes nothing and
fails if the page is out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, SOURCE = ROOT / "docs/benchmarks.md", ROOT / "docs/assets/gpu.json"
BEGIN, END = "<!-- gpu: made by scripts/gpu_page.py -->\n", "<!-- end -->"


def section(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the Markdown of all runs, in their order."""
    return "\n".join(map(_one_run, runs))


def _one_run(run: Mapping[str, Any]) -> str:
    lines = [
        f"**{run['gpus']}, {run['date']}** (hybridtrain {run['version']}, torch {run['torch']}, "
        f"CUDA {run['cuda']}). {run.get('note', '')}".rstrip(),
        "",
        "| what | setting | result | compared with |",
        "|---|---|---|---|",
    ]
    before = None
    for row in run["rows"]:
        good = row["verdict"] in ("", "ok")
        result = row["result"] if good else f"{row['result']} (**{row['verdict']}**)".lstrip()
        cells = [
            "" if row["check"] == before else row["check"],
            row["setting"],
            result,
            row["beside"],
        ]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        before = row["check"]
    lines += ["", f"Not shown by this machine: {'; '.join(run['not_shown'])}."]
    if run["cut_off"]:
        lines += [f"Not run to the end: {', '.join(run['cut_off'])}."]
    return "\n".join(lines) + "\n"


def page_with(page: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of the page with the section of `runs`."""
    head, _, rest = page.partition(BEGIN)
    return head + BEGIN + "\n" + section(runs) + "\n" + END + rest.partition(END)[2]


def main(arguments: Sequence[str], source: Path = SOURCE, page: Path = PAGE) -> int:
    """Adds the files to the source, and writes the page or compares it."""
    check = "--check" in arguments
    runs = json.loads(source.read_text(encoding="utf-8"))
    runs += [
        json.loads(Path(name).read_text(encoding="utf-8"))
        for name in arguments
        if name != "--check"
    ]
    text = page.read_text(encoding="utf-8")
    written = page_with(text, runs)
    if check:
        if written != text:
            print(f"{page.name} is out of date: run scripts/gpu_page.py")
        return int(written != text)
    source.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    page.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
