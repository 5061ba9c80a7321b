"""Owns wall-clock comparison: warm-up, interleaving, medians with spread.

Refuses to know what is timed: contestants are callables, the clock is an argument.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import torch

from distill import provenance

Clock = Callable[[], float]
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Spread:
    """Median and range of repeated measurements, in the unit of the samples."""

    median: float
    minimum: float
    maximum: float
    num_samples: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


def spread(samples: Sequence[float]) -> Spread:
    """Median, minimum and maximum: a mean would be moved by one page fault."""
    return Spread(statistics.median(samples), min(samples), max(samples), len(samples))


def interleave(
    contestants: Mapping[Name, Callable[[], object]],
    *,
    repeats: int,
    num_warmups: int = 1,
    clock: Clock = time.perf_counter,
) -> dict[Name, list[float]]:
    """Seconds of every repeat of every contestant, run A B .. B A .. A B ..

    Interleaving exposes all contestants to the same drift (heat, other jobs); reversing every
    second pass keeps the first from always running on the caches the last one left. Warm-ups
    are run and thrown away. Work on an accelerator must synchronise inside the callable.
    """
    for _ in range(num_warmups):
        for contestant in contestants.values():
            contestant()
    seconds: dict[Name, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            started = clock()
            contestants[name]()
            seconds[name].append(clock() - started)
    return seconds


@dataclass(frozen=True)
class StepCosts(Generic[Name]):
    """What draft steps and target passes cost, as ratios to a plain target step.

    ``verify_cost_ratio[n]`` is the target on n tokens over the target on one; ``[1]`` is 1.
    """

    target_step_ms: Spread
    verify_cost_ratio: dict[int, float]
    draft_step_ms: dict[Name, Spread]
    draft_cost_ratio: dict[Name, float]


def measure_step_costs(
    target_pass: Callable[[int], object],
    draft_calls: Mapping[Name, Callable[[], object]],
    *,
    widths: Sequence[int],
    repeats: int,
    draft_steps_per_call: int = 1,
    clock: Clock = time.perf_counter,
) -> StepCosts[Name]:
    """Time the target on each width and every draft, interleaved; ratios are ratios of medians.

    ``target_pass(n)`` runs the target on n tokens after a fixed context; each draft call runs
    ``draft_steps_per_call`` draft steps after the same context.
    """
    all_widths = sorted({1, *widths})
    contestants: dict[Hashable, Callable[[], object]] = {
        ("target", n): functools.partial(target_pass, n) for n in all_widths
    }
    contestants |= {("draft", key): call for key, call in draft_calls.items()}
    seconds = interleave(contestants, repeats=repeats, num_warmups=2, clock=clock)
    medians = {name: statistics.median(samples) for name, samples in seconds.items()}
    unit = medians["target", 1]
    per_step_ms = {
        key: [1e3 * s / draft_steps_per_call for s in seconds["draft", key]] for key in draft_calls
    }
    return StepCosts(
        target_step_ms=spread([1e3 * s for s in seconds["target", 1]]),
        verify_cost_ratio={n: medians["target", n] / unit for n in all_widths},
        draft_step_ms={key: spread(samples) for key, samples in per_step_ms.items()},
        draft_cost_ratio={
            key: medians["draft", key] / draft_steps_per_call / unit for key in draft_calls
        },
    )


def conditions(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What a timing depends on and a reader cannot guess: device, threads, dtype, load.

    The load average is there because a busy machine is the commonest reason for odd numbers.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else provenance.hardware()["cpu"]
    return {
        "device": device.type,
        "device_name": name,
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "load_average": load,
    }
