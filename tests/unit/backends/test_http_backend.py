"""The http backend where servers behave: text without ids, log-probabilities, scores, settings."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.backends.base import Completion, Scores, Unanswered, Unscored
from distill.backends.http import HttpBackend
from distill.backends.http_answers import accept
from distill.backends.http_client import Server, by_rendezvous
from distill.backends.http_loop import iterate
from distill.backends.http_retry import retry_after_s
from distill.backends.http_wire import Answer, Question, RowRejected
from distill.backends.settings import BackendChoice, HttpSettings
from distill.config import Config, dump_config, fingerprint_view, parse_config
from distill.errors import BackendUnavailableError, ConfigError
from distill.models import LoadedModel, ModelConfig, load_target
from distill.models.facts import ModelFacts, read_facts
from distill.sampling import SamplingConfig
from tests.helpers import make_llama, make_tokenizer, save_pretrained_dir
from tests.http_helpers import Reply, ScriptedServer, vllm_answer

GREEDY = SamplingConfig(temperature=0.0)


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
def opened(config: ModelConfig, facts: ModelFacts) -> Iterator[Callable[..., HttpBackend]]:
    """Open a backend on a scripted server."""
    running: list[ScriptedServer] = []

    def open_on(
        answer: Callable[[int, Any], Reply], *, owned_by: str = "vllm", **settings: Any
    ) -> HttpBackend:
        running.append(ScriptedServer(answer, owned_by=owned_by))
        return HttpBackend(config, facts, HttpSettings(base_urls=(running[-1].url,), **settings))

    yield open_on
    for server in running:
        server.close()


Opened = Callable[..., HttpBackend]


def ask(backend: HttpBackend, prompt: list[int], num_new: int = 8) -> Completion | Unanswered:
    (outcome,) = backend.generate([prompt], GREEDY, max_new_tokens=num_new, seeds=[0])
    return outcome


# ---------------------------------------------------------------- text without ids


def text_answer(text: str, prompt: list[int], num_new: int, finish: str) -> Reply:
    usage = {"prompt_tokens": len(prompt), "completion_tokens": num_new}
    choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
    return Reply({"object": "text_completion", "choices": [choice], "usage": usage})


def test_text_that_round_trips_becomes_ids_when_that_is_allowed(
    opened: Opened, facts: ModelFacts
) -> None:
    tokenizer = facts.tokenizer
    prompt = tokenizer("the quick")["input_ids"]
    answer = tokenizer(" brown fox jumps")["input_ids"]
    whole = tokenizer("the quick brown fox jumps")["input_ids"]
    assert whole == prompt + answer, "the case this test is about"

    def counted(num_new: int, finish: str) -> Completion | Unanswered:
        backend = opened(
            lambda _, body: text_answer(" brown fox jumps", body["prompt"], num_new, finish),
            owned_by="somebody",
            allow_retokenized=True,
        )
        return ask(backend, prompt, len(answer))

    found = counted(len(answer), "length")
    assert isinstance(found, Completion)
    assert list(found.token_ids) == answer
    # Another count is another tokenization: not what the target drew.
    other = counted(len(answer) + 1, "length")
    assert isinstance(other, Unanswered)
    assert other.status == "rejected"
    assert f"is {len(answer)} tokens when tokenized again, the server counts" in other.reason


def test_text_that_ends_by_itself_gets_its_stop_token_back(
    opened: Opened, facts: ModelFacts
) -> None:
    prompt = facts.tokenizer("the quick")["input_ids"]
    answer = facts.tokenizer(" brown fox")["input_ids"]
    for told in (len(answer), len(answer) + 1):  # counted or not
        backend = opened(
            lambda _, body, told=told: text_answer(" brown fox", body["prompt"], told, "stop"),
            owned_by="somebody",
            allow_retokenized=True,
        )
        found = ask(backend, prompt, 20)
        assert isinstance(found, Completion)
        assert list(found.token_ids) == [*answer, 1]
        assert found.finish_reason == "stop"


def test_a_stop_token_that_nobody_names_is_not_guessed_among_several(
    facts: ModelFacts,
) -> None:
    prompt = facts.tokenizer("the quick")["input_ids"]
    two = dataclasses.replace(facts, stop_token_ids=frozenset({1, 7}))
    count = len(facts.tokenizer(" brown fox")["input_ids"])
    answer = Answer("stop", None, " brown fox", num_new_tokens=count + 1)
    asked = Question(tuple(prompt), GREEDY, 20, 0, (1, 7))
    with pytest.raises(RowRejected, match=r"does not say at which .* \[1, 7\]; use a server"):
        accept(asked, answer, two, allow_retokenized=True)
    named = dataclasses.replace(answer, stop_token_id=7)
    assert accept(asked, named, two, allow_retokenized=True).token_ids[-1] == 7


def test_text_that_does_not_round_trip_is_rejected(opened: Opened, facts: ModelFacts) -> None:
    tokenizer = facts.tokenizer
    # "th" and "e" fuse into one token: the boundary between prompt and answer is lost.
    prompt = tokenizer("th")["input_ids"]
    assert tokenizer("the")["input_ids"][: len(prompt)] != prompt, "the case this test is about"
    backend = opened(
        lambda _, body: text_answer("e", body["prompt"], 1, "length"),
        owned_by="somebody",
        allow_retokenized=True,
    )
    found = ask(backend, prompt)
    assert isinstance(found, Unanswered)
    assert found.reason == "prompt and answer, tokenized again, are not the text that came"


def test_ids_are_used_as_they_came_even_where_text_would_say_otherwise(opened: Opened) -> None:
    backend = opened(
        lambda _, body: Reply(vllm_answer([20, 21], body["prompt"], text="something else")),
        allow_retokenized=True,
    )
    found = ask(backend, [5, 6])
    assert isinstance(found, Completion)
    assert found.token_ids == (20, 21)


# ---------------------------------------------------------------- scores


def test_scores_over_http_are_the_targets_own_with_the_rest_in_the_tail(
    opened: Opened, target: LoadedModel
) -> None:
    sequences = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]

    def law_TV(sequence: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits_TV = target.model(torch.tensor([sequence])).logits[0, :-1]
        return logits_TV.float().log_softmax(-1)

    def score(_: int, body: Any) -> Reply:
        best = law_TV(body["prompt"]).topk(body["prompt_logprobs"])
        positions: list[Any] = [None]
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            positions.append({str(i): {"logprob": v} for i, v in zip(ids, values, strict=True)})
        return Reply({"choices": [{"index": 0, "prompt_logprobs": positions}]})

    backend = opened(score)
    assert backend.info.gives == {"top_k_scores"}
    found = list(backend.score(sequences, top_k=6))
    assert [scores.sequence_index for scores in found] == [0, 1, 2]
    for sequence, scores in zip(sequences, found, strict=True):
        assert isinstance(scores, Scores)
        best = law_TV(sequence).topk(6)
        assert scores.token_ids_TK.tolist() == best.indices.tolist()
        torch.testing.assert_close(scores.log_probs_TK, best.values)
        torch.testing.assert_close(
            scores.tail_mass_T, 1 - best.values.exp().sum(-1), atol=1e-6, rtol=0
        )


def test_an_answer_that_fills_a_servers_context_can_be_scored(
    config: ModelConfig, facts: ModelFacts
) -> None:
    def answer(_: int, body: Any) -> Reply:
        prompt, num_new = body["prompt"], body["max_tokens"]
        if len(prompt) + num_new > 8:  # as vllm does
            return Reply({"error": {"message": "context of 8"}}, status=400)
        if "prompt_logprobs" in body:
            positions = [{str(i): {"logprob": -1.0}} for i in prompt[1:]]
            return Reply({"choices": [{"prompt_logprobs": [None, *positions]}]})
        return Reply(vllm_answer([20] * num_new, prompt))

    entry = {"id": "target", "owned_by": "vllm", "max_model_len": 8}
    server = ScriptedServer(answer, models=[entry])
    try:
        backend = HttpBackend(config, facts, HttpSettings(base_urls=(server.url,)))
        found = ask(backend, [5, 6, 7], 50)
        assert isinstance(found, Completion)
        assert len(found.token_ids) == 4
        (scores,) = backend.score([[5, 6, 7, *found.token_ids]], top_k=1)
        assert isinstance(scores, Scores)
        assert scores.token_ids_TK.shape == (6, 1)
        (refused,) = backend.score([[5] * 8], top_k=1)
        assert isinstance(refused, Unscored)
        assert refused.status == "rejected"
        assert "its 8 tokens and the 1" in refused.reason
    finally:
        server.close()


def test_a_sequence_that_cannot_be_scored_says_why_and_the_others_go_on(opened: Opened) -> None:
    def score(_: int, body: Any) -> Reply:
        if body["prompt"] == [5, 6]:
            return Reply({"error": {"message": "20 at most"}}, status=400)
        if body["prompt"] == [5, 7]:
            return Reply({"error": {"message": "out of memory"}}, status=500)
        positions = [{str(i): {"logprob": -1.0}} for i in body["prompt"][1:]]
        return Reply({"choices": [{"prompt_logprobs": [None, *positions]}]})

    found = list(opened(score, max_tries=1).score([[5, 6], [5, 7], [5, 8]], top_k=1))
    assert [one.sequence_index for one in found] == [0, 1, 2]
    rejected, failed, scores = found
    assert isinstance(rejected, Unscored)
    assert rejected.status == "rejected"
    assert re.search(r"20 at most.*--max-logprobs", rejected.reason)
    assert isinstance(failed, Unscored)
    assert failed.status == "failed"
    assert re.search(r"1 tries.*out of memory", failed.reason)
    assert isinstance(scores, Scores)


def test_a_scoring_that_nobody_does_ends_the_run(opened: Opened) -> None:
    def fail(*_: Any) -> Reply:
        return Reply({"error": {"message": "out of memory"}}, status=500)

    backend = opened(fail, max_tries=1, give_up_after=3, concurrency=1)
    with pytest.raises(BackendUnavailableError, match=r"3 rows failed.*out of memory"):
        list(backend.score([[5, index] for index in range(6, 12)], top_k=1))


# ---------------------------------------------------------------- settings


class Stage(Config):
    """A stage that names a backend."""

    backend: BackendChoice = "local"


def test_a_backend_is_a_name_or_a_section_and_reloads_to_an_equal_object() -> None:
    section = {"kind": "http", "base_urls": ["http://one:8000/v1/", "https://two/path"]}
    stage = parse_config({"backend": section}, Stage)
    assert isinstance(stage.backend, HttpSettings)
    assert stage.backend.urls == ("http://one:8000", "https://two/path")
    reloaded = parse_config(json.loads(stage.model_dump_json()), Stage)
    assert reloaded == stage
    assert "base_urls" in dump_config(stage)
    assert parse_config({"backend": "local"}, Stage) == Stage()


def test_only_what_can_change_an_answer_is_in_the_fingerprint() -> None:
    stage = Stage(backend=HttpSettings(base_urls=("http://one",), api_key_env="KEY"))
    assert fingerprint_view(stage)["backend"] == {
        "kind": "http",
        "server": "auto",
        "allow_retokenized": False,
    }


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"base_urls": []}, "at least 1 item"),
        ({"base_urls": ["one:8000"]}, "one of base_urls is not the address of a server"),
        ({"base_urls": ["http://one", "http://one/v1"]}, "http://one is listed twice"),
        ({"base_urls": ["http://one"], "servr": "vllm"}, "Did you mean 'backend.server'"),
        ({"base_urls": ["http://one"], "log_probs": True}, "log_probs"),
    ],
)
def test_a_mistake_in_the_section_is_named(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"backend": {"kind": "http"} | section}, Stage)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "section",
    [
        {"base_urls": ["http://one"], "api_key_env": "sk-secret"},
        {"base_urls": ["http://user:sk-secret@one"]},
        {"base_urls": ["http://one/v1?key=sk-secret"]},
        {"base_urls": ["http://one/v1#sk-secret"]},
        {"base_urls": ["sk-secret"]},
        {"base_urls": ["ftp://one/sk-secret"]},
    ],
)
def test_a_key_in_the_config_is_refused_and_not_repeated(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"backend": section}, Stage)
    assert "environment variable" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_url_that_is_listed_twice_is_shown_without_its_path() -> None:
    urls = ["http://one/sk-secret", "http://one/sk-secret/v1"]
    with pytest.raises(ConfigError, match="http://one is listed twice") as caught:
        parse_config({"backend": {"base_urls": urls}}, Stage)
    assert "secret" not in str(caught.value)


# ---------------------------------------------------------------- small parts


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, 0.0), ("7", 7.0), (" 120 ", 120.0), ("soon", 0.0), ("-5", 0.0), ("", 0.0)],
)
def test_retry_after_is_seconds_or_nothing(header: str | None, seconds: float) -> None:
    assert retry_after_s(header) == seconds


def test_retry_after_may_be_a_date() -> None:
    now = datetime(2026, 3, 1, 12, tzinfo=UTC)
    later = format_datetime(now + timedelta(seconds=90), usegmt=True)
    assert retry_after_s(later, now=now) == 90.0
    assert retry_after_s(later, now=now + timedelta(hours=1)) == 0.0


def test_a_server_that_leaves_moves_only_its_own_keys() -> None:
    servers = [Server(f"http://server-{n}") for n in range(4)]
    keys = [str(n).encode() for n in range(400)]
    before = {key: by_rendezvous(key, servers)[0].url for key in keys}
    after = {key: by_rendezvous(key, servers[1:])[0].url for key in keys}
    moved = [key for key in keys if before[key] != after[key]]
    assert moved == [key for key in keys if before[key] == "http://server-0"]
    shares = [list(before.values()).count(server.url) for server in servers]
    assert min(shares) > 70  # 100 expected
    assert by_rendezvous(keys[0], servers) == by_rendezvous(keys[0], servers[::-1])


def test_work_runs_beside_a_loop_that_is_running_already() -> None:
    async def work(put: Callable[[int], None]) -> None:
        for number in range(3):
            await asyncio.sleep(0)
            put(number)

    async def notebook() -> list[int]:
        return list(iterate(work))

    assert asyncio.run(notebook()) == [0, 1, 2]


def test_an_error_in_the_work_is_raised_after_what_came_before() -> None:
    async def work(put: Callable[[int], None]) -> None:
        put(1)
        raise ZeroDivisionError("in the loop")

    items = iterate(work)
    assert next(items) == 1
    with pytest.raises(ZeroDivisionError, match="in the loop"):
        next(items)


def test_the_facts_of_a_model_are_what_the_loaded_model_says(tmp_path: Path) -> None:
    """Stop ids come from three places, one of which is a file that need not be there."""
    tokenizer = make_tokenizer()
    model = make_llama(len(tokenizer), eos_token_id=5)
    model.generation_config.eos_token_id = [7, 9]
    reference = ModelConfig(model=str(save_pretrained_dir(tmp_path, model, tokenizer)))
    for expected in ({1, 5, 7, 9}, {1, 5}):
        known, loaded = read_facts(reference), load_target(reference)
        assert known.stop_token_ids == loaded.stop_token_ids == expected
        assert known.revision == loaded.resolved.revision
        assert known.shape == loaded.shape
        (tmp_path / "generation_config.json").unlink(missing_ok=True)
