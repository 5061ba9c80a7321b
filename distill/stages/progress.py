"""Showing that answers arrive: a bar on a terminal, a line in the log every few seconds elsewhere.

Refuses to know what an answer is and whether it is good.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 10.0


class Progress(Protocol):
    """What is told while answers come in."""

    def add_tokens(self, num_tokens: int) -> None:
        """So many tokens more."""

    def add_answer(self) -> None:
        """One answer more is complete."""


class _LoggedProgress:
    """A line in the log every few seconds, for runs nobody watches."""

    def __init__(self, num_answers: int) -> None:
        self._num_answers, self._answers, self._tokens = num_answers, 0, 0
        self._started = self._logged = time.perf_counter()

    def add_tokens(self, num_tokens: int) -> None:
        self._tokens += num_tokens
        self._log()

    def add_answer(self) -> None:
        self._answers += 1
        self._log()

    def _log(self) -> None:
        now = time.perf_counter()
        if now - self._logged < _LOG_EVERY_S:
            return
        self._logged = now
        rate = self._tokens / (now - self._started)
        logger.info("%d of %d answers, %.0f tokens/s", self._answers, self._num_answers, rate)


class _Bar:
    """A bar of answers with the tokens beside it."""

    def __init__(self, bar: Bar, num_answers: int) -> None:
        self._bar = bar
        self._task = bar.add_task("generate", total=num_answers, tokens=0)
        self._tokens = 0

    def add_tokens(self, num_tokens: int) -> None:
        self._tokens += num_tokens
        self._bar.update(self._task, tokens=self._tokens)

    def add_answer(self) -> None:
        self._bar.advance(self._task)


@contextmanager
def answering_progress(num_answers: int) -> Iterator[Progress]:
    """A bar on a terminal, else lines in the log."""
    if not sys.stderr.isatty():
        yield _LoggedProgress(num_answers)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), "answers, {task.fields[tokens]} tokens")
    console = Console(stderr=True)
    with Bar("generate", *columns, TimeElapsedColumn(), console=console) as bar:
        yield _Bar(bar, num_answers)
