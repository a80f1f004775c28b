"""What the README and the pages of docs/ show, tried: Python blocks run, commands compose."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from pages import PAGES, ROOT, Block, blocks, name

from hybridtrain.cli import main
from hybridtrain.cli.command_table import COMMANDS
from hybridtrain.cli.config.compose import compose_config
from hybridtrain.cli.config.sweeps import sweep_choices
from hybridtrain.cli.config.targets import TARGETS
from hybridtrain.world import World

RECIPE = ROOT / "recipes" / "python_source_gpt.yaml"
RECIPE_OF = {"bert": ["recipe=bert_classifier"]}
ERRORS = [ROOT / "docs/troubleshooting.md"]


def commands(text: str) -> list[list[str]]:
    """Returns the words after `hybridtrain` of each line of `text` that starts it."""
    lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    starts = [words for words in lines if words and words[0] in ("hybridtrain", "torchrun", "srun")]
    found = [words[words.index("hybridtrain") + 1 :] for words in starts if "hybridtrain" in words]
    # which take no overrides
    without = ("results", "report", "smp-config", "new")
    found = [words for words in found if words and words[0] not in without]
    return [words[1:] if words and words[0] in COMMANDS else words for words in found]


NUMBER = re.compile(r"\d+(?:\.\d+)?")


def output_below(page: Path, block: Block) -> str | None:
    """Returns the text block that follows `block` without a sentence in between."""
    end = block.line + block.text.count("\n") + 3  # the fence, an empty line, the next fence
    return next((text.text for text in blocks(page, "text") if text.line == end), None)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name)
@pytest.mark.quick_cases(
    "docs/callbacks.md",
    "docs/checkpoint-files.md",
    "docs/custom-steps.md",
    "docs/data-loading.md",
    "docs/guide.md",
    "docs/index.md",
    "docs/losses.md",
    "docs/memory.md",
    "docs/planning.md",
    "docs/project.md",
    "docs/schedules.md",
    "docs/smp.md",
    "docs/splitting.md",
    "docs/troubleshooting.md",
    "docs/tutorials/bert.md",
    "docs/verify.md",
    "docs/checkpoints.md",
    "docs/export.md",
)
def test_the_python_blocks_of_a_page_run_in_order(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from_env = World.from_env

    def on_cpu(nb_part: int = 1, devices: object = None, **more: object) -> World:
        return from_env(nb_part, devices or "cpu", **more)  # type: ignore[arg-type]

    monkeypatch.setattr(World, "from_env", on_cpu)
    namespace = {"__name__": page.stem}
    for block in blocks(page, "python"):
        if re.search(r"(import|from) transformers", block.text):
            pytest.importorskip("transformers")
        code = "\n" * (block.line - 1) + block.text  # so that a traceback names the page's line
        capsys.readouterr()
        exec(compile(code, str(page), "exec"), namespace)
        if page.stem == "guide" and (shown := output_below(page, block)):
            printed = capsys.readouterr().out
            assert NUMBER.sub("N", printed) == NUMBER.sub("N", shown)
            assert [float(n) for n in NUMBER.findall(printed)] == pytest.approx(
                [float(n) for n in NUMBER.findall(shown)], rel=0.01
            )


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if p not in ERRORS and blocks(p, "bash", "sh")],
    ids=name,
)
@pytest.mark.quick_cases("docs/monitoring.md")
def test_the_commands_of_a_page_compose(page: Path) -> None:
    Path("my_recipe.yaml").write_text(RECIPE.read_text())
    for block in blocks(page, "bash", "sh"):
        for words in commands(block.text):
            words = [word for word in words if word not in COMMANDS]
            if not any(word.startswith("recipe=") for word in words):
                words = [*RECIPE_OF.get(page.stem, []), *words]  # that of the run it goes on with
            flags = ("--multirun", "--dry-run", "--check", "--cfg", "job")
            overrides = [word for word in words if word not in flags]
            overrides = [word for word in overrides if "interval(" not in word]  # of a search
            for choice in sweep_choices(overrides):
                assert compose_config(choice).run_name


# Commands whose errors the page on errors has in its tables.
FAILING = [
    "recipe=digit",
    "recipe=digits pipeline.nbpart=2",
    "recipe=digits world.devices=cpu optim._target_=torch.optim.AdamWW",
    "recipe=digits world.devices=cpu model.width=3",
    "recipe=digits trainer.steps=5 trainer.epochs=2",
    "recipe=digits world.devices=cpu model._target_=my_project.nets.wide",
    "recipe=digits eval",
    "recipe=digits hydra.run.dir=elsewhere",
    "recipe=digits world.devices=cuda pipeline.nb_part=64",
    "recipe=digits world.devices=cpu pipeline.nb_part=99",
    "recipe=mnist_basicnet world.devices=cpu data.root=nowhere",
    "evaluate recipe=digits world.devices=cpu run_name=never_trained",
    "recipe=digits world.devices=cpu resume=outputs/nowhere",
]


def rows(page: Path) -> list[list[str]]:
    """Returns the cells of the tables of a page on errors, without the exit codes."""
    text = page.read_text().partition("\n## ")[2]
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    return [re.split(r" \| ", line.strip("| ")) for line in lines]


@pytest.mark.parametrize("command", FAILING)
@pytest.mark.quick_cases(2)
def test_the_page_on_errors_has_a_row_for_the_error_of_a_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    shown = [m for page in ERRORS for row in rows(page) for m in re.findall(r"`([^`]+)`", row[0])]
    patterns = [".*".join(map(re.escape, message.split("..."))) for message in shown]
    matching = [p for p in patterns if re.match("error: " + p, lines[0])]
    assert len(matching) == 1, lines[0]


def test_each_row_of_the_page_on_errors_says_what_to_do() -> None:
    for page in ERRORS:
        assert rows(page)
        for row in rows(page):
            assert len(row) == 3, row
            assert all(row), row


def test_the_first_command_of_the_readme_trains() -> None:
    text = "\n".join(block.text for block in blocks(ROOT / "README.md", "bash"))
    assert main([*commands(text)[0], "world.devices=cpu", "trainer.epochs=1"]) == 0
    assert Path("outputs/digits/summary.json").exists()


@pytest.mark.thorough
def test_a_model_and_a_data_set_of_ones_own_train_as_the_page_on_them_says() -> None:
    page = ROOT / "docs" / "project.md"
    files = {
        "nets": next(b for b in blocks(page, "python") if "def wide" in b.text),
        "data": next(b for b in blocks(page, "python") if "def blobs" in b.text),
    }
    Path("my_project").mkdir()
    for module, block in files.items():
        Path(f"my_project/{module}.py").write_text(block.text)
    short = ["world.devices=cpu", "trainer.epochs=1"]
    for words in commands("\n".join(block.text for block in blocks(page, "bash"))):
        if any(word.startswith("allow_targets") for word in words):
            assert main([*words, *short]) == 0


def test_the_security_policy_says_what_each_key_may_name() -> None:
    table = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", (ROOT / "SECURITY.md").read_text(), re.M)
    assert dict(table) == {key: targets.words for key, targets in TARGETS.items()}


def anchors(page: Path) -> set[str]:
    """Returns the anchors of the headings of `page`, as GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize(
    "page",
    [*PAGES, *(ROOT / f"{p}.md" for p in ("CONTRIBUTING", "SECURITY", "CHANGELOG"))],
    ids=name,
)
@pytest.mark.quick_cases(3)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target
