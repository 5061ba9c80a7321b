"""Owns the calls people make: answer a list of prompts with a target and whatever drafts for it.
Refuses to know how a round is decoded; that is the engine's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, overload

from distill.drafters.base import Drafter, registry
from distill.drafters.causal_lm import CausalLMDrafter
from distill.errors import ConfigError
from distill.logit_edits import LogitsProcessor
from distill.runtime.decode import DecodeEngine, DecodeRequest, DecodeResult, RowUpdate
from distill.runtime.draft_length import DraftLength
from distill.runtime.requests import Prompts, all_prompt_token_ids
from distill.runtime.stats import DecodeStats
from distill.runtime.streaming import DecodeStream
from distill.sampling import SamplingConfig

__all__ = ["DecodeResults", "Prompts", "decode_batch", "make_drafter", "speculative_decode"]


class DecodeResults(list[DecodeResult]):
    """The answers in the order of their prompts; ``stats`` counts over all of them."""

    @property
    def stats(self) -> DecodeStats:
        """The ledgers of all answers, added."""
        return sum((result.stats for result in self), DecodeStats())


def decode_batch(
    engine: DecodeEngine,
    requests: Sequence[DecodeRequest],
    *,
    on_update: Callable[[int, RowUpdate], None] = lambda index, update: None,
) -> DecodeResults:
    """Decode all requests and return their results in input order.

    The schedule depends on the requests alone, so equal requests give equal results. ``on_update``
    is told of every target call of a row, with the request's place.

    Raises:
        DistillError: one of the requests cannot be decoded; nothing is decoded then.
    """
    handles: list[int] = []
    try:
        for request in requests:
            handles.append(engine.add(request))
    except BaseException:
        for handle in handles:
            engine.cancel(handle)
        raise
    place = {handle: index for index, handle in enumerate(handles)}
    while engine.has_work:
        for update in engine.step():
            if update.handle in place:  # an engine may be at work for others too
                on_update(place[update.handle], update)
    return DecodeResults(engine.result(handle) for handle in handles)


def make_drafter(
    draft: Any, *, vocabulary_token_ids: Sequence[int] | None = None
) -> Drafter | None:
    """What drafts: nothing (None), a drafter as it is, one by its name, or a loaded model.

    A loaded model proposes the tokens that ``load_draft`` found with it; ``vocabulary_token_ids``
    are proposed instead.

    Raises:
        RegistryError: no drafter has this name.
        ConfigError: the drafter of this name needs settings, or ``vocabulary_token_ids`` come with
            something else than a loaded model.
    """
    is_model = not (draft is None or isinstance(draft, str | Drafter))
    if is_model:
        return CausalLMDrafter.of(draft, vocabulary_token_ids=vocabulary_token_ids)
    if vocabulary_token_ids is not None:
        found = draft if draft is None or isinstance(draft, str) else type(draft).__name__
        raise ConfigError(
            f"vocabulary_token_ids go with a loaded draft model, and the draft is {found!r}. Leave "
            "them out, or give them to the drafter itself, such as "
            "EarlyExitDrafter(num_layers=..., vocabulary_token_ids=...)."
        )
    if draft is None or isinstance(draft, Drafter):
        return draft
    kind = registry.get(draft)
    parameters = inspect.signature(kind).parameters.values()
    needed = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    if needed:
        raise ConfigError(
            f"the drafter {draft!r} needs {', '.join(needed)}; give the drafter itself, such as "
            f"{kind.__name__}({', '.join(f'{name}=...' for name in needed)})"
        )
    drafter: Drafter = kind()
    return drafter


@overload
def speculative_decode(
    target: Any,
    draft: Any,
    prompts: Prompts,
    sampling: SamplingConfig | None = None,
    *,
    num_draft_tokens: int = 4,
    max_new_tokens: int = 128,
    seed: int = 0,
    stop_strings: Sequence[str] = (),
    logits_processors: Sequence[LogitsProcessor] = (),
    max_batch_size: int = 8,
    vocabulary_token_ids: Sequence[int] | None = None,
    draft_length: DraftLength | None = None,
    stream: Literal[False] = False,
) -> DecodeResults: ...


@overload
def speculative_decode(
    target: Any,
    draft: Any,
    prompts: Prompts,
    sampling: SamplingConfig | None = None,
    *,
    num_draft_tokens: int = 4,
    max_new_tokens: int = 128,
    seed: int = 0,
    stop_strings: Sequence[str] = (),
    logits_processors: Sequence[LogitsProcessor] = (),
    max_batch_size: int = 8,
    vocabulary_token_ids: Sequence[int] | None = None,
    draft_length: DraftLength | None = None,
    stream: Literal[True],
) -> DecodeStream: ...


def speculative_decode(
    target: Any,
    draft: Any,
    prompts: Prompts,
    sampling: SamplingConfig | None = None,
    *,
    num_draft_tokens: int = 4,
    max_new_tokens: int = 128,
    seed: int = 0,
    stop_strings: Sequence[str] = (),
    logits_processors: Sequence[LogitsProcessor] = (),
    max_batch_size: int = 8,
    vocabulary_token_ids: Sequence[int] | None = None,
    draft_length: DraftLength | None = None,
    stream: bool = False,
) -> DecodeResults | DecodeStream:
    """Answer prompts with a target and a draft; the answers follow the target's law alone.

    In a notebook, with ``distill.models.load_target`` and ``distill.load_draft``::

        from distill import speculative_decode
        answers = speculative_decode(target, draft, ["Once upon a time"], max_new_tokens=32)
        print(answers[0].text, answers.stats.acceptance_rate)
        for piece in speculative_decode(target, draft, ["Once", "Twice"], stream=True):
            print(piece.index, piece.text, piece.finish_reason)

    Args:
        target, draft: loaded models (``.model``, ``.tokenizer``, ``.stop_token_ids``). The draft
            may also be None (plain decoding), a ``Drafter``, or the name of one without settings.
        prompts: text, token ids [P], or chat messages for the target's template; any lengths.
        sampling: the same for all prompts; default temperature 1.
        num_draft_tokens: K, at most; ``draft_length`` may choose less from round to round.
        seed: prompt i uses seed + i, so an answer does not depend on the other prompts.
        logits_processors: (input_ids [1, T], scores [1, V]) -> scores, see ``logit_edits``.
        vocabulary_token_ids: ids the draft may propose, see ``CausalLMDrafter``. None: those it
            was trained to propose, which ``load_draft`` found with it.

    Returns:
        The answers in the order of the prompts, and ``.stats`` over all of them. With ``stream``,
        an iterator of ``StreamPiece``, as rounds commit; its ``.stats`` counts what is decoded.

    Raises:
        DistillError: prompts, settings or a pair that cannot be decoded (``ConfigError``,
            ``ContextLengthError``, ``SamplingError``, ``LogitsProcessorError``,
            ``PairMismatchError``, ``CacheRollbackError``); each message has its way out.
    """
    token_ids = all_prompt_token_ids(target.tokenizer, prompts)
    engine = DecodeEngine(
        target.model,
        make_drafter(draft, vocabulary_token_ids=vocabulary_token_ids),
        num_draft_tokens=num_draft_tokens,
        max_batch_size=min(max_batch_size, max(len(token_ids), 1)),
        max_length=max((len(ids) for ids in token_ids), default=0) + max_new_tokens,
        tokenizer=target.tokenizer,
        draft_length=draft_length,
    )
    request = partial(
        DecodeRequest,
        max_new_tokens=max_new_tokens,
        sampling=sampling or SamplingConfig(),
        stop_token_ids=target.stop_token_ids,
        stop_strings=tuple(stop_strings),
        logits_processors=tuple(logits_processors),
    )
    requests = [request(ids, seed=seed + n, request_id=str(n)) for n, ids in enumerate(token_ids)]
    if stream:
        return DecodeStream(engine, requests, tokenizer=target.tokenizer)
    return decode_batch(engine, requests)
