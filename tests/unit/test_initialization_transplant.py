"""Owns vocabulary transplants: which rows stand for a token, in either alphabet, and what is kept.

Refuses to know training. The tokenizers are built here, small enough to match by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.errors import PairMismatchError
from distill.initialization import ExistingConfig, start_draft
from distill.initialization.token_bytes import TokenTexts
from distill.initialization.transplant import match_rows
from distill.models import LoadedModel, ModelConfig, load_target
from tests.helpers import make_llama, make_tokenizer, save_pretrained_dir

MARK = "\u2581"
SPECIALS = ["<unk>", "<s>", "</s>"]


def wrap(backend: Any, **specials: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, **specials)


def sentencepiece_tokenizer(pieces: list[str], merges: list[tuple[str, str]]) -> Any:
    """Ids: the three specials, 256 byte tokens, then the pieces."""
    from tokenizers import Tokenizer, decoders, models

    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return wrap(backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def byte_level_tokenizer(tokens: list[str], merges: list[tuple[str, str]] | None = None) -> Any:
    """Ids: <end>, then the tokens as byte-level BPE writes them (a space is Ġ)."""
    from tokenizers import Tokenizer, decoders, models

    vocab = {token: index for index, token in enumerate(["<end>", *tokens])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges or []))
    backend.decoder = decoders.ByteLevel()
    return wrap(backend, eos_token="<end>")


@pytest.fixture
def letters() -> Any:
    """A SentencePiece draft that knows a, b, ab, the space and " a"."""
    return sentencepiece_tokenizer(["a", "b", "ab", MARK, f"{MARK}a"], [("a", "b"), (MARK, "a")])


def ids_of(tokenizer: Any, *tokens: str) -> tuple[int, ...]:
    vocab = tokenizer.get_vocab()
    return tuple(vocab[token] for token in tokens)


def test_a_token_the_draft_has_no_row_for_counts_as_absent_and_is_reported(
    tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    """A tokenizer with tokens added after its model was saved: 300 ids, 280 rows."""
    target = load_target(ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu"))
    source = save_pretrained_dir(tmp_path / "draft", make_llama(280, seed=5), make_tokenizer())
    model = ModelConfig(model=str(source), device="cpu")
    start = start_draft(ExistingConfig(model=model, vocabulary="transplanted"), target, seed=0)
    assert start.report["rows"]["without_row"] == 20
    assert start.draft.shape.vocab_size == target.shape.vocab_size
    before, after = load_target(model).model.state_dict(), start.draft.model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(after[name][:280], before[name])
        # what the last ids stand for is written with other tokens now: a mean of their rows
        assert torch.isfinite(after[name]).all()


def test_ids_of_the_target_beyond_its_own_table_get_no_row(letters: Any) -> None:
    target = byte_level_tokenizer(["a", "ab", "b"])
    assert set(match_rows(TokenTexts(target, 3), TokenTexts(letters)).ids) == {0, 1, 2}


def test_a_special_token_without_a_row_is_neither_text_nor_a_role(letters: Any) -> None:
    texts = TokenTexts(byte_level_tokenizer(["a", "b"]), 2)
    assert texts.bytes_of == {1: b"a"}
    assert texts.split(b"ab") == []
    nothing = TokenTexts(letters, 2)  # <unk> and <s>
    found = match_rows(TokenTexts(byte_level_tokenizer(["a"])), nothing)
    assert (found.ids, found.counts["mean"]) == ({}, 2)


@pytest.mark.parametrize("num_rows", [300, 320])
def test_a_draft_of_the_targets_tokens_gets_its_rows_as_the_plan_says(
    tmp_path: Path, num_rows: int
) -> None:
    """Nothing is to be matched; only the padding differs."""
    tokenizer = make_tokenizer()
    big = save_pretrained_dir(tmp_path / "target", make_llama(num_rows, seed=4), tokenizer)
    small = save_pretrained_dir(tmp_path / "draft", make_llama(310, seed=5), tokenizer)
    target = load_target(ModelConfig(model=str(big), device="cpu"))
    config = ExistingConfig(
        model=ModelConfig(model=str(small), device="cpu"), vocabulary="transplanted"
    )
    own = load_target(config.model)
    start = start_draft(config, target, seed=0)
    assert start.draft.shape == config.shape_from(own.shape, target.shape)
    assert start.report == {"kind": "existing", "vocabulary": "shared"}
    table_VD = start.draft.model.get_input_embeddings().weight
    assert table_VD.shape[0] == num_rows
    assert torch.equal(table_VD[:300], own.model.get_input_embeddings().weight[:300])


def test_tokens_match_by_their_bytes_across_alphabets(letters: Any) -> None:
    """Each token of the target, and what stands for it in the draft, worked out by hand."""
    # "\u0120a" is " a"; "\u00c3\u00a9" the two bytes of é; "\u00c3" alone is half of it
    target = byte_level_tokenizer(["a", "ab", "Ġa", "Ġb", "aba", "Ã©", "Ã", "Ċ"])
    found = match_rows(TokenTexts(target), TokenTexts(letters))
    expected = {
        "<end>": ids_of(letters, "</s>"),  # another name, the same role
        "a": ids_of(letters, "a"),
        "ab": ids_of(letters, "ab"),
        "Ġa": ids_of(letters, f"{MARK}a"),
        "Ġb": ids_of(letters, MARK, "b"),
        "aba": ids_of(letters, "ab", "a"),
        "Ã©": ids_of(letters, "<0xC3>", "<0xA9>"),
        "Ã": ids_of(letters, "<0xC3>"),
        "Ċ": ids_of(letters, "<0x0A>"),
    }
    vocab = target.get_vocab()
    assert found.ids == {vocab[token]: ids for token, ids in expected.items()}
    # é is split into bytes; half of it and the line break are byte tokens, and so exact
    assert found.counts == {"exact": 5, "role": 1, "pieces": 3, "mean": 0}


def test_a_byte_level_draft_writes_any_text_and_says_so(letters: Any) -> None:
    draft = byte_level_tokenizer(["a", "b", "Ġ", "Ã", "©", "ab"], [("a", "b")])
    texts = TokenTexts(draft)
    assert tuple(texts.split("é ab".encode())) == ids_of(draft, "Ã", "©", "Ġ", "ab")
    assert texts.split(b"\xc3") == list(ids_of(draft, "Ã"))
    assert texts.split(b"\x00") == []  # this small one has no such byte
    counts = match_rows(TokenTexts(letters), texts).counts
    # of the draft's six tokens each is one of the target's; </s> plays <end>; " a" has two pieces;
    # <0x20>, <0x61>, <0x62> are further tokens of the same bytes as " ", "a" and "b"
    assert counts["exact"] == 6 + 3
    assert (counts["role"], counts["pieces"]) == (1, 1)
    assert sum(counts.values()) == len(letters)


def test_a_letter_is_preferred_to_the_byte_token_of_the_same_text(letters: Any) -> None:
    assert (TokenTexts(letters).id_of[b"a"],) == ids_of(letters, "a")
    assert (TokenTexts(letters).id_of[b"z"],) == ids_of(letters, "<0x7A>")


def test_text_that_is_written_like_a_control_token_is_not_one(letters: Any) -> None:
    target = byte_level_tokenizer(["</s>"])
    found = match_rows(TokenTexts(target), TokenTexts(letters))
    (index,) = ids_of(target, "</s>")
    assert found.ids[index] != ids_of(letters, "</s>")
    assert len(found.ids[index]) == len("</s>")


def test_a_tokenizer_of_another_kind_is_refused(letters: Any) -> None:
    from tokenizers import Tokenizer, decoders, models

    backend = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(PairMismatchError, match=r"WordPiece.*byte-level BPE and SentencePiece"):
        match_rows(TokenTexts(letters), TokenTexts(wrap(backend, unk_token="[UNK]")))


# ---------------------------------------------------------------- models


def saved(tmp_path: Path, name: str, model: Any, tokenizer: Any) -> ModelConfig:
    return ModelConfig(
        model=str(save_pretrained_dir(tmp_path / name, model, tokenizer)), device="cpu"
    )


@pytest.mark.parametrize("is_tied", [False, True])
def test_rows_are_those_of_the_token_or_the_mean_of_its_pieces_or_of_all(
    letters: Any, tmp_path: Path, is_tied: bool
) -> None:
    num_tokens = len(letters)
    small = make_llama(num_tokens + 4, seed=5, tie_word_embeddings=is_tied, eos_token_id=2)
    target_tokenizer = byte_level_tokenizer(["a", "Ġb", "x", "<|odd|>"])
    target_tokenizer.add_special_tokens({"additional_special_tokens": ["\u2603"]})
    target = load_target(
        saved(tmp_path, "target", make_llama(16, eos_token_id=0), target_tokenizer)
    )
    config = ExistingConfig(
        model=saved(tmp_path, "draft", small, letters), vocabulary="transplanted"
    )
    start = start_draft(config, target, seed=0)
    model = start.draft.model
    assert start.report["vocabulary"] == "transplanted"
    assert sum(start.report["rows"].values()) == len(target_tokenizer) == 6
    assert start.draft.shape.vocab_size == model.config.vocab_size == 16
    assert start.draft.tokenizer is target.tokenizer
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
    tables = [(small.model.embed_tokens.weight, model.model.embed_tokens.weight)]
    tables += [(small.lm_head.weight, model.lm_head.weight)]
    vocab = target_tokenizer.get_vocab()
    for old, new in tables:
        assert torch.equal(new[vocab["a"]], old[letters.get_vocab()["a"]])
        assert torch.equal(new[vocab["<end>"]], old[2])
        pieces = list(ids_of(letters, MARK, "b"))
        torch.testing.assert_close(new[vocab["Ġb"]], old[pieces].mean(dim=0))
        # rows without a token are the mean of the draft's tokens, its own padding left out
        mean_D = old[:num_tokens].mean(dim=0)
        for index in range(len(vocab), 16):
            torch.testing.assert_close(new[index], mean_D)


def test_a_token_that_cannot_be_written_is_the_mean_of_all(tmp_path: Path) -> None:
    draft_tokenizer = byte_level_tokenizer(["a", "b"])
    small = make_llama(3, seed=5, eos_token_id=0)
    target_tokenizer = byte_level_tokenizer(["b", "z"])
    target = load_target(saved(tmp_path, "target", make_llama(3, eos_token_id=0), target_tokenizer))
    config = ExistingConfig(
        model=saved(tmp_path, "draft", small, draft_tokenizer), vocabulary="transplanted"
    )
    start = start_draft(config, target, seed=0)
    assert start.report["rows"] == {"exact": 2, "role": 0, "pieces": 0, "mean": 1}
    expected = small.lm_head.weight.mean(dim=0)
    torch.testing.assert_close(start.draft.model.lm_head.weight[2], expected)


def test_a_permuted_vocabulary_is_put_in_order_bit_by_bit(
    tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    """The draft reads and writes the same texts as before: its logits, in the target's order."""
    from tokenizers import Tokenizer

    target = load_target(ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu"))
    ordered = make_tokenizer()
    state = json.loads(ordered.backend_tokenizer.to_str())
    size = len(ordered)
    # specials keep their ids, so that only the text is permuted
    new_id = {
        index: index if index < 2 else 2 + (index - 2) * 7 % (size - 2) for index in range(size)
    }
    assert len(set(new_id.values())) == size
    state["model"]["vocab"] = {t: new_id[i] for t, i in state["model"]["vocab"].items()}
    permuted = make_tokenizer()
    permuted._tokenizer = Tokenizer.from_str(json.dumps(state))
    small = make_llama(size, seed=3)
    config = ExistingConfig(
        model=saved(tmp_path, "permuted", small, permuted), vocabulary="transplanted"
    )
    start = start_draft(config, target, seed=0)
    assert start.report["rows"] == {"exact": size, "role": 0, "pieces": 0, "mean": 0}
    ids = [5, 200, 299, 64]
    with torch.no_grad():
        ours = start.draft.model(input_ids=torch.tensor([ids])).logits
        theirs = small(input_ids=torch.tensor([[new_id[i] for i in ids]])).logits
    assert torch.equal(ours, theirs[..., [new_id[i] for i in range(size)]])


def test_a_shared_vocabulary_is_left_as_it_is(tiny_pair_dirs: tuple[Path, Path]) -> None:
    target = load_target(ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu"))
    own = ModelConfig(model=str(tiny_pair_dirs[1]), device="cpu")
    start = start_draft(ExistingConfig(model=own, vocabulary="transplanted"), target, seed=0)
    assert start.report == {"kind": "existing", "vocabulary": "shared"}
    before, after = load_target(own).model.state_dict(), start.draft.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_other_tokens_without_a_transplant_name_the_setting(
    letters: Any, tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    target = load_target(ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu"))
    config = ExistingConfig(model=saved(tmp_path, "draft", make_llama(len(letters)), letters))
    with pytest.raises(PairMismatchError, match=r"ids differ[\s\S]*vocabulary: transplanted"):
        start_draft(config, target, seed=0)


def test_a_transplant_leaves_the_random_state_alone_and_repeats_itself(
    letters: Any, tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    target: LoadedModel = load_target(ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu"))
    config = ExistingConfig(
        model=saved(tmp_path, "draft", make_llama(len(letters), eos_token_id=2), letters),
        vocabulary="transplanted",
    )
    state = torch.random.get_rng_state()
    first = start_draft(config, target, seed=0).draft.model.state_dict()
    second = start_draft(config, target, seed=1).draft.model.state_dict()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
