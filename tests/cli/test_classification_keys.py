"""Settings of a classification that are keys instead of code."""

import json
from pathlib import Path

import numpy as np
import pytest
from cli_runs import fail, succeed
from support.launch import SMALL
from support.small_hub import write_bert
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

FEW = [*SMALL, "trainer.steps=2", "trainer.eval_every=null"]


def evaluation(run: str) -> dict[str, float]:
    return json.loads((Path("outputs") / run / "summary.json").read_text())["eval"]


def test_smoothing_weights_and_metrics_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    succeed(
        capfd,
        *(*FEW, "trainer.label_smoothing=0.1", "trainer.class_weights=auto"),
        *("trainer.metrics=[accuracy,f1,mcc,auc,recall_per_class,confusion]", "run_name=a"),
        *("checkpoint.best=f1", "monitor=tensorboard"),
    )
    values = evaluation("a")
    assert {"loss", "accuracy", "f1", "mcc", "auc", "recall_per_class/9"} <= values.keys()
    confusion = np.array([[values[f"confusion/{a}/{b}"] for b in range(10)] for a in range(10)])
    assert confusion.sum() == values["samples"]
    assert confusion.trace() / confusion.sum() == pytest.approx(values["accuracy"])
    recalls = np.diag(confusion) / confusion.sum(1)
    assert [values[f"recall_per_class/{n}"] for n in range(10)] == pytest.approx(list(recalls))
    best = json.loads(Path("outputs/a/checkpoints/best.json").read_text())
    assert best["criterion"] == "max f1"
    events = EventAccumulator("outputs/a")
    events.Reload()
    assert "5_pictures/confusion" in events.Tags()["images"]
    assert not any("confusion" in tag for tag in events.Tags()["scalars"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("trainer.label_smoothing=1.5", "trainer.label_smoothing=1.5 must be from 0 to 1"),
        ("trainer.class_weights=[1,2]", "trainer.class_weights has 2 numbers, but the data has 10"),
        ("trainer.class_weights=yes", "trainer.class_weights=yes must be auto"),
        ("trainer.metrics=3", "trainer.metrics=3 must be a list of names, or a mapping such as"),
        ("trainer.metrics=[recal]", "trainer.metrics=recal is unknown: did you mean 'recall'?"),
    ],
)
@pytest.mark.quick_cases(1)
def test_a_setting_that_does_not_fit_is_one_line(
    change: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert message in fail(capfd, *FEW, change)
    if change.startswith("trainer.label"):
        mse = "trainer.loss=mse", "trainer.label_smoothing=0.1"
        said = fail(capfd, *FEW, *mse)
        assert "trainer.loss=mse" in said
        assert "trainer.label_smoothing" in said


@pytest.mark.thorough
def test_texts_with_several_classes_are_trained_and_predicted_by_name(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_bert(Path("bert"))
    samples = [
        {"text": "good film very", "label": ["good", "film"]},
        {"text": "bad plot", "label": ["plot"]},
        {"text": "poor scene", "label": []},
    ] * 12
    Path("a.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    run = [
        *("model=transformers", "data=datasets", "data.path=a.jsonl", "data.tokenizer=./bert"),
        *("data.task=multilabel", "model.source=./bert", "optim=adamw", "optim.lr=5e-3"),
        *("init_from={path: ./bert, strict: false}", "trainer.epochs=null", "trainer.steps=80"),
        *("data.batch_size=8", "world.devices=cpu", "trainer.class_weights=auto"),
        *("trainer.metrics=[f1,auc]", "run_name=a", "model.attention=eager"),
    ]
    succeed(capfd, *run)
    assert evaluation("a")["f1"] > 0.9
    succeed(capfd, "predict", "run_name=a", "output=out.jsonl")
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    for line in lines:
        known = next(s["label"] for s in samples if s["text"] == line["text"])
        assert sorted(line["labels"]) == sorted(known)
    succeed(capfd, "export", "run_name=a", "format=transformers")
    folder = next(Path("outputs/a/export").glob("step_*"))
    config = json.loads((folder / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert sorted(config["label2id"]) == ["film", "good", "plot"]


@pytest.mark.thorough
def test_words_have_classes(capfd: pytest.CaptureFixture[str]) -> None:
    write_bert(Path("bert"))
    words = ["good", "film", "very", "bad", "plot"]
    tags = ["ADJ", "NOUN", "ADV", "ADJ", "NOUN"]
    draws = np.random.default_rng(0)
    lines = []
    for _ in range(40):
        chosen = draws.integers(0, 5, draws.integers(1, 6))
        sample = {"text": [words[i] for i in chosen], "label": [tags[i] for i in chosen]}
        lines.append(json.dumps(sample) + "\n")
    Path("a.jsonl").write_text("".join(lines))
    succeed(
        capfd,
        *("model=transformers", "data=datasets", "data.path=a.jsonl", "data.tokenizer=./bert"),
        *("data.task=token_classification", "model.source=./bert", "optim=adamw"),
        *("optim.lr=1e-2", "init_from={path: ./bert, strict: false}", "trainer.epochs=null"),
        *("trainer.steps=40", "data.batch_size=8", "world.devices=cpu", "run_name=a"),
        *("trainer.metrics=[accuracy,f1_per_class]", "pipeline.chunks=2", "model.attention=eager"),
    )
    values = evaluation("a")
    assert values["accuracy"] > 0.95
    assert {"f1_per_class/ADJ", "f1_per_class/ADV", "f1_per_class/NOUN"} <= values.keys()


def test_an_onnx_file_computes_what_the_model_does(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    import torch

    succeed(capfd, "export", "run_name=digits", "format=onnx")
    succeed(capfd, "export", "run_name=digits", "format=torch_export")
    (file,) = (copied / "export").glob("*.onnx")
    (program,) = (copied / "export").glob("*.pt2")
    images = torch.randn(3, 1, 8, 8)
    session = reference.ReferenceEvaluator(str(file))
    (outputs,) = session.run(None, {session.input_names[0]: images.numpy()})
    expected = torch.export.load(program).module()(images)
    torch.testing.assert_close(torch.from_numpy(outputs), expected.detach(), rtol=1e-4, atol=1e-5)
