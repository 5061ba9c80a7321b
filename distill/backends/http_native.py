"""Servers whose own endpoints give more than their OpenAI ones: SGLang and llama-server.

Refuses to know sockets and retries. The fields are those of the servers' documentation; which were
run against a server is in docs/backends.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from distill.backends.http_wire import (
    Answer,
    Question,
    RowRejected,
    Scorer,
    Shape,
    TopK,
    TryAgain,
    WireModel,
)

_UINT32 = 2**32 - 1  # llama-server's seeds have 32 bits, and the last one means "any"


class _Finish(WireModel):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None


class _Meta(WireModel):
    finish_reason: _Finish
    prompt_tokens: int
    completion_tokens: int


class _Generated(WireModel):
    text: str = ""
    output_ids: list[int]
    meta_info: _Meta


class _ScoreMeta(WireModel):
    input_top_logprobs: list[list[tuple[float, int, str | None]] | None]


class _Scored(WireModel):
    meta_info: _ScoreMeta


class SglangShape(Shape, Scorer):
    """SGLang's /generate.

    Seeds count only on a server started with ``--enable-deterministic-inference``; without it the
    answers are drawn from the same law, and are others next time.
    """

    kind: ClassVar[str] = "sglang"
    path: ClassVar[str] = "/generate"
    honours: ClassVar[frozenset[str]] = frozenset(
        {
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "min_tokens",
        }
    )
    reasons: ClassVar[Mapping[str, str]] = {
        "repetition_penalty": "in some versions it counts the answer's tokens only, this library "
        "the prompt's too",
    }
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
    }
    gives_token_ids: ClassVar[bool] = True
    num_scored_more: ClassVar[int] = 0

    def body(self, question: Question, model: str) -> dict[str, Any]:
        """Everything is sent: by default the server takes what is left out from the model."""
        sampling = question.sampling
        settings: dict[str, Any] = {
            "max_new_tokens": question.max_new_tokens,
            "min_new_tokens": sampling.min_tokens,
            "sampling_seed": question.seed,
            "stop_token_ids": list(question.stop_token_ids),
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": 1.0,
        }
        if sampling.logit_bias:
            settings["logit_bias"] = {str(i): bias for i, bias in sampling.logit_bias.items()}
        return {
            "input_ids": list(question.prompt),
            "sampling_params": settings,
            "return_logprob": False,
        }

    def read(self, body: bytes) -> Answer:
        """``finish_reason`` is an object: its type, and the id or text that matched."""
        generated = _Generated.parse(body)
        meta, finish = generated.meta_info, generated.meta_info.finish_reason
        if finish.type == "abort":
            raise TryAgain(f"the server gave up on it: {finish.message or 'no reason given'}")
        return Answer(
            finish=finish.type,
            token_ids=tuple(generated.output_ids),
            text=generated.text,
            stop_token_id=finish.matched if isinstance(finish.matched, int) else None,
            num_prompt_tokens=meta.prompt_tokens,
            num_new_tokens=meta.completion_tokens,
        )

    def score_body(self, sequence: Sequence[int], top_k: int, model: str) -> dict[str, Any]:
        """The prompt's own positions, nothing generated."""
        return {
            "input_ids": list(sequence),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top_k,
        }

    def read_scores(self, body: bytes, num_tokens: int, top_k: int) -> list[TopK]:
        """Entry t is the law of token t given those before it; the first has none."""
        positions = _Scored.parse(body).meta_info.input_top_logprobs
        if len(positions) != num_tokens:
            raise RowRejected(f"{len(positions)} positions came for {num_tokens} tokens")
        return [
            TopK.of({i: log_prob for log_prob, i, _ in position or []}, top_k)
            for position in positions[1:]
        ]


class _LlamaCompletion(WireModel):
    content: str
    tokens: list[int]
    stop_type: str
    tokens_evaluated: int
    tokens_predicted: int | None = None
    truncated: bool = False


class LlamaCppShape(Shape):
    """llama-server's /completion: ids in, ids out, and the order of the samplers is ours."""

    kind: ClassVar[str] = "llama_cpp"
    path: ClassVar[str] = "/completion"
    honours: ClassVar[frozenset[str]] = frozenset(
        {
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "logit_bias",
            "bad_token_ids",
        }
    )
    reasons: ClassVar[Mapping[str, str]] = {
        "presence_penalty": "it counts the prompt's tokens too, this library the answer's only",
        "frequency_penalty": "it counts the prompt's tokens too, this library the answer's only",
    }
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {}
    gives_token_ids: ClassVar[bool] = True

    def body(self, question: Question, model: str) -> dict[str, Any]:
        """``samplers`` in the order of SamplingConfig; one that is not listed does not run."""
        sampling = question.sampling
        bias: list[list[Any]] = [[i, value] for i, value in sampling.logit_bias.items()]
        bias += [[i, False] for i in sampling.bad_token_ids]
        return {
            "prompt": list(question.prompt),
            "n_predict": question.max_new_tokens,
            "return_tokens": True,
            # Reusing another prompt's cache changes the widths of the products, and so last bits.
            "cache_prompt": False,
            "seed": question.seed % _UINT32,
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
            "repeat_last_n": -1,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "dynatemp_range": 0.0,
            "mirostat": 0,
            "logit_bias": bias,
            "n_probs": 0,
        }

    def read(self, body: bytes) -> Answer:
        """``stop_type``: eos, limit (of tokens) or word; ``tokens`` are the ids."""
        completion = _LlamaCompletion.parse(body)
        if completion.truncated:
            raise RowRejected(
                "the server's context is full; start it with a larger one (-c), or shorten the rows"
            )
        words = {"eos": "stop", "limit": "length"}
        return Answer(
            finish=words.get(completion.stop_type, completion.stop_type),
            token_ids=tuple(completion.tokens),
            text=completion.content,
            num_prompt_tokens=completion.tokens_evaluated,
            num_new_tokens=completion.tokens_predicted,
        )
