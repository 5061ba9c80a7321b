"""Owns the ledger of speculative decoding: counts only; every rate is derived from them.
Refuses to know time, tokens and text.

A token after an end of sequence, a stop string or the token budget was never emitted, so it is
neither tested nor accepted here, whatever the verification said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class DecodeStats:
    """Counts of any number of rows and rounds; ``a + b`` merges two ledgers.

    num_target_calls: target forwards the rows took part in, prefill not counted. A batch of
        eight rows in one forward counts eight: the ratios below are means per row.
    num_rounds: the calls among them that tested at least one drafted token's position, that is
        where a draft was proposed.
    num_proposed, num_tested, num_accepted: drafted tokens. Tokens behind the first rejection
        were proposed but never tested.
    num_emitted: tokens handed out, correction and bonus tokens included.
    *_by_position: the same, for the first, second, ... token of a block.
    accepted_length_histogram: rounds by how many drafts were accepted, from 0.
    """

    num_target_calls: int = 0
    num_rounds: int = 0
    num_proposed: int = 0
    num_tested: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    proposed_by_position: tuple[int, ...] = ()
    tested_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    accepted_length_histogram: tuple[int, ...] = ()

    @classmethod
    def from_rounds(cls, rounds: Iterable[tuple[int, int, int]]) -> DecodeStats:
        """Build the ledger from (num_proposed, num_accepted, num_emitted) per row and round.

        ``num_accepted`` is the verification's answer; what the commit cut off is removed here.
        """
        proposed: list[int] = []
        tested: list[int] = []
        accepted: list[int] = []
        histogram: list[int] = []
        calls = drafted_rounds = emitted_total = 0
        for num_proposed, num_accepted, num_emitted in rounds:
            assert 0 <= num_accepted <= num_proposed
            assert 0 <= num_emitted <= num_accepted + 1
            calls += 1
            emitted_total += num_emitted
            if not num_proposed:
                continue
            drafted_rounds += 1
            stands = min(num_accepted, num_emitted)
            _count_first(proposed, num_proposed)
            _count_first(tested, min(num_accepted + 1, num_proposed, num_emitted))
            _count_first(accepted, stands)
            histogram.extend([0] * (num_proposed + 1 - len(histogram)))
            histogram[stands] += 1
        return cls(
            num_target_calls=calls,
            num_rounds=drafted_rounds,
            num_proposed=sum(proposed),
            num_tested=sum(tested),
            num_accepted=sum(accepted),
            num_emitted=emitted_total,
            proposed_by_position=tuple(proposed),
            tested_by_position=_padded(tested, len(proposed)),
            accepted_by_position=_padded(accepted, len(proposed)),
            accepted_length_histogram=tuple(histogram),
        )

    @property
    def acceptance_rate(self) -> float | None:
        """alpha: accepted / TESTED; None when nothing was tested."""
        return _ratio(self.num_accepted, self.num_tested)

    @property
    def draft_acceptance_rate(self) -> float | None:
        """accepted / PROPOSED: what vLLM and llama.cpp print; never above acceptance_rate."""
        return _ratio(self.num_accepted, self.num_proposed)

    @property
    def block_efficiency(self) -> float | None:
        """tau: tokens emitted per target call of a row, 1 .. K + 1."""
        return _ratio(self.num_emitted, self.num_target_calls)

    @property
    def acceptance_by_position(self) -> tuple[float | None, ...]:
        """P(the token at this position of a block is accepted), over blocks that reach it."""
        return _ratios(self.accepted_by_position, self.proposed_by_position)

    @property
    def conditional_acceptance_by_position(self) -> tuple[float | None, ...]:
        """P(accepted | every earlier token of the block was accepted)."""
        return _ratios(self.accepted_by_position, self.tested_by_position)

    def __add__(self, other: DecodeStats) -> DecodeStats:
        if not isinstance(other, DecodeStats):
            return NotImplemented
        merged: dict[str, Any] = {f.name: _sum(self, other, f.name) for f in fields(self)}
        return DecodeStats(**merged)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able counts; rates are left out because they follow from them."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DecodeStats:
        """The inverse of :meth:`to_dict`."""
        counts: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in data.items()
        }
        return cls(**counts)


def _count_first(counts: list[int], number: int) -> None:
    """Add one to the first ``number`` entries, growing the list as needed."""
    counts.extend([0] * (number - len(counts)))
    for position in range(number):
        counts[position] += 1


def _padded(counts: Iterable[int], length: int) -> tuple[int, ...]:
    known = tuple(counts)
    return known + (0,) * (length - len(known))


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None


def _ratios(numerators: tuple[int, ...], denominators: tuple[int, ...]) -> tuple[float | None, ...]:
    return tuple(_ratio(n, d) for n, d in zip(numerators, denominators, strict=True))


def _sum(left: DecodeStats, right: DecodeStats, name: str) -> Any:
    a, b = getattr(left, name), getattr(right, name)
    if isinstance(a, int):
        return a + b
    length = max(len(a), len(b))
    pairs = zip(_padded(a, length), _padded(b, length), strict=True)
    return tuple(x + y for x, y in pairs)
