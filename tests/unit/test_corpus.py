"""The corpus: rows in, prompts out; malformed rows, ids, splits; the chat template applied once.

Fault classes met here: two begin tokens (template plus tokenizer), silently skipped rows,
resume by row index instead of by id.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distill.config import fingerprint_view, parse_config
from distill.corpus import (
    Corpus,
    CorpusConfig,
    Prompt,
    hash_fraction,
    prompt_token_ids,
    read_corpus,
)
from distill.errors import ConfigError, CorpusError
from tests.helpers import make_corpus_rows, make_tokenizer, write_jsonl


def read(path: Path, rows: list[dict[str, Any]], **settings: Any) -> Corpus:
    write_jsonl(path, rows)
    return read_corpus(CorpusConfig(path=path, **settings))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(
    "row",
    [
        {"turns": ["Why?", "And then?"]},
        {"prompt": "Why?"},
        {"prompt": [{"role": "user", "content": "Why?"}]},
        {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "."}]},
        {"turns": ["Why?"], "category": "another column", "answer": None},
    ],
)
def test_every_form_of_a_row_gives_its_first_user_turn(path: Path, row: dict[str, Any]) -> None:
    (prompt,) = read(path, [row]).prompts
    assert prompt.text == "Why?"
    assert prompt.messages == ({"role": "user", "content": "Why?"},)
    assert prompt.task == "default"
    assert prompt.reject_reason is None


def test_a_system_message_of_the_row_is_kept(path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    (prompt,) = read(path, [{"messages": messages}]).prompts
    assert [message["role"] for message in prompt.messages] == ["system", "user"]


def test_another_column_can_hold_the_prompt(path: Path) -> None:
    row = {"question": "Why?", "prompt": "not this"}
    assert read(path, [row], prompt_column="question").prompts[0].text == "Why?"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "x"}, r"exactly one of turns, prompt, messages.*its keys: text"),
        ({"turns": ["a"], "prompt": "b"}, r"it has turns, prompt"),
        ({"turns": []}, r"a text or a list"),
        ({"turns": [3]}, r"holds 3"),
        ({"turns": ["  "]}, r"a user turn is empty"),
        ({"messages": [{"role": "bot", "content": "x"}]}, r"role 'bot'; known: system"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"not a text"),
        ({"turns": ["a"], "id": ["x"]}, r"id is \['x'\]"),
        ({"turns": ["a"], "split": "test"}, r"split is 'test'; write 'train' or 'held_out'"),
    ],
)
def test_a_malformed_row_is_named_with_its_line(path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(CorpusError, match=rf"prompts\.jsonl:2: .*{said}"):
        read(path, [{"turns": ["fine"]}, row])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"turns": ["a"]}\n{"turns": \n', r"prompts\.jsonl:2: not JSON"),
        ('["a"]\n', r"prompts\.jsonl:1: a list"),
        ('{"turns": ["a"]}\n{"n": ' + "9" * 5000 + "}", r"prompts\.jsonl:2: cannot be read"),
        ("[" * 200_000, r"prompts\.jsonl:1: cannot be read"),
        ("\n\n", "holds no prompt"),
    ],
)
def test_a_file_that_is_not_rows_is_named_with_its_line(path: Path, text: str, said: str) -> None:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CorpusError, match=said):
        read_corpus(CorpusConfig(path=path))


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (r'{"prompt": "a \ud83d b"}', "a user message"),
        (r'{"messages": [{"role": "system", "content": "\ude00"}]}', "a system message"),
        (r'{"prompt": "a", "id": "\ud83d"}', "id"),
        (r'{"prompt": "a", "task": "\ud83d"}', "task"),
    ],
)
def test_half_of_a_surrogate_pair_is_named_with_its_line(path: Path, row: str, what: str) -> None:
    path.write_text('{"prompt": "fine"}\n' + row + "\n", encoding="utf-8")
    with pytest.raises(CorpusError, match=rf"prompts\.jsonl:2: {what} holds '\\ud"):
        read_corpus(CorpusConfig(path=path))


def test_a_whole_surrogate_pair_is_one_character(path: Path) -> None:
    path.write_text(r'{"prompt": "\ud83d\ude00"}', encoding="utf-8")
    assert read_corpus(CorpusConfig(path=path)).prompts[0].text == "\U0001f600"


def test_an_unreadable_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"none\.jsonl: No such file"):
        read_corpus(CorpusConfig(path=tmp_path / "none.jsonl"))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"turns": ["é"]}'.encode("latin-1"))
    with pytest.raises(CorpusError, match="UTF-8"):
        read_corpus(CorpusConfig(path=latin))
    with pytest.raises(CorpusError, match="as parquet"):
        read_corpus(CorpusConfig(kind="parquet", path=latin))


def test_rows_without_a_user_turn_first_are_kept_with_a_reason(path: Path) -> None:
    corpus = read(
        path,
        [
            {"messages": [{"role": "assistant", "content": "Hello"}]},
            {"messages": [{"role": "system", "content": "Be brief."}]},
            {"turns": ["Why?"]},
        ],
    )
    reasons = [prompt.reject_reason for prompt in corpus.prompts]
    assert reasons == [
        "the first turn is the assistant's, not the user's",
        "it has no user turn",
        None,
    ]


def test_a_byte_order_mark_and_blank_lines_are_no_obstacle(path: Path) -> None:
    path.write_text('\ufeff{"turns": ["a"]}\n\n{"turns": ["b"]}', encoding="utf-8")
    assert [p.text for p in read_corpus(CorpusConfig(path=path)).prompts] == ["a", "b"]


# ---------------------------------------------------------------- other sources


def test_parquet_and_a_dataset_give_the_same_prompts_as_jsonl(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = make_corpus_rows(6)
    expected = read(path, rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert read_corpus(CorpusConfig(kind="parquet", path=tmp_path / "rows.parquet")) == expected

    asked: list[Any] = []

    def load_dataset(name: str, subset: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((name, subset, split, streaming))
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = CorpusConfig(kind="datasets", name="org/prompts", subset="main", split="test")
    assert read_corpus(config) == expected
    streamed = config.model_copy(update={"streaming": True})
    assert read_corpus(streamed) == expected
    assert asked == [("org/prompts", "main", "test", False), ("org/prompts", "main", "test", True)]


def test_a_dataset_that_cannot_be_loaded_names_the_way_out() -> None:
    with pytest.raises(CorpusError, match=r"'train' of the dataset '/nowhere/x'.*subset and split"):
        read_corpus(CorpusConfig(kind="datasets", name="/nowhere/x"))


def test_a_dataset_that_cannot_be_built_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from datasets.exceptions import DatasetGenerationError

    def load_dataset(name: str, subset: str | None, *, split: str, streaming: bool) -> Any:
        raise DatasetGenerationError("a broken file")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(CorpusError, match=r"'org/prompts': a broken file\. Check name"):
        read_corpus(CorpusConfig(kind="datasets", name="org/prompts"))


@pytest.mark.parametrize(("kind", "needed"), [("jsonl", "path"), ("datasets", "name")])
def test_a_corpus_needs_its_place(kind: str, needed: str) -> None:
    with pytest.raises(ConfigError, match=f"needs `{needed}:`"):
        parse_config({"kind": kind}, CorpusConfig)


# ---------------------------------------------------------------- ids, splits, hash


def test_ids_come_from_content_so_order_does_not_matter(path: Path) -> None:
    rows = [{"turns": [f"question {n}"]} for n in range(20)]
    forward, backward = read(path, rows), read(path, rows[::-1])
    assert {p.text: (p.prompt_id, p.split) for p in forward.prompts} == {
        p.text: (p.prompt_id, p.split) for p in backward.prompts
    }


def test_an_id_used_twice_names_both_lines(path: Path) -> None:
    rows = [{"id": "a", "turns": ["x"]}, {"id": "b", "turns": ["y"]}, {"id": "a", "turns": ["z"]}]
    with pytest.raises(CorpusError, match=r"jsonl:3: id 'a' is already used at .*jsonl:1"):
        read(path, rows)


def test_the_same_content_twice_is_kept_once_and_counted(path: Path) -> None:
    corpus = read(path, [{"turns": ["x"]}, {"turns": ["y"]}, {"turns": ["x"]}])
    assert len({prompt.prompt_id for prompt in corpus.prompts}) == 3
    assert [p.reject_reason is None for p in corpus.prompts] == [True, True, False]
    first = corpus.prompts[0].prompt_id
    assert corpus.prompts[2].prompt_id == f"{first}-1"
    assert corpus.prompts[2].reject_reason == f"same content as {first!r}"


def test_the_split_depends_on_the_id_alone_and_meets_its_share(path: Path) -> None:
    rows = [{"id": f"row-{n}", "turns": [f"x {n}"]} for n in range(2000)]
    prompts = read(path, rows, held_out_fraction=0.1).prompts
    held_out = {p.prompt_id for p in prompts if p.split == "held_out"}
    assert 150 < len(held_out) < 250
    assert held_out == {p.prompt_id for p in prompts if hash_fraction(p.prompt_id) < 0.1}
    fewer = read(path, rows[500:], held_out_fraction=0.1).prompts
    assert {p.prompt_id for p in fewer if p.split == "held_out"} == held_out & {
        p.prompt_id for p in fewer
    }


@pytest.mark.parametrize("deduplicate", [True, False])
def test_equal_content_with_other_splits_or_tasks_is_one_corpus_in_any_order(
    path: Path, deduplicate: bool
) -> None:
    rows = [
        {"prompt": "x", "split": "train", "task": "b"},
        {"prompt": "x", "split": "held_out"},
        {"prompt": "x", "split": "train", "task": "a"},
        {"prompt": "x"},
        {"prompt": "y"},
    ]
    first, *others = (
        read(path, [rows[i] for i in order], deduplicate=deduplicate)
        for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 3, 4, 1])
    )
    assert {corpus.sha256 for corpus in others} == {first.sha256}
    kept = [p.split for p in first.prompts if p.text == "x" and p.reject_reason is None]
    assert kept == (["held_out"] if deduplicate else ["train", "held_out", "train", "held_out"])


@pytest.mark.parametrize("has_ids", [True, False])
def test_copies_that_are_kept_are_all_in_one_split(path: Path, has_ids: bool) -> None:
    rows = [{"prompt": f"x {n % 40}"} | ({"id": f"r{n}"} if has_ids else {}) for n in range(200)]
    prompts = read(path, rows, deduplicate=False, held_out_fraction=0.5).prompts
    splits: dict[str, set[str]] = {}
    for prompt in prompts:
        splits.setdefault(prompt.text, set()).add(prompt.split)
    assert all(len(found) == 1 for found in splits.values())
    assert set.union(*splits.values()) == {"train", "held_out"}
    two = [{"prompt": "x"}, {"prompt": "x"}, {"prompt": "y"}, {"prompt": "y"}]
    moved = read(path, two, deduplicate=False, held_out_fraction=1e-9).prompts
    assert sorted((p.text, p.split) for p in moved) in (
        [("x", "held_out")] * 2 + [("y", "train")] * 2,
        [("x", "train")] * 2 + [("y", "held_out")] * 2,
    )


def test_a_limit_reads_no_row_beyond_it(path: Path) -> None:
    path.write_text('{"prompt": "x"}\nnot JSON\n', encoding="utf-8")
    assert len(read_corpus(CorpusConfig(path=path, limit=1)).prompts) == 1
    with pytest.raises(CorpusError, match=r"jsonl:2: not JSON"):
        read_corpus(CorpusConfig(path=path, limit=2))


def test_a_small_corpus_still_has_both_splits(path: Path) -> None:
    rows = [{"id": f"row-{n}", "turns": [f"x {n}"]} for n in range(3)]
    for fraction in (0.001, 0.999):
        splits = [p.split for p in read(path, rows, held_out_fraction=fraction).prompts]
        assert set(splits) == {"train", "held_out"}
    none = read(path, rows, held_out_fraction=0.0).prompts
    assert {p.split for p in none} == {"train"}
    assert read(path, rows[:1]).prompts[0].split == "train"


def test_a_row_may_name_its_split(path: Path) -> None:
    rows = [{"id": f"r{n}", "turns": ["x"], "split": "held_out"} for n in range(3)]
    rows += [{"id": f"t{n}", "turns": ["x"], "split": "train"} for n in range(3)]
    splits = {p.prompt_id: p.split for p in read(path, rows, held_out_fraction=0.5).prompts}
    assert set(splits.values()) == {"train", "held_out"}
    assert all((split == "held_out") == name.startswith("r") for name, split in splits.items())


def test_the_hash_follows_what_was_read_not_where_it_lies(path: Path, tmp_path: Path) -> None:
    rows = make_corpus_rows(6)
    before = read(path, rows)
    moved = read(tmp_path / "moved.jsonl", rows)
    assert moved.sha256 == before.sha256
    assert read(path, rows, limit=6).sha256 == before.sha256
    assert read(path, rows, limit=5).sha256 != before.sha256
    assert read(path, rows, held_out_fraction=0.5).sha256 != before.sha256
    rows[3]["turns"] = ["changed"]
    assert read(path, rows).sha256 != before.sha256
    view = fingerprint_view(CorpusConfig(path=path, held_out_fraction=0.5))
    assert view == {"raw": False}


# ---------------------------------------------------------------- token ids


def make_prompt(*contents: str) -> Prompt:
    roles = ("user",) if len(contents) == 1 else ("system", "user")
    messages = tuple({"role": r, "content": c} for r, c in zip(roles, contents, strict=True))
    return Prompt("p", "default", "train", messages)


def test_the_template_is_applied_once_up_to_the_answer() -> None:
    tokenizer = make_tokenizer()
    ids = prompt_token_ids(tokenizer, make_prompt("the sea"), is_raw=False)
    expected = "<|im_start|>user\nthe sea<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == expected
    assert ids.count(0) == 2


def test_a_system_prompt_fills_in_only_where_the_row_has_none() -> None:
    tokenizer = make_tokenizer()
    added = prompt_token_ids(tokenizer, make_prompt("x"), is_raw=False, system_prompt="Be brief.")
    assert tokenizer.decode(added).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    own = make_prompt("Be long.", "x")
    kept = prompt_token_ids(tokenizer, own, is_raw=False, system_prompt="Be brief.")
    assert "Be brief." not in tokenizer.decode(kept)


def make_llama_2_tokenizer(*, template_writes_bos: bool = True) -> Any:
    """A tokenizer that adds a begin token by itself, with a template that writes it too."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
    )
    bos = "{{ bos_token }}" if template_writes_bos else ""
    tokenizer.chat_template = bos + "[INST] {{ messages[0]['content'] }} [/INST]"
    return tokenizer


def test_a_llama_2_prompt_starts_with_one_begin_token() -> None:
    tokenizer = make_llama_2_tokenizer()
    assert tokenizer("x")["input_ids"][0] == 0
    ids = prompt_token_ids(tokenizer, make_prompt("the sea"), is_raw=False)
    assert ids[0] == 0
    assert ids[1] != 0
    assert tokenizer.decode(ids) == "<|im_start|>[INST] the sea [/INST]"


def test_a_raw_prompt_gets_the_tokenizers_own_begin_token() -> None:
    tokenizer = make_llama_2_tokenizer()
    ids = prompt_token_ids(tokenizer, make_prompt("the sea"), is_raw=True)
    assert tokenizer.decode(ids) == "<|im_start|>the sea"


def test_a_text_that_is_already_formatted_is_refused() -> None:
    with pytest.raises(CorpusError, match="two begin tokens"):
        prompt_token_ids(make_llama_2_tokenizer(), make_prompt("<|im_start|>x"), is_raw=True)


def test_a_model_without_a_template_names_both_ways_out() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(CorpusError, match=r"corpus\.raw: true.*chat_template\.jinja"):
        prompt_token_ids(tokenizer, make_prompt("x"), is_raw=False)
    assert prompt_token_ids(tokenizer, make_prompt("x"), is_raw=True)


def test_a_template_that_refuses_a_role_is_a_user_error() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    )
    with pytest.raises(CorpusError, match=r"roles: system, user.*no system role"):
        prompt_token_ids(tokenizer, make_prompt("Be brief.", "x"), is_raw=False)
