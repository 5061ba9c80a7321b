"""Owns what a target reads for a prompt: the tokenizer's own chat template, applied once.

Refuses to know where prompts come from, and which day it is: a template that prints the date
(Llama 3, SmolLM3) is told one, so that the same prompt has the same ids tomorrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

from distill.corpus.prompts import Message, Prompt
from distill.errors import CorpusError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_DATE = date(2026, 1, 1)

# What a date is printed with; a template has no use for the rest of strftime.
_DIRECTIVES = (*(f"%{letter}" for letter in "aAdbBmyYjHIMSpuw"), "%-d", "%-m")

# What the program that a template is can raise on a row of a form that it does not expect.
_BREAKS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)

# Stands where the user's text would; letters only, so that no template trims or escapes it.
_MARK = "USERTEXTSTANDSHERE"


@dataclass(frozen=True)
class UserOpening:
    """What a template writes around the user's text in the first turn."""

    token_ids: tuple[int, ...]
    closing: str


def prompt_token_ids(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    *,
    is_raw: bool,
    system_prompt: str | None = None,
    today: date = DEFAULT_DATE,
) -> list[int]:
    """What the target reads: the chat template applied once, up to where its answer starts.

    The template writes every special token itself; the tokenizer adds none on top (otherwise the
    text would start with two begin tokens). ``is_raw`` leaves the template out and lets the
    tokenizer add its own. ``system_prompt`` stands in where a row has no system message.

    Raises:
        CorpusError: the tokenizer has no template, the template refuses the messages or breaks on
            them, or the text itself starts with the begin token that is added.
    """
    if not is_raw:
        return conversation_token_ids(
            tokenizer, prompt, prompt.messages, system_prompt=system_prompt, today=today
        )
    ids = list(tokenizer(prompt.text)["input_ids"])
    _require_one_begin(tokenizer, ids, prompt.prompt_id)
    return ids


def conversation_token_ids(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    messages: Sequence[Message],
    *,
    system_prompt: str | None = None,
    today: date = DEFAULT_DATE,
) -> list[int]:
    """The ids of a conversation so far, up to where the next answer starts.

    What a server computes when a client sends the conversation back: earlier answers are read as
    the template writes them, which for some leaves their reasoning out.

    Raises:
        CorpusError: as :func:`prompt_token_ids`.
    """
    require_template(tokenizer)
    given = _with_system(messages, system_prompt)
    text = _render(
        tokenizer, given, prompt.tools, today=today, what=f"prompt {prompt.prompt_id!r}", ask=True
    )
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    _require_one_begin(tokenizer, ids, prompt.prompt_id)
    return ids


def require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that there is a chat template.

    Raises:
        CorpusError: there is none; names both ways out.
    """
    if tokenizer.chat_template is None:
        raise CorpusError(
            "the target's tokenizer has no chat template. For a base model set "
            "`corpus.raw: true`; for a chat model put its chat_template.jinja beside its tokenizer"
        )


def user_opening(
    tokenizer: PreTrainedTokenizerBase, *, system_prompt: str | None, today: date = DEFAULT_DATE
) -> UserOpening:
    """What stands before the user's first word, for a target that is to write the turn itself.

    Magpie, arXiv 2406.08464, section 2.1: an aligned model given its template up to there writes
    what a user would.

    Raises:
        CorpusError: there is no template, or no telling from it where the user's text begins.
    """
    require_template(tokenizer)
    given = _with_system([{"role": "user", "content": _MARK}], system_prompt)
    text = _render(tokenizer, given, (), today=today, what="a user's turn", ask=False)
    opening, mark, closing = text.partition(_MARK)
    way_out = "give prompts instead: corpus.kind jsonl, or any but self_synthesis"
    if not mark:
        raise CorpusError(
            "the target's chat template does not write the user's text as it is, so it cannot be "
            f"told where a user's turn begins; {way_out}"
        )
    if not opening.strip():
        raise CorpusError(
            "the target's chat template writes nothing before the user's text, so there is "
            f"nothing that would make the target speak as a user; {way_out}"
        )
    ids = list(tokenizer(opening, add_special_tokens=False)["input_ids"])
    _require_one_begin(tokenizer, ids, "the opening of a user's turn")
    return UserOpening(tuple(ids), closing.strip())


def answer_message(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> Message:
    """An answer as the message it is in the turns after it: its words without the stop token.

    Other special tokens stay: they are part of what the model said (reasoning marks, tool calls).
    """
    text = tokenizer.decode(token_ids[:-1], skip_special_tokens=False)
    return {"role": "assistant", "content": text}


def _with_system(messages: Sequence[Message], system_prompt: str | None) -> list[dict[str, Any]]:
    given = [dict(message) for message in messages]
    if system_prompt is not None and given[0]["role"] not in ("system", "developer"):
        given.insert(0, {"role": "system", "content": system_prompt})
    return given


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    today: date,
    what: str,
    ask: bool,
) -> str:
    from jinja2 import TemplateError

    given_tools = [dict(tool) for tool in tools] or None
    template = _dated(tokenizer.get_chat_template(None, given_tools), today)
    roles = ", ".join(message["role"] for message in messages)
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=given_tools,
            chat_template=template,
            add_generation_prompt=ask,
            tokenize=False,
        )
    except TemplateError as error:
        raise CorpusError(
            f"the target's chat template refuses {what} (roles: {roles}): {error}. "
            "If it knows no system role, leave system_prompt and system messages out"
        ) from error
    except _BREAKS as error:
        raise CorpusError(
            f"the target's chat template breaks on {what} (roles: {roles}): "
            f"{type(error).__name__}: {error}. Look at the row's tool calls and tools, and at the "
            "form in which the template reads them"
        ) from error
    return str(text)


def _dated(template: str, today: date) -> str:
    """The template with its clock, ``strftime_now``, stopped at a day; others stay as they are.

    A callable passed beside the messages would not do: transformers hands plain data on alone. So a
    macro of the same name stands before the template and hides the clock.
    """
    if "strftime_now" not in template:
        return template
    parts = "".join(
        f" | replace({directive!r}, {today.strftime(directive)!r})" for directive in _DIRECTIVES
    )
    # The signs keep the macro from eating white space that the template begins with.
    return (
        f"{{%- macro strftime_now(pattern) -%}}{{{{ pattern{parts} }}}}{{%- endmacro +%}}{template}"
    )


def _require_one_begin(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], prompt_id: str
) -> None:
    begin = tokenizer.bos_token_id
    if begin is not None and list(ids[:2]) == [begin, begin]:
        raise CorpusError(
            f"prompt {prompt_id!r} starts with two begin tokens ({tokenizer.bos_token!r}); "
            "its text is already formatted: take the markup out of the row"
        )
