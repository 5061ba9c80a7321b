"""Owns short hands for tests of the runtime: decode prompts, a draft that disagrees, a script.
Refuses to judge results. The oracle ``generate`` is transformers' own, one prompt at a time.
"""

from __future__ import annotations

from typing import Any

import torch

from distill.drafters.base import Proposal
from distill.runtime.decode import DecodeEngine, DecodeRequest, DecodeResult
from distill.runtime.speculative import decode_batch
from distill.sampling import SamplingConfig

GREEDY = SamplingConfig(temperature=0.0)


@torch.no_grad()
def generate(model: Any, prompt: list[int], length: int, **settings: Any) -> list[int]:
    """Greedy text of transformers, without an end of sequence unless one is given."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),  # id 0 is no padding here
        max_new_tokens=length,
        do_sample=False,
        **({"eos_token_id": None, "pad_token_id": 0} | settings),
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def disturbed(model: Any, scale: float, seed: int = 0) -> Any:
    """A draft that often agrees with ``model`` and often does not."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = scale * torch.randn(parameter.shape, generator=generator)
            parameter += noise.to(parameter.dtype)
    return model


def engine_for(target: Any, drafter: Any, *, k: int = 4, batch: int = 8, **more: Any) -> Any:
    """An engine; ``k`` only counts with a drafter."""
    return DecodeEngine(
        target,
        drafter,
        num_draft_tokens=0 if drafter is None else k,
        max_batch_size=batch,
        **({"max_length": 512} | more),
    )


def decode(
    target: Any,
    drafter: Any,
    prompts: list[list[int]],
    *,
    k: int = 4,
    batch: int = 8,
    length: int = 40,
    sampling: SamplingConfig = GREEDY,
    **request: Any,
) -> list[DecodeResult]:
    """Answers to all prompts; prompt n has seed n."""
    settings: dict[str, Any] = {"stop_token_ids": frozenset()} | request
    requests = [
        DecodeRequest(prompt, length, sampling, seed=n, **settings)
        for n, prompt in enumerate(prompts)
    ]
    return decode_batch(engine_for(target, drafter, k=k, batch=batch), requests)


def tokens(results: list[DecodeResult]) -> list[list[int]]:
    """Their token ids."""
    return [result.token_ids for result in results]


class ScriptedDrafter:
    """Proposes, after a prompt, what the script of that prompt has next; deterministic.

    ``scripts``: prompt -> what is proposed instead of the answer, position by position.
    """

    max_length = None

    def __init__(self, scripts: dict[tuple[int, ...], list[int]]) -> None:
        self.scripts = scripts
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.is_failing = False

    def start(self, **_: Any) -> None: ...

    def join(self, handle: int, prompt_token_ids: Any, *_: Any, **__: Any) -> None:
        self.prompts[handle] = tuple(prompt_token_ids)

    def leave(self, handle: int) -> None:
        del self.prompts[handle]

    def commit(self, handle: int, num_valid_tokens: int) -> None: ...

    def propose(self, handles: Any, token_ids: Any, num_draft_tokens_B: Any) -> Proposal:
        if self.is_failing:
            raise RuntimeError("the draft is broken")
        rows = []
        for handle, text, number in zip(handles, token_ids, num_draft_tokens_B, strict=True):
            prompt = self.prompts[handle]
            first = len(text) - len(prompt)
            rows.append(self.scripts[prompt][first : first + number])
        width = max(map(len, rows))
        padded = [row + [0] * (width - len(row)) for row in rows]
        tokens_BK = torch.tensor(padded, dtype=torch.long).view(len(rows), width)
        return Proposal(tokens_BK, [len(row) for row in rows], None)
