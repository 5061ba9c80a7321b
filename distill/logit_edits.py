"""Owns what edits logits before they become probabilities: biases, bans, penalties, processors.
Refuses to know models, rounds and drafts: one position, what precedes it, and its logits.

Legend: T tokens that precede the position (prompt, output, drafts), V vocabulary.

Target and draft run the same edits, each on its own logits, position by position on the prefix
that includes the drafted tokens. So every edit has to be a function of its two arguments; what
remembers its calls would see tokens that are rejected later, and is refused.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distill.errors import LogitsProcessorError, SamplingError
from distill.sampling import SamplingConfig, argmax_last, at_least_float32

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""``(input_ids_1T, scores_1V) -> scores_1V``: what transformers calls a logits processor."""

_NUM_PROBED_PREFIXES = 3
_OPAQUE = (nn.Module, torch.Generator, types.FunctionType, types.ModuleType, type)


def has_edits(sampling: SamplingConfig, logits_processors: Sequence[LogitsProcessor] = ()) -> bool:
    """Whether :func:`edit_logits` would change anything."""
    return sampling.has_logit_edits or bool(logits_processors)


def edit_logits(
    logits_V: Tensor,
    sampling: SamplingConfig,
    *,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    stop_token_ids: Iterable[int] = (),
    logits_processors: Sequence[LogitsProcessor] = (),
) -> Tensor:
    """Apply bias, bans, penalties and processors for ONE position, given what precedes it.

    Args:
        logits_V: one row; left as it is.
        output_token_ids: what was generated before this position, drafted tokens included.
        stop_token_ids: banned while fewer than ``min_tokens`` tokens are out.
        logits_processors: called last, in order, with all preceding ids [1, T] and the row [1, V]
            in float32; see :func:`check_processors`.

    Returns:
        A new float32 row (float64 stays float64).

    Raises:
        SamplingError: nothing is left to draw, or a listed id lies outside the vocabulary.
        LogitsProcessorError: a processor gave back something that is no row of logits.
    """
    row_V = logits_V.to(at_least_float32(logits_V.dtype), copy=True)
    size = row_V.shape[-1]
    listed = sampling.listed_token_ids
    if listed and max(listed) >= size:
        raise SamplingError(
            f"Token id {max(listed)} in logit_bias, bad_token_ids or bad_words_ids is outside the "
            f"vocabulary of {size} ids. Use ids of the target's own tokenizer."
        )
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=row_V.device)
        bias = torch.tensor(list(sampling.logit_bias.values()), dtype=row_V.dtype)
        row_V[ids] += bias.to(row_V.device)
    banned = _banned(sampling, prompt_token_ids, output_token_ids)
    if len(output_token_ids) < sampling.min_tokens:
        banned.extend(i for i in stop_token_ids if i < size)
    if banned:
        row_V[torch.tensor(banned, device=row_V.device)] = -torch.inf
    _penalise(row_V, sampling, prompt_token_ids, output_token_ids)
    if logits_processors:
        preceding = [*prompt_token_ids, *output_token_ids]
        row_V = _processed(row_V, logits_processors, torch.tensor([preceding]).to(row_V.device))
    if not bool(torch.isfinite(row_V.max())):
        raise SamplingError(
            "No token is left to draw: bad_token_ids, bad_words_ids, logit_bias, min_tokens and "
            "logits_processors together exclude the whole vocabulary. Remove one of them."
        )
    return row_V


def check_processors(
    processors: Sequence[LogitsProcessor],
    *,
    prompt_token_ids: Sequence[int],
    vocabulary_size: int,
    stop_token_ids: Iterable[int] = (),
    device: torch.device | str = "cpu",
) -> None:
    """Call each processor on a few prefixes, before anything is decoded with it.

    A prefix is the prompt, continued by what the processor itself likes best, for as long as it
    allows anything but a stop token: texts that never come are not asked about. Each is asked
    about twice, the second time after the longer ones, as after a rejected draft; from then on
    what the object holds must not change either, while what it prepared in its first calls may
    stay. A state that shows neither in answers nor in attributes (in a closure) cannot be seen.
    Each is asked once more with every second score at -inf, as of banned ids and of those that the
    draft lacks; what the processor likes best is left.

    Raises:
        LogitsProcessorError: an answer of another shape, one that is no number, or a processor
            that remembers; the message names it.
    """
    generator = torch.Generator().manual_seed(0)
    scores_1V = torch.randn(1, vocabulary_size, generator=generator).to(device)
    stops = [token for token in stop_token_ids if token < vocabulary_size]
    for processor in processors:
        asked: list[tuple[Tensor, Tensor]] = []
        token_ids = list(prompt_token_ids)
        for _ in range(_NUM_PROBED_PREFIXES):
            ids_1T = torch.tensor([token_ids], device=device)
            asked.append((ids_1T, _called(processor, ids_1T, scores_1V.clone())))
            favourite = int(argmax_last(asked[-1][1])[0])
            masked_1V = scores_1V.clone()
            masked_1V[:, (favourite + 1) % 2 :: 2] = -torch.inf
            _called(processor, ids_1T, masked_1V)
            going_on_V = asked[-1][1][0].clone()
            going_on_V[stops] = -torch.inf
            if not bool(going_on_V.max() > -torch.inf):
                break
            token_ids.append(int(argmax_last(going_on_V)))
        before = _visible_state(processor)
        if not all(
            torch.equal(_called(processor, ids_1T, scores_1V.clone()), answer_1V)
            and _equal(before, _visible_state(processor))
            for ids_1T, answer_1V in asked
        ):
            raise LogitsProcessorError(
                f"{_name(processor)} remembers its calls: asked about the same tokens again it "
                "answers differently, or holds something else than before. Drafted tokens may be "
                "rejected, so a logits processor must be a function of (input_ids, scores) alone. "
                "Compute what it remembers from input_ids."
            )


def _banned(
    sampling: SamplingConfig, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
) -> list[int]:
    """Bad tokens, and the last token of every bad word whose beginning the row ends with."""
    banned = list(sampling.bad_token_ids)
    if not sampling.bad_words_ids:
        return banned
    longest = max(len(word) for word in sampling.bad_words_ids) - 1
    tail = [*prompt_token_ids[-longest:], *output_token_ids[-longest:]] if longest else []
    for *beginning, last in sampling.bad_words_ids:
        if not beginning or tail[-len(beginning) :] == beginning:
            banned.append(last)
    return banned


def _penalise(
    row_V: Tensor,
    sampling: SamplingConfig,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
) -> None:
    """Repetition, presence and frequency penalty, in place."""
    size = row_V.shape[-1]
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor([*prompt_token_ids, *output_token_ids], device=row_V.device).unique()
        seen = seen[seen < size]
        old = row_V[seen]
        penalty = sampling.repetition_penalty
        row_V[seen] = torch.where(old > 0, old / penalty, old * penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and len(output_token_ids):
        ids, counts = torch.tensor(list(output_token_ids), device=row_V.device).unique(
            return_counts=True
        )
        counts, ids = counts[ids < size], ids[ids < size]
        row_V[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts


def _processed(row_V: Tensor, processors: Sequence[LogitsProcessor], ids_1T: Tensor) -> Tensor:
    scores_1V = row_V.unsqueeze(0)
    for processor in processors:
        scores_1V = _called(processor, ids_1T, scores_1V)
    return scores_1V[0]


def _called(processor: LogitsProcessor, ids_1T: Tensor, scores_1V: Tensor) -> Tensor:
    """One call, with what it gives back checked and brought to the precision it was given."""
    shape, dtype = scores_1V.shape, scores_1V.dtype
    answer = processor(ids_1T, scores_1V)
    if not isinstance(answer, Tensor) or answer.shape != shape or not answer.is_floating_point():
        found = type(answer).__name__
        if isinstance(answer, Tensor):
            found = f"a tensor of shape {list(answer.shape)} and {answer.dtype}"
        raise LogitsProcessorError(
            f"{_name(processor)} gave back {found} for scores of shape {list(shape)}. A logits "
            "processor returns scores of the shape and kind it was given."
        )
    if bool((answer.isnan() | (answer == torch.inf)).any()):
        raise LogitsProcessorError(
            f"{_name(processor)} gave back a score that is not a number, or infinite; -inf "
            "excludes a token, and scores may hold it beforehand (ids that are banned, or that "
            "the draft lacks)."
        )
    return answer.to(dtype)


def _name(processor: Any) -> str:
    return getattr(processor, "__qualname__", None) or type(processor).__qualname__


def _visible_state(processor: Any) -> Any:
    """A copy of the attributes that can be compared; modules, functions and generators cannot."""
    return _copied(getattr(processor, "__dict__", {}), depth=4)


def _copied(value: Any, depth: int) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if depth == 0 or isinstance(value, _OPAQUE):
        return None
    if isinstance(value, dict):
        return {key: _copied(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_copied(item, depth - 1) for item in value]
    if isinstance(value, set | frozenset):
        return frozenset(value)
    if hasattr(value, "__dict__"):
        return _copied(vars(value), depth - 1)
    return value if isinstance(value, bool | int | float | complex | str | bytes) else None


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        is_pair = isinstance(one, Tensor) and isinstance(other, Tensor)
        return is_pair and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and bool(one == other)
