"""Owns the meaning of a row: which columns hold what, where answers are asked for, what is wrong.

Refuses to know files, ids used twice, splits by hash, and token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distill.corpus.config import Split
from distill.corpus.prompts import Message, Prompt, content_id
from distill.errors import CorpusError

PROMPT_COLUMNS = ("turns", "prompt", "messages")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_ASKING = ("user", "tool")  # after one of these the model speaks
# Beside role and content: what chat templates read, kept as it is.
_KEPT_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content")


@dataclass(frozen=True)
class ReadRow:
    """A prompt, whether its id is the row's own, and the split the row names, if any."""

    prompt: Prompt
    has_own_id: bool
    own_split: Split | None


def read_row(
    row: Mapping[str, Any], place: str, *, column: str | None, max_turns: int | None, label: str
) -> ReadRow:
    """Check a row and take it apart.

    Raises:
        CorpusError: malformed; names the place and what was expected.
    """
    turns, reason = split_turns(_messages(row, column, place))
    if reason is None:
        turns = turns[:max_turns]
    first, later = (turns[0], turns[1:]) if turns else ((), ())
    own_split = _optional_text(row, "split", place)
    if own_split not in (None, "train", "held_out"):
        raise CorpusError(f"{place}: split is {own_split!r}; write 'train' or 'held_out'")
    split: Split | None = None
    if own_split is not None:
        split = "held_out" if own_split == "held_out" else "train"
    prompt = Prompt(
        prompt_id="",
        task=_optional_text(row, "task", place) or "default",
        split=split or "train",
        messages=first,
        reject_reason=reason,
        reject_kind=None if reason is None else "no_user_turn",
        later_turns=tuple(later),
        tools=_tools(row, place),
    )
    own_id = _optional_text(row, "id", place)
    named = content_id(prompt) if own_id is None else label + own_id
    return ReadRow(replace(prompt, prompt_id=named), own_id is not None, split)


def split_turns(
    messages: Sequence[Message],
) -> tuple[list[tuple[Message, ...]], str | None]:
    """(what is said before each answer, why nothing can be answered).

    A plain assistant message stands where the model answers itself, so it is left out. One that
    calls a tool is kept, with the result after it: the tool cannot be called here.
    """
    turns: list[tuple[Message, ...]] = []
    current: list[Message] = []
    following = [message["role"] for message in messages[1:]] + [None]
    for message, next_role in zip(messages, following, strict=True):
        role = message["role"]
        asks = bool(current) and current[-1]["role"] in _ASKING
        if role == "assistant" and not message.get("tool_calls") and next_role != "tool":
            if asks:
                turns.append(tuple(current))
                current = []
            elif not turns:
                return [tuple(current)], "the first turn is the assistant's, not the user's"
            continue
        if not turns and all(m["role"] != "user" for m in current):
            if role in ("assistant", "tool"):
                return [tuple(current)], f"the first turn is the {role}'s, not the user's"
        elif asks and role not in ("assistant", "tool"):
            turns.append(tuple(current))
            current = []
        current.append(message)
    opening = tuple(current)
    while current and current[-1]["role"] not in _ASKING:
        current.pop()  # nothing is asked after it
    if current:
        turns.append(tuple(current))
    return (turns, None) if turns else ([opening], "it has no user turn")


def _messages(row: Mapping[str, Any], column: str | None, place: str) -> list[Message]:
    columns = (column,) if column else PROMPT_COLUMNS
    present = [name for name in columns if row.get(name) is not None]
    if len(present) != 1:
        raise CorpusError(
            f"{place}: needs exactly one of {', '.join(columns)}; it has "
            f"{', '.join(present) or 'none of them'} (its keys: {', '.join(map(str, row))})"
        )
    value = row[present[0]]
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, Sequence) or not value:
        raise CorpusError(f"{place}: {present[0]} is {value!r}; a text or a list was expected")
    return [_message(entry, present[0], place) for entry in value]


def _message(entry: Any, column: str, place: str) -> Message:
    if isinstance(entry, str):
        entry = {"role": "user", "content": entry}
    if not isinstance(entry, Mapping):
        raise CorpusError(f"{place}: {column} holds {entry!r}; a text or a message was expected")
    role, content = entry.get("role"), entry.get("content")
    if role not in _ROLES:
        raise CorpusError(f"{place}: a message has role {role!r}; known: {', '.join(_ROLES)}")
    kept = {key: entry[key] for key in _KEPT_KEYS if entry.get(key)}
    if "tool_calls" in kept:
        kept["tool_calls"] = _tool_calls(kept["tool_calls"], place)
    if content is None and role == "assistant" and "tool_calls" in kept:
        content = ""
    if not isinstance(content, str):
        raise CorpusError(f"{place}: the content of a {role} message is {content!r}, not a text")
    if role == "user" and not content.strip():
        raise CorpusError(f"{place}: a user turn is empty")
    _encodable(json.dumps(kept, ensure_ascii=False, default=str), f"a {role} message", place)
    return {"role": role, "content": _encodable(content, f"a {role} message", place), **kept}


def _tool_calls(value: Any, place: str) -> list[Mapping[str, Any]]:
    """Calls as templates read them: arguments as an object, also where they came as JSON text."""
    calls = _from_text(value, "tool_calls", place)
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise CorpusError(f"{place}: tool_calls is {value!r}; a list of calls was expected")
    return [_with_read_arguments(call) for call in calls]


def _with_read_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _with_read_arguments(function)}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        return call  # words; whether it can be written is the template's to say
    return {**call, "arguments": read} if isinstance(read, dict) else call


def _from_text(value: Any, what: str, place: str) -> Any:
    """The value, read from JSON where it is text: tables keep nested values so."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{place}: {what} is text, but not JSON ({error})") from error


def _tools(row: Mapping[str, Any], place: str) -> tuple[Mapping[str, Any], ...]:
    tools = _from_text(row.get("tools"), "tools", place)
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise CorpusError(f"{place}: tools is {tools!r}; a list of descriptions was expected")
    return tuple(tools)


def _optional_text(row: Mapping[str, Any], key: str, place: str) -> str | None:
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise CorpusError(f"{place}: {key} is {value!r}; it must be a text")
    return _encodable(value, key, place)


def _encodable(text: str, what: str, place: str) -> str:
    """The text itself; JSON can spell halves of surrogate pairs, which no encoding can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise CorpusError(
            f"{place}: {what} holds {half!r} alone, half of a surrogate pair and no character; "
            "write the whole character, or leave it out"
        ) from error
    return text
