"""Serving a real (tiny) pair: what comes over HTTP is what the target says on its own."""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from pydantic import ValidationError

from distill.artifacts import Artifact, ArtifactStore
from distill.config import Config
from distill.errors import (
    ArtifactError,
    CacheRollbackError,
    ConfigError,
    PairMismatchError,
    ServerError,
)
from distill.models import (
    DraftVocabulary,
    ModelConfig,
    load_target,
    model_revision,
    write_vocabulary,
)
from distill.runtime.speculative import speculative_decode
from distill.sampling import SamplingConfig
from distill.server.running import RunningServer
from distill.stages.serve import API_KEY_VARIABLE, ServeConfig, serve, serve_key
from tests.helpers import make_llama, make_tokenizer, save_pretrained_dir

TIMEOUT_S = 20.0
PROMPT = "the quick brown fox"


class NoConfig(Config):
    """The settings of a stand-in stage."""


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


@pytest.fixture
def config(tiny_pair_dirs: tuple[Path, Path]) -> ServeConfig:
    target = ModelConfig(model=str(tiny_pair_dirs[0]), dtype="float32", device="cpu")
    return ServeConfig(target=target, port=0)


def stand_in(
    store: ArtifactStore,
    stage: str,
    write: Callable[[Path], None] = lambda directory: None,
    metrics: Mapping[str, Any] | None = None,
    *,
    salt: str = "",
    target: ModelConfig | None = None,
    distilled: Artifact | None = None,
) -> Artifact:
    def build(directory: Path) -> Mapping[str, Any]:
        write(directory)
        return metrics or {}

    revisions = {"salt": salt} | ({} if target is None else {"target": model_revision(target)})
    inputs = {} if distilled is None else {"distill": distilled.fingerprint}
    return store.get_or_build(
        store.key(stage, 1, NoConfig(), inputs=inputs, revisions=revisions), build
    )


def make_distilled(
    store: ArtifactStore,
    tokenizer: Any,
    target: ModelConfig,
    *,
    vocabulary: list[int] | None = None,
) -> Artifact:
    model = make_llama(len(tokenizer), hidden=64, seed=2)

    def write(directory: Path) -> None:
        save_pretrained_dir(directory / "draft", model, tokenizer)
        if vocabulary is not None:
            content = {"token_ids": vocabulary, "coverage": 1.0}
            (directory / "draft_vocabulary.json").write_text(json.dumps(content))

    return stand_in(store, "distill", write, salt=str(vocabulary), target=target)


@pytest.fixture
def distilled(store: ArtifactStore, tiny_tokenizer: Any, config: ServeConfig) -> Artifact:
    return make_distilled(store, tiny_tokenizer, config.target)


def client_of(server: RunningServer, api_key: str = "unused") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=server.base_url, api_key=api_key, timeout=TIMEOUT_S, max_retries=0
    )


@pytest.fixture
def started() -> Iterator[Callable[..., openai.OpenAI]]:
    """Start a server in this process, hand out a client, stop both at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(API_KEY_VARIABLE, raising=False)
        running: list[tuple[RunningServer, openai.OpenAI]] = []

        def start(config: ServeConfig, store: ArtifactStore, **inputs: Artifact) -> openai.OpenAI:
            server = serve(config, store, inputs=inputs, block=False)
            running.append((server, client_of(server)))
            return running[-1][1]

        yield start
        for server, client in running:
            client.close()
            server.close()


def plain_text(config: ServeConfig, prompt_ids: list[int], max_new_tokens: int) -> str:
    """What transformers says with the target alone, greedily."""
    target = load_target(config.target)
    output = target.model.generate(
        torch.tensor([prompt_ids]), max_new_tokens=max_new_tokens, do_sample=False
    )
    new: Any = output[0, len(prompt_ids) :]
    text: str = target.tokenizer.decode(new.tolist(), skip_special_tokens=True)
    return text


@pytest.mark.parametrize("stream", [False, True])
def test_a_greedy_answer_is_the_targets_own(
    config: ServeConfig,
    store: ArtifactStore,
    distilled: Artifact,
    tiny_tokenizer: Any,
    started: Callable[..., openai.OpenAI],
    stream: bool,
) -> None:
    client = started(config, store, distill=distilled)
    expected = plain_text(config, tiny_tokenizer(PROMPT)["input_ids"], 80)
    answer: Any = client.completions.create(
        model="target", prompt=PROMPT, max_tokens=80, temperature=0, stream=stream
    )
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    speculation = chunks[-1].model_extra["distill"]
    assert speculation["num_proposed"] > 0
    # A random draft is refused a lot: the equality above holds because of that, not despite it.
    assert speculation["num_accepted"] < speculation["num_tested"]


def test_a_chat_answer_sees_the_targets_template(
    config: ServeConfig,
    store: ArtifactStore,
    distilled: Artifact,
    tiny_tokenizer: Any,
    started: Callable[..., openai.OpenAI],
) -> None:
    client = started(config, store, distill=distilled)
    messages: Any = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(
        model="target", messages=messages, max_tokens=24, temperature=0
    )
    prompt_ids = tiny_tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    expected = plain_text(config, prompt_ids["input_ids"], 24)
    assert answer.choices[0].message.content == expected
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt_ids["input_ids"])


def test_a_seeded_answer_is_the_same_alone_and_in_company(
    config: ServeConfig,
    store: ArtifactStore,
    distilled: Artifact,
    started: Callable[..., openai.OpenAI],
) -> None:
    client = started(config, store, distill=distilled)

    def ask(seed: int) -> str:
        answer = client.completions.create(
            model="target", prompt=PROMPT, max_tokens=40, temperature=1.0, seed=seed
        )
        return answer.choices[0].text

    alone = [ask(seed) for seed in (1, 2, 3)]
    assert len(set(alone)) == 3
    together: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda seed=seed: together.update({seed: ask(seed)}))
        for seed in (1, 2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert [together[seed] for seed in (1, 2, 3)] == alone


def test_without_draft_tokens_the_target_decodes_alone(
    config: ServeConfig,
    store: ArtifactStore,
    distilled: Artifact,
    started: Callable[..., openai.OpenAI],
) -> None:
    alone = config.model_copy(update={"num_draft_tokens": 0})
    client = started(alone, store, distill=distilled)
    answer = client.completions.create(model="target", prompt=PROMPT, max_tokens=8)
    assert answer.model_extra is not None
    speculation = answer.model_extra["distill"]
    assert speculation["num_proposed"] == 0
    assert speculation["acceptance_rate"] is None
    assert speculation["block_efficiency"] == 1.0


def test_a_draft_with_a_vocabulary_subset_is_as_lossless(
    config: ServeConfig,
    store: ArtifactStore,
    tiny_tokenizer: Any,
    started: Callable[..., openai.OpenAI],
) -> None:
    distilled = make_distilled(store, tiny_tokenizer, config.target, vocabulary=[1, *range(40, 90)])
    client = started(config, store, distill=distilled)
    answer = client.completions.create(model="target", prompt=PROMPT, max_tokens=40, temperature=0)
    expected = plain_text(config, tiny_tokenizer(PROMPT)["input_ids"], 40)
    assert answer.choices[0].text == expected


def test_a_served_draft_proposes_what_it_was_trained_to_propose_and_nothing_else(
    config: ServeConfig,
    store: ArtifactStore,
    tiny_tokenizer: Any,
    started: Callable[..., openai.OpenAI],
) -> None:
    target = load_target(config.target)
    prompt = tiny_tokenizer(PROMPT)["input_ids"]
    [plain] = speculative_decode(
        target, None, [prompt], SamplingConfig(temperature=0.0), max_new_tokens=24
    )
    unsaid = [i for i in range(2, 300) if i not in plain.token_ids][:50]

    def write(directory: Path) -> None:  # the target's own weights: only the subset can fail
        save_pretrained_dir(directory / "draft", target.model, tiny_tokenizer)
        write_vocabulary(directory, DraftVocabulary(tuple(unsaid), 0.0))

    distilled = stand_in(store, "distill", write, salt="unsaid", target=config.target)
    client = started(config, store, distill=distilled)
    answer = client.completions.create(model="target", prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.model_extra is not None
    speculation = answer.model_extra["distill"]
    assert speculation["num_proposed"] > 0
    assert speculation["acceptance_rate"] == 0.0


def test_the_key_comes_from_the_environment_and_is_stored_nowhere(
    config: ServeConfig,
    store: ArtifactStore,
    distilled: Artifact,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, " top-secret\n")
    with serve(config, store, inputs={"distill": distilled}, block=False) as server:
        with client_of(server, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with client_of(server, "top-secret") as client:
            assert [model.id for model in client.models.list()] == ["target"]
    for path in store.root.rglob("*.json"):
        assert "top-secret" not in path.read_text(encoding="utf-8")


def test_the_artifact_names_the_pair_by_fingerprints(
    config: ServeConfig, store: ArtifactStore, distilled: Artifact
) -> None:
    metrics = {"verdict": {"ship": True, "num_draft_tokens": 2}}
    measured = stand_in(store, "measure", metrics=metrics, distilled=distilled)
    inputs = {"distill": distilled, "measure": measured}
    with serve(config, store, inputs=inputs, block=False) as server:
        first = server.artifact
    assert first is not None
    content = json.loads(first.file("serving.json").read_text(encoding="utf-8"))
    assert content["inputs"] == {
        "distill": distilled.fingerprint,
        "measure": measured.fingerprint,
    }
    assert content["model_id"] == "target"
    assert content["num_draft_tokens"] == 2
    assert content["max_length"] == 512
    assert str(store.root.parent) not in first.file("serving.json").read_text(encoding="utf-8")
    elsewhere = config.model_copy(update={"host": "0.0.0.0", "port": 1, "max_waiting": 1})
    assert serve_key(elsewhere, store, inputs=inputs).fingerprint == first.fingerprint


def test_the_depth_is_the_configured_then_the_measured_then_four(
    config: ServeConfig, store: ArtifactStore, distilled: Artifact
) -> None:
    def depth(config: ServeConfig, **inputs: Any) -> int:
        with serve(config, store, inputs=inputs, block=False) as server:
            assert server.artifact is not None
            text = server.artifact.file("serving.json").read_text(encoding="utf-8")
        depth: int = json.loads(text)["num_draft_tokens"]
        return depth

    assert depth(config, distill=distilled, measure=None) == 4
    pinned = config.model_copy(update={"num_draft_tokens": 7})
    assert depth(pinned, distill=distilled) == 7
    slower = {"verdict": {"ship": False, "num_draft_tokens": 0}}
    measured = stand_in(store, "measure", metrics=slower, distilled=distilled)
    assert depth(config, distill=distilled, measure=measured) == 0
    names = {"distill": distilled.fingerprint, "measure": measured.fingerprint}
    revisions = serve_key(config, store, inputs=names).parts["revisions"]
    assert revisions["num_draft_tokens"] == "unmeasured"
    revisions = serve_key(config, store, inputs={**names, "measure": measured}).parts["revisions"]
    assert revisions["num_draft_tokens"] == "0"


TIMING = {
    "timing": {
        "verify_cost_ratio": {"1": 1.0, "2": 1.1, "4": 1.3},
        "draft_costs": [{"draft": "distilled", "temperature": 0.0, "draft_cost_ratio": 0.25}],
        "runs": [{"draft": "distilled", "temperature": 0.0, "acceptance_rate": 0.75}],
    },
    "verdict": {"ship": True, "num_draft_tokens": 1},
}


def test_an_adaptive_server_answers_as_the_target_does_and_records_its_costs(
    config: ServeConfig,
    store: ArtifactStore,
    distilled: Artifact,
    tiny_tokenizer: Any,
    started: Callable[..., openai.OpenAI],
) -> None:
    adaptive = config.model_copy(update={"draft_length": "adaptive"})
    measured = stand_in(store, "measure", metrics=TIMING, distilled=distilled)
    client = started(adaptive, store, distill=distilled, measure=measured)
    answer = client.completions.create(model="target", prompt=PROMPT, max_tokens=80, temperature=0)
    assert answer.choices[0].text == plain_text(config, tiny_tokenizer(PROMPT)["input_ids"], 80)
    assert answer.model_extra is not None
    speculation = answer.model_extra["distill"]
    assert speculation["num_draft_tokens"] == 3
    # A random draft is asked less and less: plain rounds stand between those with drafts.
    assert 0 < speculation["num_proposed"] < 60
    inputs = {"distill": distilled, "measure": measured}
    key = serve_key(adaptive, store, inputs=inputs)
    artifact = store.find(key)
    assert artifact is not None
    content = json.loads(artifact.file("serving.json").read_text(encoding="utf-8"))
    assert content["num_draft_tokens"] == 3
    assert content["adaptive"] == {
        "max_draft_tokens": 3,
        "draft_cost_ratio": 0.25,
        "verify_cost_ratio": {"1": 1.0, "2": 1.1, "4": 1.3},
        "prior_acceptance_rate": 0.75,
    }
    assert content["drafter"] == {"name": "causal_lm", "num_layers": None}


@pytest.mark.parametrize(
    ("max_batch_size", "costs"),
    [(1, (0.25, {1: 1.0, 2: 1.1, 4: 1.3})), (3, (0.5, {1: 1.0, 3: 2.0})), (64, (0.75, {1: 1.0}))],
)
def test_an_adaptive_server_takes_the_costs_of_the_batch_size_nearest_to_its_own(
    store: ArtifactStore, max_batch_size: int, costs: tuple[float, dict[int, float]]
) -> None:
    from distill.stages.serve_drafting import adaptive_draft_length, drafting_revisions

    metrics = json.loads(json.dumps(TIMING))
    metrics["timing"]["batches"] = [
        {"batch_size": 4, "draft_cost_ratio": 0.5, "verify_cost_ratio": {"1": 1.0, "3": 2.0}},
        {"batch_size": 16, "draft_cost_ratio": 0.75, "verify_cost_ratio": {"1": 1.0}},
    ]
    measured = stand_in(store, "measure", metrics=metrics)
    policy = adaptive_draft_length(measured, None, max_batch_size=max_batch_size)
    speed = policy.speed_model
    assert (speed.draft_cost_ratio, dict(speed.verify_cost_ratio)) == costs
    assert policy.max_draft_tokens == max(costs[1]) - 1
    revisions = drafting_revisions("adaptive", None, measured, max_batch_size=max_batch_size)
    assert json.loads(revisions["draft_length"])["draft_cost_ratio"] == costs[0]


def test_measuring_other_costs_gives_an_adaptive_server_another_record(
    config: ServeConfig, store: ArtifactStore, distilled: Artifact
) -> None:
    adaptive = config.model_copy(update={"draft_length": "adaptive"})
    slower = json.loads(json.dumps(TIMING))
    slower["timing"]["draft_costs"][0]["draft_cost_ratio"] = 0.5
    keys = {
        serve_key(one, store, inputs={"distill": distilled, "measure": measured}).fingerprint
        for one in (config, adaptive)
        for measured in (
            stand_in(store, "measure", metrics=metrics, distilled=distilled, salt=salt)
            for salt, metrics in (("a", TIMING), ("b", slower))
        )
    }
    assert len(keys) == 4
    names = {"distill": distilled.fingerprint, "measure": "0" * 64}
    assert serve_key(adaptive, store, inputs=names).parts["revisions"]["num_draft_tokens"] == (
        "unmeasured"
    )


def test_an_adaptive_server_without_measured_costs_is_refused(
    config: ServeConfig, store: ArtifactStore, distilled: Artifact
) -> None:
    adaptive = config.model_copy(update={"draft_length": "adaptive"})
    with pytest.raises(ConfigError, match="no measurement was given"):
        serve(adaptive, store, inputs={"distill": distilled}, block=False)
    untimed = stand_in(store, "measure", metrics={"timing": {}}, distilled=distilled)
    with pytest.raises(ConfigError, match=r"timed nothing.*timing\.enabled"):
        serve(adaptive, store, inputs={"distill": distilled, "measure": untimed}, block=False)


def test_the_targets_first_layers_serve_without_any_artifact(
    config: ServeConfig,
    store: ArtifactStore,
    tiny_tokenizer: Any,
    started: Callable[..., openai.OpenAI],
) -> None:
    early = config.model_copy(update={"drafter": "early_exit", "num_layers": 3})
    client = started(early, store)
    answer = client.completions.create(model="target", prompt=PROMPT, max_tokens=60, temperature=0)
    assert answer.choices[0].text == plain_text(config, tiny_tokenizer(PROMPT)["input_ids"], 60)
    assert answer.model_extra is not None
    assert answer.model_extra["distill"]["num_proposed"] > 0
    artifact = store.find(serve_key(early, store, inputs={}))
    assert artifact is not None
    content = json.loads(artifact.file("serving.json").read_text(encoding="utf-8"))
    assert content["drafter"] == {"name": "early_exit", "num_layers": 3}
    assert (content["inputs"], content["num_draft_tokens"]) == ({}, 4)


def test_more_layers_than_the_target_has_are_refused(
    config: ServeConfig, store: ArtifactStore
) -> None:
    early = config.model_copy(update={"drafter": "early_exit", "num_layers": 9})
    with pytest.raises(ConfigError, match="num_layers = 9, but the target has 4 layers"):
        serve(early, store, inputs={}, block=False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"drafter": "early_exit"}, "'early_exit' and num_layers None"),
        ({"num_layers": 2}, "'causal_lm' and num_layers 2"),
        (
            {"drafter": "early_exit", "num_layers": 2, "draft_length": "adaptive"},
            "'early_exit' and draft_length 'adaptive'",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    config: ServeConfig, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        ServeConfig(target=config.target, **settings)


@pytest.mark.parametrize("key", ["", " \n", "schl\u00fcssel"])
def test_a_key_that_no_client_could_send_is_refused_without_being_shown(
    key: str,
    config: ServeConfig,
    store: ArtifactStore,
    distilled: Artifact,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, key)
    with pytest.raises(ConfigError, match=f"{API_KEY_VARIABLE} is (not ASCII|empty)") as caught:
        serve(config, store, inputs={"distill": distilled}, block=False)
    assert "schl" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "is_warned"),
    [("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True), ("box", True)],
)
def test_a_port_open_to_others_without_a_key_is_warned_of(
    host: str,
    is_warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from distill.stages.serve import _api_key

    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    assert _api_key(host) is None
    assert ("without an API key" in caplog.text) is is_warned


def test_inputs_of_another_pair_are_refused(
    config: ServeConfig,
    store: ArtifactStore,
    distilled: Artifact,
    tiny_tokenizer: Any,
    tiny_pair_dirs: tuple[Path, Path],
) -> None:
    elsewhere = ModelConfig(model=str(tiny_pair_dirs[1]))
    other = make_distilled(store, tiny_tokenizer, elsewhere)
    with pytest.raises(ArtifactError, match="made with a target at sha256"):
        serve(config, store, inputs={"distill": other}, block=False)
    measured = stand_in(store, "measure", distilled=other)
    with pytest.raises(ArtifactError, match=f"{other.fingerprint}.*{distilled.fingerprint}"):
        serve(config, store, inputs={"distill": distilled, "measure": measured}, block=False)


def test_a_measurement_of_a_target_with_other_weights_is_refused(
    config: ServeConfig, store: ArtifactStore, distilled: Artifact
) -> None:
    measured = stand_in(store, "measure", distilled=distilled)
    smaller = config.target.model_copy(update={"quantize": "int8"})
    inputs = {"distill": distilled, "measure": measured}
    with pytest.raises(ArtifactError, match=r"quantize: int8, but .* \(measure\).*quantize: none"):
        serve(config.model_copy(update={"target": smaller}), store, inputs=inputs, block=False)


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("org/model@main", "org/model"),
        ("./models/tiny", "tiny"),
        ("./models/tiny.Q4.gguf", "tiny.Q4"),
    ],
)
def test_the_model_is_called_what_a_person_would_type(reference: str, name: str) -> None:
    from distill.stages.serve import _short_name

    assert _short_name(ModelConfig(model=reference)) == name


def test_a_packaged_model_is_called_by_its_file() -> None:
    from distill.stages.serve import _short_name

    packaged = ModelConfig(model="pypi:some-package==1.0#Tiny.Q4.gguf", sha256="0" * 64)
    assert _short_name(packaged) == "Tiny.Q4"


def test_a_name_and_a_length_can_be_chosen(
    config: ServeConfig,
    store: ArtifactStore,
    distilled: Artifact,
    started: Callable[..., openai.OpenAI],
) -> None:
    chosen = config.model_copy(update={"model_id": "mine", "max_length": 30})
    client = started(chosen, store, distill=distilled)
    card = client.models.retrieve("mine")
    assert card.model_extra == {"max_model_len": 30}
    answer = client.chat.completions.create(
        model="mine", messages=[{"role": "user", "content": "hi"}], temperature=0
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens <= 30


def test_a_length_above_the_targets_context_is_refused(
    config: ServeConfig, store: ArtifactStore, distilled: Artifact
) -> None:
    longer = config.model_copy(update={"max_length": 1000})
    with pytest.raises(ConfigError, match=r"serve\.max_length is 1000, but .* reaches 512"):
        serve(longer, store, inputs={"distill": distilled}, block=False)


def test_serving_needs_a_distilled_draft(
    config: ServeConfig, store: ArtifactStore, distilled: Artifact
) -> None:
    with pytest.raises(ServerError, match="got: none"):
        serve(config, store, inputs={}, block=False)
    with pytest.raises(ArtifactError, match="'measure'"):
        serve(config, store, inputs={"measure": distilled}, block=False)


def test_a_draft_of_another_vocabulary_is_refused(
    config: ServeConfig, store: ArtifactStore
) -> None:
    other = make_distilled(store, make_tokenizer(280), config.target)
    with pytest.raises(PairMismatchError):
        serve(config, store, inputs={"distill": other}, block=False)


def test_an_engine_that_cannot_be_made_is_the_callers_error_and_frees_the_port(
    config: ServeConfig,
    store: ArtifactStore,
    distilled: Artifact,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ready: list[RunningServer] = []

    def refuse(*_: Any, **__: Any) -> Any:
        raise CacheRollbackError("a recurrent state")

    monkeypatch.setattr("distill.stages.serve.DecodeEngine", refuse)
    for block in (True, False):
        with pytest.raises(CacheRollbackError):
            serve(config, store, inputs={"distill": distilled}, block=block, on_ready=ready.append)
    monkeypatch.undo()
    again = config.model_copy(update={"port": ready[0].port})
    serve(again, store, inputs={"distill": distilled}, block=False).close()


def test_missing_packages_are_an_error_with_the_command(
    config: ServeConfig,
    store: ArtifactStore,
    distilled: Artifact,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "distill.server.app", raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(ServerError, match=r"pip install 'distill\[serve\]'"):
        serve(config, store, inputs={"distill": distilled})


def test_a_blocking_server_answers_until_it_is_closed(
    config: ServeConfig, store: ArtifactStore, distilled: Artifact
) -> None:
    ready: queue.Queue[RunningServer] = queue.Queue()
    thread = threading.Thread(
        target=serve,
        args=(config, store),
        kwargs={"inputs": {"distill": distilled}, "on_ready": ready.put},
    )
    thread.start()
    server = ready.get(timeout=TIMEOUT_S)
    with client_of(server) as client:
        answer = client.completions.create(model="target", prompt=PROMPT, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 2
    server.close()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_an_interrupt_is_the_normal_end_of_a_blocking_server(
    config: ServeConfig,
    store: ArtifactStore,
    distilled: Artifact,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("uvicorn.Server.run", interrupted)
    server = serve(config, store, inputs={"distill": distilled})
    server.close()
