"""Chat templates: what reaches them, what is read off them, and that no day changes a prompt.

Fault classes met here: reasoning and tool messages dropped, an answer of the past re-written by a
template, prompts that depend on the date, a model without a template. Two begin tokens and refused
roles are met in test_corpus.py, masks in test_generate.py.
"""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from distill.corpus import Prompt, prompt_token_ids
from distill.corpus.templates import answer_message, conversation_token_ids, user_opening
from distill.errors import CorpusError
from tests.helpers import make_tokenizer

# Llama 3.2 and SmolLM3 ask for the day in just this way.
DATED = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{% endif %}"
    "Today Date: {{ date_string }}\n{{ messages[0]['content'] }}"
)
LATER = "\n  {%- set today = strftime_now('%A, %-d %B %Y') -%}\n{{ today }}|{{ messages|length }}"
# Earlier reasoning is left out, as Qwen3's template does.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = (
    "{% for tool in tools %}TOOL {{ tool['name'] }}\n{% endfor %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% for call in m['tool_calls'] %} CALL {{ call['function']['name'] }}{% endfor %}"
    "{% if m['reasoning_content'] %} THOUGHT {{ m['reasoning_content'] }}{% endif %} / {% endfor %}"
)


def make_prompt(*messages: dict[str, Any], **more: Any) -> Prompt:
    return Prompt("p", "default", "train", messages, **more)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def with_template(template: str | None) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


# ---------------------------------------------------------------- dates


def test_a_template_that_prints_the_date_is_told_the_same_one_every_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from datetime import datetime

    import transformers.utils.chat_template_utils as theirs

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Tomorrow:
            return cls(2031, 5, 6)

    monkeypatch.setattr(theirs, "datetime", Tomorrow)
    tokenizer = with_template(DATED)
    unpinned = tokenizer.apply_chat_template([user("x")], tokenize=False)
    assert unpinned == "Today Date: 06 May 2031\nx"  # the clock is what a template reads by itself
    ids = prompt_token_ids(tokenizer, make_prompt(user("x")), is_raw=False)
    assert tokenizer.decode(ids) == "Today Date: 01 Jan 2026\nx"


def test_the_date_can_be_chosen() -> None:
    tokenizer = with_template(DATED)
    ids = prompt_token_ids(tokenizer, make_prompt(user("x")), is_raw=False, today=date(2024, 7, 26))
    assert tokenizer.decode(ids) == "Today Date: 26 Jul 2024\nx"


def test_a_stopped_clock_changes_nothing_else() -> None:
    for template in ("\n  {{ messages[0]['content'] }}", "{# none #}\n\n{{ 1 }}"):
        expected = with_template(template).apply_chat_template([user("x")], tokenize=False)
        clocked = template + "{% if false %}{{ strftime_now('%d') }}{% endif %}"
        tokenizer = with_template(clocked)
        ids = prompt_token_ids(tokenizer, make_prompt(user("x")), is_raw=False)
        assert tokenizer.decode(ids) == expected
    ids = prompt_token_ids(with_template(LATER), make_prompt(user("x")), is_raw=False)
    assert make_tokenizer().decode(ids) == "Thursday, 1 January 2026|1"


# ---------------------------------------------------------------- tools, reasoning, history


def test_tools_calls_results_and_reasoning_reach_the_template() -> None:
    call = {"function": {"name": "add", "arguments": {}}}
    prompt = make_prompt(
        user("2+2?"),
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "easy"},
        {"role": "tool", "content": "4"},
        tools=({"name": "add"},),
    )
    tokenizer = with_template(WITH_TOOLS)
    text = tokenizer.decode(prompt_token_ids(tokenizer, prompt, is_raw=False))
    assert text == "TOOL add\nuser: 2+2? / assistant:  CALL add THOUGHT easy / tool: 4 / "


def test_an_answer_is_history_in_its_own_words_but_for_the_stop_token() -> None:
    tokenizer = make_tokenizer()
    said = "<think>hm</think> the sea <|im_start|>"
    ids = tokenizer(f"{said}<|im_end|>")["input_ids"]
    assert answer_message(tokenizer, ids) == {"role": "assistant", "content": said}


@pytest.mark.parametrize("remembers", [True, False])
def test_earlier_reasoning_is_read_as_the_template_writes_it(remembers: bool) -> None:
    tokenizer = make_tokenizer() if remembers else with_template(FORGETFUL)
    answer = {"role": "assistant", "content": "<think>hm</think>yes"}
    messages = [user("a"), answer, user("b")]
    ids = conversation_token_ids(tokenizer, make_prompt(user("a")), messages)
    shown = "<think>hm</think>yes" if remembers else "yes"
    assert tokenizer.decode(ids) == (
        f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{shown}<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_developer_message_stands_where_a_system_message_would() -> None:
    tokenizer = make_tokenizer()
    prompt = make_prompt({"role": "developer", "content": "Be brief."}, user("x"))
    ids = prompt_token_ids(tokenizer, prompt, is_raw=False, system_prompt="Be long.")
    assert "Be long." not in tokenizer.decode(ids)


# ---------------------------------------------------------------- the opening of a user's turn


def test_the_opening_is_what_stands_before_the_users_first_word() -> None:
    tokenizer = make_tokenizer()
    opening = user_opening(tokenizer, system_prompt="Be brief.")
    assert tokenizer.decode(opening.token_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    )
    assert opening.closing == "<|im_end|>"
    assert opening.token_ids.count(0) == 2


def test_a_turn_that_is_closed_by_words_is_known_by_them() -> None:
    tokenizer = with_template("[INST] {{ messages[0]['content'] }} [/INST]")
    opening = user_opening(tokenizer, system_prompt=None)
    assert tokenizer.decode(opening.token_ids) == "[INST] "
    assert opening.closing == "[/INST]"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, r"no chat template.*corpus\.raw"),
        ("{{ messages[0]['content'] }}", "writes nothing before the user's text.*self_synthesis"),
        ("<u>{{ messages[0]['content'] | lower }}", "does not write the user's text as it is"),
    ],
)
def test_a_template_without_an_opening_is_refused_with_the_way_out(
    template: str | None, said: str
) -> None:
    with pytest.raises(CorpusError, match=said):
        user_opening(with_template(template), system_prompt=None)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for k, v in messages[0]['content'] | items %}{% endfor %}", "TypeError"),
        ("{{ messages[0]['content'] | int + messages[0]['content'] }}", "TypeError"),
        ("{{ messages[0]['content'].index('never there') }}", "ValueError"),
        ("{{ '%(name)s' | format(other=1) }}", "KeyError"),
        ("{{ 1 // (messages | length - 1) }}", "ZeroDivisionError"),
        ("{{ messages | map(attribute='content') | sum }}", "TypeError"),
    ],
)
def test_a_template_that_breaks_on_a_row_is_a_row_that_is_refused(template: str, said: str) -> None:
    with pytest.raises(CorpusError, match=rf"breaks on prompt 'p' \(roles: user\): {said}: "):
        prompt_token_ids(with_template(template), make_prompt(user("x")), is_raw=False)
