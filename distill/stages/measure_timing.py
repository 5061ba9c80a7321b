"""Owns measured speed: step costs, the plan that follows, plain against speculative decoding.

Refuses to know acceptance tables' origin and the verdict; its numbers change from run to run.
"""

from __future__ import annotations

import functools
import itertools
import logging
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from distill.errors import ContextLengthError
from distill.metrics import intervals, planner, timing
from distill.metrics.planner_tables import (
    Rates,
    improvements,
    plan_batches,
    serving_depth,
    speedups_by_alpha,
)
from distill.metrics.sentences import exact, few_prompts
from distill.models import LoadedModel
from distill.runtime.decode import DecodeRequest, DecodeResult
from distill.runtime.speculative import decode_batch
from distill.runtime.stats import DecodeStats
from distill.sampling import SamplingConfig
from distill.stages.measure_batch import batch_costs, draft_call, synchronize, target_pass
from distill.stages.measure_config import PLAIN, TimingConfig
from distill.stages.measure_runs import Contestant, HeldOutPrompt, make_engine, request_of

logger = logging.getLogger(__name__)

DraftAt = tuple[str, float]
"""A draft's name and a temperature."""

_COST_DRAFT_TOKENS = 4
_WIDTHS = (1, 2, 3, 4, 5, 7, 9, 12, 16)


def check_timed(
    prompts: Sequence[HeldOutPrompt], target: LoadedModel, config: TimingConfig
) -> list[HeldOutPrompt]:
    """The prompts whose timed answer the target has room for; nothing is asked of the others.

    Raises:
        ContextLengthError: it has room for none, and speed is to be measured.
    """
    limit = target.shape.max_position_embeddings - config.max_new_tokens
    fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
    if config.enabled and not fitting:
        raise ContextLengthError(
            f"the shortest prompt has {len(prompts[0].token_ids)} tokens and "
            f"measure.timing.max_new_tokens is {config.max_new_tokens}; the target's context is "
            f"{target.shape.max_position_embeddings}. Lower timing.max_new_tokens, or give shorter "
            "prompts"
        )
    if config.enabled and len(fitting) < len(prompts):
        logger.warning(
            "%d of %d prompts are not timed: with measure.timing.max_new_tokens %d they would not "
            "fit the target's context",
            len(prompts) - len(fitting),
            len(prompts),
            config.max_new_tokens,
        )
    return fitting


def time_pair(
    target: LoadedModel,
    contestants: Sequence[Contestant],
    prompts: Sequence[HeldOutPrompt],
    cells: Sequence[Mapping[str, Any]],
    *,
    temperatures: Sequence[float],
    config: TimingConfig,
    seed: int,
) -> dict[str, Any]:
    """Measure costs, choose K for each draft, and time it there.

    The first contestant is the one that is judged: at every temperature it is timed at the one K it
    would be served with (``serving_depth``). The others are timed at their best K of each
    temperature, as strong as they get. A best K of 0 is timed at K = 1 all the same: "do not use
    it" needs evidence too.

    Returns conditions, target_step_ms, verify_cost_ratio, draft_costs, plans (the predicted curve
    of each draft and temperature), batches (costs of many rows at once) and runs (what was timed).
    Everything is JSON-able.
    """
    timed = list(contestants) if config.baselines else [contestants[0]]
    chosen = _spread_out(prompts, config.num_prompts)
    context = _typical_context(target, timed, chosen, config)
    costs = _step_costs(target, timed, context, temperatures, config)
    batches = batch_costs(target, timed[0], context, temperatures, config)
    plans: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    for temperature in temperatures:
        here = [
            _plan(c.name, temperature, _pooled(cells, c.name, temperature), costs, config)
            for c in timed
        ]
        rates = _rates(_pooled(cells, timed[0].name, temperature))
        at_batches = [row for row in batches if row["temperature"] == temperature]
        here[0] |= {
            "by_batch_size": plan_batches(
                rates, at_batches, max_draft_tokens=config.max_draft_tokens
            )
        }
        plans += here
    for temperature in temperatures:
        here = [plan for plan in plans if plan["temperature"] == temperature]
        depths = _depths(plans, temperature, judged=timed[0].name)
        logger.info(
            "timing %d drafts at temperature %s against plain decoding",
            len(timed),
            exact(temperature),
        )
        runs += _time_drafts(target, timed, here, depths, chosen, config, seed)
    return {
        "conditions": timing.conditions(target.device, target.dtype) | {"batch_size": 1},
        "num_prompts": len(chosen),
        "max_new_tokens": config.max_new_tokens,
        "repeats": config.repeats,
        "target_step_ms": costs.target_step_ms.to_dict(),
        "verify_cost_ratio": {str(n): v for n, v in costs.verify_cost_ratio.items()},
        "draft_costs": [
            {
                "draft": name,
                "temperature": temperature,
                "draft_cost_ratio": costs.draft_cost_ratio[name, temperature],
                "draft_step_ms": spread.to_dict(),
            }
            for (name, temperature), spread in costs.draft_step_ms.items()
        ],
        "batches": batches,
        "plans": plans,
        "runs": runs,
    }


def _spread_out(prompts: Sequence[HeldOutPrompt], number: int) -> list[HeldOutPrompt]:
    """Prompts at equal steps through the list, which is sorted by length."""
    number = min(number, len(prompts))
    return [prompts[(2 * i + 1) * len(prompts) // (2 * number)] for i in range(number)]


def _pooled(
    cells: Sequence[Mapping[str, Any]], draft: str, temperature: float
) -> Mapping[str, Any]:
    wanted = (draft, temperature, None)
    return next(c for c in cells if (c["draft"], c["temperature"], c["task"]) == wanted)


# ------------------------------------------------------------------------------ costs


def _typical_context(
    target: LoadedModel,
    contestants: Sequence[Contestant],
    prompts: Sequence[HeldOutPrompt],
    config: TimingConfig,
) -> list[int]:
    """A context as long as a typical row's half way through its answer, within all contexts."""
    deepest = config.max_draft_tokens + 1
    prompt = prompts[len(prompts) // 2].token_ids
    length = len(prompt) + config.max_new_tokens // 2
    limits = [
        m.shape.max_position_embeddings for m in (target, *(c.model for c in contestants)) if m
    ]
    length = max(2, min(length, *(limit - deepest for limit in limits)))
    return list(itertools.islice(itertools.cycle(prompt), length))


def _step_costs(
    target: LoadedModel,
    contestants: Sequence[Contestant],
    context: Sequence[int],
    temperatures: Sequence[float],
    config: TimingConfig,
) -> timing.StepCosts[DraftAt]:
    """c and v(n) after the context."""
    deepest = config.max_draft_tokens + 1
    num_drafted = min(_COST_DRAFT_TOKENS, config.max_draft_tokens)
    return timing.measure_step_costs(
        target_pass(target, context),
        {
            (c.name, t): draft_call(target, c, context, t, num_drafted)
            for c in contestants
            for t in temperatures
        },
        widths=[n for n in _WIDTHS if n < deepest] + [deepest],
        repeats=config.cost_repeats,
        draft_steps_per_call=num_drafted,
    )


# ------------------------------------------------------------------------------ plan


def _plan(
    draft: str,
    temperature: float,
    cell: Mapping[str, Any],
    costs: timing.StepCosts[DraftAt],
    config: TimingConfig,
) -> dict[str, Any]:
    """The predicted curve over K from measured acceptance and costs, and its best point."""
    draft_cost_ratio = costs.draft_cost_ratio[draft, temperature]
    verify = planner.interpolate(costs.verify_cost_ratio)
    rates = _rates(cell)
    tokens = rates.tokens()
    settings: dict[str, Any] = {
        "draft_cost_ratio": draft_cost_ratio,
        "verify_cost_ratio": verify,
        "draft_coverage": cell["draft_coverage"],
    }
    best = planner.best_num_draft_tokens(
        tokens, max_draft_tokens=config.max_draft_tokens, **settings
    )
    curve = [
        {"num_draft_tokens": k, "speedup": tokens(k) / planner.call_cost(k, **settings)}
        for k in range(1, config.max_draft_tokens + 1)
    ]
    return {
        "draft": draft,
        "temperature": temperature,
        "num_draft_tokens": best.num_draft_tokens,
        "predicted_speedup": best.speedup,
        "break_even_acceptance_rate": planner.break_even_acceptance_rate(
            draft_cost_ratio=draft_cost_ratio,
            verify_cost_ratio=verify,
            max_draft_tokens=config.max_draft_tokens,
        ),
        "curve": curve,
        "improvements": improvements(
            rates,
            draft_cost_ratio=draft_cost_ratio,
            verify_cost_ratio=verify,
            max_draft_tokens=config.max_draft_tokens,
        ),
        "by_alpha": speedups_by_alpha(
            draft_cost_ratio=draft_cost_ratio,
            verify_cost_ratio=verify,
            max_draft_tokens=config.max_draft_tokens,
        ),
    }


def _rates(cell: Mapping[str, Any]) -> Rates:
    """How often a draft was accepted, by position, pooled over tasks."""
    return Rates(
        [e["value"] for e in cell["conditional_acceptance_by_position"]],
        cell["acceptance_rate"]["value"] or 0.0,
        cell["draft_coverage"],
    )


def _depths(
    plans: Sequence[Mapping[str, Any]], temperature: float, *, judged: str
) -> dict[str, int]:
    """The K that each draft is timed at."""
    depths = {p["draft"]: p["num_draft_tokens"] for p in plans if p["temperature"] == temperature}
    depths[judged] = serving_depth([plan for plan in plans if plan["draft"] == judged]) or 0
    return {draft: max(1, depth) for draft, depth in depths.items()}


# ------------------------------------------------------------------------------ wall clock


def _time_drafts(
    target: LoadedModel,
    contestants: Sequence[Contestant],
    plans: Sequence[Mapping[str, Any]],
    depths: Mapping[str, int],
    prompts: Sequence[HeldOutPrompt],
    config: TimingConfig,
    seed: int,
) -> list[dict[str, Any]]:
    """Every draft at its K and plain decoding, prompt by prompt, interleaved, at batch 1.

    ``plans`` are of one temperature, one a contestant.
    """
    sampling = SamplingConfig(temperature=plans[0]["temperature"])
    max_length = max(len(p.token_ids) for p in prompts) + config.max_new_tokens
    engines = {
        name: make_engine(
            target,
            contestant,
            num_draft_tokens=depths.get(name, 0),
            max_batch_size=1,
            max_length=max_length,
        )
        for name, contestant in ((PLAIN, None), *((c.name, c) for c in contestants))
    }
    seconds: dict[str, list[list[float]]] = {name: [] for name in engines}
    results: dict[str, list[DecodeResult]] = {name: [] for name in engines}
    for index, prompt in enumerate(prompts):
        request = request_of(
            target, prompt, sampling, max_new_tokens=config.max_new_tokens, seed=seed
        )
        latest: dict[str, DecodeResult] = {}

        def run(name: str, request: DecodeRequest = request, latest: Any = latest) -> None:
            latest[name] = decode_batch(engines[name], [request])[0]
            synchronize(target.device)

        measured = timing.interleave(
            {name: functools.partial(run, name) for name in engines},
            repeats=config.repeats,
            num_warmups=1 if index == 0 else 0,
        )
        for name in engines:
            seconds[name].append(measured[name])
            results[name].append(latest[name])
    return [_run_row(plan, seconds, results, depths[plan["draft"]], seed=seed) for plan in plans]


def _run_row(
    plan: Mapping[str, Any],
    seconds: Mapping[str, Sequence[Sequence[float]]],
    results: Mapping[str, Sequence[DecodeResult]],
    num_draft_tokens: int,
    *,
    seed: int,
) -> dict[str, Any]:
    """One timed draft against plain decoding; the interval is over the timed prompts."""
    draft = plan["draft"]
    num_tokens = {name: [len(r.token_ids) for r in results[name]] for name in (PLAIN, draft)}
    typical = {name: [statistics.median(s) for s in seconds[name]] for name in (PLAIN, draft)}
    columns = [typical[PLAIN], num_tokens[PLAIN], typical[draft], num_tokens[draft]]
    speedup = intervals.estimate(
        list(zip(*columns, strict=True)), intervals.ratio_of_ratios, seed=seed
    )
    predicted = plan["curve"][num_draft_tokens - 1]["speedup"]
    stats = sum((r.stats for r in results[draft]), DecodeStats())
    return {
        "draft": draft,
        "temperature": plan["temperature"],
        "num_draft_tokens": num_draft_tokens,
        "plain_tokens_per_s": _throughput(seconds[PLAIN], num_tokens[PLAIN]),
        "tokens_per_s": _throughput(seconds[draft], num_tokens[draft]),
        "speedup": speedup.to_dict(),
        "caveat": few_prompts(speedup.num_prompts),
        "predicted_speedup": predicted,
        "efficiency": None if speedup.value is None else speedup.value / predicted,
        "block_efficiency": stats.block_efficiency,
        "acceptance_rate": stats.acceptance_rate,
    }


def _throughput(seconds: Sequence[Sequence[float]], num_tokens: Sequence[int]) -> dict[str, Any]:
    """Tokens per second of each pass over the prompts: median and range."""
    passes = [sum(one) for one in zip(*seconds, strict=True)]
    return timing.spread([sum(num_tokens) / s for s in passes]).to_dict()
