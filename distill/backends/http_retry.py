"""When a request is tried again, and after how long; the only file that knows tenacity.

Refuses to know what is asked and of whom.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import tenacity

from distill.backends.http_wire import TryAgain

Pause = Callable[[float], Awaitable[None]]
"""Waits that many seconds; a test's own does not."""


def retrying(
    *, max_tries: int, backoff_s: float, max_wait_s: float, pause: Pause
) -> tenacity.AsyncRetrying:
    """Up to ``max_tries``, with waits drawn from (0, backoff], (0, 2 backoff], ...

    Random waits keep rows that failed together from coming back together. A server's Retry-After
    is a lower bound; one beyond ``max_wait_s`` ends the row. The last failure is raised as it is.
    """
    jittered = tenacity.wait_random_exponential(multiplier=backoff_s, max=max_wait_s)

    def wait(state: tenacity.RetryCallState) -> float:
        return max(float(jittered(state)), _failure(state).retry_after_s)

    def is_worth_it(error: BaseException) -> bool:
        return isinstance(error, TryAgain) and error.retry_after_s <= max_wait_s

    async def sleep(seconds: float) -> None:
        await pause(seconds)

    return tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(max_tries),
        wait=wait,
        retry=tenacity.retry_if_exception(is_worth_it),
        sleep=sleep,
        reraise=True,
    )


def _failure(state: tenacity.RetryCallState) -> TryAgain:
    assert state.outcome is not None
    error = state.outcome.exception()
    assert isinstance(error, TryAgain)
    return error


def retry_after_s(header: str | None, *, now: datetime | None = None) -> float:
    """Seconds in a Retry-After header: a number, or a date (RFC 9110, 10.2.3); else 0."""
    if header is None:
        return 0.0
    if header.strip().isdecimal():
        return float(header)
    try:
        when = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    return max(0.0, (when - (now or datetime.now(UTC))).total_seconds())
