"""The benchmark grid of the IDRIS page on hybrid parallelism: predicted, emulated and measured.

    python -m scripts.bench.grid --predict --hardware jean-zay-v100
    python -m scripts.bench.grid --emulated --devices 4
    python -m scripts.bench.grid --real --devices 2 --batch 8 16 data.max_len=64

Each cell is samples per second over all devices. Writes a heat map for each number of devices and a
table to `--out`; measured cells are also kept in a file, and a command that was interrupted goes on
with those that it has not. Further arguments are overrides of the recipe.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from hybridtrain.errors import ConfigError
from scripts.bench.common import print_footer
from scripts.bench.grid.cells import BATCHES, CHUNKS, DEVICES, Cell, grid
from scripts.bench.grid.draw import heat_map
from scripts.bench.grid.measure import (
    TORCHRUN,
    Task,
    emulated_task,
    launch_cell,
    measure,
    real_task,
    why_not_here,
)
from scripts.bench.grid.predict import Predictor, make_predictor
from scripts.bench.grid.results import Outcome, Results
from scripts.bench.grid.tables import as_csv, as_markdown, rows


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--predict", action="store_true", help="the planner's prices, without running anything")
    add("--emulated", action="store_true", help="devices that sleep for their predicted times")
    add("--real", action="store_true", help="training steps on this machine's GPUs, or its CPU")
    add("--hardware", default="jean-zay-v100", help="a preset, a file or this-machine")
    add("--devices", type=int, nargs="+", default=DEVICES)
    add("--ntasks", type=int, nargs="+", help="processes; default: pipelines of 4, 2 and 1 devices")
    add("--batch", type=int, nargs="+", default=BATCHES, help="samples per device")
    add("--chunks", type=int, nargs="+", default=CHUNKS)
    add("--schedule", choices=("1f1b", "gpipe"), default="1f1b")
    add("--steps", type=int, default=3, help="timed steps per cell, of which the median counts")
    add("--step-s", type=float, default=0.5, help="seconds of an emulated step")
    add("--timeout-s", type=float, default=300.0, help="for one cell")
    add("--retry", action="store_true", help="run cells again that have failed")
    add("--launcher", default=TORCHRUN, help="starts Python in {ntasks} processes on {nodes} nodes")
    add("--out", type=Path, default=Path("outputs/grid"))
    add("overrides", nargs="*", help="of the recipe, such as model.d_model=1024")
    options = parser.parse_intermixed_args(words)
    if not (options.predict or options.emulated or options.real):
        parser.error("choose --predict, --emulated or --real")
    return options


def main(words: Sequence[str] | None = None) -> None:
    """Runs what was asked for, and prints the tables."""
    options = arguments(words)
    torch.set_num_threads(1)  # a device of a CPU is a thread
    cells = grid(options.devices, options.batch, options.chunks, options.ntasks)
    predictor = make_predictor(options.hardware, options.overrides, options.schedule)
    if options.predict:
        outcomes = [predictor.outcome(cell) for cell in cells]
        write(options, predictor, "predicted", f"predicted for {options.hardware}", outcomes)
    if options.emulated:
        if predictor.table.costs_from == "measured":
            raise ConfigError(
                "--emulated sleeps for estimated times, which are the same in every run: choose a "
                "--hardware= with costs=estimated, or set hardware.costs=estimated"
            )
        outcomes = run(
            options,
            predictor,
            cells,
            "emulated",
            predictor.why_impossible,
            lambda cell: emulated_task(predictor, cell, options.steps, options.step_s),
        )
        on = f"measured on devices that sleep as {options.hardware} computes"
        write(options, predictor, "emulated", on, outcomes, predictor.emulated_ms)
    if options.real:
        outcomes = run(
            options,
            predictor,
            cells,
            "real",
            lambda cell: predictor.why_impossible(cell) or why_not_here(cell),
            lambda cell: real_task(predictor, cell, options.steps, options.overrides),
        )
        names = {outcome.facts["device"] for outcome in outcomes if "device" in outcome.facts}
        on = f"measured on {' and '.join(sorted(names)) or 'nothing'}"
        write(options, predictor, "real", on, outcomes, lambda cell: predictor.price(cell).step_ms)
    print_footer("Samples per second over all devices; an epoch has 25,000 reviews.")


def run(
    options: argparse.Namespace,
    predictor: Predictor,
    cells: Sequence[Cell],
    kind: str,
    why_impossible: Callable[[Cell], str],
    task_of: Callable[[Cell], Task],
) -> list[Outcome]:
    """Returns the measured outcomes of all cells."""
    launch = partial(
        launch_cell,
        logs=options.out / "logs",
        timeout_s=options.timeout_s,
        launcher=options.launcher,
        devices_per_node=predictor.hardware.devices_per_node,
    )
    results = Results(options.out / f"{kind}.jsonl")
    return measure(cells, why_impossible, task_of, launch, results, options.retry)


def write(
    options: argparse.Namespace,
    predictor: Predictor,
    kind: str,
    on: str,
    outcomes: Sequence[Outcome],
    predicted_ms: Callable[[Cell], float] | None = None,
) -> None:
    """Writes the tables and figures of one kind of outcome, and prints the table."""
    options.out.mkdir(parents=True, exist_ok=True)
    lines = rows(outcomes, predicted_ms)
    print(f"## {kind}\n\n{as_markdown(lines)}")
    (options.out / f"{kind}.csv").write_text(as_csv(lines), encoding="utf-8")
    (options.out / f"{kind}.md").write_text(as_markdown(lines), encoding="utf-8")
    synthetic = any(outcome.facts.get("synthetic", kind != "real") for outcome in outcomes)
    config = predictor.config
    model = f"imdb_transformer, {'synthetic' if synthetic else 'IMDB'} reviews"
    model += f" of {config.data['max_len']} tokens, {config.trainer.precision}"
    changed = f"\n{' '.join(options.overrides)}" if options.overrides else ""
    for devices in options.devices:
        title = f"Samples per second, {devices} devices: {on}"
        shown = [outcome for outcome in outcomes if outcome.cell.devices == devices]
        subtitle = f"{model}; schedule {options.schedule}, one process per pipeline{changed}"
        path = options.out / f"{kind}-{devices}.png"
        heat_map(shown, title, subtitle).save(path, optimize=True)
        print(f"Figure: {path}  ")


if __name__ == "__main__":
    # as at Ctrl-C, the processes of the current cell are ended first
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
