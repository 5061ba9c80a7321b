"""Owns the systems of scripts/bench_generate: many prompts answered by ours and by transformers.
Refuses to print. Each answers until a text ends itself, as a corpus is really generated.

Legend: N token positions, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distill.backends.local import LocalBackend
from distill.models import LoadedModel
from distill.runtime import forward as forwards
from distill.sampling import SamplingConfig
from scripts.benchmarks.measuring import PeakMemory, Run, synchronize
from scripts.benchmarks.ours import patched
from scripts.benchmarks.rivals import left_padded, sampling_settings


@dataclass
class Work:
    """What a system did over all its calls.

    num_processed: token positions the target was run on, padding included.
    num_needed: positions no engine can leave out: every prompt and answer token but the last.
    """

    num_answers: int = 0
    num_tokens: int = 0
    num_processed: int = 0
    num_needed: int = 0
    peak_bytes: int | None = None

    @property
    def padding_waste(self) -> float | None:
        """Share of the processed positions that were padding or belonged to ended texts."""
        return 1.0 - self.num_needed / self.num_processed if self.num_processed else None

    def add(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Count finished answers by their number of tokens, the stop token included."""
        self.num_answers += len(lengths)
        self.num_tokens += sum(lengths)
        self.num_needed += sum(len(p) + n - 1 for p, n in zip(prompts, lengths, strict=True))

    @contextmanager
    def watched(self, device: torch.device) -> Iterator[None]:
        """Keep the most that a call made memory grow by."""
        with PeakMemory(device) as peak:
            yield
        if peak.grown_bytes is not None:
            self.peak_bytes = max(self.peak_bytes or 0, peak.grown_bytes)


class OursGenerate:
    """The local backend on all prompts at once; each turn goes on until its share is answered.

    One call over all turns, because that is what keeps the batch full: an ended row's place goes
    to the next prompt, whichever turn it is.
    """

    def __init__(
        self,
        target: LoadedModel,
        prompts: Sequence[Sequence[int]],
        *,
        batch_size: int,
        new_tokens: int,
        num_turns: int,
    ) -> None:
        self.work = Work()
        self._target, self._prompts = target, prompts
        self._turns_left = num_turns
        self._share = -(-len(prompts) // num_turns)
        self._emitted = 0
        self._answers = LocalBackend(target, max_batch_size=batch_size).generate(
            prompts,
            SamplingConfig(temperature=1.0),
            max_new_tokens=new_tokens,
            seeds=list(range(len(prompts))),
            on_tokens=self._count,
        )

    def _count(self, num_tokens: int) -> None:
        self._emitted += num_tokens

    def run(self, _: int) -> Run:
        """Answer the next share of the prompts; the last turn answers all that are left."""
        before, self._turns_left = self._emitted, self._turns_left - 1
        lengths: list[int] = []
        asked: list[Sequence[int]] = []
        with self.work.watched(self._target.device), self._counting_positions():
            for answer in self._answers:
                asked.append(self._prompts[answer.prompt_index])
                lengths.append(len(answer.token_ids))
                if len(lengths) == self._share and self._turns_left:
                    break
            synchronize(self._target.device)
        self.work.add(asked, lengths)
        return Run(self._emitted - before)

    @contextmanager
    def _counting_positions(self) -> Iterator[None]:
        # Not by a hook on the model: a model that is watched runs its slower, own code.
        original = forwards.forward

        def counting(model: Any, cache: Any, token_ids: Any, **kwargs: Any) -> Any:
            self.work.num_processed += len(token_ids) * max(map(len, token_ids))
            return original(model, cache, token_ids, **kwargs)

        with patched({original: counting}):
            yield


class _TurnByTurn:
    """A system that answers the prompts of each turn by themselves."""

    def __init__(
        self,
        target: LoadedModel,
        prompts: Sequence[Sequence[int]],
        *,
        batch_size: int,
        new_tokens: int,
        num_turns: int,
    ) -> None:
        self.work = Work()
        self._target, self._batch_size, self._new_tokens = target, batch_size, new_tokens
        self._turns = turns_of(prompts, num_turns)


class TransformersGenerate(_TurnByTurn):
    """``generate`` on left-padded batches of prompts sorted by length."""

    @torch.inference_mode()
    def run(self, turn: int) -> Run:
        """Answer the turn's prompts, batch by batch."""
        target, before = self._target, self.work.num_tokens
        prompts = self._turns[turn]
        stops = sorted(target.stop_token_ids)
        torch.manual_seed(turn)
        with self.work.watched(target.device), _positions_of(target.model, self.work):
            for start in range(0, len(prompts), self._batch_size):
                batch = prompts[start : start + self._batch_size]
                ids_BP, mask_BP = left_padded(batch, target.device)
                output = target.model.generate(
                    ids_BP,
                    attention_mask=mask_BP,
                    max_new_tokens=self._new_tokens,
                    eos_token_id=stops or None,
                    pad_token_id=stops[0] if stops else 0,
                    **sampling_settings(1.0),
                )
                answers = output[:, ids_BP.shape[1] :].tolist()
                self.work.add(batch, [answer_length(answer, stops) for answer in answers])
            synchronize(target.device)
        return Run(self.work.num_tokens - before)


class TransformersGenerateBatch(_TurnByTurn):
    """``generate_batch``, transformers' continuous batching, with a token budget of its own."""

    def run(self, turn: int) -> Run:
        """Answer the turn's prompts in one call."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        target, before = self._target, self.work.num_tokens
        prompts = self._turns[turn]
        stops = sorted(target.stop_token_ids)
        page = 256
        longest = max(map(len, prompts)) + self._new_tokens
        settings = GenerationConfig(
            max_new_tokens=self._new_tokens,
            eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else 0,
            **sampling_settings(1.0),
        )
        batching = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=(self._batch_size + 1) * -(-longest // page) + 1,
            max_batch_tokens=max(512, longest),
            max_requests_per_batch=self._batch_size,
            allow_block_sharing=False,  # its own advice for short prompts and longer answers
            seed=turn,
        )
        with (
            self.work.watched(target.device),
            _positions_of(target.model, self.work),
            _own_attention(target.model),
        ):
            outputs = target.model.generate_batch(
                [list(prompt) for prompt in prompts],
                generation_config=settings,
                continuous_batching_config=batching,
            )
            synchronize(target.device)
        lengths = [len(output.generated_tokens) for output in outputs.values()]
        assert len(lengths) == len(prompts), "generate_batch lost a request"
        self.work.add(prompts, lengths)
        return Run(self.work.num_tokens - before)


def turns_of(prompts: Sequence[Sequence[int]], num_turns: int) -> list[Sequence[Sequence[int]]]:
    """Equal shares in the given order; the last one may be smaller."""
    share = -(-len(prompts) // num_turns)
    return [prompts[start : start + share] for start in range(0, len(prompts), share)]


def answer_length(token_ids: Sequence[int], stops: Sequence[int]) -> int:
    """Tokens up to the first stop token, it included."""
    ends = [index + 1 for index, token in enumerate(token_ids) if token in stops]
    return ends[0] if ends else len(token_ids)


@contextmanager
def _positions_of(model: Any, work: Work) -> Iterator[None]:
    def count(_: nn.Module, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", arguments[0] if arguments else None)
        work.num_processed += ids.numel() if ids is not None else 0

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _own_attention(model: Any) -> Iterator[None]:
    """Give the model its attention back: continuous batching puts a paged one in its place."""
    before = model.config._attn_implementation
    try:
        yield
    finally:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)


# ------------------------------------------------------------------------------ scoring


class Scoring:
    """The local backend's scores of given texts, and the same matrix products alone.

    The second is the bound: every linear layer of the model once per call, on as many positions,
    in the same order, with nothing between them.
    """

    def __init__(
        self, target: LoadedModel, sequences: Sequence[Sequence[int]], *, top_k: int
    ) -> None:
        self._target, self._sequences, self._top_k = target, sequences, top_k
        self._backend = LocalBackend(target, max_batch_size=1)
        self._products = self._recorded()

    @property
    def num_tokens(self) -> int:
        """Positions that are scored: every token but the first of a text."""
        return sum(len(sequence) - 1 for sequence in self._sequences)

    def score(self, _: int) -> Run:
        """Score all texts."""
        for _scores in self._backend.score(self._sequences, top_k=self._top_k):
            pass
        synchronize(self._target.device)
        return Run(self.num_tokens)

    @torch.inference_mode()
    def products(self, _: int) -> Run:
        """Only the matrix products of scoring all texts."""
        inputs: dict[tuple[int, int], Tensor] = {}
        for module, num_positions in self._products:
            key = (num_positions, module.in_features)
            if key not in inputs:
                inputs[key] = torch.randn(
                    key, dtype=module.weight.dtype, device=module.weight.device
                )
            F.linear(inputs[key], module.weight, module.bias)
        synchronize(self._target.device)
        return Run(self.num_tokens)

    def _recorded(self) -> list[tuple[nn.Linear, int]]:
        """(layer, positions) of every product, in order, seen once with hooks."""
        seen: list[tuple[nn.Linear, int]] = []

        def record(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            assert isinstance(module, nn.Linear)
            seen.append((module, arguments[0].numel() // arguments[0].shape[-1]))

        model: Any = self._target.model
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        handles = [module.register_forward_pre_hook(record) for module in linears]
        try:
            self.score(0)
        finally:
            for handle in handles:
                handle.remove()
        return seen


def best_batch_size(
    make: Callable[[int], Callable[[int], Run]],
    candidates: Sequence[int],
    clock: Callable[[], float],
) -> int:
    """The batch size with the best rate on the first turn of a fresh system each."""
    rates: dict[int, float] = {}
    for candidate in candidates:
        run = make(candidate)
        started = clock()
        rates[candidate] = run(0).num_tokens / (clock() - started)
    return max(rates, key=lambda candidate: rates[candidate])
