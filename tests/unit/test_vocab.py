"""The pair gate: what is let through, what is refused, and that each refusal names its fix."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from distill.errors import PairMismatchError
from distill.models import ModelConfig, ModelShape, load_draft, load_target
from distill.vocab import check_loaded_pair, check_pair, vocabulary_sha256
from tests.helpers import make_tokenizer


def make_shape(**changes: Any) -> ModelShape:
    values: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(make_tokenizer()),
        "max_position_embeddings": 512,
    }
    return ModelShape(**{**values, **changes})


def swap_two_tokens(tokenizer: Any, first: str, second: str) -> Any:
    """A tokenizer of the same size in which two ids have traded their text."""
    from tokenizers import Tokenizer

    pieces = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = pieces["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    changed = make_tokenizer()
    changed._tokenizer = Tokenizer.from_str(json.dumps(pieces))
    return changed


def test_equal_tokenizers_pass_and_padding_is_counted() -> None:
    tokenizer = make_tokenizer()
    size = len(tokenizer)
    report = check_pair(
        tokenizer,
        make_shape(vocab_size=size + 20),
        make_tokenizer(),
        make_shape(vocab_size=size + 4),
    )
    assert report.num_shared_tokens == size
    assert (report.target_padded_rows, report.draft_padded_rows) == (20, 4)
    assert report.vocabulary_sha256 == vocabulary_sha256(tokenizer)
    assert any("pad the draft's embedding" in note for note in report.notes)


def test_a_real_pair_of_directories_passes(tiny_pair_dirs: Any) -> None:
    target = load_target(ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu"))
    report = check_loaded_pair(target, load_draft(tiny_pair_dirs[1], device="cpu"))
    assert report.notes == ()
    assert report.context_length == 512


def test_a_permuted_vocabulary_of_the_right_size_is_refused() -> None:
    tokenizer = make_tokenizer()
    permuted = swap_two_tokens(make_tokenizer(), "A", "B")
    assert len(permuted) == len(tokenizer)
    with pytest.raises(PairMismatchError, match=r"2 of \d+ ids differ .*'A'.*'B'.*Fix"):
        check_pair(tokenizer, make_shape(), permuted, make_shape())
    assert vocabulary_sha256(permuted) != vocabulary_sha256(tokenizer)


def test_a_tokenizer_beyond_the_embedding_is_refused_on_either_side() -> None:
    tokenizer = make_tokenizer()
    small = make_shape(vocab_size=len(tokenizer) - 1)
    with pytest.raises(PairMismatchError, match=r"draft rows: .* reaches id \d+.*resize"):
        check_pair(tokenizer, make_shape(), tokenizer, small)
    with pytest.raises(PairMismatchError, match="target rows"):
        check_pair(tokenizer, small, tokenizer, make_shape())


@pytest.mark.parametrize("name", ["eos", "bos", "pad"])
def test_another_special_token_is_refused_with_both_ids(name: str) -> None:
    tokenizer, other = make_tokenizer(), make_tokenizer()
    setattr(other, f"{name}_token", "A")
    theirs = getattr(tokenizer, f"{name}_token_id")
    with pytest.raises(PairMismatchError, match=rf"{name} token: id {theirs} .*tokenizer_config"):
        check_pair(tokenizer, make_shape(), other, make_shape())


def test_a_draft_that_takes_the_target_s_tokenizer_may_pad_and_template_otherwise() -> None:
    tokenizer, other = make_tokenizer(), make_tokenizer()
    other.pad_token = "A"
    other.chat_template = "{{ messages }}"
    check_pair(tokenizer, make_shape(), other, make_shape(), takes_target_tokenizer=True)
    other.eos_token = "A"
    with pytest.raises(PairMismatchError, match="eos token"):
        check_pair(tokenizer, make_shape(), other, make_shape(), takes_target_tokenizer=True)


def test_a_tokenizer_that_adds_a_begin_token_is_refused() -> None:
    from tokenizers.processors import TemplateProcessing

    other = make_tokenizer()
    other.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
    )
    with pytest.raises(PairMismatchError, match="encoding: of the same text") as caught:
        check_pair(make_tokenizer(), make_shape(), other, make_shape())
    theirs = make_tokenizer()("The quick brown fox, 42!")["input_ids"]
    assert f"token 0 and what follows it is {theirs[:3]} in the target" in str(caught.value)
    assert f"{[0, *theirs[:2]]} in the draft" in str(caught.value)


def test_encodings_that_start_alike_are_shown_from_where_they_differ() -> None:
    from tokenizers import normalizers

    target, other = make_tokenizer(), make_tokenizer()
    other.backend_tokenizer.normalizer = normalizers.Replace("42", "43")
    theirs, ours = (one("The quick brown fox, 42!")["input_ids"] for one in (target, other))
    # "2!" and "3!" are the last two tokens
    index = len(theirs) - 2
    assert theirs[:index] == ours[:index]
    with pytest.raises(PairMismatchError) as caught:
        check_pair(target, make_shape(), other, make_shape())
    assert (
        f"token {index} and what follows it is {theirs[-2:]} in the target and {ours[-2:]} in the "
        "draft"
    ) in str(caught.value)


def test_an_encoding_that_ends_early_is_shown_to_go_on_with_nothing() -> None:
    from tokenizers import normalizers

    target, other = make_tokenizer(), make_tokenizer()
    other.backend_tokenizer.normalizer = normalizers.Replace("!", "")
    end = target("The quick brown fox, 42!")["input_ids"][-1:]
    with pytest.raises(PairMismatchError, match="nothing in the draft") as caught:
        check_pair(target, make_shape(), other, make_shape())
    assert f"is {end} in the target" in str(caught.value)


def test_templates_must_match_unless_only_decoding_is_asked() -> None:
    other = make_tokenizer()
    other.chat_template = None
    with pytest.raises(PairMismatchError, match=r"none in the draft.*chat_template\.jinja"):
        check_pair(make_tokenizer(), make_shape(), other, make_shape())
    check_pair(make_tokenizer(), make_shape(), other, make_shape(), takes_target_tokenizer=True)


def test_a_shorter_draft_context_is_a_note_until_more_is_to_be_served() -> None:
    tokenizer = make_tokenizer()
    short = make_shape(max_position_embeddings=64)
    report = check_pair(tokenizer, make_shape(), tokenizer, short)
    assert report.context_length == 64
    assert any("beyond that the target decodes alone" in note for note in report.notes)
    with pytest.raises(PairMismatchError, match=r"100 tokens are to be served.*reaches 64"):
        check_pair(tokenizer, make_shape(), tokenizer, short, min_context_length=100)


def test_all_mismatches_are_reported_at_once() -> None:
    tokenizer = make_tokenizer()
    other = swap_two_tokens(copy.deepcopy(tokenizer), "A", "B")
    other.eos_token = "C"
    other.chat_template = "x"
    with pytest.raises(PairMismatchError) as caught:
        check_pair(tokenizer, make_shape(), other, make_shape())
    for part in ("vocabulary:", "eos token:", "chat template:"):
        assert part in str(caught.value)
    assert str(caught.value).count("Fix:") == 3
