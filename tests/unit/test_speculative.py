"""Owns the tests of the one call: streamed or not, its totals, its drafts by name, its docstring.
Refuses to prove losslessness: tests/exactness does. More of the call is in test_decode.py.
"""

from __future__ import annotations

import inspect
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distill.drafters.causal_lm import CausalLMDrafter
from distill.drafters.early_exit import EarlyExitDrafter
from distill.drafters.prompt_lookup import PromptLookupDrafter
from distill.errors import ConfigError, LogitsProcessorError, RegistryError
from distill.runtime.decode import DecodeEngine, DecodeRequest
from distill.runtime.draft_length import FixedDraftLength
from distill.runtime.lossless import audit
from distill.runtime.speculative import decode_batch, make_drafter, speculative_decode
from distill.runtime.stats import DecodeStats
from distill.runtime.streaming import DecodeStream, StreamPiece
from distill.sampling import SamplingConfig
from tests.helpers import make_llama, make_tokenizer

GREEDY = SamplingConfig(temperature=0.0)
PROMPTS: list[Any] = [[5, 6, 7], [9] * 12, [33], [100, 3, 100, 4], [8, 9]]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def pair(tokenizer: Any) -> tuple[Any, Any]:
    def loaded(model: Any) -> Any:
        stops = frozenset({tokenizer.eos_token_id})
        return SimpleNamespace(model=model, tokenizer=tokenizer, stop_token_ids=stops)

    target = make_llama(seed=0)
    draft = make_llama(seed=0)
    with torch.no_grad():
        draft.lm_head.weight += 0.05 * torch.randn(
            draft.lm_head.weight.shape, generator=torch.Generator().manual_seed(1)
        )
    return loaded(target), loaded(draft)


def forced(script: list[int], num_prompt: int) -> Any:
    """A logits processor that makes every answer the same given text."""

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        position = input_ids.shape[1] - num_prompt
        only = torch.full_like(scores, -torch.inf)
        only[0, script[min(position, len(script) - 1)]] = 0.0
        return only

    return processor


# --- streaming ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(temperature=0.9)])
@pytest.mark.parametrize("has_draft", [False, True])
def test_a_stream_joins_to_the_answers_of_the_same_call_without_it(pair, sampling, has_draft):
    target, draft = pair
    settings: dict[str, Any] = {"max_new_tokens": 24, "max_batch_size": 3, "seed": 4}
    draft = draft if has_draft else None
    answers = speculative_decode(target, draft, PROMPTS, sampling, **settings)
    pieces = list(speculative_decode(target, draft, PROMPTS, sampling, stream=True, **settings))
    for index, answer in enumerate(answers):
        mine = [piece for piece in pieces if piece.index == index]
        assert [t for piece in mine for t in piece.token_ids] == answer.token_ids
        assert "".join(piece.text or "" for piece in mine) == answer.text
        assert [piece.finish_reason for piece in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == answer.finish_reason
        assert mine[-1].result == answer
        assert all(piece.result is None for piece in mine[:-1])


def test_pieces_come_as_rounds_commit_and_rows_interleave(pair):
    target, _ = pair
    stream = speculative_decode(target, target, PROMPTS[:2], GREEDY, stream=True, max_new_tokens=12)
    assert isinstance(next(stream), StreamPiece)
    assert stream.stats.num_target_calls == 2  # one round of both rows, and no more
    rest = list(stream)
    assert [piece.index for piece in rest] == [1, 0, 1, 0, 1]
    assert [len(piece.token_ids) for piece in rest if piece.index == 0] == [5, 2]


def test_a_stream_counts_what_it_has_decoded_and_in_the_end_all_of_it(pair):
    target, draft = pair
    stream = speculative_decode(target, draft, PROMPTS, GREEDY, stream=True, max_new_tokens=20)
    assert stream.stats == DecodeStats()
    pieces = list(stream)
    answers = speculative_decode(target, draft, PROMPTS, GREEDY, max_new_tokens=20)
    assert stream.stats == answers.stats
    assert stream.stats.num_emitted == sum(len(piece.token_ids) for piece in pieces)


def test_the_totals_of_a_call_are_the_sum_over_its_answers(pair):
    target, draft = pair
    answers = speculative_decode(target, draft, PROMPTS, GREEDY, max_new_tokens=20)
    assert answers.stats.num_emitted == sum(len(answer.token_ids) for answer in answers)
    assert answers.stats.num_target_calls == sum(a.stats.num_target_calls for a in answers)
    assert 0 < answers.stats.num_accepted < answers.stats.num_tested


def test_streamed_characters_are_whole_and_stop_strings_never_begin_to_show(pair, tokenizer):
    target, draft = pair
    text = "Grüße 你好 👩‍👩‍👧 und STOPP oder STOP! nie"
    script = tokenizer(text)["input_ids"]
    settings: dict[str, Any] = {
        "stop_strings": ("STOP!",),
        "logits_processors": [forced(script, 1)],
        "max_new_tokens": len(script),
    }
    for k in (0, 1, 3, 7):
        pieces = list(
            speculative_decode(target, draft, [[5]], stream=True, num_draft_tokens=k, **settings)
        )
        so_far = ""
        for piece in pieces:
            so_far += piece.text or ""
            assert text.startswith(so_far)
            assert "\N{REPLACEMENT CHARACTER}" not in so_far
        assert so_far == "Grüße 你好 👩‍👩‍👧 und STOPP oder "
        assert pieces[-1].finish_reason == "stop"
        assert len(pieces) > 3


def test_a_prompt_that_cannot_be_decoded_is_refused_at_the_call_not_at_the_first_piece(pair):
    with pytest.raises(ConfigError, match="one new token"):
        speculative_decode(pair[0], None, PROMPTS, max_new_tokens=0, stream=True)


def test_a_closed_stream_ends_and_keeps_its_counts(pair):
    target, draft = pair
    stream = speculative_decode(target, draft, PROMPTS, GREEDY, stream=True, max_new_tokens=20)
    next(stream)
    counted = stream.stats.num_emitted
    stream.close()
    assert list(stream) == []
    assert stream.stats.num_emitted == counted > 0


def test_without_a_tokenizer_a_stream_has_tokens_and_no_text(pair):
    bare = SimpleNamespace(model=pair[0].model, tokenizer=None, stop_token_ids=frozenset())
    pieces = list(speculative_decode(bare, None, [[5, 6]], GREEDY, stream=True, max_new_tokens=3))
    assert [piece.text for piece in pieces] == [None] * 3
    assert pieces[-1].result is not None
    assert pieces[-1].result.text is None


def test_a_stream_of_no_prompts_is_empty(pair):
    assert list(speculative_decode(pair[0], None, [], stream=True)) == []


# --- the call ---------------------------------------------------------------------------------


def test_the_lines_of_the_docstring_run(pair, capsys):
    target, draft = pair
    doc = inspect.getdoc(speculative_decode) or ""
    lines = [line for line in doc.splitlines() if line.startswith("    ")]
    example = lines[: next(n for n, line in enumerate(lines) if "piece.finish_reason" in line) + 1]
    assert len(example) == 5
    code = textwrap.dedent("\n".join(example))
    exec(code, {"target": target, "draft": draft})
    printed = capsys.readouterr().out
    assert "length" in printed or "stop" in printed


def test_a_processor_that_remembers_is_refused_before_anything_is_computed(pair):
    target, _ = pair

    class Counting:
        calls = 0

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            self.calls += 1
            return scores

    def broken(*_: Any, **__: Any) -> None:
        raise AssertionError("the target was run")

    hook = target.model.model.embed_tokens.register_forward_hook(broken)
    try:
        with pytest.raises(LogitsProcessorError, match="Counting remembers"):
            speculative_decode(target, None, PROMPTS, logits_processors=[Counting()])
    finally:
        hook.remove()


def test_what_drafts_may_be_nothing_a_drafter_a_name_or_a_model(pair):
    drafter = PromptLookupDrafter(max_ngram=2)
    assert make_drafter(None) is None
    assert make_drafter(drafter) is drafter
    assert isinstance(make_drafter("prompt_lookup"), PromptLookupDrafter)
    assert isinstance(make_drafter(pair[1]), CausalLMDrafter)
    with pytest.raises(RegistryError, match="prompt_lookup"):
        make_drafter("prompt_lockup")
    with pytest.raises(ConfigError, match=r"EarlyExitDrafter\(num_layers=\.\.\.\)"):
        make_drafter("early_exit")


@pytest.mark.parametrize("draft", [EarlyExitDrafter(num_layers=1), PromptLookupDrafter()])
def test_a_drafter_is_used_as_it_is(pair, draft):
    target, _ = pair
    plain = speculative_decode(target, None, PROMPTS, GREEDY, max_new_tokens=20)
    answers = speculative_decode(target, draft, PROMPTS, GREEDY, max_new_tokens=20)
    assert [a.token_ids for a in answers] == [a.token_ids for a in plain]
    assert answers.stats.num_proposed > 0


def test_a_draft_length_decides_up_to_the_number_of_draft_tokens(pair):
    target, draft = pair
    answers = speculative_decode(
        target, draft, [[5, 6]], GREEDY, draft_length=FixedDraftLength(2), max_new_tokens=20
    )
    assert len(answers.stats.proposed_by_position) == 2


@pytest.mark.parametrize("draft", [None, "prompt_lookup", EarlyExitDrafter(num_layers=1)])
def test_a_vocabulary_subset_without_a_draft_model_is_refused_with_where_it_belongs(pair, draft):
    with pytest.raises(ConfigError, match=r"loaded draft model.*EarlyExitDrafter\(num_layers"):
        speculative_decode(pair[0], draft, PROMPTS, vocabulary_token_ids=[1, 2])


def test_early_exit_by_its_name_is_told_to_say_how_many_layers(pair):
    with pytest.raises(
        ConfigError, match=r"needs num_layers.*EarlyExitDrafter\(num_layers=\.\.\.\)"
    ):
        speculative_decode(pair[0], "early_exit", PROMPTS)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ("abc", "one text"),
        ([5, 6, 7], r"not 5; prompts is a list of them"),
        ([{"role": "user", "content": "hi"}], "one conversation"),
        ({"role": "user", "content": "hi"}, "one conversation"),
    ],
)
def test_one_prompt_where_several_are_expected_is_refused_by_every_call(pair, prompts, words):
    target, draft = pair
    with pytest.raises(ConfigError, match=words):
        speculative_decode(target, draft, prompts)
    with pytest.raises(ConfigError, match=words):
        audit(target, draft, prompts)


# --- streams that fail ------------------------------------------------------------------------


def requests_of(*lengths: int) -> list[DecodeRequest]:
    return [
        DecodeRequest([5, n], length, GREEDY, 0, frozenset()) for n, length in enumerate(lengths)
    ]


def engine_of(pair: Any, tokenizer: Any) -> DecodeEngine:
    return DecodeEngine(
        pair[0].model,
        None,
        num_draft_tokens=0,
        max_batch_size=4,
        max_length=99,
        tokenizer=tokenizer,
    )


def test_a_stream_that_cannot_begin_leaves_nothing_in_the_engine(pair, tokenizer):
    engine = engine_of(pair, tokenizer)
    with pytest.raises(ConfigError, match="one new token"):
        DecodeStream(engine, requests_of(3, 3, 0), tokenizer=tokenizer)
    assert not engine.has_work


def test_a_piece_that_cannot_be_read_does_not_take_the_others_along(pair, tokenizer):
    class Failing:
        num_calls = 0

        def decode(self, *arguments: Any, **settings: Any) -> str:
            self.num_calls += 1
            if self.num_calls == 1:
                raise RuntimeError("no such character")
            text: str = tokenizer.decode(*arguments, **settings)
            return text

    stream = DecodeStream(engine_of(pair, tokenizer), requests_of(1, 4), tokenizer=Failing())
    plain = decode_batch(engine_of(pair, tokenizer), requests_of(1, 4))
    pieces = []
    failures = 0
    for _ in range(9):
        try:
            pieces.append(next(stream))
        except RuntimeError:
            failures += 1
        except StopIteration:
            break
    assert failures == 1
    finished = {piece.index: piece.result for piece in pieces if piece.finish_reason}
    assert {index: result.token_ids for index, result in finished.items()} == {
        0: plain[0].token_ids,
        1: plain[1].token_ids,
    }


def test_a_stream_wants_its_engine_for_itself(pair, tokenizer):
    engine = engine_of(pair, tokenizer)
    engine.add(requests_of(3)[0])
    with pytest.raises(ConfigError, match="engine of its own"):
        DecodeStream(engine, requests_of(3))


def test_a_stream_whose_engine_was_stepped_by_somebody_else_ends_with_an_error(pair, tokenizer):
    engine = engine_of(pair, tokenizer)
    stream = DecodeStream(engine, requests_of(3), tokenizer=tokenizer)
    while engine.has_work:
        engine.step()
    with pytest.raises(RuntimeError, match="answers are missing"):
        next(stream)
    assert list(stream) == []
