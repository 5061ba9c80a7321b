"""A server's life: bind a socket, run the application and the scheduler, stop both cleanly.

Refuses to know routes, requests and models.
"""

from __future__ import annotations

import logging
import socket
import threading
from types import TracebackType

import uvicorn
from fastapi import FastAPI

from distill.artifacts import Artifact
from distill.errors import ServerError
from distill.server.scheduler import Scheduler

logger = logging.getLogger(__name__)

_GRACE_S = 5  # given to open answers when the server is interrupted
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class RunningServer:
    """One server on one socket. Use it as a context manager, or call `close`.

    `artifact` says which pair is served; None when the server wasn't started by the serve stage.
    """

    def __init__(
        self,
        app: FastAPI,
        scheduler: Scheduler,
        *,
        host: str,
        port: int,
        artifact: Artifact | None = None,
    ) -> None:
        """Bind `host:port` (port 0 takes a free one); nothing is answered before `start` or `run`.

        Raises ServerError when the address can't be bound.
        """
        self.artifact = artifact
        self._scheduler = scheduler
        self._host = host
        self._socket = _listen(host, port)
        self._port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = uvicorn.Server(config)
        self._serving: threading.Thread | None = None
        self._has_stopped = threading.Event()

    @property
    def port(self) -> int:
        """The port in use."""
        return self._port

    @property
    def url(self) -> str:
        """Where /health and /metrics are."""
        host = _ANYWHERE.get(self._host, self._host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def base_url(self) -> str:
        """What OpenAI clients call the base URL; ends in /v1."""
        return f"{self.url}/v1"

    def start(self) -> None:
        """Serve from a thread of its own, and return."""
        self._start_scheduler()
        self._serving = threading.Thread(target=self._serve, name="distill-http", daemon=True)
        self._serving.start()

    def run(self) -> None:
        """Serve until interrupted (Ctrl-C), or closed from another thread."""
        self._start_scheduler()
        self._serving = threading.current_thread()
        try:
            self._serve()
        except KeyboardInterrupt:
            logger.info("Interrupted; the server has stopped.")
        finally:
            self._scheduler.close()

    def close(self) -> None:
        """Fail what's in flight, stop listening, wait for the threads. Safe to call twice."""
        # The scheduler first: it ends every open answer, and then nothing keeps HTTP waiting.
        self._scheduler.close()
        self._server.should_exit = True
        if self._serving is None:
            self._socket.close()
        elif self._serving is not threading.current_thread():
            self._has_stopped.wait()

    def _start_scheduler(self) -> None:
        try:
            self._scheduler.start()
        except BaseException:
            self._socket.close()
            raise

    def _serve(self) -> None:
        try:
            self._server.run([self._socket])
        finally:
            self._socket.close()
            self._has_stopped.set()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # Listening at once: a client that comes before the first accept waits in the backlog.
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ServerError(
            f"Can't listen on {host}:{port} ({error.strerror or error}). Stop what uses it, or "
            "choose another port; port 0 takes a free one."
        ) from error
