"""From a request's text to token ids: what the served pair can take, and what a request asks of it.

Refuses to know sockets, threads and how tokens are generated.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError

from distill.runtime.decode import DecodeRequest
from distill.server.protocol import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)


@dataclass(frozen=True)
class ServedPair:
    """What clients may know of the models behind the server.

    `max_length` counts prompt and answer tokens together; `num_draft_tokens` is the most a request
    may ask for; ids from `vocabulary_size` on aren't tokens.
    """

    model_id: str
    tokenizer: Any
    stop_token_ids: frozenset[int]
    vocabulary_size: int
    max_length: int
    num_draft_tokens: int

    def require_model(self, model_id: str) -> None:
        """Raises ApiError (404) for any model but the served one."""
        if model_id != self.model_id:
            raise ApiError(
                f"The model {model_id!r} doesn't exist here; this server has {self.model_id!r}.",
                status=404,
                param="model",
                code="model_not_found",
            )

    def model_card(self, created: int) -> dict[str, Any]:
        """The entry of /v1/models; `created` in seconds since 1970."""
        return {
            "id": self.model_id,
            "object": "model",
            "created": created,
            "owned_by": "distill",
            "max_model_len": self.max_length,
        }


def build_request(pair: ServedPair, asked: GenerationRequest, request_id: str) -> DecodeRequest:
    """The decode request behind a parsed HTTP request.

    Raises ApiError (400) when the prompt is empty, holds ids that aren't tokens, doesn't fit the
    context together with the asked-for answer, or when more draft tokens are asked than served.
    """
    prompt_token_ids = _prompt_token_ids(pair, asked)
    sampling = asked.sampling()
    _require_tokens(pair, prompt_token_ids, "prompt")
    _require_tokens(pair, list(asked.logit_bias or {}), "logit_bias")
    if asked.num_draft_tokens is not None and asked.num_draft_tokens > pair.num_draft_tokens:
        raise ApiError(
            f"num_draft_tokens={asked.num_draft_tokens} is above the {pair.num_draft_tokens} that "
            "this server was started with.",
            param="num_draft_tokens",
            code="invalid_value",
        )
    return DecodeRequest(
        prompt_token_ids=prompt_token_ids,
        max_new_tokens=_num_new_tokens(pair, asked, len(prompt_token_ids)),
        sampling=sampling,
        seed=secrets.randbits(63) if asked.seed is None else asked.seed,
        stop_token_ids=pair.stop_token_ids,
        stop_strings=asked.stop,
        num_draft_tokens=asked.num_draft_tokens,
        request_id=request_id,
    )


def _prompt_token_ids(pair: ServedPair, asked: GenerationRequest) -> list[int]:
    if isinstance(asked, ChatCompletionRequest):
        return _chat_token_ids(pair.tokenizer, asked)
    assert isinstance(asked, CompletionRequest)
    if isinstance(asked.prompt, str):
        return list(pair.tokenizer(asked.prompt)["input_ids"])
    return list(asked.prompt)


def _chat_token_ids(tokenizer: Any, asked: ChatCompletionRequest) -> list[int]:
    if not tokenizer.chat_template:
        raise ApiError(
            "This model has no chat template; send a prompt to /v1/completions instead.",
            param="messages",
            code="no_chat_template",
        )
    turns = [{"role": turn.role, "content": turn.content} for turn in asked.messages]
    try:
        # The template writes the special tokens, so none are added here: a second
        # beginning-of-sequence token would be one the model never saw in training.
        encoded = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except TemplateError as error:
        raise ApiError(
            f"The model's chat template refuses these messages: {error}",
            param="messages",
            code="invalid_value",
        ) from error
    return list(encoded["input_ids"])


def _require_tokens(pair: ServedPair, token_ids: Sequence[int], param: str) -> None:
    unknown = [token_id for token_id in token_ids if token_id >= pair.vocabulary_size]
    if unknown:
        raise ApiError(
            f"{unknown[0]} isn't a token id; this model's are 0 to {pair.vocabulary_size - 1}.",
            param=param,
            code="invalid_value",
        )


def _num_new_tokens(pair: ServedPair, asked: GenerationRequest, num_prompt: int) -> int:
    if num_prompt == 0:
        raise ApiError("The prompt holds no tokens.", param="prompt", code="invalid_value")
    budget = asked.token_budget
    room = pair.max_length - num_prompt
    minimum = asked.min_tokens or 0
    if room < max(1, budget or 0, minimum):
        # Without a budget the answer may be as short as it likes, but for its minimum.
        is_minimum = budget is None and minimum > 1
        wanted = str(budget) if budget is not None else f"at least {max(1, minimum)}"
        lower = "min_tokens" if is_minimum else "max_tokens"
        raise ApiError(
            f"This model's context holds {pair.max_length} tokens; the prompt has {num_prompt} and "
            f"{wanted} more were asked for. Shorten the prompt or lower {lower}.",
            param=lower if room > 0 else "prompt",
            code="context_length_exceeded",
        )
    return room if budget is None else budget
