"""The flagship configuration runs end to end on tiny random models of the same architecture.

Refuses to need its hub, its data set or a GPU: those are what the overrides replace.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distill import cli

FLAGSHIP = Path(__file__).parents[2] / "configs" / "llama7b_to_1b.yaml"

# Sizes only: every loss, phase, initialization and stage stays as the file has it.
SMALLER = [
    "generate.max_new_tokens=12",
    "generate.batch_size=4",
    "generate.corpus.held_out_fraction=0.3",
    "distill.max_steps=6",
    "distill.warmup_steps=2",
    "distill.batch_tokens=64",
    "distill.micro_batch_tokens=128",
    "distill.eval_every=3",
    "distill.checkpoint_every=3",
    "measure.max_new_tokens=8",
    "measure.max_prompts_per_task=2",
    "measure.timing.num_prompts=1",
    "measure.timing.max_new_tokens=6",
    "measure.timing.repeats=2",
    "measure.timing.cost_repeats=2",
    "measure.timing.max_draft_tokens=2",
]


@pytest.fixture
def overrides(tiny_pair_dirs: tuple[Path, Path], tiny_corpus: Path) -> list[str]:
    target, draft = tiny_pair_dirs
    values = [
        f"target.model={target}",
        "target.shape=null",
        "target.dtype=float32",
        "generate.corpus.kind=jsonl",
        f"generate.corpus.path={tiny_corpus}",
        "generate.corpus.prompt_column=null",
        f"distill.initialization.model.model={draft}",
        "distill.initialization.model.shape=null",
        "distill.initialization.model.dtype=float32",
        *SMALLER,
    ]
    return [word for value in values for word in ("--set", value)]


def test_the_flagship_runs_end_to_end_on_tiny_models(overrides: list[str], tmp_path: Path) -> None:
    words = ["run", str(FLAGSHIP), "--artifacts", str(tmp_path), "--json", *overrides]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert set(report["artifacts"]) == {"generate", "distill", "measure", "export"}
    assert report["verdict"]["num_draft_tokens"] in (0, 1, 2)


def test_the_flagship_s_plan_counts_without_a_hub(tmp_path: Path) -> None:
    words = ["plan", str(FLAGSHIP), "--artifacts", str(tmp_path), "--json"]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    stages = json.loads(result.stdout)["stages"]
    assert all(stage["is_provisional"] for stage in stages)
    assert all(stage["disk_bytes"] > 0 and stage["memory_bytes"] > 0 for stage in stages)
    (generate,) = [stage for stage in stages if stage["stage"] == "generate"]
    # 10,000 prompts x 2 samplings x 384 tokens, each with 4096 bfloat16 numbers.
    assert generate["num_tokens"] == 10_000 * 2 * 384
    assert generate["disk_bytes"] >= generate["num_tokens"] * 2 * 4096
    assert not list(tmp_path.iterdir())
