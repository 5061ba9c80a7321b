"""Servers that speak /v1/completions: vLLM, this library's own, and any other that does.

Refuses to know sockets and retries. The fields are those of the servers' documentation; which were
run against a server is in docs/backends.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from distill.backends.http_wire import (
    Answer,
    Question,
    RowRejected,
    Scorer,
    Shape,
    TopK,
    WireModel,
    only,
)

_PENALTY = (-2.0, 2.0)


class _Usage(WireModel):
    prompt_tokens: int
    completion_tokens: int


class _Candidate(WireModel):
    logprob: float


class _Choice(WireModel):
    text: str
    finish_reason: str
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class _Completion(WireModel):
    choices: list[_Choice]
    usage: _Usage | None = None


class _ScoredChoice(WireModel):
    prompt_logprobs: list[dict[int, _Candidate] | None]


class _Scored(WireModel):
    choices: list[_ScoredChoice] = Field(min_length=1)


class OpenAIShape(Shape):
    """Any server of /v1/completions. The prompt goes as token ids; the answer comes as text."""

    kind: ClassVar[str] = "openai"
    path: ClassVar[str] = "/v1/completions"
    honours: ClassVar[frozenset[str]] = frozenset(
        {"temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias"}
    )
    reasons: ClassVar[Mapping[str, str]] = {}
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        "temperature": (0.0, 2.0),
        "presence_penalty": _PENALTY,
        "frequency_penalty": _PENALTY,
        "logit_bias": (-100.0, 100.0),
    }
    gives_token_ids: ClassVar[bool] = False

    def body(self, question: Question, model: str) -> dict[str, Any]:
        """Everything is sent, defaults too: a server's own defaults may come from the model."""
        sampling = question.sampling
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(question.prompt),
            "max_tokens": question.max_new_tokens,
            "seed": question.seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
        }
        if sampling.logit_bias:
            body["logit_bias"] = {str(i): bias for i, bias in sampling.logit_bias.items()}
        return body

    def read(self, body: bytes) -> Answer:
        """One choice, with whatever ids and counts it has."""
        completion = _Completion.parse(body)
        choice, usage = only(completion.choices, "choices"), completion.usage
        prompt = choice.prompt_token_ids
        return Answer(
            finish=choice.finish_reason,
            token_ids=None if choice.token_ids is None else tuple(choice.token_ids),
            text=choice.text,
            stop_token_id=choice.stop_reason if isinstance(choice.stop_reason, int) else None,
            prompt_token_ids=None if prompt is None else tuple(prompt),
            num_prompt_tokens=None if usage is None else usage.prompt_tokens,
            num_new_tokens=None if usage is None else usage.completion_tokens,
        )


class DistillShape(OpenAIShape):
    """``distill serve``: every setting but bans, and token ids on request."""

    kind: ClassVar[str] = "distill"
    honours: ClassVar[frozenset[str]] = OpenAIShape.honours | {
        "top_k",
        "min_p",
        "repetition_penalty",
        "min_tokens",
    }
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        "presence_penalty": _PENALTY,
        "frequency_penalty": _PENALTY,
        "logit_bias": (-100.0, 100.0),
    }
    gives_token_ids: ClassVar[bool] = True

    def body(self, question: Question, model: str) -> dict[str, Any]:
        """The public fields and those every one of the fuller servers has."""
        sampling = question.sampling
        return super().body(question, model) | {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "min_tokens": sampling.min_tokens,
            "return_token_ids": True,
        }


class VllmShape(DistillShape, Scorer):
    """vLLM. ``token_ids`` hold the stop token; ``stop_reason`` names one that is not the EOS.

    ``prompt_logprobs`` are of the raw logits, as the server has them by default
    (``--logprobs-mode raw_logprobs``), and need ``--max-logprobs`` of K or more.
    """

    kind: ClassVar[str] = "vllm"
    reasons: ClassVar[Mapping[str, str]] = {"bad_token_ids": "it bans words, not token ids"}
    num_scored_more: ClassVar[int] = 1

    def body(self, question: Question, model: str) -> dict[str, Any]:
        """Stop ids are sent, so that the server's generation config does not decide them."""
        return super().body(question, model) | {"stop_token_ids": list(question.stop_token_ids)}

    def score_body(self, sequence: Sequence[int], top_k: int, model: str) -> dict[str, Any]:
        """At least one token has to be generated; it is not looked at."""
        return {
            "model": model,
            "prompt": list(sequence),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": top_k,
        }

    def read_scores(self, body: bytes, num_tokens: int, top_k: int) -> list[TopK]:
        """Entry t is the law of token t given those before it; the first has none."""
        positions = only(_Scored.parse(body).choices, "choices").prompt_logprobs
        if len(positions) != num_tokens:
            raise RowRejected(f"{len(positions)} positions came for {num_tokens} tokens")
        found = []
        for position in positions[1:]:
            by_id = {i: one.logprob for i, one in (position or {}).items()}
            found.append(TopK.of(by_id, top_k))
        return found
