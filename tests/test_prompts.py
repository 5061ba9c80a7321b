"""Owns what the quickstart prompts promise: their number, balance, length and variety.
Refuses to know what any stage does with a prompt.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

PROMPTS_PATH = Path(__file__).resolve().parents[1] / "configs" / "prompts" / "quickstart.jsonl"
TASKS = ("explain", "writing", "math", "code", "summarize", "advice")
PROMPTS_PER_TASK = 84
MAX_WORDS = 400
MAX_OVERLAP = 0.5


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PROMPTS_PATH.read_text(encoding="utf-8").splitlines()]


def _prompt(row: dict[str, Any]) -> str:
    (turn,) = row["turns"]
    assert isinstance(turn, str)
    return turn


def _word_runs(text: str, length: int = 5) -> frozenset[tuple[str, ...]]:
    """Every run of ``length`` words; a shorter text is one run."""
    words = re.findall(r"\w+", text.lower())
    starts = range(max(1, len(words) - length + 1))
    return frozenset(tuple(words[start : start + length]) for start in starts)


def test_there_are_504_prompts_with_the_same_number_in_each_of_six_tasks(
    rows: list[dict[str, Any]],
) -> None:
    assert Counter(row["task"] for row in rows) == dict.fromkeys(TASKS, PROMPTS_PER_TASK)


def test_every_row_has_an_id_a_task_and_one_user_turn(rows: list[dict[str, Any]]) -> None:
    assert {tuple(row) for row in rows} == {("id", "task", "turns")}
    assert all(_prompt(row).strip() == _prompt(row) != "" for row in rows)


def test_ids_are_the_task_and_a_running_number(rows: list[dict[str, Any]]) -> None:
    expected = [f"{task}-{n:03d}" for task in TASKS for n in range(1, PROMPTS_PER_TASK + 1)]
    assert [row["id"] for row in rows] == expected


def test_no_prompt_is_longer_than_400_words(rows: list[dict[str, Any]]) -> None:
    assert max(len(_prompt(row).split()) for row in rows) <= MAX_WORDS


def test_no_two_prompts_are_nearly_the_same(rows: list[dict[str, Any]]) -> None:
    runs = [(row["id"], _word_runs(_prompt(row))) for row in rows]
    near = [
        (one, other)
        for (one, a), (other, b) in itertools.combinations(runs, 2)
        if len(a & b) > MAX_OVERLAP * len(a | b)
    ]
    assert near == []


def test_summarize_prompts_carry_a_passage_of_60_to_120_words(rows: list[dict[str, Any]]) -> None:
    passages = {
        row["id"]: max(_prompt(row).split("\n\n"), key=len)
        for row in rows
        if row["task"] == "summarize"
    }
    lengths = {name: len(passage.split()) for name, passage in passages.items()}
    assert {name: n for name, n in lengths.items() if not 60 <= n <= 120} == {}


def test_the_file_is_plain_ascii_with_unix_line_ends() -> None:
    data = PROMPTS_PATH.read_bytes()
    assert data.isascii()
    assert b"\r" not in data
    assert data.endswith(b"}\n")
    # Inside a JSON string only \n is wanted: no tabs, no escapes of invisible characters.
    assert not re.search(rb"\\[trfbu]", data)
