"""The contract of a backend: token ids in, completions or scores out; and the registry of them.

Refuses to know any model, any file format and any stage.

Legend: T positions, V vocabulary, K kept candidates, D width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from distill.models import ModelConfig
from distill.registry import Registry
from distill.sampling import SamplingConfig

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class ModelInfo:
    """What a backend's model is.

    ``vocab_size`` counts the tokenizer's ids: padded rows of the output head are never emitted and
    have no probability. ``max_length`` counts prompt and completion together.
    """

    vocab_size: int
    hidden_size: int
    max_length: int
    stop_token_ids: frozenset[int]
    revision: str
    dtype: str
    device: str


@dataclass(frozen=True)
class Completion:
    """One answer. The stop token is its last id when ``finish_reason`` is "stop".

    ``hidden_TD`` (bfloat16) is the final hidden state that predicted each id, ``logsumexp_T``
    (float32) the log-sum-exp of the logits it gave: log p(v) = logit(v) - logsumexp, at
    temperature 1 over the whole vocabulary. Both only when asked for.
    """

    prompt_index: int
    sample_index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    hidden_TD: torch.Tensor | None = None
    logsumexp_T: torch.Tensor | None = None


@dataclass(frozen=True)
class Scores:
    """The next-token law after each position of a sequence, at temperature 1, float32.

    Position t describes the token at t + 1, so a sequence of T ids has T - 1 rows. With ``top_k``
    the K most likely ids of each row, sorted, and ``tail_mass_T``, the probability of all others;
    without it every id in order, and no tail.
    """

    sequence_index: int
    token_ids_TK: torch.Tensor
    log_probs_TK: torch.Tensor
    tail_mass_T: torch.Tensor


class Backend(Protocol):
    """Runs a target."""

    @property
    def info(self) -> ModelInfo:
        """What runs here."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        max_new_tokens: int,
        seeds: Sequence[int],
        num_samples: int = 1,
        keep_hidden: bool = False,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Iterator[Completion]:
        """Answer every prompt ``num_samples`` times; completions come in any order.

        ``seeds`` has one entry a prompt; sample s of a prompt draws with
        ``sample_seed(seed, s)``. The same call gives the same completions. ``on_tokens`` hears
        how many new tokens came, as they come: a batch may finish its rows all at once.

        Raises:
            ContextLengthError: a prompt leaves no room for one token.
            BackendUnavailableError: the model does not answer, or cannot keep hidden states.
        """
        ...

    def score(
        self, sequences: Sequence[Sequence[int]], *, top_k: int | None = None
    ) -> Iterator[Scores]:
        """The target's next-token law along each sequence, in order.

        Raises:
            ContextLengthError: a sequence is longer than the context.
        """
        ...


class BackendFactory(Protocol):
    """How a backend is made: from the model, and the most rows it runs at once."""

    def __call__(self, config: ModelConfig, *, max_batch_size: int) -> Backend:
        """Load or reach the model."""
        ...


BACKENDS: Registry[BackendFactory] = Registry("backend", "distill.backends")


def sample_seed(seed: int, sample_index: int) -> int:
    """The seed of one sample of a prompt: a hash, so that neighbours share nothing."""
    return stable_seed(seed, sample_index)


def stable_seed(*parts: int | str) -> int:
    """A 63-bit seed from what identifies a row; the same on every machine."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
