"""Owns how an estimate is shown: the plan's table, and bytes and seconds as text.

Refuses to know where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distill.stages.run_config import RunConfig

if TYPE_CHECKING:
    from rich.table import Table


def estimate_table(config: RunConfig, rows: Sequence[Mapping[str, Any]]) -> Table:
    """The plan as a table for the terminal: one row a stage, then what it adds up to."""
    from rich.table import Table

    table = Table(title=f"plan of {config.name} on: {config.hardware.name}", title_justify="left")
    numbers = ("tokens", "disk", "memory", "mapped", "time")
    for column in ("stage", "fingerprint", "state", *numbers, "note"):
        is_number = column in numbers
        table.add_column(column, justify="right" if is_number else "left", no_wrap=column != "note")
    for row in rows:
        table.add_row(
            row["stage"],
            row["fingerprint"][:12] + ("?" if row["is_provisional"] else ""),
            row["state"],
            f"{row['num_tokens']:,}",
            size_text(row["disk_bytes"]),
            size_text(row["memory_bytes"]),
            size_text(row["mapped_bytes"]) if row["mapped_bytes"] else "",
            _time(row["duration_s"]),
            row["note"] or row["miss"] or "",
        )
    todo = [row for row in rows if row["state"] != "cached"]
    doubt = (
        "; ?: not known before a model, a dataset or a measurement is at hand, so it will change"
    )
    table.caption = (
        f"to do: {sum(row['num_tokens'] for row in todo):,} tokens, "
        f"{size_text(_total(todo, 'disk_bytes'))} of disk, {_time(_total(todo, 'duration_s'))}; "
        "upper estimates, from shapes and the config's `hardware`; memory: of the device that "
        "computes; mapped: files in main memory, whose pages the system may drop"
        + (doubt if any(row["is_provisional"] for row in rows) else "")
    )
    return table


def _total(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows]
    return None if any(value is None for value in values) else sum(values)


def size_text(num_bytes: float | None) -> str:
    """Bytes in MB or GB; "?" where they are not known."""
    if num_bytes is None:
        return "?"
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.1f} min"
