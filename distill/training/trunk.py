"""Owns the draft as something to train: its forward pass, its trained weights, its optimiser.

Refuses to know losses, batches and steps.

B rows, T positions, N positions that carry loss, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from distill.errors import ConfigError
from distill.models.quantization import require_full_precision
from distill.training.config import TrainingConfig

# Padded row length up to which attention is computed without the fused kernel on a CPU.
_SHORT_ROW_TOKENS = 256


class DraftTrunk(nn.Module):
    """A draft without its head: token ids to final states at the positions asked for."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids_BT: Tensor, flat_positions_N: Tensor) -> Tensor:
        """Return hidden_ND after the final norm. Padding is on the right, so causality hides it."""
        with _fastest_attention(self.model, input_ids_BT):
            output = self.model.base_model(input_ids=input_ids_BT, use_cache=False)
        hidden_ND: Tensor = output.last_hidden_state.flatten(0, 1)
        return hidden_ND.index_select(0, flat_positions_N)


@contextmanager
def _fastest_attention(model: Any, input_ids_BT: Tensor) -> Iterator[None]:
    """Use plain matrix products for short rows on a CPU, where the fused kernel is slower.

    Forward and backward of 2048 tokens in rows of 145: 28 ms instead of 76; in rows of 512 the
    fused kernel is as fast, and it needs no [T, T] scores.
    """
    before = model.config._attn_implementation
    if model.is_activation_checkpointing:
        yield  # the backward pass runs the layers again, outside of this block
        return
    is_short = input_ids_BT.device.type == "cpu" and input_ids_BT.shape[1] <= _SHORT_ROW_TOKENS
    if before == "sdpa" and is_short:
        model.config._attn_implementation = "eager"
    try:
        yield
    finally:
        model.config._attn_implementation = before


def set_trainable(model: Any, config: TrainingConfig) -> dict[str, Tensor]:
    """Choose what is trained, hold it in float32, and return it by name.

    Raises:
        ConfigError: the model is quantised, or its embedding and head are one table and only one
            of them is to be trained.
    """
    require_full_precision(model, "train")
    model.requires_grad_(True)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is head.weight and config.trains_embedding != config.trains_head:
        raise ConfigError(
            f"distill.train_embeddings is {config.train_embeddings}, but embedding and head of "
            f"this draft are one table (tied). Set it to true or false; a draft from scratch can "
            f"have two (initialization.tie_word_embeddings: false)."
        )
    embedding.requires_grad_(config.trains_embedding)
    head.requires_grad_(config.trains_head)
    for parameter in model.parameters():
        # small updates vanish in bfloat16 weights; frozen ones are read in the compute dtype
        if parameter.requires_grad or config.compute_dtype == "float32":
            parameter.data = parameter.data.float()
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}


def recompute_activations(model: Any) -> None:
    """Keep only what enters each layer, and run the layer again in the backward pass.

    Raises:
        ConfigError: the model's class cannot.
    """
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"gradient_checkpointing is true, but {type(model).__name__} does not support it; set "
            f"distill.gradient_checkpointing: false and lower micro_batch_tokens instead"
        )
    model.activation_checkpointing_enable({"use_reentrant": False})


def make_optimizer(parameters: list[Tensor], config: TrainingConfig) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter, arXiv 1711.05101); norms and biases do not decay."""
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True,
    )
