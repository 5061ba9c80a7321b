"""Owns where a benchmark's pair comes from: a trained draft, a random one, or two made-up models.
Refuses to measure them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from distill.artifacts import ArtifactStore
from distill.errors import ArtifactMissingError, DistillError
from distill.initialization import initialize
from distill.initialization.scratch import ScratchConfig
from distill.manifest import read_manifest
from distill.models import (
    LoadedModel,
    ModelConfig,
    ResolvedModel,
    load_draft,
    load_target,
    model_revision,
    shape_of,
)
from scripts.benchmarks.ours import Pair


def load_pair(
    target_config: ModelConfig, *, draft: str | None, store: ArtifactStore, is_random: bool
) -> Pair:
    """The target with a draft in its own dtype.

    Args:
        draft: an artifact or a model directory; None: the newest draft of this target in the store.
        is_random: a freshly drawn one-layer draft of the target's family instead.

    Raises:
        DistillError: no such draft; says how to get one.
    """
    target = load_target(target_config)
    if is_random:
        made = initialize(ScratchConfig(num_layers=1), target, seed=0)
        made.model.requires_grad_(False)
        return Pair(target, made)
    path = Path(draft) if draft is not None else newest_draft(target_config, store)
    dtype: Any = str(target.dtype).removeprefix("torch.")
    loaded = load_draft(path, dtype=dtype, device=str(target.device))
    loaded.model.requires_grad_(False)
    return Pair(target, loaded)


def newest_draft(target_config: ModelConfig, store: ArtifactStore) -> Path:
    """The directory of the last draft trained for this target.

    Raises:
        ArtifactMissingError: the store has none.
    """
    revision = model_revision(target_config)
    found: list[tuple[str, Path]] = []
    for path in sorted((store.root / "distill").glob("*/manifest.json")):
        try:
            manifest = read_manifest(path.parent)
        except DistillError:
            continue  # not a finished artifact of this version; another one may do
        if manifest.revisions.get("target") == revision:
            found.append((manifest.finished, path.parent))
    if not found:
        raise ArtifactMissingError(
            f"no draft of {target_config.model!r} in {store.root}; train one with "
            "scripts/quickstart, name one with --draft PATH, or use --random-pair"
        )
    return max(found)[1]


def made_up_pair(
    *,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype,
    draft_layers: int = 1,
    depth_scale: float = 0.15,
    seed: int = 0,
) -> Pair:
    """A random Llama and a draft of its first layers that agrees with it often, not always.

    What layers behind the draft's add is scaled down by ``depth_scale``, so that the first ones
    decide most tokens. For places where no trained weights are: the speed of a model does not
    depend on their values, and whether two engines agree does not either.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.2 if hidden_size < 256 else 0.04,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers[draft_layers:]:
            layer.self_attn.o_proj.weight.mul_(depth_scale)
            layer.mlp.down_proj.weight.mul_(depth_scale)
    draft_config = LlamaConfig(**(config.to_dict() | {"num_hidden_layers": draft_layers}))
    draft = LlamaForCausalLM(draft_config)
    draft.load_state_dict(model.state_dict(), strict=False)
    return Pair(_loaded(model, device, dtype), _loaded(draft, device, dtype))


def _loaded(model: Any, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
    resolved = ResolvedModel("random weights", Path(), "random")
    return LoadedModel(model, None, resolved, shape_of(model.config))


def describe(model: LoadedModel) -> str:
    """A model in a line."""
    shape = model.shape
    return (
        f"{model.resolved.reference}: {shape.num_hidden_layers} layers of {shape.hidden_size}, "
        f"{shape.vocab_size} tokens, {str(model.dtype).removeprefix('torch.')} on {model.device}"
    )
