"""The dashboard as a browser shows it: TensorBoard on the event files of real runs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import BrowserPage, tensorboard
from support.launch import SMALL, logging_as_before

from hybridtrain.cli import main
from hybridtrain.schedule import Account

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a TensorBoard on two runs, which differ in the learning rate and the micro-batches."""
    outputs = tmp_path_factory.mktemp("outputs")
    with logging_as_before():
        for name, lr, chunks in (("slow", 1e-4, 4), ("fast", 1e-2, 2)):
            sweep = [f"run_name={name}", f"optim.lr={lr}", f"pipeline.chunks={chunks}"]
            assert main([*SMALL, *sweep, f"output_dir={outputs}"]) == 0
    with tensorboard(outputs) as address:
        yield address


@pytest.fixture
def dashboard(address: str, browser_page: BrowserPage) -> Iterator[BrowserPage]:
    """The first screen; no test leaves an error behind."""
    browser_page.open(address)
    browser_page.page.locator("scalar-card").first.wait_for()
    yield browser_page
    assert browser_page.errors == []


def go_to(dashboard: BrowserPage, tab: str) -> None:
    dashboard.page.get_by_role("tab", name=re.compile(f"^{tab}$", re.IGNORECASE)).click()


def test_the_first_screen_has_the_runs_the_losses_and_then_the_groups_by_number(
    dashboard: BrowserPage,
) -> None:
    page = dashboard.page
    groups = ["Pinned", "1_overview", "2_time", "3_stages", "4_optimizer", "5_pictures"]
    assert page.locator(".group-title").all_inner_texts() == groups
    cards = page.locator("scalar-card .tag").evaluate_all("each => each.map(e => e.title)")
    assert cards[:3] == [
        f"1_overview/{name}" for name in ("eval_accuracy", "eval_loss", "train_loss")
    ]
    runs = page.locator("runs-data-table").inner_text().split()
    assert {"slow", "fast"} <= set(runs)


def test_a_curve_says_what_it_is(dashboard: BrowserPage) -> None:
    go_to(dashboard, "scalars")
    card = dashboard.page.locator("tf-scalar-card", has_text="1_overview/train_loss").first
    card.get_by_title("Show summary description").click()
    description = card.get_by_text("mean of the steps since the last point")
    description.wait_for()
    assert description.count() == 1


def test_pictures_and_tables_are_shown(dashboard: BrowserPage) -> None:
    go_to(dashboard, "images")
    pictures = dashboard.page.locator("tf-image-loader")
    for picture in ("5_pictures/timeline", "5_pictures/where_the_time_goes"):
        shown = pictures.filter(has_text=picture).first.locator("img")
        shown.wait_for()
        shown.evaluate("image => image.decode()")  # raises if it is no image
        assert shown.evaluate("image => image.naturalWidth") > 500
    go_to(dashboard, "text")
    dashboard.page.locator("tf-text-loader pre", has_text="recipe: digits").first.wait_for()
    table = dashboard.page.locator("tf-text-loader table table", has_text="imbalance").first
    table.wait_for()
    assert table.locator("th").all_inner_texts() == [
        *("part", "mean", "device 0", "device 1"),
    ]
    parts = table.locator("tbody tr td:first-child").all_inner_texts()
    absent = ("recompute", "reduction", "stragglers")  # of a single process that keeps all
    assert parts == [*(part for part in Account._fields if part not in absent), "step"]


def test_runs_are_compared_first_by_what_differs(dashboard: BrowserPage) -> None:
    go_to(dashboard, "hparams")
    cells = dashboard.page.locator("vaadin-grid-cell-content")
    cells.get_by_text("Trial ID").wait_for()
    heads = [text.strip() for text in cells.all_inner_texts()]
    assert heads[:4] == ["Trial ID", "Show Metrics", "optim.lr", "pipeline.chunks"]


def test_the_first_screen_of_a_run_with_a_single_evaluation_has_its_values(
    tmp_path: Path, browser_page: BrowserPage
) -> None:
    assert main([*SMALL, "trainer.eval_every=null", f"output_dir={tmp_path}"]) == 0
    evaluation = json.loads((tmp_path / "digits/summary.json").read_text())["eval"]
    with tensorboard(tmp_path) as address:
        browser_page.open(address)
        for name in ("accuracy", "loss"):
            card = browser_page.page.locator("scalar-card", has_text=f"1_overview/eval_{name}")
            card.get_by_text(f"{evaluation[name]:.4f}").first.wait_for()
    assert browser_page.errors == []
