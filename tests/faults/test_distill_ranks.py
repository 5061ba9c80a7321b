"""Owns training in several processes: the weights of one, one writer, ranks without work.

Refuses to know how gradients are added; real processes are started by torchrun, on gloo.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distill.artifacts import ArtifactStore
from distill.config import parse_config
from distill.errors import ConfigError
from distill.stages.distill_draft import DistillConfig, distill_draft
from distill.training.processes import Processes, device_of_rank
from tests.distill_helpers import make_generated

_SCRIPT = """
import sys
import torch
from distill.artifacts import ArtifactStore
from distill.stages.distill_draft import DistillConfig, distill_draft
from distill.training.guards import Guard

root, generated, config, seen = sys.argv[1:]
torch.set_num_threads(1)
accumulate, check = [], Guard.check_norm

def look(self, step, name, norm, *, loss, row_ids):
    accumulate.append([step, norm, loss])
    check(self, step, name, norm, loss=loss, row_ids=row_ids)

Guard.check_norm = look
store = ArtifactStore(root)
inputs = {"generate": store.load(generated)}
artifact = distill_draft(DistillConfig.model_validate_json(config), store, inputs=inputs)
import json, os
with open(f"{seen}-{os.environ['RANK']}.json", "w") as file:
    json.dump({"steps": accumulate, "path": str(artifact.path)}, file)
"""


def _settings(target_dir: Path, **changes: Any) -> DistillConfig:
    settings: dict[str, Any] = {
        "target": {"model": str(target_dir), "device": "cpu"},
        "initialization": {"kind": "pruned", "layers": [0, 3]},
        "max_steps": 6,
        "batch_tokens": 60,
        "micro_batch_tokens": 40,
        "warmup_steps": 1,
        "eval_every": 3,
        "checkpoint_every": 2,
        "learning_rate": 1e-3,
        "compute_dtype": "float32",
        "decode": {"num_prompts": 2, "max_new_tokens": 4},
    }
    return parse_config(settings | changes, DistillConfig)


def _torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *[sys.executable, "-m", "torch.distributed.run", "--standalone"],
            *["--nproc_per_node", "2", "--no-python", sys.executable, "-c", _SCRIPT, *arguments],
        ],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_two_processes_train_the_weights_of_one(
    tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    """Steps of one to four micro-batches: in some the second process has nothing to do.

    Gradients of float32 added in another order: norms agree to 1e-5, weights after six steps of
    AdamW to 2e-5 (a parameter moves by up to 1e-3 a step).
    """
    config = _settings(tiny_pair_dirs[0])
    alone = ArtifactStore(tmp_path / "alone")
    generated = make_generated(alone, tiny_pair_dirs[0])
    expected = distill_draft(config, alone, inputs={"generate": generated})

    together = ArtifactStore(tmp_path / "together")
    done = _torchrun(
        str(together.root), str(generated.path), config.model_dump_json(), str(tmp_path / "seen")
    )
    assert done.returncode == 0, done.stderr
    seen = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in (0, 1)]
    # every process saw the same sums, and went on from the same weights
    assert seen[0] == seen[1]
    artifact = together.load(seen[0]["path"])
    assert artifact.fingerprint == expected.fingerprint
    log = [json.loads(x) for x in artifact.file("training_log.jsonl").read_text().splitlines()]
    want = [json.loads(x) for x in expected.file("training_log.jsonl").read_text().splitlines()]
    for mine, theirs in zip(log, want, strict=True):
        assert mine["step"] == theirs["step"]
        if "loss" in mine:
            assert mine["num_tokens"] == theirs["num_tokens"]
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        else:
            assert mine["held_out"]["acceptance"] == pytest.approx(
                theirs["held_out"]["acceptance"], abs=1e-4
            )
    first = next(record for record in log if "loss" in record)
    same = next(record for record in want if "loss" in record)
    assert first["grad_norm"] == pytest.approx(same["grad_norm"], rel=1e-5)
    weights = load_file(artifact.file("draft/model.safetensors"))
    for name, tensor in load_file(expected.file("draft/model.safetensors")).items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-5)
    # one process wrote: nothing of a second one is left, nothing was written twice
    assert {path.name for path in (together.root / "distill").iterdir()} == {artifact.path.name}
    live = (together.root / "logs" / f"distill-{artifact.fingerprint[:12]}.jsonl").read_text()
    assert [json.loads(line)["step"] for line in live.splitlines()] == [r["step"] for r in log]


def test_a_single_process_adds_nothing_and_takes_every_micro_batch() -> None:
    alone = Processes(torch.device("cpu"))
    assert (alone.rank, alone.count, alone.is_main) == (0, 1, True)
    assert list(alone.share(["a", "b", "c"])) == [(0, "a"), (1, "b"), (2, "c")]
    assert alone.add(0.1) == 0.1
    assert alone.from_main({"a": 1}) == {"a": 1}


@pytest.mark.parametrize(("count", "num_micro"), [(2, 5), (3, 2), (4, 8)])
def test_every_micro_batch_is_one_processs_and_keeps_its_place(count: int, num_micro: int) -> None:
    parts = []
    for rank in range(count):
        one = Processes(torch.device("cpu"))
        one.rank, one.count = rank, count
        parts.append(list(one.share(list(range(num_micro)))))
    assert sorted(place for part in parts for place, _ in part) == list(range(num_micro))
    assert all(place == item for part in parts for place, item in part)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_a_launcher_that_shards_the_draft_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match=r"ACCELERATE_USE_FSDP.*--multi_gpu or torchrun"):
        Processes(torch.device("cpu"))


def test_a_rank_takes_the_gpu_of_its_number_unless_the_config_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of_rank("auto") == "auto"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device_of_rank("auto") == device_of_rank("cuda") == "cuda:3"
    assert device_of_rank("cuda:1") == "cuda:1"
    assert device_of_rank("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of_rank("auto") == "auto"
