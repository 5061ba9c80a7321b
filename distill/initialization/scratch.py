"""Owns a draft with freshly drawn layers, in the target's architecture.

Refuses to know pretraining: such a draft learns everything from the target's outputs.
"""

from __future__ import annotations

from typing import Any, Literal

from distill.config import Config, setting
from distill.errors import ConfigError
from distill.initialization.base import (
    PLAIN_FAMILIES,
    Samples,
    Start,
    as_draft,
    layer_prefix,
    like_target,
    load_weights,
    width_changes,
)
from distill.models import LoadedModel, ModelShape

Tables = Literal["copied", "projected", "random"]


class ScratchConfig(Config):
    """Sizes of a new draft; those left out are the target's.

    ``embeddings`` says where its embedding and head come from: copies of the target's (with its
    final norm), projections of them to a smaller width, or random numbers. Left out, they are
    copied at the target's width and random at any other.
    """

    kind: Literal["scratch"] = "scratch"
    num_layers: int = setting(2, gt=0)
    hidden_size: int | None = setting(None, gt=0)
    intermediate_size: int | None = setting(None, gt=0)
    num_attention_heads: int | None = setting(None, gt=0)
    num_key_value_heads: int | None = setting(None, gt=0)
    embeddings: Tables | None = setting(
        None, description="copied, projected or random; null: copied if the width is the target's"
    )
    tie_word_embeddings: bool | None = setting(
        None, description="one table for embedding and head; null: as the target"
    )

    @property
    def num_sample_tokens(self) -> int:
        """None: nothing is measured."""
        return 0

    def tables_for(self, shape: ModelShape) -> Tables:
        """Where embedding and head come from, for a target of the shape given.

        Raises:
            ConfigError: tables that cannot be taken from a target of that width, or that are two
                in the target and shall be one.
        """
        width = self.hidden_size or shape.hidden_size
        if self.embeddings is None:
            return "copied" if width == shape.hidden_size else "random"
        if self.embeddings == "copied" and width != shape.hidden_size:
            raise ConfigError(
                f"initialization.embeddings is copied, but the draft's width is {width} and the "
                f"target's {shape.hidden_size}; set it to projected or random"
            )
        if self.embeddings == "projected" and width >= shape.hidden_size:
            raise ConfigError(
                f"initialization.embeddings is projected, but the draft's width {width} is not "
                f"smaller than the target's {shape.hidden_size}; set it to "
                f"{'copied' if width == shape.hidden_size else 'random'}"
            )
        return self.embeddings

    def build(self, target: LoadedModel, *, seed: int, samples: Samples = ()) -> Start:
        """Draw the weights (normal, with the target's initializer_range) from `seed`.

        Raises:
            ConfigError: a width the heads do not divide, heads the key-value heads do not, or
                tables the target cannot give.
        """
        shape, tables = self.shape_from(target.shape), self.tables_for(target.shape)
        depth = target.model.config.num_hidden_layers
        layers = [index % depth for index in range(self.num_layers)]
        changes = {
            **width_changes(target, shape),
            "tie_word_embeddings": shape.tie_word_embeddings,
        }
        model = like_target(target, layers=layers, changes=changes, seed=seed)
        report: dict[str, Any] = {"kind": self.kind, "embeddings": tables}
        if tables == "copied":
            prefix, source = layer_prefix(model), target.model.state_dict()
            outside = [name for name in model.state_dict() if not name.startswith(prefix)]
            load_weights(model, {name: source[name] for name in outside})
        elif tables == "projected":
            report["kept_energy"] = _project_tables(model, target)
        draft = as_draft(model, target, f"{self.num_layers} new layers in the architecture")
        return Start(draft, report)

    def shape_from(self, shape: ModelShape) -> ModelShape:
        """Return the draft's shape for a target of the shape given.

        Raises:
            ConfigError: a width the heads do not divide, heads the key-value heads do not, or one
                table to be made of the target's two.
        """
        width = self.hidden_size or shape.hidden_size
        heads = self.num_attention_heads or shape.num_attention_heads
        kv_heads = self.num_key_value_heads or min(shape.num_key_value_heads, heads)
        is_reshaped = (width, heads) != (shape.hidden_size, shape.num_attention_heads)
        if is_reshaped and width % heads:  # the size of a new shape's heads is the quotient
            raise ConfigError(
                f"initialization: hidden_size {width} is not a multiple of num_attention_heads "
                f"{heads}; change one of them"
            )
        if heads % kv_heads:
            raise ConfigError(
                f"initialization: num_attention_heads {heads} is not a multiple of "
                f"num_key_value_heads {kv_heads}; change one of them"
            )
        is_tied = shape.tie_word_embeddings
        if self.tie_word_embeddings is not None:
            is_tied = self.tie_word_embeddings
        if is_tied and not shape.tie_word_embeddings and self.tables_for(shape) != "random":
            raise ConfigError(
                f"initialization.tie_word_embeddings is true, but the target's embedding and head "
                f"are two tables and embeddings is {self.tables_for(shape)}, so one would be lost; "
                f"leave tie_word_embeddings out, or set embeddings: random"
            )
        # the width of the MLP keeps the target's ratio unless it is given
        inner = self.intermediate_size or shape.intermediate_size * width // shape.hidden_size
        return shape.model_copy(
            update={
                "num_hidden_layers": self.num_layers,
                "hidden_size": width,
                "intermediate_size": inner,
                "num_attention_heads": heads,
                "num_key_value_heads": kv_heads,
                "head_dim": None if is_reshaped else shape.head_dim,
                "tie_word_embeddings": is_tied,
            }
        )


def _project_tables(model: Any, target: LoadedModel) -> dict[str, float]:
    """Give `model` the target's tables at its width; return the share of their energy that is left.

    Each table is projected on its own principal directions: embedding' = embedding R, and
    head' = head R, so head' (R^T hidden) = head R R^T hidden, close to the target's logits. The
    final norm starts as the constant that lets states be as long as the target's are at most.
    """
    import torch

    from distill.initialization.projection import principal_directions, project

    width, source = model.config.hidden_size, target.model
    pairs = {
        "embedding": (source.get_input_embeddings(), model.get_input_embeddings()),
        "head": (source.get_output_embeddings(), model.get_output_embeddings()),
    }
    if model.config.tie_word_embeddings:
        del pairs["head"]
    kept = {}
    with torch.no_grad():
        for name, (table, own) in pairs.items():
            projection_DW = principal_directions(table.weight, width)
            projected_VW, kept[name] = project(table.weight, projection_DW)
            own.weight.copy_(projected_VW)
            if getattr(own, "bias", None) is not None:
                own.bias.copy_(table.bias)
        if source.config.model_type in PLAIN_FAMILIES:
            weight_D = source.base_model.norm.weight.double()
            # |norm(x)| is rms(weight) sqrt(width), for an x without a preferred direction
            constant = (weight_D.square().mean() * len(weight_D) / width).sqrt()
            model.base_model.norm.weight.fill_(constant.item())
    return kept
