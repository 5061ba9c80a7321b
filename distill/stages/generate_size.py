"""Owns how much answers take at their longest: tokens, ids that are read again, bytes on the disk.

Refuses to know which disk, and which questions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from distill.corpus import Prompt

# Beside what is kept of the target for a token: its id, its mask, parquet's overhead.
TABLE_BYTES_PER_TOKEN = 16
# An id of a text that the target wrote as a prompt: digits, a comma, a blank.
WRITTEN_BYTES_PER_TOKEN = 8
# The length of a text before a tokenizer is at hand.
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True)
class AnswersSize:
    """The most that some answers are; adding two gives that of both."""

    num_answers: int = 0
    num_new_tokens: int = 0
    num_prompt_tokens: int = 0

    def __add__(self, other: AnswersSize) -> AnswersSize:
        return AnswersSize(
            self.num_answers + other.num_answers,
            self.num_new_tokens + other.num_new_tokens,
            self.num_prompt_tokens + other.num_prompt_tokens,
        )

    def times(self, number: int) -> AnswersSize:
        """The size of as many repetitions."""
        return AnswersSize(
            self.num_answers * number,
            self.num_new_tokens * number,
            self.num_prompt_tokens * number,
        )

    def disk_bytes(self, kept_bytes_per_token: int) -> int:
        """Bytes of the tables, and of what is kept of the target for each new token."""
        table = self.num_new_tokens + self.num_prompt_tokens
        return table * TABLE_BYTES_PER_TOKEN + self.num_new_tokens * kept_bytes_per_token


def size_of_prompt(prompt: Prompt, first_tokens: int, max_new_tokens: int) -> AnswersSize:
    """One sample of each answer a prompt asks for, when its first turn has so many tokens.

    A later turn reads the whole conversation again: what was asked and what was answered.
    """
    size, read = AnswersSize(), first_tokens
    for turn in ((), *prompt.later_turns):
        said = sum(len(message["content"]) for message in turn)
        read += said // CHARACTERS_PER_TOKEN
        size += AnswersSize(1, max_new_tokens, read)
        read += max_new_tokens
    return size


def total(sizes: Iterable[AnswersSize]) -> AnswersSize:
    """The sum."""
    return sum(sizes, AnswersSize())
