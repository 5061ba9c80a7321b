"""Owns TRL's trainer behind our settings: what it trains, what it is told, what is refused.

Refuses to know how TRL computes; two real steps of it run on a tiny pair.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from distill import distill_draft, generate, load_config
from distill.artifacts import ArtifactStore
from distill.errors import ConfigError, TrainingError
from distill.initialization import PrunedConfig, initialize
from distill.models import LoadedModel, ModelConfig, load_draft, load_target
from distill.training.config import LossPhase, TrainingConfig
from distill.training.trl_engine import (
    as_text,
    beta_of,
    check_for_trl,
    settings_for_trl,
    train_with_trl,
)
from pipelines import on_policy


@pytest.fixture(scope="module")
def target(tiny_pair_dirs: tuple[Path, Path]) -> LoadedModel:
    return load_target(ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu"))


# what the tiny config has to change, so that TRL trains its draft in two short steps
OF_TRL = [
    *("distill.engine=trl", "distill.vocabulary_size=null", "distill.max_steps=2"),
    *("distill.warmup_steps=0", "distill.trl.batch_size=2", "distill.trl.max_new_tokens=3"),
    "distill.learning_rate=1e-2",
    *("distill.batch_tokens=2048", "distill.micro_batch_tokens=2048"),
    *("distill.eval_every=50", "distill.checkpoint_every=50"),
]


def _config(**changes: Any) -> TrainingConfig:
    defaults: dict[str, Any] = {
        "engine": "trl",
        "trl": {"batch_size": 2, "max_new_tokens": 4},
        "max_steps": 2,
        "warmup_steps": 0,
        "learning_rate": 1e-2,
        "compute_dtype": "float32",
    }
    return TrainingConfig(**(defaults | changes))


def test_two_steps_of_trl_train_the_draft_and_leave_it_as_it_came(
    target: LoadedModel,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="distill")
    draft = initialize(PrunedConfig(layers=(0, 3)), target, seed=0)
    before = {name: tensor.clone() for name, tensor in draft.model.state_dict().items()}
    target_before = {name: t.clone() for name, t in target.model.state_dict().items()}
    prompts = [target.tokenizer(text)["input_ids"] for text in ("one two", "three", "four five")]
    result = train_with_trl(draft, target, prompts, config=_config(), work_dir=tmp_path)
    # what it prints of each step is logged, and standard output is left to the command
    assert capfd.readouterr().out == ""
    assert len([line for line in caplog.messages if line.startswith("trl: {")]) >= 2
    assert len(result.log) == 2
    assert 2 * 2 * 1 <= result.num_tokens <= 2 * 2 * 4
    for name, tensor in draft.model.state_dict().items():
        is_frozen = "embed_tokens" in name or "lm_head" in name
        assert torch.equal(tensor, before[name]) == is_frozen, name
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(tensor, target_before[name]), name
    assert not draft.model.training
    assert not any(p.requires_grad for p in draft.model.parameters())
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY is True


def test_each_divergence_is_trls_beta() -> None:
    assert beta_of(LossPhase(name="forward_kl")) == 0.0
    assert beta_of(LossPhase(name="reverse_kl")) == 1.0
    assert beta_of(LossPhase(name="jsd", options={"beta": 0.3})) == 0.3


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"loss": "acceptance"}, "loss is acceptance"),
        (
            {
                "loss": [
                    {"name": "forward_kl", "fraction": 0.5},
                    {"name": "jsd", "fraction": 0.5},
                ]
            },
            "make 2 phases",
        ),
        ({"patience": 2}, r"nothing of patience \(2, not null\)"),
        ({"trackers": ("wandb",)}, "nothing of trackers"),
        ({"batch_tokens": 64}, r"nothing of batch_tokens \(64, not 2048\)"),
        ({"micro_batch_tokens": 64}, "nothing of micro_batch_tokens"),
        ({"eval_every": 1}, "nothing of eval_every"),
        ({"decode_every": 1}, "nothing of decode_every"),
        ({"decode": {"num_prompts": 1}}, "nothing of decode .*num_prompts=1.*num_prompts=8"),
        ({"max_loss_ratio": None}, r"nothing of max_loss_ratio \(null, not 10"),
        ({"checkpoint_every": 1}, "nothing of checkpoint_every"),
        ({"rollout_fraction": 1.0}, "nothing of rollout_fraction"),
        ({"loss": [{"name": "forward_kl", "temperature": 2.0}]}, "of forward_kl is 2; set it to 1"),
    ],
)
def test_what_trl_cannot_do_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_for_trl(_config(**changes), vocabulary_size=None)


def test_settings_of_our_loop_can_be_put_back_for_trl() -> None:
    ours = _config(batch_tokens=64, eval_every=1, patience=2, trackers=("wandb",))
    check_for_trl(ours.model_copy(update=settings_for_trl()), vocabulary_size=None)
    check_for_trl(_config(decode_every=None), vocabulary_size=None)  # there are none anyway


def test_rollouts_that_trl_would_throw_away_are_refused(
    tiny_run_config: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="rollouts it is given would be thrown away"):
        check_for_trl(_config(), vocabulary_size=None, has_rollouts=True)
    overrides = [*OF_TRL, "pipeline=on_policy", "distill.rollout_fraction=0.5"]
    config = load_config(tiny_run_config, overrides)
    store = ArtifactStore(tmp_path)
    for call in (on_policy.run, on_policy.plan):
        with pytest.raises(ConfigError, match=r"on_policy and distill\.engine trl"):
            call(config, store)
    assert not any(tmp_path.iterdir())


_HUB_FIRST = """
from huggingface_hub import constants
from huggingface_hub.utils import _telemetry
from distill.training.trackers import disable_hub_telemetry

assert not constants.HF_HUB_DISABLE_TELEMETRY and not constants.is_offline_mode()
disable_hub_telemetry()
_telemetry.send_telemetry("distill/test")
assert _telemetry._TELEMETRY_THREAD is None and _telemetry._TELEMETRY_QUEUE.empty()
"""


def test_usage_reports_are_off_even_where_the_hub_was_imported_first() -> None:
    switches = {"HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK"}
    switches |= {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}
    environment = {name: value for name, value in os.environ.items() if name not in switches}
    subprocess.run([sys.executable, "-c", _HUB_FIRST], env=environment, check=True)


def test_a_vocabulary_subset_and_several_processes_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="nothing of vocabulary_size"):
        check_for_trl(_config(), vocabulary_size=100)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2"):
        check_for_trl(_config(), vocabulary_size=None)


def test_a_prompt_is_the_text_that_reads_as_its_ids(target: LoadedModel) -> None:
    ids = target.tokenizer("hello there")["input_ids"]
    assert target.tokenizer(as_text(target.tokenizer, ids))["input_ids"] == ids

    class AddsBos:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1, *map(ord, text)]}

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            return "".join(chr(i) if i > 1 else "<s>" for i in ids)

    assert as_text(AddsBos(), [1, 104, 105]) == "hi"
    assert as_text(AddsBos(), [104, 105]) is None


def test_prompts_that_are_no_text_are_refused(target: LoadedModel, tmp_path: Path) -> None:
    """Two ids that the tokenizer would have merged into one."""
    draft = initialize(PrunedConfig(layers=(0,)), target, seed=0)
    whole = target.tokenizer("the")["input_ids"]
    parts = [i for letter in "the" for i in target.tokenizer(letter)["input_ids"]]
    assert whole != parts
    with pytest.raises(TrainingError, match="none of 1 gives its own token ids back"):
        train_with_trl(draft, target, [parts], config=_config(), work_dir=tmp_path)


def test_the_stage_runs_trl_behind_the_same_config_and_saves_a_draft(
    tiny_run_config: Path, tmp_path: Path
) -> None:
    config, store = load_config(tiny_run_config, OF_TRL), ArtifactStore(tmp_path)
    generated = generate(config.generate, store)
    artifact = distill_draft(config.distill, store, inputs={"generate": generated})
    log = [json.loads(x) for x in artifact.file("training_log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == [0, 1, 2, 2]
    assert log[0]["held_out"] == artifact.metrics["held_out_before"]
    assert log[-1]["held_out"] == artifact.metrics["held_out_after"]
    assert log[0]["held_out"] != log[-1]["held_out"]
    assert artifact.metrics["best_step"] == artifact.metrics["num_steps"] == 2
    assert artifact.metrics["num_tokens"] == sum(r.get("num_tokens", 0) for r in log)
    assert load_draft(artifact, device="cpu").shape.num_hidden_layers == 2
    assert not list(tmp_path.glob("distill/*.partial"))
    with pytest.raises(ConfigError, match="nothing of vocabulary_size"):
        distill_draft(
            config.distill.model_copy(update={"vocabulary_size": 100}),
            store,
            inputs={"generate": generated},
        )
