"""The ship bundle: a distilled draft as a directory that another team loads without this library.

Refuses to know how the draft was trained, and publishes nothing: it writes files, no more.

A bundle is checked before it's committed: every weight is in the file under its own name, and the
draft loaded back from it gives the same logits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.artifacts import Artifact, ArtifactKey, ArtifactStore
from distill.bundle import BUNDLE, CARD, files_of, refuse_misleading, write_manifest
from distill.config import Config, setting
from distill.draft_tokens import NONE_HELPS, depth_revision, resolve_num_draft_tokens
from distill.errors import ExportError
from distill.lineage import check_lineage, check_same_quantization, fingerprints_of
from distill.metrics.sentences import ENOUGH_PROMPTS, few_prompts
from distill.models import (
    LoadedModel,
    ModelConfig,
    ResolvedModel,
    load_draft,
    load_tokenizer,
    model_revision,
    read_shape,
    resolve_model,
    save_model,
    write_vocabulary,
)
from distill.models.sources import LICENSE_FILE_PATTERNS, parse_reference
from distill.vocab import PairReport, check_pair

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CODE_VERSION = 2

_SCHEMA_VERSION = 1
_WEIGHTS = "model.safetensors"


class ExportConfig(Config):
    """Settings of the bundle.

    `num_draft_tokens` null: the measured best, or 4 when nothing was measured. `license` is only
    written down, never guessed; null says so in the card.
    """

    target: ModelConfig
    name: str = setting("draft", min_length=1, description="The draft's name in its model card.")
    num_draft_tokens: int | None = setting(None, ge=1)
    license: str | None = None
    license_link: str | None = None
    include_tied_head: bool = setting(
        True, description="Store the output head although it equals the embedding: costs its size."
    )


def export_key(
    config: ExportConfig, store: ArtifactStore, *, inputs: Mapping[str, Artifact | str]
) -> ArtifactKey:
    """The bundle's key; `inputs`, "distill" and, if any, "measure", or their fingerprints.

    The number of draft tokens is in it, see `draft_tokens.depth_revision`.
    """
    revisions = {
        "target": model_revision(config.target),
        "num_draft_tokens": depth_revision(config.num_draft_tokens, inputs.get("measure")),
    }
    fingerprints = fingerprints_of(inputs)
    return store.key("export", CODE_VERSION, config, inputs=fingerprints, revisions=revisions)


def export_draft(
    config: ExportConfig,
    store: ArtifactStore,
    *,
    inputs: Mapping[str, Artifact],
    rebuild: bool = False,
) -> Artifact:
    """Build the bundle, the folder `draft/` of the artifact; reuse it when it's built already.

    `inputs`: "distill" and, for the measured numbers and the best number of draft tokens,
    "measure".

    Raises:
        ArtifactError: an input was made with another target, or "measure" with another draft, or
            with the target's weights held in another way.
        ExportError: the name would mislead a runtime, or the bundle isn't the trained draft.
        PairMismatchError: the draft doesn't belong to the target.
    """
    if "distill" not in inputs:
        raise ExportError(
            f"An export needs a 'distill' artifact; got: {', '.join(inputs) or 'none'}. "
            "Run the distill stage first."
        )
    inputs = {name: artifact.expect(name) for name, artifact in inputs.items()}
    key = export_key(config, store, inputs=inputs)
    revision = key.parts["revisions"]["target"]
    check_lineage(inputs, reference=config.target.model, revision=revision)
    if "measure" in inputs:  # the card tells its numbers, and how many tokens to draft
        quantize = config.target.quantize
        check_same_quantization(inputs["measure"], name="measure", quantize=quantize)
    refuse_misleading(config.name, "the draft's name")
    refuse_misleading(store.path(key), "the path of the bundle")
    return store.get_or_build(
        key, lambda directory: _build(config, inputs, directory / BUNDLE), rebuild=rebuild
    )


def _build(config: ExportConfig, inputs: Mapping[str, Artifact], bundle: Path) -> dict[str, Any]:
    distill, measure = inputs["distill"], inputs.get("measure")
    target = resolve_model(config.target)
    tokenizer = load_tokenizer(config.target)
    draft = load_draft(distill, device="cpu")
    pair = _check_pair(config, tokenizer, draft)
    best = resolve_num_draft_tokens(config.num_draft_tokens, measure)
    num_draft_tokens = max(1, best)  # runtimes take no 0
    notes = [*pair.notes, *([] if best else [NONE_HELPS])]
    stop_token_ids = _stop_token_ids(target, tokenizer)
    # Before any weight is written: an invalid one must not surface at the very end.
    generation_config = _generation_config(tokenizer, stop_token_ids, num_draft_tokens)
    if bundle.exists():
        shutil.rmtree(bundle)  # what a killed build left
    draft.model.generation_config = generation_config
    save_model(draft.model, tokenizer, bundle)
    if config.include_tied_head:
        _store_tied_weights(draft, bundle / _WEIGHTS)
    if draft.vocabulary is not None:
        write_vocabulary(bundle, draft.vocabulary)
    license_files = _copy_licenses(target.path, bundle)
    _check_reload(draft, bundle, is_tied_head_stored=config.include_tied_head)
    contract = {
        "schema_version": _SCHEMA_VERSION,
        "name": config.name,
        "role": "draft",
        "target": {
            "model": public_reference(config.target),
            "revision": target.revision,
            "stop_token_ids": stop_token_ids,
            **_tokenizer_contract(tokenizer, pair),
        },
        "draft": _draft_facts(draft),
        "vocabulary_subset_size": draft.vocabulary and len(draft.vocabulary.token_ids),
        "num_draft_tokens": num_draft_tokens,
        "lineage": {name: artifact.fingerprint for name, artifact in sorted(inputs.items())},
        "license": config.license,
        "license_link": config.license_link,
        "license_files": license_files,
    }
    is_hub_target = parse_reference(config.target.model).kind == "hub"
    card = _model_card(contract, _acceptance(measure), tuple(notes), is_hub_target)
    (bundle / CARD).write_text(card, encoding="utf-8")
    write_manifest(bundle, contract)
    size = sum(path.stat().st_size for path in files_of(bundle))
    return {"num_draft_tokens": num_draft_tokens, "size_bytes": size, "notes": notes}


def _check_pair(
    config: ExportConfig, tokenizer: PreTrainedTokenizerBase, draft: LoadedModel
) -> PairReport:
    shape = read_shape(config.target)
    assert shape is not None, "the target's files are here, so its config is readable"
    pair = check_pair(tokenizer, shape, draft.tokenizer, draft.shape)
    if shape.vocab_size != draft.shape.vocab_size:
        raise ExportError(
            f"The target's vocab_size is {shape.vocab_size}, the draft's "
            f"{draft.shape.vocab_size}; transformers, vLLM and SGLang want equal numbers. Pad the "
            f"draft with resize_token_embeddings({shape.vocab_size}) before it's distilled."
        )
    return pair


def _stop_token_ids(target: ResolvedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a text of the target, without loading its weights."""
    ids: set[int] = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    for name in ("config.json", "generation_config.json"):
        path = target.path / name
        if path.is_file():
            stop = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            ids.update(stop if isinstance(stop, list) else [] if stop is None else [stop])
    return sorted(ids)


def _generation_config(
    tokenizer: PreTrainedTokenizerBase, stop_token_ids: list[int], num_draft_tokens: int
) -> GenerationConfig:
    from transformers import GenerationConfig

    # transformers reads a draft's schedule here. Its own defaults (20 tokens, stop below 0.4
    # confidence) hide what the draft can do.
    config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=stop_token_ids or None,
        pad_token_id=tokenizer.pad_token_id,
        num_assistant_tokens=num_draft_tokens,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    config.validate(strict=True)
    return config


def _store_tied_weights(draft: LoadedModel, path: Path) -> None:
    """Give each tied weight its own entry: some loaders look for the head and don't tie it."""
    from safetensors.torch import load_file, save_file

    stored = load_file(path)
    missing = sorted(draft.model.state_dict().keys() - stored.keys())
    if missing:
        state = draft.model.state_dict()
        stored |= {name: state[name].detach().cpu().clone().contiguous() for name in missing}
        mode = path.stat().st_mode  # save_file writes for the owner's eyes only
        save_file(stored, path, metadata={"format": "pt"})
        path.chmod(mode)


def _check_reload(draft: LoadedModel, bundle: Path, *, is_tied_head_stored: bool) -> None:
    import torch
    from safetensors import safe_open

    reloaded = load_draft(bundle, device="cpu")
    with safe_open(bundle / _WEIGHTS, framework="pt") as file:
        missing = sorted(reloaded.model.state_dict().keys() - set(file.keys()))
    if missing and is_tied_head_stored:
        raise ExportError(f"{bundle / _WEIGHTS} lacks {', '.join(missing)}; this is a bug of ours.")
    if reloaded.vocabulary != draft.vocabulary:
        raise ExportError(
            f"The draft loaded back from {bundle} may not propose the tokens the trained one may; "
            "this is a bug of ours."
        )
    num_probed = min(16, draft.shape.vocab_size)
    probe_BT = torch.linspace(0, draft.shape.vocab_size - 1, num_probed).long().unsqueeze(0)
    with torch.inference_mode():
        expected_BTV = draft.model(probe_BT).logits
        found_BTV = reloaded.model(probe_BT).logits
    if not torch.equal(expected_BTV, found_BTV):
        gap = (expected_BTV.float() - found_BTV.float()).abs().max().item()
        raise ExportError(
            f"The draft loaded back from {bundle} isn't the trained one: its logits differ by up "
            f"to {gap:.3g}. Don't ship it; run the stage again with a healthy disk."
        )


def _copy_licenses(source: Path, bundle: Path) -> list[str]:
    found = {path for pattern in LICENSE_FILE_PATTERNS for path in source.glob(pattern)}
    names = sorted(path.name for path in found if path.is_file())
    for name in names:
        shutil.copyfile(source / name, bundle / name)
    return names


def public_reference(config: ModelConfig) -> str:
    """The target as others know it: a path of this machine becomes its last part."""
    reference = parse_reference(config.model)
    is_local = reference.kind in ("directory", "gguf")
    return Path(reference.name).name if is_local else config.model


def _tokenizer_contract(tokenizer: PreTrainedTokenizerBase, pair: PairReport) -> dict[str, Any]:
    template = tokenizer.chat_template
    text = None if template is None else json.dumps(template, sort_keys=True)
    return {
        "vocabulary_sha256": pair.vocabulary_sha256,
        "num_tokens": pair.num_shared_tokens,
        "vocab_size": pair.num_shared_tokens + pair.target_padded_rows,
        "chat_template_sha256": text and hashlib.sha256(text.encode()).hexdigest(),
        "special_token_ids": {
            name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
        },
    }


def _draft_facts(draft: LoadedModel) -> dict[str, Any]:
    # parameters() yields a tied weight once.
    num_parameters = sum(weight.numel() for weight in draft.model.parameters())
    return {
        "architecture": type(draft.model).__name__,
        "num_parameters": num_parameters,
        "dtype": str(draft.dtype).removeprefix("torch."),
        **draft.shape.model_dump(exclude_none=True),
    }


def _acceptance(measure: Artifact | None) -> dict[str, Any] | None:
    if measure is None:
        return None
    content = json.loads(measure.file("acceptance.json").read_text(encoding="utf-8"))
    cells = [cell for cell in content["cells"] if cell["draft"] == "distilled"]
    return {"num_draft_tokens": content["num_draft_tokens"], "cells": cells}


def _model_card(
    contract: Mapping[str, Any],
    acceptance: Mapping[str, Any] | None,
    notes: tuple[str, ...],
    is_hub_target: bool,
) -> str:
    import jinja2
    from huggingface_hub import ModelCardData

    target = contract["target"]["model"]
    front_matter = ModelCardData(
        base_model=[target.partition("@")[0]] if is_hub_target else None,
        license=contract["license"] or "other",
        license_link=contract["license_link"],
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", "distillation"],
        speculative_target=target,
    )
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["estimate"] = _estimate
    source = resources.files("distill").joinpath("templates/model_card.md.j2")
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        **contract,
        front_matter=front_matter.to_yaml().strip(),
        acceptance=acceptance,
        enough=ENOUGH_PROMPTS,
        notes=notes,
        target_argument=target.partition("@")[0] if is_hub_target else "TARGET",
        draft_argument="path/to/this/directory",
    )


def _estimate(value: Mapping[str, Any]) -> str:
    """An estimate with its interval, as the card shows it."""
    if value["value"] is None:
        return "–"
    if value["low"] is None:
        return f"{value['value']:.2f}"
    interval = f"{value['low']:.2f} to {value['high']:.2f}"
    if few_prompts(value["num_prompts"]) is not None:
        interval += f"; fewer than {ENOUGH_PROMPTS} prompts"
    return f"{value['value']:.2f} ({interval})"
