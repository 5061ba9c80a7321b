"""The server on a real port with the official client, over a scripted engine.

What decoding does to tokens is tested elsewhere; here it's what HTTP does to answers: text that
survives streaming, stops that don't leak, clients that leave, engines that fail, limits.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest

from distill.errors import ContextLengthError, ServerError
from distill.runtime.decode import DecodeRequest, DecodeResult, RowUpdate
from distill.runtime.stats import DecodeStats
from distill.runtime.text import TextStream
from distill.server.app import create_app
from distill.server.prompts import ServedPair
from distill.server.running import RunningServer
from distill.server.scheduler import (
    Event,
    Failed,
    Finished,
    QueueFullError,
    Scheduler,
    ServerClosedError,
)

END = 256  # the id after the bytes
TIMEOUT_S = 10.0
WAITING = 'num_requests_waiting{model_name="pair"}'
ABORTED = 'request_success_total{finished_reason="abort",model_name="pair"}'
EMOJI = "Grüße 你好 👩‍👩‍👧 ok"


class ByteTokenizer:
    """A token is a byte; `END` is the one special token."""

    chat_template: str | None = "a template"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def apply_chat_template(self, turns: list[dict[str, str]], **_: Any) -> dict[str, list[int]]:
        return self("".join(f"{turn['role']}: {turn['content']}\n" for turn in turns))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(token for token in token_ids if token != END).decode("utf-8", "replace")


TOKENIZER = ByteTokenizer()


class Row:
    """One request in the scripted engine."""

    def __init__(self, request: DecodeRequest, script: list[int]) -> None:
        self.request = request
        self.script = script
        self.emitted: list[int] = []
        self.rounds: list[tuple[int, int, int]] = []
        self.reason: Any = None

    def emit(self, width: int) -> RowUpdate:
        block: list[int] = []
        for token in self.script[len(self.emitted) :][:width]:
            block.append(token)
            self.emitted.append(token)
            text = TOKENIZER.decode(self.emitted, skip_special_tokens=True)
            stops = self.request.stop_strings
            if token in self.request.stop_token_ids or any(stop in text for stop in stops):
                self.reason = "stop"
            elif len(self.emitted) == self.request.max_new_tokens:
                self.reason = "length"
            if self.reason:
                break
        self.rounds.append((width - 1, max(len(block) - 1, 0), len(block)))
        return RowUpdate(0, block, self.reason)


class ScriptedEngine:
    """Answers every prompt with a fixed text, `width` tokens a step; the text decides mischief.

    A prompt "endless" never ends; "poison" raises when stepped; "crash" raises when added; "long"
    is refused. Each step waits for `pace`, so that a test decides how far an answer gets.
    """

    def __init__(self, answer: str = EMOJI, *, width: int = 3, pace: Any = None) -> None:
        self.answer = answer
        self.width = width
        self.pace = pace
        self.rows: dict[int, Row] = {}
        self.ended: dict[int, Row] = {}
        self.requests: list[DecodeRequest] = []
        self.num_steps = 0
        self.num_cancelled = 0
        self.cancelled = threading.Event()
        self.most_at_once = 0

    def add(self, request: DecodeRequest) -> int:
        prompt = TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=True)
        if "crash" in prompt:
            raise ZeroDivisionError(prompt)
        if "long" in prompt:
            raise ContextLengthError("The prompt is too long for the draft.")
        script = [*self.answer.encode(), END]
        if "endless" in prompt:
            script = list(b"na " * 10_000)
        if "poison" in prompt:
            script = []
        handle = len(self.requests)
        self.requests.append(request)
        self.rows[handle] = Row(request, script)
        self.most_at_once = max(self.most_at_once, len(self.rows))
        return handle

    def step(self) -> list[RowUpdate]:
        if self.pace is not None:
            assert self.pace.acquire(timeout=TIMEOUT_S)
        self.num_steps += 1
        updates = []
        for handle, row in list(self.rows.items()):
            if not row.script:
                raise RuntimeError("poisoned")
            update = row.emit(self.width)
            updates.append(RowUpdate(handle, update.new_token_ids, update.finish_reason))
            if row.reason:
                self.ended[handle] = self.rows.pop(handle)
        return updates

    def cancel(self, handle: int) -> DecodeResult:
        self.num_cancelled += 1
        self.cancelled.set()
        row = self.rows.pop(handle, None)
        return self.result(handle) if row is None else self.result_of(row)

    def result(self, handle: int) -> DecodeResult:
        return self.result_of(self.ended.pop(handle))

    def result_of(self, row: Row) -> DecodeResult:
        text = TOKENIZER.decode(row.emitted, skip_special_tokens=True)
        starts = [text.find(stop) for stop in row.request.stop_strings if stop in text]
        return DecodeResult(
            request_id=row.request.request_id,
            token_ids=row.emitted,
            text=text[: min(starts, default=len(text))],
            finish_reason=row.reason,
            stats=DecodeStats.from_rounds(row.rounds),
            hidden_TD=None,
            logsumexp_T=None,
        )


class Harness:
    """A running server over scripted engines, and clients for it."""

    def __init__(
        self,
        make_engine: Callable[[], ScriptedEngine],
        *,
        api_key: str | None = None,
        max_batch_size: int = 4,
        max_waiting: int = 8,
        max_length: int = 50_000,
        **app_options: Any,
    ) -> None:
        self.engines: list[ScriptedEngine] = []

        def make() -> ScriptedEngine:
            self.engines.append(make_engine())
            return self.engines[-1]

        self.scheduler = Scheduler(
            make, TOKENIZER, max_batch_size=max_batch_size, max_waiting=max_waiting
        )
        self.pair = ServedPair(
            model_id="pair",
            tokenizer=TOKENIZER,
            stop_token_ids=frozenset({END}),
            vocabulary_size=257,
            max_length=max_length,
            num_draft_tokens=2,
        )
        app = create_app(self.pair, self.scheduler, api_key=api_key, **app_options)
        self.server = RunningServer(app, self.scheduler, host="127.0.0.1", port=0)
        self.server.start()
        self.http = httpx2.Client(base_url=self.server.url, timeout=TIMEOUT_S)
        self.client = self.client_with(api_key or "unused")

    def client_with(self, api_key: str) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=self.server.base_url, api_key=api_key, timeout=TIMEOUT_S, max_retries=0
        )

    def complete(self, prompt: Any = "hi", **options: Any) -> Any:
        options = {"model": "pair", "max_tokens": 1000, **options}
        return self.client.completions.create(prompt=prompt, **options)

    def chat(self, content: str = "hi", **options: Any) -> Any:
        messages: Any = [{"role": "user", "content": content}]
        options = {"model": "pair", **options}
        return self.client.chat.completions.create(messages=messages, **options)

    def close(self) -> None:
        self.client.close()
        self.http.close()
        self.server.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Harness]]:
    running: list[Harness] = []

    def start(
        make_engine: Callable[[], ScriptedEngine] = ScriptedEngine, **options: Any
    ) -> Harness:
        running.append(Harness(make_engine, **options))
        return running[-1]

    yield start
    for harness in running:
        harness.close()


Serve = Callable[..., Harness]


# ---------------------------------------------------------------- answers


def test_a_completion_is_answered_with_usage_and_acceptance(serve: Serve) -> None:
    answer = serve().complete("hello", seed=7)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == EMOJI
    assert answer.choices[0].finish_reason == "stop"
    num_tokens = len(EMOJI.encode()) + 1  # the stop token was generated
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == num_tokens
    distill = answer.model_extra["distill"]
    assert distill["seed"] == 7
    assert distill["num_draft_tokens"] == 2
    assert distill["num_target_calls"] == -(-num_tokens // 3)
    assert distill["num_accepted"] <= distill["num_tested"] <= distill["num_proposed"]
    assert distill["acceptance_rate"] == distill["num_accepted"] / distill["num_tested"]


def test_token_ids_come_with_a_whole_answer_when_asked_for(serve: Serve) -> None:
    harness = serve()
    choice = harness.complete("hello", extra_body={"return_token_ids": True}).choices[0]
    assert choice.model_extra["prompt_token_ids"] == list(b"hello")
    assert choice.model_extra["token_ids"] == [*EMOJI.encode(), END]
    assert "token_ids" not in (harness.complete("hello").choices[0].model_extra or {})
    with pytest.raises(openai.BadRequestError, match="return_token_ids needs stream=false"):
        harness.complete("hello", stream=True, extra_body={"return_token_ids": True})


def test_a_chat_answer_is_a_turn_of_the_assistant(serve: Serve) -> None:
    answer = serve().chat()
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == EMOJI


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_a_stream_joins_to_the_whole_answer_whatever_bytes_a_block_ends_in(
    serve: Serve, width: int
) -> None:
    harness = serve(lambda: ScriptedEngine(width=width))
    parts = [chunk.choices[0].delta.content or "" for chunk in harness.chat(stream=True)]
    assert "".join(parts) == EMOJI == harness.chat().choices[0].message.content
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
    assert len(parts) > 3


def test_a_completion_streams_without_an_opening_chunk(serve: Serve) -> None:
    chunks = list(serve().complete(stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == EMOJI
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "stop"
    ]
    assert chunks[-1].model_extra["distill"]["num_target_calls"] > 0


def test_usage_is_the_last_chunk_and_only_when_asked(serve: Serve) -> None:
    harness = serve()
    *parts, last = harness.chat(stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.completion_tokens == len(EMOJI.encode()) + 1
    assert all(part.usage is None for part in parts)
    assert all(chunk.choices for chunk in harness.chat(stream=True))


def test_the_wire_is_server_sent_events_closed_by_done(serve: Serve) -> None:
    body = {"model": "pair", "prompt": "x", "stream": True, "max_tokens": 4}
    response = serve().http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all("usage" not in json.loads(e.removeprefix("data: ")) for e in events[:-2])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4, 40])
def test_a_stop_string_over_several_tokens_leaks_nothing(
    serve: Serve, width: int, stream: bool
) -> None:
    harness = serve(lambda: ScriptedEngine("the quick brown fox jumps", width=width))
    answer = harness.complete(stop=["own fox", "zzz"], stream=stream)
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "the quick br"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_held_text_is_sent_at_the_end_when_the_stop_string_never_completes(serve: Serve) -> None:
    harness = serve(lambda: ScriptedEngine("the quick brown f"))
    chunks = list(harness.complete(stop="own fox", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "the quick brown f"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_cut_inside_a_character_reads_the_same_streamed_and_whole(
    serve: Serve, stream: bool
) -> None:
    answer = serve().complete(max_tokens=3, stream=stream, stream_options=None)
    text = "".join(chunk.choices[0].text for chunk in (answer if stream else [answer]))
    assert text == "Gr\N{REPLACEMENT CHARACTER}"


def test_usage_counts_the_tokens_that_were_emitted_not_asked_for(serve: Serve) -> None:
    harness = serve(lambda: ScriptedEngine("abcdefgh", width=5))
    answer = harness.complete(max_tokens=6)
    assert answer.usage.completion_tokens == 6
    assert answer.choices[0].text == "abcdef"
    assert answer.choices[0].finish_reason == "length"


# ---------------------------------------------------------------- what reaches the engine


def test_the_engine_is_asked_for_what_the_client_sent(serve: Serve) -> None:
    harness = serve()
    harness.complete([104, 105], seed=3, stop="x", extra_body={"num_draft_tokens": 1})
    request = harness.engines[0].requests[0]
    assert list(request.prompt_token_ids) == [104, 105]
    assert request.seed == 3
    assert request.stop_strings == ("x",)
    assert request.stop_token_ids == frozenset({END})
    assert request.num_draft_tokens == 1
    assert request.max_new_tokens == 1000


def test_a_request_without_a_seed_gets_a_fresh_one_and_is_told(serve: Serve) -> None:
    harness = serve()
    seeds = [harness.complete().model_extra["distill"]["seed"] for _ in range(2)]
    assert seeds == [request.seed for request in harness.engines[0].requests]
    assert seeds[0] != seeds[1]


def test_a_chat_answer_may_fill_the_context(serve: Serve) -> None:
    harness = serve(max_length=100)
    harness.chat("hi")
    request = harness.engines[0].requests[0]
    assert request.max_new_tokens == 100 - len("user: hi\n")


def test_parallel_requests_are_decoded_together_and_not_mixed_up(serve: Serve) -> None:
    class Echo(ScriptedEngine):
        def add(self, request: DecodeRequest) -> int:
            handle = super().add(request)
            self.rows[handle].script = [*request.prompt_token_ids, END]
            return handle

    gate = threading.Semaphore(0)
    harness = serve(lambda: Echo(pace=gate, width=2))
    texts = [f"conversation {number} {EMOJI}" for number in range(7)]
    answers: dict[str, str] = {}

    def ask(text: str) -> None:
        answers[text] = harness.complete(text).choices[0].text

    threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    wait_for_metric(harness, WAITING, lambda n: n >= 3)
    gate.release(10_000)
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert answers == {text: text for text in texts}
    assert harness.engines[0].most_at_once == 4


# ---------------------------------------------------------------- refusals


def test_an_unknown_model_is_a_404(serve: Serve) -> None:
    harness = serve()
    with pytest.raises(openai.NotFoundError) as caught:
        harness.complete(model="other")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        harness.client.models.retrieve("org/other")


def test_the_served_model_is_listed(serve: Serve) -> None:
    harness = serve()
    assert [model.id for model in harness.client.models.list()] == ["pair"]
    assert harness.client.models.retrieve("pair").model_extra == {"max_model_len": 50_000}


def test_unsupported_parameters_are_a_400_that_names_them(serve: Serve) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        serve().chat(n=2)
    assert (caught.value.param, caught.value.code) == ("n", "unsupported_parameter")


def test_a_prompt_and_budget_above_the_context_are_a_400(serve: Serve) -> None:
    harness = serve(max_length=20)
    for prompt, budget, param in (("x" * 10, 11, "max_tokens"), ("x" * 20, 1, "prompt")):
        with pytest.raises(openai.BadRequestError) as caught:
            harness.complete(prompt, max_tokens=budget)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == param
        assert "20 tokens" in str(caught.value)
    assert harness.complete("x" * 10, max_tokens=10).usage.total_tokens == 20
    with pytest.raises(openai.BadRequestError, match="at least 1 more"):
        harness.chat("x" * 20)


def test_a_minimum_above_the_context_is_named_as_what_to_lower(serve: Serve) -> None:
    with pytest.raises(
        openai.BadRequestError, match=r"at least 30 more .* lower min_tokens"
    ) as caught:
        serve(max_length=30).chat("x", extra_body={"min_tokens": 30})
    assert (caught.value.param, caught.value.code) == ("min_tokens", "context_length_exceeded")


def test_the_server_answers_while_a_prompt_is_tokenized_and_tokenizes_one_at_a_time(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = serve()
    busy, go = threading.Semaphore(0), threading.Semaphore(0)
    num_inside = 0
    most: list[int] = []
    original = ByteTokenizer.__call__

    def slow(self: ByteTokenizer, text: str) -> dict[str, list[int]]:
        nonlocal num_inside
        num_inside += 1
        most.append(num_inside)
        busy.release()
        assert go.acquire(timeout=TIMEOUT_S)
        num_inside -= 1
        return original(self, text)

    monkeypatch.setattr(ByteTokenizer, "__call__", slow)
    threads = [threading.Thread(target=harness.complete) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert busy.acquire(timeout=TIMEOUT_S)
    assert harness.http.get("/health").status_code == 200
    go.release(3)
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert most == [1, 1, 1]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"temperature": 1e-5}, "temperature"),
        ({"extra_body": {"repetition_penalty": 200}}, "repetition_penalty"),
        ({"extra_body": {"num_draft_tokens": 3}}, "num_draft_tokens"),
    ],
)
def test_what_the_pair_cannot_take_is_a_400(
    serve: Serve, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        serve().complete(**options)
    assert caught.value.param == param


def test_a_chat_without_a_template_is_told_where_to_go(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", None)
    with pytest.raises(openai.BadRequestError, match="/v1/completions"):
        serve().chat()


def test_messages_that_the_template_refuses_are_a_400(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jinja2.exceptions import TemplateError

    def refuse(turns: Any, **_: Any) -> Any:
        raise TemplateError("roles must alternate")

    monkeypatch.setattr(TOKENIZER, "apply_chat_template", refuse)
    with pytest.raises(openai.BadRequestError, match="roles must alternate"):
        serve().chat()


def test_a_wrong_key_is_a_401_and_the_probes_need_none(serve: Serve) -> None:
    harness = serve(api_key="secret")
    for key in ("wrong", "secre"):
        with (
            closing(harness.client_with(key)) as client,
            pytest.raises(openai.AuthenticationError) as caught,
        ):
            client.models.list()
        assert caught.value.code == "invalid_api_key"
    assert harness.http.get("/v1/models").status_code == 401
    basic = {"authorization": "Basic secret"}
    assert harness.http.get("/v1/models", headers=basic).status_code == 401
    assert harness.http.get("/health").status_code == 200
    assert harness.http.get("/metrics").status_code == 200
    assert harness.complete().choices[0].text == EMOJI


def test_unknown_paths_and_methods_have_error_bodies_too(serve: Serve) -> None:
    http = serve().http
    for response, status in ((http.get("/v1/nothing"), 404), (http.get("/v1/completions"), 405)):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_above_the_limit_is_a_413(serve: Serve) -> None:
    response = serve(max_body_bytes=100).http.post("/v1/completions", content=b"x" * 101)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_a_full_queue_is_a_429_with_retry_after(serve: Serve) -> None:
    gate = threading.Semaphore(0)
    harness = serve(lambda: ScriptedEngine(pace=gate), max_batch_size=1, max_waiting=1)
    answers: list[str] = []

    def ask() -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.append(harness.complete().choices[0].text))
        thread.start()
        return thread

    threads = [ask()]
    wait_until(lambda: bool(harness.engines[0].requests))
    threads.append(ask())
    wait_for_metric(harness, WAITING, lambda n: n == 1)
    with pytest.raises(openai.RateLimitError) as caught:
        harness.complete()
    assert caught.value.code == "queue_full"
    assert caught.value.response.headers["retry-after"] == "1"
    gate.release(1000)
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert answers == [EMOJI, EMOJI]


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_the_engine_refuses_is_a_400(serve: Serve, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="too long for the draft"):
        serve().complete("long", stream=stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["crash", "poison"])
def test_an_engine_that_fails_on_a_request_fails_that_request_only(
    serve: Serve, prompt: str, stream: bool
) -> None:
    harness = serve()
    with pytest.raises(openai.InternalServerError) as caught:
        harness.complete(prompt, stream=stream)
    assert caught.value.code == "error"
    assert "poison" not in str(caught.value)
    assert harness.complete().choices[0].text == EMOJI
    assert harness.http.get("/health").status_code == 200
    # An engine that raised in the middle of a step isn't used again.
    assert len(harness.engines) == (2 if prompt == "poison" else 1)


def fail_at(num_steps: int) -> Callable[[], ScriptedEngine]:
    """Engines of which the first raises at that step, whoever is running."""
    made: list[ScriptedEngine] = []

    class Fragile(ScriptedEngine):
        def step(self) -> list[RowUpdate]:
            if self.num_steps == num_steps and self is made[0]:
                raise RuntimeError("out of memory")
            return super().step()

    def make() -> ScriptedEngine:
        made.append(Fragile())
        return made[-1]

    return make


def test_a_failure_after_the_first_words_ends_the_stream_with_an_error(serve: Serve) -> None:
    harness = serve(fail_at(2))
    with pytest.raises(openai.APIError, match="engine failed"):
        list(harness.complete(stream=True))
    metrics = harness.http.get("/metrics").text
    assert 'request_success_total{finished_reason="error",model_name="pair"} 1.0' in metrics
    assert 'generation_tokens_total{model_name="pair"} 6.0' in metrics


class Listener:
    """Collects one request's events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._done = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Finished | Failed):
            self._done.set()

    @property
    def end(self) -> Event:
        assert self._done.wait(TIMEOUT_S)
        return self.events[-1]

    @property
    def text(self) -> str:
        assert isinstance(self.end, Finished)
        return "".join(event.text for event in self.events if not isinstance(event, Failed))


def run_together(
    make_engine: Callable[[], ScriptedEngine], prompts: list[str]
) -> tuple[list[Listener], Scheduler]:
    """Run prompts in one batch from the first step on, to their ends."""
    scheduler = Scheduler(make_engine, TOKENIZER, max_batch_size=8, max_waiting=8)
    gate = threading.Event()
    listeners = [Listener() for _ in prompts]

    def hold(event: Event) -> None:
        assert gate.wait(TIMEOUT_S)

    scheduler.start()
    with closing(scheduler):
        # The first one's refusal keeps the scheduler's thread busy until all others wait.
        scheduler.submit(request_for("long"), hold)
        for prompt, listener in zip(prompts, listeners, strict=True):
            scheduler.submit(request_for(prompt), listener)
        gate.set()
        for listener in listeners:
            assert listener.end
    return listeners, scheduler


def test_a_request_that_breaks_a_step_does_not_take_its_neighbours_along() -> None:
    listeners, _ = run_together(ScriptedEngine, ["one", "poison", "two"])
    assert [type(listener.end) for listener in listeners] == [Finished, Failed, Finished]
    assert listeners[0].text == listeners[2].text == EMOJI


def test_rows_that_run_again_tell_nothing_twice() -> None:
    listeners, scheduler = run_together(fail_at(4), ["one", "two"])
    assert [listener.text for listener in listeners] == [EMOJI, EMOJI]
    num_tokens = len(EMOJI.encode()) + 1
    told = scheduler.snapshot()
    assert told.num_generated_tokens == 2 * num_tokens
    assert told.num_prompt_tokens == len("onetwo")
    assert told.stats.num_emitted == 2 * num_tokens


def test_a_row_that_goes_another_way_when_run_again_is_failed() -> None:
    first = fail_at(1)
    made: list[ScriptedEngine] = []

    def make() -> ScriptedEngine:
        made.append(first())
        if len(made) > 1:
            made[-1].answer = "other words"
        return made[-1]

    listeners, _ = run_together(make, ["one", "two"])
    assert all(isinstance(listener.end, Failed) for listener in listeners)
    assert made[1].num_cancelled == 2


def test_a_server_whose_engine_cannot_be_made_again_says_so(serve: Serve) -> None:
    made: list[ScriptedEngine] = []

    def make() -> ScriptedEngine:
        if made:
            raise MemoryError("no room for a cache")
        made.append(ScriptedEngine())
        return made[-1]

    harness = serve(make)
    with pytest.raises(openai.InternalServerError):
        harness.complete("poison")
    wait_until(lambda: harness.http.get("/health").status_code == 503)
    with pytest.raises(openai.InternalServerError) as caught:
        harness.complete()
    assert caught.value.status_code == 503
    assert caught.value.code == "closed"


def test_an_unforeseen_error_is_a_500_with_a_body(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = serve()

    def explode(*_: Any) -> Any:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("distill.server.app.build_request", explode)
    with pytest.raises(openai.InternalServerError) as caught:
        harness.complete()
    assert caught.value.code == "error"
    assert "secret" not in str(caught.value)


# ---------------------------------------------------------------- clients that leave


def send(harness: Harness, **body: Any) -> socket.socket:
    """Post a completion from a socket that the caller closes when it has had enough."""
    content = json.dumps({"model": "pair", **body}).encode()
    connection = socket.create_connection(("127.0.0.1", harness.server.port), timeout=TIMEOUT_S)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_generation(serve: Serve, stream: bool) -> None:
    gate = threading.Semaphore(3)
    harness = serve(lambda: ScriptedEngine(pace=gate))
    engine = harness.engines[0]
    with send(harness, prompt="endless", stream=stream, max_tokens=40_000) as connection:
        if stream:
            received = b""
            while received.count(b"data: ") < 3:
                received += connection.recv(4096)
        wait_until(lambda: engine.num_steps == 3)
    # One step at a time until the departure has come through; then nothing is left to step.
    for _ in range(1000):
        gate.release()
        if engine.cancelled.wait(0.01):
            break
    assert engine.num_cancelled == 1
    assert not engine.rows
    num_steps = engine.num_steps
    assert num_steps < 1000
    engine.pace = None
    assert harness.complete(max_tokens=3).usage.completion_tokens == 3
    assert engine.num_steps == num_steps + 1
    assert metric(harness, ABORTED) == 1


def test_a_client_that_leaves_the_queue_never_reaches_the_engine(serve: Serve) -> None:
    gate = threading.Semaphore(0)
    harness = serve(lambda: ScriptedEngine(pace=gate), max_batch_size=1)
    engine = harness.engines[0]
    with send(harness, prompt="endless", max_tokens=40_000):
        wait_until(lambda: bool(engine.requests))
        with send(harness, prompt="second"):
            wait_for_metric(harness, WAITING, lambda n: n == 1)
        # The scheduler looks between steps, so the first request goes on until it has looked.
        while metric(harness, ABORTED) == 0:
            gate.release()
    gate.release(1000)
    wait_for_metric(harness, ABORTED, lambda n: n == 2)
    assert len(engine.requests) == 1


def test_a_client_that_leaves_while_it_sends_is_forgotten(serve: Serve) -> None:
    harness = serve()
    with socket.create_connection(("127.0.0.1", harness.server.port), timeout=TIMEOUT_S) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert harness.complete().choices[0].text == EMOJI
    assert len(harness.engines[0].requests) == 1


def test_closing_the_server_ends_open_answers(serve: Serve) -> None:
    gate = threading.Semaphore(3)
    harness = serve(lambda: ScriptedEngine(pace=gate))
    stream = harness.complete("endless", max_tokens=40_000, stream=True)
    assert next(iter(stream)).choices[0].text
    closer = threading.Thread(target=harness.server.close)
    closer.start()
    gate.release(10_000)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    closer.join(TIMEOUT_S)
    assert not closer.is_alive()
    harness.server.close()
    with pytest.raises(openai.APIConnectionError):
        harness.complete()


# ---------------------------------------------------------------- metrics


def test_metrics_count_what_was_emitted_under_the_names_of_vllm(serve: Serve) -> None:
    harness = serve(lambda: ScriptedEngine("abcdefgh", width=3))
    harness.complete("hello")
    list(harness.complete("hello", stream=True))
    text = harness.http.get("/metrics").text
    for line in (
        'vllm:prompt_tokens_total{model_name="pair"} 10.0',
        'vllm:generation_tokens_total{model_name="pair"} 18.0',
        'vllm:request_success_total{finished_reason="stop",model_name="pair"} 2.0',
        'vllm:num_requests_running{model_name="pair"} 0.0',
        'vllm:spec_decode_num_drafts_total{model_name="pair"} 6.0',
        'vllm:spec_decode_num_draft_tokens_total{model_name="pair"} 12.0',
        'vllm:spec_decode_num_accepted_tokens_total{model_name="pair"} 12.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="pair",position="1"} 6.0',
        'vllm:time_to_first_token_seconds_count{model_name="pair"} 2.0',
        'vllm:e2e_request_latency_seconds_count{model_name="pair"} 2.0',
    ):
        assert line in text


def metric(harness: Harness, name: str) -> float:
    for line in harness.http.get("/metrics").text.splitlines():
        if line.startswith(f"vllm:{name} "):
            return float(line.rsplit(" ", 1)[1])
    return float("nan")


def wait_until(is_true: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(TIMEOUT_S * 100)):
        if is_true():
            return
        pause.wait(0.01)
    raise AssertionError("it never came true")


def wait_for_metric(harness: Harness, name: str, is_met: Callable[[float], bool]) -> None:
    wait_until(lambda: is_met(metric(harness, name)))


# ---------------------------------------------------------------- the parts alone


def test_a_port_in_use_is_an_error_with_the_way_out(serve: Serve) -> None:
    harness = serve()
    app = create_app(harness.pair, harness.scheduler)
    with pytest.raises(ServerError, match="port 0 takes a free one"):
        RunningServer(app, harness.scheduler, host="127.0.0.1", port=harness.server.port)


def test_a_server_that_never_started_closes_its_socket() -> None:
    scheduler = Scheduler(ScriptedEngine, TOKENIZER, max_batch_size=1, max_waiting=1)
    pair = ServedPair("pair", TOKENIZER, frozenset(), 257, 100, 2)
    with RunningServer(create_app(pair, scheduler), scheduler, host="0.0.0.0", port=0) as server:
        # Where it can be reached, not what it listens on.
        assert server.base_url == f"http://127.0.0.1:{server.port}/v1"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port), timeout=1)
    with pytest.raises(ServerClosedError):
        scheduler.submit(request_for("x"), lambda event: None)


def test_an_address_of_version_6_is_bracketed() -> None:
    scheduler = Scheduler(ScriptedEngine, TOKENIZER, max_batch_size=1, max_waiting=1)
    pair = ServedPair("pair", TOKENIZER, frozenset(), 257, 100, 2)
    try:
        server = RunningServer(create_app(pair, scheduler), scheduler, host="::1", port=0)
    except ServerError:
        pytest.skip("this machine has no IPv6")
    with server:
        assert server.url == f"http://[::1]:{server.port}"


def request_for(prompt: str, **options: Any) -> DecodeRequest:
    from distill.sampling import SamplingConfig

    return DecodeRequest(
        prompt_token_ids=list(prompt.encode()),
        max_new_tokens=100,
        sampling=SamplingConfig(),
        seed=0,
        stop_token_ids=frozenset({END}),
        **options,
    )


def test_a_burst_on_an_idle_server_is_refused_only_beyond_the_batch_and_the_queue() -> None:
    gate = threading.Semaphore(0)
    scheduler = Scheduler(
        lambda: ScriptedEngine(pace=gate), TOKENIZER, max_batch_size=3, max_waiting=2
    )
    scheduler.start()
    listeners = [Listener() for _ in range(5)]
    with closing(scheduler):
        for listener in listeners:
            scheduler.submit(request_for("hi"), listener)
        with pytest.raises(QueueFullError, match="5 requests run or wait already"):
            scheduler.submit(request_for("hi"), Listener())
        gate.release(1000)
        assert [listener.text for listener in listeners] == [EMOJI] * 5
        again = Listener()
        scheduler.submit(request_for("hi"), again)
        assert again.text == EMOJI


def test_the_whole_text_is_the_engines_whatever_was_sent() -> None:
    class Changing(ScriptedEngine):
        def result(self, handle: int) -> DecodeResult:
            return replace(super().result(handle), text="other words")

    (listener,), _ = run_together(Changing, ["hi"])
    assert isinstance(listener.end, Finished)
    assert listener.end.whole_text == "other words"
    assert listener.text == EMOJI


def test_a_listener_that_is_gone_cancels_its_request_and_hurts_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = ScriptedEngine()
    scheduler = Scheduler(lambda: engine, TOKENIZER, max_batch_size=2, max_waiting=2)
    listener = Listener()

    def gone(event: Event) -> None:
        raise RuntimeError("Event loop is closed")

    scheduler.start()
    with closing(scheduler), caplog.at_level(logging.INFO):
        scheduler.submit(request_for("endless", request_id="lost"), gone)
        scheduler.submit(request_for("hi"), listener)
        assert listener.text == EMOJI
        assert engine.cancelled.wait(TIMEOUT_S)
    assert "Nobody listens to request lost" in caplog.text


def test_text_that_changed_after_it_was_sent_is_read_on_to_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream = TextStream(TOKENIZER, ["now"])
    assert stream.push(b"do n") == "do "
    assert stream.finish("don't", b"ot") == "not"
    assert stream.text == "do not"
    assert "changed after its start was sent" in caplog.text


def test_text_that_is_read_on_ends_before_a_stop_string() -> None:
    stream = TextStream(TOKENIZER, ["now"])
    assert stream.push(b"do n") == "do "
    assert stream.finish("don't", b"o! now and") == "no! "
    stream = TextStream(TOKENIZER)
    assert stream.push(b"do ") == "do "
    assert stream.finish("don't", [0xF0]) == "\N{REPLACEMENT CHARACTER}"


def test_bytes_that_are_no_character_do_not_hide_what_follows() -> None:
    stream = TextStream(TOKENIZER)
    assert stream.push([0xF0, 0x9F]) == ""
    assert stream.push(b"ok") == "\N{REPLACEMENT CHARACTER}ok"
    assert stream.push([END]) == ""
    assert stream.push(b"!") == "!"


def test_a_stop_string_is_held_back_by_its_longest_start() -> None:
    stream = TextStream(TOKENIZER, ["abc", "b!"])
    assert stream.push(b"xxab") == "xx"
    assert stream.push(b"a") == "ab"
    assert stream.push(b"bc and more") == ""
    assert stream.finish("xxab") == ""


def test_a_token_is_read_with_the_one_before_it() -> None:
    class Words:
        """Drops the space at the start of what it decodes, as sentencepiece does."""

        words = ("▁the", "▁fox", "es", "<s>")

        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            text = "".join(self.words[token] for token in token_ids if token != 3)
            return text.replace("▁", " ").removeprefix(" ")

    stream = TextStream(Words())
    assert [stream.push([token]) for token in (0, 3, 1, 2)] == ["the", "", " fox", "es"]
