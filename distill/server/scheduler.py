"""The one thread that owns the decode engine: requests wait, join, grow by blocks of text, leave.

Refuses to know HTTP, JSON, event loops, models and how a token is chosen.

Every request ends with exactly one closing event: `Finished` or `Failed`. Callbacks run on the
scheduler's thread and must only pass the event on.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from distill.errors import DistillError, ServerError
from distill.runtime.commit import FinishReason
from distill.runtime.decode import DecodeRequest, DecodeResult, RowUpdate
from distill.runtime.stats import DecodeStats
from distill.runtime.text import Decoder, TextStream

logger = logging.getLogger(__name__)

FailureKind = Literal["refused", "error", "cancelled", "closed"]


class Engine(Protocol):
    """What the scheduler needs of a decode engine; it's used by one thread at a time."""

    def add(self, request: DecodeRequest) -> int: ...
    def step(self) -> Sequence[RowUpdate]: ...
    def cancel(self, handle: int) -> DecodeResult: ...
    def result(self, handle: int) -> DecodeResult: ...


class QueueFullError(ServerError):
    """As many requests wait as the server lets wait."""


class ServerClosedError(ServerError):
    """The server takes no more requests."""


@dataclass(frozen=True)
class Piece:
    """More text of an answer that goes on; may be "" when new tokens decided no text yet."""

    text: str
    num_tokens: int


@dataclass(frozen=True)
class Finished:
    """The end of an answer: the last piece of text, the whole text, and the engine's result."""

    text: str
    whole_text: str
    finish_reason: FinishReason
    result: DecodeResult


@dataclass(frozen=True)
class Failed:
    """The end of a request that has no answer. `message` may be shown to the client."""

    kind: FailureKind
    message: str


_ENGINE_FAILED = Failed("error", "The engine failed on this request.")

Event = Piece | Finished | Failed
Deliver = Callable[[Event], None]


@dataclass(eq=False)
class Ticket:
    """One submitted request."""

    request: DecodeRequest
    deliver: Deliver
    text: TextStream
    is_cancelled: bool = False
    token_ids: list[int] = field(default_factory=list)  # what its events have told so far
    num_seen: int = 0  # tokens of the current run; fewer than were told while it's run again
    is_suspect: bool = False  # it was running when a step failed, so it runs again, alone


@dataclass(frozen=True)
class Snapshot:
    """The scheduler's counts at one moment.

    `num_ended` is by finish reason or failure kind; `stats` covers requests that have ended.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_ended: dict[str, int] = field(default_factory=dict)
    stats: DecodeStats = field(default_factory=DecodeStats)


class Scheduler:
    """Runs requests on an engine, as many at once as fit, until `close`.

    An engine whose step raised is replaced, because nobody can say what it still holds. The rows
    it had run again one by one, so that only the one that breaks a step alone is failed. A row's
    tokens depend on its seed and not on its batch: the second run repeats what was told already,
    and is checked against it.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        decoder: Decoder,
        *,
        max_batch_size: int,
        max_waiting: int,
    ) -> None:
        self._make_engine = make_engine
        self._decoder = decoder
        self._max_batch_size = max_batch_size
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        # Guarded by `_changed`:
        self._waiting: deque[Ticket] = deque()
        self._num_open = 0  # waiting, running, or on the way from one to the other
        self._has_cancellations = False
        self._is_closing = False
        self._snapshot = Snapshot()
        # Touched by the scheduler's thread only:
        self._running: dict[int, Ticket] = {}
        self._num_ended: Counter[str] = Counter()
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._stats = DecodeStats()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Make the engine, raising whatever that raises, and start the thread."""
        self._thread = threading.Thread(
            target=self._run, args=(self._make_engine(),), name="distill-scheduler", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Fail whatever waits or runs, and stop the thread. Safe to call twice."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether requests are being served."""
        return self._thread is not None and not self._is_closing

    def submit(self, request: DecodeRequest, deliver: Deliver) -> Ticket:
        """Queue a request; its events go to `deliver`, from the scheduler's thread.

        Raises QueueFullError when a full batch and `max_waiting` more are here, ServerClosedError
        after `close`.
        """
        ticket = Ticket(request, deliver, TextStream(self._decoder, request.stop_strings))
        with self._changed:
            if not self.is_alive:
                raise ServerClosedError("The server is shutting down; send the request elsewhere.")
            most = self._max_batch_size + self._max_waiting
            if self._num_open >= most:
                raise QueueFullError(
                    f"{self._num_open} requests run or wait already, and this server takes {most} "
                    "at once. Try again in a moment."
                )
            self._num_open += 1
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Stop a request, soon: it ends with `Failed("cancelled")` unless it has ended already."""
        with self._changed:
            ticket.is_cancelled = True
            self._has_cancellations = True
            self._changed.notify()

    def snapshot(self) -> Snapshot:
        """The counts after the latest step."""
        with self._changed:
            return replace(self._snapshot, num_waiting=len(self._waiting))

    def _run(self, engine: Engine) -> None:
        try:
            while self._wait_for_work():
                self._drop_cancelled(engine)
                self._admit(engine)
                engine = self._step(engine)
                self._publish()
        except Exception:
            logger.exception("The scheduler stopped.")
        finally:
            self._fail_everything()

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._is_closing or self._waiting or self._running or self._has_cancellations
                )
            )
            return not self._is_closing

    def _drop_cancelled(self, engine: Engine) -> None:
        with self._changed:
            self._has_cancellations = False
            dropped = [ticket for ticket in self._waiting if ticket.is_cancelled]
            self._waiting = deque(t for t in self._waiting if not t.is_cancelled)
        for handle, ticket in list(self._running.items()):
            if ticket.is_cancelled:
                self._stats += engine.cancel(handle).stats
                dropped.append(self._running.pop(handle))
        for ticket in dropped:
            self._end(ticket, "cancelled", Failed("cancelled", "The request was cancelled."))

    def _admit(self, engine: Engine) -> None:
        while (ticket := self._next_to_join()) is not None:
            ticket.num_seen = 0
            try:
                handle = engine.add(ticket.request)
            except DistillError as error:
                self._end(ticket, "refused", Failed("refused", str(error)))
            except Exception:
                logger.exception("Request %s couldn't join.", ticket.request.request_id)
                self._end(ticket, "error", _ENGINE_FAILED)
            else:
                self._running[handle] = ticket
                if not ticket.is_suspect:
                    self._num_prompt_tokens += len(ticket.request.prompt_token_ids)

    def _next_to_join(self) -> Ticket | None:
        """Take the next waiting request, if there's room; a suspect shares it with nobody."""
        with self._changed:
            if not self._waiting or len(self._running) >= self._max_batch_size:
                return None
            suspects = (ticket.is_suspect for ticket in (self._waiting[0], *self._running.values()))
            if self._running and any(suspects):
                return None
            return self._waiting.popleft()

    def _step(self, engine: Engine) -> Engine:
        """One round for every running row; returns the engine to go on with."""
        if not self._running:
            return engine
        try:
            for update in engine.step():
                self._take(engine, update)
        except Exception:
            logger.exception("A step failed with %d requests running.", len(self._running))
            self._put_running_aside()
            return self._make_engine()
        return engine

    def _put_running_aside(self) -> None:
        """Fail a request that broke a step alone; have several run again, each alone."""
        tickets = list(self._running.values())
        self._running.clear()
        if len(tickets) == 1:
            self._end(tickets[0], "error", _ENGINE_FAILED)
            return
        for ticket in tickets:
            ticket.is_suspect = True
        with self._changed:
            self._waiting.extendleft(reversed(tickets))

    def _take(self, engine: Engine, update: RowUpdate) -> None:
        ticket = self._running[update.handle]
        told = ticket.token_ids[ticket.num_seen :][: len(update.new_token_ids)]
        ticket.num_seen += len(update.new_token_ids)
        if told != update.new_token_ids[: len(told)]:
            logger.error("Request %s went another way when run again.", ticket.request.request_id)
            engine.cancel(update.handle)
            del self._running[update.handle]
            self._end(ticket, "error", _ENGINE_FAILED)
            return
        fresh = update.new_token_ids[len(told) :]
        ticket.token_ids.extend(fresh)
        self._num_generated_tokens += len(fresh)
        if update.finish_reason is None:
            if fresh:
                self._deliver(ticket, Piece(ticket.text.push(fresh), len(fresh)))
            return
        # The last tokens aren't pushed: where a stop cuts them is the engine's decision alone.
        result = engine.result(update.handle)
        assert result.text is not None, "the engine has a tokenizer"
        has_stop = bool(fresh) and fresh[-1] in ticket.request.stop_token_ids
        text = ticket.text.finish(result.text, fresh[:-1] if has_stop else fresh)
        event = Finished(text, result.text, update.finish_reason, result)
        del self._running[update.handle]
        self._stats += result.stats
        self._end(ticket, update.finish_reason, event)

    def _end(self, ticket: Ticket, reason: str, event: Event) -> None:
        self._num_ended[reason] += 1
        with self._changed:
            self._num_open -= 1
        self._publish()  # before the event: who has an answer finds it counted
        self._deliver(ticket, event)

    def _deliver(self, ticket: Ticket, event: Event) -> None:
        try:
            ticket.deliver(event)
        except RuntimeError:
            # The receiver's event loop is gone; nobody reads this answer any more.
            logger.info("Nobody listens to request %s any more.", ticket.request.request_id)
            self.cancel(ticket)

    def _publish(self) -> None:
        with self._changed:
            self._snapshot = Snapshot(
                num_running=len(self._running),
                num_prompt_tokens=self._num_prompt_tokens,
                num_generated_tokens=self._num_generated_tokens,
                num_ended=dict(self._num_ended),
                stats=self._stats,
            )

    def _fail_everything(self) -> None:
        with self._changed:
            self._is_closing = True
            left = [*self._running.values(), *self._waiting]
            self._running.clear()
            self._waiting.clear()
        for ticket in left:
            self._deliver(ticket, Failed("closed", "The server is shutting down."))
