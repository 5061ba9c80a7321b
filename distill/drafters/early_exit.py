"""Owns self-speculation: drafting with the target's own first layers, final norm and head.
Refuses to know how a token is drafted (``autoregressive``) and how it is judged.

The idea is early exit (Draft & Verify, arXiv 2309.08168; LayerSkip, arXiv 2404.16710): a draft
that needs no training, no second model and no second cache. Drafted tokens are read into the first
layers of the target's cache, behind the committed tokens, and forgotten before the target verifies
them, which writes these positions anew in every layer. How often such a draft is right is the
target's doing: one that was not trained to exit early seldom is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distill.drafters.autoregressive import AutoregressiveDrafter
from distill.drafters.base import Proposal, registry
from distill.errors import ConfigError
from distill.runtime.cache import RaggedCache


@registry.register("early_exit")
class EarlyExitDrafter(AutoregressiveDrafter):
    """Drafts with the first layers of the target, in the target's own cache.

    Args:
        num_layers: decoder layers that run for a draft; all of them agree with the target always,
            and cost as much.
        vocabulary_token_ids: ids the draft may propose, see ``CausalLMDrafter``. The rows of the
            head that they need are copied: the only weights that are not the target's.
    """

    def __init__(
        self, *, num_layers: int, vocabulary_token_ids: Sequence[int] | Tensor | None = None
    ) -> None:
        super().__init__(vocabulary_token_ids=vocabulary_token_ids)
        self.num_layers = num_layers
        self.max_length = None  # known once there is a target

    def share(self, model: Any, cache: RaggedCache) -> None:
        """Take the target and the cache of the engine, whose rows are this drafter's rows.

        Raises:
            ConfigError: the target has fewer layers, or none are asked for.
        """
        available = model.config.get_text_config().num_hidden_layers
        if not 1 <= self.num_layers <= available:
            raise ConfigError(
                f"early_exit is to draft with num_layers = {self.num_layers}, but the target has "
                f"{available} layers. Choose 1 to {available}."
            )
        self.model, self._cache, self._num_layers = model, cache, self.num_layers
        self.max_length = cache.max_positions

    @torch.inference_mode()
    def propose(
        self,
        handles: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        num_draft_tokens_B: Sequence[int],
    ) -> Proposal:
        """Draft up to the asked number per row, and leave the cache as it was found."""
        proposal = super().propose(handles, token_ids, num_draft_tokens_B)
        # What the first layers read is not in the others: the target has to read it all again.
        for handle, tokens in zip(handles, token_ids, strict=True):
            self.commit(handle, len(tokens) - 1)
        return proposal
