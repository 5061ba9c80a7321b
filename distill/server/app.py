"""The HTTP face of a served pair: routes, authorisation, limits, streaming, disconnects.

Refuses to know models and decoding; it hands token ids to the scheduler and text to the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response as HttpResponse
from starlette.types import Receive, Scope, Send

from distill.runtime.decode import DecodeRequest
from distill.server.metrics import CONTENT_TYPE, ServerMetrics
from distill.server.prompts import ServedPair, build_request
from distill.server.protocol import ApiError, GenerationRequest, parse_request
from distill.server.responses import (
    ChatDialect,
    Choice,
    CompletionDialect,
    Dialect,
    Response,
    Speculation,
    Usage,
)
from distill.server.scheduler import (
    Event,
    Failed,
    Finished,
    QueueFullError,
    Scheduler,
    ServerClosedError,
    Ticket,
)

MAX_BODY_BYTES = 8 * 1024 * 1024
_CLIENT_CLOSED_REQUEST = 499  # the usual status in logs for a client that left; nobody reads it


def create_app(
    pair: ServedPair,
    scheduler: Scheduler,
    *,
    api_key: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """The application. The caller starts and closes `scheduler`."""
    app = FastAPI(title="distill", openapi_url=None)
    metrics = ServerMetrics(pair.model_id, scheduler.snapshot)
    service = _Service(pair, scheduler, metrics, max_body_bytes)
    started = int(time.time())
    v1 = APIRouter(prefix="/v1", dependencies=[Depends(_authorise(api_key))])

    @app.get("/health")
    async def health() -> HttpResponse:
        return HttpResponse(status_code=200 if scheduler.is_alive else 503)

    @app.get("/metrics")
    async def metrics_text() -> HttpResponse:
        return HttpResponse(metrics.render(), headers={"content-type": CONTENT_TYPE})

    @v1.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [pair.model_card(started)]}

    @v1.get("/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        pair.require_model(model_id)
        return pair.model_card(started)

    # response_model=None: the answers are worded by the dialects, not by the framework.
    @v1.post("/completions", response_model=None)
    async def completions(request: Request) -> HttpResponse:
        return await service.answer(request, CompletionDialect())

    @v1.post("/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> HttpResponse:
        return await service.answer(request, ChatDialect())

    app.include_router(v1)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)
    return app


@dataclass
class _Call:
    """One submitted request: what was asked, and how its answer is worded."""

    dialect: Dialect
    request: DecodeRequest
    num_draft_tokens: int
    head: dict[str, Any]
    include_usage: bool
    return_token_ids: bool
    ticket: Ticket
    events: asyncio.Queue[Event]
    started_s: float

    def whole(self, event: Finished) -> str:
        choice = self.dialect.choice(event.whole_text, event.finish_reason)
        if self.return_token_ids:
            choice.prompt_token_ids = list(self.request.prompt_token_ids)
            choice.token_ids = list(event.result.token_ids)
        return Response(
            **self.head,
            object=self.dialect.object,
            choices=[choice],
            usage=self._usage(event),
            distill=self._speculation(event),
        ).to_json()

    def opening(self) -> str:
        opening = self.dialect.opening()
        return "" if opening is None else self._chunk([opening])

    def part(self, text: str) -> str:
        return self._chunk([self.dialect.part(text, None)])

    def ending(self, event: Finished) -> str:
        last = self.dialect.part("", event.finish_reason)
        chunks = self._chunk([last], distill=self._speculation(event))
        if self.include_usage:
            chunks += self._chunk([], usage=self._usage(event))
        return chunks

    def _chunk(self, choices: list[Choice], **fields: Any) -> str:
        if self.include_usage:
            fields.setdefault("usage", None)
        chunk = Response(**self.head, object=self.dialect.chunk_object, choices=choices, **fields)
        return f"data: {chunk.to_json()}\n\n"

    def _usage(self, event: Finished) -> Usage:
        return Usage.of(len(self.request.prompt_token_ids), len(event.result.token_ids))

    def _speculation(self, event: Finished) -> Speculation:
        return Speculation.of(event.result.stats, self.request.seed, self.num_draft_tokens)


class _Service:
    """Parse, submit, wait, answer."""

    def __init__(
        self, pair: ServedPair, scheduler: Scheduler, metrics: ServerMetrics, max_body_bytes: int
    ) -> None:
        self._pair = pair
        self._scheduler = scheduler
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._tokenizer_lock = threading.Lock()  # a tokenizer isn't made for two threads

    async def answer(self, http: Request, dialect: Dialect) -> HttpResponse:
        asked = parse_request(await _read_body(http, self._max_body_bytes), dialect.schema)
        self._pair.require_model(asked.model)
        answer_id = dialect.id_prefix + secrets.token_hex(12)
        # Off the event loop: a long prompt takes the tokenizer long enough to stall every stream.
        request = await asyncio.to_thread(self._build_request, asked, answer_id)
        events: asyncio.Queue[Event] = asyncio.Queue()
        call = _Call(
            dialect=dialect,
            request=request,
            num_draft_tokens=(
                self._pair.num_draft_tokens
                if asked.num_draft_tokens is None
                else asked.num_draft_tokens
            ),
            head={"id": answer_id, "created": int(time.time()), "model": self._pair.model_id},
            include_usage=asked.include_usage,
            return_token_ids=bool(asked.return_token_ids),
            ticket=self._submit(request, events),
            events=events,
            started_s=time.monotonic(),
        )
        cancel = functools.partial(self._scheduler.cancel, call.ticket)
        async with _on_disconnect(http, cancel):
            # The first event decides the status, so that a failure before any text is an HTTP
            # error for a stream as well.
            event = await events.get()
            if not isinstance(event, Failed):
                self._metrics.observe_first_token(time.monotonic() - call.started_s)
            while not asked.stream and not isinstance(event, Finished | Failed):
                event = await events.get()
        if isinstance(event, Failed):
            raise _failure(event)
        if asked.stream:
            return _EventStream(self._stream(call, event), on_close=cancel)
        assert isinstance(event, Finished)
        self._metrics.observe_whole_answer(time.monotonic() - call.started_s)
        return HttpResponse(call.whole(event), media_type="application/json")

    def _build_request(self, asked: GenerationRequest, answer_id: str) -> DecodeRequest:
        # Not an asyncio lock: a cancelled call would let it go while its thread is still at work.
        with self._tokenizer_lock:
            return build_request(self._pair, asked, answer_id)

    def _submit(self, request: DecodeRequest, events: asyncio.Queue[Event]) -> Ticket:
        loop = asyncio.get_running_loop()

        def deliver(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            return self._scheduler.submit(request, deliver)
        except QueueFullError as error:
            raise ApiError(
                str(error), status=429, type="rate_limit_error", code="queue_full"
            ) from error
        except ServerClosedError as error:
            raise _failure(Failed("closed", str(error))) from error

    async def _stream(self, call: _Call, event: Event) -> AsyncIterator[str]:
        if opening := call.opening():
            yield opening
        while not isinstance(event, Finished | Failed):
            if event.text:
                yield call.part(event.text)
            event = await call.events.get()
        if isinstance(event, Failed):
            # The status is out already; clients read an error object in the stream.
            yield f"data: {json.dumps(_failure(event).body())}\n\n"
        else:
            self._metrics.observe_whole_answer(time.monotonic() - call.started_s)
            if event.text:
                yield call.part(event.text)
            yield call.ending(event)
        yield "data: [DONE]\n\n"


class _EventStream(StreamingResponse):
    """Server-sent events; `on_close` runs however the stream ends, even before its first byte."""

    def __init__(self, events: AsyncIterator[str], *, on_close: Callable[[], None]) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


@contextlib.asynccontextmanager
async def _on_disconnect(http: Request, cancel: Callable[[], None]) -> AsyncIterator[None]:
    """While the body runs, call `cancel` when the client goes away."""

    async def watch() -> None:
        # The request's body was read to its end, so what comes next is the disconnect.
        await http.receive()
        cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


async def _read_body(http: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async for part in http.stream():
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise ApiError(
                    f"The body is larger than {max_bytes} bytes.",
                    status=413,
                    code="body_too_large",
                )
            parts.append(part)
    except ClientDisconnect as error:
        raise _failure(Failed("cancelled", "The client left.")) from error
    return b"".join(parts)


def _authorise(api_key: str | None) -> Callable[[Request], Awaitable[None]]:
    expected = None if api_key is None else hashlib.sha256(api_key.encode()).digest()

    async def check(request: Request) -> None:
        if expected is None:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = hashlib.sha256(token.strip().encode()).digest()
        # Digests of one length, compared in constant time: the answer's timing says nothing
        # about the key.
        if scheme.lower() != "bearer" or not secrets.compare_digest(given, expected):
            raise ApiError(
                "The API key is missing or wrong; send it as 'Authorization: Bearer <key>'.",
                status=401,
                code="invalid_api_key",
            )

    return check


def _failure(failed: Failed) -> ApiError:
    """What a client is told about a request that gets no answer."""
    if failed.kind == "refused":
        return ApiError(failed.message, code="invalid_request")
    status = {"closed": 503, "cancelled": _CLIENT_CLOSED_REQUEST}.get(failed.kind, 500)
    return ApiError(failed.message, status=status, type="server_error", code=failed.kind)


def _error_response(error: ApiError) -> JSONResponse:
    headers = {"retry-after": "1"} if error.status in (429, 503) else {}
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _api_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return _error_response(error)


async def _http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return _error_response(ApiError(str(error.detail), status=error.status_code))


async def _unexpected_error(_: Request, __: Exception) -> JSONResponse:
    message = "The server failed on this request."
    return _error_response(ApiError(message, status=500, type="server_error", code="error"))
