"""Owns the units of work of measure: small, named, written as they finish, skipped when they are.

Refuses to know what the results are worth; it turns prompts into records.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.files import atomic_write
from distill.metrics.summary import PromptRecord
from distill.models import LoadedModel
from distill.sampling import SamplingConfig
from distill.stages import measure_runs as runs
from distill.stages.measure_runs import PLAIN, Contestant, HeldOutPrompt

logger = logging.getLogger(__name__)

Answers = Mapping[tuple[float, str], list[int]]
"""(temperature, prompt_id) -> token ids."""


class Units:
    """Results of finished units on disk, so that a killed run goes on where it was."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self.num_resumed = 0

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returned, now or in a run that was killed; always read from JSON."""
        path = self._directory / f"{name}.json"
        if path.is_file():
            self.num_resumed += 1
        else:
            started = time.perf_counter()
            atomic_write(path, json.dumps(compute()))
            logger.info("measured %s in %.1f s", name, time.perf_counter() - started)
        return json.loads(path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Bench:
    """One target, its drafts, and how they are run. A unit is ``batch_size`` prompts."""

    target: LoadedModel
    contestants: Sequence[Contestant]
    units: Units
    num_draft_tokens: int
    max_new_tokens: int
    batch_size: int
    seed: int

    def plain_answers(
        self, prompts: Sequence[HeldOutPrompt], temperatures: Sequence[float]
    ) -> Answers:
        """The target's own answers: those generate stored, else decoded here without a draft."""
        answers: dict[tuple[float, str], list[int]] = {}
        for temperature in temperatures:
            missing = [p for p in prompts if temperature not in p.answers]
            for prompt, row in self._decoded(None, missing, temperature):
                answers[temperature, prompt.prompt_id] = row["token_ids"]
            for prompt in prompts:
                if temperature in prompt.answers:
                    answer = list(prompt.answers[temperature])[: self.max_new_tokens]
                    answers[temperature, prompt.prompt_id] = answer
        return answers

    def records(
        self, prompts: Sequence[HeldOutPrompt], temperatures: Sequence[float], answers: Answers
    ) -> tuple[list[PromptRecord], list[list[int]]]:
        """One record, and the emitted token ids, per temperature, contestant and prompt."""
        records: list[PromptRecord] = []
        emitted: list[list[int]] = []
        for temperature in temperatures:
            forced = self._teacher_forced(prompts, temperature, answers)
            for contestant in self.contestants:
                for prompt, row in self._decoded(contestant, prompts, temperature):
                    num_positions, sums = forced[prompt.prompt_id][contestant.name]
                    records.append(
                        PromptRecord(
                            draft=contestant.name,
                            temperature=temperature,
                            prompt_id=prompt.prompt_id,
                            task=prompt.task,
                            counts=row["counts"],
                            num_positions=num_positions,
                            acceptance_sums=sums,
                        )
                    )
                    emitted.append(row["token_ids"])
        return records, emitted

    def _teacher_forced(
        self, prompts: Sequence[HeldOutPrompt], temperature: float, answers: Answers
    ) -> dict[str, Any]:
        def compute(chunk: Sequence[HeldOutPrompt]) -> Any:
            texts = [(p.token_ids, answers[temperature, p.prompt_id]) for p in chunk]
            return runs.teacher_forced_sums(
                self.target, self.contestants, texts, SamplingConfig(temperature=temperature)
            )

        return {
            p.prompt_id: row for p, row in self._by_chunk("analytic", prompts, temperature, compute)
        }

    def _decoded(
        self, contestant: Contestant | None, prompts: Sequence[HeldOutPrompt], temperature: float
    ) -> list[tuple[HeldOutPrompt, Any]]:
        def compute(chunk: Sequence[HeldOutPrompt]) -> Any:
            results = runs.decode(
                self.target,
                contestant,
                chunk,
                SamplingConfig(temperature=temperature),
                num_draft_tokens=self.num_draft_tokens,
                max_new_tokens=self.max_new_tokens,
                seed=self.seed,
            )
            return [{"token_ids": r.token_ids, "counts": r.stats.to_dict()} for r in results]

        name = PLAIN if contestant is None else contestant.name
        return self._by_chunk(name, prompts, temperature, compute)

    def _by_chunk(
        self,
        name: str,
        prompts: Sequence[HeldOutPrompt],
        temperature: float,
        compute: Callable[[Sequence[HeldOutPrompt]], Any],
    ) -> list[tuple[HeldOutPrompt, Any]]:
        """Each prompt with its row; a unit's results never depend on which units ran before."""
        found: list[tuple[HeldOutPrompt, Any]] = []
        for start in range(0, len(prompts), self.batch_size):
            chunk = prompts[start : start + self.batch_size]
            # repr, not :g: two close temperatures must not share a name, and so their results.
            unit = f"{name}-t{temperature!r}-{start // self.batch_size:05d}"
            found += zip(
                chunk, self.units.get(unit, functools.partial(compute, chunk)), strict=True
            )
        return found


def compare_greedy(
    target: LoadedModel,
    prompts: Sequence[HeldOutPrompt],
    answers: Answers,
    records: Sequence[PromptRecord],
    emitted: Sequence[list[int]],
    *,
    max_new_tokens: int,
) -> dict[str, Any]:
    """Every draft's greedy answers against the target's plain ones; zeros without greedy ones.

    ``max_new_tokens`` is the budget the drafts had.
    """
    token_ids = {p.prompt_id: p.token_ids for p in prompts}
    divergences = []
    num_compared = 0
    for record, speculative in zip(records, emitted, strict=True):
        if record.temperature != 0.0:
            continue
        num_compared += 1
        plain = answers[0.0, record.prompt_id]
        prompt = token_ids[record.prompt_id]
        found = runs.find_divergence(
            target, prompt, plain, speculative, max_new_tokens=max_new_tokens
        )
        if found is not None:
            divergences.append({"prompt_id": record.prompt_id, "draft": record.draft, **found})
    num_ties = sum(d["is_tie"] for d in divergences)
    return {
        "dtype": str(target.dtype).removeprefix("torch."),
        "tie_ulps": runs.TIE_ULPS[target.dtype],
        "num_compared": num_compared,
        "num_identical": num_compared - len(divergences),
        "num_ties": num_ties,
        "num_broken": len(divergences) - num_ties,
        "divergences": divergences,
    }
