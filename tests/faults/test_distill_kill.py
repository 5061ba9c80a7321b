"""Owns real kills of distill: SIGKILL while a state is written, made current, and while saving.

Refuses to know training; interruptions between steps are in tests/unit/test_training.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distill.artifacts import ArtifactStore
from distill.config import parse_config
from distill.stages.distill_draft import DistillConfig, distill_draft
from tests.distill_helpers import make_generated

# Imports once, then forks a child for each kill (before any computation, so no thread is lost).
# A child dies at the place it is told to; the next one resumes what it left.
_SCRIPT = """
import os, signal, sys
import accelerate
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast
)
from distill.artifacts import ArtifactStore
from distill.config import parse_config
from distill.stages import distill_draft as stage
from distill.training import checkpoint

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def before_state_is_current():
    write, seen = checkpoint.atomic_write, []
    def dying(path, data):
        seen.append(path.name)
        if seen.count("state.json") == 2:
            die()
        write(path, data)
    checkpoint.atomic_write = dying

def before_the_old_tensors_are_deleted():
    unlink = checkpoint.Path.unlink
    def dying(path, missing_ok=False):
        if path.name.startswith("state-"):
            die()
        unlink(path, missing_ok)
    checkpoint.Path.unlink = dying

def while_the_model_is_saved():
    save = stage.save_model
    def dying(model, tokenizer, directory):
        save(model, tokenizer, directory)
        (directory / "config.json").write_text("half")
        die()
    stage.save_model = dying

root, generated, config = sys.argv[1:]
store = ArtifactStore(root)
for kill in (
    before_state_is_current, before_the_old_tensors_are_deleted, while_the_model_is_saved
):
    child = os.fork()
    if child == 0:
        kill()
        inputs = {"generate": store.load(generated)}
        stage.distill_draft(
            stage.DistillConfig.model_validate_json(config), store, inputs=inputs
        )
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (kill, status)
    print(sorted(path.name for path in store.root.glob("distill/*.partial/work/*")))
"""


@pytest.fixture
def config(tiny_pair_dirs: tuple[Path, Path]) -> DistillConfig:
    settings = {
        "target": {"model": str(tiny_pair_dirs[0]), "device": "cpu"},
        "initialization": {"kind": "pruned", "layers": [0, 3]},
        "max_steps": 7,
        "batch_tokens": 60,
        "micro_batch_tokens": 64,
        "warmup_steps": 1,
        "eval_every": 3,
        "checkpoint_every": 2,
        "vocabulary_size": 120,
    }
    return parse_config(settings, DistillConfig)


def test_a_build_killed_again_and_again_ends_with_the_same_bytes(
    tmp_path: Path, tiny_pair_dirs: tuple[Path, Path], config: DistillConfig
) -> None:
    quiet = ArtifactStore(tmp_path / "quiet")
    generated = make_generated(quiet, tiny_pair_dirs[0])
    expected = distill_draft(config, quiet, inputs={"generate": generated})

    killed = ArtifactStore(tmp_path / "killed")
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            _SCRIPT,
            str(killed.root),
            str(generated.path),
            config.model_dump_json(),
        ],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stderr
    # what each kill left: the new tensors not yet named, the old ones no longer named, the last
    left = result.stdout.splitlines()
    assert [line.count("state-") for line in left] == [2, 2, 1]
    assert not list(killed.root.glob("distill/*/manifest.json"))
    artifact = distill_draft(config, killed, inputs={"generate": generated})
    assert artifact.manifest.files == expected.manifest.files
    assert not list(killed.root.glob("distill/*.partial"))
