"""Owns the sampling settings and the probability primitives: logits -> probabilities -> tokens.
Refuses to know models, caches, batches of requests, and whether anything is speculative.

Legend: B rows, S positions, N flat rows, V vocabulary. p = target, q = draft (Leviathan et al.
2023, arXiv 2211.17192). Every random number is an argument, so every function here is pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import NonNegativeInt, field_validator
from torch import Tensor

from distill.config import Config, setting
from distill.errors import ConfigError, SamplingError

DRAFT_LANE, ACCEPT_LANE, RESIDUAL_LANE = 0, 1, 2
"""Independent random streams of one request: draw a draft token, test it, replace it."""

_CHUNK_VALUES = 2**18
_BLOCK = 128  # the two-level searches below look at V / 128 block summaries, then at one block
_SAMPLED_AT_ONCE = 2**14  # up to so many weights one sum costs less than a search in two levels


_LEAST_TEMPERATURE = 1e-4
_MOST_BIAS = 1e4


class SamplingConfig(Config):
    """How one token is drawn. Applied in the order of the fields below, for target and draft alike.

    ``logit_bias``, the bans and ``min_tokens`` edit logits; the penalties follow (``logit_edits``);
    then temperature, top-k, top-p and min-p shape the distribution, each on what the one before
    left.
    ``repetition_penalty`` (arXiv 1909.05858) looks at prompt and output, the additive
    ``presence_penalty`` and ``frequency_penalty`` at the output only.
    """

    logit_bias: dict[NonNegativeInt, float] = setting(
        {}, description="Added to the logits, by token id."
    )
    bad_token_ids: tuple[NonNegativeInt, ...] = setting(
        (), description="Token ids that never appear."
    )
    bad_words_ids: tuple[tuple[NonNegativeInt, ...], ...] = setting(
        (), description="Sequences of ids that never appear: the last id is banned after the rest."
    )
    min_tokens: int = setting(0, ge=0, description="No stop token before this many tokens.")
    # The bounds keep every edited logit finite in float32, whatever the model says.
    repetition_penalty: float = setting(
        1.0, ge=1e-2, le=1e2, description="> 1 discourages seen tokens."
    )
    presence_penalty: float = setting(0.0, description="Subtracted once per token seen in output.")
    frequency_penalty: float = setting(0.0, description="Subtracted per occurrence in output.")
    temperature: float = setting(
        1.0, ge=0.0, le=1e4, description="0 takes the most likely token; else at least 1e-4."
    )
    top_k: int = setting(0, ge=0, description="Keep the k most likely tokens; 0 keeps all.")
    top_p: float = setting(1.0, gt=0.0, le=1.0, description="Keep the smallest set of this mass.")
    min_p: float = setting(
        0.0, ge=0.0, lt=1.0, description="Drop tokens below this share of the most likely one."
    )

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float) -> float:
        # A logit over a smaller temperature leaves float32, and the softmax would be NaN.
        if 0.0 < temperature < _LEAST_TEMPERATURE:
            raise ConfigError(
                f"temperature is {temperature:g}; use 0 (the most likely token) or at least "
                f"{_LEAST_TEMPERATURE:g}"
            )
        return temperature

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, logit_bias: dict[int, float]) -> dict[int, float]:
        for token_id, bias in logit_bias.items():
            if abs(bias) > _MOST_BIAS:
                raise ConfigError(
                    f"logit_bias of token {token_id} is {bias:g}; stay within "
                    f"{_MOST_BIAS:g} either way (bad_token_ids excludes a token)"
                )
        return logit_bias

    @field_validator("bad_words_ids")
    @classmethod
    def _check_words(cls, words: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        if not all(words):
            raise ConfigError("bad_words_ids has an empty word, which would ban nothing; remove it")
        return words

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without any probability."""
        return self.temperature == 0.0

    @property
    def has_logit_edits(self) -> bool:
        """Whether logits depend on the row's history or on listed ids."""
        return bool(
            self.logit_bias
            or self.bad_token_ids
            or self.bad_words_ids
            or self.min_tokens
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
        )

    @property
    def listed_token_ids(self) -> set[int]:
        """Every id that a bias or a ban names: they have to be in the vocabulary."""
        words = (token for word in self.bad_words_ids for token in word)
        return {*self.logit_bias, *self.bad_token_ids, *words}

    @property
    def shape_key(self) -> tuple[float, int, float, float]:
        """Rows with equal keys share one call of :func:`logits_to_probs`."""
        return (self.temperature, self.top_k, self.top_p, self.min_p)


def logits_to_probs(logits_BSV: Tensor, sampling: SamplingConfig) -> Tensor:
    """Return the distribution that is drawn from, float32 (float64 stays), any leading shape.

    Temperature 0 gives the one-hot of the argmax. Ties at the border of top-k or top-p are all
    kept, so the result does not depend on a sort's order. Logits may hold -inf, never NaN.
    """
    rows_NV = logits_BSV.reshape(-1, logits_BSV.shape[-1])
    probs_NV = torch.empty(
        rows_NV.shape, dtype=at_least_float32(rows_NV.dtype), device=rows_NV.device
    )
    if sampling.is_greedy:
        probs_NV.zero_().scatter_(1, argmax_last(rows_NV).unsqueeze(1), 1.0)
    else:
        for part, target in _row_chunks(rows_NV, probs_NV):
            target.copy_(_shaped_probs(part, sampling))
    return probs_NV.view(logits_BSV.shape)


def _shaped_probs(logits_NV: Tensor, sampling: SamplingConfig) -> Tensor:
    # Convert first: the CPU softmax that converts on the fly is several times slower.
    scores = logits_NV.to(at_least_float32(logits_NV.dtype), copy=True)
    if sampling.temperature != 1.0:
        # Peak at 0 first: a large logit over a small temperature must not reach infinity.
        scores.sub_(scores.amax(dim=-1, keepdim=True)).div_(sampling.temperature)
    if 0 < sampling.top_k < scores.shape[-1]:
        floor = scores.topk(sampling.top_k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
        scores.masked_fill_(scores < floor, -torch.inf)
    probs = scores.softmax(dim=-1)
    floor_N1 = torch.zeros_like(probs[:, :1])
    if sampling.top_p < 1.0:
        floor_N1 = _nucleus_floor(probs, sampling.top_p)
    if sampling.min_p > 0.0:
        floor_N1 = floor_N1.maximum(sampling.min_p * probs.amax(dim=-1, keepdim=True))
    if sampling.top_p < 1.0 or sampling.min_p > 0.0:
        probs.masked_fill_(probs < floor_N1, 0.0)
        probs.div_(probs.sum(dim=-1, keepdim=True))
    return probs


def _nucleus_floor(probs_NV: Tensor, top_p: float) -> Tensor:
    """Per row, the probability of the last token of the nucleus: the most likely tokens that
    together reach ``top_p`` (Holtzman et al. 2020, arXiv 1904.09751)."""
    if probs_NV.device.type != "cpu":
        return _floor_of(probs_NV, top_p)
    # All tokens below (1 - top_p) / V together hold less than 1 - top_p, so the nucleus lies above
    # it: on language models a few hundred of 50k tokens, and sorting them is all that is left.
    least = (1.0 - top_p) / probs_NV.shape[-1]
    return torch.stack([_floor_of(row_V[row_V >= least], top_p) for row_V in probs_NV])


def _floor_of(probs: Tensor, top_p: float) -> Tensor:
    ordered = probs.sort(dim=-1, descending=True).values
    mass_before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    last = (mass_before < top_p).sum(dim=-1, keepdim=True) - 1
    return ordered.gather(-1, last)


def log_normalizer(logits_NV: Tensor) -> Tensor:
    """log sum_v exp(logit_v) per row, float32: what turns a logit into a log-probability.

    By way of the softmax of the largest logit, whose CPU kernel is several times faster than that
    of ``logsumexp``; the largest probability is at least 1 / V, so its logarithm loses nothing.
    """
    logs = []
    for part, _ in _row_chunks(logits_NV, logits_NV):
        scores = part.to(at_least_float32(part.dtype))
        logs.append(scores.amax(dim=-1) - scores.softmax(dim=-1).amax(dim=-1).log())
    return torch.cat(logs)


def _row_chunks(rows_NV: Tensor, beside_NV: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of row blocks small enough that several passes over one stay in the CPU's cache."""
    size = max(1, _CHUNK_VALUES // rows_NV.shape[-1])
    if rows_NV.device.type != "cpu":
        size = max(1, rows_NV.shape[0])
    yield from zip(rows_NV.split(size), beside_NV.split(size), strict=True)


def probs_by_row(logits_NV: Tensor, samplings: Sequence[SamplingConfig]) -> Tensor:
    """:func:`logits_to_probs` with each row's own settings; one call per distinct setting."""
    groups: dict[tuple[float, int, float, float], list[int]] = {}
    for row, sampling in enumerate(samplings):
        groups.setdefault(sampling.shape_key, []).append(row)
    if len(groups) == 1:
        return logits_to_probs(logits_NV, samplings[0])
    probs_NV = torch.empty(
        logits_NV.shape, dtype=at_least_float32(logits_NV.dtype), device=logits_NV.device
    )
    for rows in groups.values():
        index = torch.tensor(rows, device=logits_NV.device)
        probs_NV[index] = logits_to_probs(logits_NV[index], samplings[rows[0]])
    return probs_NV


def argmax_last(logits: Tensor) -> Tensor:
    """Return the first index of the maximum over the last dimension, for any leading shape.

    Same answer as ``argmax``, by block maxima: the CPU ``argmax`` of bfloat16 is not vectorised
    and would cost as much as a tenth of a decoding step at 64 rows of 49k.
    """
    size = logits.shape[-1]
    if size < 16 * _BLOCK or logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    blocks = size // _BLOCK
    rows_NV = logits.reshape(-1, size)
    peaks = rows_NV[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK)).amax(dim=-1)
    if blocks * _BLOCK < size:
        rest = rows_NV[:, blocks * _BLOCK :].amax(dim=-1, keepdim=True)
        peaks = torch.cat((peaks, rest), dim=1)
    ids = _block_ids(peaks.argmax(dim=-1), size)
    inside = rows_NV.gather(1, ids).argmax(dim=-1, keepdim=True)
    return ids.gather(1, inside).reshape(logits.shape[:-1])


def sample(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Draw one token per row by inverting its cumulative distribution.

    Args:
        probs_BV: non-negative weights; they need not sum to one.
        uniforms_B: float64 in the OPEN interval (0, 1), see :func:`uniforms`.

    Returns:
        tokens_B: the first id whose cumulative weight reaches ``u * total``, hence never an id of
        weight zero. Piecewise constant in u, so a test can enumerate it.

    Raises:
        SamplingError: a weight is not a finite number.
    """
    size = probs_BV.shape[-1]
    u_B1 = uniforms_B.to(device=probs_BV.device, dtype=torch.float64).unsqueeze(-1)
    blocks = size // _BLOCK
    if size <= _SAMPLED_AT_ONCE:
        cumulative = probs_BV.cumsum(dim=-1, dtype=torch.float64)
        _require_finite(cumulative[:, -1])
        return torch.searchsorted(cumulative, u_B1 * cumulative[:, -1:]).squeeze(-1)
    # One pass over V for the block sums, then a search among blocks and one inside the block.
    sums = probs_BV[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK)).sum(dim=-1)
    if blocks * _BLOCK < size:
        rest = probs_BV[:, blocks * _BLOCK :].sum(dim=-1, keepdim=True)
        sums = torch.cat((sums, rest), dim=1)
    cumulative = sums.cumsum(dim=-1, dtype=torch.float64)
    _require_finite(cumulative[:, -1])
    level_B1 = u_B1 * cumulative[:, -1:]
    block_B1 = torch.searchsorted(cumulative, level_B1)
    before_B1 = cumulative.gather(1, block_B1) - sums.gather(1, block_B1).double()
    ids = _block_ids(block_B1.squeeze(-1), size)
    is_real = ids.diff(dim=-1, prepend=ids[:, :1] - 1) > 0  # the last block may be short
    inside = probs_BV.gather(1, ids).double().mul_(is_real).cumsum(dim=-1)
    # The block's sum was rounded differently: keep the level inside what the block really holds.
    tiny = torch.finfo(torch.float64).tiny
    level_B1 = (level_B1 - before_B1).clamp_min(tiny).minimum(inside[:, -1:])
    return ids.gather(1, torch.searchsorted(inside, level_B1)).squeeze(-1)


def _require_finite(totals_B: Tensor) -> None:
    # A search in a sum that is no number ends behind the last id, which is no token.
    if not bool(totals_B.isfinite().all()):
        row = int((~totals_B.isfinite()).nonzero()[0, 0])
        raise SamplingError(
            f"the probabilities of row {row} of {len(totals_B)} are not numbers, so no token can "
            f"be drawn from them: the model's logits overflow in its dtype, or a logits processor "
            f"gave NaN. Hold the model in another dtype (dtype: bfloat16 or float32)"
        )


def _block_ids(block_B: Tensor, size: int) -> Tensor:
    """Token ids of one block per row, [B, _BLOCK]; past the end the last id is repeated."""
    offsets = torch.arange(_BLOCK, device=block_B.device)
    return (block_B.unsqueeze(-1) * _BLOCK + offsets).clamp_max(size - 1)


def overlap(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """sum_v min(p, q) = 1 - TV(p, q): the chance that a draft is accepted (Leviathan 3.4)."""
    return torch.minimum(target_probs, draft_probs).sum(dim=-1)


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """max(0, p - q), normalised: what a rejected token is replaced from (Leviathan et al. 2.3).

    Where p == q up to rounding nothing is left; p itself is the limit, so p is returned.
    """
    rest = (target_probs - draft_probs).clamp_min_(0.0)
    total = rest.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, rest / total, target_probs)


def uniforms(seeds: Any, counters: Any, lane: int) -> Tensor:
    """Return float64 random numbers in the OPEN interval (0, 1), one per (seed, counter, lane).

    A counter-based generator (three rounds of the splitmix64 finaliser): a row's randomness never
    depends on its batch or on what was drawn before, and nothing has to be rolled back. Open,
    because u = 0 would accept a token of target probability 0 and u = 1 fall off the distribution.

    Args:
        seeds: integers of any size and sign (taken modulo 2**64), broadcast against counters.
        counters: non-negative integers, e.g. how many tokens the row has emitted.
    """
    key, count = _modulo_64(seeds), _modulo_64(counters)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        keyed = _mix(key + _GOLDEN) ^ (count * _GOLDEN + _ODD)
        bits = _mix(_mix(keyed) ^ np.uint64(lane * 2 + 1))
    return torch.from_numpy(np.atleast_1d(((bits >> np.uint64(12)) + 0.5) * 2.0**-52))


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ODD = np.uint64(0xD1B54A32D192ED03)


def _modulo_64(values: Any) -> Any:
    try:
        return np.asarray(values, dtype=np.int64).view(np.uint64)
    except OverflowError:  # a seed wider than 64 bits: rare, so it may take the slow way
        wide = np.asarray(values, dtype=object)
        return (wide & 0xFFFFFFFFFFFFFFFF).astype(np.uint64)


def _mix(bits: Any) -> Any:
    """The splitmix64 finaliser (Steele et al. 2014): every input bit reaches every output bit."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The precision probabilities are computed in: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
