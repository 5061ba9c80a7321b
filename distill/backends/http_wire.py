"""What is asked of any server and what any server may answer, in this library's words.

Refuses to know sockets, retries and how one kind of server spells it: a shape knows that
(``http_openai``, ``http_native``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import pydantic

from distill.errors import SamplingError
from distill.sampling import SamplingConfig


class RowRejected(Exception):
    """Asking again would give the same; the row is left out and the text says why."""


class TryAgain(Exception):
    """Something passing went wrong.

    ``retry_after_s`` is what the server asked for. ``is_unreachable``: not even a connection.
    ``is_busy``: the server is well and has too much to do, so that no other should be asked.
    """

    def __init__(
        self,
        reason: str,
        *,
        retry_after_s: float = 0.0,
        is_unreachable: bool = False,
        is_busy: bool = False,
    ) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s
        self.is_unreachable = is_unreachable
        self.is_busy = is_busy


@dataclass(frozen=True)
class Question:
    """One row: ``prompt`` in token ids, and how to go on from it."""

    prompt: tuple[int, ...]
    sampling: SamplingConfig
    max_new_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What came back; None where the server does not say.

    ``finish`` is the server's own word. ``stop_token_id`` is the id it says it stopped at, whether
    or not that id is in ``token_ids``.
    """

    finish: str
    token_ids: tuple[int, ...] | None
    text: str
    stop_token_id: int | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    num_prompt_tokens: int | None = None
    num_new_tokens: int | None = None


@dataclass(frozen=True)
class TopK:
    """Candidates of one position, most likely first."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]

    @classmethod
    def of(cls, log_prob_by_id: Mapping[int, float], top_k: int) -> TopK:
        """The K best of a position; a server adds the token that really follows, out of place."""
        best = sorted(log_prob_by_id.items(), key=lambda entry: (-entry[1], entry[0]))[:top_k]
        if len(best) < top_k:
            raise RowRejected(f"{len(best)} candidates for a position where {top_k} were asked for")
        return cls(tuple(i for i, _ in best), tuple(p for _, p in best))


class Shape(Protocol):
    """How one kind of server is asked.

    ``honours`` names the sampling settings it has, ``limits`` the range it takes of some of them,
    ``reasons`` why one that it seems to have is not honoured. Checked before anything is sent: a
    server that ignores or clamps a setting would answer from another distribution.
    """

    kind: ClassVar[str]
    path: ClassVar[str]
    honours: ClassVar[frozenset[str]]
    reasons: ClassVar[Mapping[str, str]]
    limits: ClassVar[Mapping[str, tuple[float, float]]]
    gives_token_ids: ClassVar[bool]

    def body(self, question: Question, model: str) -> dict[str, Any]:
        """The JSON body that asks for one answer."""
        ...

    def read(self, body: bytes) -> Answer:
        """The answer in a JSON body.

        Raises:
            RowRejected: it is not of this kind of server.
            TryAgain: it is not JSON, or the server gave up on it.
        """
        ...


@runtime_checkable
class Scorer(Protocol):
    """What a shape has besides, where its kind of server gives the K best ids of given text.

    ``num_scored_more``: tokens that the server insists on generating after the text; text and they
    have to fit into its context.
    """

    num_scored_more: ClassVar[int]

    def score_body(self, sequence: Sequence[int], top_k: int, model: str) -> dict[str, Any]:
        """The JSON body that asks for the K best ids at each position of a sequence."""
        ...

    def read_scores(self, body: bytes, num_tokens: int, top_k: int) -> list[TopK]:
        """``num_tokens - 1`` positions: the law of every token but the first."""
        ...


def check_sampling(shape: Shape, sampling: SamplingConfig) -> None:
    """Refuse what this kind of server would drop or change.

    Raises:
        SamplingError: names every such setting, its value and the reason.
    """
    neutral = SamplingConfig()
    problems = []
    for name in SamplingConfig.model_fields:
        value = getattr(sampling, name)
        if value == getattr(neutral, name):
            continue
        if name not in shape.honours:
            why = shape.reasons.get(name, "it has no such setting")
            problems.append(f"{name}: {value!r} ({why})")
        elif name in shape.limits:
            low, high = shape.limits[name]
            values = value.values() if isinstance(value, Mapping) else [value]
            problems += [
                f"{name}: {one!r} (it takes {low:g} to {high:g})"
                for one in values
                if not low <= one <= high
            ]
    if problems:
        raise SamplingError(
            f"a server of kind {shape.kind!r} cannot honour {'; '.join(problems)}. Leave the "
            "setting out, use another kind of server, or `backend: local`, which honours all"
        )


Wire = TypeVar("Wire", bound="WireModel")


class WireModel(pydantic.BaseModel):
    """Base of the bodies that are read: unknown fields are ignored, numbers are not guessed."""

    model_config = pydantic.ConfigDict(extra="ignore", strict=True)

    @classmethod
    def parse(cls: type[Wire], body: bytes) -> Wire:
        """``body`` as this model.

        Raises:
            TryAgain: it is not JSON: something on the way broke it.
            RowRejected: names the first field that is missing or wrong.
        """
        try:
            return cls.model_validate_json(body)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            if first["type"] == "json_invalid":
                raise TryAgain(f"the answer is not JSON: {first['msg']}") from error
            where = ".".join(map(str, first["loc"])) or "the whole body"
            raise RowRejected(
                f"the answer is not one of this kind of server: {where}: {first['msg']}"
            ) from error


def only(items: Sequence[Wire], what: str) -> Wire:
    """The single item of an answer to a single question."""
    if len(items) != 1:
        raise RowRejected(f"{len(items)} {what} came for one question")
    return items[0]
