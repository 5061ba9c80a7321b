"""Prompts that the target writes itself: what is kept, what is not, and that it repeats."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from distill.artifacts import ArtifactStore
from distill.backends.base import Completion, Unanswered
from distill.config import parse_config
from distill.corpus import CorpusConfig
from distill.errors import BackendUnavailableError, CorpusError, DiskSpaceError
from distill.models import ModelConfig
from distill.sampling import SamplingConfig
from distill.stages.generate import GenerateConfig, generate, generate_key
from distill.stages.generate_synthesis import repetition, why_no_prompt
from tests.generate_helpers import hashes_of, rows_of, scripted_config, use_script
from tests.helpers import make_tokenizer

OPENING = "<|im_start|>user\n"


@pytest.fixture(scope="module")
def target(tiny_pair_dirs: tuple[Path, Path]) -> Path:
    return tiny_pair_dirs[0]


def synthesis(num_prompts: int, **settings: Any) -> CorpusConfig:
    data = {"kind": "self_synthesis", "num_prompts": num_prompts, **settings}
    return parse_config(data, CorpusConfig)


def test_written_turns_become_prompts_and_the_rest_is_rejected_with_reasons(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = [
        " What is the sea? ",
        "Why?",
        "",
        "What is the sea?",
        "go on and go on and go on and go on and go on",
        "Tell me <|im_start|> more",
        Completion(0, 0, (70, 71, 72, 73, 74, 75, 76, 77, 78), "length"),
        Unanswered(0, 0, "rejected", "the server refused it"),
        "Where is the wind?",
    ]
    turns = iter(written)
    asked = use_script(
        monkeypatch, lambda text, sample: next(turns) if text == OPENING else "An answer."
    )
    config = scripted_config(target, synthesis(len(written), held_out_fraction=0.0))
    artifact = generate(config, ArtifactStore(tmp_path))
    assert asked[: len(written)] == [OPENING] * len(written)
    tokenizer = make_tokenizer()
    rows = rows_of(artifact)
    answered = [row for row in rows if row["status"] == "completed"]
    assert {tokenizer.decode(row["prompt_token_ids"]) for row in answered} == {
        f"{OPENING}{text}<|im_end|>\n<|im_start|>assistant\n"
        for text in ("What is the sea?", "Where is the wind?")
    }
    assert {row["task"] for row in rows} == {"self_synthesis"}
    reasons = sorted(row["reason"].split("'")[0] for row in rows if row["status"] == "rejected")
    assert reasons == [
        "4 characters are fewer than 8",
        "75% of its word 3-grams are repeats",
        "it holds the special token ",
        "not ended after 256 tokens",
        "nothing was written",
        "same content as ",
        "the server refused it",
    ]
    metrics = artifact.metrics
    assert metrics["num_prompts"] == len(written)
    assert metrics["num_prompts_completed"] + metrics["num_prompts_rejected"] == len(written)
    assert metrics["num_rejected_as/filtered"] == 6
    assert metrics["num_rejected_as/duplicate"] == 1


def test_a_target_writes_the_same_prompts_again_and_its_settings_name_them(
    target: Path, tmp_path: Path
) -> None:
    corpus = synthesis(6, synthesis={"sampling": {"logit_bias": {1: 4.0}}, "min_characters": 1})
    config = GenerateConfig(
        target=ModelConfig(model=str(target), device="cpu"),
        corpus=corpus,
        samplings=(SamplingConfig(temperature=0.0),),
        max_new_tokens=3,
        batch_size=4,
        chunk_size=4,
    )
    first, again = (generate(config, ArtifactStore(tmp_path / name)) for name in "ab")
    assert hashes_of(first) == hashes_of(again)
    prompts = {tuple(row["prompt_token_ids"]) for row in rows_of(first)} - {()}
    assert len(prompts) > 1
    store = ArtifactStore(tmp_path / "a")
    key = generate_key(config, store)
    assert key.fingerprint == first.fingerprint
    for changed in (
        corpus.model_copy(update={"num_prompts": 7}),
        corpus.model_copy(update={"held_out_fraction": 0.5}),
        corpus.model_copy(update={"deduplicate": False}),
        corpus.model_copy(update={"synthesis": corpus.synthesis.model_copy(update={"seed": 1})}),
    ):
        assert generate_key(config.model_copy(update={"corpus": changed}), store) != key


def test_copies_of_a_written_turn_are_in_one_split(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter([f"What is number {n % 8}?" for n in range(40)])
    use_script(monkeypatch, lambda text, sample: next(turns) if text == OPENING else "An answer.")
    corpus = synthesis(40, deduplicate=False, held_out_fraction=0.5)
    rows = rows_of(generate(scripted_config(target, corpus), ArtifactStore(tmp_path)))
    splits: dict[tuple[int, ...], set[str]] = {}
    for row in rows:
        splits.setdefault(tuple(row["prompt_token_ids"]), set()).add(row["split"])
    assert len(splits) == 8
    assert all(len(found) == 1 for found in splits.values())


def test_written_turns_survive_a_kill_chunk_by_chunk(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(text: str, sample: int) -> str:
        calls.append(text)
        if len(calls) == 6 and not is_resumed:
            raise RuntimeError("killed")
        return f"What is number {len(calls)}?" if text == OPENING else "An answer."

    calls: list[str] = []
    is_resumed = False
    use_script(monkeypatch, script)
    config = scripted_config(target, synthesis(8))
    store = ArtifactStore(tmp_path)
    with pytest.raises(RuntimeError, match="killed"):
        generate(config, store)
    work = store.partial_dir(generate_key(config, store)) / "work"
    (kept,) = work.glob("user-turns-*.json")
    assert len(json.loads(kept.read_text(encoding="utf-8"))) == 4
    calls.clear()
    is_resumed = True
    generate(config, store)
    assert calls.count(OPENING) == 4


@pytest.mark.parametrize("failure", [None, Unanswered(0, 0, "failed", "no answer after 6 tries")])
def test_a_turn_that_failed_is_asked_for_again_and_no_prompt_is_counted_out(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Any
) -> None:
    calls: list[str] = []

    def script(text: str, sample: int) -> Any:
        calls.append(text)
        if is_sick and calls.count(OPENING) in (2, 5):
            return failure
        return f"What is number {next(numbers)}?" if text == OPENING else "An answer."

    is_sick, numbers = True, itertools.count()
    use_script(monkeypatch, script)
    config, store = scripted_config(target, synthesis(6)), ArtifactStore(tmp_path)
    with pytest.raises(BackendUnavailableError, match=r"2 of 6 user turns .*run the same command"):
        generate(config, store)
    assert calls == [OPENING] * 6
    is_sick = False
    calls.clear()
    artifact = generate(config, store)
    assert calls.count(OPENING) == 2
    assert artifact.metrics["num_prompts_completed"] == 6


def test_ctrl_c_keeps_the_turns_in_flight_and_the_log_tells_of_them(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def script(text: str, sample: int) -> str:
        calls.append(text)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return f"What is number {len(calls)}?" if text == OPENING else "An answer."

    use_script(monkeypatch, script)
    config, store = scripted_config(target, synthesis(8)), ArtifactStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        generate(config, store)
    assert calls == [OPENING] * 4
    (log,) = (tmp_path / "logs").iterdir()
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [line["event"] for line in lines] == ["prompts_started", "prompts", "interrupted"]
    assert (lines[0]["num_prompts"], lines[1]["num_done"], lines[1]["num_tokens"]) == (8, 4, 4)
    generate(config, store)
    assert calls.count(OPENING) == 8


def test_a_disk_too_small_for_the_turns_is_told_before_any_is_written(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = use_script(monkeypatch, lambda text, sample: "What is the sea?")
    config = scripted_config(target, synthesis(8, synthesis={"max_new_tokens": 1_000_000}))
    # 8 texts of a million ids, 8 bytes each
    usage = shutil.disk_usage(tmp_path)._replace(free=60 * 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DiskSpaceError, match="8 prompts that the target writes needs about 70"):
        generate(config, ArtifactStore(tmp_path))
    assert asked == []


def test_a_turn_closed_by_words_ends_there(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distill.stages import generate as stage

    tokenizer = make_tokenizer()
    tokenizer.chat_template = "[INST] {{ messages[0]['content'] }} [/INST]"
    monkeypatch.setattr(stage, "load_tokenizer", lambda config: tokenizer)
    said = tuple(tokenizer("What is the sea? [/INST] The sea is")["input_ids"])
    use_script(
        monkeypatch,
        lambda text, sample: Completion(0, 0, said, "length") if text == "[INST] " else "Wet.",
    )
    rows = rows_of(generate(scripted_config(target, synthesis(1)), ArtifactStore(tmp_path)))
    assert tokenizer.decode(rows[0]["prompt_token_ids"]) == "[INST] What is the sea? [/INST]"


def test_a_base_model_cannot_write_a_users_turns(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distill.stages import generate as stage

    use_script(monkeypatch, lambda text, sample: "x")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    monkeypatch.setattr(stage, "load_tokenizer", lambda config: tokenizer)
    with pytest.raises(CorpusError, match="no chat template"):
        generate(scripted_config(target, synthesis(2)), ArtifactStore(tmp_path))


def test_repetition_by_hand() -> None:
    assert repetition("a b") == 0.0
    assert repetition("a b c d") == 0.0
    assert repetition("a a a a") == 0.5
    assert repetition("好好好好") == 0.5  # no blanks between words: each character is one
    keep = {"special_tokens": ["<s>"], "min_characters": 2, "max_repetition": 0.5}
    assert why_no_prompt("a a a a", **keep) is None  # type: ignore[arg-type]
    assert "repeats" in str(why_no_prompt("a a a a a", **keep))  # type: ignore[arg-type]
    assert "'<s>'" in str(why_no_prompt("x <s> y", **keep))  # type: ignore[arg-type]
