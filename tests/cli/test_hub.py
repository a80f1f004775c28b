"""A model of the Hub from a local folder: fine-tuned, predicted and exported by commands alone."""

import base64
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from support.launch import torchrun_script
from support.small_hub import write_bert, write_reviews, write_t5

from hybridtrain.cli import main

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


@pytest.mark.thorough
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
    predicted = [json.loads(line) for line in (folder / "out.jsonl").open()]
    assert len(predicted) == 12
    assert all(len(line["probabilities"]) == 2 for line in predicted)


@pytest.mark.thorough
def test_an_exported_t5_generates_what_it_has_learnt_for_new_texts(folder: Path) -> None:
    import transformers

    write_t5(folder / "t5", folder / "bert")
    t5 = ["recipe=t5_summaries", "model.source=./t5", "data.path=train.jsonl", "data.max_len=16"]
    short = ["trainer.epochs=null", "trainer.steps=60", "trainer.eval_every=null"]
    fast = ["optim.lr=5e-3", "lr_schedule.warmup_steps=0", "world.devices=cpu"]
    assert main([*t5, *short, *fast]) == 0
    assert main(["export", "run_name=t5_summaries", "format=transformers"]) == 0
    (exported,) = (folder / "outputs/t5_summaries/export").glob("step_*")
    net = transformers.AutoModelForSeq2SeqLM.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    batch = tokenizer(["ugly film", "very nice plot"], return_tensors="pt", padding=True)
    tokens = net.generate(**batch, max_new_tokens=8)
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    assert texts == ["bad film", "good film"]


@pytest.mark.thorough
def test_the_same_over_two_processes_is_exact(folder: Path) -> None:
    two = ["-m", "hybridtrain", *BERT, "trainer.epochs=2"]
    torchrun_script(2, *two)
    assert main(["verify", *BERT, "run_name=other", "model.config=null"]) == 0


@pytest.mark.thorough
def test_a_transformer_is_exact_with_recomputed_layers_any_attention_and_16_bit_weights(
    folder: Path,
) -> None:
    verify = ["verify", *BERT]
    assert main([*verify, "pipeline.recompute=always", "model.attention=eager"]) == 0
    assert main([*verify, "pipeline.recompute={every: 2}", "model.dtype=bfloat16"]) == 0


@pytest.mark.thorough
def test_the_weights_of_a_source_in_16_bits_are_trained_in_32_unless_asked_otherwise(
    folder: Path,
) -> None:
    import transformers

    half = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / "bert", dtype="bfloat16"
    )
    half.save_pretrained(folder / "half")
    words = [*BERT, "model.source=./half", "init_from=half", "trainer.steps=1"]
    for dtype, more in ((torch.float32, []), (torch.bfloat16, ["model.dtype=bfloat16"])):
        assert main([*words, f"run_name={dtype}", *more]) == 0
        (path,) = (folder / f"outputs/{dtype}/checkpoints").glob("step_*/model.safetensors")
        assert {value.dtype for value in load_file(path).values()} == {dtype}


@pytest.mark.thorough
def test_a_model_of_timm_trains_and_timm_loads_its_state_dict(tmp_path: Path) -> None:
    import timm

    words = ["recipe=digits", "model=timm", "model.name=resnet10t"]
    short = ["trainer.epochs=null", "trainer.steps=2", "world.devices=cpu"]
    assert main([*words, *short]) == 0
    assert main(["export", "run_name=digits", "format=torch"]) == 0
    (path,) = (tmp_path / "outputs/digits/export").iterdir()
    net = timm.create_model("resnet10t", num_classes=10, in_chans=1)
    net.load_state_dict(torch.load(path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "either model.source= or model.config="),
        (["model.source=./nowhere"], "source=./nowhere: no such folder"),
        (["model.config={hidden_size: 3}"], "needs a model_type, such as bert"),
        (["model.config={model_type: bret}"], "bert"),
        (["model.config={model_type: bert, hiden_size: 3}"], "no such setting"),
        (["model.config={model_type: bert}", "model.auto=AutoNothing"], "no such Auto class"),
        (["model.source=./bert", "model.dtype=bf16"], "did you mean 'bfloat16'"),
        (["model.source=./bert", "model.attention=fast"], "sdpa"),
        (["model.config={model_type: bert, vocab_size: 3}"], "has 19 tokens, but the model only 3"),
    ],
)  # fmt: skip
@pytest.mark.quick_cases(1)
def test_a_model_that_cannot_be_made_is_one_line(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["data=datasets", "data.path=train.jsonl", "data.tokenizer=./bert"]
    assert main(["model=transformers", *data, *words, "world.devices=cpu"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


@pytest.mark.thorough
def test_a_format_that_does_not_fit_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe=digits", "world.devices=cpu", "trainer.epochs=1"]) == 0
    capsys.readouterr()
    assert main(["export", "run_name=digits", "format=gguf"]) == 2
    assert "format=gguf" in capsys.readouterr().err
    assert main(["export", "run_name=digits", "format=transformers"]) == 2
    assert "format=transformers needs" in capsys.readouterr().err


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub's interface that an upload of small files takes."""

    asked: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append((self.path, body))
        answer: dict[str, object] = {"url": "https://huggingface.co/me/bert", "id": "me/bert"}
        if "preupload" in self.path:
            names = [each["path"] for each in json.loads(body)["files"]]
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            answer = {"files": [{"path": name, **modes} for name in names]}
        if "/commit/" in self.path:
            answer = {"commitUrl": "https://huggingface.co/me/bert/commit/1", "commitOid": "1"}
        self.answer(answer)

    def do_GET(self) -> None:
        self.answer({"id": "me/bert", "sha": "0"})

    def answer(self, value: object) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *_: object) -> None:
        pass


def sent_by(words: list[str]) -> dict[str, bytes]:
    """Returns the files that a command sends to the Hub, by their names."""
    Hub.asked.clear()
    assert main(words) == 0
    sent = next(body for path, body in Hub.asked if "/commit/" in path)
    files = [json.loads(line)["value"] for line in sent.splitlines()]
    return {each["path"]: base64.b64decode(each["content"]) for each in files if "path" in each}


@pytest.mark.thorough
def test_an_export_is_sent_to_the_hub_with_a_card_and_a_refusal_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    more = ["callbacks=[ema]", "checkpoint.every_steps=1", "checkpoint.keep=3"]
    assert main([*BERT, "trainer.epochs=1", *more]) == 0
    push = ["export", "run_name=bert", "format=transformers", "push_to=me/bert"]
    content = sent_by(push)
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= set(content)
    card = content["README.md"].decode()
    assert "library_name: transformers" in card
    *_, before, last = sorted((folder / "outputs/bert/checkpoints").glob("step_????????"))
    assert f"evaluation at step {int(last.name[5:])}" in card
    assert "| accuracy |" in card
    # of other weights than those that the run evaluated at its end
    for other in (f"resume={before}", "ema=false"):
        assert "evaluation" not in sent_by([*push, other])["README.md"].decode()
    server.shutdown()
    server.server_close()
    capsys.readouterr()
    assert main(push) == 2
    assert "push_to=me/bert" in capsys.readouterr().err
