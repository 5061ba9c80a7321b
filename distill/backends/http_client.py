"""Servers, and one request to one of them: sticky, bounded, tried again, moved on when one is down.

Refuses to know what is asked and what the answers mean. The only file here that knows the HTTP
client.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import httpx2

from distill.backends.http_probe import Served
from distill.backends.http_retry import Pause, retry_after_s, retrying
from distill.backends.http_wire import RowRejected, TryAgain
from distill.backends.settings import HttpSettings
from distill.errors import BackendUnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_SHOWN_CHARS = 300
_ABOUT_THE_ROW = (400, 409, 413, 422)
_PASSING = (408, 425, 429)


class LookAt(Protocol):
    """Finds out what a server is; see :func:`distill.backends.http_probe.look_at`."""

    def __call__(self, url: str, get: Callable[[str], Awaitable[bytes]]) -> Awaitable[Served]: ...


@dataclass
class Server:
    """One address and what is known of it."""

    url: str
    served: Served | None = None
    is_unreachable: bool = False
    num_misses: int = 0  # failed connections since the last answer
    down_until_s: float = 0.0
    last_error: str = ""


class Fleet:
    """The servers of one backend. What was learnt of them is kept between sessions."""

    def __init__(
        self,
        settings: HttpSettings,
        look_at: LookAt,
        *,
        api_key: str | None = None,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self.servers = [Server(url) for url in settings.urls]
        self.settings = settings
        self.look_at = look_at
        self.api_key = api_key
        self.pause = pause

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Open connections; proxies come from the environment, as everywhere."""
        settings = self.settings
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        async with httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(
                settings.request_timeout_s, connect=settings.connect_timeout_s, pool=None
            ),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        ) as client:
            yield Session(self, client)

    def no_server(self) -> BackendUnavailableError:
        """The error for a run that nobody answers."""
        listed = "; ".join(f"{server.url}: {server.last_error}" for server in self.servers)
        return BackendUnavailableError(
            f"no server of the target can be reached ({listed}). Start one, or correct base_urls; "
            "then run the same command again: what was answered is kept"
        )


class Session:
    """Open connections to a fleet, in one event loop."""

    def __init__(self, fleet: Fleet, client: httpx2.AsyncClient) -> None:
        self._fleet = fleet
        self._client = client
        self._slots = {
            server.url: asyncio.Semaphore(fleet.settings.concurrency) for server in fleet.servers
        }
        # More rows under way than slots: one server's queue should not leave another idle. Not all
        # of them: a row that waits to be tried again holds its place, which spares a sick server.
        num_under_way = 2 * fleet.settings.concurrency * len(fleet.servers)
        self._under_way = asyncio.Semaphore(num_under_way)
        self._looks = {server.url: asyncio.Lock() for server in fleet.servers}

    async def find_servers(self) -> None:
        """Look at every server, and again while none of them answers.

        Raises:
            BackendUnavailableError: none did; the message has each address and its reason.
            ConfigError: one serves another model.
        """

        async def look(server: Server) -> str | None:
            try:
                await self._served(server)
            except TryAgain as error:
                server.last_error = str(error).removeprefix(f"{server.url}: ")
                return str(error)
            return None

        async def look_everywhere() -> None:
            failures = await asyncio.gather(*map(look, self._fleet.servers))
            if all(failures):
                raise TryAgain("; ".join(filter(None, failures)))

        try:
            await self._retrying()(look_everywhere)
        except TryAgain as error:
            raise self._fleet.no_server() from error
        for server in self._fleet.servers:
            if server.served is None:
                logger.warning("%s does not answer (%s); going on", server.url, server.last_error)

    async def ask(
        self,
        key: bytes,
        make_request: Callable[[Served], tuple[str, dict[str, Any]]],
        read: Callable[[Served, bytes], T],
    ) -> T:
        """Ask the server that ``key`` belongs to, or the next one while that is down.

        ``make_request`` gives path and JSON body for the server that is asked.

        Raises:
            RowRejected: the server refuses this request, or ``read`` its answer.
            TryAgain: the last failure, after the last try.
            BackendUnavailableError: a refusal that is not about this request.
        """
        order, position = by_rendezvous(key, self._fleet.servers), 0

        async def attempt() -> T:
            nonlocal position
            position = _next_up(order, position)
            server = order[position]
            try:
                async with self._slots[server.url]:
                    served = await self._served(server)
                    path, body = make_request(served)
                    return read(served, await self._send(server, "POST", path, body))
            except TryAgain as error:
                position += not error.is_busy
                raise

        async with self._under_way:
            return await self._retrying()(attempt)

    def _retrying(self) -> Callable[[Callable[[], Awaitable[T]]], Awaitable[T]]:
        settings = self._fleet.settings
        return retrying(
            max_tries=settings.max_tries,
            backoff_s=settings.backoff_s,
            max_wait_s=settings.max_wait_s,
            pause=self._fleet.pause,
        )

    async def _served(self, server: Server) -> Served:
        async with self._looks[server.url]:
            if server.served is None:
                server.served = await self._fleet.look_at(
                    server.url, lambda path: self._send(server, "GET", path, None)
                )
        return server.served

    async def _send(
        self, server: Server, method: str, path: str, body: dict[str, Any] | None
    ) -> bytes:
        """The body of a 200; every other outcome is an exception that says what to do."""
        try:
            # The client's own limit is between two bytes; a trickle would go on forever.
            async with asyncio.timeout(self._fleet.settings.request_timeout_s):
                response = await self._client.request(method, server.url + path, json=body)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError) as error:
            self._missed(server)
            reason = f"no connection ({_said(error)})"
            raise self._again(server, reason, is_unreachable=True) from error
        except (TimeoutError, httpx2.TimeoutException):
            limit_s = self._fleet.settings.request_timeout_s
            raise self._again(server, f"no answer within {limit_s:g} s") from None
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise self._again(server, f"the connection broke ({_said(error)})") from error
        server.is_unreachable, server.num_misses = False, 0
        if response.status_code == 200:
            return response.content
        said = f"HTTP {response.status_code}: {self._message(response)}"
        if response.status_code in _PASSING or response.status_code >= 500:
            wait_s = retry_after_s(response.headers.get("retry-after"))
            is_busy = response.status_code == 429
            raise self._again(server, said, retry_after_s=wait_s, is_busy=is_busy)
        if response.status_code in _ABOUT_THE_ROW:
            raise RowRejected(f"{server.url} refused it, {said}")
        key = self._fleet.settings.api_key_env
        way_out = f"the key in {key}" if key else "whether it needs a key (api_key_env)"
        raise BackendUnavailableError(
            f"{server.url}{path} answers {said}. Check base_urls, `server`, and {way_out}"
        )

    def _missed(self, server: Server) -> None:
        """Leave an address that takes no connection alone for a while, longer each time."""
        settings = self._fleet.settings
        server.is_unreachable = True
        wait_s = min(settings.max_wait_s, settings.backoff_s * 2.0 ** min(server.num_misses, 16))
        server.num_misses += 1
        server.down_until_s = time.monotonic() + wait_s

    def _again(self, server: Server, reason: str, **details: Any) -> TryAgain:
        server.last_error = reason
        return TryAgain(f"{server.url}: {reason}", **details)

    def _message(self, response: httpx2.Response) -> str:
        """What the server says is wrong, never with our key in it."""
        text = _error_text(response.content)
        if self._fleet.api_key:  # before the cut, which could leave a part of the key
            text = text.replace(self._fleet.api_key, "***")
        return text[:_SHOWN_CHARS]


def by_rendezvous(key: bytes, servers: Sequence[Server]) -> list[Server]:
    """Servers in the order a key prefers them (highest random weight, Thaler & Ravishankar 1998).

    Only the keys of a server that comes or goes move, so a prompt asked again finds its prefix in
    the same server's cache.
    """

    def weight(server: Server) -> bytes:
        return hashlib.sha256(key + server.url.encode()).digest()

    return sorted(servers, key=weight, reverse=True)


def _next_up(order: Sequence[Server], position: int) -> int:
    """The first place at ``position`` or after it, round and round, whose server is not down."""
    now_s = time.monotonic()
    places = [(position + step) % len(order) for step in range(len(order))]
    return next((place for place in places if order[place].down_until_s <= now_s), places[0])


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def _error_text(body: bytes) -> str:
    """The message in an error body: {error: {message}}, {error}, {message}, {detail}, or text."""
    text = body.decode("utf-8", "replace").strip()
    try:
        data = json.loads(text)
    except ValueError:
        return text or "(empty)"
    for name in ("error", "message", "detail"):
        if isinstance(data, dict) and name in data:
            data = data[name]
            break
    if isinstance(data, dict) and "message" in data:
        data = data["message"]
    return data if isinstance(data, str) else json.dumps(data)
