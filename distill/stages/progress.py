"""Showing that answers arrive: a bar on a terminal or lines in the log, and a file of JSON lines.

Refuses to know what an answer is and whether it is good.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 10.0

Outcome = Literal["completed", "truncated", "rejected", "failed", "known"]
"""How an answer ended; "known": taken over from another build, so it says nothing about speed."""


class Progress(Protocol):
    """What is told while answers come in."""

    def add_tokens(self, num_tokens: int) -> None:
        """So many tokens more."""

    def add_answer(self, outcome: Outcome) -> None:
        """One answer more is there."""

    def drop_answers(self, num_answers: int) -> None:
        """So many answers will not be asked for after all."""

    def state(self) -> Mapping[str, Any]:
        """Counts, rate and time left, as a line of the log holds them."""
        ...


class JsonLines:
    """A file that grows by one JSON object a line: ``time`` (UTC), ``event``, and what is told."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def write(self, event: str, **told: Any) -> None:
        """Append one line; opened anew each time, so that a kill loses at most this line."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | told) + "\n")


class _Counted:
    """Counts what came, and shows it now and then."""

    def __init__(self, num_answers: int, lines: JsonLines | None, bar: Bar | None) -> None:
        self._num_answers, self._lines, self._bar = num_answers, lines, bar
        self._outcomes: Counter[str] = Counter()
        self._tokens = 0
        self._started = self._shown = time.perf_counter()
        self._task = None if bar is None else bar.add_task("", total=num_answers, said="")

    def add_tokens(self, num_tokens: int) -> None:
        self._tokens += num_tokens
        self._show()

    def add_answer(self, outcome: Outcome) -> None:
        self._outcomes[outcome] += 1
        self._show()

    def drop_answers(self, num_answers: int) -> None:
        self._num_answers -= num_answers
        self._show()

    def state(self) -> dict[str, Any]:
        """The numbers of a line: answers, tokens and their rate, and how long the rest takes."""
        elapsed_s = max(time.perf_counter() - self._started, 1e-9)
        num_done, num_known = self._outcomes.total(), self._outcomes["known"]
        rest = self._num_answers - num_done
        # What was known already took no time, so it tells nothing about the rest.
        pace = elapsed_s / (num_done - num_known) if num_done > num_known else None
        return {
            "num_answers": self._num_answers,
            "num_done": num_done,
            "num_truncated": self._outcomes["truncated"],
            "num_rejected": self._outcomes["rejected"],
            "num_failed": self._outcomes["failed"],
            "num_tokens": self._tokens,
            "tokens_per_s": round(self._tokens / elapsed_s, 1),
            "elapsed_s": round(elapsed_s, 3),
            "eta_s": None if pace is None else round(pace * rest, 1),
        }

    def _show(self) -> None:
        if self._bar is not None and self._task is not None:
            state = self.state()
            self._bar.update(
                self._task,
                completed=state["num_done"],
                total=state["num_answers"],
                said=_said(state),
            )
        now = time.perf_counter()
        if now - self._shown < _LOG_EVERY_S:
            return
        self._shown = now
        state = self.state()
        if self._lines is not None:
            self._lines.write("progress", **state)
        if self._bar is None:
            logger.info(
                "%d of %d answers, %s", state["num_done"], state["num_answers"], _said(state)
            )


def _said(state: dict[str, Any]) -> str:
    eta = "" if state["eta_s"] is None else f", {_duration(state['eta_s'])} left"
    return (
        f"{state['num_tokens']} tokens, {state['tokens_per_s']:.0f} tokens/s{eta}, "
        f"{state['num_truncated']} truncated, {state['num_failed']} failed"
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def answering_progress(num_answers: int, lines: JsonLines | None = None) -> Iterator[Progress]:
    """A bar on a terminal, else lines in the log; and JSON lines where a file is given."""
    if not sys.stderr.isatty():
        yield _Counted(num_answers, lines, None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), "answers, {task.fields[said]}")
    with Bar("generate", *columns, console=Console(stderr=True)) as bar:
        yield _Counted(num_answers, lines, bar)
