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

from distill.backends.settings import BackendChoice
from distill.config import Config
from distill.models import ModelConfig
from distill.registry import Registry
from distill.sampling import SamplingConfig

FinishReason = Literal["stop", "length"]
Gift = Literal["hidden_states", "scores", "top_k_scores"]
"""What a backend may give beside token ids: kept hidden states, whole laws, their K best ids."""


@dataclass(frozen=True)
class ModelInfo:
    """What a backend's model is.

    ``vocab_size`` counts the tokenizer's ids: padded rows of the output head are never emitted and
    have no probability. ``max_length`` counts prompt and completion together. ``gives`` lists what
    may be asked beside ids, so that a store which needs more is refused before anything runs.
    """

    vocab_size: int
    hidden_size: int
    max_length: int
    stop_token_ids: frozenset[int]
    revision: str
    dtype: str
    device: str
    gives: frozenset[Gift] = frozenset({"hidden_states", "scores", "top_k_scores"})


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
class Unanswered:
    """A row without an answer, and why; the others go on.

    "rejected": the runtime refuses this prompt, or its answer cannot be trusted; asking again
    gives the same. "failed": no answer came; asking again may help.
    """

    prompt_index: int
    sample_index: int
    status: Literal["rejected", "failed"]
    reason: str


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


@dataclass(frozen=True)
class Unscored:
    """A sequence without scores, and why; the others go on. ``status`` as in Unanswered."""

    sequence_index: int
    status: Literal["rejected", "failed"]
    reason: str


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
    ) -> Iterator[Completion | Unanswered]:
        """Answer every prompt ``num_samples`` times; each sample comes once, in any order.

        ``seeds`` has one entry a prompt; sample s of a prompt draws with
        ``sample_seed(seed, s)``. The same call gives the same completions. ``on_tokens`` hears
        how many new tokens came, as they come: a batch may finish its rows all at once.

        Raises:
            ContextLengthError: a prompt leaves no room for one token.
            SamplingError: a setting that this runtime cannot honour.
            BackendUnavailableError: the model does not answer, or cannot keep hidden states.
        """
        ...

    def score(
        self, sequences: Sequence[Sequence[int]], *, top_k: int | None = None
    ) -> Iterator[Scores | Unscored]:
        """The target's next-token law along each sequence, in order.

        Raises:
            ContextLengthError: a sequence is longer than the context.
            BackendUnavailableError: the runtime does not give what is asked (``info.gives``).
        """
        ...


class LawBackend(Backend, Protocol):
    """A backend that gives whole laws, and says so: "scores" is among ``info.gives``."""

    def laws(self, sequence: Sequence[int], *, start: int) -> Iterator[torch.Tensor]:
        """The law after each position from ``start`` to the last but one, a few at a time.

        log_probs_NV: what :meth:`score` gives for them, float32, on the CPU; never all at once,
        which for a long answer and a large vocabulary would be gigabytes.

        Raises:
            ContextLengthError: the sequence is longer than the context.
        """
        ...


class BackendFactory(Protocol):
    """How a backend is made: from the model, the most rows it runs at once, and its settings."""

    def __call__(
        self, config: ModelConfig, *, max_batch_size: int, settings: Config | None = None
    ) -> Backend:
        """Load or reach the model.

        Raises:
            ConfigError: ``settings`` are missing, or are another backend's.
        """
        ...


BACKENDS: Registry[BackendFactory] = Registry("backend", "distill.backends")


def open_backend(choice: BackendChoice, target: ModelConfig, *, max_batch_size: int) -> Backend:
    """The backend a config names: ``local``, or ``{kind: http, ...}`` with settings of its own.

    Raises:
        RegistryError: no backend of this name.
        ConfigError: the backend needs settings and has none.
        BackendUnavailableError: nobody answers where the target should run.
    """
    name, settings = (choice, None) if isinstance(choice, str) else (choice.kind, choice)
    return BACKENDS.get(name)(target, max_batch_size=max_batch_size, settings=settings)


def sample_seed(seed: int, sample_index: int) -> int:
    """The seed of one sample of a prompt: a hash, so that neighbours share nothing."""
    return stable_seed(seed, sample_index)


def stable_seed(*parts: int | str) -> int:
    """A 63-bit seed from what identifies a row; the same on every machine."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
