"""What is left out of a corpus: duplicates, near duplicates, prompts an evaluation asks too."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.corpus import Corpus, CorpusConfig, Prompt, read_corpus
from distill.corpus.config import NearDuplicatesConfig
from distill.corpus.filters import (
    _Likeness,
    character_ngrams,
    jaccard,
    reject_contaminated,
    reject_duplicates,
    reject_near_duplicates,
    word_ngrams,
    words_of,
)
from tests.helpers import write_jsonl

ESSAY = "write a long and careful essay about the sea and all the ships that ever sailed on it"


def prompts_of(texts: dict[str, str]) -> list[Prompt]:
    return [
        Prompt(name, "default", "train", ({"role": "user", "content": text},))
        for name, text in texts.items()
    ]


def kinds(prompts: list[Prompt]) -> dict[str, str | None]:
    return {prompt.prompt_id: prompt.reject_kind for prompt in prompts}


def read(path: Path, rows: list[dict[str, Any]], **settings: Any) -> Corpus:
    return read_corpus(CorpusConfig(path=write_jsonl(path, rows), **settings))


def test_one_question_about_many_documents_is_many_prompts_and_a_shared_instruction_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(system: str, text: str) -> dict[str, Any]:
        turns = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        return {"messages": turns}

    other = "the council of the town decided last week to build a bridge over the river"
    rows = [
        asked(ESSAY, "Summarize the document in three sentences."),
        asked(other, "Summarize the document in three sentences."),
        asked(ESSAY, "Translate it into the French language."),
        asked(f"{ESSAY}!", "Summarize the document in three sentences!"),
        {"prompt": "Summarize the document in three sentences."},
        {"prompt": "Summarize the document in three sentences.", "tools": [{"name": "read"}]},
    ]
    for is_exact in (False, True):
        if is_exact:  # the same verdict when the sketches let every pair through
            monkeypatch.setattr(_Likeness, "candidates", lambda likeness, text: {*likeness._texts})
        corpus = read(tmp_path / "p.jsonl", rows, near_duplicates={"threshold": 0.8})
        left_out = [n for n, p in enumerate(corpus.prompts) if p.reject_kind == "near_duplicate"]
        assert left_out in ([0], [3])


# ---------------------------------------------------------------- the same


def test_of_equal_content_the_smallest_id_stays_whatever_the_order() -> None:
    prompts = prompts_of({"c": "x", "a": "x", "b": "y", "d": "x "})
    expected = {"a": None, "b": None, "c": "duplicate", "d": None}
    assert kinds(reject_duplicates(prompts)) == expected
    assert kinds(reject_duplicates(prompts[::-1])) == expected
    assert reject_duplicates(prompts)[0].reject_reason == "same content as 'a'"


def test_duplicates_can_be_kept(tmp_path: Path) -> None:
    rows = [{"prompt": "x"}, {"prompt": "x"}, {"id": "own", "prompt": "x"}]
    marked = read(tmp_path / "p.jsonl", rows).prompts
    assert Counter(p.reject_kind for p in marked) == {"duplicate": 2, None: 1}
    kept = read(tmp_path / "p.jsonl", rows, deduplicate=False).prompts
    assert len({p.prompt_id for p in kept}) == 3
    assert {p.reject_kind for p in kept} == {None}


def test_a_shuffled_corpus_with_duplicates_is_the_same_corpus(tmp_path: Path) -> None:
    rows = [{"prompt": text} for text in ("x", "y", "x", "z", "x")]
    before = read(tmp_path / "a.jsonl", rows)
    after = read(tmp_path / "b.jsonl", rows[::-1])
    assert after.sha256 == before.sha256
    assert sorted(p.prompt_id for p in after.prompts) == sorted(p.prompt_id for p in before.prompts)


# ---------------------------------------------------------------- nearly the same


def test_near_duplicates_are_rejected_and_others_are_not() -> None:
    prompts = prompts_of(
        {"a": ESSAY, "b": f"{ESSAY}!", "c": ESSAY.upper(), "d": "What is the sum of two and two?"}
    )
    marked = reject_near_duplicates(prompts, NearDuplicatesConfig())
    assert kinds(marked) == {"a": None, "b": "near_duplicate", "c": "near_duplicate", "d": None}
    assert marked[2].reject_reason == "100% like 'a'"
    backward = reject_near_duplicates(prompts[::-1], NearDuplicatesConfig())
    assert kinds(backward) == kinds(marked)


def test_the_threshold_is_on_the_exact_similarity() -> None:
    prompts = prompts_of({"a": ESSAY, "b": ESSAY.replace("ships", "boats")})
    grams = [character_ngrams(prompt.text, 5) for prompt in prompts]
    found = jaccard(*grams)
    assert 0.7 < found < 0.9
    for threshold, kind in ((found - 0.01, "near_duplicate"), (found + 0.01, None)):
        marked = reject_near_duplicates(prompts, NearDuplicatesConfig(threshold=threshold))
        assert marked[1].reject_kind == kind


def test_jaccard_by_hand() -> None:
    assert character_ngrams("ABC  d", 3) == {"abc", "bc ", "c d"}
    assert character_ngrams("ab", 5) == {"ab"}
    assert jaccard(frozenset("abc"), frozenset("bcd")) == 0.5


def test_near_duplicates_are_off_unless_asked_for(tmp_path: Path) -> None:
    rows = [{"prompt": ESSAY}, {"prompt": f"{ESSAY}!"}]
    path = tmp_path / "p.jsonl"
    off = read(path, rows)
    on = read(path, rows, near_duplicates={"threshold": 0.8})
    assert [p.reject_kind for p in off.prompts] == [None, None]
    assert Counter(p.reject_kind for p in on.prompts) == {None: 1, "near_duplicate": 1}
    assert on.sha256 != off.sha256


# ---------------------------------------------------------------- known to an evaluation


def test_word_ngrams_by_hand() -> None:
    assert word_ngrams("The sea, the SEA!", 3) == [("the", "sea", "the"), ("sea", "the", "sea")]
    assert word_ngrams("One two", 3) == [("one", "two")]
    assert word_ngrams("...", 3) == []


def test_a_prompt_that_shares_enough_words_with_an_evaluation_is_rejected() -> None:
    words = " ".join(f"w{n}" for n in range(20))
    evaluation = prompts_of({"eval": f"Q: {words}", "short": "What is 2+2?", "mute": "!!"})
    prompts = prompts_of(
        {
            "same13": "please say " + " ".join(f"W{n}," for n in range(3, 16)),
            "same12": "please say " + " ".join(f"w{n}" for n in range(3, 15)) + " and more",
            "short": "what is 2 + 2",
            "longer": "what is 2+2 and why",
        }
    )
    marked = reject_contaminated(prompts, evaluation, 13)
    assert kinds(marked) == {
        "same13": "contaminated",
        "same12": None,
        "short": "contaminated",
        "longer": None,
    }
    assert marked[0].reject_reason == "shares 13 words with evaluation prompt 'eval'"


def test_the_evaluation_is_read_from_any_source_and_belongs_to_the_hash(tmp_path: Path) -> None:
    rows = [{"id": f"r{n}", "prompt": f"what is the meaning of number {n}"} for n in range(4)]
    evaluation = write_jsonl(tmp_path / "eval.jsonl", [{"question": rows[2]["prompt"]}])
    settings = {"against": [{"path": evaluation, "prompt_column": "question"}], "ngram": 5}
    clean = read(tmp_path / "p.jsonl", rows)
    marked = read(tmp_path / "p.jsonl", rows, decontaminate=settings)
    # "what is the meaning of" is five words that all of them share
    assert {p.reject_kind for p in marked.prompts} == {"contaminated"}
    longer = read(tmp_path / "p.jsonl", rows, decontaminate={**settings, "ngram": 7})
    assert [p.prompt_id for p in longer.prompts if p.reject_kind] == ["r2"]
    assert len({clean.sha256, marked.sha256, longer.sha256}) == 3


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_missing_evaluation_is_a_user_error(tmp_path: Path, kind: str) -> None:
    from distill.errors import CorpusError

    gone = {"against": [{"kind": kind, "path": tmp_path / "gone"}]}
    with pytest.raises(CorpusError, match="gone: No such file"):
        read(tmp_path / "p.jsonl", [{"prompt": "x"}], decontaminate=gone)


def test_the_evaluation_prompt_that_is_named_does_not_depend_on_their_order(
    tmp_path: Path,
) -> None:
    evaluation = [{"id": name, "prompt": "what is the sea"} for name in ("e2", "e1", "e3")]
    found = []
    for rows in (evaluation, evaluation[::-1]):
        settings = {"against": [{"path": write_jsonl(tmp_path / "eval.jsonl", rows)}], "ngram": 3}
        asked = [{"prompt": "What is the sea, again?"}]
        found.append(read(tmp_path / "p.jsonl", asked, decontaminate=settings))
    assert found[0].sha256 == found[1].sha256
    assert str(found[0].prompts[0].reject_reason).endswith("evaluation prompt 'e1'")


@pytest.mark.parametrize(
    ("evaluation", "asked"),
    [
        ("请告诉我法国的首都是哪一座城市", "你好，请告诉我法国的首都是哪一座城市，谢谢你"),
        (
            "日本の首都はどこですか教えてください",
            "すみません日本の首都はどこですか教えてください。",
        ),
        ("ประเทศไทยมีเมืองหลวงชื่อว่าอะไร", "สวัสดีครับประเทศไทยมีเมืองหลวงชื่อว่าอะไรครับ"),
    ],
)
def test_contamination_is_found_in_scripts_without_blanks(evaluation: str, asked: str) -> None:
    known = prompts_of({"e": evaluation})
    assert kinds(reject_contaminated(prompts_of({"p": asked}), known, 13)) == {"p": "contaminated"}
    assert kinds(reject_contaminated(prompts_of({"p": asked[:8]}), known, 13)) == {"p": None}
    assert words_of("GPT 是什么?") == ["gpt", "是", "什", "么"]


# ---------------------------------------------------------------- together


@given(
    st.lists(st.text(alphabet="ab ", min_size=1).filter(lambda t: t.strip()), min_size=1),
    st.randoms(use_true_random=False),
)
def test_every_row_stays_and_the_order_changes_no_verdict(texts: list[str], random: Any) -> None:
    prompts = prompts_of({f"p{n:03d}": text for n, text in enumerate(texts)})
    shuffled = list(prompts)
    random.shuffle(shuffled)
    verdicts = []
    for rows in (prompts, shuffled):
        marked = reject_duplicates(rows)
        marked = reject_near_duplicates(marked, NearDuplicatesConfig(num_permutations=16))
        assert [p.prompt_id for p in marked] == [p.prompt_id for p in rows]
        verdicts.append(kinds(marked))
    assert verdicts[0] == verdicts[1]
    kept = [p for p in prompts if verdicts[0][p.prompt_id] is None]
    assert len({p.text for p in kept}) == len(kept) >= 1
