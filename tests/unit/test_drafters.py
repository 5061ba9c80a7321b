"""Owns the tests of the drafters on their own: what they propose, read, forget and never touch.
Refuses a target; acceptance is played by hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distill.drafters.base import CacheSharer, Drafter, registry
from distill.drafters.causal_lm import CausalLMDrafter
from distill.drafters.prompt_lookup import PromptLookupDrafter
from distill.errors import PairMismatchError, RegistryError
from distill.sampling import SamplingConfig, logits_to_probs
from tests.helpers import make_llama

GREEDY = SamplingConfig(temperature=0.0)
SIZE = 60


@pytest.fixture(scope="module")
def model() -> Any:
    return make_llama(vocab_size=SIZE, seed=0)


@torch.no_grad()
def next_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


def greedy_text(model: Any, tokens: list[int], length: int) -> list[int]:
    for _ in range(length):
        tokens = [*tokens, int(next_logits(model, tokens).argmax())]
    return tokens[-length:]


def started(
    drafter: Any, prompts: list[list[int]], sampling: SamplingConfig = GREEDY, size: int = SIZE
) -> Any:
    drafter.start(vocabulary_size=size, max_batch_size=8)
    for handle, prompt in enumerate(prompts):
        drafter.join(handle, prompt, sampling, seed=handle)
    return drafter


def proposed(proposal: Any) -> list[list[int]]:
    rows = proposal.tokens_BK.tolist()
    return [row[:n] for row, n in zip(rows, proposal.num_tokens_B, strict=True)]


# --- every drafter ----------------------------------------------------------------------------


def test_every_drafter_is_registered_and_fulfils_the_contract(model):
    assert registry.names() == ("causal_lm", "early_exit", "prompt_lookup")
    early_exit = registry.get("early_exit")(num_layers=1)
    drafters = [CausalLMDrafter(model), early_exit, registry.get("prompt_lookup")()]
    assert all(isinstance(drafter, Drafter) for drafter in drafters)
    assert [isinstance(drafter, CacheSharer) for drafter in drafters] == [False, True, False]
    with pytest.raises(RegistryError, match="prompt_lookup"):
        registry.get("prompt_lockup")


# --- causal language model --------------------------------------------------------------------


def test_greedy_drafts_are_the_models_own_continuation(model):
    prompts = [[5, 6, 7], [9] * 14, [3]]
    drafter = started(CausalLMDrafter(model), prompts)
    proposal = drafter.propose([0, 1, 2], prompts, [3, 1, 4])
    assert proposal.num_tokens_B == [3, 1, 4]
    assert proposed(proposal) == [
        greedy_text(model, p, n) for p, n in zip(prompts, (3, 1, 4), strict=True)
    ]
    assert proposal.probs_BKV is None  # nothing of vocabulary size for greedy rows


def test_rows_come_back_in_the_order_they_were_asked_for(model):
    prompts = [[5, 6, 7], [9] * 14, [3]]
    drafter = started(CausalLMDrafter(model), prompts)
    proposal = drafter.propose([2, 0, 1], [prompts[2], prompts[0], prompts[1]], [2, 2, 2])
    assert proposed(proposal) == [greedy_text(model, prompts[n], 2) for n in (2, 0, 1)]


def test_probabilities_are_those_the_tokens_were_drawn_from(model):
    """faults: q of the raw logits, tokens from the processed ones."""
    sampling = SamplingConfig(temperature=0.7, top_k=5)
    prompt = [5, 6, 7]
    drafter = started(CausalLMDrafter(model), [prompt], sampling)
    proposal = drafter.propose([0], [prompt], [3])
    assert proposal.probs_BKV is not None
    assert proposal.probs_BKV.dtype == torch.float32
    tokens = list(prompt)
    for step, token in enumerate(proposal.tokens_BK[0].tolist()):
        expected = logits_to_probs(next_logits(model, tokens), sampling)
        torch.testing.assert_close(proposal.probs_BKV[0, step], expected, atol=1e-5, rtol=1e-4)
        assert proposal.probs_BKV[0, step, token] > 0
        tokens.append(token)


def test_the_draft_applies_the_penalties_of_the_target_to_its_own_drafts(model):
    sampling = SamplingConfig(temperature=0.0, frequency_penalty=50.0, presence_penalty=50.0)
    drafter = started(CausalLMDrafter(model), [[5, 6]], sampling)
    drafts = proposed(drafter.propose([0], [[5, 6]], [8]))[0]
    assert len(set(drafts)) == 8


def test_a_draft_whose_every_id_is_banned_proposes_nothing(model):
    sampling = SamplingConfig(bad_token_ids=(3, 4))
    drafter = started(CausalLMDrafter(model, vocabulary_token_ids=[3, 4]), [[5, 6]], sampling)
    assert drafter.propose([0], [[5, 6]], [3]).num_tokens_B == [0]


def test_nothing_is_drafted_behind_a_stop_token(model):
    drafts = greedy_text(model, [5, 6], 6)
    drafter = CausalLMDrafter(model)
    drafter.start(vocabulary_size=SIZE, max_batch_size=8)
    drafter.join(0, [5, 6], GREEDY, seed=0, stop_token_ids=frozenset({drafts[2]}))
    drafter.join(1, [5, 6], GREEDY, seed=0)
    proposal = drafter.propose([0, 1], [[5, 6], [5, 6]], [6, 6])
    assert proposed(proposal) == [drafts[: drafts.index(drafts[2]) + 1], drafts]


def test_what_fails_behind_a_drafted_token_ends_the_draft_and_what_fails_before_it_is_raised(model):
    first, second, *_ = greedy_text(model, [5, 6], 2)

    def failing(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if second in input_ids[0].tolist():
            raise KeyError(second)
        return scores

    drafter = CausalLMDrafter(model)
    drafter.start(vocabulary_size=SIZE, max_batch_size=8)
    drafter.join(0, [5, 6], GREEDY, seed=0, logits_processors=(failing,))
    assert proposed(drafter.propose([0], [[5, 6]], [6])) == [[first, second]]
    with pytest.raises(KeyError):
        drafter.propose([0], [[5, 6, first, second]], [6])


def test_after_each_round_the_cache_holds_what_stands_and_no_more(model):
    """faults: draft cache rewound too far on each rejection, or a hole after full acceptance."""
    tokens = [5, 6, 7]
    drafter = started(CausalLMDrafter(model), [tokens])
    for accepted in (0, 4, 2, 4, 4, 0):
        drafts = proposed(drafter.propose([0], [tokens], [4]))[0]
        assert drafts == greedy_text(model, tokens, 4)
        assert drafter.num_cached_tokens(0) == len(tokens) + 3
        num_valid = len(tokens) + accepted
        drafter.commit(0, num_valid)
        assert drafter.num_cached_tokens(0) == min(num_valid, len(tokens) + 3)
        tokens = [*tokens, *drafts[:accepted], 11]


def test_rounds_without_drafts_leave_no_holes(model):
    """faults: an adaptive K schedule of 4, 0, 0, 4 left holes in the draft's cache."""
    tokens = [5, 6, 7]
    drafter = started(CausalLMDrafter(model), [tokens])
    for number in (4, 0, 0, 0, 4, 0, 4):
        drafts = proposed(drafter.propose([0], [tokens], [number]))[0]
        assert drafts == greedy_text(model, tokens, 4)[:number]
        drafter.commit(0, len(tokens))
        tokens = [*tokens, *range(20, 33)]  # more missing tokens than are read with the others


def test_a_row_may_leave_and_others_keep_their_state(model):
    """faults: two different prompts on one slot."""
    prompts = [[5, 6, 7], [9] * 14, [3, 4]]
    drafter = started(CausalLMDrafter(model), prompts)
    drafter.propose([0, 1, 2], prompts, [2, 2, 2])
    for handle, prompt in enumerate(prompts):
        drafter.commit(handle, len(prompt))
    drafter.leave(0)
    drafter.join(7, [30, 31], GREEDY, seed=0)
    rows = [prompts[2], [30, 31], prompts[1]]
    assert proposed(drafter.propose([2, 7, 1], rows, [3, 3, 3])) == [
        greedy_text(model, row, 3) for row in rows
    ]


def test_drafts_of_a_row_do_not_depend_on_the_others(model):
    sampling = SamplingConfig(temperature=1.2)
    prompts = [[5, 6, 7], [9] * 14, [3, 4], [8]]
    together = started(CausalLMDrafter(model), prompts, sampling)
    rows = proposed(together.propose([0, 1, 2, 3], prompts, [4, 2, 3, 1]))
    for handle, prompt in enumerate(prompts):
        alone = CausalLMDrafter(model)
        alone.start(vocabulary_size=SIZE, max_batch_size=1)
        alone.join(99, prompt, sampling, seed=handle)
        assert proposed(alone.propose([99], [prompt], [4]))[0][: len(rows[handle])] == rows[handle]


def test_a_subset_restricts_proposals_and_probabilities(model):
    ids = [40, 3, 17, 58, 22]
    sampling = SamplingConfig(temperature=0.9)
    drafter = started(CausalLMDrafter(model, vocabulary_token_ids=ids), [[5, 6]], sampling)
    proposal = drafter.propose([0], [[5, 6]], [3])
    assert set(proposed(proposal)[0]) <= set(ids)
    probs_V = proposal.probs_BKV[0, 0]
    outside = torch.ones(SIZE, dtype=torch.bool)
    outside[ids] = False
    assert (probs_V[outside] == 0).all()
    expected = logits_to_probs(next_logits(model, [5, 6])[ids], sampling)
    torch.testing.assert_close(probs_V[ids], expected, atol=1e-5, rtol=1e-4)
    assert model.get_output_embeddings().weight.shape[0] == SIZE  # the model keeps its own head


@pytest.mark.parametrize("ids", [[], [5, SIZE], [-1, 4]])
def test_a_subset_with_ids_that_do_not_exist_is_refused(model, ids):
    with pytest.raises(PairMismatchError, match=f"0 to {SIZE - 1}"):
        started(CausalLMDrafter(model, vocabulary_token_ids=ids), [])


def test_ids_the_target_lacks_are_never_proposed(model):
    size = 20
    drafter = started(CausalLMDrafter(model), [[5, 6]], SamplingConfig(temperature=3.0), size=size)
    proposal = drafter.propose([0], [[5, 6]], [8])
    assert max(proposed(proposal)[0]) < size
    assert proposal.probs_BKV.shape == (1, 8, size)


def test_a_target_with_more_ids_gets_probability_zero_for_them(model):
    drafter = started(CausalLMDrafter(model), [[5, 6]], SamplingConfig(), size=SIZE + 10)
    probs = drafter.propose([0], [[5, 6]], [2]).probs_BKV
    assert probs.shape == (1, 2, SIZE + 10)
    assert (probs[..., SIZE:] == 0).all()


def test_a_row_with_an_id_the_draft_cannot_read_goes_on_without_drafts(model):
    rows = [[5, SIZE + 3], [5, 6]]
    drafter = started(CausalLMDrafter(model), rows, size=SIZE + 10)
    assert drafter.propose([0, 1], rows, [2, 2]).num_tokens_B == [0, 2]


def test_the_end_of_the_drafts_context_ends_the_drafts_of_that_row_only():
    model = make_llama(vocab_size=SIZE, max_positions=16)
    rows = [list(range(3, 3 + size)) for size in (4, 14, 15, 16, 17, 30)]
    drafter = started(CausalLMDrafter(model), rows)
    proposal = drafter.propose(list(range(6)), rows, [4] * 6)
    # The last draft itself is not read, hence one more than the places that are left.
    assert proposal.num_tokens_B == [4, 3, 2, 1, 0, 0]
    for row, drafts in zip(rows, proposed(proposal), strict=True):
        assert drafts == (greedy_text(model, row, len(drafts)) if drafts else [])


def test_starting_again_forgets_every_row(model):
    drafter = started(CausalLMDrafter(model), [[5, 6, 7]])
    drafter.propose([0], [[5, 6, 7]], [2])
    started(drafter, [[9, 9]])
    assert drafter.num_cached_tokens(0) == 0
    assert proposed(drafter.propose([0], [[9, 9]], [3])) == [greedy_text(model, [9, 9], 3)]


# --- prompt lookup ----------------------------------------------------------------------------


def lookup(tokens: list[int], number: int, *, size: int = 100, **settings: int) -> list[int]:
    drafter = started(PromptLookupDrafter(**settings), [tokens], size=size)
    proposal = drafter.propose([0], [tokens], [number])
    assert proposal.probs_BKV is None
    return proposed(proposal)[0]


def test_the_continuation_of_the_longest_match_is_copied():
    assert lookup([1, 2, 3, 4, 5, 9, 2, 3], 2) == [4, 5]
    assert lookup([7, 3, 8, 1, 2, 3, 4, 1, 2, 3], 1) == [4]


def test_among_equal_matches_the_latest_wins():
    assert lookup([3, 1, 3, 2, 3], 1) == [2]


def test_a_continuation_ends_where_the_text_ends():
    assert lookup([8, 8, 8], 5) == [8]


def test_without_a_match_nothing_is_proposed():
    assert lookup([1, 2, 3], 4) == []
    assert lookup([1], 4) == []
    assert lookup([1, 2, 1], 4, min_ngram=2) == []


def test_a_copied_id_that_the_target_lacks_ends_the_draft():
    assert lookup([1, 2, 50, 7, 1], 3, size=40) == [2]


def test_rows_without_a_match_are_padded():
    drafter = started(PromptLookupDrafter(), [[1, 2, 1], [4]])
    proposal = drafter.propose([0, 1], [[1, 2, 1], [4]], [2, 2])
    assert proposal.num_tokens_B == [2, 0]
    assert proposal.tokens_BK.shape == (2, 2)
