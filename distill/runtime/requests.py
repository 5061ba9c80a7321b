"""Owns what goes into and comes out of the decode loop: requests, updates, results, row state.
Refuses to know how anything is decoded.

Legend: T emitted tokens, D width.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from distill.errors import ConfigError, ContextLengthError, PairMismatchError, SamplingError
from distill.logit_edits import LogitsProcessor, check_processors
from distill.runtime.commit import CommitRules, DecodeText, FinishReason, trim_at_stop_string
from distill.runtime.draft_length import RowDraftLength
from distill.runtime.stats import DecodeStats
from distill.sampling import SamplingConfig

Prompts = Sequence[str | Sequence[int] | Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class DecodeRequest:
    """One prompt and how to answer it.

    num_draft_tokens: None: as the engine decides.
    logits_processors: run after this library's own edits and before the temperature, on target
        and draft alike, see ``logit_edits``.
    is_control: every draft is rejected by force, so that what is decided is plain decoding while
        what is computed has the width of speculation, see ``runtime.lossless``.
    """

    prompt_token_ids: Sequence[int]
    max_new_tokens: int
    sampling: SamplingConfig
    seed: int
    stop_token_ids: frozenset[int]
    stop_strings: tuple[str, ...] = ()
    num_draft_tokens: int | None = None
    request_id: str = ""
    logits_processors: Sequence[LogitsProcessor] = ()
    is_control: bool = False


@dataclass(frozen=True)
class RowUpdate:
    """What one round added to one row; ``finish_reason`` is set in its last update."""

    handle: int
    new_token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass
class DecodeResult:
    """An answer.

    token_ids: the stop token, or the token that completed a stop string, is the last one.
    text: without special tokens, stop token and stop string; None when there is no tokenizer.
    finish_reason: None for a row that was cancelled.
    hidden_TD: final hidden state that PREDICTED each token; logsumexp_T: float32, of the raw
        logits it gave. Both only when the engine keeps them.
    """

    request_id: str
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason | None
    stats: DecodeStats
    hidden_TD: Tensor | None = None
    logsumexp_T: Tensor | None = None


@dataclass(frozen=True)
class RowRound:
    """What one round gives to one row, worked out before any row takes anything.

    num_asked, num_drafted: draft tokens the row wanted, and those that could be judged.
    num_accepted: the verification's answer; what the commit cut off shows in ``token_ids``.
    """

    num_asked: int
    num_drafted: int
    num_accepted: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    hidden_TD: Tensor | None = None
    logsumexp_T: Tensor | None = None

    @property
    def num_drafted_to_observe(self) -> int:
        """What a draft length may know of the number, see ``RowDraftLength.observe``."""
        return self.num_drafted if self.num_accepted == self.num_drafted else self.num_asked


@dataclass
class Row:
    """One request in progress: its tokens and its ledger of (proposed, accepted, emitted)."""

    handle: int
    request: DecodeRequest
    rules: CommitRules
    draft_length: RowDraftLength
    token_ids: list[int]  # prompt and output
    num_prompt_tokens: int
    finish_reason: FinishReason | None = None
    rounds: list[tuple[int, int, int]] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    logsumexp: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        handle: int,
        request: DecodeRequest,
        max_length: int,
        *,
        draft_length: RowDraftLength,
        decode_text: DecodeText | None,
    ) -> Row:
        """Start a row from its request, for a context of ``max_length`` tokens."""
        return cls(
            handle=handle,
            request=request,
            rules=CommitRules(
                max_new_tokens=request.max_new_tokens,
                max_length=max_length,
                stop_token_ids=request.stop_token_ids,
                stop_strings=request.stop_strings,
                decode_text=decode_text,
            ),
            draft_length=draft_length,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
        )

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """Everything emitted so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_emitted(self) -> int:
        """How many tokens were emitted so far: the counter of the row's random numbers."""
        return len(self.token_ids) - self.num_prompt_tokens

    def take(self, found: RowRound) -> RowUpdate:
        """Go on by one round; nothing here can fail."""
        self.token_ids.extend(found.token_ids)
        self.rounds.append((found.num_drafted, found.num_accepted, len(found.token_ids)))
        if found.hidden_TD is not None and found.logsumexp_T is not None:
            self.hidden.append(found.hidden_TD)
            self.logsumexp.append(found.logsumexp_T)
        self.finish_reason = found.finish_reason
        return RowUpdate(self.handle, found.token_ids, found.finish_reason)

    def result(self) -> DecodeResult:
        """The answer so far."""
        token_ids = self.output_token_ids
        text = None
        if self.rules.decode_text is not None:
            is_stop = bool(token_ids) and token_ids[-1] in self.request.stop_token_ids
            text = self.rules.decode_text(token_ids[:-1] if is_stop else token_ids)
            text = trim_at_stop_string(text, self.request.stop_strings)
        return DecodeResult(
            request_id=self.request.request_id,
            token_ids=token_ids,
            text=text,
            finish_reason=self.finish_reason,
            stats=DecodeStats.from_rounds(self.rounds),
            hidden_TD=torch.cat(self.hidden) if self.hidden else None,
            logsumexp_T=torch.cat(self.logsumexp) if self.logsumexp else None,
        )


def check_request(
    request: DecodeRequest,
    *,
    max_length: int,
    vocabulary_size: int,
    num_input_ids: int,
    has_tokenizer: bool,
    device: torch.device | str = "cpu",
) -> None:
    """Refuse what could only fail in the middle of a round, where others share the batch.

    Raises:
        ContextLengthError: the prompt leaves no room for a single token.
        PairMismatchError: a prompt token id is not in the target's vocabulary.
        SamplingError: the settings exclude every token, or name ids that do not exist.
        LogitsProcessorError: a processor that remembers, or gives back no logits.
        ConfigError: an empty prompt or budget, or stop strings without a tokenizer.
    """
    prompt = request.prompt_token_ids
    sampling = request.sampling
    if not len(prompt) or request.max_new_tokens < 1:
        raise ConfigError(
            f"A request needs at least one prompt token and one new token, found {len(prompt)} "
            f"and {request.max_new_tokens}. Start empty prompts with a beginning-of-text token."
        )
    if request.num_draft_tokens is not None and request.num_draft_tokens < 0:
        raise ConfigError(
            f"num_draft_tokens is {request.num_draft_tokens}; it must be 0 (no drafts) or more."
        )
    if len(prompt) >= max_length:
        raise ContextLengthError(
            f"The prompt has {len(prompt)} tokens; the context holds {max_length} with at least "
            "one new one. Shorten the prompt or raise max_length (up to the target's positions)."
        )
    if min(prompt) < 0 or max(prompt) >= num_input_ids:
        raise PairMismatchError(
            f"Prompt token ids go from {min(prompt)} to {max(prompt)}; the target has "
            f"{num_input_ids} ids. Tokenize with the target's own tokenizer."
        )
    if request.stop_strings and not has_tokenizer:
        raise ConfigError("Stop strings need a tokenizer. Give the engine the target's.")
    if not all(request.stop_strings):
        raise ConfigError("An empty stop string would stop everything. Leave it out.")
    listed = sampling.listed_token_ids
    if listed and max(listed) >= vocabulary_size:
        raise SamplingError(
            f"Token id {max(listed)} in logit_bias, bad_token_ids or bad_words_ids is outside the "
            f"target's {vocabulary_size} ids. Use ids of the target's own tokenizer."
        )
    banned = {*sampling.bad_token_ids, *(w[0] for w in sampling.bad_words_ids if len(w) == 1)}
    if sampling.min_tokens:
        banned |= {i for i in request.stop_token_ids if i < vocabulary_size}
    if len(banned) >= vocabulary_size:
        raise SamplingError(
            f"bad_token_ids and min_tokens exclude all {vocabulary_size} ids of the target. "
            "Leave at least one."
        )
    check_processors(
        request.logits_processors,
        prompt_token_ids=prompt,
        vocabulary_size=vocabulary_size,
        stop_token_ids=request.stop_token_ids,
        device=device,
    )


def all_prompt_token_ids(tokenizer: Any, prompts: Prompts) -> list[list[int]]:
    """Token ids of every prompt of a list.

    Raises:
        ConfigError: one prompt where a list of them is expected, or no prompt at all in its place.
    """
    if isinstance(prompts, str):
        raise ConfigError("prompts is one text; give a list of prompts, such as [text]")
    items = list(prompts)
    if isinstance(prompts, Mapping) or any(isinstance(item, Mapping) for item in items):
        raise ConfigError(
            "prompts is one conversation; give a list of prompts, such as [[message, message]]"
        )
    return [prompt_token_ids(tokenizer, prompt) for prompt in items]


def prompt_token_ids(
    tokenizer: Any, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]
) -> list[int]:
    """Token ids of a text, of chat messages, or of ids (a list, an array or a tensor)."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    found = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(found, Iterable):
        raise ConfigError(
            f"a prompt is a text, a list of messages or a list of token ids, not {found!r}; "
            "prompts is a list of them, such as [[5, 6, 7]]"
        )
    items = list(found)
    if items and all(isinstance(item, Mapping) for item in items):
        if not tokenizer.chat_template:
            raise ConfigError(
                "the prompt is chat messages, but the target's tokenizer has no chat template; "
                "give the text, or set tokenizer.chat_template"
            )
        messages = [dict(item) for item in items]
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return list(encoded["input_ids"])
    try:
        return [operator.index(item) for item in items]
    except TypeError as error:
        raise ConfigError(
            f"a prompt is a text, a list of messages or a list of token ids, not {items[:3]!r}"
        ) from error
