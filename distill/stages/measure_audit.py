"""Owns the audit of what speculation emits: greedy answers token by token, sampled ones by law.

Refuses to know the acceptance tables and the clock.

Shape suffixes: T positions of a continuation, V vocabulary.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distill.backends.base import stable_seed
from distill.metrics.distribution import law_test
from distill.metrics.summary import PromptRecord
from distill.models import LoadedModel
from distill.runtime import lossless
from distill.runtime.decode import DecodeRequest, DecodeResult
from distill.runtime.speculative import decode_batch
from distill.sampling import SamplingConfig, logits_to_probs
from distill.stages import measure_runs as runs
from distill.stages.measure_forced import completion_logits
from distill.stages.measure_runs import Contestant, HeldOutPrompt

Answers = Mapping[tuple[float, str], list[int]]
"""(temperature, prompt_id) -> token ids."""

LawSample = tuple[list[int], list[float], float]
"""Count of every cell, probability of every cell, and that of the cells of many tokens."""

LAW_CONTEXTS = 2
LAW_CONTEXT_TOKENS = 8
LAW_TOKENS = 4
_LAW_DRAFT_TOKENS = 2
_LAW_ROWS = 64


@dataclass(frozen=True)
class Audited:
    """How the answers that are audited were decoded: a control must be decoded the same way."""

    num_draft_tokens: int
    max_new_tokens: int
    batch_size: int


def compare_greedy(
    target: LoadedModel,
    prompts: Sequence[HeldOutPrompt],
    answers: Answers,
    records: Sequence[PromptRecord],
    emitted: Sequence[list[int]],
    *,
    draft: str,
    decoded: Audited,
) -> dict[str, Any]:
    """Every draft's greedy answers against the target's plain ones; zeros without greedy ones.

    An answer in which no draft token was tested is plain decoding beside itself: it is compared
    with nothing, and counts only if it differs all the same. The counts are those of ``draft``, the
    judged one; ``by_draft`` has everybody's with a greedy answer. ``decoded`` is what the drafts
    had, for ``prompts`` in that order. Each divergence has its position, the margin
    of the two tokens and a ``cause``: "tie"; "numerics" when passes of the same width over the same
    batch change that answer beyond a tie even with every draft rejected by force; "logic".
    """
    token_ids = {p.prompt_id: p.token_ids for p in prompts}
    controls = _Controls(target, prompts, decoded)
    divergences: list[dict[str, Any]] = []
    compared: Counter[str] = Counter()
    for record, speculative in zip(records, emitted, strict=True):
        if record.temperature != 0.0:
            continue
        compared[record.draft] += record.counts["num_tested"] > 0
        plain = answers[0.0, record.prompt_id]
        find = functools.partial(
            runs.find_divergence,
            target,
            token_ids[record.prompt_id],
            plain,
            max_new_tokens=decoded.max_new_tokens,
        )
        found = find(speculative)
        if found is None:
            continue
        compared[record.draft] += record.counts["num_tested"] == 0
        cause = "tie"
        if not found["is_tie"]:
            also = find(controls.answer(record.prompt_id))
            cause = "logic" if also is None or also["is_tie"] else "numerics"
        row = {"prompt_id": record.prompt_id, "draft": record.draft, **found, "cause": cause}
        divergences.append(row)
    return {
        "dtype": str(target.dtype).removeprefix("torch."),
        "tie_ulps": runs.TIE_ULPS[target.dtype],
        **_audit_counts(draft, compared, divergences),
        "by_draft": [
            {"draft": name, **_audit_counts(name, compared, divergences)} for name in compared
        ],
        "divergences": divergences,
    }


def _audit_counts(
    draft: str, compared: Mapping[str, int], divergences: Sequence[Mapping[str, Any]]
) -> dict[str, int]:
    mine = [d for d in divergences if d["draft"] == draft]
    num_compared = compared.get(draft, 0)
    num_ties = sum(d["is_tie"] for d in mine)
    return {
        "num_compared": num_compared,
        "num_identical": num_compared - len(mine),
        "num_ties": num_ties,
        "num_broken": len(mine) - num_ties,
    }


class _Controls:
    """Greedy answers by passes as wide as speculation's, every draft rejected by force.

    Decoded in the batches that the audited answers came from: other rows change the arithmetic.
    """

    def __init__(
        self, target: LoadedModel, prompts: Sequence[HeldOutPrompt], decoded: Audited
    ) -> None:
        self._target, self._prompts, self._decoded = target, prompts, decoded
        self._places = {p.prompt_id: place for place, p in enumerate(prompts)}
        self._answers: dict[str, list[int]] = {}

    def answer(self, prompt_id: str) -> list[int]:
        """The control's answer to a prompt; its whole batch is decoded once."""
        if prompt_id not in self._answers:
            size = self._decoded.batch_size
            begin = self._places[prompt_id] // size * size
            chunk = self._prompts[begin : begin + size]
            for prompt, result in zip(chunk, self._decode(chunk), strict=True):
                self._answers[prompt.prompt_id] = result.token_ids
        return self._answers[prompt_id]

    def _decode(self, chunk: Sequence[HeldOutPrompt]) -> Sequence[DecodeResult]:
        budget = self._decoded.max_new_tokens
        engine = runs.engine_with(
            self._target,
            lossless.FillerDrafter(),
            num_draft_tokens=self._decoded.num_draft_tokens,
            max_batch_size=len(chunk),
            max_length=max(len(p.token_ids) for p in chunk) + budget,
        )
        greedy, stops = SamplingConfig(temperature=0.0), self._target.stop_token_ids
        return decode_batch(
            engine,
            [DecodeRequest(p.token_ids, budget, greedy, 0, stops, is_control=True) for p in chunk],
        )


def draw_law_samples(
    target: LoadedModel,
    contestant: Contestant,
    prompts: Sequence[HeldOutPrompt],
    temperature: float,
    *,
    num_samples: int,
    seed: int,
) -> list[LawSample]:
    """Counts and probabilities of the first two tokens after a few short contexts.

    A context is the end of a prompt: the law must hold after any tokens, and short ones are cheap.
    Its cells are the ``LAW_TOKENS`` likeliest first tokens, each with its likeliest second tokens
    and the rest; and all other first tokens: between the cells a changed law shows, inside those of
    the rest it does not. The probabilities come from plain passes of the target
    over one text each; the counts from the engine, which drafts, accepts, rejects and replaces.
    """
    contexts = _contexts(prompts)
    per_context = num_samples // max(1, len(contexts))
    found = []
    for index, context in enumerate(contexts):
        cells = _law(target, context, temperature)
        pairs = _drawn_pairs(
            target, contestant, context, temperature, per_context, stable_seed(seed, "law", index)
        )
        counted = Counter(_cell_of(first, second, cells) for first, second in pairs)
        rest = sum(mass for (_, second), mass in cells.items() if second is None)
        found.append(([counted[cell] for cell in cells], list(cells.values()), rest))
    return found


def law_row(samples: Sequence[LawSample], *, draft: str, temperature: float) -> dict[str, Any]:
    """The test of those samples as a table's row; ``rest_mass``: mean over the contexts."""
    tested = law_test([(counts, probabilities) for counts, probabilities, _ in samples])
    rest = sum(mass for _, _, mass in samples) / max(1, len(samples))
    return {"draft": draft, "temperature": temperature, "rest_mass": rest, **tested.to_dict()}


_Cell = tuple[int | None, int | None]
"""(first, second) token; None: any other."""


def _contexts(prompts: Sequence[HeldOutPrompt]) -> list[tuple[int, ...]]:
    """The ends of prompts far apart in the list, which is sorted by length; each once."""
    places = [i * (len(prompts) - 1) // max(1, LAW_CONTEXTS - 1) for i in range(LAW_CONTEXTS)]
    chosen = [prompts[place].token_ids[-LAW_CONTEXT_TOKENS:] for place in places]
    half = LAW_CONTEXT_TOKENS // 2
    if len(set(chosen)) < len(chosen):  # a chat template ends all prompts alike
        chosen = [prompts[place].token_ids[:half] for place in places] + chosen[:1]
    return list(dict.fromkeys(chosen))[:LAW_CONTEXTS]


def _law(target: LoadedModel, context: Sequence[int], temperature: float) -> dict[_Cell, float]:
    """The target's probability of every cell."""
    sampling = SamplingConfig(temperature=temperature)
    (first_TV,) = completion_logits(target, [(context, [0])])
    first_V = logits_to_probs(first_TV, sampling)[0].double()
    likeliest = first_V.topk(min(LAW_TOKENS, len(first_V))).indices.tolist()
    second = completion_logits(target, [(context, [token, 0]) for token in likeliest])
    cells: dict[_Cell, float] = {}
    rest = 1.0
    for token, logits_TV in zip(likeliest, second, strict=True):
        second_V = logits_to_probs(logits_TV[1:2], sampling)[0].double()
        mass = float(first_V[token])
        rest -= mass
        left = 1.0
        for after in second_V.topk(min(LAW_TOKENS, len(second_V))).indices.tolist():
            cells[token, after] = mass * float(second_V[after])
            left -= float(second_V[after])
        cells[token, None] = mass * max(0.0, left)
    cells[None, None] = max(0.0, rest)
    total = sum(cells.values())
    return {cell: probability / total for cell, probability in cells.items()}


def _cell_of(first: int, second: int, cells: Mapping[_Cell, float]) -> _Cell:
    if (first, second) in cells:
        return first, second
    return (first, None) if (first, None) in cells else (None, None)


def _drawn_pairs(
    target: LoadedModel,
    contestant: Contestant,
    context: Sequence[int],
    temperature: float,
    number: int,
    seed: int,
) -> list[tuple[int, int]]:
    """The first two tokens of seeded continuations by speculative decoding.

    None where not one draft token was tested: what was decoded plainly is no test.
    """
    budget = _LAW_DRAFT_TOKENS + 1
    engine = runs.make_engine(
        target,
        contestant,
        num_draft_tokens=_LAW_DRAFT_TOKENS,
        max_batch_size=_LAW_ROWS,
        max_length=len(context) + budget,
    )
    sampling = SamplingConfig(temperature=temperature)
    requests = [
        DecodeRequest(context, budget, sampling, stable_seed(seed, index), frozenset())
        for index in range(number)
    ]
    results = decode_batch(engine, requests)
    if not results.stats.num_tested:
        return []
    return [(result.token_ids[0], result.token_ids[1]) for result in results]
