"""A server that misbehaves in every way seen in the field: what happens to the row, and to the run.

Nothing here waits: the pauses between tries are recorded, not slept.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from distill.artifacts import Artifact, ArtifactStore
from distill.backends.base import Completion, Unanswered
from distill.backends.http import HttpBackend
from distill.backends.http_client import by_rendezvous
from distill.backends.settings import HttpSettings
from distill.errors import BackendUnavailableError, ConfigError, SamplingError
from distill.models import LoadedModel, ModelConfig, load_target
from distill.models.facts import ModelFacts, read_facts
from distill.sampling import SamplingConfig
from distill.stages.generate import GenerateConfig, generate
from tests.http_helpers import Reply, ScriptedServer, distill_server, vllm_answer

PROMPTS = ([5, 6, 7], [8, 9, 10, 11])
ANSWER = [20, 21, 22]
NUM_NEW = 3
GREEDY = SamplingConfig(temperature=0.0)
Serve = Callable[..., ScriptedServer]


@pytest.fixture(scope="module")
def config(tiny_pair_dirs: tuple[Path, Path]) -> ModelConfig:
    return ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu")


@pytest.fixture(scope="module")
def facts(config: ModelConfig) -> ModelFacts:
    return read_facts(config)


@pytest.fixture(scope="module")
def target(config: ModelConfig) -> LoadedModel:
    return load_target(config)


@pytest.fixture
def serve() -> Iterator[Serve]:
    running: list[ScriptedServer] = []

    def start(answer: Callable[[int, Any], Reply], **options: Any) -> ScriptedServer:
        running.append(ScriptedServer(answer, **options))
        return running[-1]

    yield start
    for server in running:
        server.close()


class Opener:
    """Opens a backend on servers; ``pauses`` are the seconds it would have waited."""

    def __init__(self, config: ModelConfig, facts: ModelFacts) -> None:
        self.config, self.facts = config, facts
        self.pauses: list[float] = []

    def __call__(self, *servers: ScriptedServer | str, **settings: Any) -> HttpBackend:
        urls = tuple(one if isinstance(one, str) else one.url for one in servers)

        async def pause(seconds: float) -> None:
            self.pauses.append(seconds)
            await asyncio.sleep(0)

        return HttpBackend(
            self.config, self.facts, HttpSettings(base_urls=urls, **settings), pause=pause
        )


@pytest.fixture
def opened(config: ModelConfig, facts: ModelFacts) -> Opener:
    return Opener(config, facts)


def ask(
    backend: HttpBackend,
    sampling: SamplingConfig = GREEDY,
    *,
    prompts: Any = PROMPTS,
    num_new: int = NUM_NEW,
) -> list[Completion | Unanswered]:
    found = list(
        backend.generate(prompts, sampling, max_new_tokens=num_new, seeds=range(len(prompts)))
    )
    return sorted(found, key=lambda outcome: (outcome.prompt_index, outcome.sample_index))


def good(_: int, body: Any) -> Reply:
    return Reply(vllm_answer(ANSWER, body["prompt"]))


def first(*replies: Reply, then: Callable[[int, Any], Reply] = good) -> Callable[..., Reply]:
    return lambda number, body: replies[number] if number < len(replies) else then(number, body)


def ids(outcomes: list[Completion | Unanswered]) -> list[tuple[int, ...]]:
    assert all(isinstance(outcome, Completion) for outcome in outcomes), outcomes
    return [outcome.token_ids for outcome in outcomes]  # type: ignore[union-attr]


def reason(outcome: Completion | Unanswered, status: str) -> str:
    assert isinstance(outcome, Unanswered), outcome
    assert outcome.status == status
    return outcome.reason


def stored_ids(artifact: Artifact) -> list[list[int]]:
    table = pq.read_table(artifact.path / "completions.parquet")
    found: list[list[int]] = table.column("completion_token_ids").to_pylist()
    return found


def free_url() -> str:
    """An address where nobody listens: a server that was, and is gone."""
    server = ScriptedServer(good)
    server.close()
    return server.url


# ---------------------------------------------------------------- what passes is asked again


@pytest.mark.parametrize(
    "trouble",
    [
        Reply({"error": {"message": "out of memory"}}, status=500),
        Reply(raw=b"<html>Bad Gateway</html>", status=502),
        Reply({"error": "loading"}, status=503),
        Reply(vllm_answer(ANSWER, [5]), is_cut=True),
        Reply(raw=b'{"choices": [{"te'),
        Reply(vllm_answer([], [5, 6, 7], finish="abort")),
    ],
    ids=["500", "502 html", "503", "cut in mid-body", "malformed JSON", "aborted"],
)
def test_passing_trouble_is_asked_again_with_the_same_seed(
    serve: Serve, opened: Opener, trouble: Reply
) -> None:
    server = serve(first(trouble, trouble))
    assert ids(ask(opened(server), prompts=PROMPTS[:1])) == [tuple(ANSWER)]
    assert len(server.requests) == 3
    assert all(request.body == server.requests[0].body for request in server.requests)
    assert len(opened.pauses) == 2


def test_a_slow_server_is_given_up_on_and_asked_again(serve: Serve, opened: Opener) -> None:
    server = serve(first(Reply(is_silent=True)))
    backend = opened(server, request_timeout_s=0.05)
    assert ids(ask(backend, prompts=PROMPTS[:1])) == [tuple(ANSWER)]
    assert len(server.requests) == 2


def test_waits_grow_and_are_drawn_at_random_below_their_bound(serve: Serve, opened: Opener) -> None:
    server = serve(lambda *_: Reply(status=500))
    ask(opened(server, backoff_s=1.0, max_wait_s=5.0, max_tries=9), prompts=PROMPTS[:1])
    bounds = [1.0, 2.0, 4.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    assert all(0 <= p <= bound for p, bound in zip(opened.pauses, bounds, strict=True))
    assert len(set(opened.pauses)) == len(bounds)


def test_a_busy_server_is_left_alone_for_as_long_as_it_asks(serve: Serve, opened: Opener) -> None:
    busy = Reply({"error": {"message": "full"}}, status=429, headers={"retry-after": "7"})
    server, other = serve(first(busy)), serve(good)
    backend = opened(server, other, backoff_s=0.001)
    mine = [[n, 6, 7] for n in range(20, 40)]
    assert len(set(ids(ask(backend, prompts=mine)))) == 1
    assert [pause for pause in opened.pauses if pause >= 7.0] == opened.pauses
    # Busy is not down: the row went back to its own server.
    assert len(opened.pauses) == 1
    assert len(server.requests) + len(other.requests) == len(mine) + 1
    assert len({str(r.body["prompt"]) for r in server.requests}) == len(server.requests) - 1


def test_a_server_that_asks_for_an_hour_is_not_waited_for(serve: Serve, opened: Opener) -> None:
    server = serve(lambda *_: Reply(status=429, headers={"retry-after": "3600"}))
    (outcome,) = ask(opened(server, max_wait_s=60), prompts=PROMPTS[:1])
    assert "429" in reason(outcome, "failed")
    assert opened.pauses == []


def test_a_row_that_fails_every_time_has_failed_and_the_others_go_on(
    serve: Serve, opened: Opener
) -> None:
    def answer(number: int, body: Any) -> Reply:
        return (
            Reply(raw=b"boom", status=500) if body["prompt"] == PROMPTS[0] else good(number, body)
        )

    broken, fine = ask(opened(serve(answer), max_tries=3))
    assert reason(broken, "failed").startswith("no answer after 3 tries; last: http://127.0.0.1:")
    assert reason(broken, "failed").endswith("HTTP 500: boom")
    assert ids([fine]) == [tuple(ANSWER)]


# ---------------------------------------------------------------- what stays is not


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_row_is_rejected_with_the_servers_words_and_not_asked_again(
    serve: Serve, opened: Opener, status: int
) -> None:
    server = serve(first(Reply({"error": {"message": "prompt is too odd"}}, status=status)))
    (outcome,) = ask(opened(server), prompts=PROMPTS[:1])
    assert reason(outcome, "rejected").endswith(f"HTTP {status}: prompt is too odd")
    assert len(server.requests) == 1
    assert opened.pauses == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids": [20, 300, 22]}, "token 1 of the answer is 300; the target's ids are 0 to"),
        ({"token_ids": [-1, 21, 22]}, "token 0 of the answer is -1"),
        ({"token_ids": [20, 21]}, "2 token ids came, the server counts 3"),
        ({"token_ids": []}, "0 token ids came, the server counts 3"),
        ({"token_ids": None}, "the server gave text and no token ids"),
        ({"prompt_token_ids": [1, 5, 6, 7]}, "read another prompt (4 tokens) than was sent (3)"),
        ({"finish_reason": "stop"}, "stopped at a token (22) that is none of the target's stop"),
        ({"finish_reason": "stop", "stop_reason": 9}, "stopped at a token (9) that is none"),
        ({"token_ids": ["20", "21", "22"]}, "choices.0.token_ids.0: Input should be a valid int"),
    ],
    ids=[
        "id above the vocabulary",
        "negative id",
        "fewer ids than counted",
        "no ids but counted",
        "no ids at all",
        "a second beginning of text",
        "another model's stop token",
        "named stop token of another model",
        "ids as text",
    ],
)
def test_ids_that_cannot_be_trusted_are_rejected_with_the_reason(
    serve: Serve, opened: Opener, changes: dict[str, Any], said: str
) -> None:
    server = serve(lambda _, body: Reply(vllm_answer(ANSWER, body["prompt"], **changes)))
    (outcome,) = ask(opened(server), prompts=PROMPTS[:1])
    assert said in reason(outcome, "rejected")
    assert len(server.requests) == 1


def test_an_empty_answer_is_rejected(serve: Serve, opened: Opener) -> None:
    server = serve(lambda _, body: Reply(vllm_answer([], body["prompt"])))
    (outcome,) = ask(opened(server), prompts=PROMPTS[:1])
    assert reason(outcome, "rejected") == "the server's answer is empty"


def test_one_question_with_two_answers_is_rejected(serve: Serve, opened: Opener) -> None:
    def twice(_: int, body: Any) -> Reply:
        answer = vllm_answer(ANSWER, body["prompt"])
        return Reply(answer | {"choices": answer["choices"] * 2})

    (outcome,) = ask(opened(serve(twice)), prompts=PROMPTS[:1])
    assert reason(outcome, "rejected") == "2 choices came for one question"


def test_an_answer_that_was_made_twice_is_given_once(serve: Serve, opened: Opener) -> None:
    """The connection broke after the server's work: it works again, the caller sees one row."""
    server = serve(
        lambda number, body: Reply(vllm_answer(ANSWER, body["prompt"]), is_cut=number < 2)
    )
    outcomes = ask(opened(server))
    assert [outcome.prompt_index for outcome in outcomes] == [0, 1]
    assert len(server.requests) == 4


def test_what_goes_on_past_the_stop_token_or_the_budget_is_cut_there(
    serve: Serve, opened: Opener
) -> None:
    """What was drawn after a place cannot have changed what was drawn before it."""
    long = [20, 1, 22, 23]  # 1 is the target's stop token
    server = serve(lambda _, body: Reply(vllm_answer(long, body["prompt"])))
    (stopped,) = ask(opened(server), prompts=PROMPTS[:1], num_new=4)
    assert isinstance(stopped, Completion)
    assert (stopped.token_ids, stopped.finish_reason) == ((20, 1), "stop")
    (cut,) = ask(opened(server), prompts=PROMPTS[:1], num_new=1)
    assert isinstance(cut, Completion)
    assert (cut.token_ids, cut.finish_reason) == ((20,), "length")


def test_a_stop_token_that_was_counted_and_not_sent_is_put_back(
    serve: Serve, opened: Opener
) -> None:
    def answer(_: int, body: Any) -> Reply:
        said = vllm_answer(ANSWER, body["prompt"], finish="stop")
        said["usage"]["completion_tokens"] += 1
        return Reply(said)

    assert ids(ask(opened(serve(answer)), prompts=PROMPTS[:1], num_new=8)) == [(20, 21, 22, 1)]


# ---------------------------------------------------------------- servers that are gone


def test_a_dead_server_among_two_costs_nothing_but_its_warning(
    serve: Serve, opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    server, dead = serve(good), free_url()
    with caplog.at_level(logging.WARNING):
        backend = opened(dead, server)
    assert f"{dead} does not answer" in caplog.text
    prompts = [[n, 6, 7] for n in range(20, 60)]
    assert set(ids(ask(backend, prompts=prompts))) == {tuple(ANSWER)}
    assert len(server.requests) == len(prompts)


def test_rows_of_a_server_that_dies_move_to_the_other(serve: Serve, opened: Opener) -> None:
    one, other = serve(good), serve(good)
    backend = opened(one, other)
    prompts = [[n, 6, 7] for n in range(20, 60)]
    ask(backend, prompts=prompts)
    shares = len(one.requests), len(other.requests)
    assert min(shares) >= 4  # both had work
    assert sum(shares) == len(prompts)
    one.close()
    assert set(ids(ask(backend, prompts=prompts))) == {tuple(ANSWER)}
    assert len(other.requests) == shares[1] + len(prompts)


def test_after_a_failed_connection_the_very_next_server_is_asked(
    serve: Serve, opened: Opener
) -> None:
    servers = [serve(good) for _ in range(3)]
    backend = opened(*servers, max_tries=2)
    by_url = {server.url: server for server in servers}
    prompt = [20, 6, 7]
    key = hashlib.sha256(b"20,6,7").digest()
    first, second, third = (by_url[one.url] for one in by_rendezvous(key, backend._fleet.servers))
    first.close()
    assert ids(ask(backend, prompts=[prompt])) == [tuple(ANSWER)]
    assert (len(second.requests), len(third.requests)) == (1, 0)


def test_prompts_go_to_the_same_server_whatever_their_order(serve: Serve, opened: Opener) -> None:
    one, other = serve(good), serve(good)
    backend = opened(one, other)
    prompts = [[n, 6, 7] for n in range(20, 60)]

    def shares() -> list[set[str]]:
        return [{str(r.body["prompt"]) for r in server.requests} for server in (one, other)]

    ask(backend, prompts=prompts)
    before = shares()
    assert not before[0] & before[1]
    ask(backend, prompts=prompts[::-1])
    ask(opened(other, one), prompts=prompts[5:9])  # another run, the addresses written otherwise
    assert shares() == before


def test_a_run_that_nobody_answers_ends_at_once_and_names_every_address(opened: Opener) -> None:
    one, other = free_url(), free_url()
    with pytest.raises(BackendUnavailableError) as caught:
        opened(one, other, max_tries=3)
    assert one in str(caught.value)
    assert other in str(caught.value)
    assert "correct base_urls" in str(caught.value)
    assert caught.value.exit_code == 2
    assert len(opened.pauses) == 2


def test_a_server_that_is_still_loading_is_waited_for(serve: Serve, opened: Opener) -> None:
    server = serve(good, models=[])

    async def pause(_: float) -> None:
        server.models = [{"id": "target", "owned_by": "vllm"}]

    backend = HttpBackend(
        opened.config, opened.facts, HttpSettings(base_urls=(server.url,)), pause=pause
    )
    assert ids(ask(backend)) == [tuple(ANSWER)] * 2


def test_a_run_whose_servers_all_die_ends_instead_of_failing_every_row(
    serve: Serve, opened: Opener
) -> None:
    server = serve(good)
    backend = opened(server, max_tries=2)
    server.close()
    with pytest.raises(BackendUnavailableError, match=f"{server.url}: no connection"):
        ask(backend, prompts=[[n] for n in range(20, 60)])


def test_a_run_in_which_row_after_row_fails_ends(serve: Serve, opened: Opener) -> None:
    server = serve(lambda *_: Reply(raw=b"worker died", status=502))
    backend = opened(server, max_tries=2, give_up_after=5, concurrency=1)
    with pytest.raises(BackendUnavailableError, match="5 rows failed one after the other"):
        ask(backend, prompts=[[n] for n in range(20, 60)])
    assert len(server.requests) <= 2 * 2 * 5  # not 40 rows of two tries each


def test_an_abandoned_call_cancels_what_is_in_flight(serve: Serve, opened: Opener) -> None:
    server = serve(first(then=lambda n, body: good(n, body) if n == 0 else Reply(is_silent=True)))
    outcomes = opened(server, concurrency=2).generate(
        [[n] for n in range(20, 40)], GREEDY, max_new_tokens=3, seeds=range(20)
    )
    next(outcomes)
    outcomes.close()  # type: ignore[attr-defined]
    assert not any("distill-http" in thread.name for thread in threading.enumerate())
    assert len(server.requests) <= 3


def test_no_server_gets_more_than_its_share_at_once(serve: Serve, opened: Opener) -> None:
    both = threading.Barrier(2, timeout=5.0)

    def meet(number: int, body: Any) -> Reply:
        both.wait()  # nobody is answered before two are in flight
        return good(number, body)

    server = serve(meet)
    ask(opened(server, concurrency=2), prompts=[[n] for n in range(20, 40)])
    assert server.most_in_flight == 2


# ---------------------------------------------------------------- the wrong server


def test_another_model_is_refused_before_anything_is_asked(serve: Serve, opened: Opener) -> None:
    server = serve(good, model="org/another-7B")
    with pytest.raises(ConfigError) as caught:
        opened(server)
    assert "serves 'org/another-7B'; the config's target is" in str(caught.value)
    assert "`model: org/another-7B`" in str(caught.value)
    assert ids(ask(opened(server, model="org/another-7B"))) == [tuple(ANSWER)] * 2
    assert server.requests[0].body["model"] == "org/another-7B"
    with pytest.raises(ConfigError, match="not 'mine' as `model` says"):
        opened(server, model="mine")


@pytest.mark.parametrize(
    ("meta", "said"),
    [({"n_vocab": 32000}, "has 32000 token ids, the target"), ({"n_embd": 4096}, "is 4096 wide")],
)
def test_a_model_of_another_size_is_refused_where_the_server_tells(
    serve: Serve, opened: Opener, meta: dict[str, int], said: str
) -> None:
    entry = {"id": "target.gguf", "owned_by": "llamacpp", "meta": {"n_vocab": 300, "n_embd": 64}}
    opened(serve(good, models=[entry]))
    with pytest.raises(ConfigError, match=said):
        opened(serve(good, models=[entry | {"meta": meta}]))


def test_what_a_server_is_taken_for_is_in_the_log(
    serve: Serve, opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        opened(serve(good, owned_by="vllm"))
        opened(serve(good, owned_by="somebody"), server="sglang")
    assert "asked as a server of kind vllm (owned_by is 'vllm' in /v1/models)" in caplog.text
    assert "asked as a server of kind sglang (as the settings say)" in caplog.text


def test_an_unknown_server_is_refused_unless_text_is_allowed(serve: Serve, opened: Opener) -> None:
    server = serve(good, owned_by="somebody")
    with pytest.raises(BackendUnavailableError, match="allow_retokenized: true"):
        opened(server)
    opened(server, allow_retokenized=True)


def test_something_else_at_the_address_is_named(serve: Serve, opened: Opener) -> None:
    server = serve(good)
    server.models = "none"  # type: ignore[assignment]
    with pytest.raises(BackendUnavailableError, match="does not list models"):
        opened(server)


def test_a_sampling_setting_that_the_server_would_drop_is_refused_before_anything_is_asked(
    serve: Serve, opened: Opener
) -> None:
    server = serve(good, owned_by="somebody")
    backend = opened(server, allow_retokenized=True)
    with pytest.raises(SamplingError) as caught:
        ask(backend, SamplingConfig(top_k=40, min_p=0.1, presence_penalty=3.0))
    for part in ("top_k: 40", "min_p: 0.1", "presence_penalty: 3.0 (it takes -2 to 2)"):
        assert part in str(caught.value)
    assert "`backend: local`" in str(caught.value)
    assert server.requests == []


def test_a_prompt_that_only_the_server_is_too_short_for_is_one_rejected_row(
    serve: Serve, opened: Opener
) -> None:
    entry = {"id": "target", "owned_by": "vllm", "max_model_len": 6}
    server = serve(good, models=[entry])
    backend = opened(server)
    assert backend.info.max_length == 6
    too_long, fits = ask(backend, prompts=[[5] * 6, [5] * 4])
    assert "has 6 tokens, and the server's context is 6" in reason(too_long, "rejected")
    assert isinstance(fits, Completion)
    # What is left of the context, but for the token that scoring the answer takes.
    assert server.requests[0].body["max_tokens"] == 1


# ---------------------------------------------------------------- keys and proxies


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(
    serve: Serve,
    opened: Opener,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MY_KEY", "sesame-4711")
    reply = Reply({"error": {"message": "key sesame-4711 may not do this"}}, status=400)
    server = serve(lambda *_: reply)
    with caplog.at_level(logging.DEBUG):
        (outcome,) = ask(opened(server, api_key_env="MY_KEY"), prompts=PROMPTS[:1])
    for request in (*server.looks, *server.requests):
        assert request.headers["authorization"] == "Bearer sesame-4711"
    assert "key *** may not" in reason(outcome, "rejected")
    assert "sesame" not in caplog.text


def test_a_key_across_the_end_of_a_long_message_is_not_shown_in_part(
    serve: Serve, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sesame-4711")
    for before in range(285, 301):
        reply = Reply({"error": {"message": "x" * before + "sesame-4711"}}, status=400)
        server = serve(lambda *_, reply=reply: reply)
        (outcome,) = ask(opened(server, api_key_env="MY_KEY"), prompts=PROMPTS[:1])
        assert not set("sam-4711") & set(reason(outcome, "rejected").partition("400: ")[2])


def test_a_key_that_is_not_there_is_named_by_its_variable(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ConfigError, match="api_key_env names MY_KEY, which is not set"):
        opened("http://127.0.0.1:1", api_key_env="MY_KEY")


def test_a_wrong_key_ends_the_run_and_not_one_row(
    opened: Opener, target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "wrong")
    with distill_server(target, api_key="right") as server:
        with pytest.raises(BackendUnavailableError, match=r"HTTP 401.*the key in MY_KEY"):
            opened(server.url, api_key_env="MY_KEY")
        with pytest.raises(BackendUnavailableError, match=r"HTTP 401.*needs a key"):
            opened(server.url)
        monkeypatch.setenv("MY_KEY", "right")
        opened(server.url, api_key_env="MY_KEY")


def test_the_environments_proxy_is_used(
    serve: Serve, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = serve(good)
    for name in ("NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    monkeypatch.setenv("http_proxy", proxy.url)
    assert ids(ask(opened("http://far-away.invalid:8000"))) == [tuple(ANSWER)] * 2
    assert proxy.requests[0].path == "http://far-away.invalid:8000/v1/completions"


# ---------------------------------------------------------------- the whole stage


def test_a_stage_over_http_stores_the_rows_of_the_local_one(
    tmp_path: Path, config: ModelConfig, target: LoadedModel, tiny_corpus: Path
) -> None:
    settings = {
        "target": config,
        "corpus": {"path": tiny_corpus, "limit": 8},
        "samplings": [{"temperature": 1.0}, {"temperature": 0.0}],
        "max_new_tokens": 8,
        "target_store": "none",
    }
    store = ArtifactStore(tmp_path)
    with distill_server(target) as server:
        backend = {"kind": "http", "base_urls": [server.base_url]}
        over_http = generate(GenerateConfig.model_validate(settings | {"backend": backend}), store)
    local = generate(GenerateConfig.model_validate(settings), store)
    assert stored_ids(over_http) == stored_ids(local)
    assert server.base_url not in (over_http.path / "manifest.json").read_text()


def test_a_stage_goes_on_where_its_servers_died(
    tmp_path: Path, config: ModelConfig, target: LoadedModel, tiny_corpus: Path
) -> None:
    """The chunks before are kept; no address is in the fingerprint, so another server will do."""

    def stage_on(url: str) -> GenerateConfig:
        return GenerateConfig.model_validate(
            {
                "target": config,
                "corpus": {"path": tiny_corpus, "limit": 8},
                "max_new_tokens": 4,
                "chunk_size": 2,
                "target_store": "none",
                "backend": {"kind": "http", "base_urls": [url], "max_tries": 1},
            }
        )

    store = ArtifactStore(tmp_path)
    answered = threading.Event()

    def dies(number: int, body: Any) -> Reply:
        if number >= 4:
            answered.set()
            return Reply(status=404)
        return Reply(vllm_answer([20] * 4, body["prompt"]))

    server = ScriptedServer(dies)
    try:
        with pytest.raises(BackendUnavailableError, match="HTTP 404"):
            generate(stage_on(server.url), store)
    finally:
        server.close()
    assert answered.is_set()
    with distill_server(target) as healthy:
        artifact = generate(stage_on(healthy.url), store)
    rows = stored_ids(artifact)
    assert len(rows) == 8
    assert rows.count([20] * 4) == 4
    assert artifact.manifest.metrics["num_chunks_resumed"] == 2
