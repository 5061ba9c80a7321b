"""Owns the kinds of target store, their settings, and what each costs on the disk.

Refuses to know tensors: how a kind is packed is in the file of its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Tag

from distill.config import Config, setting
from distill.losses.base import Knowledge

StoreKind = Literal["none", "final_hidden", "top_k", "sampled"]


class TopKSettings(Config):
    """Keep the K most likely tokens at temperature 1, and the mass of all others."""

    kind: Literal["top_k"] = "top_k"
    k: int = setting(64, ge=1, le=4096, description="tokens kept at each position")


class SampledSettings(Config):
    """Keep tokens drawn from the target at temperature 1 (arXiv 2503.16870)."""

    kind: Literal["sampled"] = "sampled"
    # a count of draws has six bits; 50 draws are about a dozen distinct tokens, the paper's choice
    num_draws: int = setting(50, ge=1, le=64, description="draws at each position")


_KINDS: tuple[StoreKind, ...] = get_args(StoreKind)
_WITH_SETTINGS = {"top_k": TopKSettings, "sampled": SampledSettings}


def _one_spelling(value: Any) -> Any:
    """A bare name and a section of defaults are the same choice, so they get one fingerprint."""
    if isinstance(value, TopKSettings | SampledSettings):
        return value
    settings = dict(value) if isinstance(value, Mapping) else {"kind": value}
    kind = settings.get("kind")
    if kind not in _KINDS:
        raise ValueError(f"no target store {kind!r}; there are {', '.join(_KINDS)}")
    if kind in _WITH_SETTINGS:
        return settings
    if others := sorted(set(settings) - {"kind"}):
        raise ValueError(f"target_store {kind} has no settings; remove {', '.join(others)}")
    return kind


def _which(value: Any) -> str:
    if isinstance(value, str):
        return "name"
    kind: str = value["kind"] if isinstance(value, Mapping) else value.kind
    return kind


TargetStoreChoice = Annotated[
    Annotated[Literal["none", "final_hidden"], Tag("name")]
    | Annotated[TopKSettings, Tag("top_k")]
    | Annotated[SampledSettings, Tag("sampled")],
    Discriminator(_which),
    BeforeValidator(_one_spelling),
]
"""A kind by name, or ``{kind: top_k, k: 64}``, ``{kind: sampled, num_draws: 50}``."""

_KNOWLEDGE: dict[StoreKind, Knowledge] = {
    "none": "full",
    "final_hidden": "full",
    "top_k": "top_k",
    "sampled": "sampled",
}


def settings_of(
    choice: StoreKind | TopKSettings | SampledSettings,
) -> Literal["none", "final_hidden"] | TopKSettings | SampledSettings:
    """Return the choice with the settings a bare name stands for."""
    if choice == "top_k":
        return TopKSettings()
    return SampledSettings() if choice == "sampled" else choice


def kind_of(choice: StoreKind | TopKSettings | SampledSettings) -> StoreKind:
    """Return the kind of a choice."""
    return choice if isinstance(choice, str) else choice.kind


def knowledge_of(choice: StoreKind | TopKSettings | SampledSettings) -> Knowledge:
    """Return what a loss gets to know of the target from this store.

    ``none`` gives all there is: the target is run again while distilling.
    """
    return _KNOWLEDGE[kind_of(choice)]


def bytes_per_token(
    choice: StoreKind | TopKSettings | SampledSettings, *, hidden_size: int, vocab_size: int
) -> int:
    """Return the most bytes the store takes for one token of an answer.

    ``final_hidden``: 2 D + 4. ``top_k``: 2 K for the ids' low 16 bits, K / 4 (or K / 2) for the
    rest of them where the vocabulary needs it, 2 K for the log-probabilities, 8 for the tail: 280
    at K = 64 for a vocabulary of up to 262,144. ``sampled``: 3 (or 4) a distinct token and 3; the
    number of distinct tokens follows from the text, and is about a dozen of 50 draws.
    """
    settings = settings_of(choice)
    if settings == "none":
        return 0
    if settings == "final_hidden":
        return 2 * hidden_size + 4
    if isinstance(settings, TopKSettings):
        k = min(settings.k, vocab_size)
        return 4 * k + high_bytes(k, vocab_size) + 8
    assert isinstance(settings, SampledSettings)
    return entry_bytes(vocab_size) * min(settings.num_draws, vocab_size) + 3


def high_bits(vocab_size: int) -> int:
    """Return how many bits of an id are kept above its low 16: 0, 2, 4 or 8."""
    needed = max(0, (vocab_size - 1).bit_length() - 16)
    return next(bits for bits in (0, 2, 4, 8) if bits >= needed)


def high_bytes(k: int, vocab_size: int) -> int:
    """Return the bytes of the upper bits of K ids."""
    return -(-k * high_bits(vocab_size) // 8)


def entry_bytes(vocab_size: int) -> int:
    """Return the bytes of one drawn token: its id above six bits of its count."""
    return 3 if vocab_size <= 2**18 else 4
