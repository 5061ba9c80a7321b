"""Owns the two servers that tests of the http backend talk to: a scripted one, and a real one.
Refuses to know what is tested with them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from distill.models import LoadedModel
from distill.runtime.decode import DecodeEngine
from distill.server.app import create_app
from distill.server.prompts import ServedPair
from distill.server.running import RunningServer
from distill.server.scheduler import Scheduler

TIMEOUT_S = 10.0


@dataclass
class Reply:
    """What a scripted server does: a status and a JSON body, raw bytes, silence, or a cut."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    is_silent: bool = False
    is_cut: bool = False

    @property
    def content(self) -> bytes:
        return json.dumps(self.body).encode() if self.raw is None else self.raw


@dataclass
class Request:
    """What a scripted server was sent."""

    path: str
    headers: dict[str, str]
    body: Any


def vllm_answer(
    token_ids: list[int], prompt: list[int], /, *, finish: str = "length", **changes: Any
) -> dict[str, Any]:
    """A body of /v1/completions as vLLM documents it; ``changes`` go into the choice."""
    choice = {
        "index": 0,
        "text": "some text",
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": token_ids,
        "prompt_token_ids": prompt,
    }
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(token_ids),
        "total_tokens": len(prompt) + len(token_ids),
    }
    choices = [choice | changes]
    return {"id": "cmpl-1", "object": "text_completion", "choices": choices, "usage": usage}


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # all of a test's rows may knock at once

    def handle_error(self, *_: Any) -> None:
        """A client that hung up is what several tests are about."""


class ScriptedServer:
    """An HTTP server whose answers to POST a test writes.

    ``answer(n, body)`` gives the reply to the n-th POST (from 0). ``models`` is the list in
    /v1/models; an entry has at least an id.
    """

    def __init__(
        self,
        answer: Callable[[int, Any], Reply],
        *,
        model: str = "target",
        owned_by: str = "vllm",
        models: list[dict[str, Any]] | None = None,
    ) -> None:
        self.answer = answer
        self.models = [{"id": model, "owned_by": owned_by}] if models is None else models
        self.looks: list[Request] = []
        self.requests: list[Request] = []
        self.is_closing = threading.Event()
        self._lock = threading.Lock()
        self._in_flight = 0
        self.most_in_flight = 0
        self._http = _Listener(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def close(self) -> None:
        self.is_closing.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _reply(self, request: Request, method: str) -> Reply:
        if method == "GET":
            self.looks.append(request)
            return Reply({"object": "list", "data": self.models})
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            return self.answer(number, request.body)
        finally:
            with self._lock:
                self._in_flight -= 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                """A test's output is not a log."""

            def do_GET(self) -> None:
                self._answer("GET")

            def do_POST(self) -> None:
                self._answer("POST")

            def _answer(self, method: str) -> None:
                length = int(self.headers.get("content-length", 0))
                body = json.loads(self.rfile.read(length)) if length else None
                headers = {name.lower(): value for name, value in self.headers.items()}
                reply = server._reply(Request(self.path, headers, body), method)
                if reply.is_silent:
                    server.is_closing.wait(TIMEOUT_S)
                    self.close_connection = True
                    return
                content = reply.content
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if reply.is_cut else content)
                self.close_connection = reply.is_cut

        return Handler


@contextmanager
def distill_server(
    target: LoadedModel, *, model_id: str = "target", api_key: str | None = None, **limits: Any
) -> Iterator[RunningServer]:
    """This library's own server on a free port, with a target and no draft."""
    limits = {"max_batch_size": 3, "max_waiting": 64} | limits
    max_length = target.shape.max_position_embeddings

    def make_engine() -> DecodeEngine:
        return DecodeEngine(
            target.model,
            None,
            num_draft_tokens=0,
            max_batch_size=limits["max_batch_size"],
            max_length=max_length,
            tokenizer=target.tokenizer,
        )

    scheduler = Scheduler(make_engine, target.tokenizer, **limits)
    pair = ServedPair(
        model_id=model_id,
        tokenizer=target.tokenizer,
        stop_token_ids=target.stop_token_ids,
        vocabulary_size=len(target.tokenizer),
        max_length=max_length,
        num_draft_tokens=0,
    )
    app = create_app(pair, scheduler, api_key=api_key)
    with RunningServer(app, scheduler, host="127.0.0.1", port=0) as server:
        server.start()
        yield server
