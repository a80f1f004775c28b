"""The command `predict` on images and texts that are not part of the data set."""

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_runs import fail, succeed
from PIL import Image
from support.small_data import write_images, write_tokenizer
from support.small_hub import write_bert, write_reviews, write_t5

from hybridtrain.cli import main
from hybridtrain.cli.commands.predicted_words import spans_of
from hybridtrain.loop import predict as outputs_of

IMAGES = [
    *("recipe=image_folder_vit", "data.root=pets", "model=timm", "model.name=resnet10t"),
    *("data.image_size=32", "data.batch_size=8", "data.workers=0", "pipeline.nb_part=1"),
    *("pipeline.chunks=1", "world.devices=cpu", "trainer.epochs=null", "trainer.steps=2"),
    *("lr_schedule.warmup_steps=0", "run_name=pets", "monitor.report=false"),
]
BERT = (
    "model.config={model_type: bert, hidden_size: 16, num_hidden_layers: 1, "
    "num_attention_heads: 2, intermediate_size: 16}"
)
TEXTS = [
    *("data=datasets", "data.path=a.jsonl", "data.tokenizer=./tokenizer.json", BERT),
    *("model=transformers", "world.devices=cpu", "trainer.steps=1", "run_name=texts"),
    *("data.batch_size=8", "monitor.report=false"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on images and one on texts; tests take a copy of it."""
    pytest.importorskip("timm")
    pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_images("pets", per_class=6)
        assert main(IMAGES) == 0
        write_tokenizer(folder / "tokenizer.json")
        rows = [{"text": "the plot " * (1 + i), "label": ("neg", "pos")[i % 2]} for i in range(10)]
        Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert main(TEXTS) == 0
    return folder


@pytest.fixture(autouse=True)
def _in_a_copy(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)


def predicted(capfd: pytest.CaptureFixture[str], run: str, *words: str) -> list[dict[str, Any]]:
    succeed(capfd, "predict", f"run_name={run}", "output=out.jsonl", *words)
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


@pytest.mark.thorough
def test_a_flat_folder_of_images_is_predicted_with_paths_classes_and_probabilities(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = predicted(capfd, "pets")
    assert len(evaluated) == 3  # held out
    Path("new/deep").mkdir(parents=True)
    copies = ["new/a.PNG", "new/deep/b.png", "new/deep/c.png"]
    for line, copy in zip(evaluated, copies, strict=True):
        shutil.copy(line["file"], copy)
    Path("new/notes.txt").write_text("of the photographer")
    lines = predicted(capfd, "pets", "data.predict_path=new")
    assert [line["file"] for line in lines] == copies
    assert [line["sample"] for line in lines] == [0, 1, 2]
    for line, other in zip(lines, evaluated, strict=True):
        assert line["probabilities"] == other["probabilities"]  # read and transformed alike
        assert list(line["probabilities"]) == ["blue", "green", "red"]
        assert sum(line["probabilities"].values()) == pytest.approx(1)
        assert line["class"] == max(line["probabilities"], key=line["probabilities"].__getitem__)
    assert predicted(capfd, "pets", "data.predict_path=new/deep/b.png") == [
        lines[1] | {"sample": 0, "probabilities": pytest.approx(lines[1]["probabilities"])}
    ]
    type_in(monkeypatch, "new/deep/b.png\r\n\nnew/a.PNG\n")
    lines = predicted(capfd, "pets", "data.predict_path=-")
    assert [line["file"] for line in lines] == copies[1::-1]


@pytest.mark.thorough
def test_probabilities_are_the_softmax_of_the_array_of_outputs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    lines = predicted(capfd, "pets")
    succeed(capfd, "predict", "run_name=pets", "output=out.npy")
    outputs = torch.from_numpy(np.load("out.npy")).double()
    expected = torch.softmax(outputs, 1).tolist()
    assert [list(line["probabilities"].values()) for line in lines] == expected
    pytest.importorskip("pyarrow")
    from pyarrow.parquet import read_table

    succeed(capfd, "predict", "run_name=pets", "output=out.parquet")
    assert read_table("out.parquet").to_pylist() == lines


@pytest.mark.thorough
def test_photos_are_predicted_as_a_person_sees_them(capfd: pytest.CaptureFixture[str]) -> None:
    Path("new").mkdir()
    first = next(Path("pets/red").iterdir())
    with Image.open(first) as file:
        exif = Image.Exif()
        exif[0x0112] = 6  # is to be turned to the right
        file.rotate(90, expand=True).save("new/turned.png", exif=exif)
    (line,) = predicted(capfd, "pets", "data.predict_path=new")
    plain = predicted(capfd, "pets", f"data.predict_path={first}")[0]
    assert line["probabilities"] == plain["probabilities"]


@pytest.mark.parametrize("written", ["plain", "json"])
@pytest.mark.thorough
def test_texts_on_standard_input_are_predicted_as_those_of_a_file(
    written: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["the plot", 'a "fine" film, twice', "the plot the plot"]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    Path("new.jsonl").write_text(rows)
    expected = predicted(capfd, "texts", "data.predict_path=new.jsonl")
    assert [line["text"] for line in expected] == texts
    assert {line["class"] for line in expected} <= {"neg", "pos"}
    type_in(monkeypatch, "\ufeff" + rows if written == "json" else "\n".join(texts))
    assert predicted(capfd, "texts", "data.predict_path=-") == expected


@pytest.mark.parametrize(
    ("run", "path", "typed", "message"),
    [
        ("pets", "-", "", "predict_path=-: standard input is empty"),
        ("pets", "-", "no.png\n", "predict_path=-: no such file: no.png"),
        ("pets", "no", "", "predict_path=no: no such file or folder"),
        ("pets", "empty", "", "predict_path=empty contains no image: image files end in .jpg"),
        ("pets", "a.jsonl", "", "a.jsonl cannot be read as an image"),
        (
            "texts",
            "-",
            '{"text": "a"}\n{"words": "b"}\n',
            "line 2: no text in 'text'",
        ),
        ("texts", "-", '{"text": "a"}\n{"text": \n', "predict_path=-, line 2: not JSON"),
    ],
)
@pytest.mark.thorough
def test_a_path_without_samples_is_one_line(
    run: str,
    path: str,
    typed: str,
    message: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("empty").mkdir()
    type_in(monkeypatch, typed)
    said = fail(capfd, "predict", f"run_name={run}", f"data.predict_path={path}")
    assert message in said
    assert said.count("\n") == 1


def test_standard_input_that_is_a_terminal_is_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    said = fail(capfd, "predict", "run_name=pets", "data.predict_path=-")
    assert "predict_path=- reads standard input, but that is a terminal" in said


@pytest.mark.thorough
def test_an_export_as_safetensors_has_the_names_of_the_classes_in_its_metadata(
    capfd: pytest.CaptureFixture[str],
) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    succeed(capfd, "export", "run_name=pets")
    (path,) = Path("outputs/pets/export").iterdir()
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["classes"]) == ["blue", "green", "red"]
    (saved,) = Path("outputs/pets/checkpoints").glob("*/model.safetensors")
    exported, expected = load_file(path), load_file(saved)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    succeed(capfd, *IMAGES, f"init_from={path}", "run_name=again")  # it is read as weights


VIT = [
    *("recipe=image_folder_vit", "data.root=pets", "model=transformers"),
    *("model.task=image_classification", "data.image_size=32", "data.batch_size=8"),
    *("data.workers=0", "pipeline.nb_part=1", "pipeline.chunks=1", "world.devices=cpu"),
    *("trainer.epochs=null", "trainer.steps=2", "lr_schedule.warmup_steps=0", "run_name=vit"),
    *("monitor.report=false", "model.config={model_type: vit, hidden_size: 16, patch_size: 8, "
      "num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16}"),
]  # fmt: skip


@pytest.mark.parametrize("run", ["pets", "texts"])
@pytest.mark.quick_cases("texts")
def test_new_samples_are_predicted_without_the_training_data(
    run: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if run == "pets":
        Path("new").mkdir()
        for number, file in enumerate(sorted(Path("pets/red").iterdir())[:3]):
            shutil.copy(file, f"new/{number}.png")
    else:
        rows = [{"text": text} for text in ("the plot", "the plot the plot " * 9, "a film")]
        Path("new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = f"data.predict_path={'new' if run == 'pets' else 'new.jsonl'}"
    with pytest.MonkeyPatch.context() as patch:  # as of a checkpoint without the metadata
        patch.setattr("hybridtrain.cli.run.run_data.metadata_of", lambda _: (None, False))
        expected = predicted(capfd, run, path)
    shutil.rmtree("pets")
    Path("a.jsonl").unlink()
    assert predicted(capfd, run, path) == expected
    fail(capfd, "predict", f"run_name={run}")  # the evaluation split is gone
    classes = ["[a,b,c]", "[a,b]"][run == "texts"]
    said = fail(
        capfd, "predict", f"run_name={run}", path, f"data.classes={classes}", "allow_changes=true"
    )
    assert "use data with the same classes" in said


@pytest.mark.thorough
def test_models_of_transformers_are_exported_without_the_training_data(
    capfd: pytest.CaptureFixture[str],
) -> None:
    from transformers import pipeline

    succeed(capfd, *VIT)
    Path("new").mkdir()
    for number, file in enumerate(sorted(Path("pets").glob("*/*"))[::5]):
        with Image.open(file) as image:  # of another size and form
            image.resize((90, 70 + number)).save(f"new/{number}.png")
    shutil.rmtree("pets")
    Path("a.jsonl").unlink()
    for run in ("vit", "texts"):
        succeed(capfd, "export", f"run_name={run}", "format=transformers")
        (exported,) = Path("outputs", run, "export").iterdir()
        labels = json.loads((exported / "config.json").read_text())["id2label"]
        expected = ["blue", "green", "red"] if run == "vit" else ["neg", "pos"]
        assert list(labels.values()) == expected
        if run == "vit":
            classify = pipeline("image-classification", str(exported))
            for line in predicted(capfd, "vit", "data.predict_path=new"):
                scores = {each["label"]: each["score"] for each in classify(line["file"])}
                assert max(scores, key=scores.__getitem__) == line["class"]
                # both resize bytes, the one in Pillow and the other in torchvision
                assert scores == pytest.approx(line["probabilities"], abs=2e-3)
    assert (exported / "tokenizer.json").is_file()


def test_words_are_predicted_with_a_class_each_and_the_spans_of_their_labels(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["the", "film", " ", "plot", "story"]  # the tokenizer drops the third
    labels = ["O", "B-A", "I-A", "I-A", "O"]
    rows = [{"ID": f"r{i}", "text": words, "label": labels} for i in range(4)]
    Path("words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["data.path=words.jsonl", "data.task=token_classification"]
    settings += ["data.eval_path=words.jsonl", "data.max_len=5", "model.task=token_classification"]
    succeed(capfd, *TEXTS, *settings, "run_name=words")
    seen = []

    def keep(*arguments: Any) -> Any:
        seen.append(outputs_of(*arguments))
        return seen[-1]

    monkeypatch.setattr("hybridtrain.cli.commands.predict.predict_model", keep)
    lines = predicted(capfd, "words")
    assert [line["ID"] for line in lines] == ["r0", "r1", "r2", "r3"]
    for line, probabilities in zip(lines, seen[0].logits.double().softmax(-1), strict=True):
        assert line["text"] == words
        assert [name is None for name in line["classes"]] == [False, False, True, False, True]
        for word, token in ((0, 1), (1, 2), (3, 3)):  # after [CLS]; max_len cuts the last word
            value, index = probabilities[token].max(-1)
            assert line["probabilities"][word] == float(value)
            assert line["classes"][word] == ["B-A", "I-A", "O"][int(index)]
        assert line["probabilities"][2] is None
        assert line["spans"] == spans_of(line["classes"])


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("B-A I-A O I-B", [("A", 0, 2), ("B", 3, 4)]),
        ("B-A B-A I-B I-B", [("A", 0, 1), ("A", 1, 2), ("B", 2, 4)]),
        ("B-A - I-A E-A S-A U-B", [("A", 0, 1), ("A", 2, 4), ("A", 4, 5), ("B", 5, 6)]),
    ],
)
def test_spans_are_those_of_conlleval(tags: str, spans: list[tuple[str, int, int]]) -> None:
    found = spans_of([None if tag == "-" else tag for tag in tags.split()])
    assert [(span["class"], span["start"], span["end"]) for span in found] == spans


@pytest.mark.thorough
def test_texts_are_not_predicted_but_generated_by_the_export_that_the_error_names(
    capfd: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoModelForSeq2SeqLM

    write_bert(Path("bert"))
    write_t5(Path("t5"), Path("bert"))
    write_reviews(Path("data/r.jsonl"), 16)
    succeed(
        capfd,
        *("recipe=t5_summaries", "model.source=./t5", "data.path=data/r.jsonl"),
        *("world.devices=cpu", "trainer.steps=1", "trainer.epochs=null", "run_name=short"),
        *("data.batch_size=8", "data.max_len=16", "monitor.report=false"),
    )
    said = fail(capfd, "predict", "run_name=short")
    (command,) = re.findall("`hybridtrain (.*?)`", said)
    succeed(capfd, *command.split())
    (exported,) = Path("outputs/short/export").iterdir()
    assert AutoModelForSeq2SeqLM.from_pretrained(exported).can_generate()


def test_a_text_file_is_read_as_the_column_of_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    rows = [{"review": "the plot", "label": i % 2} for i in range(8)]
    Path("b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    succeed(capfd, *TEXTS, "data.path=b.jsonl", "data.text=review", "run_name=reviews")
    Path("new.txt").write_text("the plot\na film\n")
    lines = predicted(capfd, "reviews", "data.predict_path=new.txt")
    assert [line["review"] for line in lines] == ["the plot", "a film"]
