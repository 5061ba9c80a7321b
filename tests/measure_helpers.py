"""Owns small generate and distill artifacts for the tests of measure, built without either stage.

Refuses to train: the draft is a tiny random model, saved as a distill artifact would be.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.artifacts import Artifact, ArtifactStore
from distill.corpus import CorpusConfig
from distill.held_out import reporting_half
from distill.models import ModelConfig, load_target, model_revision
from distill.runtime.speculative import speculative_decode
from distill.sampling import SamplingConfig
from distill.stages import completions
from distill.stages.distill_draft import DistillConfig
from distill.stages.generate import GenerateConfig
from distill.stages.measure import MeasureConfig, TimingConfig

TASKS = ("chat", "math")
NO_TIMING = TimingConfig(enabled=False)


def model_config(path: Path) -> ModelConfig:
    return ModelConfig(model=str(path), device="cpu")


def measure_config(target_dir: Path, **changes: Any) -> MeasureConfig:
    """A measurement of seconds: short answers, two prompts a unit, no timing, few draws."""
    settings: dict[str, Any] = {
        "temperatures": (0.0, 1.0),
        "law_samples": 64,
        "num_draft_tokens": 3,
        "max_new_tokens": 12,
        "batch_size": 2,
        "timing": NO_TIMING,
    }
    return MeasureConfig(target=model_config(target_dir), **{**settings, **changes})


def held_out_rows(
    target_dir: Path,
    *,
    num_prompts: int = 5,
    temperatures: Sequence[float] = (0.0, 1.0),
    max_new_tokens: int = 12,
) -> list[dict[str, Any]]:
    """Rows of completions.parquet: the target's own answers at each temperature.

    As many prompts more, named s0, s1, ..., stand for those that the weights were chosen on.
    """
    target = load_target(model_config(target_dir))
    prompts = [[5 + n, 40, 41, 42 + n, 40, 41][: 3 + n % 4] for n in range(num_prompts)]
    names = [f"p{n}" for n in range(num_prompts)]
    rows = []
    for index in range(len(temperatures)):
        rows += [
            _row(name, index, temperatures[index], prompts[0], [9], "length", n)
            for n, name in enumerate(selection_names(names))
        ]
    for index, temperature in enumerate(temperatures):
        results = speculative_decode(
            target,
            None,
            prompts,
            SamplingConfig(temperature=temperature),
            max_new_tokens=max_new_tokens,
            seed=7,
        )
        for n, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
            rows.append(
                _row(
                    names[n], index, temperature, prompt, result.token_ids, result.finish_reason, n
                )
            )
    return rows


def selection_names(reported: Sequence[str]) -> list[str]:
    """As many names again that the split between selection and report puts on the other side."""
    below = (
        name
        for name in map("s{}".format, itertools.count())
        if all(reporting_half([name, one]) == {one} for one in reported)
    )
    return list(itertools.islice(below, len(reported)))


def _row(
    prompt_id: str,
    index: int,
    temperature: float,
    prompt: Sequence[int],
    token_ids: Sequence[int],
    finish_reason: str | None,
    number: int,
) -> dict[str, Any]:
    return {
        "row_id": f"{prompt_id}/{index}/0",
        "prompt_id": prompt_id,
        "task": TASKS[number % len(TASKS)],
        "split": "held_out",
        "prompt_token_ids": list(prompt),
        "completion_token_ids": list(token_ids),
        "loss_mask": [0] * len(prompt) + [1] * len(token_ids),
        "status": "completed" if finish_reason == "stop" else "truncated",
        "finish_reason": finish_reason,
        "sampling_index": index,
        "temperature": temperature,
        "sample_index": 0,
        "turn_index": 0,
        "seed": number,
    }


def generate_artifact(
    store: ArtifactStore,
    target_dir: Path,
    rows: Sequence[dict[str, Any]],
    *,
    temperatures: Sequence[float] = (0.0, 1.0),
) -> Artifact:
    config = GenerateConfig(
        target=model_config(target_dir),
        corpus=CorpusConfig(path=Path("prompts.jsonl")),
        samplings=tuple(SamplingConfig(temperature=t) for t in temperatures),
        max_new_tokens=12,
    )
    key = store.key(
        "generate",
        1,
        config,
        revisions={"target": model_revision(config.target), "rows": json.dumps(list(rows))},
    )

    def build(directory: Path) -> dict[str, Any]:
        completions.write_rows(directory / "completions.parquet", rows)
        return {"num_prompts": len({row["prompt_id"] for row in rows})}

    return store.get_or_build(key, build)


def distill_artifact(
    store: ArtifactStore,
    target_dir: Path,
    draft_dir: Path,
    *,
    token_ids: Sequence[int] | None = None,
) -> Artifact:
    config = DistillConfig(target=model_config(target_dir))
    key = store.key(
        "distill",
        1,
        config,
        inputs={"generate": "0" * 64},
        revisions={
            "target": model_revision(config.target),
            "draft": f"{draft_dir.name} {token_ids}",
        },
    )

    def build(directory: Path) -> dict[str, Any]:
        shutil.copytree(draft_dir, directory / "draft")
        if token_ids is not None:
            content = {"coverage": 1.0, "token_ids": list(token_ids)}
            (directory / "draft_vocabulary.json").write_text(json.dumps(content))
        return {}

    return store.get_or_build(key, build)


def cell(
    acceptance: dict[str, Any], draft: str, temperature: float, task: str | None = None
) -> Any:
    """One cell of acceptance.json."""
    wanted = (draft, temperature, task)
    (found,) = (
        c for c in acceptance["cells"] if (c["draft"], c["temperature"], c["task"]) == wanted
    )
    return found


def read_acceptance(artifact: Artifact) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(artifact.file("acceptance.json").read_text())
    return content
