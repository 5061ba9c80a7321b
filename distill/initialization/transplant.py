"""Owns giving a model another vocabulary: for each new token, which of its old rows stand for it.

Refuses to know how models are found and whether they belong together afterwards.

V rows of the new vocabulary, D width.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.initialization.token_bytes import TokenTexts
from distill.models import LoadedModel, shape_of

_ROLES = ("eos", "bos", "pad", "unk")


@dataclass(frozen=True)
class RowSources:
    """For each id of the target, the draft's ids whose rows are averaged; absent: all of them.

    `counts`: tokens that match exactly, that have the same role (end of text, ...), that are split
    into pieces, and that are given the mean of all rows.
    """

    ids: Mapping[int, tuple[int, ...]]
    counts: Mapping[str, int]


def match_rows(target: TokenTexts, draft: TokenTexts) -> RowSources:
    """Say which rows of the draft stand for each token of the target.

    Tokens are compared by their bytes, so that "Ġthe" of one alphabet is "▁the" of another; control
    tokens by how they are written, then by their role. A token the draft has not is the mean of
    the tokens it would write it with.

    Raises:
        PairMismatchError: a tokenizer whose tokens cannot be read as bytes.
    """
    roles = _same_roles(target, draft)
    ids: dict[int, tuple[int, ...]] = {}
    counts: Counter[str] = Counter(exact=0, role=0, pieces=0, mean=0)
    for content, index in target.specials.items():
        if content in draft.specials:
            ids[index] = (draft.specials[content],)
            counts["exact"] += 1
        elif index in roles:
            ids[index] = (roles[index],)
            counts["role"] += 1
        else:
            _add_pieces(index, content.encode(), draft, ids, counts)
    for index, text in target.bytes_of.items():
        if text in draft.id_of:
            ids[index] = (draft.id_of[text],)
            counts["exact"] += 1
        else:
            _add_pieces(index, text, draft, ids, counts)
    return RowSources(ids, dict(counts))


def _add_pieces(
    index: int,
    text: bytes,
    draft: TokenTexts,
    ids: dict[int, tuple[int, ...]],
    counts: Counter[str],
) -> None:
    if pieces := draft.split(text):
        ids[index] = tuple(pieces)
    counts["pieces" if pieces else "mean"] += 1


def _same_roles(target: TokenTexts, draft: TokenTexts) -> dict[int, int]:
    """Target id -> draft id, for the tokens that end, begin, pad a text or stand for the unknown.

    One id may have several roles: the first it has counts.
    """
    pairs: dict[int, int] = {}
    for role in _ROLES:
        ours = getattr(target.tokenizer, f"{role}_token_id")
        theirs = getattr(draft.tokenizer, f"{role}_token_id")
        if ours is not None and theirs is not None and draft.has_row(theirs):
            pairs.setdefault(ours, theirs)
    return pairs


def transplant(draft: LoadedModel, target: LoadedModel) -> dict[str, int]:
    """Give `draft` the target's vocabulary, tokenizer and stop ids, in place; return the counts.

    A row of the embedding and of the head is the draft's row of the same token, else the mean of
    the rows of its pieces, else the mean of the rows of all tokens. There are as many rows as the
    target has, padding included. A token of the draft beyond its own table counts as absent, and is
    reported (`without_row`); the target's ids beyond its table stay without a row. The global
    random state is left as it was.

    Raises:
        PairMismatchError: a tokenizer whose tokens cannot be read as bytes.
    """
    theirs = TokenTexts(target.tokenizer, target.shape.vocab_size)
    ours = TokenTexts(draft.tokenizer, draft.shape.vocab_size)
    sources = match_rows(theirs, ours)
    _replace_tables(draft, sources, target.shape.vocab_size)
    _take_special_ids(draft.model, target.model)
    draft.tokenizer = target.tokenizer
    return {**sources.counts, **({"without_row": n} if (n := ours.num_without_row) else {})}


def resize_rows(draft: LoadedModel, num_rows: int) -> None:
    """Give `draft` tables of `num_rows` rows, in place; each token keeps its row.

    Rows beyond the tokens are padding: the mean of the tokens' rows, as `transplant` pads.
    """
    kept = range(min(num_rows, _num_tokens(draft)))
    _replace_tables(draft, RowSources({index: (index,) for index in kept}, {}), num_rows)


def _num_tokens(draft: LoadedModel) -> int:
    """Rows of the draft's tables that are tokens; those after them are padding."""
    highest: int = max(draft.tokenizer.get_vocab().values())
    return min(highest + 1, draft.shape.vocab_size)


def _replace_tables(draft: LoadedModel, sources: RowSources, num_rows: int) -> None:
    """Write embedding and head anew, row by row."""
    model, num_tokens = draft.model, _num_tokens(draft)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = embedding.weight is head.weight
    tables = {"embedding": _rows(embedding.weight, sources, num_rows, num_tokens)}
    if not is_tied:
        tables["head"] = _rows(head.weight, sources, num_rows, num_tokens)
    if getattr(head, "bias", None) is not None:
        tables["bias"] = _rows(head.bias.unsqueeze(1), sources, num_rows, num_tokens).squeeze(1)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model.resize_token_embeddings(num_rows, mean_resizing=False)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        embedding.weight.copy_(tables["embedding"])
        if not is_tied:
            head.weight.copy_(tables["head"])
        if "bias" in tables:
            head.bias.copy_(tables["bias"])
    draft.shape = shape_of(model.config)


def _rows(table_VD: Tensor, sources: RowSources, num_rows: int, num_tokens: int) -> Tensor:
    """The new table: means of rows of the old one, rounded once."""
    table_VD = table_VD.detach()
    mean_D = table_VD[:num_tokens].float().mean(dim=0).to(table_VD.dtype)
    new_VD = mean_D.repeat(num_rows, 1)
    single = {index: ids[0] for index, ids in sources.ids.items() if len(ids) == 1}
    if single:
        places_N = torch.tensor(list(single), device=table_VD.device)
        new_VD[places_N] = table_VD[torch.tensor(list(single.values()), device=table_VD.device)]
    for index, ids in sources.ids.items():
        if len(ids) > 1:
            new_VD[index] = table_VD[list(ids)].float().mean(dim=0).to(table_VD.dtype)
    return new_VD


def _take_special_ids(model: Any, target: Any) -> None:
    """Stop ids of the old vocabulary would end texts anywhere in the new one."""
    config = model.config.get_text_config()
    for role in ("bos", "eos", "pad"):
        setattr(config, f"{role}_token_id", getattr(target.config, f"{role}_token_id", None))
    model.generation_config = copy.deepcopy(target.generation_config)
    # the row that gets no gradient; left alone, it would be a token of the new vocabulary
    model.get_input_embeddings().padding_idx = config.pad_token_id
