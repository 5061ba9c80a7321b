"""Owns a draft that starts from an existing small model with the target's vocabulary.

Refuses to know how models are found and how vocabularies are compared: models/ and vocab.py do.
"""

from __future__ import annotations

from typing import Literal

from distill.config import Config
from distill.models import LoadedModel, ModelConfig, load_target
from distill.vocab import check_pair


class ExistingConfig(Config):
    """Start from a trained model, such as a smaller one of the target's family."""

    kind: Literal["existing"] = "existing"
    model: ModelConfig

    def build(self, target: LoadedModel, *, seed: int) -> LoadedModel:
        """Load it, check that it reads token ids as the target does, give it the tokenizer.

        Raises:
            ModelNotFoundError: the reference leads nowhere.
            PairMismatchError: the two do not share a vocabulary.
        """
        draft = load_target(self.model)
        check_pair(
            target.tokenizer,
            target.shape,
            draft.tokenizer,
            draft.shape,
            takes_target_tokenizer=True,
        )
        draft.tokenizer = target.tokenizer
        draft.model.to(target.device)
        return draft
