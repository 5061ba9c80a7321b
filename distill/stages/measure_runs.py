"""Owns what measure runs on held-out prompts: decoding, teacher forcing, and telling ties apart.

Refuses to know tables, files, clocks and the verdict.

Shape suffixes: B rows, T positions of a completion, N flat positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor

from distill.artifacts import Artifact
from distill.backends.base import stable_seed
from distill.drafters.base import Drafter
from distill.drafters.causal_lm import CausalLMDrafter
from distill.drafters.prompt_lookup import PromptLookupDrafter
from distill.errors import CorpusError
from distill.metrics.acceptance import analytic_sums
from distill.models import LoadedModel
from distill.runtime.cache import RaggedCache, forward, prefill
from distill.runtime.decode import DecodeEngine, DecodeRequest, DecodeResult, decode_batch
from distill.sampling import SamplingConfig

PLAIN = "plain"

TIE_ULPS = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 1024}
"""How far apart two logits may be, in units in the last place of the largest, and still be a tie.

A verify pass on K + 1 tokens and a plain step on one sum in different orders; after tens of layers
their logits differ by a few ulps in 16 bits and by some hundreds in float32.
"""

_LOGIT_POSITIONS = 512
"""Completion positions whose logits exist at once: 100 MB at a vocabulary of 49k in float32."""


@dataclass(frozen=True)
class HeldOutPrompt:
    """A prompt the draft was not trained on, and the target's answers to it by temperature."""

    prompt_id: str
    task: str
    token_ids: tuple[int, ...]
    answers: Mapping[float, tuple[int, ...]]


@dataclass(frozen=True)
class Contestant:
    """A draft to measure. ``model`` is None for one that needs no model."""

    name: str
    model: LoadedModel | None = None
    vocabulary_token_ids: tuple[int, ...] | None = None

    def make_drafter(self) -> Drafter:
        """A drafter with no rows: each engine has its own."""
        if self.model is None:
            return PromptLookupDrafter()
        return CausalLMDrafter(self.model.model, vocabulary_token_ids=self.vocabulary_token_ids)


def read_held_out(
    generate: Artifact, temperatures: Sequence[float], *, max_prompts_per_task: int | None
) -> list[HeldOutPrompt]:
    """The held-out prompts, shortest first, with every answer that was sampled as we would.

    An answer counts for a temperature only when that was its whole sampling (no top-k, no
    penalty) and this library's own engine wrote it; otherwise the stage decodes one itself.

    Raises:
        CorpusError: no held-out prompt was answered.
    """
    config = generate.manifest.config
    samplings = [SamplingConfig.model_validate(s) for s in config["samplings"]]
    is_ours = config["backend"] == "local"
    temperature_of = {
        index: t
        for index, sampling in enumerate(samplings)
        for t in temperatures
        if is_ours and sampling == SamplingConfig(temperature=t)
    }
    prompts: dict[str, dict[str, Any]] = {}
    per_task: dict[str, int] = {}
    for row in pq.read_table(generate.file("completions.parquet")).to_pylist():
        if row["split"] != "held_out" or row["status"] not in ("completed", "truncated"):
            continue
        if row["prompt_id"] not in prompts:
            if per_task.get(row["task"], 0) == max_prompts_per_task:
                continue
            per_task[row["task"]] = per_task.get(row["task"], 0) + 1
            prompts[row["prompt_id"]] = row | {"answers": {}}
        temperature = temperature_of.get(row["sampling_index"])
        if temperature is not None:
            answers = prompts[row["prompt_id"]]["answers"]
            answers.setdefault(temperature, tuple(row["completion_token_ids"]))
    if not prompts:
        raise CorpusError(
            f"{generate.path}: no held-out prompt was answered, so there is nothing to measure on. "
            "Raise generate.corpus.held_out_fraction, or give rows a split of 'held_out'."
        )
    held_out = [
        HeldOutPrompt(i, r["task"], tuple(r["prompt_token_ids"]), r["answers"])
        for i, r in prompts.items()
    ]
    return sorted(held_out, key=lambda p: (len(p.token_ids), p.prompt_id))


def decode(
    target: LoadedModel,
    contestant: Contestant | None,
    prompts: Sequence[HeldOutPrompt],
    sampling: SamplingConfig,
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    seed: int,
) -> list[DecodeResult]:
    """Answer the prompts together; ``contestant`` None decodes plainly, in the same engine."""
    engine = make_engine(
        target,
        contestant,
        num_draft_tokens=num_draft_tokens,
        max_batch_size=len(prompts),
        max_length=max(len(p.token_ids) for p in prompts) + max_new_tokens,
    )
    return decode_batch(
        engine,
        [
            request_of(target, p, sampling, max_new_tokens=max_new_tokens, seed=seed)
            for p in prompts
        ],
    )


def make_engine(
    target: LoadedModel,
    contestant: Contestant | None,
    *,
    num_draft_tokens: int,
    max_batch_size: int,
    max_length: int,
) -> DecodeEngine:
    """A decode engine for the pair, or for the target alone."""
    return DecodeEngine(
        target.model,
        None if contestant is None else contestant.make_drafter(),
        num_draft_tokens=num_draft_tokens if contestant else 0,
        max_batch_size=max_batch_size,
        max_length=max_length,
        tokenizer=target.tokenizer,
    )


def request_of(
    target: LoadedModel,
    prompt: HeldOutPrompt,
    sampling: SamplingConfig,
    *,
    max_new_tokens: int,
    seed: int,
) -> DecodeRequest:
    """A prompt as a request; its seed depends on the prompt alone, not on its place in a batch."""
    return DecodeRequest(
        prompt_token_ids=prompt.token_ids,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=stable_seed(seed, prompt.prompt_id),
        stop_token_ids=target.stop_token_ids,
        request_id=prompt.prompt_id,
    )


def teacher_forced_sums(
    target: LoadedModel,
    contestants: Sequence[Contestant],
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    sampling: SamplingConfig,
) -> list[dict[str, tuple[int, dict[str, float]]]]:
    """Per (prompt, completion): contestant -> (num_positions, sum of acceptance by rule).

    The completion is the target's own, so its prefixes are the ones a draft meets when it serves.
    Positions behind a draft's own context, where it is never asked, are left out; so are those
    where a lookup finds nothing to propose.
    """
    longest = max((len(completion) for _, completion in texts), default=1)
    per_pass = max(1, _LOGIT_POSITIONS // max(1, longest))
    results: list[dict[str, tuple[int, dict[str, float]]]] = []
    for start in range(0, len(texts), per_pass):
        group = texts[start : start + per_pass]
        target_TV = completion_logits(target, group)
        drafts = {c.name: _draft_logits(c, group, target_TV) for c in contestants}
        for index, p_TV in enumerate(target_TV):
            found = {}
            for name, per_text in drafts.items():
                positions_N, q_NV = per_text[index]
                sums = analytic_sums(p_TV[positions_N], q_NV, sampling)
                found[name] = (len(positions_N), sums)
            results.append(found)
    return results


def completion_logits(
    loaded: LoadedModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[Tensor]:
    """Logits [T, V] that predicted each completion token, ids behind the tokenizer cut off."""
    width = min(loaded.shape.vocab_size, len(loaded.tokenizer))
    cache = RaggedCache(loaded.model, max_rows=len(texts))
    for _ in texts:
        cache.join()
    prefill(loaded.model, cache, {i: list(prompt[:-1]) for i, (prompt, _) in enumerate(texts)})
    fed = [[prompt[-1], *completion[:-1]] if completion else [] for prompt, completion in texts]
    if not any(fed):
        return [torch.empty(0, width, device=loaded.device) for _ in texts]
    logits_NV = forward(loaded.model, cache, fed).logits_NV[:, :width]
    return list(logits_NV.split([len(tokens) for tokens in fed]))


def _draft_logits(
    contestant: Contestant,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    target_TV: Sequence[Tensor],
) -> list[tuple[Tensor, Tensor]]:
    """Per text: the positions at which the draft proposes, and its logits [N, V] there."""
    if contestant.model is None:
        pairs = zip(texts, target_TV, strict=True)
        return [_lookup_logits(contestant, *text, logits_TV) for text, logits_TV in pairs]
    loaded = contestant.model
    limit = loaded.shape.max_position_embeddings
    # As in the drafter: a draft reads at most ``limit`` tokens, and stays silent behind them.
    cut = [
        (p, c[: max(0, limit - len(p) + 1)]) if len(p) <= limit else (p[:limit], ())
        for p, c in texts
    ]
    found = []
    for logits_TV in completion_logits(loaded, cut):
        if contestant.vocabulary_token_ids is not None:
            kept_V = torch.zeros(logits_TV.shape[-1], dtype=torch.bool, device=logits_TV.device)
            kept_V[torch.tensor(contestant.vocabulary_token_ids)] = True
            logits_TV = logits_TV.masked_fill(~kept_V, -torch.inf)
        found.append((torch.arange(len(logits_TV), device=logits_TV.device), logits_TV))
    return found


def _lookup_logits(
    contestant: Contestant, prompt: Sequence[int], completion: Sequence[int], target_TV: Tensor
) -> tuple[Tensor, Tensor]:
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
    return positions_N.to(target_TV.device), logits_NV.to(target_TV.device)


def find_divergence(
    target: LoadedModel,
    prompt: Sequence[int],
    plain: Sequence[int],
    speculative: Sequence[int],
    *,
    max_new_tokens: int,
) -> dict[str, Any] | None:
    """Where two greedy answers part, and whether the target's logits tie there; None: nowhere.

    Only the common length is compared: the plain answer may have had a smaller budget. The margin
    is how far the worse of the two tokens lies below the largest logit, in the target's own
    precision, after the common prefix; it is a tie up to ``TIE_ULPS``.

    A speculative answer that is the shorter one must have a reason: a stop token at its end, or
    its budget of ``max_new_tokens``. Without one it parts where it ends, and that is no tie;
    ``speculative_token`` is None, and the margin that of the plain token.
    """
    pairs = zip(plain, speculative, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if position is None:
        is_explained = len(speculative) >= min(len(plain), max_new_tokens) or (
            bool(speculative) and speculative[-1] in target.stop_token_ids
        )
        if is_explained:
            return None
        position = len(speculative)
    a = plain[position]
    b = speculative[position] if position < len(speculative) else None
    logits_V = completion_logits(target, [([*prompt, *plain[:position]], [a])])[0][0].double()
    top = float(logits_V.max())
    margin = top - min(float(logits_V[token]) for token in (a, b) if token is not None)
    ulp = torch.finfo(target.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(top), 1e-30)))
    return {
        "position": position,
        "plain_token": a,
        "speculative_token": b,
        "margin": margin,
        "margin_ulps": margin / ulp,
        "is_tie": b is not None and margin <= TIE_ULPS[target.dtype] * ulp,
    }
