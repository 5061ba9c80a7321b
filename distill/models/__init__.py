"""Models: a reference in a config -> a model, its tokenizer and its shape; and back to files.

Refuses to know what a model is used for: no sampling, no training, no acceptance.
"""

from __future__ import annotations

from distill.models.config import ModelConfig, ModelShape, shape_of
from distill.models.loading import (
    LoadedModel,
    load_draft,
    load_target,
    load_tokenizer,
    logits_from_hidden,
    pick_device,
    stop_token_ids,
)
from distill.models.resolve import (
    UNRESOLVED,
    ResolvedModel,
    has_weights_here,
    model_revision,
    read_shape,
    resolve_model,
)
from distill.models.saving import save_model
from distill.models.vocabulary import DraftVocabulary, write_vocabulary

__all__ = [
    "UNRESOLVED",
    "DraftVocabulary",
    "LoadedModel",
    "ModelConfig",
    "ModelShape",
    "ResolvedModel",
    "has_weights_here",
    "load_draft",
    "load_target",
    "load_tokenizer",
    "logits_from_hidden",
    "model_revision",
    "pick_device",
    "read_shape",
    "resolve_model",
    "save_model",
    "shape_of",
    "stop_token_ids",
    "write_vocabulary",
]
