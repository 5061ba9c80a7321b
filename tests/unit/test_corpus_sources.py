"""Where prompts come from: CSV, text folders, conversations, tools, mixtures by weight.

Fault classes met here: pre-formatted or assistant-first rows silently skipped, tool messages and
reasoning dropped on the way in, a column lost, an order that decides what is taken.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.config import parse_config
from distill.corpus import Corpus, CorpusConfig, read_corpus
from distill.corpus.config import GivenSourceConfig, PartConfig
from distill.corpus.read import mixture_quotas
from distill.corpus.rows import split_turns
from distill.corpus.sources import source_rows
from distill.errors import ConfigError, CorpusError
from tests.helpers import make_corpus_rows, write_jsonl


def read(path: Path, rows: list[dict[str, Any]], **settings: Any) -> Corpus:
    return read_corpus(CorpusConfig(path=write_jsonl(path, rows), **settings))


# ---------------------------------------------------------------- CSV


def test_a_csv_file_gives_the_same_prompts_as_jsonl(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "task": "chat", "prompt": 'He said, "why?"\nand left.'},
        {"id": "b", "task": "code", "prompt": "plain"},
    ]
    path = tmp_path / "p.csv"
    path.write_text(
        '\ufeffid,task,prompt,note\na,chat,"He said, ""why?""\nand left.",\nb,code,plain,x\n',
        encoding="utf-8",
    )
    expected = read(tmp_path / "p.jsonl", rows)
    assert read_corpus(CorpusConfig(kind="csv", path=path)) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompt\na,b\n", r"p\.csv:2: .*1 cells of the header"),
        ("id,prompt\na\n", r"p\.csv:2: .*2 cells of the header"),
        ("prompt,prompt\na,b\n", r"two columns have one name"),
        ('prompt\n"a" b\n', r"p\.csv:2: not CSV"),
        ("prompt\n" + "x" * 200_000 + "\n", r"p\.csv:2: not CSV.*write long ones as jsonl"),
        ("id,prompt\na,\n", r"p\.csv:2: needs exactly one of turns, prompt, messages"),
        ("prompt\n", r"holds no prompt"),
    ],
)
def test_a_csv_file_that_is_not_rows_is_named_with_its_line(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "p.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CorpusError, match=said):
        read_corpus(CorpusConfig(kind="csv", path=path))


# ---------------------------------------------------------------- text


def test_each_file_of_a_text_folder_is_a_prompt_named_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_text("second", encoding="utf-8")
    (tmp_path / "a.txt").write_text("first", encoding="utf-8")
    (tmp_path / "c.md").write_text("not asked", encoding="utf-8")
    corpus = read_corpus(CorpusConfig(kind="text", path=tmp_path, raw=True))
    assert [(p.prompt_id, p.text) for p in corpus.prompts] == [
        ("a.txt", "first"),
        ("deep/b.txt", "second"),
    ]
    marked = read_corpus(CorpusConfig(kind="text", path=tmp_path, glob="*.md", raw=True))
    assert [p.prompt_id for p in marked.prompts] == ["c.md"]


@given(st.text(alphabet="ab \n", min_size=1, max_size=60), st.integers(1, 12))
def test_chunks_of_a_text_lose_nothing_but_white_space(text: str, size: int) -> None:
    from distill.corpus.sources import _chunks

    chunks = list(_chunks(text, size))
    assert all(0 < len(chunk) <= size for chunk in chunks)
    assert "".join("".join(chunks).split()) == "".join(text.split())


def test_a_text_is_cut_between_words(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("one two three four", encoding="utf-8")
    source = GivenSourceConfig(kind="text", path=path, chunk_characters=9)
    rows = [row for _, row in source_rows(source)]
    assert rows == [
        {"id": "long.txt#0", "prompt": "one two "},
        {"id": "long.txt#1", "prompt": "three "},
        {"id": "long.txt#2", "prompt": "four"},
    ]


def test_a_folder_without_texts_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"\*\*/\*\.txt.*glob"):
        read_corpus(CorpusConfig(kind="text", path=tmp_path))
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CorpusError, match="UTF-8"):
        read_corpus(CorpusConfig(kind="text", path=tmp_path))


# ---------------------------------------------------------------- conversations


def message(role: str, content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content or role, **more}


CALL = message("assistant", "look", tool_calls=[{"function": {"name": "f", "arguments": {}}}])


@pytest.mark.parametrize(
    ("roles", "turns"),
    [
        ("u", ["u"]),
        ("uu", ["u", "u"]),
        ("uaua", ["u", "u"]),
        ("suau", ["su", "u"]),
        ("ssu", ["ssu"]),
        ("uaau", ["u", "u"]),
        ("ucta", ["uct"]),
        ("uct", ["uct"]),
        ("uctctau", ["uctct", "u"]),
        ("uctu", ["uct", "u"]),
        ("uc", ["u"]),
        ("uat", ["uat"]),
        ("uas", ["u"]),
    ],
)
def test_answers_are_asked_for_where_the_model_would_speak(roles: str, turns: list[str]) -> None:
    known = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    messages = [CALL if letter == "c" else message(known[letter]) for letter in roles]
    found, reason = split_turns(messages)
    assert reason is None
    letter_of = {name: letter for letter, name in known.items()}
    spelled = ["".join("c" if m is CALL else letter_of[m["role"]] for m in turn) for turn in found]
    assert spelled == turns


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        (["assistant", "user"], "the first turn is the assistant's"),
        (["tool", "user"], "the first turn is the tool's"),
        (["system"], "no user turn"),
        (["system", "assistant", "user"], "the first turn is the assistant's"),
    ],
)
def test_a_row_that_asks_nothing_says_why(roles: list[str], said: str) -> None:
    assert said in str(split_turns([message(role) for role in roles])[1])


def test_a_conversation_keeps_its_users_tools_and_reasoning(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {**CALL, "content": None, "reasoning_content": "hm", "extra": 1}
    messages = [message("user"), call, message("tool", "7", tool_call_id="x"), message("user", "b")]
    for given_tools in (tools, json.dumps(tools)):
        row = {"messages": messages, "tools": given_tools}
        (prompt,) = read(tmp_path / "p.jsonl", [row]).prompts
        assert prompt.tools == tuple(tools)
        assert prompt.messages[1] == {
            "role": "assistant",
            "content": "",
            "tool_calls": CALL["tool_calls"],
            "reasoning_content": "hm",
        }
        assert prompt.messages[2]["tool_call_id"] == "x"
        assert prompt.later_turns == ((message("user", "b"),),)
    with pytest.raises(CorpusError, match="tools is text, but not JSON"):
        read(tmp_path / "p.jsonl", [{"prompt": "a", "tools": "[{"}])
    with pytest.raises(CorpusError, match=r"tools is \{"):
        read(tmp_path / "p.jsonl", [{"prompt": "a", "tools": {"f": 1}}])


def test_max_turns_cuts_a_conversation_and_its_name_follows(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    row = {"turns": ["a", "b", "c"]}
    (whole,) = read(path, [row]).prompts
    (cut,) = read(path, [row], max_turns=1).prompts
    (single,) = read(path, [{"prompt": "a"}]).prompts
    assert (whole.num_turns, cut.num_turns) == (3, 1)
    assert whole.all_text == "a\nb\nc"
    assert cut.prompt_id == single.prompt_id != whole.prompt_id


def test_raw_text_has_one_turn_and_a_row_with_more_is_rejected(tmp_path: Path) -> None:
    rows = [{"turns": ["a", "b"]}, {"turns": ["c"]}]
    prompts = read(tmp_path / "p.jsonl", rows, raw=True).prompts
    assert [p.reject_kind for p in prompts] == ["several_raw_turns", None]
    assert "max_turns: 1" in str(prompts[0].reject_reason)


def test_raw_text_leaves_no_message_of_a_row_out_silently(tmp_path: Path) -> None:
    rows = [
        {"messages": [message("system", "Be brief."), message("user", "x")]},
        {"prompt": "y", "tools": [{"name": "f"}]},
        {"prompt": "z"},
    ]
    prompts = read(tmp_path / "p.jsonl", rows, raw=True).prompts
    assert [p.reject_kind for p in prompts] == ["raw_messages", "raw_messages", None]
    assert "no template to place its system message; set raw: false" in str(
        prompts[0].reject_reason
    )
    assert "its tools" in str(prompts[1].reject_reason)


def test_a_calls_arguments_are_read_where_they_are_json_text(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    asked = [message("user", "x"), message("assistant", "", tool_calls=[call])]
    rows = [{"messages": [*asked, message("tool", "ok")]}]
    rows.append({"messages": [{**m} for m in rows[0]["messages"]]})
    rows[1]["messages"][1] = message("assistant", "", tool_calls=json.dumps([call]))
    first, second = read(tmp_path / "p.jsonl", rows, deduplicate=False).prompts
    assert first.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert second.messages == first.messages
    words = {"function": {"name": "f", "arguments": "no JSON"}}
    rows[1]["messages"][1] = message("assistant", "", tool_calls=[words])
    assert read(tmp_path / "p.jsonl", rows).prompts[1].messages[1]["tool_calls"] == [words]
    for wrong in ("x", "3", {"name": "f"}, ["f"]):
        rows[1]["messages"][1] = message("assistant", "", tool_calls=wrong)
        with pytest.raises(CorpusError, match=r"p\.jsonl:2: tool_calls is "):
            read(tmp_path / "p.jsonl", rows)


@pytest.mark.parametrize("error", [OSError("gone"), ValueError("bad row"), pa.ArrowInvalid("cut")])
def test_a_stream_that_breaks_names_the_row(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def rows(*_: Any, **__: Any) -> Any:
        yield {"prompt": "x"}
        yield {"prompt": "y"}
        raise error

    monkeypatch.setattr(datasets, "load_dataset", rows)
    config = CorpusConfig(kind="datasets", name="org/set", streaming=True)
    with pytest.raises(CorpusError, match=rf"org/set\[train\], row 2 cannot be read: {error}"):
        read_corpus(config)
    assert len(read_corpus(config.model_copy(update={"limit": 2})).prompts) == 2


# ---------------------------------------------------------------- mixtures


def part(path: Path, name: str, count: int, weight: float, **more: Any) -> dict[str, Any]:
    rows = [{"prompt": f"{name} question {n}"} for n in range(count)]
    return {"path": write_jsonl(path / f"{name}.jsonl", rows), "weight": weight, **more}


def test_a_mixture_takes_from_each_part_by_weight(tmp_path: Path) -> None:
    parts = [part(tmp_path, "a", 50, 3.0, label="a"), part(tmp_path, "b", 50, 1.0, label="b")]
    corpus = read_corpus(CorpusConfig(kind="mixture", parts=parts, num_prompts=40))
    assert Counter(p.text[0] for p in corpus.prompts) == {"a": 30, "b": 10}
    assert corpus.counts == {
        "num_read_of_part/a": 50,
        "num_rejected_of_part/a": 0,
        "num_taken_of_part/a": 30,
        "num_read_of_part/b": 50,
        "num_rejected_of_part/b": 0,
        "num_taken_of_part/b": 10,
        "num_read": 100,
        "num_left_out": 60,
    }
    most = read_corpus(CorpusConfig(kind="mixture", parts=parts))
    assert Counter(p.text[0] for p in most.prompts) == {"a": 50, "b": 16}


def test_what_a_mixture_takes_depends_on_content_not_on_order(tmp_path: Path) -> None:
    parts = [part(tmp_path, "a", 30, 1.0), part(tmp_path, "b", 30, 1.0)]
    before = read_corpus(CorpusConfig(kind="mixture", parts=parts, num_prompts=20))
    for entry in parts:
        lines = entry["path"].read_text(encoding="utf-8").splitlines(keepends=True)
        entry["path"].write_text("".join(lines[::-1]), encoding="utf-8")
    after = read_corpus(CorpusConfig(kind="mixture", parts=parts, num_prompts=20))
    assert after.sha256 == before.sha256
    assert {p.prompt_id for p in after.prompts} == {p.prompt_id for p in before.prompts}


def test_duplicates_across_parts_are_rejected_before_weights_are_met(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n}"} for n in range(10)]
    first = {"path": write_jsonl(tmp_path / "a.jsonl", rows)}
    second = {"path": write_jsonl(tmp_path / "b.jsonl", [*rows[:4], {"prompt": "new"}])}
    corpus = read_corpus(CorpusConfig(kind="mixture", parts=[first, second], num_prompts=2))
    rejected = [p for p in corpus.prompts if p.reject_kind == "duplicate"]
    assert len(rejected) == corpus.counts["num_rejected_of_part/1"] == 4
    assert len(corpus.prompts) == 6


def test_equal_ids_in_two_parts_are_told_apart_by_labels(tmp_path: Path) -> None:
    paths = [
        write_jsonl(tmp_path / f"{name}.jsonl", [{"id": "0", "prompt": name}]) for name in "ab"
    ]
    with pytest.raises(CorpusError, match=r"id '0' is already used at .*`label`"):
        read_corpus(CorpusConfig(kind="mixture", parts=[{"path": path} for path in paths]))
    labelled = [{"path": path, "label": name} for path, name in zip(paths, "ab", strict=True)]
    corpus = read_corpus(CorpusConfig(kind="mixture", parts=labelled))
    assert [p.prompt_id for p in corpus.prompts] == ["a/0", "b/0"]


def test_a_part_too_small_for_its_weight_is_named(tmp_path: Path) -> None:
    parts = [part(tmp_path, "a", 3, 1.0), part(tmp_path, "b", 9, 1.0, label="b")]
    with pytest.raises(CorpusError, match=r"part '0' .* has 3 prompts .* of 10 prompts takes 5"):
        read_corpus(CorpusConfig(kind="mixture", parts=parts, num_prompts=10))


@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.integers(1, 1000)), min_size=1, max_size=5),
)
def test_quotas_add_up_and_no_part_is_overdrawn(parts: list[tuple[float, int]]) -> None:
    weights = {str(n): weight for n, (weight, _) in enumerate(parts)}
    sizes = {str(n): size for n, (_, size) in enumerate(parts)}
    quotas = mixture_quotas(weights, sizes, None)
    total = sum(quotas.values())
    for name, quota in quotas.items():
        assert quota <= sizes[name]
        assert abs(quota - weights[name] / sum(weights.values()) * total) <= 1
    # one more of each would overdraw the scarcest part
    assert any(weights[name] / sum(weights.values()) * (total + 1) > sizes[name] for name in sizes)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "mixture"}, "needs `parts:`"),
        ({"kind": "jsonl", "path": "x", "parts": [{"path": "y"}]}, "belongs to kind: mixture"),
        ({"kind": "mixture", "parts": [{"weight": 1}]}, "needs `path:`"),
        ({"kind": "mixture", "parts": [{"path": "x", "weight": 0}]}, "parts.0.weight"),
        (
            {
                "kind": "mixture",
                "parts": [{"path": "x", "label": "a"}, {"path": "y", "label": "a"}],
            },
            "two parts have one label",
        ),
        ({"kind": "self_synthesis"}, "needs `num_prompts:`"),
        ({"kind": "self_synthesis", "num_prompts": 1, "raw": True}, "uses no template"),
        ({"kind": "jsonl", "path": "x", "num_prompts": 3}, "use `limit`"),
        ({"kind": "csv"}, "needs `path:`"),
    ],
)
def test_settings_that_do_not_fit_a_kind_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config(settings, CorpusConfig)


def test_a_part_is_a_source_with_a_weight(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", make_corpus_rows(3))
    assert PartConfig(path=path).weight == 1.0
    assert len(list(source_rows(PartConfig(path=path)))) == 3
