"""Owns the other engines a benchmark runs beside this library's: transformers and llama.cpp.
Refuses to judge them: it gives each the settings that suit it, and counts what it does.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distill.runtime.stats import DecodeStats
from scripts.benchmarks.measuring import Run, synchronize

DEFAULT_ASSISTANT = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}
"""What transformers 5.24 does when nobody says otherwise."""


def tuned_assistant(num_draft_tokens: int) -> dict[str, Any]:
    """A fixed number of drafts, none dropped for lack of confidence."""
    return {
        "num_assistant_tokens": num_draft_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def sampling_settings(temperature: float) -> dict[str, Any]:
    """``generate`` arguments for the plain law at a temperature: no top-k, no top-p."""
    if temperature == 0.0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, [B, P], prompts at the right edge."""
    longest = max(map(len, prompts))
    ids = [[*([0] * (longest - len(p))), *p] for p in prompts]
    mask = [[*([0] * (longest - len(p))), *([1] * len(p))] for p in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@torch.inference_mode()
def generate_plain(
    model: Any, prompts: Sequence[Sequence[int]], *, temperature: float, new_tokens: int, seed: int
) -> Run:
    """``generate`` on a left-padded batch; no token ends a text, so every row has equal length."""
    ids_BP, mask_BP = left_padded(prompts, model.device)
    torch.manual_seed(seed)
    output = model.generate(
        ids_BP,
        attention_mask=mask_BP,
        max_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        **sampling_settings(temperature),
    )
    synchronize(model.device)
    return Run((output.shape[1] - ids_BP.shape[1]) * len(prompts))


@torch.inference_mode()
def generate_assisted(
    model: Any,
    draft: Any,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    new_tokens: int,
    seed: int,
    assistant: dict[str, Any],
    head: nn.Module | None = None,
) -> Run:
    """``generate(assistant_model=draft)``, prompt by prompt: it takes no batch.

    Args:
        assistant: the draft's generation settings; set before each prompt, because one of the
            schedules changes them on the model.
        head: stands in for the draft's own output head.
    """
    num_tokens = 0
    with _head_of(draft, head), _counting_rounds() as rounds:
        for index, prompt in enumerate(prompts):
            for name, value in assistant.items():
                setattr(draft.generation_config, name, value)
            torch.manual_seed(seed + index)
            ids_1P = torch.tensor([list(prompt)], device=model.device)
            output = model.generate(
                ids_1P,
                attention_mask=torch.ones_like(ids_1P),
                assistant_model=draft,
                max_new_tokens=new_tokens,
                eos_token_id=None,
                pad_token_id=0,
                **sampling_settings(temperature),
            )
            num_tokens += output.shape[1] - ids_1P.shape[1]
        synchronize(model.device)
    return Run(num_tokens, DecodeStats.from_rounds(rounds))


@contextmanager
def _counting_rounds() -> Iterator[list[tuple[int, int, int]]]:
    """(proposed, accepted, emitted) of every round of assisted generation in the block.

    transformers returns no counts; this is the method it calls after each round.
    """
    from transformers.generation.candidate_generator import AssistedCandidateGenerator

    rounds: list[tuple[int, int, int]] = []
    original = AssistedCandidateGenerator.update_candidate_strategy

    def counting(self: Any, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        accepted = int(num_matches)
        rounds.append((max(scores.shape[1] - 1, accepted), accepted, accepted + 1))
        original(self, input_ids, scores, num_matches)

    AssistedCandidateGenerator.update_candidate_strategy = counting
    try:
        yield rounds
    finally:
        AssistedCandidateGenerator.update_candidate_strategy = original


class SubsetHead(nn.Module):
    """An output head that computes some rows and gives every other token -inf.

    What the draft vocabulary is to this library's drafter, for an engine that wants all columns.
    """

    def __init__(self, head: Any, token_ids: Sequence[int]) -> None:
        super().__init__()
        ids_U = torch.tensor(sorted(set(token_ids)), device=head.weight.device)
        self.num_rows: int = head.weight.shape[0]
        self.register_buffer("ids_U", ids_U)
        self.weight = nn.Parameter(head.weight.detach()[ids_U], requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D]."""
        some = nn.functional.linear(hidden, self.weight)
        logits = some.new_full((*some.shape[:-1], self.num_rows), -torch.inf)
        ids_U = self.ids_U
        assert isinstance(ids_U, Tensor)
        logits.index_copy_(-1, ids_U, some)
        return logits


@contextmanager
def _head_of(model: Any, head: nn.Module | None) -> Iterator[None]:
    if head is None:
        yield
        return
    own = model.get_output_embeddings()
    model.set_output_embeddings(head)
    try:
        yield
    finally:
        model.set_output_embeddings(own)


def best_assistant_tokens(
    run: Callable[[int], Run], candidates: Sequence[int], *, repeats: int = 1
) -> int:
    """The number of drafts with the best rate in a short sweep; ``run`` takes that number."""
    run(candidates[0])
    seconds = dict.fromkeys(candidates, 0.0)
    tokens = dict.fromkeys(candidates, 0)
    for _ in range(repeats):
        for candidate in candidates:
            started = time.perf_counter()
            tokens[candidate] += run(candidate).num_tokens
            seconds[candidate] += time.perf_counter() - started
    return max(candidates, key=lambda candidate: tokens[candidate] / seconds[candidate])


# ------------------------------------------------------------------------------ llama.cpp


def has_llama_cpp() -> bool:
    """Whether the Python binding of llama.cpp is installed here."""
    return importlib.util.find_spec("llama_cpp") is not None


class LlamaCpp:
    """Plain decoding by llama.cpp of the GGUF file itself: its own kernels, its own precision."""

    def __init__(self, gguf: Path, *, max_length: int, num_threads: int) -> None:
        self._model: Any = importlib.import_module("llama_cpp").Llama(
            model_path=str(gguf),
            n_ctx=max_length,
            n_threads=num_threads,
            n_threads_batch=num_threads,
            verbose=False,
        )

    def run(self, prompt: Sequence[int], *, temperature: float, new_tokens: int) -> Run:
        """Decode from token ids; no token ends the text."""
        tokens = self._model.generate(
            list(prompt), temp=temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0
        )
        return Run(sum(1 for _, _ in zip(range(new_tokens), tokens, strict=False)))
