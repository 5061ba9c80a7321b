"""Owns what every benchmark shares: fixed threads, rounds in rotated order, peak memory, tables.
Refuses to know what is measured: a system is a callable that says how many tokens it made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from distill.corpus.prompts import hash_fraction
from distill.errors import ConfigError, DistillError
from distill.metrics.timing import Clock, Spread, spread
from distill.runtime.requests import prompt_token_ids
from distill.runtime.stats import DecodeStats

Cell = TypeVar("Cell", bound=Hashable)


@dataclass(frozen=True)
class Run:
    """What one call of a system made; ``stats`` where it speculates and says how it went."""

    num_tokens: int
    stats: DecodeStats | None = None


@dataclass(frozen=True)
class Sample:
    """One timed call."""

    seconds: float
    run: Run

    @property
    def tokens_per_s(self) -> float:
        """The rate of this call."""
        return self.run.num_tokens / self.seconds


System = Callable[[int], Run]
"""Takes the number of the round, which decides its prompts and its seeds."""


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names from the ``turn``-th on, then those before it: everyone is first equally often."""
    start = turn % len(names) if names else 0
    return [*names[start:], *names[:start]]


def run_rounds(
    cells: Mapping[Cell, Mapping[str, System]],
    *,
    rounds: int,
    clock: Clock = time.perf_counter,
    on_round: Callable[[int], None] | None = None,
) -> dict[Cell, dict[str, list[Sample]]]:
    """Time every system of every cell once a round; all share whatever drift the machine has.

    A system must wait for its device before it returns.
    """
    samples: dict[Cell, dict[str, list[Sample]]] = {
        cell: {name: [] for name in systems} for cell, systems in cells.items()
    }
    for turn in range(rounds):
        if on_round is not None:
            on_round(turn)
        for cell, systems in cells.items():
            for name in rotated(list(systems), turn):
                started = clock()
                run = systems[name](turn)
                samples[cell][name].append(Sample(clock() - started, run))
    return samples


def throughput(samples: Sequence[Sample]) -> Spread:
    """Tokens per second: median and range over the rounds."""
    return spread([sample.tokens_per_s for sample in samples])


def paired_ratio(ours: Sequence[Sample], theirs: Sequence[Sample]) -> Spread:
    """Our rate over theirs, round by round: what both rounds had in common cancels."""
    return spread([a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, theirs, strict=True)])


def total_stats(samples: Sequence[Sample]) -> DecodeStats | None:
    """The counts of all rounds, None where the system keeps none."""
    known = [sample.run.stats for sample in samples if sample.run.stats is not None]
    return sum(known, DecodeStats()) if known else None


# ------------------------------------------------------------------------------ machine


def pin_threads(number: int | None) -> int:
    """Fix how many threads torch computes with, and say how many they are."""
    if number is not None:
        torch.set_num_threads(number)
    return torch.get_num_threads()


def synchronize(device: torch.device) -> None:
    """Wait for the device: a CUDA call returns before its work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class PeakMemory:
    """Most memory held inside the block, in bytes: ``peak_bytes`` in all, ``grown_bytes`` by it.

    Resident memory of the process on a CPU (None where the kernel does not say), allocated memory
    on CUDA.
    """

    device: torch.device
    peak_bytes: int | None = None
    grown_bytes: int | None = None
    _before: int | None = field(default=None, repr=False)

    def __enter__(self) -> PeakMemory:
        self._before = held_bytes(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self._before is not None and not _reset_resident_peak():
            self._before = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            return
        if self.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        else:
            self.peak_bytes = _status_bytes("VmHWM")
        if self.peak_bytes is not None:
            self.grown_bytes = self.peak_bytes - self._before


def held_bytes(device: torch.device) -> int | None:
    """Memory held now; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return _status_bytes("VmRSS")


def _status_bytes(key: str) -> int | None:
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(rf"^{key}:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _reset_resident_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


# ------------------------------------------------------------------------------ prompts


def read_prompts(
    path: Path, tokenizer: Any, *, number: int, held_out_fraction: float | None = None
) -> list[list[int]]:
    """Token ids of ``number`` prompts of a JSONL file, at equal steps through it.

    Each is a row's ``messages``, its ``prompt``, or the first of its ``turns``, in the chat
    template where the tokenizer has one.

    Args:
        held_out_fraction: only rows that a corpus with this fraction keeps from training.

    Raises:
        ConfigError: no such file, or fewer rows than asked for.
    """
    try:
        # Not str.splitlines, which also cuts at characters that JSON allows inside a string.
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"no prompts in {path}: {error.strerror}; give --prompts FILE") from error
    rows = [json.loads(line) for line in lines if line.strip()]
    if held_out_fraction is not None:
        rows = [row for row in rows if hash_fraction(row["id"]) < held_out_fraction]
    if len(rows) < number:
        which = "rows" if held_out_fraction is None else "held-out rows"
        raise ConfigError(
            f"{path} has {len(rows)} {which}, {number} are wanted; give a larger file with "
            "--prompts, or ask for fewer"
        )
    chosen = [rows[(2 * i + 1) * len(rows) // (2 * number)] for i in range(number)]
    return [prompt_token_ids(tokenizer, _asked(row, tokenizer)) for row in chosen]


def _asked(row: Mapping[str, Any], tokenizer: Any) -> Any:
    if "messages" in row:
        return row["messages"]
    text = row["prompt"] if "prompt" in row else row["turns"][0]
    return [{"role": "user", "content": text}] if tokenizer.chat_template else text


# ------------------------------------------------------------------------------ output


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, texts to the left, everything else to the right."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    lines = []
    for row in (columns, ["-" * width for width in widths], *rows):
        cells = [
            text.ljust(width) if row_is_text else text.rjust(width)
            for text, width, row_is_text in zip(
                row, widths, (_is_text_column(rows, i) for i in range(len(columns))), strict=True
            )
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _is_text_column(rows: Sequence[Sequence[str]], index: int) -> bool:
    return any(row[index][:1].isalpha() for row in rows)


def number(value: float | None, digits: int = 2) -> str:
    """A number for a table; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def with_range(value: Spread, digits: int = 1) -> str:
    """Median and range."""
    low, high = value.minimum, value.maximum
    return f"{value.median:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def megabytes(num_bytes: int | None) -> str:
    """Bytes as megabytes."""
    return "-" if num_bytes is None else f"{num_bytes / 1e6:.0f} MB"


def write_json(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write everything that was measured, where a path was given."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def publish(
    name: str,
    measure: Callable[[], Mapping[str, Any]],
    text: Callable[[Mapping[str, Any]], str],
    goals: Callable[[Mapping[str, Any]], Any],
    path: Path | None,
) -> int:
    """Measure, print, write with the goals; exit status 2 for a mistake the message explains."""
    try:
        results = measure()
    except DistillError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    print(text(results))
    write_json(path, {**results, "goals": goals(results)})
    return 0


def positive(text: str) -> int:
    """A whole number above zero, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


class Narrator:
    """Says on stderr what is under way and after how long: a benchmark is silent for minutes."""

    def __init__(self, name: str) -> None:
        self._name, self._started = name, time.perf_counter()

    def __call__(self, what: str) -> None:
        """Print one line."""
        seconds = time.perf_counter() - self._started
        print(f"{self._name}: {seconds:4.0f} s  {what}", file=sys.stderr, flush=True)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep transformers' advice out of the tables; its errors stay."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def default_threads() -> int:
    """Threads when nothing else is said: OMP_NUM_THREADS, else the CPUs this process may use."""
    if number := os.environ.get("OMP_NUM_THREADS"):
        return int(number)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
