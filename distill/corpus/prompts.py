"""Owns what a prompt is: its turns, its name, its split, and why it cannot be asked.

Refuses to know where it came from and what answers it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from distill.corpus.config import Split

Message = Mapping[str, Any]
"""``role`` and ``content``, and where given ``tool_calls``, ``reasoning_content`` and the like."""

RejectKind = Literal[
    "no_user_turn",
    "several_raw_turns",
    "raw_messages",
    "duplicate",
    "near_duplicate",
    "contaminated",
    "filtered",
]


@dataclass(frozen=True)
class Prompt:
    """One row of a corpus.

    ``messages`` are read before the first answer; each entry of ``later_turns`` holds what is said
    between one answer and the next. ``tools`` go to the chat template as they are.
    """

    prompt_id: str
    task: str
    split: Split
    messages: tuple[Message, ...]
    reject_reason: str | None = None
    reject_kind: RejectKind | None = None
    later_turns: tuple[tuple[Message, ...], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """The first user turn."""
        return next((m["content"] for m in self.messages if m["role"] == "user"), "")

    @property
    def first_text(self) -> str:
        """Everything that is read before the first answer, a line a message."""
        return "\n".join(message["content"] for message in self.messages)

    @property
    def all_text(self) -> str:
        """Everything the user says, a line a turn."""
        turns = (self.messages, *self.later_turns)
        return "\n".join(m["content"] for turn in turns for m in turn if m["role"] == "user")

    @property
    def other_text(self) -> str:
        """Everything else that is asked with: instructions, documents, tool calls, tools."""
        texts: list[str] = []
        for message in (m for turn in (self.messages, *self.later_turns) for m in turn):
            is_users = message["role"] == "user"
            texts.append("" if is_users else message["content"])
            rest = {k: v for k, v in message.items() if k not in ("role", "content")}
            texts.append(_as_json(rest) if rest else "")
        texts += [_as_json(dict(tool)) for tool in self.tools]
        return "\n".join(filter(None, texts))

    @property
    def num_turns(self) -> int:
        """Answers it asks for."""
        return 1 + len(self.later_turns)

    @property
    def content_json(self) -> str:
        """Everything that is asked, as one text: equal for equal content only."""
        parts: list[Any] = [*map(dict, self.messages)]
        if self.later_turns or self.tools:  # so that single turns keep the ids they always had
            later = [[dict(message) for message in turn] for turn in self.later_turns]
            parts = [parts, later, [*map(dict, self.tools)]]
        return _as_json(parts)

    def rejected(self, kind: RejectKind, reason: str) -> Prompt:
        """The same row, marked as one that is not asked."""
        return replace(self, reject_kind=kind, reject_reason=reason)


@dataclass(frozen=True)
class Corpus:
    """All prompts of a corpus, the hash of everything that was read, and counts of its parts.

    ``part_of`` names the part of a mixture that a prompt's id comes from.
    """

    prompts: tuple[Prompt, ...]
    sha256: str
    counts: Mapping[str, int] = field(default_factory=dict)
    part_of: Mapping[str, str] = field(default_factory=dict)


def content_id(prompt: Prompt) -> str:
    """The name of a row that has none of its own: a hash of what it asks."""
    return hashlib.sha256(prompt.content_json.encode()).hexdigest()[:16]


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def content_sha256(prompts: Sequence[Prompt]) -> str:
    """A hash of all rows that does not depend on their order: a shuffled corpus is the same one."""
    lines = sorted(
        json.dumps(
            [p.prompt_id, p.task, p.split, p.content_json, p.reject_reason], ensure_ascii=False
        )
        for p in prompts
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def hash_fraction(prompt_id: str, purpose: str = "split") -> float:
    """A number in [0, 1) that depends on the id alone: rows keep their split as a corpus grows."""
    digest = hashlib.sha256(f"{purpose}\0{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
