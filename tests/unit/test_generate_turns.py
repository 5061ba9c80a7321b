"""Conversations answered on the model's own history, and counts that add up whatever happens.

Fault classes met here: rows in that come out nowhere, a turn answered on the corpus's words instead
of the target's, history or glue inside the loss mask, a failed turn that is asked past.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from distill.artifacts import ArtifactStore
from distill.backends.base import Completion, Unanswered
from distill.corpus import CorpusConfig
from distill.errors import ConfigError, CorpusError
from distill.models import ModelConfig, load_target
from distill.sampling import SamplingConfig
from distill.stages.completions import prompt_status
from distill.stages.generate import GenerateConfig, generate
from tests.generate_helpers import rows_of, scripted_config, use_script
from tests.helpers import make_tokenizer, write_jsonl

STATUSES = ("completed", "truncated", "rejected", "failed")


@pytest.fixture(scope="module")
def target(tiny_pair_dirs: tuple[Path, Path]) -> Path:
    return tiny_pair_dirs[0]


def chat(*said: str) -> str:
    """The template of the tests' tokenizer over user, assistant, user, ..."""
    roles = ("user", "assistant")
    turns = [f"<|im_start|>{roles[n % 2]}\n{text}<|im_end|>\n" for n, text in enumerate(said)]
    return "".join(turns) + "<|im_start|>assistant\n"


# ---------------------------------------------------------------- history


def test_each_turn_is_asked_on_the_models_own_answers(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = use_script(monkeypatch, lambda text, sample: f"n{text.count('assistant')}")
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "SOMEBODY ELSE'S WORDS"},
        {"role": "user", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    corpus = write_jsonl(tmp_path / "p.jsonl", [{"id": "a", "messages": messages}])
    artifact = generate(scripted_config(target, corpus), ArtifactStore(tmp_path))
    assert asked == [
        chat("one"),
        chat("one", "n1", "two"),
        chat("one", "n1", "two", "n2", "three"),
    ]
    tokenizer = make_tokenizer()
    rows = rows_of(artifact)
    assert [row["row_id"] for row in rows] == ["a/0/0", "a/0/0/turn2", "a/0/0/turn3"]
    assert [row["turn_index"] for row in rows] == [0, 1, 2]
    assert len({row["seed"] for row in rows}) == 3
    for row, prompt in zip(rows, asked, strict=True):
        assert tokenizer.decode(row["prompt_token_ids"]) == prompt
        answer = row["completion_token_ids"]
        assert row["loss_mask"] == [0] * len(row["prompt_token_ids"]) + [1] * len(answer)
        assert tokenizer.decode(answer) == f"n{row['turn_index'] + 1}<|im_end|>"
    assert artifact.metrics["num_prompts"] == artifact.metrics["num_prompts_completed"] == 1


def test_samples_have_histories_of_their_own(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = use_script(monkeypatch, lambda text, sample: f"s{sample}{text.count('two')}")
    corpus = write_jsonl(tmp_path / "p.jsonl", [{"id": "a", "turns": ["one", "two"]}])
    config = scripted_config(target, corpus, num_samples=2)
    rows = rows_of(generate(config, ArtifactStore(tmp_path)))
    assert asked == [chat("one"), chat("one", "s00", "two"), chat("one", "s10", "two")]
    assert [row["row_id"] for row in rows] == ["a/0/0", "a/0/0/turn2", "a/0/1", "a/0/1/turn2"]


@pytest.mark.parametrize(
    ("said", "status", "reason"),
    [
        (Unanswered(0, 0, "failed", "503"), "failed", "503; turn 2 of 3 was the last asked"),
        (Unanswered(0, 0, "rejected", "no"), "truncated", "no; turn 2 of 3 was the last asked"),
        (
            Completion(0, 0, (5, 6), "length"),
            "truncated",
            "the answer was cut off; turn 2 of 3 was the last asked",
        ),
        (
            None,
            "failed",
            "the backend returned no completion; turn 2 of 3 was the last asked",
        ),
    ],
)
def test_a_turn_that_is_not_completed_ends_the_row_with_its_reason(
    said: Any,
    status: str,
    reason: str,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = use_script(monkeypatch, lambda text, sample: said if "two" in text else "fine")
    corpus = write_jsonl(tmp_path / "p.jsonl", [{"turns": ["one", "two", "three"]}])
    artifact = generate(scripted_config(target, corpus), ArtifactStore(tmp_path))
    assert len(asked) == 2
    rows = rows_of(artifact)
    assert len(rows) == 2
    assert [row["reason"] for row in rows] == [None, reason]
    assert artifact.metrics[f"num_prompts_{status}"] == 1


def test_a_history_that_outgrows_the_context_ends_the_row(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_script(monkeypatch, lambda text, sample: "fine")
    corpus = write_jsonl(tmp_path / "p.jsonl", [{"turns": ["one", "sea " * 600]}])
    rows = rows_of(generate(scripted_config(target, corpus), ArtifactStore(tmp_path)))
    assert [row["status"] for row in rows] == ["completed", "rejected"]
    assert "tokens are more than the 511 allowed" in rows[1]["reason"]
    assert rows[1]["prompt_token_ids"] == rows[1]["loss_mask"] == []


def test_every_turns_states_are_those_that_predicted_its_answer(
    target: Path, tmp_path: Path
) -> None:
    rows = [{"id": f"r{n}", "turns": [f"one {n}", "two", "three"]} for n in range(6)]
    config = GenerateConfig(
        target=ModelConfig(model=str(target), device="cpu"),
        corpus=CorpusConfig(path=write_jsonl(tmp_path / "p.jsonl", rows)),
        samplings=(SamplingConfig(logit_bias={1: 6.0}),),  # stops soon, and not at once
        max_new_tokens=8,
        batch_size=4,
        chunk_size=4,
    )
    artifact = generate(config, ArtifactStore(tmp_path / "store"))
    stored = rows_of(artifact)
    assert {row["turn_index"] for row in stored if row["status"] == "completed"} == {0, 1, 2}
    model = load_target(config.target).model
    for row in stored:
        states = load_file(artifact.file(row["target_file"]))
        begin, ids = row["target_offset"], row["completion_token_ids"]
        prompt = row["prompt_token_ids"]
        with torch.no_grad():
            logits_TV = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        found = states["logsumexp_N"][begin : begin + len(ids)]
        torch.testing.assert_close(found, logits_TV.logsumexp(-1), atol=1e-4, rtol=0)
    again = generate(config, ArtifactStore(tmp_path / "again"))
    assert rows_of(again) == stored


# ---------------------------------------------------------------- counts


FATES: dict[str, Any] = {
    "stops": "fine",
    "cut": Completion(0, 0, (5, 6), "length"),
    "fails": Unanswered(0, 0, "failed", "503"),
    "refused": Unanswered(0, 0, "rejected", "no"),
    "silent": None,
}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.one_of(
            st.lists(st.sampled_from(sorted(FATES)), min_size=1, max_size=3),
            st.sampled_from(["long", "mute", "assistant first", "twice"]),
        ),
        max_size=6,
    ),
    num_samples=st.integers(1, 2),
    num_samplings=st.integers(1, 2),
)
def test_completed_truncated_rejected_and_failed_sum_to_the_input(
    rows: list[Any],
    num_samples: int,
    num_samplings: int,
    target: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tmp_path = tmp_path_factory.mktemp("counts")
    # the last user turn is the last line but one
    use_script(monkeypatch, lambda text, sample: FATES[text.split("\n")[-3].split(" ")[0]])
    kinds: dict[str, dict[str, Any]] = {
        "long": {"prompt": "sea " * 600},
        "mute": {"messages": [{"role": "system", "content": "x"}]},
        "assistant first": {"messages": [{"role": "assistant", "content": "x"}]},
        "twice": {"prompt": "stops twice"},
    }
    given_rows = [
        kinds[row] if isinstance(row, str) else {"turns": [f"{fate} {n}" for fate in row]}
        for n, row in enumerate(rows)
    ]
    given_rows.append({"prompt": "stops at last"})
    corpus = write_jsonl(tmp_path / "p.jsonl", given_rows)
    config = scripted_config(
        target,
        corpus,
        num_samples=num_samples,
        samplings=[{"temperature": 1.0}, {"temperature": 0.5}][:num_samplings],
    )
    artifact = generate(config, ArtifactStore(tmp_path / "store"))
    metrics = artifact.metrics
    assert sum(metrics[f"num_prompts_{status}"] for status in STATUSES) == len(given_rows)
    stored = rows_of(artifact)
    assert sum(metrics[f"num_{status}"] for status in STATUSES) == len(stored)
    assert len({row["prompt_id"] for row in stored}) == metrics["num_prompts"] == len(given_rows)
    assert all(row["reason"] for row in stored if row["status"] in ("rejected", "failed"))
    rejected_as = [v for name, v in metrics.items() if name.startswith("num_rejected_as/")]
    unasked = {row["prompt_id"] for row in stored if row["row_id"].endswith("/rejected")}
    assert sum(rejected_as) == len(unasked)


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ({"completed"}, "completed"),
        ({"completed", "truncated"}, "truncated"),
        ({"completed", "rejected"}, "truncated"),
        ({"rejected"}, "rejected"),
        ({"completed", "rejected", "failed"}, "failed"),
    ],
)
def test_a_row_is_as_good_as_its_worst_answer(statuses: Any, expected: str) -> None:
    assert prompt_status(statuses) == expected


# ---------------------------------------------------------------- templates, while generating


def test_a_row_that_the_template_refuses_is_rejected_and_the_others_are_answered(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distill.stages import generate as stage

    use_script(monkeypatch, lambda text, sample: "fine")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ messages[0]['content'] }}"
    )
    monkeypatch.setattr(stage, "load_tokenizer", lambda config: tokenizer)
    system = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    corpus = write_jsonl(tmp_path / "p.jsonl", [{"id": "a", "messages": system}, {"prompt": "b"}])
    artifact = generate(scripted_config(target, corpus), ArtifactStore(tmp_path))
    (rejected,) = [row for row in rows_of(artifact) if row["status"] == "rejected"]
    assert rejected["prompt_id"] == "a"
    assert "refuses prompt 'a' (roles: system, user): no system" in rejected["reason"]
    assert artifact.metrics["num_rejected_as/template"] == 1
    tokenizer.chat_template = None
    with pytest.raises(CorpusError, match=r"corpus\.raw: true.*chat_template\.jinja"):
        generate(scripted_config(target, corpus, seed=1), ArtifactStore(tmp_path))


def test_the_date_of_the_template_names_the_artifact(target: Path, tmp_path: Path) -> None:
    from distill.stages.generate import generate_key

    corpus = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "x"}])
    store = ArtifactStore(tmp_path)
    config = scripted_config(target, corpus)
    key = generate_key(config, store)
    assert key.parts["config"]["template_date"] == "2026-01-01"
    other = scripted_config(target, corpus, template_date="2024-07-26")
    assert generate_key(other, store) != key


def test_a_shard_that_is_none_is_named(target: Path, tmp_path: Path) -> None:
    for shard in ("0/4", "5/4", "1", "a/b"):
        with pytest.raises((ConfigError, ValueError), match="write i/n with i from 1 to n"):
            scripted_config(target, tmp_path / "p.jsonl", shard=shard)
