"""Texts that a run generates: samples in the log and TensorBoard, exact match and ROUGE."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from cli_runs import fail, succeed
from support.launch import forked_command
from support.small_hub import (
    write_bert,
    write_chats,
    write_gpt2,
    write_llama,
    write_reviews,
    write_t5,
)

from hybridtrain.loss import METRICS

FEW = [
    *("data.max_len=24", "data.batch_size=8", "trainer.epochs=null", "world.devices=cpu"),
    *("lr_schedule.warmup_steps=0", "monitor.report=false", "data.eval_share=0.2"),
]
SUMMARIES = [
    *("recipe=t5_summaries", "model.source=./t5", "data.path=reviews.jsonl", "optim.lr=0.03"),
    *FEW,
]
CHAT = [
    *("recipe=sft_chat", "model.source=./llama", "model.dtype=float32", "model.lora=null"),
    *("init_from=null", "data.path=chats.jsonl", "optim.lr=0.01", *FEW),
]
SAMPLE = re.compile(r"step (\d+), sample (\d): prompt '(.*)'  generated '(.*)'  reference '(.*)'")


def t5() -> None:
    write_bert(Path("bert"))
    write_t5(Path("t5"), Path("bert"))
    write_reviews(Path("reviews.jsonl"), 24)


def evaluated(run: str) -> dict[str, float]:
    result: dict[str, float] = json.loads(Path(f"outputs/{run}/summary.json").read_text())["eval"]
    return result


def scores(run: str) -> dict[str, float]:
    """Returns the scores of texts; the loss in a pipeline may differ in its last bits."""
    return {name: x for name, x in evaluated(run).items() if name.startswith(("rouge", "exact"))}


def generated_by_the_export(run: str, texts: Sequence[str]) -> list[str]:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    (folder,) = Path(f"outputs/{run}/export").iterdir()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    net = AutoModelForSeq2SeqLM.from_pretrained(folder)
    batch = tokenizer(list(texts), return_tensors="pt", padding=True)
    made = net.generate(**batch, max_new_tokens=5)
    return [text.strip() for text in tokenizer.batch_decode(made, skip_special_tokens=True)]


def test_samples_and_scores_are_those_of_the_exported_model(
    capfd: pytest.CaptureFixture[str],
) -> None:
    from torchmetrics.text import ROUGEScore

    t5()
    texts = ["callbacks={samples: {number: 2, max_new_tokens: 5}}", "checkpoint.best=rouge/rougeL"]
    metrics = "trainer.metrics={rouge: {max_new_tokens: 5}, exact_match: {max_new_tokens: 5}}"
    train = [*SUMMARIES, "trainer.steps=16", "data.eval_path=reviews.jsonl", *texts, metrics]
    train += ["data.group_by_length=true"]
    said = succeed(capfd, *train, "pipeline.nb_part=1")
    succeed(capfd, "export", "run_name=t5_summaries", "format=transformers", "resume=last")
    rows = [json.loads(line) for line in Path("reviews.jsonl").read_text().splitlines()]
    made = generated_by_the_export("t5_summaries", [row["text"] for row in rows])
    right = [row["summary"] for row in rows]
    values = evaluated("t5_summaries")
    equal = [one == other for one, other in zip(made, right, strict=True)]
    assert values["exact_match"] == pytest.approx(sum(equal) / len(equal))
    assert 0 < values["exact_match"] < 1
    scores = ROUGEScore(rouge_keys=("rouge1", "rougeL"))(made, right)
    for name in ("rouge1", "rougeL"):
        assert values[f"rouge/{name}"] == pytest.approx(float(scores[f"{name}_fmeasure"]))
    shown = [match.groups() for match in SAMPLE.finditer(said) if match[1] == "16"]
    assert shown == [("16", str(n + 1), rows[n]["text"], made[n], right[n]) for n in (0, 1)]


def test_tensorboard_has_the_samples_of_a_chat(capfd: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_llama(Path("llama"), layers=1)
    write_chats(Path("chats.jsonl"), 20)
    said = succeed(capfd, *CHAT, "trainer.steps=12", "callbacks=[samples]", "data.pack=true")
    last = SAMPLE.findall(said)[-1]
    assert last[3]  # it has learnt to answer with something
    assert len(last[4].split()) == 2  # the last answer
    events = EventAccumulator("outputs/sft_chat").Reload()
    (sample,) = events.Tensors(f"samples/{last[1]}/text_summary")
    text = sample.tensor_proto.string_val[0].decode()
    assert sample.step == 12
    assert [line.strip() for line in text.splitlines() if line.strip()] == [
        f"{name}: {value}" for name, value in zip(("prompt", "generated", "reference"), last[2:],
                                                  strict=True)
    ]  # fmt: skip


@pytest.mark.thorough
def test_prompts_of_the_user_go_through_the_chat_template(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_llama(Path("llama"), layers=1)
    write_chats(Path("chats.jsonl"), 20)
    prompts = "callbacks={samples: {prompts: [good film, bad plot], max_new_tokens: 3}}"
    said = succeed(capfd, *CHAT, "trainer.steps=1", prompts, "data.group_by_length=true")
    assert "sample 1: prompt 'good film'  generated '" in said
    assert "sample 2: prompt 'bad plot'  generated '" in said
    assert "reference" not in said


@pytest.mark.thorough
def test_a_plain_text_is_continued_from_its_first_tokens(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_gpt2(Path("gpt2"))
    write_reviews(Path("reviews.jsonl"), 80)
    text = [
        "recipe=gpt2_text",
        "model.source=./gpt2",
        "model.config=null",
        "data.tokenizer=./gpt2",
        *FEW,
    ]
    text += ["data.path=reviews.jsonl", "trainer.steps=1", "callbacks=[samples]"]
    (_, _, prompt, _, reference), *_ = SAMPLE.findall(succeed(capfd, *text))
    assert 10 < len(prompt.split()) <= 16
    assert reference
    said = fail(capfd, *text, "trainer.metrics=[rouge]", "run_name=scored")
    assert "there is no prompt: use data=chat, or data.task=seq2seq" in said


@pytest.mark.thorough
def test_stages_processes_and_replicas_generate_and_score_the_same(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    t5()
    write_reviews(Path("eval.jsonl"), 9)
    train = [*SUMMARIES, "trainer.steps=5", "callbacks={samples: {max_new_tokens: 5}}"]
    train += ["data.eval_path=eval.jsonl"]
    metrics = "trainer.metrics={rouge: {max_new_tokens: 5}, exact_match: {max_new_tokens: 5}}"
    train += ["world.replicas=2"]
    alone = succeed(capfd, *train, metrics, "pipeline.nb_part=1")
    piped = succeed(capfd, *train, metrics, "pipeline.nb_part=2", "run_name=piped")
    assert SAMPLE.findall(piped) == SAMPLE.findall(alone)
    assert scores("piped") == scores("t5_summaries")
    assert 0 < scores("piped")["rouge/rouge1"] < 1
    two = forked_command(2, [*train, metrics, "pipeline.nb_part=1", "run_name=two"], tmp_path / "a")
    assert SAMPLE.findall(two) == SAMPLE.findall(alone)
    assert evaluated("two") == evaluated("t5_summaries")
    # replicas of two processes each, with different numbers of batches to evaluate
    apart = ["world.engine=distributed", "pipeline.nb_part=2", "run_name=apart"]
    four = forked_command(4, [*train, metrics, *apart], tmp_path / "b")
    assert SAMPLE.findall(four) == SAMPLE.findall(alone)
    assert scores("apart") == scores("t5_summaries")


def test_scores_of_texts_do_not_depend_on_the_order_of_their_batches() -> None:
    pairs = [(f"a {'b ' * (n % 3)}c{n % 4}", f"b a c{n % 2} d") for n in range(9)]
    values = []
    for sizes in ([9], [2, 4, 3], [1] * 9):
        metric, left = METRICS["rouge"](), pairs[::-1] if sizes == [9] else pairs
        for size in sizes:
            batch, left = left[:size], left[size:]
            metric.update(*zip(*batch, strict=True))
        values.append({name: float(value) for name, value in metric.compute().items()})
    assert values[0] == values[1] == values[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.metrics=[bleu]"], "the metrics of generated texts are exact_match and rouge"),
        (["trainer.metrics={rouge: {max_new_tokens: 0}}"],
         "trainer.metrics.rouge.max_new_tokens=0 must be a whole number of at least 1"),
        (["trainer.metrics={rouge: {tokens: 3}}"], "did you mean trainer.metrics.rouge.max_new"),
        (["callbacks={samples: {prompts: good}}"], "callbacks.samples.prompts=good must be a list"),
        (["callbacks=[samples]"], "samples of generated text need an evaluation split and the tok"),
        (["trainer.metrics=[rouge]"], "Sequential does not generate texts"),
    ],
    ids=["another score", "no tokens", "another key", "a text", "images", "scores of images"],
)  # fmt: skip
@pytest.mark.quick_cases("images", "another score")
def test_generated_texts_that_cannot_be_had_are_one_line(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said = fail(capfd, "recipe=digits", "trainer.epochs=null", "trainer.steps=1", *words)
    assert message in said
    assert said.count("\n") == 1
