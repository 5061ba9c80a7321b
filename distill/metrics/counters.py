"""Owns the reading of a server's speculation counters, under the names vLLM gives them.

Refuses to know HTTP, and how the counts came about: the text of /metrics in, counts out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distill.errors import BackendUnavailableError

_SAMPLE = re.compile(
    r"^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+\S+)?$"
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')

_DRAFTS = "vllm:spec_decode_num_drafts"
_PROPOSED = "vllm:spec_decode_num_draft_tokens"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_GENERATED = "vllm:generation_tokens"


@dataclass(frozen=True)
class SpeculationCounters:
    """Counters since a server's start, summed over its engines; they only grow."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_by_position: tuple[int, ...]
    num_generated_tokens: int

    def __sub__(self, earlier: SpeculationCounters) -> SpeculationCounters:
        before = earlier.accepted_by_position
        longest = max(len(self.accepted_by_position), len(before))
        pairs = zip(
            (*self.accepted_by_position, *([0] * (longest - len(self.accepted_by_position)))),
            (*before, *([0] * (longest - len(before)))),
            strict=True,
        )
        return SpeculationCounters(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            tuple(now - then for now, then in pairs),
            self.num_generated_tokens - earlier.num_generated_tokens,
        )


def read_counters(text: str, *, model: str | None = None) -> SpeculationCounters:
    """The speculation counters in the Prometheus text of GET /metrics.

    Args:
        text: samples as ``name{label="value",...} number``; a counter may end in ``_total``.
        model: only samples of this ``model_name``; None: of all.

    Raises:
        BackendUnavailableError: the page has no such counters: no draft is served, or another
            server than one that speaks vLLM's names.
    """
    sums: dict[str, float] = {}
    by_position: dict[int, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line.strip())
        if match is None or line.startswith("#"):
            continue
        labels = dict(_LABEL.findall(match["labels"] or ""))
        if model is not None and labels.get("model_name", model) != model:
            continue
        name = match["name"].removesuffix("_total")
        value = float(match["value"])
        if name == _BY_POSITION:
            position = int(labels.get("position", 0))
            by_position[position] = by_position.get(position, 0.0) + value
        else:
            sums[name] = sums.get(name, 0.0) + value
    if _DRAFTS not in sums or _ACCEPTED not in sums:
        raise BackendUnavailableError(
            f"/metrics has no {_DRAFTS}: this server reports no speculation. Start it with a draft "
            "(vllm: --speculative-config; distill serve: num_draft_tokens above 0) and with its "
            "metrics on"
        )
    length = max(by_position, default=-1) + 1
    return SpeculationCounters(
        num_drafts=int(sums[_DRAFTS]),
        num_draft_tokens=int(sums.get(_PROPOSED, 0)),
        num_accepted_tokens=int(sums[_ACCEPTED]),
        accepted_by_position=tuple(int(by_position.get(i, 0)) for i in range(length)),
        num_generated_tokens=int(sums.get(_GENERATED, 0)),
    )


def counts_of(counters: SpeculationCounters) -> Mapping[str, Any]:
    """Counters of a stretch as the counts of ``DecodeStats``, for the same tables.

    A round tests one token more than it accepts, unless it accepts all it proposed: position i is
    tested as often as position i - 1 is accepted, the first one every time. Every round is taken to
    offer every position, as vLLM's own rates per position do. A server counts rounds with a draft
    only, so plain steps are in no count: emitted tokens are accepted ones plus one a round.

    The counters do not tell a round that ended at an accepted end of text, which emits and tests
    nothing more: it is counted one emitted and (unless all was accepted) one tested token too high,
    at most once an answer. No stretch emits more than the server generated, so ``num_emitted`` is
    at most that: exact for a server whose every token comes from a counted round (ours). vLLM
    generates one token more an answer, with the prompt, and its figures stay approximate.
    """
    rounds = counters.num_drafts
    accepted = counters.accepted_by_position
    emitted = counters.num_accepted_tokens + rounds
    if counters.num_generated_tokens:
        emitted = min(emitted, counters.num_generated_tokens)
    tested = (rounds, *accepted[:-1]) if accepted else ()
    reached = (rounds, *accepted)
    return {
        "num_target_calls": rounds,
        "num_rounds": rounds,
        "num_proposed": counters.num_draft_tokens,
        "num_tested": sum(tested),
        "num_accepted": counters.num_accepted_tokens,
        "num_emitted": emitted,
        "proposed_by_position": [rounds] * len(accepted),
        "tested_by_position": list(tested),
        "accepted_by_position": list(accepted),
        "accepted_length_histogram": [
            here - deeper for here, deeper in zip(reached, (*accepted, 0), strict=True)
        ]
        if accepted
        else [],
    }
