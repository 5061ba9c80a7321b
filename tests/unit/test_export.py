"""The bundle another team gets: it loads, pairs, drafts losslessly, and is the same bytes twice."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from distill.artifacts import Artifact, ArtifactStore
from distill.bundle import copy_bundle
from distill.config import Config
from distill.draft_tokens import best_num_draft_tokens
from distill.errors import ArtifactError, ExportError, PairMismatchError
from distill.export import (
    ExportConfig,
    _check_reload,
    export_draft,
    export_key,
)
from distill.models import ModelConfig, load_draft, model_revision
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
    target: ModelConfig | None = None,
    inputs: Mapping[str, str] | None = None,
) -> Artifact:
    """An artifact as `stage` leaves it, without running the stage."""
    revisions = {"salt": salt} | ({} if target is None else {"target": model_revision(target)})

    def build(directory: Path) -> Mapping[str, Any]:
        write(directory)
        return metrics or {}

    return store.get_or_build(
        store.key(stage, 1, NoConfig(), inputs=inputs or {}, revisions=revisions), build
    )


@pytest.fixture
def make_distilled(
    store: ArtifactStore, tiny_tokenizer: Any, config: ExportConfig
) -> Callable[..., Artifact]:
    def make(
        *,
        salt: str = "",
        vocabulary: list[int] | None = None,
        target: ModelConfig = config.target,
        **shape: Any,
    ) -> Artifact:
        model = make_llama(**{"vocab_size": len(tiny_tokenizer), "hidden": 64, "seed": 2, **shape})

        def write(directory: Path) -> None:
            save_pretrained_dir(directory / "draft", model, tiny_tokenizer)
            if vocabulary is not None:
                content = {"token_ids": vocabulary, "coverage": 1.0}
                (directory / "draft_vocabulary.json").write_text(json.dumps(content))

        return stand_in(store, "distill", write, salt=salt, target=target)

    return make


@pytest.fixture
def measured(store: ArtifactStore) -> Callable[..., Artifact]:
    """A measurement of the given draft, with its best number of draft tokens."""
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

    def make(distilled: Artifact | None = None, best: int | None = 3) -> Artifact:
        inputs = {} if distilled is None else {"distill": distilled.fingerprint}
        metrics = {"verdict": {"ship": True, "num_draft_tokens": best}}
        # As measured again: the same key, whatever the clock said.
        key = store.key("measure", 1, NoConfig(), inputs=inputs, revisions={"salt": ""})

        def build(directory: Path) -> Mapping[str, Any]:
            write(directory)
            return metrics

        return store.get_or_build(key, build, rebuild=best != 3)

    return make


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
    measured: Callable[..., Artifact],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.generation.candidate_generator import AssistedCandidateGenerator

    artifact = export_draft(
        config, store, inputs={"distill": make_distilled(), "measure": measured(make_distilled())}
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


def test_weights_with_a_stored_head_are_as_readable_as_the_other_files(
    config: ExportConfig, store: ArtifactStore, make_distilled: Callable[..., Artifact]
) -> None:
    distilled = make_distilled(tie_word_embeddings=True)
    bundle = export_draft(config, store, inputs={"distill": distilled}).path / "draft"
    assert {path.stat().st_mode for path in bundle.iterdir()} == {
        (bundle / "config.json").stat().st_mode
    }


def test_a_target_in_a_directory_with_a_space_in_its_name_is_no_hub_id(
    config: ExportConfig,
    store: ArtifactStore,
    make_distilled: Callable[..., Artifact],
    tmp_path: Path,
) -> None:
    directory = shutil.copytree(config.target.model, tmp_path / "My Model")
    config = config.model_copy(update={"target": ModelConfig(model=str(directory), device="cpu")})
    artifact = export_draft(config, store, inputs={"distill": make_distilled()})
    assert contract_of(artifact)["target"]["model"] == "My Model"
    card = artifact.file("draft/README.md").read_text(encoding="utf-8")
    assert "speculative_target: My Model" in card
    assert "base_model" not in card


def test_further_chat_templates_in_a_sub_folder_are_shipped_and_hashed(
    config: ExportConfig, store: ArtifactStore, tmp_path: Path
) -> None:
    directory = shutil.copytree(config.target.model, tmp_path / "several")
    name = "additional_chat_templates/tool_use.jinja"
    (directory / name).parent.mkdir()
    (directory / name).write_text("{{ tools }}")
    config = config.model_copy(update={"target": ModelConfig(model=str(directory), device="cpu")})
    tokenizer = AutoTokenizer.from_pretrained(directory)
    draft = make_llama(len(tokenizer), hidden=64, seed=2)

    def write(artifact: Path) -> None:
        save_pretrained_dir(artifact / "draft", draft, tokenizer)

    distilled = stand_in(store, "distill", write, target=config.target)
    artifact = export_draft(config, store, inputs={"distill": distilled})
    listed = {entry["path"]: entry["sha256"] for entry in contract_of(artifact)["files"]}
    content = artifact.file(f"draft/{name}").read_bytes()
    assert listed[name] == hashlib.sha256(content).hexdigest()
    files = [path for path in (artifact.path / "draft").rglob("*") if path.is_file()]
    assert len(listed) == len(files) - 1  # all but the contract itself
    assert artifact.metrics["size_bytes"] == sum(path.stat().st_size for path in files)


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
    measured: Callable[..., Artifact],
) -> None:
    distilled = make_distilled()
    artifact = export_draft(
        config, store, inputs={"distill": distilled, "measure": measured(distilled)}
    )
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
    measured: Callable[..., Artifact],
) -> None:
    distilled = make_distilled()
    unmeasured = export_draft(config, store, inputs={"distill": distilled})
    assert contract_of(unmeasured)["num_draft_tokens"] == 4
    pinned = config.model_copy(update={"num_draft_tokens": 7})
    artifact = export_draft(
        pinned, store, inputs={"distill": distilled, "measure": measured(distilled)}
    )
    assert contract_of(artifact)["num_draft_tokens"] == 7


def test_a_measurement_without_a_useful_depth_recommends_none(
    store: ArtifactStore, measured: Callable[..., Artifact]
) -> None:
    useless = stand_in(store, "measure", lambda d: None, {"verdict": {}}, salt="useless")
    assert best_num_draft_tokens(None) is None
    assert best_num_draft_tokens(useless) is None
    assert best_num_draft_tokens(measured()) == 3


def test_the_contract_names_the_pair_by_hashes_and_no_path_of_this_machine(
    config: ExportConfig,
    store: ArtifactStore,
    make_distilled: Callable[..., Artifact],
    measured: Callable[..., Artifact],
    tiny_tokenizer: Any,
) -> None:
    distilled = make_distilled(vocabulary=[0, 1, 5])
    artifact = export_draft(
        config, store, inputs={"distill": distilled, "measure": measured(distilled)}
    )
    contract = contract_of(artifact)
    assert contract["target"]["model"] == "target"
    assert contract["target"]["special_token_ids"] == {"bos": None, "eos": 1, "pad": 1}
    assert contract["target"]["stop_token_ids"] == [1]
    assert contract["target"]["vocab_size"] == len(tiny_tokenizer)
    assert contract["vocabulary_subset_size"] == 3
    assert contract["lineage"] == {
        "distill": distilled.fingerprint,
        "measure": measured(distilled).fingerprint,
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
    measured: Callable[..., Artifact],
) -> None:
    distilled = make_distilled(max_positions=256)
    artifact = export_draft(
        config, store, inputs={"distill": distilled, "measure": measured(distilled)}
    )
    card = artifact.file("draft/README.md").read_text(encoding="utf-8")
    assert card.startswith("---\n")
    assert "| 0.0 | chat | 2 | 0.75 (0.50 to 0.88; fewer than 8 prompts) | 0.25 | – |" in card
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
    distilled = make_distilled(target=config.target)
    artifact = export_draft(config, store, inputs={"distill": distilled})
    assert artifact.file("draft/LICENSE.txt").read_text() == "terms"
    assert contract_of(artifact)["license_files"] == ["LICENSE.txt"]
    assert contract_of(artifact)["target"]["stop_token_ids"] == [1]


def test_two_builds_give_the_same_bytes(
    config: ExportConfig,
    store: ArtifactStore,
    make_distilled: Callable[..., Artifact],
    measured: Callable[..., Artifact],
) -> None:
    distilled = make_distilled(tie_word_embeddings=True, vocabulary=[1])
    inputs = {"distill": distilled, "measure": measured(distilled)}
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

    distilled = stand_in(store, "distill", write, target=config.target)
    with pytest.raises(PairMismatchError):
        export_draft(config, store, inputs={"distill": distilled})


def test_a_draft_padded_to_another_size_is_refused(
    config: ExportConfig, store: ArtifactStore, make_distilled: Callable[..., Artifact]
) -> None:
    with pytest.raises(ExportError, match="vocab_size is 300, the draft's 320"):
        export_draft(config, store, inputs={"distill": make_distilled(vocab_size=320)})


def test_an_export_needs_a_distilled_draft(
    config: ExportConfig, store: ArtifactStore, measured: Callable[..., Artifact]
) -> None:
    with pytest.raises(ExportError, match="got: measure"):
        export_draft(config, store, inputs={"measure": measured()})
    with pytest.raises(ArtifactError, match="'measure'"):
        export_draft(config, store, inputs={"distill": measured()})


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


def test_measuring_again_to_another_depth_makes_another_bundle(
    config: ExportConfig,
    store: ArtifactStore,
    make_distilled: Callable[..., Artifact],
    measured: Callable[..., Artifact],
) -> None:
    distilled = make_distilled()
    first, second = measured(distilled), measured(distilled, best=2)
    assert first.fingerprint == second.fingerprint
    depths = [
        contract_of(export_draft(config, store, inputs={"distill": distilled, "measure": m}))
        for m in (first, second)
    ]
    assert [contract["num_draft_tokens"] for contract in depths] == [3, 2]


def test_a_key_from_fingerprints_says_that_the_depth_is_unmeasured_unless_it_is_pinned(
    config: ExportConfig, store: ArtifactStore, measured: Callable[..., Artifact]
) -> None:
    names = {"distill": "0" * 64, "measure": "1" * 64}
    key = export_key(config, store, inputs=names)
    assert key.parts["revisions"]["num_draft_tokens"] == "unmeasured"
    pinned = config.model_copy(update={"num_draft_tokens": 3})
    found = measured()
    by_name = export_key(pinned, store, inputs={**names, "measure": found.fingerprint})
    assert by_name == export_key(pinned, store, inputs={**names, "measure": found})


def test_a_draft_that_never_helps_is_exported_with_one_token_and_the_card_says_so(
    config: ExportConfig,
    store: ArtifactStore,
    make_distilled: Callable[..., Artifact],
    measured: Callable[..., Artifact],
) -> None:
    distilled = make_distilled()
    slower = measured(distilled, best=0)
    artifact = export_draft(config, store, inputs={"distill": distilled, "measure": slower})
    assert contract_of(artifact)["num_draft_tokens"] == 1
    card = artifact.file("draft/README.md").read_text(encoding="utf-8")
    assert "no number of draft tokens is faster than plain decoding" in card


def test_a_measurement_with_the_target_held_in_another_way_is_refused(
    config: ExportConfig,
    store: ArtifactStore,
    make_distilled: Callable[..., Artifact],
    measured: Callable[..., Artifact],
) -> None:
    distilled = make_distilled()
    in_bytes = config.target.model_copy(update={"quantize": "int8"})
    asked = config.model_copy(update={"target": in_bytes})
    inputs = {"distill": distilled, "measure": measured(distilled)}
    with pytest.raises(ArtifactError, match=r"quantize: int8, but .* \(measure\).*quantize: none"):
        export_draft(asked, store, inputs=inputs)


def test_a_measurement_of_another_draft_is_refused_with_both_fingerprints(
    config: ExportConfig,
    store: ArtifactStore,
    make_distilled: Callable[..., Artifact],
    measured: Callable[..., Artifact],
) -> None:
    distilled, other = make_distilled(), make_distilled(salt="other")
    with pytest.raises(ArtifactError, match=f"{other.fingerprint}.*{distilled.fingerprint}"):
        export_draft(config, store, inputs={"distill": distilled, "measure": measured(other)})


def test_a_draft_of_another_target_is_refused_with_both_revisions(
    config: ExportConfig,
    store: ArtifactStore,
    make_distilled: Callable[..., Artifact],
    tiny_pair_dirs: tuple[Path, Path],
) -> None:
    elsewhere = ModelConfig(model=str(tiny_pair_dirs[1]))
    with pytest.raises(ArtifactError, match=r"is at revision sha256.*with a target at sha256"):
        export_draft(config, store, inputs={"distill": make_distilled(target=elsewhere)})
