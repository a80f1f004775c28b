"""Chat files of other tools: their columns and messages, as messages with a role and a content.

    messages          role and content, where the content may be a list of parts (OpenAI, TRL)
    ShareGPT          conversations: a list of from and value, and perhaps a column system
    prompt/completion two texts, or two lists of messages (TRL); also prompt/response and
                      question/answer
    Alpaca            instruction, output, and perhaps input, system and history
    Dolly             instruction, response, and perhaps context

Files of preferences, with chosen and rejected answers, are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridtrain.errors import DataError, argument, setting

MESSAGES = "messages"
"""The default column of messages; without it, the columns of a file decide on its format."""

TOOLS = "tools"
"""The default column of tools, which a file need not have."""

Message = dict[str, Any]

# ShareGPT's names of roles, in the files of several tools
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}

# which some files have as roles; other names, such as observation, may be the template's own
_OTHER_NAMES = {name: _ROLES[name] for name in ("human", "gpt", "chatgpt", "bot")}
_OTHER_NAMES |= {name: name for name in ("system", "user", "assistant", "tool")}


@dataclass(frozen=True)
class ChatFormat:
    """A format of chat files.

    Attributes:
        name: the format, for the data line; empty for a column of messages.
        columns: the columns that it needs.
        optional: the columns that it reads if they exist.
        messages: returns the messages of a sample, in any of the formats of messages.
    """

    name: str
    columns: tuple[str, ...]
    optional: tuple[str, ...]
    messages: Callable[[Mapping[str, Any]], Any]


def _turns(column: str) -> Callable[[Mapping[str, Any]], Any]:
    def messages(sample: Mapping[str, Any]) -> Any:
        turns = _listed(sample[column])
        system = sample.get("system")
        if not system or not isinstance(turns, list) or not turns:
            return turns
        first = turns[0] if isinstance(turns[0], dict) else {}
        has_one = "system" in {str(first.get(key)).lower() for key in ("role", "from")}
        return turns if has_one else [{"role": "system", "content": system}, *turns]

    return messages


def _listed(turns: Any) -> Any:
    """Returns the messages in JSON text, or in a list of each field, as a list."""
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        return _from_json(turns, "the list of messages")
    fields = [*turns.values()] if isinstance(turns, dict) else []
    if all(isinstance(field, list) for field in fields) and len({*map(len, fields)}) == 1:
        # as in older Parquet files
        return [dict(zip(turns, row, strict=True)) for row in zip(*fields, strict=True)]
    return turns


def _pair(asked: str, answered: str) -> ChatFormat:
    def messages(sample: Mapping[str, Any]) -> list[Any]:
        turns: list[Any] = []
        for column, role in ((asked, "user"), (answered, "assistant")):
            value = sample[column]
            turns += value if isinstance(value, list) else [{"role": role, "content": value}]
        return turns

    return ChatFormat(f"{asked}/{answered}", (asked, answered), (), messages)


def _instruction(context: str, answer: str) -> Callable[[Mapping[str, Any]], list[Message]]:
    def messages(sample: Mapping[str, Any]) -> list[Message]:
        system, history = sample.get("system"), sample.get("history") or []
        turns = [("system", system)] if system else []
        turns += [pair for old in history for pair in zip(("user", "assistant"), old, strict=True)]
        asked = "\n".join(filter(None, (sample["instruction"], sample.get(context))))
        turns += [("user", asked), ("assistant", sample[answer])]
        return [{"role": role, "content": content} for role, content in turns]

    return messages


FORMATS = (
    ChatFormat("ShareGPT", ("conversations",), ("system",), _turns("conversations")),
    _pair("prompt", "completion"),
    _pair("prompt", "response"),
    _pair("question", "answer"),
    ChatFormat(
        "Alpaca",
        ("instruction", "output"),
        ("input", "system", "history"),
        _instruction("input", "output"),
    ),
    ChatFormat(
        "Dolly", ("instruction", "response"), ("context",), _instruction("context", "response")
    ),
)
"""The formats without a column `messages`, in the order in which they are tried."""


def format_of(features: Mapping[str, Any], column: str, split: str) -> ChatFormat:
    """Returns the format of a split with these columns.

    Args:
        features: the types of the columns, by name.
        column: the column of messages.
        split: the name of the split, for messages.

    Raises:
        DataError: the columns are of none of the formats, or those of preferences.
    """
    if "functions" in features:
        raise DataError(
            f"the column functions of the {split} split is an older form of tools, which chat "
            "templates do not take: rename it to tools, with each function as "
            '{"type": "function", "function": {...}}'
        )
    if column in features:
        return ChatFormat("", (column,), ("system",), _turns(column))
    _refuse_preferences(features, split)
    for chat_format in FORMATS if column == MESSAGES else ():
        if all(name in features for name in chat_format.columns):
            return chat_format
    shown = "; ".join(f"{', '.join(other.columns)} ({other.name})" for other in FORMATS)
    others = f". Other formats have the columns {shown}" if column == MESSAGES else ""
    raise DataError(
        f"{setting('messages', column)}: the {split} split has no such column; it has "
        f"{', '.join(features)}{others}"
    )


def _refuse_preferences(features: Mapping[str, Any], split: str) -> None:
    if "rejected" in features:
        way_out = (
            f"to train on the chosen answers, set {setting('messages', 'chosen')} if that column "
            "has whole conversations, or else write them as the columns prompt and completion"
        )
        raise DataError(
            f"the {split} split has preferences (the columns "
            f"{', '.join(name for name in ('prompt', 'chosen', 'rejected') if name in features)}), "
            f"which this data set does not train on: {way_out}"
        )
    if {"prompt", "completion", "label"} <= {*features} and "bool" in str(features["label"]):
        raise DataError(
            f"the {split} split has preferences (the columns prompt, completion, label), which "
            "this data set does not train on: keep the samples with the label true, without that "
            "column"
        )


def plain_messages(turns: Any) -> list[Message] | None:
    """Returns messages with a role and, unless it is null, a content that is a text.

    Converts ShareGPT's from and value, OpenAI's content parts, and arguments of tool calls in JSON.

    Returns None if `turns` is not a list of messages.

    Raises:
        DataError: a role is unknown, a part of a content is not a text, or a call is not JSON.
    """
    if not isinstance(turns, list) or not turns:
        return None
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            return None
        message = {key: value for key, value in turn.items() if value is not None}
        if "role" not in message and "from" in message:
            message = _from_sharegpt(message)
        if "role" not in message:
            return None
        role = str(message["role"]).lower()
        message["role"] = _OTHER_NAMES.get(role, message["role"])
        if "function_call" in message:  # the older form of a single call
            call = {"type": "function", "function": message.pop("function_call")}
            message["tool_calls"] = [call]
        if len(message) == 1:
            raise DataError(f"a message of the role {message['role']} has no content")
        if isinstance(content := message.get("content", ""), list | dict):
            parts = content if isinstance(content, list) else [content]
            message["content"] = "".join(map(_text_of_part, parts))
        elif not isinstance(content, str):
            raise DataError(f"a content must be a text or a list of parts, not {content!r}")
        if "tool_calls" in message:
            message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
        messages.append(message)
    return messages


def _from_sharegpt(turn: Message) -> Message:
    speaker, value = turn["from"], turn.get("value")
    if str(speaker).lower() not in _ROLES:
        raise DataError(f"from={speaker!r} is unknown; the names are {', '.join(_ROLES)}")
    others = {key: x for key, x in turn.items() if key not in ("from", "value")}
    if str(speaker).lower() != "function_call":
        return {"role": _ROLES[str(speaker).lower()], "content": value, **others}
    calls = _from_json(value, "the value of a function_call")
    calls = calls if isinstance(calls, list) else [calls]
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
        **others,
    }


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) else None
    text = text.get("value") if isinstance(text, dict) else text
    if isinstance(text, str):
        return text
    kind = part.get("type") if isinstance(part, dict) else part
    raise DataError(f"a content has a part of the type {kind}, but only texts can be learned")


def _call(call: Any) -> Any:
    """Returns a tool call with its arguments as an object: templates write these as JSON."""
    call = without_nulls(call)
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        arguments = _from_json(function["arguments"] or "{}", "the arguments of a tool call")
        call["function"] = {**function, "arguments": arguments}
    return call


def tools_of(value: Any) -> list[Any] | None:
    """Returns the tools of a sample: a list, also as JSON text; None if it has none.

    Raises:
        DataError: the value is something else.
    """
    if isinstance(value, str):
        value = _from_json(value, "the column of tools") if value.strip() else None
    if isinstance(value, list):
        # some files have each tool as JSON text
        value = [
            _from_json(tool, "a tool") if isinstance(tool, str) else without_nulls(tool)
            for tool in value
        ]
        if all(isinstance(tool, dict) for tool in value):
            return value or None
    elif value is None:
        return None
    raise DataError(f"the tools must be a list of objects or such a list as JSON, not {value!r}")


def _from_json(text: Any, what: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError) as error:
        raise DataError(f"{what} is not JSON: {str(text)[:80]!r} ({error})") from error


def without_nulls(value: Any) -> Any:
    """Returns nested values without the keys that are null: Arrow gives all objects all keys."""
    if isinstance(value, dict):
        return {key: without_nulls(x) for key, x in value.items() if x is not None}
    return [without_nulls(x) for x in value] if isinstance(value, list) else value


def columns_not_used(
    features: Mapping[str, Any], chat_format: ChatFormat, tools: str | None
) -> Sequence[str]:
    """Returns the columns of a split that a format does not read."""
    used = {*chat_format.columns, *chat_format.optional, tools}
    return [name for name in features if name not in used]


def check_tools(column: str | None, features: Mapping[str, Any], split: str) -> str | None:
    """Returns the column of tools, or None if there is none.

    Raises:
        DataError: the column was chosen, but does not exist.
    """
    if column is None or column in features:
        return column
    if column == TOOLS:
        return None
    raise DataError(
        f"{setting('tools', column)}: the {split} split has no such column; it has "
        f"{', '.join(features)}; {argument('tools')}null: no tools"
    )
