"""The page of a run: what it says is what the files of the run say, and a browser can read it."""

import json
import re
import shutil
import sys
from html import unescape
from pathlib import Path

import pytest
import yaml
from support.browser import BrowserPage
from support.launch import SMALL

from hybridtrain.cli import main
from hybridtrain.errors import DataError
from hybridtrain.observe import RunRecord, write_report


def words(page: str) -> str:
    """What stands between the tags, without scripts."""
    page = re.sub(r"(?s)<(script|style).*?</\1>", " ", page)
    return re.sub(r"\s+", " ", unescape(re.sub("<[^>]+>", " ", page)))


def test_the_page_has_the_numbers_of_the_summary(finished: Path, tmp_path: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    shown = words(write_report([finished], tmp_path / "a" / "page.html").read_text())
    for fact in (
        "state done",
        f"steps {summary['steps']}",
        f"training loss {summary['train_loss']:.4g}",
        f"loss, evaluation {summary['eval']['loss']:.4g}",
        f"accuracy, evaluation {summary['eval']['accuracy']:.1%}",
        f"median step time {summary['step_ms']['p50']:.2f} ms",
        f"checkpoint: {Path(summary['checkpoint']).name}; predict, evaluate and export use it",
        "recipe=digits",
        f"torch {summary['environment']['torch']}",
    ):
        assert fact in shown
    for number, stage in enumerate(summary["stages"]):
        layers = f"{stage['layers'][0]} ... {stage['layers'][-1]}"
        assert f"{number} {layers} {len(stage['layers'])} {stage['parameters']:,}" in shown


@pytest.mark.thorough
def test_the_page_says_which_steps_the_times_of_the_advice_and_of_the_tile_are_of(
    copied: Path, tmp_path: Path
) -> None:
    summary = json.loads((copied / "summary.json").read_text())
    for advice in ([], ["a step would take 3 ms instead of 5"]):
        (copied / "summary.json").write_text(json.dumps({**summary, "advice": advice}))
        page = write_report([copied], tmp_path / "page.html").read_text()
        assert "median step time" in page
        assert ("The advice is based on recorded steps" in page) == bool(advice)


@pytest.mark.parametrize(("ms", "shown"), [(999.0, "999.00 ms"), (1264.24, "1.26 s")])
@pytest.mark.quick_cases(1)
def test_a_time_is_in_the_unit_that_people_read_and_the_same_everywhere(
    ms: float, shown: str, finished: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    summary = json.loads((run / "summary.json").read_text())
    summary["step_ms"]["p50"] = summary["measured"]["step_ms"] = ms
    (run / "summary.json").write_text(json.dumps(summary))
    page = write_report([run], tmp_path / "page.html").read_text()
    assert f"median step time {shown}" in words(page)
    assert 'title="over all optimizer steps' in page
    assert words(page).count(shown) >= 1
    assert f"{ms:.2f} ms" not in words(page) or ms < 1000


def test_the_page_asks_for_nothing_from_a_network(finished: Path, tmp_path: Path) -> None:
    page = write_report([finished], tmp_path / "page.html").read_text()
    assert not re.findall(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=", page)


def test_the_page_names_the_checkpoint_that_predict_uses(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, "outputs/marked")
    best = {"step": 6, "value": 0.25, "criterion": "max accuracy"}
    Path("outputs/marked/checkpoints/best.json").write_text(json.dumps(best))
    shown = words(write_report(["outputs/marked"], "page.html").read_text())
    assert "export use the best one: step_00000006 (max accuracy 0.25)" in shown
    capfd.readouterr()
    assert main(["predict", "run_name=marked"]) == 0
    used = json.loads(capfd.readouterr().out)["checkpoint"]
    assert Path(used).name == "step_00000006"


def test_several_runs_are_compared_by_the_settings_that_differ(
    finished: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(finished, tmp_path / "other"))
    config = yaml.safe_load((other / "config.yaml").read_text())
    usual, config["optim"]["lr"] = config["optim"]["lr"], 0.5
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    overrides = (other / "overrides.yaml").read_text()
    no_yaml = "- '+model.labels=[a: b: c]'\n"
    (other / "overrides.yaml").write_text(overrides + "- optim.lr=0.5\n" + no_yaml)
    assert main(["report", str(finished), str(other), "output=both.html"]) == 0
    page = Path("both.html").read_text()
    table = page[page.index("<table>") : page.index("</table>")]
    heads = re.findall("<th>(.*?)</th>", table)
    assert heads[:4] == ["run", "optim.lr", "model.labels", "state"]
    assert ">[a: b: c]</td>" in table
    assert re.findall("<tr><td.*?>(.*?)</td><td.*?>(.*?)</td>", table) == [
        ("digits", str(usual)),
        ("other", "0.5"),
    ]


@pytest.mark.thorough
def test_the_runs_of_a_sweep_have_its_name_and_one_colour_each(
    finished: Path, tmp_path: Path
) -> None:
    runs = [Path(shutil.copytree(finished, tmp_path / "swept" / f"lr_{n}")) for n in range(4)]
    page = write_report(runs, tmp_path / "page.html").read_text()
    assert "<h1>4 runs of swept</h1>" in page
    names = re.findall(r'<a href="#run-\d" style="--run: (#\w+)">(\w+)</a>', page)
    assert [name for _, name in names] == ["lr_0", "lr_1", "lr_2", "lr_3"]
    assert len({colour for colour, _ in names}) == 4


@pytest.mark.parametrize("torn", [b'{"step": 7, "ti', b"\xff\xfe\n", b"7\n", b"{}\n", b"\0\0\n"])
def test_a_torn_line_of_metrics_spoils_neither_the_page_nor_the_table(
    finished: Path, tmp_path: Path, torn: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "torn"))
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(torn)
    assert RunRecord.read(run).curves == RunRecord.read(finished).curves
    assert main(["results", str(run)]) == 0
    assert "done" in capsys.readouterr().out


@pytest.mark.thorough
def test_runs_of_one_name_are_told_apart_by_their_folders(finished: Path, tmp_path: Path) -> None:
    names = ["a/trial_0", "b/trial_0", "b/trial_1"]
    runs = [Path(shutil.copytree(finished, tmp_path / name)) for name in names]
    page = write_report(runs, tmp_path / "page.html").read_text()
    shown = re.findall(r'<a href="#run-\d" style="--run: #\w+">([\w/]+)</a>', page)
    assert shown == ["a/trial_0", "b/trial_0", "trial_1"]
    bars = re.search(r'"orientation":"h",.*?"y":(\[.*?\])', page)
    assert json.loads(bars[1].replace("\\u002f", "/")) == shown


def test_a_run_that_has_not_ended_has_a_page_of_what_there_is(
    finished: Path, tmp_path: Path
) -> None:
    run = tmp_path / "running"
    run.mkdir()
    whole = (finished / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole + '{"step": 7, "time')  # as it is being written
    shown = words(write_report([run]).read_text())
    assert (run / "report.html").exists()
    assert "state not finished" in shown
    assert "steps 6" in shown


@pytest.mark.thorough
def test_warnings_are_listed_with_the_number_of_times(finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "warned"))
    line = "2026-01-02 03:04:05,678 WARNING hybridtrain.loop.trainer: a <slow> disk\n"
    for rank in (0, 1):
        with open(run / "logs" / f"rank_{rank:03d}.log", "a") as log:
            log.write(line)
    assert "a <slow> disk (2 times)" in words(write_report([run]).read_text())


def test_what_is_not_a_run_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty/metrics\.jsonl does not exist"):
        RunRecord.read(tmp_path / "empty")
    assert main(["report", "nothing"]) != 0
    assert "nothing and no run outputs/nothing" in capsys.readouterr().err
    assert main(["report"]) != 0
    assert "usage: hybridtrain report" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_page_is_written_at_the_end_of_a_run_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "monitor.report=true", "trainer.steps=2"]) == 0
    assert "state done" in words(Path("outputs/digits/report.html").read_text())
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert main([*SMALL, "monitor.report=true", "run_name=b"]) != 0
    assert "pip install 'hybridtrain[report]'" in capsys.readouterr().err
    assert not Path("outputs/b").exists()


@pytest.mark.thorough
def test_a_run_whose_page_cannot_be_drawn_is_complete_and_names_the_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: object) -> None:
        raise KeyError("train/loss")

    monkeypatch.setattr("hybridtrain.observe.report.charts.curves", fails)
    assert main([*SMALL, "monitor.report=true", "trainer.steps=2"]) == 0
    assert Path("outputs/digits/summary.json").exists()
    assert ": hybridtrain report outputs/digits" in capfd.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_figures_and_what_an_action_is_under_the_pointer(
    finished: Path, tmp_path: Path, browser_page: BrowserPage, scheme: str
) -> None:
    page = browser_page.page
    page.emulate_media(color_scheme=scheme)
    browser_page.open(write_report([finished], tmp_path / "page.html"))
    figures = page.locator(".js-plotly-plot")
    figures.first.wait_for()
    assert figures.count() >= 6
    heading = page.get_by_role("heading", name="The last recorded step")
    timeline = heading.locator("xpath=following-sibling::div[1]")
    timeline.scroll_into_view_if_needed()
    action = timeline.locator("g.trace.bars path").first
    box = action.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    text = timeline.locator("g.hovertext").first
    text.wait_for()
    assert re.search(r"forward of micro-batch 0, stage 0.*[\d.]+ ms, from", text.text_content())
    ink = figures.first.locator("text.gtitle").evaluate("text => getComputedStyle(text).fill")
    assert ink == {"light": "rgb(28, 28, 28)", "dark": "rgb(230, 230, 230)"}[scheme]
    widths = "[...document.querySelectorAll('.main-svg')].map(e => e.clientWidth)"
    on_screen = page.evaluate(widths)
    assert max(on_screen) > 700
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert max(page.evaluate(widths)) <= 700  # of paper
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.wait_for_function(f"Math.max(...{widths}) > 700")
    assert page.evaluate(widths) == on_screen
    page.set_viewport_size({"width": 390, "height": 800})  # of a phone
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert browser_page.errors == []


# tables wider than the page, and texts of figures outside of them
CUT = """() => [
    ...[...document.querySelectorAll(".scroll")]
        .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.slice(0, 60)),
    ...[...document.querySelectorAll(".js-plotly-plot text")].filter(text => {
        const inner = text.getBoundingClientRect();
        const outer = text.closest(".js-plotly-plot").parentElement.getBoundingClientRect();
        return inner.width && (inner.right > outer.right + 1 || inner.left < outer.left - 1);
    }).map(text => text.textContent),
]"""


@pytest.mark.thorough
@pytest.mark.parametrize("width", [420, 1200])
def test_a_page_of_a_sweep_is_whole_on_a_phone_and_on_a_laptop(
    width: int, finished: Path, tmp_path: Path, browser_page: BrowserPage
) -> None:
    runs = []
    for number in range(3):  # with a matrix of long names and the metrics of a classification
        run = shutil.copytree(finished, tmp_path / f"lr_0.00{number}-weight_decay_0.1")
        (run / "config.yaml").write_text(f"optim:\n  lr: 0.00{number}\n  weight_decay: 0.1\n")
        summary = json.loads((run / "summary.json").read_text())
        names = ("accuracy", "f1", "precision", "recall", "mcc", "auc")
        summary["eval"] = {"loss": 1.5} | dict.fromkeys(names, 0.123456)
        (run / "summary.json").write_text(json.dumps(summary))
        with (run / "metrics.jsonl").open("a") as file:
            pairs = {f"eval/confusion/{a}/{b}": 3 for a in "xyz" for b in "xyz"}
            file.write(json.dumps({"step": summary["steps"], "time": 9e9, **pairs}) + "\n")
        runs.append(run)
    page = browser_page.page
    page.set_viewport_size({"width": width, "height": 900})
    for directories in (runs, runs[:1]):
        browser_page.open(write_report(directories, tmp_path / "page.html"))
        page.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length > 9")
        page.wait_for_function(f"({CUT})().length === 0")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert browser_page.errors == []
