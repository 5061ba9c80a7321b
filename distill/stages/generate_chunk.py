"""Owns answering one chunk: turn after turn on the target's own words, and the rows that come out.

Refuses to know chunks beside this one, and what a killed build left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from distill.backends.base import Backend, Completion, Unanswered, sample_seed, stable_seed
from distill.corpus.prompts import Message, Prompt
from distill.corpus.templates import answer_message, conversation_token_ids
from distill.errors import CorpusError
from distill.sampling import SamplingConfig
from distill.stages import completions as storage
from distill.stages.generate_plan import Chunk, Question, Rejection, too_long
from distill.stages.generate_store import Kept, TargetKeeping
from distill.stages.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Outcome = Completion | Unanswered
_NO_ANSWER = "the backend returned no completion"


class KnownAnswers(Protocol):
    """Answers that another build of the same settings has stored already."""

    def get(self, row_id: str, prompt_token_ids: Sequence[int], seed: int) -> Completion | None:
        """The answer to exactly this row, if there is one."""
        ...


@dataclass(frozen=True)
class Answering:
    """How every chunk of a build is answered."""

    backend: Backend
    tokenizer: PreTrainedTokenizerBase
    samplings: Sequence[SamplingConfig]
    num_samples: int
    max_new_tokens: int
    max_prompt_tokens: int
    seed: int
    system_prompt: str | None
    today: date
    keeping: TargetKeeping
    known: KnownAnswers
    progress: Progress


@dataclass
class _Conversation:
    """A question under way: one sample of it, and what was said so far."""

    question: Question
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    seed: int
    messages: list[Message]
    turn_index: int = 0
    is_over: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)
    completions: list[Completion | None] = field(default_factory=list)

    @property
    def prompt(self) -> Prompt:
        return self.question.prompt


def run_chunk(
    answering: Answering, chunk: Chunk, directory: Path, settings: Mapping[str, Any]
) -> int:
    """Answer a chunk and store it: the target's file first, rows last, so that rows mean "done".

    Returns the number of new tokens.
    """
    conversations = _first_turns(answering, chunk)
    while under_way := [c for c in conversations if _goes_on(answering, c)]:
        _later_turns(answering, chunk, under_way)

    rows: list[dict[str, Any]] = []
    answered: list[tuple[dict[str, Any], Completion]] = []
    name = answering.keeping.file_name(chunk.index)
    for conversation in conversations:
        for row, answer in zip(conversation.rows, conversation.completions, strict=True):
            if answer is not None:
                answered.append((row, answer))
            rows.append(row)
    target_file = None
    if name is not None and answered:
        kept = answering.keeping.keep(answered)
        _point_at(name, answered, kept)
        if kept.tensors:
            target_file = directory / name
            storage.write_tensors(target_file, kept.tensors)
    num_tokens = sum(len(row["completion_token_ids"]) for row in rows)
    storage.write_shard(storage.shard_path(directory, chunk.index), rows, settings, target_file)
    storage.reopened_path(directory, chunk.index).unlink(missing_ok=True)
    return num_tokens


def _point_at(name: str, answered: Sequence[tuple[dict[str, Any], Completion]], kept: Kept) -> None:
    """Tell each row where its part of the target's file is; one without one is no answer."""
    offset = 0
    for index, (row, answer) in enumerate(answered):
        if (unscored := kept.unscored.get(index)) is None:
            row |= {"target_file": name, "target_offset": offset}
            offset += len(answer.token_ids)
            continue
        row |= {
            "status": unscored.status,
            "reason": unscored.reason,
            "completion_token_ids": [],
            "loss_mask": [0] * len(row["prompt_token_ids"]),
            "finish_reason": None,
        }


def _first_turns(answering: Answering, chunk: Chunk) -> list[_Conversation]:
    seeds = [
        stable_seed(answering.seed, question.prompt.prompt_id, chunk.sampling_index)
        for question in chunk.questions
    ]
    conversations = [
        _Conversation(
            question,
            sample,
            question.token_ids,
            sample_seed(seed, sample),
            list(question.prompt.messages),
        )
        for question, seed in zip(chunk.questions, seeds, strict=True)
        for sample in range(answering.num_samples)
    ]
    # A question's samples are one call's business, so it is asked again unless all are known.
    known = [_known(answering, chunk, conversation) for conversation in conversations]
    size = answering.num_samples
    asked = [
        index for index in range(len(seeds)) if None in known[index * size : (index + 1) * size]
    ]
    answers = _ask(
        answering,
        chunk,
        [chunk.questions[index].token_ids for index in asked],
        [seeds[index] for index in asked],
        size,
    )
    found = {(asked[index], sample): outcome for (index, sample), outcome in answers}
    for index, conversation in enumerate(conversations):
        question_index, sample = divmod(index, size)
        outcome = found.get((question_index, sample))
        if question_index not in asked:
            outcome = known[index]
            answering.progress.add_answer("known")
        _add_row(answering, chunk, conversation, outcome)
    return conversations


def _goes_on(answering: Answering, conversation: _Conversation) -> bool:
    """Prepare the next turn, or end the conversation and say why.

    The history is the target's own words; a cut answer is not history anyone would send back.
    """
    if conversation.is_over:
        return False
    row, answer = conversation.rows[-1], conversation.completions[-1]
    prompt, num_asked = conversation.prompt, conversation.turn_index + 1
    if answer is None or row["status"] != "completed" or num_asked == prompt.num_turns:
        conversation.is_over = True
        if num_asked < prompt.num_turns:
            cause = row["reason"] or "the answer was cut off"
            row["reason"] = f"{cause}; turn {num_asked} of {prompt.num_turns} was the last asked"
            answering.progress.drop_answers(prompt.num_turns - num_asked)
        return False
    conversation.messages += [
        answer_message(answering.tokenizer, answer.token_ids),
        *prompt.later_turns[conversation.turn_index],
    ]
    conversation.turn_index += 1
    return True


def _later_turns(
    answering: Answering, chunk: Chunk, conversations: Sequence[_Conversation]
) -> None:
    """Ask the next turn of each; histories differ by sample, so each is a prompt of its own."""
    outcomes: dict[int, Outcome | None] = {}
    asked: list[tuple[int, int]] = []
    for index, conversation in enumerate(conversations):
        seed = stable_seed(conversation.seed, conversation.turn_index)
        conversation.seed = sample_seed(seed, 0)
        try:
            ids = conversation_token_ids(
                answering.tokenizer,
                conversation.prompt,
                conversation.messages,
                system_prompt=answering.system_prompt,
                today=answering.today,
            )
            reason = too_long(len(ids), answering.max_prompt_tokens)
        except CorpusError as error:
            ids, reason = [], str(error)
        if reason is not None:
            conversation.prompt_token_ids = ()
            outcomes[index] = Unanswered(0, 0, "rejected", reason)
            answering.progress.add_answer("rejected")
            continue
        conversation.prompt_token_ids = tuple(ids)
        outcomes[index] = _known(answering, chunk, conversation)
        if outcomes[index] is None:
            asked.append((index, seed))
        else:
            answering.progress.add_answer("known")
    prompts = [conversations[index].prompt_token_ids for index, _ in asked]
    for (prompt_index, _), outcome in _ask(
        answering, chunk, prompts, [seed for _, seed in asked], 1
    ):
        outcomes[asked[prompt_index][0]] = outcome
    for index, conversation in enumerate(conversations):
        _add_row(answering, chunk, conversation, outcomes[index])


def _ask(
    answering: Answering,
    chunk: Chunk,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    num_samples: int,
) -> Iterator[tuple[tuple[int, int], Outcome]]:
    """((prompt index, sample index), what came) of one call of the backend."""
    if not prompts:
        return
    for outcome in answering.backend.generate(
        prompts,
        answering.samplings[chunk.sampling_index],
        max_new_tokens=answering.max_new_tokens,
        seeds=seeds,
        num_samples=num_samples,
        keep_hidden=answering.keeping.keep_hidden,
        on_tokens=answering.progress.add_tokens,
    ):
        answering.progress.add_answer(_status(outcome))
        yield (outcome.prompt_index, outcome.sample_index), outcome


def _known(answering: Answering, chunk: Chunk, conversation: _Conversation) -> Completion | None:
    row_id = _row_id(chunk, conversation)
    return answering.known.get(row_id, conversation.prompt_token_ids, conversation.seed)


def _row_id(chunk: Chunk, conversation: _Conversation) -> str:
    turn = f"/turn{conversation.turn_index + 1}" if conversation.turn_index else ""
    prompt_id = conversation.prompt.prompt_id
    return f"{prompt_id}/{chunk.sampling_index}/{conversation.sample_index}{turn}"


def _status(outcome: Outcome | None) -> storage.Status:
    if outcome is None:
        return "failed"
    if isinstance(outcome, Unanswered):
        return outcome.status
    return "truncated" if outcome.finish_reason == "length" else "completed"


def _add_row(
    answering: Answering, chunk: Chunk, conversation: _Conversation, outcome: Outcome | None
) -> None:
    if outcome is None:
        answering.progress.add_answer("failed")
    answer = outcome if isinstance(outcome, Completion) else None
    reason = outcome.reason if isinstance(outcome, Unanswered) else None
    prompt, prompt_ids = conversation.prompt, conversation.prompt_token_ids
    token_ids = [] if answer is None else list(answer.token_ids)
    row = {
        "row_id": _row_id(chunk, conversation),
        "prompt_id": prompt.prompt_id,
        "task": prompt.task,
        "split": prompt.split,
        "prompt_token_ids": list(prompt_ids),
        "completion_token_ids": token_ids,
        "loss_mask": [0] * len(prompt_ids) + [1] * len(token_ids),
        "status": _status(outcome),
        "reason": _NO_ANSWER if outcome is None else reason,
        "finish_reason": None if answer is None else answer.finish_reason,
        "sampling_index": chunk.sampling_index,
        "temperature": answering.samplings[chunk.sampling_index].temperature,
        "sample_index": conversation.sample_index,
        "turn_index": conversation.turn_index,
        "seed": conversation.seed,
    }
    conversation.rows.append(row)
    conversation.completions.append(answer)


def rejected_row(rejection: Rejection) -> dict[str, Any]:
    """The one row of a prompt that is not asked."""
    prompt = rejection.prompt
    return {
        "row_id": f"{prompt.prompt_id}/rejected",
        "prompt_id": prompt.prompt_id,
        "task": prompt.task,
        "split": prompt.split,
        "prompt_token_ids": [],
        "completion_token_ids": [],
        "loss_mask": [],
        "status": "rejected",
        "reason": rejection.reason,
    }
