"""The pair gate: may this draft propose tokens to this target? Vocabulary, special ids, context.

Refuses to know the weights: everything here is read from tokenizers and shapes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distill.errors import PairMismatchError
from distill.models import LoadedModel, ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPECIAL_TOKENS = ("eos", "bos", "pad")
_SHOWN = 3
_PROBE = "The quick brown fox, 42!"


@dataclass(frozen=True)
class PairReport:
    """What the gate saw of a pair it let through.

    ``num_shared_tokens`` token ids mean the same text on both sides. Padded rows are rows of an
    embedding beyond the tokenizer: no text, never to be sampled. ``vocabulary_sha256`` names the
    vocabulary in a pairing contract. ``notes`` are allowed differences a user should know.
    """

    num_shared_tokens: int
    target_padded_rows: int
    draft_padded_rows: int
    context_length: int
    vocabulary_sha256: str
    notes: tuple[str, ...] = ()


def vocabulary_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over (token, id) in the order of the ids: equal exactly when all ids mean the same."""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=False).encode()).hexdigest()


def check_loaded_pair(
    target: LoadedModel, draft: LoadedModel, *, min_context_length: int | None = None
) -> PairReport:
    """:func:`check_pair` of two loaded models."""
    return check_pair(
        target.tokenizer,
        target.shape,
        draft.tokenizer,
        draft.shape,
        min_context_length=min_context_length,
    )


def check_pair(
    target_tokenizer: PreTrainedTokenizerBase,
    target_shape: ModelShape,
    draft_tokenizer: PreTrainedTokenizerBase,
    draft_shape: ModelShape,
    *,
    takes_target_tokenizer: bool = False,
    min_context_length: int | None = None,
) -> PairReport:
    """Check that a draft's token ids mean what the target's do. All mismatches in one error.

    Sizes alone prove nothing: a permuted vocabulary of the right size loads everywhere and is
    simply never accepted.

    Args:
        takes_target_tokenizer: the draft will be given the target's tokenizer, so its own chat
            template and pad token, which say nothing about ids, are not compared.
        min_context_length: what will be served, in tokens; the draft has to reach that far.

    Raises:
        PairMismatchError: each mismatch with both values and its fix.
    """
    problems: list[str] = []
    notes: list[str] = []
    problems += _token_problems(target_tokenizer, draft_tokenizer)
    problems += _row_problems("target", target_tokenizer, target_shape)
    problems += _row_problems("draft", draft_tokenizer, draft_shape)
    names = [name for name in _SPECIAL_TOKENS if not (takes_target_tokenizer and name == "pad")]
    problems += _special_problems(target_tokenizer, draft_tokenizer, names)
    if not takes_target_tokenizer:
        problems += _template_problems(target_tokenizer, draft_tokenizer)
    problems += _context_problems(target_shape, draft_shape, min_context_length, notes)
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise PairMismatchError(f"this draft cannot serve this target:\n{listed}")
    if target_shape.vocab_size != draft_shape.vocab_size:
        notes.append(
            f"vocab_size is {target_shape.vocab_size} (target) and {draft_shape.vocab_size} "
            "(draft): the same tokens, padded differently. This library decodes it; other "
            "runtimes want equal numbers: pad the draft's embedding and head to the target's"
        )
    num_tokens = len(target_tokenizer)
    return PairReport(
        num_shared_tokens=num_tokens,
        target_padded_rows=target_shape.vocab_size - num_tokens,
        draft_padded_rows=draft_shape.vocab_size - num_tokens,
        context_length=min(
            target_shape.max_position_embeddings, draft_shape.max_position_embeddings
        ),
        vocabulary_sha256=vocabulary_sha256(target_tokenizer),
        notes=tuple(notes),
    )


def _token_problems(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> list[str]:
    target_tokens = {index: token for token, index in target.get_vocab().items()}
    draft_tokens = {index: token for token, index in draft.get_vocab().items()}
    if target_tokens == draft_tokens:
        return []
    differing = sorted(
        index
        for index in target_tokens.keys() | draft_tokens.keys()
        if target_tokens.get(index) != draft_tokens.get(index)
    )
    examples = ", ".join(
        f"id {index} is {target_tokens.get(index)!r} in the target, "
        f"{draft_tokens.get(index)!r} in the draft"
        for index in differing[:_SHOWN]
    )
    return [
        f"vocabulary: {len(differing)} of {max(len(target_tokens), len(draft_tokens))} ids differ "
        f"({examples}). Fix: start the draft from a model of the target's family, or give it the "
        "target's tokenizer and train its embedding"
    ]


def _row_problems(which: str, tokenizer: PreTrainedTokenizerBase, shape: ModelShape) -> list[str]:
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest < shape.vocab_size:
        return []
    return [
        f"{which} rows: its tokenizer reaches id {highest}, its embedding has "
        f"{shape.vocab_size} rows. Fix: resize_token_embeddings({highest + 1}), or use the "
        "tokenizer the model was trained with"
    ]


def _special_problems(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, names: Sequence[str]
) -> list[str]:
    problems = []
    for name in names:
        theirs = getattr(target, f"{name}_token_id")
        ours = getattr(draft, f"{name}_token_id")
        if theirs != ours:
            problems.append(
                f"{name} token: id {theirs} ({getattr(target, f'{name}_token')!r}) in the target, "
                f"id {ours} ({getattr(draft, f'{name}_token')!r}) in the draft. Fix: copy the "
                "target's tokenizer_config.json into the draft (a base model beside a chat "
                "target often differs here)"
            )
    added_by_target = target(_PROBE)["input_ids"]
    added_by_draft = draft(_PROBE)["input_ids"]
    if added_by_target != added_by_draft and not problems:
        problems.append(
            f"encoding: {_first_difference(added_by_target, added_by_draft)} (begin-of-text token, "
            "or merges). Fix: copy the target's tokenizer files into the draft"
        )
    return problems


def _first_difference(theirs: Sequence[int], ours: Sequence[int]) -> str:
    """Where the ids of one text first differ, with what follows on both sides."""
    pairs = list(zip(theirs, ours, strict=False))
    index = next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))
    shown = [
        f"{list(ids[index : index + _SHOWN])}" if index < len(ids) else "nothing"
        for ids in (theirs, ours)
    ]
    return (
        f"of the same text, token {index} and what follows it is {shown[0]} in the target and "
        f"{shown[1]} in the draft"
    )


def _template_problems(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase
) -> list[str]:
    theirs, ours = target.chat_template, draft.chat_template
    if theirs == ours:
        return []
    return [
        f"chat template: {_described(theirs)} in the target, {_described(ours)} in the draft. "
        "Fix: copy the target's chat_template.jinja (or tokenizer_config.json) into the draft"
    ]


def _described(template: object) -> str:
    if template is None:
        return "none"
    text = json.dumps(template, sort_keys=True)
    return f"{len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _context_problems(
    target: ModelShape, draft: ModelShape, min_context_length: int | None, notes: list[str]
) -> list[str]:
    theirs, ours = target.max_position_embeddings, draft.max_position_embeddings
    if min_context_length is not None and min_context_length > ours:
        return [
            f"context: {min_context_length} tokens are to be served, the draft reaches {ours} "
            f"(the target {theirs}). Fix: a draft with max_position_embeddings of at least "
            f"{min_context_length}, or serve at most {ours}"
        ]
    if ours < theirs:
        notes.append(
            f"context: the target reaches {theirs} tokens, the draft {ours}; beyond that the "
            "target decodes alone"
        )
    return []
