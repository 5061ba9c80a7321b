"""Owns prompts that the target writes itself: given its template up to the user's first word.

Magpie, arXiv 2406.08464. Refuses to know how prompts are answered.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.backends.base import Backend, Completion, stable_seed
from distill.corpus import Corpus, CorpusConfig, Prompt
from distill.corpus.filters import words_of
from distill.corpus.prompts import content_id, content_sha256
from distill.corpus.read import filtered, hashed_split, with_both_splits
from distill.corpus.templates import UserOpening, user_opening
from distill.errors import BackendUnavailableError, DiskSpaceError
from distill.files import atomic_write, require_free_bytes
from distill.stages.generate_resume import finishing_on_interrupt
from distill.stages.generate_size import WRITTEN_BYTES_PER_TOKEN
from distill.stages.progress import JsonLines, Progress, answering_progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TASK = "self_synthesis"
_WORD_NGRAM = 3

Turn = dict[str, Any]
"""``token_ids``, ``is_stopped``, and a ``reason`` if the backend rejected it."""


def write_prompts(
    config: CorpusConfig,
    tokenizer: PreTrainedTokenizerBase,
    backend: Backend,
    directory: Path,
    *,
    system_prompt: str | None,
    today: date,
    chunk_size: int,
    lock: AbstractContextManager[object],
    lines: JsonLines,
) -> Corpus:
    """Let the target write ``num_prompts`` user turns; those that are no prompt are rejected.

    Each is drawn with its own seed. Chunks are kept in ``directory``, so a kill loses one at most.
    Of processes that share the directory one writes, under ``lock``, and all read the same texts.

    Raises:
        CorpusError: the chat template has no opening of a user's turn.
        BackendUnavailableError: turns got no answer; the others are kept for the next run.
        DiskSpaceError: the texts would not fit.
        KeyboardInterrupt: Ctrl-C; the turns in flight were finished and kept.
    """
    opening = user_opening(tokenizer, system_prompt=system_prompt, today=today)
    written = _Written(config, directory, chunk_size)
    with lock:
        if written.num_pending:
            _write_missing(config, backend, opening, written, lines)
    prompts: list[Prompt] = []
    times: Counter[str] = Counter()
    for turn in written.turns():
        prompt = _prompt(config, tokenizer, opening, turn)
        # Copies are in one split, also where they are kept: so it is the content's, not the copy's.
        split = hashed_split(prompt.prompt_id, config.held_out_fraction)
        times[prompt.prompt_id] += 1
        if (count := times[prompt.prompt_id]) > 1:
            prompt = replace(prompt, prompt_id=f"{prompt.prompt_id}-{count - 1}")
        prompts.append(replace(prompt, split=split))
    prompts = filtered(config, prompts)
    if config.held_out_fraction > 0:
        prompts = with_both_splits(prompts)
    return Corpus(tuple(prompts), content_sha256(prompts))


class _Written:
    """The turns that are stored, a file a chunk; one that got no answer is null in it."""

    def __init__(self, config: CorpusConfig, directory: Path, chunk_size: int) -> None:
        assert config.num_prompts is not None
        self.num_prompts, self.directory = config.num_prompts, directory
        self._chunk_size = chunk_size

    def chunks(self) -> Iterator[tuple[Path, range, list[Turn | None]]]:
        """(file, indices of its turns, what is stored of them), as it is when it is reached."""
        for start in range(0, self.num_prompts, self._chunk_size):
            indices = range(start, min(start + self._chunk_size, self.num_prompts))
            path = self.directory / f"user-turns-{start // self._chunk_size:05d}.json"
            stored: list[Turn | None] = [None] * len(indices)
            if path.exists():
                stored = json.loads(path.read_text(encoding="utf-8"))
            yield path, indices, stored

    @property
    def num_pending(self) -> int:
        """Turns that are still to be written."""
        return sum(stored.count(None) for _, _, stored in self.chunks())

    def turns(self) -> list[Turn]:
        """All of them, when none is missing."""
        return [turn for _, _, stored in self.chunks() for turn in stored if turn is not None]


def _write_missing(
    config: CorpusConfig,
    backend: Backend,
    opening: UserOpening,
    written: _Written,
    lines: JsonLines,
) -> None:
    num_pending, num_done = written.num_pending, 0
    lines.write("prompts_started", num_prompts=written.num_prompts, num_pending=num_pending)
    with (
        answering_progress(num_pending, lines) as progress,
        finishing_on_interrupt() as interrupt,
    ):
        for path, indices, stored in written.chunks():
            missing = [index for index, turn in zip(indices, stored, strict=True) if turn is None]
            if not missing:
                continue
            try:
                require_free_bytes(
                    path,
                    (num_pending - num_done)
                    * config.synthesis.max_new_tokens
                    * WRITTEN_BYTES_PER_TOKEN,
                    what=f"{num_pending - num_done} prompts that the target writes",
                )
            except DiskSpaceError:
                lines.write("disk_full", num_done=num_done)
                raise
            came = _write_turns(config, backend, opening, missing, progress)
            for index, turn in zip(missing, came, strict=True):
                stored[index - indices.start] = turn
            atomic_write(path, json.dumps(stored))
            num_done += len(missing)
            lines.write("prompts", **progress.state())
            logger.info("%d of %d user turns asked for", num_done, num_pending)
            if interrupt.is_asked:
                lines.write("interrupted", **progress.state())
                logger.warning(
                    "stopped after %d of %d user turns, which are kept in %s; the same command "
                    "goes on from there",
                    num_done,
                    num_pending,
                    written.directory,
                )
                raise KeyboardInterrupt
    if num_failed := written.num_pending:
        # Which prompts there are decides what is in every chunk of answers, so that going on
        # without these would give another corpus than the settings name.
        raise BackendUnavailableError(
            f"{num_failed} of {written.num_prompts} user turns that the target is to write got no "
            f"answer; the others are kept in {written.directory}. Look at the server's log, then "
            "run the same command again: it asks for these alone"
        )


def _write_turns(
    config: CorpusConfig,
    backend: Backend,
    opening: UserOpening,
    indices: Sequence[int],
    progress: Progress,
) -> list[Turn | None]:
    """A turn for each index; None where no answer came, which another time may be otherwise."""
    settings = config.synthesis
    written: dict[int, Turn | None] = {}
    for outcome in backend.generate(
        [opening.token_ids] * len(indices),
        settings.sampling,
        max_new_tokens=settings.max_new_tokens,
        seeds=[stable_seed(settings.seed, TASK, index) for index in indices],
        on_tokens=progress.add_tokens,
    ):
        turn: Turn | None = None
        if isinstance(outcome, Completion):
            is_stopped = outcome.finish_reason == "stop"
            turn = {"token_ids": outcome.token_ids, "is_stopped": is_stopped, "reason": None}
            progress.add_answer("completed" if is_stopped else "truncated")
        else:
            if outcome.status == "rejected":
                turn = {"token_ids": [], "is_stopped": False, "reason": outcome.reason}
            progress.add_answer(outcome.status)
        written[outcome.prompt_index] = turn
    return [written.get(number) for number in range(len(indices))]


def _prompt(
    config: CorpusConfig,
    tokenizer: PreTrainedTokenizerBase,
    opening: UserOpening,
    turn: Turn,
) -> Prompt:
    ids = turn["token_ids"][:-1] if turn["is_stopped"] else turn["token_ids"]
    text, is_ended = tokenizer.decode(ids, skip_special_tokens=False), turn["is_stopped"]
    if opening.closing and opening.closing in text:
        # A template may close a turn with words (Llama 2: [/INST]), which stop no decoding.
        text, is_ended = text.partition(opening.closing)[0], True
    text = text.strip()
    prompt = Prompt("", TASK, "train", ({"role": "user", "content": text},))
    prompt = replace(prompt, prompt_id=content_id(prompt))
    reason = turn["reason"] or why_no_prompt(
        text,
        special_tokens=tokenizer.all_special_tokens,
        min_characters=config.synthesis.min_characters,
        max_repetition=config.synthesis.max_repetition,
    )
    if reason is None and not is_ended:
        reason = f"not ended after {config.synthesis.max_new_tokens} tokens"
    return prompt if reason is None else prompt.rejected("filtered", reason)


def why_no_prompt(
    text: str, *, special_tokens: Sequence[str], min_characters: int, max_repetition: float
) -> str | None:
    """Why a written text is not taken as a prompt, or None."""
    if not text:
        return "nothing was written"
    if len(text) < min_characters:
        return f"{len(text)} characters are fewer than {min_characters}"
    if special := next((token for token in special_tokens if token in text), None):
        return f"it holds the special token {special!r}"
    if (share := repetition(text)) > max_repetition:
        return f"{share:.0%} of its word {_WORD_NGRAM}-grams are repeats"
    return None


def repetition(text: str) -> float:
    """Share of word 3-grams that occurred before in the text, in [0, 1)."""
    words = words_of(text)
    grams = [
        tuple(words[start : start + _WORD_NGRAM]) for start in range(len(words) - _WORD_NGRAM + 1)
    ]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
