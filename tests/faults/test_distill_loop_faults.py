"""Owns faults that other trainers shipped, in our loop: what a mean is over, masks, modes, ties.

Refuses to know losses (tests/contracts) and kills. Each test names the thread it comes from.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distill.artifacts import Artifact
from distill.errors import TrainingError
from distill.losses.head import head_of
from distill.models import LoadedModel
from distill.training import data as data_module
from distill.training.data import TargetFiles, read_rows
from distill.training.guards import Guard
from distill.training.loop import train
from distill.training.probe import as_served
from distill.training.run import Followers, TrainingData
from distill.training.trunk import set_trainable
from tests.helpers import make_llama
from tests.training_helpers import make_draft, training_config, training_data

WHOLE = training_config(
    max_steps=1,
    warmup_steps=0,
    batch_tokens=100_000,
    micro_batch_tokens=100_000,
    max_grad_norm=1e9,
)


def _first_step(
    target: LoadedModel, data: TrainingData, work_dir: Path, *, draft: Any = None
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """(loss, gradient norm, gradients) of one step over all rows."""
    draft, seen = make_draft(target) if draft is None else draft, {}
    check = Guard.check_norm

    def look(self: Guard, *args: Any, **kwargs: Any) -> None:
        seen.update({n: p.grad.clone() for n, p in draft.named_parameters() if p.grad is not None})
        check(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guard, "check_norm", look)
        result = train(
            draft, target_head=head_of(target.model), data=data, config=WHOLE, work_dir=work_dir
        )
    return result.log[1]["loss"], result.log[1]["grad_norm"], seen


def test_the_loss_of_text_said_twice_is_the_loss_of_the_text(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    """modelscope/easydistill PR#16: divided by the token count twice, so it halved."""
    data = training_data(generated)
    once = _first_step(target, data, tmp_path / "1")
    twice = _first_step(target, replace(data, rows=[*data.rows, *data.rows]), tmp_path / "2")
    assert twice[0] == pytest.approx(once[0], rel=1e-5)
    assert twice[1] == pytest.approx(once[1], rel=1e-4)


def test_padding_changes_neither_loss_nor_gradient(
    target: LoadedModel, generated: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """jxiw/MambaInLlama#11: padding trained. Here all rows get 20 columns more, of a real id."""
    data = training_data(generated)
    loss, norm, gradients = _first_step(target, data, tmp_path / "1")

    def wide(rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(row.length for row in rows) + 20
        input_ids_BT = np.full((len(rows), width), 7, dtype=np.int64)
        for index, row in enumerate(rows):
            input_ids_BT[index, : row.length] = row.input_ids_T
        flat = [index * width + row.positions_N for index, row in enumerate(rows)]
        return torch.from_numpy(input_ids_BT), torch.from_numpy(np.concatenate(flat))

    monkeypatch.setattr(data_module, "pad", wide)
    wider = _first_step(target, data, tmp_path / "2")
    assert wider[0] == pytest.approx(loss, rel=1e-5)
    assert wider[1] == pytest.approx(norm, rel=1e-4)
    for name, gradient in gradients.items():
        torch.testing.assert_close(wider[2][name], gradient, rtol=1e-3, atol=1e-6)


def test_what_a_prompt_says_reaches_the_loss_only_through_what_follows_it(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    """The same: prompt positions trained. A row of one answer token has one position of loss."""
    rows = [
        replace(row, positions_N=row.positions_N[:1], target_rows_N=row.target_rows_N[:1])
        for row in read_rows(generated, "train", max_length=512)
    ]
    data = replace(training_data(generated), rows=rows)
    draft, losses = make_draft(target), []
    result = train(
        draft,
        target_head=head_of(target.model),
        data=data,
        config=WHOLE,
        work_dir=tmp_path,
        followers=Followers(lambda step, record: losses.append(record)),
    )
    assert result.num_tokens == len(rows)
    draft = make_draft(target)
    source, head = TargetFiles(generated), head_of(target.model)
    expected = []
    for row in rows:
        with torch.no_grad():
            ids_1T = torch.from_numpy(row.input_ids_T)[None]
            draft_V = draft(ids_1T).logits[0, row.positions_N[0]].log_softmax(-1)
            target_V = head.logits(source.of([row]).hidden_ND.float())[0].log_softmax(-1)  # type: ignore[attr-defined]
        expected.append((target_V.exp() * (target_V - draft_V)).sum().item())
    assert losses[1]["loss"] == pytest.approx(np.mean(expected), rel=1e-4)


def test_a_split_with_no_label_left_is_an_error_and_not_a_loss_of_zero(
    generated: Artifact,
) -> None:
    """trl#6668: truncation removed every label, the loss was 0.0 and the run a success."""
    with pytest.raises(TrainingError, match=r"no position to train on.*context of 1 tokens"):
        read_rows(generated, "train", max_length=1)


def test_a_tied_draft_stays_tied_while_it_trains_when_it_is_probed_and_after_a_resume(
    target: LoadedModel, generated: Artifact, tmp_path: Path
) -> None:
    """verl-project/verl#7834, NVIDIA-NeMo/Automodel PR#2511: untied at load, re-tied at resume."""

    class Killed(Exception):
        pass

    def tied() -> Any:
        model = make_llama(300, layers=1, hidden=64, seed=5, tie_word_embeddings=True)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return model

    def run(work: Path, die_at: int | None) -> Any:
        model, ties = tied(), []

        def look(step: int, record: dict[str, Any]) -> None:
            ties.append(model.lm_head.weight is model.model.embed_tokens.weight)
            served = as_served(model)
            assert served.lm_head.weight is served.model.embed_tokens.weight
            if step == die_at and "loss" in record:
                raise Killed

        train(
            model,
            target_head=head_of(target.model),
            data=training_data(generated),
            config=training_config(train_embeddings=True, eval_every=1),
            work_dir=work,
            followers=Followers(look),
        )
        assert all(ties)
        return model

    whole = run(tmp_path / "whole", None)
    with pytest.raises(Killed):
        run(tmp_path / "killed", 5)
    resumed = run(tmp_path / "killed", None)
    assert resumed.lm_head.weight is resumed.model.embed_tokens.weight
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


def test_a_tied_table_is_one_parameter_to_the_optimiser(target: LoadedModel) -> None:
    model = make_llama(300, layers=1, hidden=64, seed=5, tie_word_embeddings=True)
    names = list(set_trainable(model, training_config(train_embeddings=True)))
    assert [name for name in names if "embed" in name or "lm_head" in name] == [
        "model.embed_tokens.weight"
    ]
