"""The bundle another team gets: it loads, pairs, drafts losslessly, and is the same bytes twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from distill.artifacts import Artifact, ArtifactStore
from distill.config import Config
from distill.errors import ArtifactError, ExportError, PairMismatchError
from distill.export import (
    ExportConfig,
    _check_reload,
    best_num_draft_tokens,
    copy_bundle,
    export_draft,
    export_key,
)
from distill.models import ModelConfig, load_draft
from tests.helpers import make_llama, make_tokenizer, save_pretrained_dir


class NoConfig(Config):
    """The settings of a stand-in stage."""


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


def stand_in(
    store: ArtifactStore,
    stage: str,
    write: Callable[[Path], None],
    metrics: Mapping[str, Any] | None = None,
    *,
    salt: str = "",
) -> Artifact:
    """An artifact as `stage` leaves it, without running the stage."""

    def build(directory: Path) -> Mapping[str, Any]:
        write(directory)
        return metrics or {}

    return store.get_or_build(store.key(stage, 1, NoConfig(), revisions={"salt": salt}), build)


@pytest.fixture
def make_distilled(store: ArtifactStore, tiny_tokenizer: Any) -> Callable[..., Artifact]:
    def make(*, salt: str = "", vocabulary: list[int] | None = None, **shape: Any) -> Artifact:
        model = make_llama(**{"vocab_size": len(tiny_tokenizer), "hidden": 64, "seed": 2, **shape})

        def write(directory: Path) -> None:
            save_pretrained_dir(directory / "draft", model, tiny_tokenizer)
            if vocabulary is not None:
                content = {"token_ids": vocabulary, "coverage": 1.0}
                (directory / "draft_vocabulary.json").write_text(json.dumps(content))

        return stand_in(store, "distill", write, salt=salt)

    return make


@pytest.fixture
def measured(store: ArtifactStore) -> Artifact:
    rate = {"value": 0.75, "low": 0.5, "high": 0.875, "num_prompts": 2}
    cell = {
        "draft": "distilled",
        "temperature": 0.0,
        "task": "chat",
        "num_prompts": 2,
        "acceptance_rate": rate,
        "draft_acceptance_rate": {**rate, "value": 0.25, "low": None, "high": None},
        "block_efficiency": {**rate, "value": None},
    }
    content = {"num_draft_tokens": 4, "cells": [cell, {**cell, "draft": "undistilled"}]}

    def write(directory: Path) -> None:
        (directory / "acceptance.json").write_text(json.dumps(content))

    return stand_in(store, "measure", write, {"verdict": {"ship": True, "num_draft_tokens": 3}})


@pytest.fixture
def config(tiny_pair_dirs: tuple[Path, Path]) -> ExportConfig:
    target = ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu")
    return ExportConfig(target=target, name="tiny-draft")


def contract_of(artifact: Artifact) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        artifact.file("draft/draft_manifest.json").read_text(encoding="utf-8")
    )
    return content


def test_the_bundle_drafts_losslessly_in_transformers_with_the_stored_settings(
    config: ExportConfig,
    store: ArtifactStore,
    make_distilled: Callable[..., Artifact],
    measured: Artifact,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.generation.candidate_generator import AssistedCandidateGenerator

    artifact = export_draft(
        config, store, inputs={"distill": make_distilled(), "measure": measured}
    )
    bundle = artifact.path / "draft"
    target = AutoModelForCausalLM.from_pretrained(config.target.model, dtype=torch.float32)
    draft = AutoModelForCausalLM.from_pretrained(bundle, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(bundle)
    prompt = tokenizer("the quick brown fox", return_tensors="pt")
    proposed: list[int] = []
    original = AssistedCandidateGenerator.get_candidates

    def spy(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        candidates = original(self, input_ids, *args, **kwargs)
        proposed.append(candidates[0].shape[1] - input_ids.shape[1])
        return candidates

    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", spy)
    settings = GenerationConfig(max_new_tokens=48, do_sample=False, pad_token_id=1)
    plain = target.generate(**prompt, generation_config=settings)
    assert not proposed
    assisted = target.generate(**prompt, generation_config=settings, assistant_model=draft)
    assert torch.equal(plain, assisted)
    # Constant and without a confidence threshold: 3 every round, fewer only at the end.
    assert len(proposed) > 4
    assert set(proposed[:-3]) == {3}


def test_the_tokenizer_is_the_targets_with_its_chat_template(
    config: ExportConfig, store: ArtifactStore, make_distilled: Callable[..., Artifact]
) -> None:
    artifact = export_draft(config, store, inputs={"distill": make_distilled()})
    theirs = AutoTokenizer.from_pretrained(config.target.model)
    ours = AutoTokenizer.from_pretrained(artifact.path / "draft")
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.chat_template == theirs.chat_template


def test_a_tied_head_is_stored_and_tied_again_on_load(
    config: ExportConfig, store: ArtifactStore, make_distilled: Callable[..., Artifact]
) -> None:
    distilled = make_distilled(tie_word_embeddings=True)
    artifact = export_draft(config, store, inputs={"distill": distilled})
    weights = load_file(artifact.path / "draft" / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    model, info = AutoModelForCausalLM.from_pretrained(
        artifact.path / "draft", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    ids = torch.arange(8).unsqueeze(0)
    assert torch.equal(model(ids).logits, load_draft(distilled).model(ids).logits)
    assert contract_of(artifact)["draft"]["num_parameters"] == sum(
        weight.numel() for name, weight in weights.items() if name != "lm_head.weight"
    )


def test_the_tied_head_can_be_left_out(
    config: ExportConfig, store: ArtifactStore, make_distilled: Callable[..., Artifact]
) -> None:
    config = config.model_copy(update={"include_tied_head": False})
    artifact = export_draft(
        config, store, inputs={"distill": make_distilled(tie_word_embeddings=True)}
    )
    assert "lm_head.weight" not in load_file(artifact.path / "draft" / "model.safetensors")


def test_the_generation_config_is_valid_and_names_the_measured_best(
    config: ExportConfig,
    store: ArtifactStore,
    make_distilled: Callable[..., Artifact],
    measured: Artifact,
) -> None:
    distilled = make_distilled()
    artifact = export_draft(config, store, inputs={"distill": distilled, "measure": measured})
    stored = GenerationConfig.from_pretrained(artifact.path / "draft")
    stored.validate(strict=True)
    assert stored.num_assistant_tokens == 3
    assert stored.num_assistant_tokens_schedule == "constant"
    assert stored.assistant_confidence_threshold == 0.0
    assert stored.eos_token_id == [1]
    assert artifact.metrics["num_draft_tokens"] == 3


def test_the_number_of_draft_tokens_can_be_pinned_and_has_a_default(
    config: ExportConfig,
    store: ArtifactStore,
    make_distilled: Callable[..., Artifact],
    measured: Artifact,
) -> None:
    distilled = make_distilled()
    unmeasured = export_draft(config, store, inputs={"distill": distilled})
    assert contract_of(unmeasured)["num_draft_tokens"] == 4
    pinned = config.model_copy(update={"num_draft_tokens": 7})
    artifact = export_draft(pinned, store, inputs={"distill": distilled, "measure": measured})
    assert contract_of(artifact)["num_draft_tokens"] == 7


def test_a_measurement_without_a_useful_depth_recommends_none(
    store: ArtifactStore, measured: Artifact
) -> None:
    useless = stand_in(store, "measure", lambda d: None, {"verdict": {}}, salt="useless")
    assert best_num_draft_tokens(None) is None
    assert best_num_draft_tokens(useless) is None
    assert best_num_draft_tokens(measured) == 3


def test_the_contract_names_the_pair_by_hashes_and_no_path_of_this_machine(
    config: ExportConfig,
    store: ArtifactStore,
    make_distilled: Callable[..., Artifact],
    measured: Artifact,
    tiny_tokenizer: Any,
) -> None:
    distilled = make_distilled(vocabulary=[0, 1, 5])
    artifact = export_draft(config, store, inputs={"distill": distilled, "measure": measured})
    contract = contract_of(artifact)
    assert contract["target"]["model"] == "target"
    assert contract["target"]["special_token_ids"] == {"bos": None, "eos": 1, "pad": 1}
    assert contract["target"]["stop_token_ids"] == [1]
    assert contract["target"]["vocab_size"] == len(tiny_tokenizer)
    assert contract["vocabulary_subset_size"] == 3
    assert contract["lineage"] == {
        "distill": distilled.fingerprint,
        "measure": measured.fingerprint,
    }
    listed = {entry["path"]: entry["sha256"] for entry in contract["files"]}
    on_disk = {path.name for path in (artifact.path / "draft").iterdir()}
    assert listed.keys() == on_disk - {"draft_manifest.json"}
    for name, digest in listed.items():
        path = artifact.path / "draft" / name
        assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
        if path.suffix in (".json", ".md", ".jinja"):
            text = path.read_text(encoding="utf-8")
            assert str(store.root.parent) not in text
            assert config.target.model not in text


def test_the_card_shows_acceptance_with_intervals_and_says_what_was_not_run(
    config: ExportConfig,
    store: ArtifactStore,
    make_distilled: Callable[..., Artifact],
    measured: Artifact,
) -> None:
    distilled = make_distilled(max_positions=256)
    artifact = export_draft(config, store, inputs={"distill": distilled, "measure": measured})
    card = artifact.file("draft/README.md").read_text(encoding="utf-8")
    assert card.startswith("---\n")
    assert "| 0.0 | chat | 2 | 0.75 (0.50 to 0.88) | 0.25 | – |" in card
    assert card.count("(not run") == 3
    assert "Not stated by who made this bundle." in card
    assert "Note: context: the target reaches 512 tokens, the draft 256" in card
    assert '"num_speculative_tokens": 3' in card
    assert "--speculative-num-draft-tokens 4" in card


def test_the_card_without_a_measurement_says_so_and_shows_a_given_licence(
    config: ExportConfig, store: ArtifactStore, make_distilled: Callable[..., Artifact]
) -> None:
    config = config.model_copy(update={"license": "apache-2.0", "license_link": "LICENSE"})
    artifact = export_draft(config, store, inputs={"distill": make_distilled()})
    card = artifact.file("draft/README.md").read_text(encoding="utf-8")
    assert "Not measured." in card
    assert "license: apache-2.0" in card
    assert "apache-2.0 (LICENSE)." in card


def test_licence_files_of_the_target_are_copied(
    tmp_path: Path,
    store: ArtifactStore,
    make_distilled: Callable[..., Artifact],
    tiny_tokenizer: Any,
) -> None:
    model = make_llama(len(tiny_tokenizer), hidden=64, seed=1, eos_token_id=None)
    directory = save_pretrained_dir(tmp_path / "licensed", model, tiny_tokenizer)
    (directory / "LICENSE.txt").write_text("terms")
    (directory / "generation_config.json").unlink()
    config = ExportConfig(target=ModelConfig(model=str(directory)))
    artifact = export_draft(config, store, inputs={"distill": make_distilled()})
    assert artifact.file("draft/LICENSE.txt").read_text() == "terms"
    assert contract_of(artifact)["license_files"] == ["LICENSE.txt"]
    assert contract_of(artifact)["target"]["stop_token_ids"] == [1]


def test_two_builds_give_the_same_bytes(
    config: ExportConfig,
    store: ArtifactStore,
    make_distilled: Callable[..., Artifact],
    measured: Artifact,
) -> None:
    inputs = {
        "distill": make_distilled(tie_word_embeddings=True, vocabulary=[1]),
        "measure": measured,
    }
    first = export_draft(config, store, inputs=inputs)
    leftover = store.partial_dir(export_key(config, store, inputs={})) / "draft"
    assert not leftover.exists()
    second = export_draft(config, store, inputs=inputs, rebuild=True)
    assert first.manifest.files == second.manifest.files


def test_what_a_killed_build_left_is_not_shipped(
    config: ExportConfig, store: ArtifactStore, make_distilled: Callable[..., Artifact]
) -> None:
    distilled = make_distilled()
    key = export_key(config, store, inputs={"distill": distilled.fingerprint})
    left = store.partial_dir(key) / "draft"
    left.mkdir(parents=True)
    (left / "half.safetensors").write_bytes(b"half")
    artifact = export_draft(config, store, inputs={"distill": distilled})
    assert not (artifact.path / "draft" / "half.safetensors").exists()


def test_a_second_export_is_not_built_again(
    config: ExportConfig, store: ArtifactStore, make_distilled: Callable[..., Artifact]
) -> None:
    inputs = {"distill": make_distilled()}
    first = export_draft(config, store, inputs=inputs)
    assert export_draft(config, store, inputs=inputs).manifest == first.manifest


@pytest.mark.parametrize("name", ["EAGLE-tiny", "my-eagle3", "x-DFlash", "dspark"])
def test_a_name_that_a_runtime_would_take_for_another_method_is_refused(
    name: str,
    config: ExportConfig,
    store: ArtifactStore,
    make_distilled: Callable[..., Artifact],
    tmp_path: Path,
) -> None:
    distilled = make_distilled()
    with pytest.raises(ExportError, match="vLLM would load"):
        export_draft(config.model_copy(update={"name": name}), store, inputs={"distill": distilled})
    artifact = export_draft(config, store, inputs={"distill": distilled})
    with pytest.raises(ExportError, match="path of the bundle"):
        copy_bundle(artifact, tmp_path / name / "draft")


def test_a_draft_of_another_vocabulary_is_refused(
    config: ExportConfig, store: ArtifactStore
) -> None:
    other = make_tokenizer(280)

    def write(directory: Path) -> None:
        save_pretrained_dir(directory / "draft", make_llama(len(other)), other)

    distilled = stand_in(store, "distill", write)
    with pytest.raises(PairMismatchError):
        export_draft(config, store, inputs={"distill": distilled})


def test_a_draft_padded_to_another_size_is_refused(
    config: ExportConfig, store: ArtifactStore, make_distilled: Callable[..., Artifact]
) -> None:
    with pytest.raises(ExportError, match="vocab_size is 300, the draft's 320"):
        export_draft(config, store, inputs={"distill": make_distilled(vocab_size=320)})


def test_an_export_needs_a_distilled_draft(
    config: ExportConfig, store: ArtifactStore, measured: Artifact
) -> None:
    with pytest.raises(ExportError, match="got: measure"):
        export_draft(config, store, inputs={"measure": measured})
    with pytest.raises(ArtifactError, match="'measure'"):
        export_draft(config, store, inputs={"distill": measured})


def test_a_bundle_that_is_not_the_trained_draft_is_refused(
    tmp_path: Path, make_distilled: Callable[..., Artifact], tiny_tokenizer: Any
) -> None:
    trained = load_draft(make_distilled())
    other = make_llama(len(tiny_tokenizer), hidden=64, seed=3)
    save_pretrained_dir(tmp_path / "other", other, tiny_tokenizer)
    with pytest.raises(ExportError, match="isn't the trained one"):
        _check_reload(trained, tmp_path / "other", is_tied_head_stored=True)


def test_a_bundle_without_its_tied_head_is_refused(
    tmp_path: Path, make_distilled: Callable[..., Artifact], tiny_tokenizer: Any
) -> None:
    trained = load_draft(make_distilled(tie_word_embeddings=True))
    save_pretrained_dir(tmp_path / "tied", trained.model, tiny_tokenizer)
    with pytest.raises(ExportError, match=r"lacks lm_head\.weight"):
        _check_reload(trained, tmp_path / "tied", is_tied_head_stored=True)


def test_a_bundle_is_copied_whole_and_never_over_something(
    config: ExportConfig,
    store: ArtifactStore,
    make_distilled: Callable[..., Artifact],
    tmp_path: Path,
) -> None:
    artifact = export_draft(config, store, inputs={"distill": make_distilled()})
    empty = tmp_path / "out" / "empty"
    empty.mkdir(parents=True)
    for output in (tmp_path / "out" / "new", empty):
        copied = copy_bundle(artifact, output)
        assert sorted(p.name for p in copied.iterdir()) == sorted(
            p.name for p in (artifact.path / "draft").iterdir()
        )
        assert not (copied / "manifest.json").exists()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["empty", "new"]
    with pytest.raises(ExportError, match="exists already"):
        copy_bundle(artifact, empty)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ExportError, match="exists already"):
        copy_bundle(artifact, tmp_path / "file")
