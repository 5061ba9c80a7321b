"""Owns the short real decode of a draft in training: what it will be worth, not what it is taught.

Refuses to know losses, steps and files; the decode loop is the one that serves.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distill.drafters.causal_lm import CausalLMDrafter
from distill.models import LoadedModel
from distill.runtime.decode import DecodeEngine, DecodeRequest
from distill.runtime.speculative import decode_batch
from distill.sampling import SamplingConfig
from distill.training.config import DecodeProbeConfig, TrainingConfig
from distill.training.data import Row

TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class DecodedScore:
    """What a draft did in a real decode at one temperature: alpha = accepted / tested, and tau."""

    temperature: float
    acceptance_rate: float
    block_efficiency: float
    num_tokens: int


def is_decode_due(config: TrainingConfig, step: int, *, is_last: bool) -> bool:
    """At the first evaluation, the last, and the first one after each `decode_every` steps."""
    every = config.decode_every
    return every is not None and (is_last or step % every < config.eval_every)


class DecodeProbe:
    """Decodes the same few held-out prompts with whatever the draft has become.

    Args:
        target: the whole target, kept in memory for this.
        rows: held-out answers; their prompts are asked again.
        token_ids_V: the draft's vocabulary subset, or None.
    """

    def __init__(
        self,
        target: LoadedModel,
        rows: Sequence[Row],
        config: DecodeProbeConfig,
        *,
        token_ids_V: Tensor | None,
        seed: int,
    ) -> None:
        self._target, self._config, self._seed = target, config, seed
        self._vocabulary = None if token_ids_V is None else token_ids_V.tolist()
        limit = target.shape.max_position_embeddings - config.max_new_tokens
        prompts = [row.input_ids_T[: int(row.positions_N[0]) + 1].tolist() for row in rows]
        asked = {tuple(prompt) for prompt in prompts if len(prompt) <= limit}  # each of them once
        fitting = sorted(asked, key=lambda p: (len(p), p))
        number = min(config.num_prompts, len(fitting))
        # at equal steps through all lengths
        self._prompts = [fitting[(2 * i + 1) * len(fitting) // (2 * number)] for i in range(number)]

    def score(
        self, model: nn.Module, dtypes: Sequence[torch.dtype] | None = None
    ) -> list[dict[str, Any]]:
        """Return a :class:`DecodedScore` a temperature, as plain values.

        Args:
            model: the draft, in any state of training; it is not changed.
            dtypes: of its parameters where it is used, in order; None: as they are.
        """
        draft = as_served(model, dtypes)
        if not self._prompts:
            return []
        return [asdict(self._decode(draft, temperature)) for temperature in TEMPERATURES]

    def _decode(self, draft: nn.Module, temperature: float) -> DecodedScore:
        config, target = self._config, self._target
        engine = DecodeEngine(
            target.model,
            CausalLMDrafter(draft, vocabulary_token_ids=self._vocabulary),
            num_draft_tokens=config.num_draft_tokens,
            max_batch_size=len(self._prompts),
            max_length=max(map(len, self._prompts)) + config.max_new_tokens,
            tokenizer=target.tokenizer,
        )
        requests = [
            DecodeRequest(
                prompt,
                max_new_tokens=config.max_new_tokens,
                sampling=SamplingConfig(temperature=temperature),
                seed=self._seed + number,
                stop_token_ids=target.stop_token_ids,
            )
            for number, prompt in enumerate(self._prompts)
        ]
        stats = decode_batch(engine, requests).stats
        return DecodedScore(
            temperature=temperature,
            acceptance_rate=stats.acceptance_rate or 0.0,
            block_efficiency=stats.block_efficiency or 1.0,
            num_tokens=stats.num_emitted,
        )


def as_served(model: nn.Module, dtypes: Sequence[torch.dtype] | None = None) -> nn.Module:
    """A copy in evaluation mode whose weights have the dtypes it is served in.

    Weights that have theirs already are shared, not copied.
    """
    parameters = list(model.parameters())
    dtypes = dtypes or [parameter.dtype for parameter in parameters]
    shared: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        for parameter, dtype in zip(parameters, dtypes, strict=True)
    }
    served: nn.Module = copy.deepcopy(model, shared)
    return served.eval()
