"""Conversations: what is learnt, what is cut, and windows that are as good as single samples."""

import json
from pathlib import Path

import pytest
import torch
from support.cases import installed
from support.small_hub import write_chats, write_llama

from hybridtrain.datasets import chat
from hybridtrain.errors import DataError
from hybridtrain.loss import cross_entropy

installed("transformers")
installed("datasets")
pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

TALK = [
    {"role": "user", "content": "good film"},
    {"role": "assistant", "content": "nice plot"},
    {"role": "user", "content": "bad scene"},
    {"role": "assistant", "content": "poor"},
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "llama"
    write_llama(folder)
    return str(folder)


@pytest.fixture
def path(tmp_path):
    """Two conversations that are the same, of which one is held out."""
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": TALK}) + "\n" for _ in range(2)))
    return str(file)


def learnt_words(data, index=0):
    """The tokens that have a loss, and those that the model sees."""
    inputs, labels = data.train[index]
    decode = data.tokenizer.convert_ids_to_tokens
    return decode(labels[labels != -100].tolist()), decode(inputs["input_ids"].tolist())


def test_the_loss_is_on_the_answers_and_the_tokens_that_end_them(path, llama):
    data = chat(path, llama)
    learnt, seen = learnt_words(data)
    assert learnt == ["nice", "plot", "</s>", "poor", "</s>"]
    assert " ".join(seen) == (
        "<|user|> good film </s> <|assistant|> nice plot </s> "
        "<|user|> bad scene </s> <|assistant|> poor"
    )
    everything, _ = learnt_words(chat(path, llama, learn="all"))
    assert everything == [*seen[1:], "</s>"]


def test_a_template_may_say_itself_what_is_learnt(path, llama, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|> "
        "{% generation %}{{ message.content }} </s>{% endgeneration %} {% else %}"
        "<|user|> {{ message.content }} </s> {% endif %}{% endfor %}"
    )
    data = chat(path, llama, chat_template=str(template))
    assert learnt_words(data)[0] == ["nice", "plot", "</s>", "poor", "</s>"]
    assert data.tokenizer.chat_template == template.read_text()


def test_the_line_on_the_data_says_what_max_len_cuts(path, llama):
    whole = " ".join(chat(path, llama).notes)
    assert "of 15 tokens (median), 15 (longest)" in whole
    assert "; 5 learned tokens" in whole
    assert "max_len" not in whole
    cut = " ".join(chat(path, llama, max_len=8).notes)
    assert "max_len=8 truncates 100.0% of them and removes 40.0% of the 5 learned tokens" in cut
    with pytest.raises(DataError, match="none of the 1 conversations to train on has an answer"):
        chat(path, llama, max_len=3)


def test_a_window_of_whole_conversations_gives_the_loss_of_each_alone(llama, tmp_path):
    from transformers import LlamaForCausalLM

    write_chats(tmp_path / "chats.jsonl", 30)
    path = str(tmp_path / "chats.jsonl")
    alone, packed = (chat(path, llama, pack=pack, max_len=64) for pack in (False, True))
    assert len(packed.train) < len(alone.train) / 2
    assert f"{len(alone.train)} conversations in {len(packed.train)} windows" in str(packed)
    for attention in ("eager", "sdpa"):
        net = LlamaForCausalLM.from_pretrained(llama, attn_implementation=attention).eval()
        sums = []
        for data in (alone, packed):
            total, count = torch.zeros(()), 0
            with torch.no_grad():
                for start in range(0, len(data.train), 4):
                    items = [data.train[i] for i in range(start, min(start + 4, len(data.train)))]
                    inputs, labels = data.collate(items)
                    here = int((labels != -100).sum())
                    total += cross_entropy(net(**inputs), labels) * here
                    count += here
            sums.append((count, total / count))
        assert sums[0][0] == sums[1][0]
        torch.testing.assert_close(sums[0][1], sums[1][1])


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"messages": "hello"}, "must have a list of messages such as"),
        ({"messages": []}, "must have a list of messages such as"),
        ({"text": "hello"}, "messages=messages: .* no such column"),
    ],
)
def test_a_sample_without_messages_is_named(sample, message, llama, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(sample) + "\n" + json.dumps(sample) + "\n")
    with pytest.raises(DataError, match=message):
        chat(str(file), llama)


def test_a_tokenizer_without_a_template_says_what_to_set(path, llama, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(DataError, match=r"has no chat template: .* set chat_template="):
        chat(path, str(tmp_path / "plain"))
    with pytest.raises(DataError, match="cannot read chat_template="):
        chat(path, llama, chat_template=str(Path(tmp_path) / "nothing.jinja"))
