"""A model of the Hub from a local folder: fine-tuned, predicted and exported by commands alone."""

import json
from pathlib import Path

import pytest
import torch
from support.launch import torchrun_script
from support.small_hub import write_bert, write_reviews

from hybridtrain.app.cli import main

BERT = [
    *("model=transformers", "data=datasets", "data.path=train.jsonl", "data.tokenizer=./bert"),
    *("model.source=./bert", "init_from=bert", "optim.lr=3e-3", "world.devices=cpu"),
    *("pipeline.nb_part=2", "pipeline.chunks=2", "run_name=bert", "trainer.eval_every=6"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_reviews(tmp_path / "train.jsonl", 120)
    write_bert(tmp_path / "bert")
    return tmp_path


def test_a_bert_from_a_folder_is_fine_tuned_predicted_exported_and_loaded_by_from_pretrained(
    folder: Path,
) -> None:
    import transformers

    assert main([*BERT, "trainer.epochs=6"]) == 0
    summary = json.loads((folder / "outputs/bert/summary.json").read_text())
    assert summary["eval"]["samples"] == 12
    assert summary["eval"]["accuracy"] == 1.0  # the first word says it
    for form in ("transformers", "torch", "torch_export"):
        assert main(["export", "run_name=bert", f"format={form}"]) == 0
    assert main(["predict", "run_name=bert", "output=out.jsonl"]) == 0
    exported = next((folder / "outputs/bert/export").glob("step_????????"))
    net = transformers.AutoModelForSequenceClassification.from_pretrained(exported).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    texts = [json.loads(line)["text"] for line in (folder / "train.jsonl").open()][:7]
    batch = dict(tokenizer(texts, return_tensors="pt", padding=True))
    with torch.no_grad():
        logits = net(**batch).logits
    plain = torch.load(exported.with_suffix(".pth"))
    assert all(torch.equal(plain[name], value) for name, value in net.state_dict().items())
    program = torch.export.load(exported.with_suffix(".pt2")).module()
    torch.testing.assert_close(program(**batch).logits, logits)
    predicted = [json.loads(line)["logits"] for line in (folder / "out.jsonl").open()]
    assert len(predicted) == 12
    assert all(len(each) == 2 for each in predicted)


@pytest.mark.thorough
def test_the_same_over_two_processes_is_exact(folder: Path) -> None:
    two = ["-m", "hybridtrain", *BERT, "trainer.epochs=2"]
    torchrun_script(2, *two)
    assert main(["verify", *BERT, "run_name=other", "model.config=null"]) == 0


def test_a_model_of_timm_trains_and_timm_loads_its_state_dict(tmp_path: Path) -> None:
    import timm

    words = ["recipe=digits", "model=timm", "model.name=resnet10t", "trainer.loss=cross_entropy"]
    short = ["trainer.epochs=null", "trainer.steps=2", "world.devices=cpu"]
    assert main([*words, *short]) == 0
    assert main(["export", "run_name=digits", "format=torch"]) == 0
    (path,) = (tmp_path / "outputs/digits/export").iterdir()
    net = timm.create_model("resnet10t", num_classes=10, in_chans=1)
    net.load_state_dict(torch.load(path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either model.source= or model.config=, not both"),
        (["model.source=nowhere"], "model.source=nowhere"),
        (["model.config={hidden_size: 3}"], "needs a model_type, such as bert"),
        (["model.config={model_type: bret}"], "bert"),
        (["model.config={model_type: bert, hiden_size: 3}"], "no such setting"),
        (["model.config={model_type: bert}", "model.auto=AutoNothing"], "no such Auto class"),
        (["model.config={model_type: bert, vocab_size: 3}"], "has 19 tokens, and the model 3"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_made_is_one_line(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["data=datasets", "data.path=train.jsonl", "data.tokenizer=./bert"]
    assert main(["model=transformers", *data, *words, "world.devices=cpu"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_a_format_that_does_not_fit_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe=digits", "world.devices=cpu", "trainer.epochs=1"]) == 0
    capsys.readouterr()
    assert main(["export", "run_name=digits", "format=onnx"]) == 2
    assert "format" in capsys.readouterr().err
    assert main(["export", "run_name=digits", "format=transformers"]) == 2
    assert "format=transformers is for models of transformers" in capsys.readouterr().err
