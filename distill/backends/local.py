"""The target in this process: completions from the decode engine, scores from plain forwards.

Refuses to know prompts' texts and where completions are stored.

Legend: T positions, V vocabulary, K kept candidates, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from distill.backends.base import BACKENDS, Completion, ModelInfo, Scores, sample_seed
from distill.config import Config
from distill.errors import ContextLengthError
from distill.models import LoadedModel, ModelConfig, load_target, logits_from_hidden
from distill.runtime.decode import DecodeEngine, DecodeRequest
from distill.sampling import SamplingConfig

# Positions whose logits exist at once while scoring: 128 MB for a vocabulary of 128k.
_SCORE_CHUNK_TOKENS = 256


class LocalBackend:
    """A loaded target behind the backend contract."""

    def __init__(self, target: LoadedModel, *, max_batch_size: int) -> None:
        self._target = target
        self._max_batch_size = max_batch_size

    @property
    def info(self) -> ModelInfo:
        """What runs here."""
        target = self._target
        return ModelInfo(
            vocab_size=min(target.shape.vocab_size, len(target.tokenizer)),
            hidden_size=target.shape.hidden_size,
            max_length=target.shape.max_position_embeddings,
            stop_token_ids=target.stop_token_ids,
            revision=target.resolved.revision,
            dtype=str(target.dtype).removeprefix("torch."),
            device=str(target.device),
        )

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
        """Answer every prompt; see :class:`distill.backends.base.Backend`.

        One engine a call: the batches a row runs in depend on this call alone, so the same call
        gives the same bits.
        """
        assert len(seeds) == len(prompts)
        if not prompts:
            return
        info = self.info
        engine = DecodeEngine(
            self._target.model,
            None,
            num_draft_tokens=0,
            max_batch_size=self._max_batch_size,
            max_length=min(info.max_length, max(map(len, prompts)) + max_new_tokens),
            tokenizer=self._target.tokenizer,
            keep_hidden=keep_hidden,
        )
        rows: dict[int, tuple[int, int]] = {}
        for prompt_index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            for sample_index in range(num_samples):
                request = DecodeRequest(
                    prompt_token_ids=prompt,
                    max_new_tokens=max_new_tokens,
                    sampling=sampling,
                    seed=sample_seed(seed, sample_index),
                    stop_token_ids=info.stop_token_ids,
                )
                rows[engine.add(request)] = (prompt_index, sample_index)
        while engine.has_work:
            updates = engine.step()
            if on_tokens is not None:
                on_tokens(sum(len(update.new_token_ids) for update in updates))
            for update in updates:
                if update.finish_reason is None:
                    continue
                result = engine.result(update.handle)
                assert result.finish_reason is not None
                prompt_index, sample_index = rows.pop(update.handle)
                yield Completion(
                    prompt_index=prompt_index,
                    sample_index=sample_index,
                    token_ids=tuple(result.token_ids),
                    finish_reason=result.finish_reason,
                    hidden_TD=_to_cpu(result.hidden_TD, torch.bfloat16),
                    logsumexp_T=_to_cpu(result.logsumexp_T, torch.float32),
                )

    def score(
        self, sequences: Sequence[Sequence[int]], *, top_k: int | None = None
    ) -> Iterator[Scores]:
        """The target's next-token laws; see :class:`distill.backends.base.Backend`."""
        vocab_size = self.info.vocab_size
        for sequence_index, sequence in enumerate(sequences):
            parts = [
                _top(log_probs_NV, top_k)
                for log_probs_NV in self._laws(sequence, 0, f"sequence {sequence_index}")
            ]
            token_ids_TK, log_probs_TK, tail_mass_T = (
                torch.cat(columns) for columns in zip(*parts, strict=True)
            )
            if top_k is None:  # the same ids at every position: a view, not T rows of them
                token_ids_TK = torch.arange(vocab_size).expand(log_probs_TK.shape)
            yield Scores(sequence_index, token_ids_TK, log_probs_TK, tail_mass_T)

    def laws(self, sequence: Sequence[int], *, start: int) -> Iterator[torch.Tensor]:
        """The laws along a sequence; see :class:`distill.backends.base.LawBackend`."""
        for log_probs_NV in self._laws(sequence, start, "the sequence"):
            yield log_probs_NV.cpu()

    def _laws(self, sequence: Sequence[int], start: int, what: str) -> Iterator[torch.Tensor]:
        """log_probs_NV of a chunk of positions at a time, on the target's device."""
        model, info = self._target.model, self.info
        if len(sequence) > info.max_length:
            raise ContextLengthError(
                f"{what} has {len(sequence)} tokens, the target's context is {info.max_length}; "
                "shorten or drop it"
            )
        with torch.inference_mode():
            ids_1T = torch.tensor([list(sequence)[:-1]], device=model.device)
            hidden_TD = model.get_decoder()(input_ids=ids_1T, use_cache=False)[0][0]
        for chunk_ND in hidden_TD[start:].split(_SCORE_CHUNK_TOKENS):
            with torch.inference_mode():  # not around the yield: it would rule the caller too
                logits_NV = logits_from_hidden(model, chunk_ND)[:, : info.vocab_size]
                log_probs_NV = logits_NV.float().log_softmax(-1)
            yield log_probs_NV


def _to_cpu(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if tensor is None else tensor.to("cpu", dtype)


def _top(
    log_probs_NV: torch.Tensor, top_k: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token_ids_NK, log_probs_NK, tail_mass_N) of a chunk of positions; no ids for whole laws."""
    if top_k is None:
        no_ids_N0 = torch.zeros(len(log_probs_NV), 0, dtype=torch.int64)
        return no_ids_N0, log_probs_NV.cpu(), torch.zeros(len(log_probs_NV))
    log_probs_NK, ids_NK = log_probs_NV.topk(min(top_k, log_probs_NV.shape[-1]), dim=-1)
    # 1 - sum would lose a small tail to rounding; the others are summed instead.
    others_NV = log_probs_NV.scatter(-1, ids_NK, -torch.inf)
    return ids_NK.cpu(), log_probs_NK.cpu(), others_NV.logsumexp(-1).exp().cpu()


@BACKENDS.register("local")
def make_local(
    config: ModelConfig, *, max_batch_size: int, settings: Config | None = None
) -> LocalBackend:
    """Load the target here."""
    assert settings is None, "the local backend has no settings of its own"
    return LocalBackend(load_target(config), max_batch_size=max_batch_size)
