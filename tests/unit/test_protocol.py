"""What a client may send: accepted, refused by name, never ignored and never coerced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from distill.server.protocol import (
    MAX_STOP_STRINGS,
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    parse_request,
)
from distill.server.responses import (
    ChatDialect,
    Choice,
    CompletionDialect,
    Dialect,
    Response,
    Usage,
)


def completion(**fields: Any) -> CompletionRequest:
    body = {"model": "m", "prompt": "hello", **fields}
    return parse_request(json.dumps(body).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_request(json.dumps(body).encode(), ChatCompletionRequest)


def refusal(parse: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


def test_parameters_that_are_not_sent_keep_the_defaults_of_the_sampling_config() -> None:
    sampling = completion().sampling()
    assert sampling.temperature == 1.0
    assert sampling.top_k == 0
    assert sampling.top_p == 1.0


def test_every_sampling_parameter_reaches_the_sampling_config() -> None:
    sent = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "min_tokens": 2,
    }
    sampling = completion(**sent, logit_bias={"5": -100}).sampling()
    assert {name: getattr(sampling, name) for name in sent} == sent
    assert dict(sampling.logit_bias) == {5: -100.0}


def test_a_null_parameter_is_one_that_was_not_sent() -> None:
    nulls = dict.fromkeys(["temperature", "stop", "seed", "n", "logprobs", "tools", "stream"])
    assert chat(**nulls) == chat()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("best_of", 4),
        ("echo", True),
        ("logprobs", 0),
        ("logprobs", True),
        ("suffix", "end"),
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("ignore_eos", True),
    ],
)
def test_an_unsupported_parameter_is_refused_by_name(name: str, value: Any) -> None:
    error = refusal(completion, **{name: value})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert "Leave it out" in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", 1), ("echo", False), ("tools", []), ("response_format", {"type": "text"})],
)
def test_an_unsupported_parameter_that_asks_for_nothing_is_accepted(name: str, value: Any) -> None:
    assert completion(**{name: value}) == completion()


def test_true_is_not_the_number_one() -> None:
    assert refusal(completion, n=True).param == "n"


def test_an_unknown_parameter_is_refused_with_the_nearest_known_one() -> None:
    error = refusal(completion, temprature=0.5)
    assert (error.param, error.code) == ("temprature", "unknown_parameter")
    assert "temperature" in str(error)
    assert "Did you mean" not in str(refusal(completion, zzzz=1))


def test_an_unknown_field_inside_a_message_is_named_with_its_path() -> None:
    error = refusal(chat, messages=[{"role": "user", "content": "x", "weight": 1}])
    assert (error.param, error.code) == ("messages.0.weight", "unknown_parameter")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "0.7"),
        ("temperature", -0.1),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("top_k", 2.5),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("max_tokens", "16"),
        ("seed", -1),
        ("seed", 2**63),
        ("stream", "yes"),
        ("stop", 5),
        ("stop", [1]),
        ("stop", [""]),
        ("stop", ["x"] * (MAX_STOP_STRINGS + 1)),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", [5]),
        ("num_draft_tokens", -1),
        ("prompt", 7),
        ("prompt", ["a", "b"]),
        ("prompt", [1, -2]),
        ("prompt", [1, True]),
        ("prompt", "\ud800"),
    ],
)
def test_a_wrong_value_is_refused_and_never_coerced(name: str, value: Any) -> None:
    error = refusal(completion, **{name: value})
    assert error.param == name
    assert error.code == "invalid_value"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", 1e-5, "at least 0.0001"),
        ("temperature", 20000, "10000"),
        ("repetition_penalty", 0.005, "0.01"),
        ("repetition_penalty", 200, "100"),
    ],
)
def test_a_value_that_the_library_takes_from_nobody_is_refused_by_name(
    name: str, value: float, words: str
) -> None:
    for parse in (completion, chat):
        error = refusal(lambda parse=parse, **fields: parse(**fields).sampling(), **{name: value})
        assert error.param == name
        assert words in str(error)


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(b'{"model": "m"}', CompletionRequest)
    assert (caught.value.param, caught.value.code) == ("prompt", "missing_parameter")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_body_that_is_not_json_is_a_400(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(body, CompletionRequest)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_body_that_is_not_an_object_is_a_400() -> None:
    with pytest.raises(ApiError, match="list"):
        parse_request(b"[]", CompletionRequest)


def test_a_prompt_is_text_or_token_ids() -> None:
    assert completion(prompt="hello").prompt == "hello"
    assert completion(prompt=[3, 4]).prompt == (3, 4)
    assert completion(prompt=["hello"]).prompt == "hello"
    assert completion(prompt=[[3, 4]]).prompt == (3, 4)


def test_one_stop_string_or_several() -> None:
    assert completion(stop="END").stop == ("END",)
    assert completion(stop=["a", "b"]).stop == ("a", "b")


def test_stream_options_need_a_stream() -> None:
    assert "stream=true" in str(refusal(chat, stream_options={"include_usage": True}))
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True).include_usage


def test_a_completion_is_short_unless_told_and_a_chat_answer_is_not() -> None:
    assert completion().token_budget == 16
    assert completion(max_tokens=3).token_budget == 3
    assert chat().token_budget is None
    assert chat(max_tokens=3).token_budget == 3
    assert chat(max_completion_tokens=4).token_budget == 4


def test_two_budgets_or_a_minimum_above_the_budget_are_refused() -> None:
    assert "not both" in str(refusal(chat, max_tokens=3, max_completion_tokens=4))
    assert "budget of 4" in str(refusal(completion, max_tokens=4, min_tokens=5))


def test_text_parts_are_joined_and_other_parts_are_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "ab"
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    assert refusal(chat, messages=[{"role": "user", "content": image}]).param == (
        "messages.0.content"
    )


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    turn = {"role": "assistant", "content": "ok", "refusal": None, "tool_calls": None}
    assert chat(messages=[turn]).messages[0].content == "ok"
    assert refusal(chat, messages=[{**turn, "refusal": "no"}]).param == "messages.0.refusal"


@pytest.mark.parametrize("messages", [[], "hi", [3], [{"role": "tool", "content": "x"}]])
def test_messages_must_be_turns_of_known_roles(messages: Any) -> None:
    error = refusal(chat, messages=messages)
    assert error.param is not None
    assert error.param.startswith("messages")


def test_an_error_body_has_the_four_fields_clients_read() -> None:
    error = ApiError("Slow down.", status=429, type="rate_limit_error", code="queue_full")
    assert error.body() == {
        "error": {
            "message": "Slow down.",
            "type": "rate_limit_error",
            "param": None,
            "code": "queue_full",
        }
    }


def response(choice: Choice, **fields: Any) -> dict[str, Any]:
    whole = Response(id="x", object="o", created=1, model="m", choices=[choice], **fields)
    content: dict[str, Any] = json.loads(whole.to_json())
    return content


def test_a_whole_answer_has_no_fields_of_the_other_dialect() -> None:
    text = response(CompletionDialect().choice("hey", "stop"))["choices"][0]
    assert text == {"index": 0, "text": "hey", "logprobs": None, "finish_reason": "stop"}
    turn = response(ChatDialect().choice("hey", "length"))["choices"][0]
    assert turn["message"] == {"role": "assistant", "content": "hey"}
    assert "text" not in turn
    assert "delta" not in turn


def test_a_chat_stream_opens_with_the_role_and_closes_with_an_empty_delta() -> None:
    dialect = ChatDialect()
    assert response(dialect.opening())["choices"][0]["delta"] == {
        "role": "assistant",
        "content": "",
    }
    assert response(dialect.part("a", None))["choices"][0] == {
        "index": 0,
        "delta": {"content": "a"},
        "logprobs": None,
        "finish_reason": None,
    }
    assert response(dialect.part("", "stop"))["choices"][0]["delta"] == {}
    completion: Dialect = CompletionDialect()
    assert completion.opening() is None


def test_usage_null_is_sent_only_when_it_was_set() -> None:
    choice = CompletionDialect().part("a", None)
    assert "usage" not in response(choice)
    assert response(choice, usage=None)["usage"] is None
    assert response(choice, usage=Usage.of(3, 4))["usage"]["total_tokens"] == 7


def test_the_base_dialect_says_nothing_itself() -> None:
    base = Dialect()
    for call in (lambda: base.choice("", "stop"), base.opening, lambda: base.part("", None)):
        with pytest.raises(NotImplementedError):
            call()
