"""Which backend runs the target, as a config says it: a name, or a name with settings.

Refuses to know how any backend works. No torch.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Discriminator, Tag, model_validator

from distill.config import Config, setting
from distill.errors import ConfigError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

ServerKind = Literal["vllm", "sglang", "llama_cpp", "distill", "openai"]


class HttpSettings(Config):
    """A target behind one or more HTTP servers.

    Where the servers are, how hard they are pressed and how patiently they are asked again cannot
    change an answer, so none of it is in the fingerprint; what kind of server draws the tokens can.
    """

    kind: Literal["http"] = "http"
    base_urls: tuple[str, ...] = setting(
        min_length=1, in_fingerprint=False, description="http://host:port of each server"
    )
    server: Literal["auto"] | ServerKind = setting(
        "auto", description="auto: what each server says of itself in /v1/models"
    )
    model: str | None = setting(
        None, in_fingerprint=False, description="the name it is served under; null: the target's"
    )
    allow_retokenized: bool = setting(
        False, description="take text from a server without token ids, if it round-trips"
    )
    api_key_env: str | None = setting(
        None, in_fingerprint=False, description="the environment variable that holds the key"
    )
    concurrency: int = setting(
        32, ge=1, in_fingerprint=False, description="requests in flight for each server"
    )
    connect_timeout_s: float = setting(10.0, gt=0, in_fingerprint=False)
    request_timeout_s: float = setting(
        600.0, gt=0, in_fingerprint=False, description="for one whole answer"
    )
    max_tries: int = setting(6, ge=1, in_fingerprint=False, description="for each row")
    backoff_s: float = setting(
        0.5, gt=0, in_fingerprint=False, description="before the second try; doubles each time"
    )
    max_wait_s: float = setting(
        60.0, gt=0, in_fingerprint=False, description="the longest wait between two tries"
    )
    give_up_after: int = setting(
        32, ge=1, in_fingerprint=False, description="rows that fail one after the other end the run"
    )

    @model_validator(mode="after")
    def _check(self) -> HttpSettings:
        # All in one place, and not by field: a field's error shows its value, and a key that was
        # pasted into one of these would be shown with it.
        if self.api_key_env is not None and not _VARIABLE.fullmatch(self.api_key_env):
            raise ConfigError(
                "api_key_env is the NAME of an environment variable, such as MY_SERVER_KEY, and "
                "what is written there is none; export the key under a name, write the name here"
            )
        urls = self.urls
        for url in urls:
            if urls.count(url) > 1:
                shown = _shown_url(url)
                raise ConfigError(f"base_urls: {shown} is listed twice; list each server once")
        return self

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers, without /v1: some endpoints are not under it."""
        return tuple(_checked_url(url) for url in self.base_urls)


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url.strip())
    except ValueError as error:
        raise ConfigError("one of base_urls is no URL; write http://host:port") from error
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"the URL of {parts.hostname} holds a user or a password, which would be written to "
            "logs; put the key into an environment variable and name it in api_key_env"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(
            f"{_shown_url(url)} is not the address of a server; write http://host:port, without "
            "a query: a key goes into the environment variable that api_key_env names"
        )
    return url.strip().rstrip("/").removesuffix("/v1").rstrip("/")


def _shown_url(url: str) -> str:
    """Scheme and host alone: a key may have been pasted anywhere else."""
    parts = urlsplit(url.strip())
    if not parts.hostname:
        return "one of base_urls"
    return f"{parts.scheme or 'http'}://{parts.hostname}"


def _which(value: Any) -> str:
    return "name" if isinstance(value, str) else "http"


BackendChoice = Annotated[
    Annotated[str, Tag("name")] | Annotated[HttpSettings, Tag("http")], Discriminator(_which)
]
"""``local`` (any registered name), or ``{kind: http, base_urls: [...], ...}``."""
