"""Owns how many tokens are drafted for a row in its next round: a fixed number, or the best one.
Refuses to know models, other rows, batches and clocks: a row's own history decides, so that the
output law stays the target's and a request gives the same tokens in any batch.

Why that keeps the law: K is chosen before a token of the round is drawn, from rounds that are
over. Given that history the round emits tokens of the target's law, whatever K is (``verify``),
and so does the next one. Dropping a token that was drawn because of what it is would select among
the outcomes, and the law would be another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from distill.errors import ConfigError
from distill.metrics.planner import VerifyCost, call_cost, interpolate

_MAX_PROBE_INTERVAL = 256  # about half an answer: past it a row would never be tried again


@runtime_checkable
class RowDraftLength(Protocol):
    """The draft length of one row, from its beginning to its end."""

    def choose(self) -> int:
        """K of the next round, 0: none. Changes nothing, so a round that failed may be repeated."""
        ...

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Take in what a finished round of this row proposed and how much of it stood.

        ``num_drafted`` is what was asked for, or as many as came if fewer came and all stood. Where
        a draft was refused it doesn't say how many came: that may follow from drafts behind it,
        whose random numbers are used again, and a K that depended on them would select among them.
        """
        ...


@runtime_checkable
class DraftLength(Protocol):
    """A policy: hands every row its own state."""

    @property
    def max_draft_tokens(self) -> int:
        """The most that it ever asks for."""
        ...

    def start(self) -> RowDraftLength:
        """The state of a new row."""
        ...


@dataclass(frozen=True)
class FixedDraftLength:
    """The same K in every round: policy and state of a row in one, for there is none."""

    max_draft_tokens: int

    def start(self) -> FixedDraftLength:
        """Itself."""
        return self

    def choose(self) -> int:
        """K."""
        return self.max_draft_tokens

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Nothing to learn."""


@dataclass(frozen=True)
class SpeedModel:
    """What a round costs, in plain target steps of the same engine and batch.

    draft_cost_ratio: c, one draft step. verify_cost_ratio: v(n) by n, the target on n tokens;
    between measured widths it is interpolated, see ``planner.interpolate``.

    Raises:
        ConfigError: a cost that no measurement gives, or no v(n) at all.
    """

    draft_cost_ratio: float
    verify_cost_ratio: Mapping[int, float]

    def __post_init__(self) -> None:
        if not self.verify_cost_ratio:
            raise ConfigError("A speed model needs v(n) for at least one width; none was given.")
        costs = (self.draft_cost_ratio, *self.verify_cost_ratio.values())
        if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
            raise ConfigError(
                f"draft_cost_ratio is {self.draft_cost_ratio} and verify_cost_ratio "
                f"{dict(self.verify_cost_ratio)}; all are ratios of measured times and cannot be "
                "negative. Measure the pair again."
            )

    @property
    def verify(self) -> VerifyCost:
        """v as a function of the width."""
        return interpolate(self.verify_cost_ratio)

    def round_cost(self, num_draft_tokens: int) -> float:
        """K c + v(K + 1); exactly 1 at K = 0, which is plain decoding."""
        return call_cost(
            num_draft_tokens, draft_cost_ratio=self.draft_cost_ratio, verify_cost_ratio=self.verify
        )


@dataclass(frozen=True)
class AdaptiveDraftLength:
    """The K with the most expected tokens per unit of time, for each row from its own rounds.

    A row's acceptance is counted by position in the block, with exponential forgetting. A position
    that was rarely reached leans on all positions together, and these on the prior. The expected
    tokens of K are 1 + a1 + a1 a2 + ..., the costs are the speed model's (Leviathan et al. 2023,
    Theorem 3.8, with measured costs).

    Where K = 0 is best nothing more is learned, so a row is probed with one drafted token, after
    so many plain rounds. An accepted draft halves that number and a refused one doubles it, up to
    where probing costs ``probe_loss`` of the time. Evidence fades while the row decodes plainly:
    it is of a text that has passed.

    Args:
        max_draft_tokens: the most ever drafted; 0 is plain decoding.
        prior_acceptance_rate: expected of a row that has shown nothing yet, such as the measured
            alpha; counts as much as ``prior_weight`` tested tokens.
        half_life: drafted (or plainly emitted) tokens after which evidence counts half. Drafted
            rather than tested: deep rounds that fail are forgotten fast, when a text turns.
        position_weight: tested tokens that all positions together count as, for one of them.
        probe_loss: share of the time that refused probes may take in the long run.

    Raises:
        ConfigError: a setting out of range, or a speed model in which a round costs nothing.
    """

    speed_model: SpeedModel
    max_draft_tokens: int
    prior_acceptance_rate: float = 0.6
    prior_weight: float = 2.0
    half_life: float = 32.0
    position_weight: float = 8.0
    min_probe_interval: int = 4
    probe_loss: float = 0.01

    def __post_init__(self) -> None:
        if self.max_draft_tokens < 0 or not 0.0 <= self.prior_acceptance_rate <= 1.0:
            raise ConfigError(
                f"max_draft_tokens is {self.max_draft_tokens} and prior_acceptance_rate "
                f"{self.prior_acceptance_rate}; the first must be at least 0, the second a "
                "probability."
            )
        positive = {
            "prior_weight": self.prior_weight,
            "half_life": self.half_life,
            "position_weight": self.position_weight,
            "min_probe_interval": self.min_probe_interval,
            "probe_loss": self.probe_loss,
        }
        for name, value in positive.items():
            if not value > 0:
                raise ConfigError(f"{name} is {value}; it must be above 0.")
        costs = [self.speed_model.round_cost(k) for k in range(self.max_draft_tokens + 1)]
        if min(costs) <= 0:
            raise ConfigError(
                f"Rounds of 0 to {self.max_draft_tokens} drafts would cost "
                f"{[round(cost, 3) for cost in costs]} target steps by this speed model, and none "
                f"may cost 0 or less: v(n) goes on beyond the widths "
                f"{sorted(self.speed_model.verify_cost_ratio)} by its last slope. "
                f"Measure v(n) up to {self.max_draft_tokens + 1}, or lower max_draft_tokens."
            )

    def start(self) -> RowDraftLength:
        """The state of a new row; it begins with the prior."""
        return _AdaptiveRow(self)


class _AdaptiveRow:
    """Counts of one row; every number here follows from its finished rounds alone."""

    def __init__(self, policy: AdaptiveDraftLength) -> None:
        self._policy = policy
        size = policy.max_draft_tokens
        self._costs = [policy.speed_model.round_cost(k) for k in range(size + 1)]
        self._tested = [0.0] * size
        self._accepted = [0.0] * size
        self._num_plain_rounds = 0
        self._interval = policy.min_probe_interval
        # A refused probe costs its round, less the token that a plain one gives too, and what the
        # draft has to read first of the tokens it has missed.
        refused = self._costs[1] - 1.0 + policy.speed_model.draft_cost_ratio if size else 0.0
        longest = min(_MAX_PROBE_INTERVAL, round(refused / policy.probe_loss))
        self._max_interval = max(policy.min_probe_interval, longest)
        self._best = self._planned()

    def choose(self) -> int:
        """The best K; where that is 0, a probe with one draft when it is due."""
        is_due = self._num_plain_rounds >= self._interval
        return self._best or int(is_due and self._policy.max_draft_tokens > 0)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Count the positions that were tested: the accepted ones and the first refused one."""
        if num_drafted == 0:
            self._num_plain_rounds += 1
            self._forget(1)
            return
        num_tested = min(num_accepted + 1, num_drafted)
        self._forget(num_drafted)
        for position in range(num_tested):
            self._tested[position] += 1.0
            self._accepted[position] += position < num_accepted
        if num_accepted:
            self._interval = max(self._policy.min_probe_interval, self._interval // 2)
        else:
            self._interval = min(self._max_interval, 2 * self._interval)
            self._num_plain_rounds = 0
        self._best = self._planned()

    def _forget(self, num_tokens: int) -> None:
        kept = 0.5 ** (num_tokens / self._policy.half_life)
        self._tested = [kept * count for count in self._tested]
        self._accepted = [kept * count for count in self._accepted]

    def _planned(self) -> int:
        """The K of the largest expected tokens per cost; ties go to the smaller one."""
        policy = self._policy
        pooled = policy.prior_weight * policy.prior_acceptance_rate + sum(self._accepted)
        pooled /= policy.prior_weight + sum(self._tested)
        best, best_rate, tokens, reach = 0, 1.0, 1.0, 1.0
        for depth in range(1, policy.max_draft_tokens + 1):
            accepted, tested = self._accepted[depth - 1], self._tested[depth - 1]
            weight = policy.position_weight
            reach *= (weight * pooled + accepted) / (weight + tested)
            tokens += reach
            if tokens / self._costs[depth] > best_rate:
                best, best_rate = depth, tokens / self._costs[depth]
        return best
