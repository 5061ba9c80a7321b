"""What clients may ask: the request shapes of the OpenAI-compatible API, and the error body.

Refuses to know answers, sockets, threads, tokenizers and the decode loop.

Two rules. A parameter the server can't honour is a 400 that names it, unless its value is the one
that changes nothing (`n=1`, `logprobs=null`): a client must never believe that a setting worked
when it didn't. And nothing is coerced: "0.7" isn't a temperature.
"""

from __future__ import annotations

import difflib
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from distill.errors import ServerError
from distill.sampling import SamplingConfig

MAX_STOP_STRINGS = 16
DEFAULT_COMPLETION_TOKENS = 16  # the public API's default for /v1/completions

# Parameters of the public API that this server doesn't implement, each with the values that ask
# for nothing. null always does.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
}


class ApiError(ServerError):
    """A request the server answers with an error body.

    `status` is the HTTP status; `type`, `param` and `code` are the fields that OpenAI clients read.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON error body."""
        return {
            "error": {
                "message": str(self),
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def _encodable(text: str) -> str:
    # JSON can spell half a surrogate pair, which is no character and which no tokenizer takes.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half of a surrogate pair") from error
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(_Wire):
    """Options of a streamed answer."""

    include_usage: bool = False


class GenerationRequest(_Wire):
    """The parameters that chat and text completion share. `null` means "not given"."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0)
    top_k: int | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, lt=1)
    repetition_penalty: float | None = Field(None, gt=0)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[int, float] | None = None
    min_tokens: int | None = Field(None, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    stop: tuple[Text, ...] = ()
    seed: int | None = Field(None, ge=0, lt=2**63)
    user: str | None = Field(None, description="Who asks; never changes the answer.")
    return_token_ids: bool | None = Field(
        None, description="Add the token ids of prompt and answer to a whole (unstreamed) answer."
    )
    num_draft_tokens: int | None = Field(
        None, ge=0, description="Draft tokens per target call, at most the server's own; 0 = none."
    )

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_as_tuple(cls, value: Any) -> Any:
        if value is None:
            return ()
        stops = (value,) if isinstance(value, str) else value
        if not isinstance(stops, list | tuple) or not all(isinstance(item, str) for item in stops):
            raise ValueError("it must be a string or a list of strings")
        if len(stops) > MAX_STOP_STRINGS:
            raise ValueError(f"{len(stops)} stop strings were sent; at most {MAX_STOP_STRINGS}")
        if not all(stops):
            raise ValueError("an empty stop string would end every answer before it starts")
        return tuple(stops)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _token_id_keys(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        biases: dict[int, Any] = {}
        for key, bias in value.items():
            if not (isinstance(key, str) and key.isascii() and key.isdecimal()):
                raise ValueError(f"{key!r} isn't a token id")
            if not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise ValueError(f"the bias of token {key} is {bias!r}; it must be in [-100, 100]")
            biases[int(key)] = bias
        return biases

    @model_validator(mode="after")
    def _check_together(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        if self.return_token_ids and self.stream:
            raise ValueError("return_token_ids needs stream=false")
        budget = self.token_budget
        if budget is not None and self.min_tokens is not None and self.min_tokens > budget:
            raise ValueError(f"min_tokens={self.min_tokens} is above the token budget of {budget}")
        return self

    @property
    def token_budget(self) -> int | None:
        """The most tokens to generate; None = as many as the context holds."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a streamed answer ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> SamplingConfig:
        """The sampling settings; what wasn't sent keeps the library's default.

        Raises ApiError (400) for a value that the library takes from nobody.
        """
        names = (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "min_tokens",
        )
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        try:
            return SamplingConfig(**given)
        except ValidationError as error:
            raise _as_api_error(error, type(self)) from error


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. `prompt`: one string or one list of token ids."""

    prompt: Text | tuple[int, ...]

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
            value = value[0]
        if isinstance(value, str):
            return value
        if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
            return tuple(value)
        raise ValueError(
            "it must be one string or one list of token ids; send several prompts as several "
            "requests, they are batched together"
        )

    @property
    def token_budget(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class ChatMessage(_Wire):
    """One turn. Content given as text parts is joined."""

    role: Literal["system", "user", "assistant"]
    content: Text

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_extras(cls, value: Any) -> Any:
        # Clients send an earlier answer back as it came, null fields included.
        if not isinstance(value, dict):
            return value
        extras = ("name", "refusal", "tool_calls", "function_call", "audio", "annotations")
        return {k: v for k, v in value.items() if not (k in extras and v in (None, []))}

    @field_validator("content", mode="before")
    @classmethod
    def _join_text_parts(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        for part in value:
            if (
                not isinstance(part, dict)
                or set(part) != {"type", "text"}
                or part["type"] != "text"
                or not isinstance(part["text"], str)
            ):
                raise ValueError(f"only text parts are supported; got {part!r}"[:200])
        return "".join(part["text"] for part in value)


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_budget(self) -> ChatCompletionRequest:
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("send max_completion_tokens or max_tokens, not both")
        return self

    @property
    def token_budget(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return super().token_budget


RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse_request(body: bytes, schema: type[RequestT]) -> RequestT:
    """Read a request body.

    Raises ApiError (400) with `param` naming the first offending field.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"The body isn't valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(f"The body must be a JSON object, not {type(data).__name__}.")
    given = {}
    for name, value in data.items():
        if name in _NEUTRAL_VALUES and name not in schema.model_fields:
            _require_neutral(name, value)
        else:
            given[name] = value
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        raise _as_api_error(error, schema) from error


def _require_neutral(name: str, value: Any) -> None:
    neutral = _NEUTRAL_VALUES[name]
    if value is None or any(type(value) is type(item) and value == item for item in neutral):
        return
    allowed = " or ".join(json.dumps(item) for item in (*neutral, None))
    raise ApiError(
        f"{name}={json.dumps(value)[:100]} isn't supported by this server. "
        f"Leave it out or send {allowed}.",
        param=name,
        code="unsupported_parameter",
    )


def _as_api_error(error: ValidationError, schema: type[BaseModel]) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    loc = first["loc"]
    if loc and loc[0] not in ("messages", "stream_options"):
        loc = loc[:1]  # what follows is how the type is built, not a field
    param = ".".join(str(part) for part in loc) or None
    if first["type"] == "extra_forbidden" and param is not None:
        known = list(schema.model_fields) if len(loc) == 1 else []
        close = difflib.get_close_matches(param, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        return ApiError(
            f"Unknown parameter {param!r}.{hint}", param=param, code="unknown_parameter"
        )
    message = first["msg"].removeprefix("Value error, ")
    if param is None:
        return ApiError(f"Invalid request: {message}.", code="invalid_value")
    if first["type"] == "missing":
        return ApiError(f"{param!r} is missing.", param=param, code="missing_parameter")
    return ApiError(f"Invalid {param!r}: {message}.", param=param, code="invalid_value")
