"""Scripts in the structure of public examples, with one changed line: the same losses and weights.

They are in `support/trainer_scripts`, and run with the arguments that users give to the originals.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from support.cases import installed, thorough
from support.hf import VOCABULARY, bert, llama

from hybridtrain import pipelined

installed("transformers")
AcceleratorState = pytest.importorskip("accelerate.state").AcceleratorState
installed("datasets")
tokenizers = installed("tokenizers")

pytestmark = pytest.mark.usefixtures("seeded")

SCRIPTS = Path(__file__).parents[2] / "support" / "trainer_scripts"
MARK = "    # <- the line\n"
LINE = "    model = pipelined(model, chunks=3)\n"
WORDS = [f"w{number}" for number in range(VOCABULARY - 4)]
CLOSE = {"rtol": 3e-6, "atol": 1e-6}
CLOSE_IN_HALF = {"rtol": 1e-2, "atol": 1e-2}
COMPARED = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "perplexity", "losses")
COMPARED += ("eval_mean_token_accuracy", "mean_token_accuracy", "rewards/margins")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with two models, their tokenizer, and small files of data."""
    import transformers

    folder = tmp_path_factory.mktemp("scripts")
    names = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    for name, model in (
        ("llama", llama()),
        ("tied", llama(tie_word_embeddings=True)),
        ("bert", bert()),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    g = torch.Generator().manual_seed(0)

    def sentence():
        length = int(torch.randint(3, 10, (), generator=g))
        return " ".join(WORDS[n] for n in torch.randint(len(WORDS), (length,), generator=g))

    for part, rows in (("train", 30), ("test", 11)):
        (folder / f"{part}.txt").write_text("\n".join(sentence() for _ in range(2 * rows)))
        pairs = [
            {"sentence1": sentence(), "sentence2": sentence(), "label": row % 3}
            for row in range(rows)
        ]
        texts = [{"text": sentence()} for _ in range(rows)]
        names = ("prompt", "chosen", "rejected")
        choices = [{name: f" {sentence()}" for name in names} for _ in range(rows)]
        for path, lines in (
            (f"{part}.json", pairs),
            (f"texts/{part}.json", texts),
            (f"choices/{part}.json", choices),
        ):
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text("\n".join(map(json.dumps, lines)))
    return folder


def run(name, arguments, monkeypatch, changes):
    """Runs a script in this process, as `python name arguments`; `changes` adds the line."""
    source = (SCRIPTS / name).read_text(encoding="utf-8")
    assert source.count(MARK) == 1
    AcceleratorState._reset_state(reset_partial_state=True)  # as in a new process
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.setenv("HYBRIDTRAIN_NB_PART", "2")
    code = compile(source.replace(MARK, LINE) if changes else source, str(SCRIPTS / name), "exec")
    module = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    module.__dict__["pipelined"] = pipelined  # which a user imports
    exec(code, module.__dict__)


def results(folder):
    """Returns the numbers of the log and the weights of a run."""
    from safetensors.torch import load_file

    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    log += [json.loads(path.read_text()) for path in sorted(folder.glob("eval_results.json"))]
    numbers = [{k: v for k, v in entry.items() if k in COMPARED} for entry in log]
    (weights,) = folder.glob("*model.safetensors")
    return numbers, load_file(weights)


def assert_alike(
    here, tmp_path, monkeypatch, name, arguments, close=CLOSE, compares=lambda name: True
):
    """Compares a run of a script with one of the script with the line.

    Args:
        name: the file.
        arguments: what a user would type after it.
        close: the tolerances.
        compares: whether the weights of this name are compared.
    """
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    both = []
    for changes in (False, True):
        folder = tmp_path / ("pipelined" if changes else "plain")
        given = arguments.format(here=here, out=folder).split()
        run(name, [*given, "--output_dir", str(folder)], monkeypatch, changes)
        both.append(results(folder))
    (plain, of_plain), (pipe, of_pipe) = both
    assert any("loss" in entry or "losses" in entry for entry in plain)
    torch.testing.assert_close(pipe, plain, **close)
    for weights in (of_plain, of_pipe):
        for weight in [weight for weight in weights if not compares(weight)]:
            del weights[weight]
    assert of_plain
    torch.testing.assert_close(of_pipe, of_plain, **close)


TRAINER = (
    " --do_train --do_eval --eval_strategy epoch --save_strategy epoch --num_train_epochs 2"
    " --per_device_train_batch_size 5 --gradient_accumulation_steps 2 --optim sgd"
    " --learning_rate 0.1 --logging_steps 1 --report_to none --disable_tqdm true --use_cpu true"
    " --cache_dir {here}/cache"
)
CLM = "--train_file {here}/train.txt --validation_file {here}/test.txt" + TRAINER
GLUE = (
    "--model_name_or_path {here}/bert --train_file {here}/train.json"
    " --validation_file {here}/test.json --do_predict" + TRAINER
)


NLP = (
    "--model_name_or_path {here}/bert --train_file {here}/train.json"
    " --validation_file {here}/test.json --cache_dir {here}/cache --cpu"
)
TRL = (
    " --model_name_or_path {here}/llama --dtype float32 --bf16 false"
    " --gradient_checkpointing false --eval_strategy epoch --save_strategy no"
    " --num_train_epochs 2 --per_device_train_batch_size 5 --gradient_accumulation_steps 2"
    " --optim sgd --learning_rate 0.1 --logging_steps 1 --report_to none --disable_tqdm true"
    " --use_cpu true --max_length 32"
)
SFT = "--dataset_name {here}/texts" + TRL
DPO = "--dataset_name {here}/choices" + TRL
LORA = " --use_peft --lora_r 4 --lora_alpha 8 --lora_dropout 0 --lora_target_modules q_proj v_proj"


@pytest.mark.parametrize(
    ("options", "close"),
    [
        ("--model_name_or_path {here}/tied --load_best_model_at_end true", CLOSE),
        *thorough(
            [
                (
                    "--model_name_or_path {here}/llama --early_stopping_patience 1"
                    " --load_best_model_at_end true --metric_for_best_model eval_loss",
                    CLOSE,
                ),
                ("--config_name {here}/llama --tokenizer_name {here}/llama", CLOSE),
                (
                    "--model_name_or_path {here}/llama --bf16 true --gradient_checkpointing true",
                    CLOSE_IN_HALF,
                ),
            ]
        ),
    ],
)
def test_run_clm(here, tmp_path, monkeypatch, options, close):
    assert_alike(here, tmp_path, monkeypatch, "run_clm.py", f"{options} {CLM}", close)


@pytest.mark.thorough
def test_run_clm_resumes_from_its_last_checkpoint(here, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = f"--model_name_or_path {{here}}/llama {CLM} --output_dir {{out}}"
    given = arguments.format(here=here, out=tmp_path).split()
    run("run_clm.py", given, monkeypatch, changes=True)
    whole = results(tmp_path)
    last = max(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    shutil.rmtree(last)
    run("run_clm.py", [*given, "--resume_from_checkpoint", "last"], monkeypatch, changes=True)
    torch.testing.assert_close(results(tmp_path)[1], whole[1], rtol=0, atol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("options", ["", *thorough(["--pad_to_max_length true"])])
def test_run_glue(here, tmp_path, monkeypatch, options):
    assert_alike(here, tmp_path, monkeypatch, "run_glue.py", f"{GLUE} {options}")
    plain, pipe = (
        (tmp_path / name / "predict_results.txt").read_text() for name in ("plain", "pipelined")
    )
    assert plain == pipe


@pytest.mark.parametrize(
    ("options", "close"),
    [("", CLOSE), *thorough([("--mixed_precision bf16", CLOSE_IN_HALF)])],
)
def test_nlp_example(here, tmp_path, monkeypatch, options, close):
    """Its AdamW makes whole steps of the rounding of gradients that are zero, of a key's bias."""

    def without_key_biases(name):
        return not name.endswith("key.bias")

    assert_alike(
        here, tmp_path, monkeypatch, "nlp_example.py", f"{NLP} {options}", close, without_key_biases
    )


@pytest.mark.parametrize("options", ["", *thorough([LORA, " --packing true"])])
def test_sft(here, tmp_path, monkeypatch, options):
    pytest.importorskip("trl")
    assert_alike(here, tmp_path, monkeypatch, "sft.py", SFT + options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options", ["", " --precompute_ref_log_probs true", LORA + " --ignore_bias_buffers true"]
)
def test_dpo(here, tmp_path, monkeypatch, options):
    pytest.importorskip("trl")
    assert_alike(here, tmp_path, monkeypatch, "dpo.py", DPO + options)
