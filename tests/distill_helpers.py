"""Owns a stand-in for generate: a tiny target's answers and states, in the real files.

Refuses to know how generate schedules its work; only its file formats are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distill.artifacts import Artifact, ArtifactStore
from distill.config import Config
from distill.models import LoadedModel, ModelConfig, load_target, model_revision
from distill.stages import completions as storage
from distill.target_store.config import StoreKind
from distill.target_store.files import file_name
from distill.target_store.sampled import sampled_of_law
from distill.target_store.top_k import top_k_of_law


class StandInConfig(Config):
    """Nothing: what differs goes into the key's revisions."""


@dataclass(frozen=True)
class Answer:
    """A prompt, its completion, and what predicted each id of the completion."""

    prompt: list[int]
    completion: list[int]
    hidden_TD: torch.Tensor
    logsumexp_T: torch.Tensor


def make_answers(target: LoadedModel, num_rows: int) -> list[Answer]:
    """Sample at temperature 1: prompts of 3 to 6 random ids, answers of 4 to 10 ids."""
    generator = torch.Generator().manual_seed(7)
    answers: dict[int, Answer] = {}
    for remainder in range(4):
        indices = range(remainder, num_rows, 4)
        num_prompt = 3 + remainder
        ids_BT = torch.randint(2, 250, (len(indices), num_prompt), generator=generator)
        for _ in range(10):
            hidden_BTD, logits_BTV = _run(target, ids_BT)
            probs_BV = torch.softmax(logits_BTV[:, -1], dim=-1)
            next_B1 = torch.multinomial(probs_BV, 1, generator=generator)
            ids_BT = torch.cat([ids_BT, next_B1], dim=1)
        hidden_BTD, logits_BTV = _run(target, ids_BT)
        logsumexp_BT = torch.logsumexp(logits_BTV, dim=-1)
        for row, index in enumerate(indices):
            end = num_prompt + 4 + index % 7
            predicting = slice(num_prompt - 1, end - 1)
            answers[index] = Answer(
                ids_BT[row, :num_prompt].tolist(),
                ids_BT[row, num_prompt:end].tolist(),
                hidden_BTD[row, predicting],
                logsumexp_BT[row, predicting],
            )
    return [answers[index] for index in range(num_rows)]


@torch.no_grad()
def _run(target: LoadedModel, ids_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden_BTD = target.model.base_model(input_ids=ids_BT).last_hidden_state
    logits_BTV = target.model.get_output_embeddings()(hidden_BTD).float()
    return hidden_BTD, logits_BTV[..., : len(target.tokenizer)]


def make_generated(
    store: ArtifactStore,
    target_dir: Path,
    *,
    num_rows: int = 24,
    num_held_out: int = 6,
    changes: Mapping[int, Mapping[str, Any]] | None = None,
    target_store: StoreKind = "final_hidden",
    poison_rows: Sequence[int] = (),
    salt: str = "",
) -> Artifact:
    """Build a generate artifact of `num_rows` answers in two files of states.

    `changes` replaces columns of rows by index; `poison_rows` get states that are not numbers.
    `target_store` is what is kept: none, final_hidden, top_k (K = 16) or sampled (40 draws).
    """

    def build(directory: Path) -> Mapping[str, Any]:
        target = load_target(ModelConfig(model=str(target_dir), device="cpu"))
        answers = make_answers(target, num_rows)
        halves = [range(num_rows // 2), range(num_rows // 2, num_rows)]
        shards = []
        for number, half in enumerate(halves):
            records, kept, offset = [], [], 0
            name = file_name(target_store, number)
            for index in half:
                row = answers[index]
                states = row.hidden_TD * torch.nan if index in poison_rows else row.hidden_TD
                record = {
                    "row_id": f"row-{index}",
                    "prompt_id": f"prompt-{index}",
                    "task": "chat",
                    "split": "held_out" if index % (num_rows // num_held_out) == 1 else "train",
                    "prompt_token_ids": row.prompt,
                    "completion_token_ids": row.completion,
                    "loss_mask": [0] * len(row.prompt) + [1] * len(row.completion),
                    "status": "truncated",
                    "finish_reason": "length",
                    "sampling_index": 0,
                    "temperature": 1.0,
                    "sample_index": 0,
                    "seed": index,
                }
                if name is not None:
                    record |= {"target_file": name, "target_offset": offset}
                    kept.append(_kept(target, target_store, states, row.logsumexp_T, seed=index))
                records.append(record | dict((changes or {}).get(index, {})))
                offset += len(row.completion)
            if name is not None:
                tensors = {key: torch.cat([part[key] for part in kept]) for key in kept[0]}
                storage.write_tensors(directory / name, tensors)
            (directory / "work").mkdir(exist_ok=True)
            shard = directory / "work" / f"shard-{number}.parquet"
            storage.write_rows(shard, records)
            shards.append(shard)
        storage.merge(shards, directory)
        return {}

    revision = model_revision(ModelConfig(model=str(target_dir)))
    salt = f"{salt}{target_store}"
    key = store.key("generate", 1, StandInConfig(), revisions={"salt": salt, "target": revision})
    return store.get_or_build(key, build)


def _kept(
    target: LoadedModel, kind: str, hidden_TD: torch.Tensor, logsumexp_T: torch.Tensor, *, seed: int
) -> dict[str, torch.Tensor]:
    if kind == "final_hidden":
        return {"hidden_ND": hidden_TD.to(torch.bfloat16), "logsumexp_N": logsumexp_T}
    num_tokens = len(target.tokenizer)
    with torch.no_grad():
        logits_TV = target.model.get_output_embeddings()(hidden_TD).float()[:, :num_tokens]
    law_TV = logits_TV.log_softmax(-1)
    if kind == "top_k":
        return top_k_of_law(law_TV, 16)
    return sampled_of_law(law_TV, seed=seed, num_draws=40, vocab_size=num_tokens)
