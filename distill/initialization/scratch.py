"""Owns a draft with freshly drawn layers, in the target's architecture.

Refuses to know pretraining: such a draft learns everything from the target's outputs.
"""

from __future__ import annotations

from typing import Any, Literal

from distill.config import Config, setting
from distill.errors import ConfigError
from distill.initialization.base import as_draft, copy_weights, layer_prefix, like_target
from distill.models import LoadedModel, ModelShape


class ScratchConfig(Config):
    """Sizes of a new draft; those left out are the target's.

    A draft of the target's width starts with copies of its embedding, final norm and head.
    """

    kind: Literal["scratch"] = "scratch"
    num_layers: int = setting(2, gt=0)
    hidden_size: int | None = setting(None, gt=0)
    intermediate_size: int | None = setting(None, gt=0)
    num_attention_heads: int | None = setting(None, gt=0)
    num_key_value_heads: int | None = setting(None, gt=0)

    def build(self, target: LoadedModel, *, seed: int) -> LoadedModel:
        """Draw the weights (normal, with the target's initializer_range) from `seed`.

        Raises:
            ConfigError: a width the heads do not divide, or heads the key-value heads do not.
        """
        depth = target.model.config.num_hidden_layers
        layers = [index % depth for index in range(self.num_layers)]
        model = like_target(target, layers=layers, changes=self._changes(target), seed=seed)
        if model.config.hidden_size == target.model.config.hidden_size:
            prefix = layer_prefix(model)
            shared = [name for name in model.state_dict() if not name.startswith(prefix)]
            copy_weights(model, target, {name: name for name in shared})
        return as_draft(model, target, f"{self.num_layers} new layers in the architecture")

    def shape_from(self, shape: ModelShape) -> ModelShape:
        """Return the draft's shape for a target of the shape given.

        Raises:
            ConfigError: a width the heads do not divide, or heads the key-value heads do not.
        """
        width = self.hidden_size or shape.hidden_size
        heads = self.num_attention_heads or shape.num_attention_heads
        kv_heads = self.num_key_value_heads or min(shape.num_key_value_heads, heads)
        if width % heads:
            raise ConfigError(
                f"initialization: hidden_size {width} is not a multiple of num_attention_heads "
                f"{heads}; change one of them"
            )
        if heads % kv_heads:
            raise ConfigError(
                f"initialization: num_attention_heads {heads} is not a multiple of "
                f"num_key_value_heads {kv_heads}; change one of them"
            )
        # the width of the MLP keeps the target's ratio unless it is given
        inner = self.intermediate_size or shape.intermediate_size * width // shape.hidden_size
        is_reshaped = (width, heads) != (shape.hidden_size, shape.num_attention_heads)
        return shape.model_copy(
            update={
                "num_hidden_layers": self.num_layers,
                "hidden_size": width,
                "intermediate_size": inner,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "head_dim": None if is_reshaped else shape.head_dim,
            }
        )

    def _changes(self, target: LoadedModel) -> dict[str, Any]:
        before, shape = target.shape, self.shape_from(target.shape)
        width, heads = shape.hidden_size, shape.num_attention_heads
        changes = {
            "hidden_size": width,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": heads,
            "num_key_value_heads": shape.num_key_value_heads,
        }
        is_reshaped = (width, heads) != (before.hidden_size, before.num_attention_heads)
        if is_reshaped and getattr(target.model.config, "head_dim", None) is not None:
            changes["head_dim"] = width // heads
        return changes
