"""The backend contract on the local backend: completions, their hidden states, scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distill.backends.base import BACKENDS, Completion, sample_seed, stable_seed
from distill.backends.local import LocalBackend
from distill.errors import ContextLengthError, RegistryError
from distill.models import LoadedModel, ModelConfig, load_target, logits_from_hidden
from distill.sampling import SamplingConfig

PROMPTS = ([5, 6, 7], [8, 9, 10, 11, 12], [13], [14, 15, 16, 17])
GREEDY = SamplingConfig(temperature=0.0)


@pytest.fixture(scope="module")
def target(tiny_pair_dirs: tuple[Path, Path]) -> LoadedModel:
    return load_target(ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu"))


@pytest.fixture(scope="module")
def backend(target: LoadedModel) -> LocalBackend:
    return LocalBackend(target, max_batch_size=3)


def answers(backend: Any, sampling: SamplingConfig, **settings: Any) -> list[Completion]:
    settings = {"max_new_tokens": 12, "seeds": range(len(PROMPTS)), **settings}
    found = list(backend.generate(PROMPTS, sampling, **settings))
    return sorted(found, key=lambda c: (c.prompt_index, c.sample_index))


def greedy_by_hand(target: LoadedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < max_new_tokens and (not ids or ids[-1] not in target.stop_token_ids):
        with torch.no_grad():
            logits_V = target.model(torch.tensor([prompt + ids])).logits[0, -1]
        ids.append(int(logits_V.argmax()))
    return ids


def test_greedy_completions_are_the_models_own_argmax(
    backend: LocalBackend, target: LoadedModel
) -> None:
    for completion in answers(backend, GREEDY):
        expected = greedy_by_hand(target, list(PROMPTS[completion.prompt_index]), 12)
        assert list(completion.token_ids) == expected
        is_stopped = expected[-1] in target.stop_token_ids
        assert completion.finish_reason == ("stop" if is_stopped else "length")


def test_each_prompt_is_answered_once_a_sample_and_the_same_way_again(
    backend: LocalBackend,
) -> None:
    first = answers(backend, SamplingConfig(), num_samples=2)
    assert [(c.prompt_index, c.sample_index) for c in first] == [
        (prompt, sample) for prompt in range(4) for sample in range(2)
    ]
    assert first[0].token_ids != first[1].token_ids
    again = answers(backend, SamplingConfig(), num_samples=2)
    assert [c.token_ids for c in again] == [c.token_ids for c in first]
    other = answers(backend, SamplingConfig(), num_samples=2, seeds=[9, 9, 9, 9])
    assert [c.token_ids for c in other] != [c.token_ids for c in first]


def test_hidden_states_give_back_the_law_each_token_was_drawn_from(
    backend: LocalBackend, target: LoadedModel
) -> None:
    for completion in answers(backend, SamplingConfig(), keep_hidden=True):
        assert completion.hidden_TD is not None
        assert completion.logsumexp_T is not None
        prompt = list(PROMPTS[completion.prompt_index])
        num_tokens = len(completion.token_ids)
        assert completion.hidden_TD.shape == (num_tokens, 64)
        assert completion.hidden_TD.dtype == torch.bfloat16
        with torch.no_grad():
            sequence = torch.tensor([prompt + list(completion.token_ids)])
            logits_TV = target.model(sequence).logits[0, len(prompt) - 1 : -1]
            rebuilt_TV = logits_from_hidden(target.model, completion.hidden_TD)
        torch.testing.assert_close(
            completion.logsumexp_T, logits_TV.logsumexp(-1), atol=1e-4, rtol=0
        )
        # bfloat16 keeps 8 bits of a state: logits agree to about a hundredth of their size.
        torch.testing.assert_close(rebuilt_TV, logits_TV, atol=0.1, rtol=0.02)


def test_nothing_is_kept_unless_asked(backend: LocalBackend) -> None:
    assert answers(backend, GREEDY)[0].hidden_TD is None


def test_no_prompts_are_no_completions(backend: LocalBackend) -> None:
    assert list(backend.generate([], GREEDY, max_new_tokens=4, seeds=[])) == []


def test_a_prompt_beyond_the_context_is_refused(backend: LocalBackend) -> None:
    with pytest.raises(ContextLengthError):
        list(backend.generate([[5] * 512], GREEDY, max_new_tokens=4, seeds=[0]))


def test_scores_are_the_next_token_law(backend: LocalBackend, target: LoadedModel) -> None:
    sequences = [[5, 6, 7, 8], list(range(20, 320 - 20))]
    for sequence, scores in zip(sequences, backend.score(sequences), strict=True):
        with torch.no_grad():
            expected_TV = target.model(torch.tensor([sequence])).logits[0, :-1].log_softmax(-1)
        torch.testing.assert_close(scores.log_probs_TK, expected_TV, atol=1e-4, rtol=0)
        assert scores.tail_mass_T.eq(0).all()
        assert scores.token_ids_TK[0].tolist() == list(range(backend.info.vocab_size))


def test_top_k_scores_are_sorted_and_leave_the_tails_mass(backend: LocalBackend) -> None:
    sequence = [5, 6, 7, 8, 9]
    (full,) = backend.score([sequence])
    (top,) = backend.score([sequence], top_k=5)
    assert top.token_ids_TK.shape == (4, 5)
    torch.testing.assert_close(
        top.log_probs_TK, full.log_probs_TK.sort(-1, descending=True)[0][:, :5]
    )
    torch.testing.assert_close(top.log_probs_TK.exp().sum(-1) + top.tail_mass_T, torch.ones(4))
    (everything,) = backend.score([sequence], top_k=10_000)
    assert everything.tail_mass_T.eq(0).all()


def test_a_sequence_beyond_the_context_is_not_scored(backend: LocalBackend) -> None:
    with pytest.raises(ContextLengthError, match="513 tokens, the target's context is 512"):
        list(backend.score([[5] * 513]))


def test_the_info_is_the_targets(backend: LocalBackend, target: LoadedModel) -> None:
    info = backend.info
    assert (info.hidden_size, info.max_length) == (64, 512)
    assert info.vocab_size == len(target.tokenizer)
    assert info.stop_token_ids == {1}
    assert info.revision == target.resolved.revision
    assert (info.dtype, info.device) == ("float32", "cpu")


def test_the_local_backend_is_found_by_name(tiny_pair_dirs: tuple[Path, Path]) -> None:
    config = ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu")
    made = BACKENDS.get("local")(config, max_batch_size=2)
    assert made.info.hidden_size == 64
    with pytest.raises(RegistryError, match="Did you mean 'local'"):
        BACKENDS.get("locl")


def test_seeds_are_fixed_and_spread() -> None:
    assert stable_seed(0, "a", 1) == stable_seed(0, "a", 1)
    many = {stable_seed(0, f"row-{n}", s) for n in range(100) for s in range(2)}
    assert len(many) == 200
    assert all(0 <= seed < 2**63 for seed in many)
    assert stable_seed(1, "a") != stable_seed("1", "a")
    assert sample_seed(5, 0) != sample_seed(5, 1)
