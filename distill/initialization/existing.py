"""Owns a draft that starts from an existing small model, with the target's vocabulary or given it.

Refuses to know how models are found and how vocabularies are compared: models/ and vocab.py do.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from distill.config import Config, setting
from distill.errors import ConfigError, PairMismatchError
from distill.initialization.base import Samples, Start
from distill.models import LoadedModel, ModelConfig, ModelShape, load_target
from distill.vocab import check_pair


class ExistingConfig(Config):
    """Start from a trained model, such as a smaller one of the target's family.

    With ``vocabulary: transplanted`` it may be of any family: where its tokens are not the
    target's, its embedding and head are rewritten for the target's, token by token.
    """

    kind: Literal["existing"] = "existing"
    model: ModelConfig
    vocabulary: Literal["shared", "transplanted"] = setting(
        "shared", description="shared: other tokens are an error; transplanted: they are matched"
    )

    @field_validator("model")
    @classmethod
    def _check_quantize(cls, model: ModelConfig) -> ModelConfig:
        if model.quantize != "none":
            raise ConfigError(
                f"quantize is {model.quantize}, but a draft is trained from this model and int8 "
                "weights cannot be trained; leave quantize out here"
            )
        return model

    @property
    def num_sample_tokens(self) -> int:
        """None: nothing is measured."""
        return 0

    def shape_from(self, own: ModelShape, target: ModelShape | None) -> ModelShape:
        """Return the draft's shape: the model's own, with the target's rows if transplanted.

        That holds where its tokens are the target's already, too: they may be padded differently.
        """
        if self.vocabulary == "shared" or target is None:
            return own
        return own.model_copy(update={"vocab_size": target.vocab_size})

    def build(self, target: LoadedModel, *, seed: int, samples: Samples = ()) -> Start:
        """Load it, check that it reads token ids as the target does, give it the tokenizer.

        Raises:
            ModelNotFoundError: the reference leads nowhere.
            PairMismatchError: the two do not share a vocabulary and none is to be transplanted.
        """
        from distill.initialization.transplant import resize_rows, transplant

        draft = load_target(self.model)
        report: dict[str, Any] = {"kind": self.kind, "vocabulary": "shared"}
        try:
            _check(target, draft)
        except PairMismatchError as mismatch:
            if self.vocabulary == "shared":
                raise PairMismatchError(
                    f"{mismatch}\nTo match the tokens of the two and go on, set "
                    "initialization.vocabulary: transplanted"
                ) from mismatch
            report |= {"vocabulary": "transplanted", "rows": transplant(draft, target)}
            _check(target, draft)
        if self.vocabulary == "transplanted" and draft.shape.vocab_size != target.shape.vocab_size:
            resize_rows(draft, target.shape.vocab_size)
        draft.tokenizer = target.tokenizer
        draft.vocabulary = None  # what it was to propose; this training chooses anew
        draft.model.to(target.device)
        return Start(draft, report)


def _check(target: LoadedModel, draft: LoadedModel) -> None:
    check_pair(
        target.tokenizer,
        target.shape,
        draft.tokenizer,
        draft.shape,
        takes_target_tokenizer=True,
    )
