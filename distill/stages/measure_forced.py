"""Owns teacher forcing: the target's own text read by the target and by every draft.

Refuses to know what the logits are worth (``metrics.positions``), and to decode.

Shape suffixes: T positions of a completion, N positions where a draft proposes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distill.metrics.acceptance import RULES
from distill.metrics.positions import DraftLogits, score_positions
from distill.models import LoadedModel
from distill.runtime.cache import RaggedCache
from distill.runtime.forward import forward, prefill
from distill.sampling import SamplingConfig
from distill.stages.measure_runs import Contestant

Text = tuple[Sequence[int], Sequence[int]]
"""(prompt token ids, completion token ids)"""

_LOGIT_POSITIONS = 512
"""Completion positions whose logits exist at once: 100 MB at a vocabulary of 49k in float32."""


def score_texts(
    target: LoadedModel,
    contestants: Sequence[Contestant],
    texts: Sequence[Text],
    sampling: SamplingConfig,
) -> list[dict[str, Any]]:
    """Per text: the columns of ``score_positions``, and per draft ``num_positions`` and ``sums``.

    The completion is the target's own, so its prefixes are the ones a draft meets when it serves.
    Positions behind a draft's own context, where it is never asked, are left out; so are those
    where a lookup finds nothing to propose. A lookup keeps sums only: its later proposals in a
    block depend on its first one, so its columns would say nothing of a block.
    """
    longest = max((len(completion) for _, completion in texts), default=1)
    per_pass = max(1, _LOGIT_POSITIONS // max(1, longest))
    results: list[dict[str, Any]] = []
    for start in range(0, len(texts), per_pass):
        group = texts[start : start + per_pass]
        target_TV = completion_logits(target, group)
        drafts = {c.name: draft_logits(target, c, group, target_TV) for c in contestants}
        for index, (_, completion) in enumerate(group):
            here = {name: per_text[index] for name, per_text in drafts.items()}
            found = score_positions(target_TV[index], completion, here, sampling)
            for contestant in contestants:
                columns = found["drafts"][contestant.name]
                found["drafts"][contestant.name] = {
                    "num_positions": len(columns.get("position", ())),
                    "sums": {rule: float(sum(columns.get(rule, ()))) for rule in RULES},
                    "columns": {} if contestant.is_lookup else columns,
                }
            results.append(found)
    return results


def completion_logits(
    loaded: LoadedModel, texts: Sequence[Text], *, num_layers: int | None = None
) -> list[Tensor]:
    """Logits [T, V] that predicted each completion token, ids behind the tokenizer cut off.

    ``num_layers``: of the first so many layers and the final norm, as an early exit drafts.
    """
    width = min(loaded.shape.vocab_size, len(loaded.tokenizer))
    cache = RaggedCache(loaded.model, max_rows=len(texts))
    for _ in texts:
        cache.join()
    prompts = {i: list(prompt[:-1]) for i, (prompt, _) in enumerate(texts)}
    prefill(loaded.model, cache, prompts, num_layers=num_layers)
    fed = [[prompt[-1], *completion[:-1]] if completion else [] for prompt, completion in texts]
    if not any(fed):
        return [torch.empty(0, width, device=loaded.device) for _ in texts]
    logits_NV = forward(loaded.model, cache, fed, num_layers=num_layers).logits_NV[:, :width]
    return list(logits_NV.split([len(tokens) for tokens in fed]))


def draft_logits(
    target: LoadedModel,
    contestant: Contestant,
    texts: Sequence[Text],
    target_TV: Sequence[Tensor],
) -> list[DraftLogits]:
    """Per text: the positions at which the draft proposes, and its logits there."""
    if contestant.is_lookup:
        pairs = zip(texts, target_TV, strict=True)
        return [_lookup_logits(contestant, *text, logits_TV) for text, logits_TV in pairs]
    loaded = contestant.model or target
    limit = loaded.shape.max_position_embeddings
    # As in the drafter: a draft reads at most ``limit`` tokens, and stays silent behind them.
    cut = [
        (p, c[: max(0, limit - len(p) + 1)]) if len(p) <= limit else (p[:limit], ())
        for p, c in texts
    ]
    found = []
    for logits_TV in completion_logits(loaded, cut, num_layers=contestant.num_layers):
        kept_V = None
        if contestant.vocabulary_token_ids is not None:
            kept_V = torch.zeros(logits_TV.shape[-1], dtype=torch.bool, device=logits_TV.device)
            kept_V[torch.tensor(contestant.vocabulary_token_ids)] = True
            logits_TV = logits_TV.masked_fill(~kept_V, -torch.inf)
        positions_T = torch.arange(len(logits_TV), device=logits_TV.device)
        found.append(DraftLogits(positions_T, logits_TV, kept_V))
    return found


def _lookup_logits(
    contestant: Contestant, prompt: Sequence[int], completion: Sequence[int], target_TV: Tensor
) -> DraftLogits:
    """A deterministic proposal as logits: 0 for its token, -inf elsewhere."""
    drafter = contestant.make_drafter()
    drafter.start(vocabulary_size=target_TV.shape[-1], max_batch_size=1)
    drafter.join(0, prompt, SamplingConfig(), seed=0)
    tokens: list[tuple[int, int]] = []
    for position in range(len(completion)):
        proposal = drafter.propose([0], [[*prompt, *completion[:position]]], [1])
        if proposal.num_tokens_B[0]:
            tokens.append((position, int(proposal.tokens_BK[0, 0])))
    positions_N = torch.tensor([p for p, _ in tokens], dtype=torch.long)
    logits_NV = torch.full((len(tokens), target_TV.shape[-1]), -torch.inf)
    logits_NV[torch.arange(len(tokens)), [t for _, t in tokens]] = 0.0
    return DraftLogits(positions_N.to(target_TV.device), logits_NV.to(target_TV.device))
