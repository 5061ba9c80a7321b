"""Owns the promise that every notebook runs from top to bottom, and is stored without outputs.
Refuses to judge what the numbers of a tiny random pair are.
"""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))
STAGES = ("generate", "distill", "measure", "serve")

CONFIG = """
name: tiny
target: {{model: {target}}}
generate:
  corpus: {{path: {corpus}, held_out_fraction: 0.25}}
  samplings: [{{temperature: 1.0}}, {{temperature: 0.0}}]
  max_new_tokens: 12
distill:
  initialization: {{kind: existing, model: {{model: {draft}}}}}
  vocabulary_size: 128
  max_steps: 4
  warmup_steps: 1
  eval_every: 2
  compute_dtype: float32
measure:
  max_new_tokens: 8
  num_draft_tokens: 2
  timing: {{num_prompts: 1, max_new_tokens: 4, repeats: 1, cost_repeats: 1, max_draft_tokens: 2}}
"""

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def environment(
    tmp_path_factory: pytest.TempPathFactory, tiny_pair_dirs: tuple[Path, Path], tiny_corpus: Path
) -> dict[str, str]:
    """What a notebook is told from outside. One store for all: a later one finds things built."""
    root = tmp_path_factory.mktemp("notebooks")
    target, draft = tiny_pair_dirs
    config = root / "tiny.yaml"
    config.write_text(
        CONFIG.format(target=target, draft=draft, corpus=tiny_corpus), encoding="utf-8"
    )
    return {
        "DISTILL_NOTEBOOK_CONFIG": str(config),
        "DISTILL_NOTEBOOK_OVERRIDES": "generate.batch_size=8 measure.batch_size=8",
        "DISTILL_ARTIFACTS": str(root / "artifacts"),
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "127.0.0.1",
        "MPLBACKEND": "agg",
    }


@every_notebook
def test_notebook_runs_from_top_to_bottom(
    path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # The kernel is a process of its own, started in notebooks/: it must find this checkout.
    search = [str(path.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(search))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=120, kernel_name="python3")
    client.execute(cwd=str(path.parent))


@every_notebook
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert [cell.id for cell in code if cell.outputs or cell.execution_count is not None] == []


def test_there_is_a_notebook_for_each_stage_and_one_for_the_pair() -> None:
    names = [path.stem for path in NOTEBOOKS]
    assert names == [f"{n:02d}_{name}" for n, name in enumerate((*STAGES, "pair_end_to_end"), 1)]
