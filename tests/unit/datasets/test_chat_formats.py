"""Chat files as other tools write them: every format is the same conversation."""

import json

import pytest
from support.cases import installed
from support.small_hub import write_llama

from hybridtrain.datasets import chat
from hybridtrain.errors import DataError

installed("transformers")
installed("datasets")
pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

TURNS = [("system", "very"), ("user", "good film"), ("assistant", "nice plot")]
MESSAGES = [{"role": role, "content": content} for role, content in TURNS]
CALL = {"name": "film", "arguments": {"actor": "good"}}
TOOLS = [{"type": "function", "function": {"name": "story", "parameters": {"plot": None}}}]
WITH_TOOLS = (
    "{% if tools %}<|system|> {% for tool in tools %}{{ tool.function.name }} {% endfor %}</s> "
    "{% endif %}{% for m in messages %}<|{{ m.role }}|> {{ m.content or '' }} "
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments.actor }} "
    "{% endfor %}</s> {% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
SAME = {
    "messages": {"messages": MESSAGES},
    "OpenAI's parts": {
        "messages": [
            {**m, "content": [{"type": "text", "text": part} for part in (m["content"], "")]}
            for m in MESSAGES
        ]
    },
    "one part": {"messages": [{**m, "content": {"text": m["content"]}} for m in MESSAGES]},
    "parts of OpenAI's assistants": {
        "messages": [{**m, "content": [{"text": {"value": m["content"]}}]} for m in MESSAGES]
    },
    "JSON text": {"messages": json.dumps(MESSAGES)},
    "JSON text with a column system": {"messages": json.dumps(MESSAGES[1:]), "system": "very"},
    "System, with a column system": {
        "messages": [{**MESSAGES[0], "role": "System"}, *MESSAGES[1:]],
        "system": "other",
    },
    "columns in a list": {"messages": {"role": [*dict(TURNS)], "content": [*dict(TURNS).values()]}},
    "ShareGPT's names as roles": {
        "messages": [
            {"role": role, "content": content}
            for role, (_, content) in zip(("System", "human", "gpt"), TURNS, strict=True)
        ]
    },
    "ShareGPT": {
        "conversations": [
            {"from": name, "value": value}
            for name, (_, value) in zip(("system", "human", "gpt"), TURNS, strict=True)
        ]
    },
    "ShareGPT with a column system": {
        "conversations": [
            {"from": "human", "value": "good film"},
            {"from": "gpt", "value": "nice plot"},
        ],
        "system": "very",
    },
    "ShareGPT with other names": {
        "conversations": [
            {"from": name, "value": value}
            for name, (_, value) in zip(("system", "Human", "bot"), TURNS, strict=True)
        ]
    },
    "question/answer": {"question": MESSAGES[:2], "answer": MESSAGES[2:]},
    "prompt/completion": {"prompt": MESSAGES[:2], "completion": MESSAGES[2:]},
    "Alpaca": {
        **{"instruction": "good", "input": "film", "output": "nice plot", "system": "very"},
        "history": [],
    },
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "llama"
    write_llama(folder)
    return str(folder)


@pytest.fixture
def read(tmp_path, llama):
    """Reads a file of these samples, which is also the evaluation split."""

    def reading(*samples, template=None, **settings):
        file = tmp_path / "chats.jsonl"
        file.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        if template is not None:
            (tmp_path / "own.jinja").write_text(template)
            settings["chat_template"] = str(tmp_path / "own.jinja")
        return chat(str(file), llama, eval_path=str(file), **settings)

    return reading


def words(data, index=0):
    """What the model sees, and what it learns."""
    inputs, labels = data.train[index]
    decode = data.tokenizer.convert_ids_to_tokens
    seen = decode(inputs["input_ids"].tolist())
    return " ".join(seen), " ".join(decode(labels[labels != -100].tolist()))


@pytest.mark.parametrize("written", SAME)
def test_a_conversation_is_the_same_in_every_format(written, read):
    data = read(SAME[written])
    seen, learned = words(data)
    assert seen == "<|system|> very </s> <|user|> good film </s> <|assistant|> nice plot"
    assert learned == "nice plot </s>"
    name = written.split(" with")[0]
    named = ("ShareGPT", "prompt/completion", "question/answer", "Alpaca")
    assert (f"; {name} (" in str(data)) == (name in named)


def test_prompts_and_completions_that_are_texts_are_turns(read):
    data = read({"prompt": "good film", "completion": "nice plot", "source": "x"})
    assert words(data) == ("<|user|> good film </s> <|assistant|> nice plot", "nice plot </s>")
    assert "columns not used: source" in str(data)
    data = read({"instruction": "good", "context": "film", "response": "nice plot"})
    assert words(data)[0] == "<|user|> good film </s> <|assistant|> nice plot"


@pytest.mark.parametrize("form", ["list", "json", "texts"])
def test_tools_reach_the_template_and_the_data_line_counts_them(form, read):
    tools = {"list": TOOLS, "json": json.dumps(TOOLS), "texts": [json.dumps(t) for t in TOOLS]}
    samples = [{"messages": MESSAGES[1:], "tools": tools[form]}, {"messages": MESSAGES[1:]}]
    data = read(*samples, template=WITH_TOOLS)
    assert words(data)[0].startswith("<|system|> story </s> <|user|>")
    assert words(data, 1)[0].startswith("<|user|>")
    assert "1 with tools, from the column tools" in str(data)
    without = read(*samples, template=WITH_TOOLS, tools=None)
    assert words(without)[0].startswith("<|user|>")
    with pytest.raises(DataError, match=r"does not render them: .* by tools=None"):
        read(*samples)


@pytest.mark.parametrize("form", ["object", "json", "older", "sharegpt"])
def test_calls_of_tools_are_learned_with_their_arguments(form, read):
    call = {"type": "function", "function": CALL}
    if form == "json":
        call = {"type": "function", "function": {**CALL, "arguments": '{"actor": "good"}'}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    sample = {"messages": [MESSAGES[1], turn]}
    if form == "older":
        call = {**CALL, "arguments": '{"actor": "good"}'}
        turn = {"role": "assistant", "content": None, "function_call": call}
        sample = {"messages": [MESSAGES[1], turn]}
    if form == "sharegpt":
        call = {"from": "function_call", "value": json.dumps(CALL)}
        sample = {"conversations": [{"from": "human", "value": "good film"}, call]}
    assert words(read(sample, template=WITH_TOOLS))[1] == "film good </s>"
    with pytest.raises(DataError, match=r"does not render tool_calls: .*chat_template="):
        read(sample)


def test_empty_answers_are_counted(read):
    empty = [*MESSAGES[:2], {"role": "assistant", "content": " "}]
    assert "2 answers are empty" in str(
        read({"messages": [*empty, *empty]}, {"messages": MESSAGES})
    )
    with pytest.raises(DataError, match="a content must be a text or a list of parts, not 3"):
        read({"messages": [{"role": "user", "content": 3}, MESSAGES[2]]})


def test_an_answer_of_weight_0_is_not_learned(read):
    turns = [*MESSAGES, MESSAGES[1], {**MESSAGES[2], "content": "poor"}]
    turns[2] = {**turns[2], "weight": 0}
    assert words(read({"messages": turns}))[1] == "poor </s>"
    tagged = (
        "{% for m in messages %}<|{{ m.role }}|> {% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }} </s>{% endgeneration %} {% else %}{{ m.content }} </s> {% endif %}"
        "{% endfor %}"
    )
    assert words(read({"messages": turns}, template=tagged))[1] == "poor </s>"


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            {"prompt": "good", "chosen": "nice", "rejected": "bad"},
            r"preferences \(the columns prompt, chosen, rejected\).* set messages=chosen",
        ),
        ({"prompt": "good", "completion": "nice", "label": True}, "has preferences .* label"),
        ({"messages": MESSAGES, "functions": [CALL]}, "rename it to tools"),
        ({"conversations": [{"from": "me", "value": "good"}]}, "sample 1 .*: from='me' is unknown"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}]},
            "sample 1 .*: a content has a part of the type image_url",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "role assistant has no content"),
        ({"messages": MESSAGES, "tools": "{"}, "the column of tools is not JSON"),
        ({"messages": MESSAGES, "tools": "3"}, "the tools must be a list"),
        ({"query": "good", "reply": "nice"}, r"Other .* conversations \(ShareGPT\)"),
    ],
)
def test_a_file_that_cannot_be_learned_as_it_is_meant_is_named(sample, message, read):
    with pytest.raises(DataError, match=message):
        read(sample)


def test_conversations_of_preferences_train_on_the_chosen_ones(read):
    sample = {"chosen": MESSAGES, "rejected": [*MESSAGES[:2], {**MESSAGES[2], "content": "bad"}]}
    data = read(sample, messages="chosen")
    assert words(data)[1] == "nice plot </s>"
    assert "columns not used: rejected" in str(data)


@pytest.mark.parametrize("end", ["", " </s> ", " </s>\n"])
@pytest.mark.parametrize("tag", [False, True])
def test_a_template_that_does_not_end_answers_is_named_in_numbers(end, tag, read):
    start, stop = ("{% generation %}", "{% endgeneration %}") if tag else ("", "")
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|> "
        + f"{start}{{{{ m.content }}}}{end}{stop}"
        + "{% else %}<|user|> {{ m.content }} {% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
    )
    data = read({"messages": MESSAGES}, {"messages": [*MESSAGES, *MESSAGES]}, template=template)
    said = "3 of 3 answers do not end with a special token"
    assert (said in str(data)) == (not end)


def test_answers_beyond_max_len_are_told_from_conversations_without_answers(read):
    late = {"messages": [{"role": "user", "content": "good " * 20}, MESSAGES[2]]}
    data = read({"messages": MESSAGES}, late, {"messages": MESSAGES[:2]}, max_len=12)
    assert len(data.train) == 1
    line = str(data)
    assert "1 to train on left out, because they contain no answer" in line
    assert "1 to train on left out, because its answer begins after max_len=12 tokens" in line
    with pytest.raises(DataError, match=r"none of the 1 .* has a message of the role assistant"):
        read({"messages": MESSAGES[:2]})


def test_prompts_and_completions_in_a_table_have_any_separator(llama, tmp_path):
    file = tmp_path / "chats.csv"
    file.write_text("prompt^completion\n" + "good film^nice plot\n" * 4)
    data = chat(str(file), llama, eval_path=str(file), separator="^")
    assert words(data) == ("<|user|> good film </s> <|assistant|> nice plot", "nice plot </s>")
