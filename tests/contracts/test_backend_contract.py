"""Owns what every registered backend must satisfy; how each is made here is all that is named.

Refuses to know how a backend works. Fault classes covered: rows lost or given twice, ids outside
the vocabulary, stop tokens dropped or run past, answers that depend on the batch, a store that a
backend cannot fill.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from distill.backends.base import (
    BACKENDS,
    Backend,
    Completion,
    LawBackend,
    Scores,
    open_backend,
)
from distill.backends.local import LocalBackend
from distill.backends.settings import HttpSettings
from distill.errors import BackendUnavailableError, ConfigError, ContextLengthError
from distill.models import LoadedModel, ModelConfig, load_target
from distill.sampling import SamplingConfig
from tests.http_helpers import distill_server

PROMPTS = ([5, 6, 7], [8, 9, 10, 11, 12], [13], [14, 15, 16, 17])
SEEDS = (11, 12, 13, 14)
GREEDY = SamplingConfig(temperature=0.0)
NAMES = BACKENDS.names()


@pytest.fixture(scope="module")
def config(tiny_pair_dirs: tuple[Path, Path]) -> ModelConfig:
    return ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu")


@pytest.fixture(scope="module")
def target(config: ModelConfig) -> LoadedModel:
    return load_target(config)


@pytest.fixture(scope="module")
def opened(config: ModelConfig, target: LoadedModel) -> Iterator[dict[str, Backend]]:
    with ExitStack() as stack:
        url = stack.enter_context(distill_server(target)).base_url
        yield {
            "local": open_backend("local", config, max_batch_size=3),
            "http": open_backend(HttpSettings(base_urls=(url,)), config, max_batch_size=3),
        }


@pytest.fixture
def backend(opened: dict[str, Backend], request: pytest.FixtureRequest) -> Backend:
    return opened[request.param]


def answers(backend: Backend, sampling: SamplingConfig, **settings: Any) -> list[Completion]:
    settings = {"max_new_tokens": 12, "seeds": SEEDS} | settings
    found = list(backend.generate(PROMPTS, sampling, **settings))
    assert all(isinstance(outcome, Completion) for outcome in found)
    return sorted(found, key=lambda c: (c.prompt_index, c.sample_index))  # type: ignore[arg-type]


every_backend = pytest.mark.parametrize("backend", NAMES, indirect=True)


def test_every_registered_backend_is_held_to_the_contract(opened: dict[str, Backend]) -> None:
    assert set(opened) == set(NAMES)


@every_backend
def test_each_sample_of_each_prompt_comes_once_and_the_same_way_again(backend: Backend) -> None:
    first = answers(backend, SamplingConfig(), num_samples=2)
    assert [(c.prompt_index, c.sample_index) for c in first] == [
        (prompt, sample) for prompt in range(4) for sample in range(2)
    ]
    assert first[0].token_ids != first[1].token_ids
    again = answers(backend, SamplingConfig(), num_samples=2)
    assert [c.token_ids for c in again] == [c.token_ids for c in first]
    other = answers(backend, SamplingConfig(), num_samples=2, seeds=[9, 9, 9, 9])
    assert [c.token_ids for c in other] != [c.token_ids for c in first]


@every_backend
@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingConfig(),
        SamplingConfig(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01),
        SamplingConfig(repetition_penalty=1.3, presence_penalty=0.5, logit_bias={40: 2.0}),
        SamplingConfig(min_tokens=12),
    ],
    ids=["greedy", "sampled", "filtered", "edited", "min_tokens"],
)
def test_the_ids_are_those_of_the_target_in_this_process(
    backend: Backend, target: LoadedModel, sampling: SamplingConfig
) -> None:
    """The same seeds give the same ids, above temperature 0 too; a batch of one is the judge."""
    alone = LocalBackend(target, max_batch_size=1)
    expected = answers(alone, sampling)
    found = answers(backend, sampling)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.finish_reason for c in found] == [c.finish_reason for c in expected]


@every_backend
def test_an_answer_ends_with_the_first_stop_token_or_at_the_budget(backend: Backend) -> None:
    info = backend.info
    stops = info.stop_token_ids
    likely = SamplingConfig(logit_bias=dict.fromkeys(stops, 3.0))
    found = answers(backend, likely, num_samples=4)
    assert {c.finish_reason for c in found} == {"stop", "length"}
    for completion in found:
        assert not stops.intersection(completion.token_ids[:-1])
        assert (completion.token_ids[-1] in stops) == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 12
        assert all(0 <= token_id < info.vocab_size for token_id in completion.token_ids)


@every_backend
def test_new_tokens_are_told_as_they_come(backend: Backend) -> None:
    told: list[int] = []
    found = answers(backend, GREEDY, on_tokens=told.append)
    assert sum(told) == sum(len(completion.token_ids) for completion in found)


@every_backend
def test_no_prompts_are_no_completions(backend: Backend) -> None:
    assert list(backend.generate([], GREEDY, max_new_tokens=4, seeds=[])) == []


@every_backend
def test_a_prompt_beyond_the_context_is_refused(backend: Backend) -> None:
    with pytest.raises(ContextLengthError, match="512"):
        list(backend.generate([[5] * 512], GREEDY, max_new_tokens=4, seeds=[0]))


@every_backend
def test_hidden_states_come_or_are_refused_with_the_way_out(backend: Backend) -> None:
    if "hidden_states" in backend.info.gives:
        assert all(c.hidden_TD is not None for c in answers(backend, GREEDY, keep_hidden=True))
    else:
        with pytest.raises(BackendUnavailableError, match=r"target_store.*backend: local"):
            answers(backend, GREEDY, keep_hidden=True)


@every_backend
@pytest.mark.parametrize(("gift", "top_k"), [("scores", None), ("top_k_scores", 5)])
def test_scores_come_or_are_refused_with_the_way_out(
    backend: Backend, target: LoadedModel, gift: Any, top_k: int | None
) -> None:
    sequence = [5, 6, 7, 8, 9]
    if gift not in backend.info.gives:
        with pytest.raises(BackendUnavailableError, match="backend: local"):
            list(backend.score([sequence], top_k=top_k))
        return
    (scores,) = backend.score([sequence], top_k=top_k)
    assert isinstance(scores, Scores)
    with torch.no_grad():
        law_TV = target.model(torch.tensor([sequence])).logits[0, :-1].log_softmax(-1)
    torch.testing.assert_close(
        scores.log_probs_TK, law_TV.gather(-1, scores.token_ids_TK), atol=1e-4, rtol=0
    )


@every_backend
def test_whole_laws_come_in_parts_from_any_position_on(
    backend: Backend, target: LoadedModel
) -> None:
    if "scores" not in backend.info.gives:
        assert not hasattr(backend, "laws")
        return
    sequence = [5, 6, 7, 8, 9]
    (scores,) = backend.score([sequence])
    assert isinstance(scores, Scores)
    laws_NV = torch.cat(list(cast(LawBackend, backend).laws(sequence, start=2)))
    torch.testing.assert_close(laws_NV, scores.log_probs_TK[2:], atol=1e-5, rtol=0)
    with pytest.raises(ContextLengthError, match="512"):
        list(cast(LawBackend, backend).laws([5] * 513, start=2))


@every_backend
def test_the_info_is_the_targets(backend: Backend, target: LoadedModel) -> None:
    info = backend.info
    assert (info.vocab_size, info.hidden_size, info.max_length) == (len(target.tokenizer), 64, 512)
    assert info.stop_token_ids == target.stop_token_ids
    assert info.revision == target.resolved.revision


def test_the_http_backend_asks_where_its_servers_are(config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"base_urls: \[http://host:port\]"):
        open_backend("http", config, max_batch_size=2)
