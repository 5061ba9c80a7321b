"""Owns the units of work of measure: small, named, written as they finish, skipped when they are.

Refuses to know what the results are worth; it turns prompts into records.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.errors import ArtifactCorruptError
from distill.files import atomic_write
from distill.metrics.chain import expected_counts
from distill.metrics.self_tests import analytic_equals_decoded
from distill.metrics.summary import PromptRecord
from distill.models import LoadedModel
from distill.sampling import SamplingConfig
from distill.stages import measure_runs as runs
from distill.stages.measure_audit import Answers, draw_law_samples, law_row
from distill.stages.measure_checks import check_models
from distill.stages.measure_config import PLAIN
from distill.stages.measure_forced import score_texts
from distill.stages.measure_runs import Contestant, HeldOutPrompt

logger = logging.getLogger(__name__)

Scored = Mapping[tuple[float, str], Mapping[str, Any]]
"""(temperature, prompt_id) -> the columns of the target's text, see ``measure_forced``."""


class Units:
    """Results of finished units on disk, so that a killed run goes on where it was."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self.num_resumed = 0

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returned, now or in a run that was killed; always read from JSON.

        Raises:
            ArtifactCorruptError: what a killed run left is not what it wrote.
        """
        path = self._directory / f"{name}.json"
        if path.is_file():
            self.num_resumed += 1
        else:
            started = time.perf_counter()
            result = json.dumps(compute())
            atomic_write(path, f'{{"sha256": "{_sha256(result)}", "result": {result}}}')
            logger.info("measured %s in %.1f s", name, time.perf_counter() - started)
        return self._read(path)

    def _read(self, path: Path) -> Any:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["sha256"] == _sha256(json.dumps(content["result"])):
                return content["result"]
            found = "its content does not have the hash that was written with it"
        except (ValueError, KeyError, TypeError) as error:
            found = f"{type(error).__name__}: {error}"
        raise ArtifactCorruptError(
            f"{path}, left by a measurement that was stopped, is damaged ({found}). Delete that "
            f"file to measure its part again, or the folder {self._directory.parent} to measure "
            "everything again"
        )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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

    def scored(
        self, prompts: Sequence[HeldOutPrompt], temperatures: Sequence[float], answers: Answers
    ) -> Scored:
        """The target's answers read by every draft."""
        found: dict[tuple[float, str], Mapping[str, Any]] = {}
        for temperature in temperatures:

            def compute(chunk: Sequence[HeldOutPrompt], temperature: float = temperature) -> Any:
                texts = [(p.token_ids, answers[temperature, p.prompt_id]) for p in chunk]
                return score_texts(
                    self.target, self.contestants, texts, SamplingConfig(temperature=temperature)
                )

            for prompt, row in self._by_chunk("analytic", prompts, temperature, compute):
                found[temperature, prompt.prompt_id] = row
        return found

    def records(
        self, prompts: Sequence[HeldOutPrompt], temperatures: Sequence[float], scored: Scored
    ) -> tuple[list[PromptRecord], list[list[int]]]:
        """One record, and the emitted token ids, per temperature, contestant and prompt."""
        records: list[PromptRecord] = []
        emitted: list[list[int]] = []
        for temperature in temperatures:
            for contestant in self.contestants:
                for prompt, row in self._decoded(contestant, prompts, temperature):
                    forced = scored[temperature, prompt.prompt_id]["drafts"][contestant.name]
                    records.append(
                        PromptRecord(
                            draft=contestant.name,
                            temperature=temperature,
                            prompt_id=prompt.prompt_id,
                            task=prompt.task,
                            counts=row["counts"],
                            num_positions=forced["num_positions"],
                            acceptance_sums=forced["sums"],
                            num_draftable_calls=row["num_draftable_calls"],
                        )
                    )
                    emitted.append(row["token_ids"])
        return records, emitted

    def laws(
        self, prompts: Sequence[HeldOutPrompt], temperatures: Sequence[float], num_samples: int
    ) -> list[dict[str, Any]]:
        """Do tokens drawn with the first draft follow the target's law? One test a temperature."""
        rows = []
        draft = self.contestants[0]
        for temperature in [t for t in temperatures if t > 0.0 and num_samples]:

            def compute(temperature: float = temperature) -> Any:
                return draw_law_samples(
                    self.target,
                    draft,
                    prompts,
                    temperature,
                    num_samples=num_samples,
                    seed=self.seed,
                )

            samples = self.units.get(f"law-t{temperature!r}", compute)
            rows.append(law_row(samples, draft=draft.name, temperature=temperature))
        return rows

    def self_tests(
        self,
        prompts: Sequence[HeldOutPrompt],
        temperatures: Sequence[float],
        answers: Answers,
        scored: Scored,
        records: Sequence[PromptRecord],
    ) -> list[dict[str, Any]]:
        """What must come out, and whether it did, at every temperature."""
        tests: list[dict[str, Any]] = []
        for temperature in temperatures:

            def compute(temperature: float = temperature) -> Any:
                return check_models(
                    self.target, self.contestants[0], prompts, answers, temperature, seed=self.seed
                )

            tests += self.units.get(f"self_tests-t{temperature!r}", compute)
            for contestant in [c for c in self.contestants if not c.is_lookup]:
                mine = [
                    r for r in records if (r.draft, r.temperature) == (contestant.name, temperature)
                ]
                expected = [
                    expected_counts(
                        acceptance_column(
                            scored[temperature, r.prompt_id],
                            contestant.name,
                            len(answers[temperature, r.prompt_id]),
                        ),
                        self.num_draft_tokens,
                        budget=self.max_new_tokens,
                    )
                    for r in mine
                ]
                counts = [r.counts for r in mine]
                tests.append(
                    analytic_equals_decoded(
                        contestant.name, temperature, counts, expected, seed=self.seed
                    ).to_dict()
                )
        return tests

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
            return [
                {
                    "token_ids": r.token_ids,
                    "counts": r.stats.to_dict(),
                    "num_draftable_calls": r.num_draftable_calls,
                }
                for r in results
            ]

        # Apart from the names of other units, whatever a draft is called.
        name = PLAIN if contestant is None else f"draft-{contestant.name}"
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


def acceptance_column(scored: Mapping[str, Any], draft: str, length: int) -> list[float | None]:
    """r of every token of a text; None where the draft proposes nothing."""
    column: list[float | None] = [None] * length
    columns = scored["drafts"][draft]["columns"]
    if columns:
        for position, rate in zip(columns["position"], columns["text"], strict=True):
            column[position] = rate
    return column
