"""Owns this library's side of a benchmark: engines over a pair, step costs, the predicted speedup.
Refuses to know rivals and tables.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from distill.drafters.base import Drafter
from distill.drafters.causal_lm import CausalLMDrafter
from distill.metrics import planner, timing
from distill.models import LoadedModel
from distill.runtime import forward as forwards
from distill.runtime import rounds as judging
from distill.runtime.cache import RaggedCache
from distill.runtime.decode import DecodeEngine, DecodeRequest
from distill.runtime.speculative import decode_batch
from distill.runtime.stats import DecodeStats
from distill.sampling import SamplingConfig
from scripts.benchmarks.measuring import Run, synchronize

COST_DRAFT_TOKENS = 4
_WIDTHS = (1, 2, 3, 4, 5, 7, 9, 12, 16)


@dataclass(frozen=True)
class Pair:
    """A target and a draft, which proposes the ids it was loaded with (None: all)."""

    target: LoadedModel
    draft: LoadedModel

    @property
    def vocabulary_token_ids(self) -> tuple[int, ...] | None:
        """The ids the draft proposes; None: all."""
        return self.draft.vocabulary_token_ids

    def make_drafter(self) -> CausalLMDrafter:
        """A drafter with no rows: each engine has its own."""
        return CausalLMDrafter.of(self.draft)


@dataclass(frozen=True)
class Costs:
    """Measured at one batch size and temperature, see :class:`distill.metrics.timing.StepCosts`."""

    target_step_ms: timing.Spread
    draft_step_ms: timing.Spread
    draft_cost_ratio: float
    verify_cost_ratio: dict[int, float]

    @property
    def verify(self) -> planner.VerifyCost:
        """v(n) for any n."""
        return planner.interpolate(self.verify_cost_ratio)


class Ours:
    """One decode engine, used again every round as a server would.

    No token ends a text here: like its rivals it decodes exactly ``new_tokens`` a row.
    """

    def __init__(
        self,
        target: LoadedModel,
        drafter: Drafter | None,
        *,
        num_draft_tokens: int,
        max_batch_size: int,
        max_length: int,
        draft_length: Any = None,
    ) -> None:
        self.target = target
        settings = {} if draft_length is None else {"draft_length": draft_length}
        self.engine = DecodeEngine(
            target.model,
            drafter,
            num_draft_tokens=num_draft_tokens,
            max_batch_size=max_batch_size,
            max_length=max_length,
            **settings,
        )

    def run(
        self, prompts: Sequence[Sequence[int]], *, temperature: float, new_tokens: int, seed: int
    ) -> Run:
        """Decode the prompts together."""
        results = decode_batch(
            self.engine,
            requests(prompts, temperature=temperature, new_tokens=new_tokens, seed=seed),
        )
        synchronize(self.target.device)
        return Run(
            sum(len(result.token_ids) for result in results),
            sum((result.stats for result in results), DecodeStats()),
        )


def requests(
    prompts: Sequence[Sequence[int]], *, temperature: float, new_tokens: int, seed: int
) -> list[DecodeRequest]:
    """Requests that run to their last token, each row with a seed of its own."""
    return [
        DecodeRequest(
            prompt_token_ids=prompt,
            max_new_tokens=new_tokens,
            sampling=SamplingConfig(temperature=temperature),
            seed=seed * 1000 + index,
            stop_token_ids=frozenset(),
        )
        for index, prompt in enumerate(prompts)
    ]


# ------------------------------------------------------------------------------ costs


def measure_costs(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    *,
    new_tokens: int,
    max_draft_tokens: int,
    repeats: int,
) -> dict[float, Costs]:
    """c and v(n) of a batch of these prompts, half way through their answers, by temperature."""
    contexts = [
        list(itertools.islice(itertools.cycle(prompt), len(prompt) + new_tokens // 2))
        for prompt in prompts
    ]
    deepest = max_draft_tokens + 1
    num_drafted = min(COST_DRAFT_TOKENS, max_draft_tokens)
    costs = timing.measure_step_costs(
        _target_pass(pair.target, contexts),
        {t: _draft_call(pair, contexts, t, num_drafted) for t in temperatures},
        widths=[n for n in _WIDTHS if n < deepest] + [deepest],
        repeats=repeats,
        draft_steps_per_call=num_drafted,
    )
    return {
        t: Costs(
            target_step_ms=costs.target_step_ms,
            draft_step_ms=costs.draft_step_ms[t],
            draft_cost_ratio=costs.draft_cost_ratio[t],
            verify_cost_ratio=costs.verify_cost_ratio,
        )
        for t in temperatures
    }


def _target_pass(target: LoadedModel, contexts: Sequence[list[int]]) -> Callable[[int], None]:
    cache = RaggedCache(target.model, max_rows=len(contexts))
    rows = {cache.join(): context for context in contexts}
    cache.reserve(max(map(len, contexts)) + 64)
    forwards.prefill(target.model, cache, rows)

    def run(num_tokens: int) -> None:
        fed = [[context[-1 - i % len(context)] for i in range(num_tokens)] for context in contexts]
        forwards.forward(target.model, cache, fed)
        synchronize(target.device)
        for row, context in rows.items():
            cache.roll_back(row, len(context))

    return run


def _draft_call(
    pair: Pair, contexts: Sequence[list[int]], temperature: float, num_drafted: int
) -> Callable[[], None]:
    """One proposal for every row, as in a round: the last token is read, then each draft."""
    drafter = pair.make_drafter()
    head = pair.target.model.get_output_embeddings()
    drafter.start(vocabulary_size=head.weight.shape[0], max_batch_size=len(contexts))
    handles = list(range(len(contexts)))
    for handle, context in zip(handles, contexts, strict=True):
        drafter.join(handle, context, SamplingConfig(temperature=temperature), seed=handle)

    def run() -> None:
        drafter.propose(handles, contexts, [num_drafted] * len(handles))
        synchronize(pair.target.device)
        for handle, context in zip(handles, contexts, strict=True):
            # A round always commits a token the draft has not read: leave it the last one to read.
            drafter.commit(handle, len(context) - 1)

    return run


def best_depth(stats: DecodeStats, costs: Costs, *, max_draft_tokens: int) -> planner.Plan:
    """The planner's K from a pilot's acceptance, position by position, and the measured costs."""
    tokens = planner.tokens_from_positions(
        stats.conditional_acceptance_by_position, tail_rate=stats.acceptance_rate or 0.0
    )
    return planner.best_num_draft_tokens(
        tokens,
        draft_cost_ratio=costs.draft_cost_ratio,
        verify_cost_ratio=costs.verify,
        max_draft_tokens=max_draft_tokens,
    )


def predicted_speedup(
    stats: DecodeStats, *, draft_cost_ratio: float, verify_cost_ratio: planner.VerifyCost
) -> float:
    """Tokens emitted over what their calls cost in plain target steps.

    Every call counts at its own depth (K c + v(K + 1), or 1 without drafts), so the same formula
    serves a fixed K, whose last blocks are shorter, and an adaptive one.
    """
    drafted = [*stats.proposed_by_position, 0]
    cost = float(stats.num_target_calls - stats.num_rounds)
    for depth, (reach, further) in enumerate(itertools.pairwise(drafted), start=1):
        cost += (reach - further) * planner.call_cost(
            depth, draft_cost_ratio=draft_cost_ratio, verify_cost_ratio=verify_cost_ratio
        )
    return stats.num_emitted / cost


# ------------------------------------------------------------------------------ profile


@dataclass(frozen=True)
class RoundShares:
    """Where the time of a round goes, as shares of 1; ``python`` is whatever is in no other."""

    round_ms: float
    target_forward: float
    draft_forward: float
    probabilities: float

    @property
    def python(self) -> float:
        """Outside model forwards, and outside probabilities, draws and the acceptance rule."""
        return 1.0 - self.target_forward - self.draft_forward - self.probabilities


def profile_rounds(ours: Ours, requested: Sequence[DecodeRequest]) -> RoundShares:
    """Decode with a clock around every forward and every judgement; admission is not counted."""
    for request in requested:
        ours.engine.add(request)
    handles = [update.handle for update in ours.engine.step()]
    with _clocked(ours.target) as spent:
        started, num_rounds = time.perf_counter(), 0
        while ours.engine.has_work:
            ours.engine.step()
            num_rounds += 1
        seconds = time.perf_counter() - started
    for handle in handles:
        ours.engine.result(handle)
    assert num_rounds, "nothing was left to decode after the first round"
    assert spent["target"], "no forward of the target was seen: are callers patched by name?"
    return RoundShares(
        round_ms=1e3 * seconds / num_rounds,
        target_forward=spent["target"] / seconds,
        draft_forward=spent["draft"] / seconds,
        probabilities=spent["probabilities"] / seconds,
    )


@contextmanager
def _clocked(target: LoadedModel) -> Iterator[dict[str, float]]:
    """Seconds inside the runtime's forwards, by model, and inside its probability mathematics."""
    spent = dict.fromkeys(("target", "draft", "probabilities"), 0.0)

    def timed(function: Callable[..., Any], name_of: Callable[..., str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            synchronize(target.device)
            spent[name_of(*args)] += time.perf_counter() - started
            return result

        return call

    def model_of(model: Any, *_: Any) -> str:
        return "target" if model is target.model else "draft"

    def mathematics(*_: Any) -> str:
        return "probabilities"

    wrapped: dict[Callable[..., Any], Callable[..., Any]] = {
        forwards.forward: timed(forwards.forward, model_of),
        judging.judge: timed(judging.judge, mathematics),
    }
    owner: Any = next(c for c in CausalLMDrafter.__mro__ if "_draw" in vars(c))
    draw = owner._draw
    owner._draw = timed(draw, mathematics)
    try:
        with patched(wrapped):
            yield spent
    finally:
        owner._draw = draw


@contextmanager
def patched(replacements: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Put other functions in the place of some, under every name the library knows them by.

    ``from x import f`` makes a second name, and replacing the first would not reach it.
    """
    users = [
        (module, name, value)
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("distill.")
        for name, value in list(vars(module).items())
        if isinstance(value, FunctionType) and value in replacements
    ]
    for module, name, value in users:
        setattr(module, name, replacements[value])
    try:
        yield
    finally:
        for module, name, value in users:
            setattr(module, name, value)


# ------------------------------------------------------------------------------ memory


def weight_bytes(*models: Any) -> int:
    """Bytes of the parameters, shared ones once."""
    storages = {
        parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes()
        for model in models
        for parameter in model.parameters()
    }
    return sum(storages.values())


def cache_bytes(model: Any, *, num_rows: int, num_tokens: int) -> int:
    """Bytes of keys and values of so many rows of so many tokens."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    itemsize = torch.empty(0, dtype=model.dtype).element_size()
    return int(2 * config.num_hidden_layers * heads * width * itemsize * num_rows * num_tokens)


def allowed_bytes(pair: Pair, *, num_rows: int, num_tokens: int, num_draft_tokens: int) -> int:
    """Weights, caches of full rows, and one float32 block [rows, S, V]."""
    head = pair.target.model.get_output_embeddings()
    block = 4 * num_rows * (num_draft_tokens + 1) * int(head.weight.shape[0])
    models = (pair.target.model, pair.draft.model)
    caches = sum(cache_bytes(m, num_rows=num_rows, num_tokens=num_tokens) for m in models)
    return weight_bytes(*models) + caches + block
