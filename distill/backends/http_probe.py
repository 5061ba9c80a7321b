"""What a server says of itself: which kind it is, which model it has, and whether that is ours.

Refuses to know how anything is generated there.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from distill.backends.http_answers import num_known_ids
from distill.backends.http_native import LlamaCppShape, SglangShape
from distill.backends.http_openai import DistillShape, OpenAIShape, VllmShape
from distill.backends.http_wire import RowRejected, Shape, TryAgain, WireModel
from distill.backends.settings import HttpSettings
from distill.errors import BackendUnavailableError, ConfigError
from distill.models import ModelConfig
from distill.models.facts import ModelFacts
from distill.models.sources import parse_reference

logger = logging.getLogger(__name__)

SHAPES: Mapping[str, Shape] = {
    shape.kind: shape
    for shape in (VllmShape(), SglangShape(), LlamaCppShape(), DistillShape(), OpenAIShape())
}
_KIND_OF_OWNER = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama_cpp",
    "distill": "distill",
}

Get = Callable[[str], Awaitable[bytes]]
"""The body of a path of one server."""


@dataclass(frozen=True)
class Served:
    """A model on a server that was looked at: how to ask it, under which name, how far it goes."""

    shape: Shape
    model: str
    max_length: int


class _Meta(WireModel):
    n_vocab: int | None = None
    n_embd: int | None = None


class _Card(WireModel):
    id: str
    owned_by: str | None = None
    root: str | None = None
    max_model_len: int | None = None
    meta: _Meta | None = None


class _Models(WireModel):
    data: list[_Card]


@dataclass(frozen=True)
class Expected:
    """The model a server should have: as a config names it, and as its files describe it."""

    target: ModelConfig
    facts: ModelFacts


async def look_at(url: str, get: Get, expected: Expected, settings: HttpSettings) -> Served:
    """Ask a server what it is, and check that its model is the target.

    Raises:
        BackendUnavailableError: it does not list its models, or has no token ids to give.
        ConfigError: its model is another one, or it cannot report what the settings ask for.
        TryAgain: it is not ready.
    """
    try:
        cards = _Models.parse(await get("/v1/models")).data
    except RowRejected as error:
        raise BackendUnavailableError(
            f"{url}/v1/models does not list models as an OpenAI-compatible server does ({error}); "
            "check base_urls"
        ) from error
    card = _own_card(url, cards, expected, settings)
    shape = _shape(url, card, settings)
    _check_sizes(url, card, expected)
    context = expected.facts.shape.max_position_embeddings
    return Served(shape, card.id, min(context, card.max_model_len or context))


def _own_card(url: str, cards: list[_Card], expected: Expected, settings: HttpSettings) -> _Card:
    if not cards:
        raise TryAgain("it lists no model yet")
    known = _short(expected.target)
    for card in cards:
        if settings.model is not None:
            if card.id == settings.model:
                return card
        elif known in (_short_name(card.id), _short_name(card.root or "")):
            return card
    listed = ", ".join(repr(card.id) for card in cards)
    if settings.model is not None:
        raise ConfigError(
            f"{url} serves {listed}, not {settings.model!r} as `model` says; correct `model`, or "
            "serve the target under that name"
        )
    raise ConfigError(
        f"{url} serves {listed}; the config's target is {expected.target.model!r}. Serve the "
        f"target there; if it is the target under another name, say so with `model: {cards[0].id}`"
    )


def _short(target: ModelConfig) -> str:
    reference = parse_reference(target.model)
    return _short_name(reference.file or reference.name)


def _short_name(name: str) -> str:
    """The last part of a path or a hub id, in lower case: how servers name what they loaded."""
    return name.rstrip("/").rpartition("/")[2].removesuffix(".gguf").lower()


def _shape(url: str, card: _Card, settings: HttpSettings) -> Shape:
    if settings.server == "auto":
        kind = _KIND_OF_OWNER.get((card.owned_by or "").lower(), "openai")
        how = f"owned_by is {card.owned_by!r} in /v1/models"
    else:
        kind, how = settings.server, "as the settings say"
    shape = SHAPES[kind]
    logger.info("%s: model %r, asked as a server of kind %s (%s)", url, card.id, kind, how)
    if not shape.gives_token_ids and not settings.allow_retokenized:
        raise BackendUnavailableError(
            f"{url} is taken for a server of kind {kind!r} ({how}), which gives text and no token "
            "ids. If it is a vllm, sglang, llama_cpp or distill server, say so with `server:`; "
            "else `allow_retokenized: true` takes every answer whose text round-trips"
        )
    return shape


def _check_sizes(url: str, card: _Card, expected: Expected) -> None:
    """llama-server tells its sizes; another vocabulary or width is another model."""
    if card.meta is None:
        return
    sizes, ids = expected.facts.shape, num_known_ids(expected.facts)
    if card.meta.n_vocab is not None and not ids <= card.meta.n_vocab <= max(ids, sizes.vocab_size):
        raise ConfigError(
            f"{url}: model {card.id!r} has {card.meta.n_vocab} token ids, the target "
            f"{expected.target.model!r} {ids} (padded: {sizes.vocab_size}); serve the target"
        )
    if card.meta.n_embd not in (None, sizes.hidden_size):
        raise ConfigError(
            f"{url}: model {card.id!r} is {card.meta.n_embd} wide, the target "
            f"{expected.target.model!r} {sizes.hidden_size}; serve the target"
        )
