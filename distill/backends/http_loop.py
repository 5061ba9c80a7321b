"""Coroutines behind an ordinary iterator: the event loop runs in a thread of its own.

Refuses to know what the coroutines do.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
Put = Callable[[T], None]


class _End:
    """The last thing in a queue; ``error`` is what the work raised."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def iterate(work: Callable[[Put[T]], Coroutine[Any, Any, None]]) -> Iterator[T]:
    """What ``work`` puts, in that order; leaving the iterator early cancels the work.

    Not in the caller's thread: that may be running an event loop already (a notebook's is), and
    requests go on while the caller stores what came.
    """
    items: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
    loop = asyncio.new_event_loop()
    task = loop.create_task(work(items.put))

    def run() -> None:
        try:
            loop.run_until_complete(task)
        except BaseException as error:  # the caller's thread raises it
            end = _End(error)
        else:
            end = _End(None)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        items.put(end)

    thread = threading.Thread(target=run, name="distill-http-backend", daemon=True)
    thread.start()
    try:
        while not isinstance(item := items.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        with contextlib.suppress(RuntimeError):  # a closed loop has nothing left to cancel
            loop.call_soon_threadsafe(task.cancel)
        thread.join()


async def gather_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all; the first exception cancels the others and is raised as it is."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
