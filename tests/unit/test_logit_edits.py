"""Owns the tests of what edits one row of logits: biases, bans, penalties, logits processors.
Refuses to know decoding. Oracles: hand-computed values and transformers' own processors.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distill.errors import LogitsProcessorError, SamplingError
from distill.logit_edits import check_processors, edit_logits, has_edits
from distill.sampling import SamplingConfig


def edited(logits: list[float], sampling: SamplingConfig, prompt=(), output=(), stops=()):
    return edit_logits(
        torch.tensor(logits),
        sampling,
        prompt_token_ids=list(prompt),
        output_token_ids=list(output),
        stop_token_ids=stops,
    ).tolist()


# --- editing logits ---------------------------------------------------------------------------


def test_bias_is_added_and_bans_remove():
    sampling = SamplingConfig(logit_bias={0: 2.5}, bad_token_ids=(2,))
    assert edited([1.0, 1.0, 9.0], sampling) == [3.5, 1.0, -math.inf]


def test_stop_tokens_are_banned_until_min_tokens_are_out():
    sampling = SamplingConfig(min_tokens=2)
    assert edited([1.0, 2.0], sampling, output=[0], stops={1}) == [1.0, -math.inf]
    assert edited([1.0, 2.0], sampling, output=[0, 0], stops={1}) == [1.0, 2.0]


def test_repetition_penalty_looks_at_prompt_and_output():
    sampling = SamplingConfig(repetition_penalty=2.0)
    assert edited([4.0, -4.0, 4.0], sampling, prompt=[0, 0], output=[1]) == [2.0, -8.0, 4.0]


def test_additive_penalties_look_at_the_output_only():
    sampling = SamplingConfig(presence_penalty=0.5, frequency_penalty=0.25)
    assert edited([1.0, 1.0, 1.0], sampling, prompt=[2], output=[0, 0, 1]) == [0.0, 0.25, 1.0]


def test_repetition_penalty_equals_the_processor_of_transformers():
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(2))
    seen = [3, 3, 17, 29, 0]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([seen]), logits.clone())[0]
    row = edit_logits(
        logits[0],
        SamplingConfig(repetition_penalty=1.3),
        prompt_token_ids=seen[:2],
        output_token_ids=seen[2:],
    )
    assert torch.equal(row, expected)


def test_editing_leaves_its_input_alone():
    logits = torch.zeros(3)
    edit_logits(
        logits, SamplingConfig(bad_token_ids=(0,)), prompt_token_ids=[1], output_token_ids=[]
    )
    assert logits.tolist() == [0.0, 0.0, 0.0]


def test_ids_in_the_history_that_the_target_cannot_emit_are_ignored():
    sampling = SamplingConfig(repetition_penalty=2.0, presence_penalty=1.0)
    assert edited([4.0, 4.0], sampling, prompt=[7], output=[9, 1]) == [4.0, 1.0]


def test_a_ban_of_everything_is_an_error_with_a_way_out():
    with pytest.raises(SamplingError, match="Remove one"):
        edited([1.0, 2.0], SamplingConfig(bad_token_ids=(0, 1)))


def test_an_id_outside_the_vocabulary_is_an_error_with_both_numbers():
    with pytest.raises(SamplingError, match=r"7 .* 2 ids"):
        edited([1.0, 2.0], SamplingConfig(logit_bias={7: 1.0}))


# --- bad words --------------------------------------------------------------------------------


def test_the_last_id_of_a_bad_word_is_banned_where_the_row_ends_with_the_rest():
    sampling = SamplingConfig(bad_words_ids=((1, 2, 0), (3,), (2, 1)))
    assert edited([1.0] * 4, sampling, prompt=[1], output=[2]) == [
        -math.inf,
        -math.inf,
        1.0,
        -math.inf,
    ]
    assert edited([1.0] * 4, sampling, prompt=[2, 1], output=[]) == [1.0, 1.0, 1.0, -math.inf]
    assert edited([1.0] * 4, sampling, prompt=[2], output=[1, 2, 1]) == [1.0, 1.0, 1.0, -math.inf]


def test_a_bad_word_may_begin_in_the_prompt_and_need_not_fit_it():
    sampling = SamplingConfig(bad_words_ids=((0, 1, 2, 3),))
    assert edited([1.0] * 4, sampling, prompt=[1], output=[2]) == [1.0] * 4
    assert edited([1.0] * 4, sampling, prompt=[0, 1], output=[2])[3] == -math.inf


def test_bad_words_equal_the_processor_of_transformers():
    from transformers.generation.logits_process import NoBadWordsLogitsProcessor

    words = [[4], [3, 3], [1, 2, 3], [0, 1, 2]]
    generator = torch.Generator().manual_seed(3)
    theirs = NoBadWordsLogitsProcessor(words, eos_token_id=9)
    sampling = SamplingConfig(bad_words_ids=tuple(map(tuple, words)))
    for preceding in itertools.product(range(4), repeat=4):
        logits = torch.randn(1, 10, generator=generator)
        expected = theirs(torch.tensor([preceding]), logits)[0]
        row = edit_logits(
            logits[0], sampling, prompt_token_ids=preceding[:1], output_token_ids=preceding[1:]
        )
        assert torch.equal(row, expected)


def test_an_id_of_a_bad_word_outside_the_vocabulary_is_an_error():
    with pytest.raises(SamplingError, match=r"7 .* 2 ids"):
        edited([1.0, 2.0], SamplingConfig(bad_words_ids=((7, 0),)))


# --- logits processors --------------------------------------------------------------------------


class Recording:
    """Adds what it was told to one score, and remembers nothing but that."""

    def __init__(self, seen: list[tuple[list[list[int]], list[int], torch.dtype]]) -> None:
        self.seen = lambda *call: seen.append(call)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen(input_ids.tolist(), list(scores.shape), scores.dtype)
        return scores + torch.tensor([0.0, 1.0, 0.0])


def run(*processors: Any, logits: Tensor | None = None, sampling: Any = None) -> Tensor:
    return edit_logits(
        torch.tensor([1.0, 2.0, 3.0]) if logits is None else logits,
        sampling or SamplingConfig(),
        prompt_token_ids=[2, 0],
        output_token_ids=[1],
        logits_processors=processors,
    )


def test_processors_see_prompt_and_output_and_run_in_order_after_the_edits():
    seen: list[Any] = []
    row = run(Recording(seen), lambda ids, s: s * 2, sampling=SamplingConfig(logit_bias={0: 5.0}))
    assert row.tolist() == [12.0, 6.0, 6.0]
    assert seen == [([[2, 0, 1]], [1, 3], torch.float32)]


def test_half_precision_logits_reach_processors_in_float32():
    seen: list[Any] = []
    run(Recording(seen), logits=torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))
    assert seen[0][2] == torch.float32


def test_a_processor_may_work_in_place_without_touching_the_logits():
    def in_place(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.fill_(1.0)

    logits = torch.tensor([1.0, 2.0, 3.0])
    assert run(in_place, logits=logits).tolist() == [1.0, 1.0, 1.0]
    assert logits.tolist() == [1.0, 2.0, 3.0]


def test_a_processor_that_excludes_everything_is_an_error_with_a_way_out():
    with pytest.raises(SamplingError, match=r"logits_processors .* Remove one"):
        run(lambda ids, s: s.fill_(-torch.inf))


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (lambda ids, s: s[:, :2], r"\[1, 2\] .* shape \[1, 3\]"),
        (lambda ids, s: s[0], r"\[3\]"),
        (lambda ids, s: s.long(), "int64"),
        (lambda ids, s: None, "NoneType"),
        (lambda ids, s: s * torch.nan, "not a number"),
        (lambda ids, s: s + torch.inf, "infinite"),
    ],
)
def test_what_is_no_row_of_scores_is_refused_with_what_came_back(processor, words):
    with pytest.raises(LogitsProcessorError, match=words):
        run(processor)
    with pytest.raises(LogitsProcessorError, match=words):
        check_processors([processor], prompt_token_ids=[2], vocabulary_size=3)


class Counting:
    """Counts its calls, which never shows in what it answers."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores


class Bag:
    """Holds what it saw in a tensor, one object deeper."""

    def __init__(self) -> None:
        self.inner = type("Inner", (), {})()
        self.inner.seen = torch.zeros(9)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.inner.seen[input_ids[0, -1]] += 1
        return scores


class Ring:
    """A window of what it saw, in an array of numpy."""

    def __init__(self) -> None:
        self.torch = torch  # a module among the attributes is no state
        self.last = np.zeros(4, dtype=np.int64)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.last = np.roll(self.last, 1)
        self.last[0] = int(input_ids[0, -1])
        return scores


def alternating() -> Any:
    calls = itertools.count()
    return lambda ids, s: s + next(calls) % 2


def incremental() -> Any:
    """Bans what came last in any earlier call: right in plain decoding, wrong after a rollback."""
    banned: set[int] = set()

    def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
        banned.add(int(input_ids[0, -1]))
        scores[:, list(banned)] = -9.0
        return scores

    return processor


@pytest.mark.parametrize("make", [Counting, Bag, Ring, alternating, incremental])
def test_a_processor_that_remembers_is_refused_by_name(make):
    with pytest.raises(LogitsProcessorError, match=r"remembers its calls.*input_ids"):
        check_processors([make()], prompt_token_ids=[2, 3], vocabulary_size=9)


def test_the_stateful_watermark_of_transformers_is_refused_and_the_stateless_one_is_not():
    from transformers.generation.logits_process import (
        SynthIDTextWatermarkLogitsProcessor,
        WatermarkLogitsProcessor,
    )

    stateful = SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3,
        keys=[5, 7],
        sampling_table_size=64,
        sampling_table_seed=0,
        context_history_size=16,
        device=torch.device("cpu"),
    )
    with pytest.raises(LogitsProcessorError, match="SynthID"):
        check_processors([stateful], prompt_token_ids=[2, 3, 4, 5], vocabulary_size=20)
    stateless = WatermarkLogitsProcessor(vocab_size=20, device="cpu")
    check_processors([stateless], prompt_token_ids=[2, 3, 4, 5], vocabulary_size=20)


def test_a_processor_that_prepares_itself_at_its_first_call_is_no_state():
    from transformers.generation.logits_process import NoBadWordsLogitsProcessor

    processor = NoBadWordsLogitsProcessor([[1, 2], [3]])  # builds its tensors when first called
    check_processors([processor], prompt_token_ids=[2, 3], vocabulary_size=9)


def test_a_grammar_is_asked_about_texts_it_allows_only():
    """A grammar raises on a text it forbids; looking for state must not show it one."""

    def grammar(input_ids: Tensor, scores: Tensor) -> Tensor:
        text = input_ids[0].tolist()
        assert all(b == (a + 1) % 9 for a, b in itertools.pairwise(text)), text
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, (text[-1] + 1) % 9] = 0.0
        return scores + allowed

    check_processors([grammar], prompt_token_ids=[2, 3], vocabulary_size=9)


@pytest.mark.parametrize(
    "processor",
    [
        lambda ids, scores: scores - scores.mean(-1, keepdim=True),
        lambda ids, scores: scores * (ids[:, -1:] != 3),  # 0 times -inf
    ],
)
def test_a_processor_that_cannot_bear_excluded_tokens_is_refused_beforehand(processor):
    with pytest.raises(LogitsProcessorError, match="scores may hold it beforehand"):
        check_processors([processor], prompt_token_ids=[2, 3], vocabulary_size=9)


@pytest.mark.parametrize("vocabulary_size", [1, 2, 9])
def test_what_a_processor_likes_best_is_never_excluded_in_the_asking(vocabulary_size):
    """A grammar may take no answer for a fault, where it allows one token only."""

    def grammar(input_ids: Tensor, scores: Tensor) -> Tensor:
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, (input_ids[0, -1] + 1) % vocabulary_size] = 0.0
        assert (scores + allowed).isfinite().any()
        return scores + allowed

    check_processors([grammar], prompt_token_ids=[0], vocabulary_size=vocabulary_size)


@pytest.mark.parametrize("best", [7, 4])
def test_a_grammar_is_not_asked_about_a_text_that_is_over(best):
    """Neither behind a stop token (7) nor where it allows nothing more (behind 4)."""

    def grammar(input_ids: Tensor, scores: Tensor) -> Tensor:
        text = input_ids[0].tolist()
        assert 7 not in text, text
        only = torch.full_like(scores, -torch.inf)
        if text[-1] == 3:
            only[:, best] = 0.0
        assert text[-1] in (3, 4), text
        return scores + only

    check_processors(
        [grammar], prompt_token_ids=[2, 3], vocabulary_size=9, stop_token_ids=frozenset({7, 500})
    )


def test_processors_count_as_edits():
    assert has_edits(SamplingConfig(), [Counting()])
    assert has_edits(SamplingConfig(bad_words_ids=((1, 2),)))
    assert not has_edits(SamplingConfig(temperature=0.3, top_k=4))
