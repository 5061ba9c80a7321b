"""What clients get back: response shapes of the OpenAI-compatible API, whole and streamed.

Refuses to know sockets, threads, tokenizers and the decode loop.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from distill.runtime.commit import FinishReason
from distill.runtime.stats import DecodeStats
from distill.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest


class Usage(BaseModel):
    """Tokens read and tokens emitted (a stop token counts: it was generated)."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, num_prompt: int, num_completion: int) -> Usage:
        return cls(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
        )


class Speculation(BaseModel):
    """How the draft did on one answer: the `distill` field of a response.

    `acceptance_rate` is accepted / tested, `draft_acceptance_rate` is accepted / proposed; both are
    null when nothing was proposed. `seed` repeats the answer when it's sent back.
    """

    seed: int
    num_draft_tokens: int
    num_target_calls: int
    num_proposed: int
    num_tested: int
    num_accepted: int
    acceptance_rate: float | None
    draft_acceptance_rate: float | None
    block_efficiency: float | None
    acceptance_by_position: list[float | None]

    @classmethod
    def of(cls, stats: DecodeStats, seed: int, num_draft_tokens: int) -> Speculation:
        return cls(
            seed=seed,
            num_draft_tokens=num_draft_tokens,
            num_target_calls=stats.num_target_calls,
            num_proposed=stats.num_proposed,
            num_tested=stats.num_tested,
            num_accepted=stats.num_accepted,
            acceptance_rate=stats.acceptance_rate,
            draft_acceptance_rate=stats.draft_acceptance_rate,
            block_efficiency=stats.block_efficiency,
            acceptance_by_position=list(stats.acceptance_by_position),
        )


class ChatReply(BaseModel):
    """The message of a chat choice, or a streamed part of it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""


class Choice(BaseModel):
    """One answer. `text` for completions; `message` (whole) or `delta` (streamed) for chat.

    `prompt_token_ids` and `token_ids` (its stop token included) only when asked for.
    """

    index: int = 0
    text: str | None = None
    message: ChatReply | None = None
    delta: ChatReply | None = None
    logprobs: None = None
    finish_reason: FinishReason | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Response(BaseModel):
    """A whole answer or one chunk of a streamed one. Only fields that were set are sent."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    distill: Speculation | None = None

    def to_json(self) -> str:
        return self.model_dump_json(exclude_unset=True)


class Dialect:
    """How one endpoint words its answers. The two below share everything but the choice's shape."""

    schema: type[GenerationRequest]
    id_prefix: str
    object: str
    chunk_object: str

    def choice(self, text: str, finish_reason: FinishReason) -> Choice:
        raise NotImplementedError

    def opening(self) -> Choice | None:
        """The choice of a chunk that comes before any text, or None when there is none."""
        raise NotImplementedError

    def part(self, text: str, finish_reason: FinishReason | None) -> Choice:
        raise NotImplementedError


class CompletionDialect(Dialect):
    """POST /v1/completions."""

    schema = CompletionRequest
    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, text: str, finish_reason: FinishReason | None) -> Choice:
        return Choice(index=0, text=text, logprobs=None, finish_reason=finish_reason)

    def opening(self) -> None:
        return None

    def part(self, text: str, finish_reason: FinishReason | None) -> Choice:
        return self.choice(text, finish_reason)


class ChatDialect(Dialect):
    """POST /v1/chat/completions."""

    schema = ChatCompletionRequest
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, text: str, finish_reason: FinishReason) -> Choice:
        reply = ChatReply(role="assistant", content=text)
        return Choice(index=0, message=reply, logprobs=None, finish_reason=finish_reason)

    def opening(self) -> Choice:
        reply = ChatReply(role="assistant", content="")
        return Choice(index=0, delta=reply, logprobs=None, finish_reason=None)

    def part(self, text: str, finish_reason: FinishReason | None) -> Choice:
        reply = ChatReply(content=text) if text else ChatReply()
        return Choice(index=0, delta=reply, logprobs=None, finish_reason=finish_reason)
