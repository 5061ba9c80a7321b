"""Owns what generate asks, in which pieces: questions of similar length, rejected rows, shards.

Refuses to know who answers and how answers are stored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from distill.corpus import Corpus, Prompt, prompt_token_ids
from distill.corpus.templates import require_template
from distill.errors import ConfigError, CorpusError
from distill.stages.generate_size import AnswersSize, size_of_prompt, total

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHARD = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True)
class Question:
    """A prompt and the ids the target reads for its first turn."""

    prompt: Prompt
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """The unit of work and of resume: questions of one sampling, answered by the same calls."""

    index: int
    sampling_index: int
    questions: tuple[Question, ...]

    @property
    def num_turns(self) -> int:
        """Answers asked for, per sample."""
        return sum(question.prompt.num_turns for question in self.questions)

    def size(self, max_new_tokens: int) -> AnswersSize:
        """The most that one sample of every answer is."""
        return total(
            size_of_prompt(question.prompt, len(question.token_ids), max_new_tokens)
            for question in self.questions
        )


@dataclass(frozen=True)
class Rejection:
    """A row that is not asked. ``kind`` is one word to count by."""

    prompt: Prompt
    kind: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """Every row of the corpus, either in a chunk or rejected."""

    chunks: tuple[Chunk, ...]
    rejected: tuple[Rejection, ...]

    def num_asked_by_part(self, part_of: Mapping[str, str]) -> dict[str, int]:
        """How many rows of each part of a mixture are asked; rejected ones are not."""
        counts = {f"num_asked_of_part/{name}": 0 for name in sorted(set(part_of.values()))}
        asked = {question.prompt.prompt_id for chunk in self.chunks for question in chunk.questions}
        for prompt_id in asked & part_of.keys():
            counts[f"num_asked_of_part/{part_of[prompt_id]}"] += 1
        return counts


@dataclass(frozen=True)
class Shard:
    """One of several processes that share the chunks of a build; ``index`` counts from 0.

    ``is_rank``: all of them were started together by torchrun, so one may wait for another.
    """

    index: int
    count: int
    is_rank: bool

    @property
    def name(self) -> str:
        """As a user writes it, counted from 1."""
        return f"{self.index + 1}/{self.count}"

    def owns(self, chunk: Chunk) -> bool:
        """Chunks are dealt round: each shard gets short and long prompts."""
        return chunk.index % self.count == self.index


def parse_shard(text: str) -> Shard:
    """Read "i/n", 1 <= i <= n.

    Raises:
        ConfigError: it is anything else.
    """
    found = _SHARD.fullmatch(text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigError(f"shard is {text!r}; write i/n with i from 1 to n, for example 1/4")
    return Shard(int(found[1]) - 1, int(found[2]), is_rank=False)


def shard_of(setting: str | None, environment: Mapping[str, str] = os.environ) -> Shard | None:
    """The part of this process: from the setting, else from torchrun's RANK and WORLD_SIZE.

    Raises:
        ConfigError: both are there.
    """
    num_ranks = int(environment.get("WORLD_SIZE", "1"))
    if num_ranks < 2:
        return None if setting is None else parse_shard(setting)
    rank = int(environment.get("RANK", "0"))
    if setting is not None:
        raise ConfigError(
            f"generate.shard is {setting!r}, and this is rank {rank} of {num_ranks}, which share "
            "the prompts by themselves; leave generate.shard out, or start without torchrun"
        )
    return Shard(rank, num_ranks, is_rank=True)


def make_plan(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_raw: bool,
    system_prompt: str | None,
    today: date,
    max_prompt_tokens: int,
    num_samplings: int,
    questions_per_chunk: int,
) -> Plan:
    """Turn prompts into chunks of equal settings and similar length, and name the rejected.

    Neither depends on the order of the rows.

    Raises:
        CorpusError: there is no chat template, or every prompt is rejected.
    """
    if not is_raw:
        require_template(tokenizer)
    questions: list[Question] = []
    rejected: list[Rejection] = []
    for prompt in corpus.prompts:
        if prompt.reject_reason is not None:
            rejected.append(Rejection(prompt, str(prompt.reject_kind), prompt.reject_reason))
            continue
        try:
            ids = prompt_token_ids(
                tokenizer, prompt, is_raw=is_raw, system_prompt=system_prompt, today=today
            )
        except CorpusError as error:
            rejected.append(Rejection(prompt, "template", str(error)))
            continue
        reason = too_long(len(ids), max_prompt_tokens)
        if not ids:
            rejected.append(Rejection(prompt, "empty", "its text has no token"))
        elif reason is not None:
            rejected.append(Rejection(prompt, "too_long", reason))
        else:
            questions.append(Question(prompt, tuple(ids)))
    if not questions:
        first = rejected[0]
        raise CorpusError(
            f"none of the {len(rejected)} prompts can be answered; {first.prompt.prompt_id!r}: "
            f"{first.reason}"
        )
    questions.sort(key=lambda question: (len(question.token_ids), question.prompt.prompt_id))
    rejected.sort(key=lambda rejection: rejection.prompt.prompt_id)
    size = questions_per_chunk
    parts = [
        (sampling_index, tuple(questions[start : start + size]))
        for sampling_index in range(num_samplings)
        for start in range(0, len(questions), size)
    ]
    return Plan(tuple(Chunk(index, *part) for index, part in enumerate(parts)), tuple(rejected))


def too_long(num_tokens: int, limit: int) -> str | None:
    """Why a prompt of that many tokens cannot be asked, if it cannot."""
    if num_tokens <= limit:
        return None
    return f"its {num_tokens} tokens are more than the {limit} allowed"
