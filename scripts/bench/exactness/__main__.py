"""Which systems train the model that one has written? A table of systems by cases.

    python -m scripts.bench.exactness                                # everything, half an hour
    python -m scripts.bench.exactness --systems hybridtrain fabric --cases dropout padded

Every cell has processes of its own and a deadline. Its weights are compared with those of the
unsplit model in plain PyTorch. `--page docs/exactness.md` writes the page of the documentation;
with `--keep`, a command that was interrupted continues.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from tqdm import tqdm

from scripts.bench.common import print_footer
from scripts.bench.exactness.cases import CASES
from scripts.bench.exactness.measure import Result, measure, same_draws
from scripts.bench.exactness.systems import SYSTEMS
from scripts.bench.exactness.table import page
from scripts.bench.exactness.worker import preload

# The results by case and system.
Kept = dict[tuple[str, str], list[Result]]


def results_of(case: str, system: str, deadline_s: float) -> list[Result]:
    """Returns the result of a cell and, if the documentation has a remedy, the result with it."""
    if SYSTEMS[system].version is None:
        return [Result("not installed")]
    if reason := SYSTEMS[system].not_applicable.get(case):
        return [Result("n/a", reason[0].upper() + reason[1:] + ".")]
    ways = ["plain", "remedy"] if case in SYSTEMS[system].remedies else ["plain"]
    return [measure(system, case, way, deadline_s) for way in ways]


def _read(file: Path) -> Kept:
    rows = json.loads(file.read_text(encoding="utf-8"))
    return {(case, system): [Result(*row) for row in results] for case, system, results in rows}


def _write(file: Path, kept: Kept) -> None:
    rows = [[*key, [astuple(result) for result in results]] for key, results in kept.items()]
    file.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def main(words: Sequence[str] | None = None) -> None:
    """Measures the cells and prints the page, or writes it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--deadline-s", type=float, default=90.0, help="for one cell")
    parser.add_argument("--keep", type=Path, help="a file for cells; those in it are not run again")
    parser.add_argument("--page", type=Path, help="a file for the page; default: printed")
    options = parser.parse_args(words)
    kept: Kept = {}
    if options.keep is not None and options.keep.exists():
        kept = _read(options.keep)
    cells: Kept = {}
    preload(SYSTEMS[system].module for system in options.systems)
    bar = tqdm([(case, system) for case in options.cases for system in options.systems])
    for case, system in bar:
        bar.set_description(f"{case} {system}")
        if (case, system) not in kept:
            kept[case, system] = results_of(case, system, options.deadline_s)
            if options.keep is not None:
                _write(options.keep, kept)
        cells[case, system] = kept[case, system]
    for (case, system), results in cells.items():
        if CASES[case].same_draws and ("dropout", system) in cells:
            base = cells["dropout", system][0]
            cells[case, system] = [same_draws(result, base) for result in results]
    footer = io.StringIO()
    with contextlib.redirect_stdout(footer):
        print_footer(f"New processes for each cell, deadline {options.deadline_s:g} s.")
    text = page(cells, footer.getvalue())
    if options.page is None:
        print(text)
    else:
        options.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
