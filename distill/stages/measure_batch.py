"""Owns the single steps that are timed: a pass of the target, a proposal, for any number of rows.

Refuses to know how steps are interleaved and what follows from their costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distill.drafters.base import CacheSharer
from distill.metrics import timing
from distill.models import LoadedModel
from distill.runtime.cache import RaggedCache
from distill.runtime.forward import forward, prefill
from distill.sampling import SamplingConfig
from distill.stages.measure_config import TimingConfig
from distill.stages.measure_runs import Contestant

_WIDTHS = (1, 2, 3, 5, 9)
_MOST_REPEATS = 3
_DRAFTED = 2


def batch_costs(
    target: LoadedModel,
    draft: Contestant,
    context: Sequence[int],
    temperatures: Sequence[float],
    config: TimingConfig,
) -> list[dict[str, Any]]:
    """c and v(n) at every batch size of the settings, relative to a plain step of that batch.

    One row per batch size and temperature: drawing costs a draft more than the argmax does.
    """
    rows: list[dict[str, Any]] = []
    deepest = config.max_draft_tokens + 1
    for batch_size in config.batch_sizes:
        costs = timing.measure_step_costs(
            target_pass(target, context, num_rows=batch_size),
            {
                t: draft_call(target, draft, context, t, _DRAFTED, num_rows=batch_size)
                for t in temperatures
            },
            widths=[n for n in _WIDTHS if n < deepest] + [deepest],
            repeats=min(_MOST_REPEATS, config.cost_repeats),
            draft_steps_per_call=_DRAFTED,
        )
        rows += [
            {
                "batch_size": batch_size,
                "temperature": t,
                "target_step_ms": costs.target_step_ms.to_dict(),
                "draft_cost_ratio": costs.draft_cost_ratio[t],
                "verify_cost_ratio": {str(n): v for n, v in costs.verify_cost_ratio.items()},
            }
            for t in temperatures
        ]
    return rows


def target_pass(
    target: LoadedModel, context: Sequence[int], *, num_rows: int = 1
) -> Callable[[int], None]:
    """The target on the last n tokens' worth of input after the context, through its cache."""
    cache = RaggedCache(target.model, max_rows=num_rows)
    rows = [cache.join() for _ in range(num_rows)]
    cache.reserve(len(context) + 64)
    prefill(target.model, cache, {row: context for row in rows})

    def run(num_tokens: int) -> None:
        tokens = [context[-1 - i % len(context)] for i in range(num_tokens)]
        forward(target.model, cache, [tokens] * num_rows)
        synchronize(target.device)
        for row in rows:
            cache.roll_back(row, len(context))

    return run


def draft_call(
    target: LoadedModel,
    contestant: Contestant,
    context: Sequence[int],
    temperature: float,
    num_drafted: int,
    *,
    num_rows: int = 1,
) -> Callable[[], None]:
    """One proposal after the context, as in a round: the last token is read, then each draft."""
    drafter = contestant.make_drafter()
    handles = list(range(num_rows))
    if isinstance(drafter, CacheSharer):
        cache = RaggedCache(target.model, max_rows=num_rows)
        cache.reserve(len(context) + 64)
        drafter.share(target.model, cache)
        prefill(target.model, cache, {cache.join(): context[:-1] for _ in handles})
    drafter.start(
        vocabulary_size=min(target.shape.vocab_size, len(target.tokenizer)),
        max_batch_size=num_rows,
    )
    for handle in handles:
        drafter.join(handle, context, SamplingConfig(temperature=temperature), seed=0)

    def run() -> None:
        drafter.propose(handles, [context] * num_rows, [num_drafted] * num_rows)
        synchronize(target.device)
        # A round always commits a token the draft has not read: leave it the last one to read.
        for handle in handles:
            drafter.commit(handle, len(context) - 1)

    return run


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator; a CPU has nothing outstanding."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
