"""The generate stage: what is stored, what is counted, what names it, that it repeats.

Fault classes met here: completions beside the wrong prompt after a reorder, silently lost rows,
supervised prompt tokens (also those a template supplies for the answer), crash on a long prompt.
Templates without generation tags cannot hurt: the mask is counted from token ids, not asked of the
template. Dropped columns cannot happen: every table is written with one explicit schema.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from distill.artifacts import Artifact, ArtifactStore
from distill.backends.base import BACKENDS, Completion
from distill.config import parse_config
from distill.corpus import CorpusConfig
from distill.errors import ArtifactError, ConfigError, CorpusError, DiskSpaceError
from distill.models import ModelConfig, load_target
from distill.sampling import SamplingConfig
from distill.stages import generate as stage
from distill.stages.generate import GenerateConfig, generate, generate_key
from tests.helpers import (
    make_corpus_rows,
    make_llama,
    make_tokenizer,
    save_pretrained_dir,
    write_jsonl,
)

BOTH = (SamplingConfig(temperature=1.0), SamplingConfig(temperature=0.0))


@pytest.fixture(scope="module")
def target(tiny_pair_dirs: tuple[Path, Path]) -> ModelConfig:
    return ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu")


def make_config(target: ModelConfig, path: Path, **changes: Any) -> GenerateConfig:
    settings: dict[str, Any] = {
        "target": target,
        "corpus": CorpusConfig(path=path, held_out_fraction=0.25),
        "samplings": BOTH,
        "max_new_tokens": 10,
        "batch_size": 4,
        "chunk_size": 10,
    }
    return GenerateConfig(**{**settings, **changes})


def rows_of(artifact: Artifact) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(artifact.file("completions.parquet")).to_pylist()
    return rows


def hashes_of(artifact: Artifact) -> dict[str, str]:
    return {entry.path: entry.sha256 for entry in artifact.manifest.files}


@pytest.fixture(scope="module")
def built(
    target: ModelConfig, tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    store = ArtifactStore(tmp_path_factory.mktemp("store"))
    return generate(make_config(target, tiny_corpus), store)


# ---------------------------------------------------------------- what is stored


def test_every_prompt_is_answered_once_a_sampling(built: Artifact) -> None:
    rows = rows_of(built)
    assert len(rows) == 48
    assert len({row["row_id"] for row in rows}) == 48
    ids = {row["id"] for row in make_corpus_rows()}
    for index, temperature in enumerate((1.0, 0.0)):
        part = [row for row in rows if row["sampling_index"] == index]
        assert {row["prompt_id"] for row in part} == ids
        assert {row["temperature"] for row in part} == {temperature}
    assert {row["split"] for row in rows} == {"train", "held_out"}


def test_prompts_and_completions_belong_together(built: Artifact, target: ModelConfig) -> None:
    tokenizer, model = make_tokenizer(), load_target(target).model
    questions = {row["id"]: row["turns"][0] for row in make_corpus_rows()}
    for row in rows_of(built):
        text = tokenizer.decode(row["prompt_token_ids"])
        question = questions[row["prompt_id"]]
        assert text == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        assert row["task"] == row["prompt_id"].split("-")[0]
        if row["temperature"] == 0.0:
            ids, start = row["prompt_token_ids"] + row["completion_token_ids"], -1
            with torch.no_grad():
                best = model(torch.tensor([ids])).logits[0].argmax(-1)
            start += len(row["prompt_token_ids"])
            assert best[start:-1].tolist() == row["completion_token_ids"]


def test_the_mask_covers_the_completion_exactly(built: Artifact) -> None:
    for row in rows_of(built):
        prompt, completion = row["prompt_token_ids"], row["completion_token_ids"]
        assert row["loss_mask"] == [0] * len(prompt) + [1] * len(completion)
        assert 1 <= len(completion) <= 10
        is_stopped = completion[-1] == 1
        assert row["finish_reason"] == ("stop" if is_stopped else "length")
        assert row["status"] == ("completed" if is_stopped else "truncated")
        assert 1 not in completion[:-1]


def test_what_a_template_supplies_for_the_answer_is_not_supervised(
    tmp_path: Path, tiny_corpus: Path
) -> None:
    tokenizer = make_tokenizer()
    thinking = "<think>\n\n</think>\n\n"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}" + thinking + "{% endif %}"
    )
    model = save_pretrained_dir(tmp_path / "m", make_llama(len(tokenizer)), tokenizer)
    config = make_config(ModelConfig(model=str(model), device="cpu"), tiny_corpus)
    for row in rows_of(generate(config, ArtifactStore(tmp_path / "store"))):
        assert tokenizer.decode(row["prompt_token_ids"]).endswith(thinking)
        assert sum(row["loss_mask"]) == len(row["completion_token_ids"])


def test_each_completion_id_has_the_state_that_predicted_it(
    built: Artifact, target: ModelConfig
) -> None:
    loaded = load_target(target)
    files: dict[str, dict[str, torch.Tensor]] = {}
    used: dict[str, int] = {}
    for row in rows_of(built):
        name = row["target_file"]
        states = files.setdefault(name, load_file(built.file(name)))
        begin, count = row["target_offset"], len(row["completion_token_ids"])
        used[name] = used.get(name, 0) + count
        prompt = row["prompt_token_ids"]
        with torch.no_grad():
            logits_TV = loaded.model(torch.tensor([prompt + row["completion_token_ids"]])).logits[
                0, len(prompt) - 1 : -1
            ]
        stored = states["logsumexp_N"][begin : begin + count]
        torch.testing.assert_close(stored, logits_TV.logsumexp(-1), atol=1e-4, rtol=0)
        rebuilt = states["hidden_ND"][begin : begin + count].float() @ (
            loaded.model.lm_head.weight.T
        )
        torch.testing.assert_close(rebuilt, logits_TV, atol=0.1, rtol=0.02)
    assert used == {name: len(states["logsumexp_N"]) for name, states in files.items()}
    assert all(states["hidden_ND"].dtype == torch.bfloat16 for states in files.values())


def test_the_vocabulary_counts_the_train_completions_only(built: Artifact) -> None:
    counted: dict[int, int] = {}
    for row in rows_of(built):
        if row["split"] == "train":
            for token in row["completion_token_ids"]:
                counted[token] = counted.get(token, 0) + 1
    table = pq.read_table(built.file("vocabulary.parquet")).to_pylist()
    assert {entry["token_id"]: entry["count"] for entry in table} == counted
    order = [(-entry["count"], entry["token_id"]) for entry in table]
    assert order == sorted(order)


def test_the_metrics_add_up(built: Artifact) -> None:
    metrics = built.metrics
    rows = rows_of(built)
    assert metrics["num_rows"] == 48
    assert metrics["num_prompts"] == 24
    statuses = ("num_completed", "num_truncated", "num_rejected", "num_failed")
    assert sum(metrics[status] for status in statuses) == 48
    assert metrics["num_train_rows"] + metrics["num_held_out_rows"] == 48
    assert sum(metrics[f"num_rows_of_task/{task}"] for task in ("chat", "code", "math")) == 48
    assert metrics["num_completion_tokens"] == sum(len(r["completion_token_ids"]) for r in rows)
    assert metrics["tokens_per_s"] > 0
    assert metrics["num_chunks"] == 6


def test_no_states_are_kept_when_none_are_wanted(
    target: ModelConfig, tiny_corpus: Path, built: Artifact, tmp_path: Path
) -> None:
    config = make_config(target, tiny_corpus, target_store="none")
    bare = generate(config, ArtifactStore(tmp_path))
    assert sorted(hashes_of(bare)) == ["completions.parquet", "vocabulary.parquet"]
    stripped = [{**row, "target_file": None, "target_offset": None} for row in rows_of(built)]
    assert rows_of(bare) == stripped


def test_several_samples_differ_and_are_told_apart(
    target: ModelConfig, tiny_corpus: Path, tmp_path: Path
) -> None:
    config = make_config(target, tiny_corpus, samplings=(SamplingConfig(),), num_samples=3)
    rows = rows_of(generate(config, ArtifactStore(tmp_path)))
    assert len(rows) == 72
    of_one = [row for row in rows if row["prompt_id"] == rows[0]["prompt_id"]]
    assert [row["sample_index"] for row in of_one] == [0, 1, 2]
    assert len({tuple(row["completion_token_ids"]) for row in of_one}) > 1
    assert len({row["seed"] for row in rows}) == 72


# ---------------------------------------------------------------- rows that cannot be answered


def test_prompts_that_cannot_be_answered_are_counted_not_fatal(
    target: ModelConfig, tmp_path: Path
) -> None:
    rows = [*make_corpus_rows(4), {"id": "long", "turns": ["sea " * 600]}]
    rows += [{"id": "mute", "messages": [{"role": "assistant", "content": "Hello"}]}]
    rows += [{"turns": ["twice"]}, {"turns": ["twice"]}]
    config = make_config(target, write_jsonl(tmp_path / "p.jsonl", rows))
    artifact = generate(config, ArtifactStore(tmp_path / "store"))
    stored = rows_of(artifact)
    rejected = {row["prompt_id"]: row for row in stored if row["status"] == "rejected"}
    assert len(rejected) == artifact.metrics["num_rejected"] == 3
    assert "more than the 511 allowed" in rejected["long"]["reason"]
    assert "assistant's" in rejected["mute"]["reason"]
    assert all(row["completion_token_ids"] == [] for row in rejected.values())
    answered = {row["prompt_id"] for row in stored} - set(rejected)
    assert len(answered) + len(rejected) == artifact.metrics["num_prompts"] == len(rows)


def test_a_prompt_of_the_whole_context_but_one_gets_one_token(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    small = make_llama(len(tokenizer), max_positions=40, eos_token_id=None)
    model = save_pretrained_dir(tmp_path / "m", small, tokenizer)
    rows = [{"id": f"n{n}", "turns": ["?" * n]} for n in (38, 39, 40)]
    corpus = CorpusConfig(path=write_jsonl(tmp_path / "p.jsonl", rows), raw=True)
    config = make_config(ModelConfig(model=str(model), device="cpu"), tmp_path, corpus=corpus)
    stored = {row["prompt_id"]: row for row in rows_of(generate(config, ArtifactStore(tmp_path)))}
    lengths = {name: len(row["completion_token_ids"]) for name, row in stored.items()}
    assert lengths["n39"] == 1
    assert 1 <= lengths["n38"] <= 2
    assert stored["n40"]["status"] == "rejected"


def test_max_prompt_tokens_rejects_longer_prompts(
    target: ModelConfig, tiny_corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(CorpusError, match=r"none of the 24 prompts.*more than the 3 allowed"):
        generate(make_config(target, tiny_corpus, max_prompt_tokens=3), ArtifactStore(tmp_path))


def test_an_answer_that_never_came_is_a_failed_row(
    target: ModelConfig, tiny_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = BACKENDS.get("local")

    class Lossy:
        def __init__(self, config: ModelConfig, *, max_batch_size: int, settings: Any) -> None:
            self.inner = make(config, max_batch_size=max_batch_size, settings=settings)

        def generate(self, *args: Any, **kwargs: Any) -> list[Completion]:
            return [c for c in self.inner.generate(*args, **kwargs) if c.prompt_index != 1]

    monkeypatch.setitem(BACKENDS._items, "lossy", Lossy)
    artifact = generate(make_config(target, tiny_corpus, backend="lossy"), ArtifactStore(tmp_path))
    failed = [row for row in rows_of(artifact) if row["status"] == "failed"]
    assert len(failed) == artifact.metrics["num_failed"] == 6
    assert {row["reason"] for row in failed} == {"the backend returned no completion"}
    assert {sum(row["loss_mask"]) for row in failed} == {0}


# ---------------------------------------------------------------- the same again, or not


def test_the_same_config_gives_the_same_bytes_and_a_second_call_computes_nothing(
    target: ModelConfig,
    tiny_corpus: Path,
    built: Artifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, store = make_config(target, tiny_corpus), ArtifactStore(tmp_path)
    again = generate(config, store)
    assert hashes_of(again) == hashes_of(built)
    assert again.fingerprint == built.fingerprint == generate_key(config, store).fingerprint
    monkeypatch.setattr(stage._Build, "__call__", None)
    assert generate(config, store, inputs={}).path == again.path


def test_shuffled_prompts_get_the_same_answers(
    target: ModelConfig, built: Artifact, tmp_path: Path
) -> None:
    rows = make_corpus_rows()
    shuffled = write_jsonl(tmp_path / "p.jsonl", rows[7:] + rows[:7][::-1])
    again = generate(make_config(target, shuffled), ArtifactStore(tmp_path / "store"))
    assert hashes_of(again) == hashes_of(built)


def test_a_rows_answer_depends_on_its_id_and_the_seed_not_on_its_neighbours(
    target: ModelConfig, built: Artifact, tiny_corpus: Path, tmp_path: Path
) -> None:
    few = write_jsonl(tmp_path / "p.jsonl", make_corpus_rows(5))
    part = rows_of(generate(make_config(target, few), ArtifactStore(tmp_path / "a")))
    whole = {row["row_id"]: row for row in rows_of(built)}
    for row in part:
        assert row["completion_token_ids"] == whole[row["row_id"]]["completion_token_ids"]
    seeded = rows_of(generate(make_config(target, few, seed=1), ArtifactStore(tmp_path / "b")))
    assert [r["completion_token_ids"] for r in seeded] != [r["completion_token_ids"] for r in part]


def test_the_fingerprint_follows_prompts_and_target_not_their_place(
    target: ModelConfig, tiny_corpus: Path, tmp_path: Path
) -> None:
    store = ArtifactStore(tmp_path)
    key = generate_key(make_config(target, tiny_corpus), store)
    moved = write_jsonl(tmp_path / "moved.jsonl", make_corpus_rows())
    assert generate_key(make_config(target, moved), store) == key
    elsewhere = target.model_copy(update={"device": "cuda"})
    assert generate_key(make_config(elsewhere, tiny_corpus), store) == key
    edited = make_corpus_rows()
    edited[0]["turns"] = ["Another question?"]
    write_jsonl(moved, edited)
    assert generate_key(make_config(target, moved), store) != key
    assert generate_key(make_config(target, tiny_corpus, max_new_tokens=11), store) != key


def test_a_key_is_made_without_loading_weights(
    tiny_pair_dirs: tuple[Path, Path], tiny_corpus: Path, tmp_path: Path
) -> None:
    absent = ModelConfig(model="org/name@" + "a" * 40)
    key = generate_key(make_config(absent, tiny_corpus), ArtifactStore(tmp_path))
    assert key.parts["revisions"]["target"] == "a" * 40


# ---------------------------------------------------------------- mistakes


def test_a_full_disk_is_found_out_beforehand(
    target: ModelConfig, tiny_corpus: Path, tmp_path: Path
) -> None:
    config = make_config(target, tiny_corpus, max_new_tokens=10**12)
    with pytest.raises(DiskSpaceError, match=r"48 completions.*target_store: none"):
        generate(config, ArtifactStore(tmp_path))


def test_mistakes_in_the_config_are_named(target: ModelConfig, tiny_corpus: Path) -> None:
    base = {"target": {"model": "x"}, "corpus": {"path": str(tiny_corpus)}}
    with pytest.raises(ConfigError, match="samplings"):
        parse_config({**base, "samplings": []}, GenerateConfig)
    raw = {**base, "corpus": {**base["corpus"], "raw": True}, "system_prompt": "x"}
    with pytest.raises(ConfigError, match="system_prompt has no place"):
        parse_config(raw, GenerateConfig)
    with pytest.raises(ConfigError, match="max_new_token"):
        parse_config({**base, "max_new_token": 3}, GenerateConfig)


def test_generate_reads_no_artifact(
    target: ModelConfig, tiny_corpus: Path, tmp_path: Path, built: Artifact
) -> None:
    with pytest.raises(ArtifactError, match="was given: distill"):
        generate(
            make_config(target, tiny_corpus), ArtifactStore(tmp_path), inputs={"distill": built}
        )


def test_progress_is_logged_where_nobody_watches(
    target: ModelConfig,
    tiny_corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from distill.stages import progress

    monkeypatch.setattr(progress, "_LOG_EVERY_S", 0.0)
    with caplog.at_level("INFO"):
        generate(make_config(target, tiny_corpus), ArtifactStore(tmp_path))
    assert "48 of 48 answers" in caplog.text
    assert "6 of 6 chunks to generate" in caplog.text


def test_a_terminal_gets_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from distill.stages import progress

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.answering_progress(2) as bar:
        for _ in range(2):
            bar.add_tokens(3)
            bar.add_answer("truncated")
    shown = capsys.readouterr().err
    assert "6 tokens" in shown
    assert "2 truncated, 0 failed" in shown


def test_the_rows_of_a_mixture_add_up_from_read_to_asked(
    target: ModelConfig, tmp_path: Path
) -> None:
    parts = []
    for name in "ab":
        rows = [{"prompt": f"{name} number {n}"} for n in range(8)]
        rows[0]["prompt"] += " sea" * 600  # longer than the context
        path = write_jsonl(tmp_path / f"{name}.jsonl", [*rows, rows[1]])
        parts.append({"path": path, "label": name})
    corpus = parse_config({"kind": "mixture", "parts": parts, "num_prompts": 14}, CorpusConfig)
    config = make_config(target, tmp_path, corpus=corpus, samplings=BOTH[1:], max_new_tokens=2)
    metrics = generate(config, ArtifactStore(tmp_path / "store")).metrics
    assert metrics["num_read"] == 18
    assert metrics["num_left_out"] == 18 - 2 - 14
    assert metrics["num_read"] - metrics["num_left_out"] == metrics["num_prompts"] == 16
    asked = [metrics[f"num_asked_of_part/{name}"] for name in "ab"]
    assert sum(asked) == 14 - metrics["num_rejected_as/too_long"]
    assert all(6 <= number <= 7 for number in asked)
