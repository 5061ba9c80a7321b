"""Owns what a chunk of answers leaves in the target store: states, best tokens or draws.

Refuses to know how answers are made and how a kind is packed (``target_store/``).

Legend: T tokens of an answer, V vocabulary, K kept tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from distill.backends.base import Backend, Completion, LawBackend, Unscored
from distill.errors import BackendUnavailableError
from distill.target_store.config import SampledSettings, StoreKind, TopKSettings, kind_of
from distill.target_store.config import settings_of as store_settings
from distill.target_store.files import file_name, read_tensors
from distill.target_store.sampled import sampled_of_law
from distill.target_store.top_k import acceptance_caps, top_k_of_law, top_k_of_scores

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Answered = Sequence[tuple[Mapping[str, Any], Completion]]


@dataclass(frozen=True)
class Kept:
    """What a chunk's file holds, a row a token of the answers that could be scored, in their order.

    ``unscored``: the others, by their place among the answers.
    """

    tensors: Mapping[str, torch.Tensor]
    unscored: Mapping[int, Unscored]


class TargetKeeping:
    """A target store being filled, with what the backend gives."""

    def __init__(
        self, choice: StoreKind | TopKSettings | SampledSettings, backend: Backend
    ) -> None:
        """Check that the backend gives what the store keeps.

        Raises:
            BackendUnavailableError: it does not.
        """
        self._settings, self._backend = store_settings(choice), backend
        self.kind = kind_of(choice)
        self.keep_hidden = self.kind == "final_hidden"
        self._gives_laws = False
        if self.kind in ("top_k", "sampled"):
            gives = backend.info.gives
            self._gives_laws = "scores" in gives
            _require(self.kind, gives)

    def file_name(self, chunk_index: int) -> str | None:
        """The name of a chunk's file; None where nothing is kept."""
        return file_name(self.kind, chunk_index)

    def keep(self, answered: Answered) -> Kept:
        """What the file of these answers holds.

        A position's bits depend on its own row alone: on its ids, and for draws on its seed. An
        answer that a server will not score is left out, and the others go on.

        Raises:
            BackendUnavailableError: of several answers none can be scored: no row is at fault.
        """
        unscored: dict[int, Unscored] = {}
        packed: list[Mapping[str, torch.Tensor]] = []
        for index, row in enumerate(self._packed(answered)):
            if isinstance(row, Unscored):
                unscored[index] = row
            else:
                packed.append(row)
        if len(unscored) == len(answered) > 1:
            raise BackendUnavailableError(
                f"target_store: {self.kind} needs scores of the answers, and none of "
                f"{len(answered)} could be scored, the first because {unscored[0].reason}"
            )
        for index, cause in unscored.items():
            logger.warning("row %s: %s", answered[index][0].get("row_id", index), cause.reason)
        return Kept(_joined(packed) if packed else {}, unscored)

    def _packed(self, answered: Answered) -> Iterator[Mapping[str, torch.Tensor] | Unscored]:
        if self.kind == "final_hidden":
            yield from (_hidden(answer) for _, answer in answered)
        elif self._gives_laws:
            yield from (self._of_laws(row, answer) for row, answer in answered)
        else:
            yield from self._of_scores(answered)

    def _of_laws(self, row: Mapping[str, Any], answer: Completion) -> Mapping[str, torch.Tensor]:
        """The target's own forward pass along prompt and answer; each chunk is packed at once."""
        backend, settings = cast(LawBackend, self._backend), self._settings
        prompt = row["prompt_token_ids"]
        parts: list[Mapping[str, torch.Tensor]] = []
        num_done = 0
        # the law at position t is that of the id at t + 1
        for log_probs_NV in backend.laws([*prompt, *answer.token_ids], start=len(prompt) - 1):
            if isinstance(settings, TopKSettings):
                parts.append(top_k_of_law(log_probs_NV, settings.k))
            else:
                assert isinstance(settings, SampledSettings)
                parts.append(
                    sampled_of_law(
                        log_probs_NV,
                        seed=row["seed"],
                        num_draws=settings.num_draws,
                        vocab_size=backend.info.vocab_size,
                        first=num_done,
                    )
                )
            num_done += len(log_probs_NV)
        return _joined(parts)

    def _of_scores(self, answered: Answered) -> Iterator[Mapping[str, torch.Tensor] | Unscored]:
        """The best tokens that a server gives along prompt and answer."""
        settings, vocab_size = self._settings, self._backend.info.vocab_size
        assert isinstance(settings, TopKSettings)
        sequences = [[*row["prompt_token_ids"], *answer.token_ids] for row, answer in answered]
        found = self._backend.score(sequences, top_k=settings.k)
        for (row, _), scores in zip(answered, found, strict=True):
            if isinstance(scores, Unscored):
                yield scores
                continue
            answer = slice(len(row["prompt_token_ids"]) - 1, None)
            yield top_k_of_scores(
                scores.token_ids_TK[answer],
                scores.log_probs_TK[answer],
                scores.tail_mass_T[answer],
                vocab_size=vocab_size,
            )


def _joined(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    import torch

    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _require(kind: StoreKind, gives: Collection[str]) -> None:
    if "scores" in gives:
        return
    if kind == "sampled":
        raise BackendUnavailableError(
            "target_store: sampled draws from whole distributions, which this backend does not "
            "give; use backend: local, or target_store: none"
        )
    if "top_k_scores" not in gives:
        raise BackendUnavailableError(
            "target_store: top_k needs the target's best tokens along a given text, which this "
            "backend does not give; use backend: local or a server that gives them (vllm, "
            "sglang), or target_store: none"
        )


def _hidden(answer: Completion) -> dict[str, torch.Tensor]:
    assert answer.hidden_TD is not None
    assert answer.logsumexp_T is not None
    return {"hidden_ND": answer.hidden_TD, "logsumexp_N": answer.logsumexp_T}


def store_metrics(kind: StoreKind, directory: Path, chunk_indices: Iterable[int]) -> dict[str, Any]:
    """What the manifest says of a whole store: its bytes, and for top_k the cap on acceptance."""
    names = (file_name(kind, index) for index in chunk_indices)
    paths = [directory / name for name in names if name is not None]
    paths = [path for path in paths if path.is_file()]
    metrics: dict[str, Any] = {"target_store_bytes": sum(path.stat().st_size for path in paths)}
    if kind == "top_k":
        caps = acceptance_caps(read_tensors(path)["tail_mass_NT"] for path in paths)
        metrics["top_k_acceptance_cap"] = caps
        logger.info(
            "the tokens kept hold %s of the target's probability: no draft that knows only them "
            "is accepted more often; raise target_store.k if that is too low",
            ", ".join(f"{cap:.2%} at temperature {name}" for name, cap in caps.items()),
        )
    return metrics
