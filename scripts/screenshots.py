"""Screenshots for the documentation: real runs, and what a browser shows of them.

A screenshot is a function in `SHOTS` that brings a page into view. scripts/screenshots.sh calls
this, and installs what it needs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image

from hybridtrain.observe import write_report
from tests.support.browser import BrowserPage, open_browser, tensorboard

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
_MOST_BYTES = 150_000

_CPU = ["world.devices=cpu", "monitor.progress=false", "trainer.log_every=5"]
_LANGUAGE_MODEL = [
    *("recipe=python_source_gpt", "data.seq_len=64", "data.max_bytes=1000000"),
    *("data.eval_bytes=20000", "model.d_model=64", "model.n_layer=4", "model.n_head=4"),
    *("lr_schedule.warmup_steps=20", "trainer.eval_every=25"),
]

# By the folder of a run or a sweep: its overrides, and how many processes train it.
RUNS: dict[str, tuple[list[str], int]] = {
    "digits": (["recipe=digits", "trainer.epochs=6", "trainer.eval_every=25"], 1),
    "gpt": ([*_LANGUAGE_MODEL, "trainer.steps=200"], 1),
    "replicas": (
        ["recipe=digits", "world.engine=distributed", "trainer.epochs=6", "trainer.eval_every=25"],
        4,
    ),
    "sweep": (
        [
            *("--multirun", "recipe=digits", "trainer.eval_every=25"),
            *("optim.lr=3e-4,3e-3,3e-2", "pipeline.chunks=2,8"),
        ],
        1,
    ),
}


def train(name: str, runs: Path) -> None:
    """Trains a run, or all runs of a sweep, unless it is there."""
    folder = runs / name
    if folder.exists():
        return
    overrides, processes = RUNS[name]
    command = [sys.executable, "-m", "hybridtrain"]
    if processes > 1:
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, "-m", *launcher, "-m", "hybridtrain"]
    print(f"== training {name}", flush=True)
    place = [f"output_dir={folder}"]
    subprocess.run([*command, *overrides, *_CPU, *place], check=True)


def go_to(page: BrowserPage, tab: str) -> None:
    """Opens a tab of TensorBoard."""
    page.page.get_by_role("tab", name=re.compile(f"^{tab}$", re.IGNORECASE)).click()


def dashboard(page: BrowserPage, runs: Path) -> None:
    """The first screen."""
    with_cards(page)


def custom_scalars(page: BrowserPage, runs: Path) -> None:
    """The charts of several curves."""
    go_to(page, "custom scalars")
    page.page.locator("vz-line-chart2 svg, tf-line-chart-data-loader svg").first.wait_for()


def pictures(page: BrowserPage, runs: Path) -> None:
    """The timeline and where the time goes."""
    go_to(page, "images")
    page.page.locator("tf-image-loader img").nth(1).wait_for()


def tables(page: BrowserPage, runs: Path) -> None:
    """The account of a step, as a table."""
    go_to(page, "text")
    page.page.locator("tf-text-loader table").first.wait_for()


def hyperparameters(page: BrowserPage, runs: Path) -> None:
    """The runs of a sweep beside each other."""
    go_to(page, "hparams")
    page.page.get_by_text("Trial ID").wait_for()


def report(page: BrowserPage, runs: Path) -> None:
    """The page of a run, from its top."""
    (run,) = (path.parent for path in (runs / "gpt").glob("*/metrics.jsonl"))
    page.open(write_report([run], runs / "report.html"))
    page.page.locator(".js-plotly-plot").first.wait_for()


def report_step(page: BrowserPage, runs: Path) -> None:
    """Where the time of a step goes, and the step, on the page of a run."""
    report(page, runs)
    page.page.get_by_text("Where the time of a step goes").scroll_into_view_if_needed()
    page.page.evaluate("document.querySelectorAll('h3')[0].scrollIntoView()")


def with_cards(page: BrowserPage) -> None:
    """Waits for the curves, and closes the settings, which take a fifth of the screen."""
    page.page.locator("scalar-card").first.wait_for()
    page.page.get_by_role("button", name="Close", exact=False).first.click()


# By name: the run whose dashboard it is, and what brings it into view.
SHOTS: dict[str, tuple[str, Callable[[BrowserPage, Path], None]]] = {
    "dashboard": ("gpt", dashboard),
    "custom-scalars": ("gpt", custom_scalars),
    "pictures": ("digits", pictures),
    "tables": ("replicas", tables),
    "hyperparameters": ("sweep", hyperparameters),
    "report": ("gpt", report),
    "report-step": ("gpt", report_step),
}


def save(page: BrowserPage, path: Path) -> None:
    """Writes a PNG of at most 256 colours."""
    page.page.wait_for_timeout(2000)  # curves move into their places
    page.screenshot(path)
    with Image.open(path) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.name}: {size / 1e3:.0f} kB", flush=True)
    if size > _MOST_BYTES:
        raise SystemExit(f"{path} has {size} bytes: more than {_MOST_BYTES}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, takes the screenshots and writes them into docs/assets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, help="the folder of the runs, which stay there")
    parser.add_argument("--only", nargs="+", choices=SHOTS, default=list(SHOTS), metavar="NAME")
    parser.add_argument("--to", type=Path, default=ASSETS)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        runs = chosen.runs or Path(temporary)
        for name in chosen.only:
            run, view = SHOTS[name]
            train(run, runs)
            with tensorboard(runs / run) as address, open_browser() as page:
                page.open(address)
                view(page, runs)
                save(page, chosen.to / f"{name}.png")
                if page.errors:
                    raise SystemExit("\n".join([f"{name}:", *page.errors]))


if __name__ == "__main__":
    main()
