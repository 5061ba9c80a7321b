"""Faults others shipped where a draft starts: untied heads, vocabularies that only look alike.

Refuses to know their code; each test is the symptom, on models small enough to see it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.artifacts import ArtifactStore
from distill.config import parse_config
from distill.errors import PairMismatchError
from distill.initialization import (
    ExistingConfig,
    PrunedConfig,
    ScratchConfig,
    initialize,
    read_samples,
    start_draft,
)
from distill.models import LoadedModel, ModelConfig, load_draft, load_target, save_model
from distill.stages.distill_draft import DistillConfig, build_undistilled, distill_draft
from distill.training.config import TrainingConfig
from distill.training.trunk import set_trainable
from tests.distill_helpers import make_generated
from tests.helpers import make_llama, make_tokenizer, save_pretrained_dir

SAMPLES = [[5, 9, 17, 3], [40, 41, 42]]
STARTS: dict[str, Any] = {
    "layers": PrunedConfig(layers=(0,)),
    "width": PrunedConfig(layers=(0,), hidden_size=32, num_attention_heads=2),
    "copied": ScratchConfig(num_layers=1),
    "projected": ScratchConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, embeddings="projected"
    ),
}


def saved(directory: Path, model: Any, tokenizer: Any) -> ModelConfig:
    return ModelConfig(model=str(save_pretrained_dir(directory, model, tokenizer)), device="cpu")


@pytest.fixture
def transplanted(tmp_path: Path) -> Callable[[bool], ExistingConfig]:
    """A draft with 40 tokens fewer, so with other ids, and rows of padding."""

    def make(is_tied: bool) -> ExistingConfig:
        tokenizer = make_tokenizer(260)
        model = make_llama(len(tokenizer) + 4, seed=4, tie_word_embeddings=is_tied)
        own = saved(tmp_path / f"other-{is_tied}", model, tokenizer)
        return ExistingConfig(model=own, vocabulary="transplanted")

    return make


def is_tied(model: Any) -> bool:
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return embedding.data_ptr() == head.data_ptr()


# ---------------------------------------------------------------- a head that loses its table


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [*STARTS, "transplanted"])
def test_a_head_stays_tied_or_untied_through_start_training_and_files(
    kind: str,
    tied: bool,
    tmp_path: Path,
    tiny_tokenizer: Any,
    transplanted: Callable[[bool], ExistingConfig],
) -> None:
    """verl#7834, Automodel PR#2511: an untied head trains away from its table, then is re-tied."""
    model = make_llama(len(tiny_tokenizer), hidden=64, tie_word_embeddings=tied)
    target = load_target(saved(tmp_path / "target", model, tiny_tokenizer))
    start = STARTS.get(kind) or transplanted(tied)
    draft = initialize(start, target, seed=0, samples=SAMPLES)
    assert is_tied(draft.model) == tied
    assert draft.shape.tie_word_embeddings == draft.model.config.tie_word_embeddings == tied
    set_trainable(draft.model, TrainingConfig(train_embeddings=True, compute_dtype="float32"))
    assert is_tied(draft.model) == tied
    save_model(draft.model, draft.tokenizer, tmp_path / "draft")
    again = load_draft(tmp_path / "draft", device="cpu")
    assert is_tied(again.model) == tied
    tokens_BT = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = draft.model(input_ids=tokens_BT).logits
        assert torch.equal(again.model(input_ids=tokens_BT).logits, expected)


# ---------------------------------------------------------------- vocabularies


@pytest.fixture
def target(tiny_pair_dirs: tuple[Path, Path]) -> LoadedModel:
    return load_target(ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu"))


def test_a_draft_of_another_padded_size_is_distilled_on_the_tokens_both_have(
    tmp_path: Path, tiny_pair_dirs: tuple[Path, Path], tiny_tokenizer: Any
) -> None:
    """trl#2215 and its family: 152064 rows against 151936, a broadcast error or a wrong slice."""
    padded = make_llama(len(tiny_tokenizer) + 28, hidden=64, seed=2)
    own = saved(tmp_path / "padded", padded, tiny_tokenizer)
    store = ArtifactStore(tmp_path / "artifacts")
    generated = make_generated(store, tiny_pair_dirs[0])
    config = parse_config(
        {
            "target": {"model": str(tiny_pair_dirs[0]), "device": "cpu"},
            "initialization": {"kind": "existing", "model": {"model": own.model, "device": "cpu"}},
            "max_steps": 2,
            "warmup_steps": 1,
            "decode_every": None,
            "batch_tokens": 60,
            "micro_batch_tokens": 64,
            "train_embeddings": True,
        },
        DistillConfig,
    )
    artifact = distill_draft(config, store, inputs={"generate": generated})
    draft = load_draft(artifact, device="cpu")
    assert draft.shape.vocab_size == len(tiny_tokenizer) + 28
    # no token has these rows: no gradient reaches them, only the decay of the weights
    trained, before = draft.model.lm_head.weight[-28:], padded.lm_head.weight[-28:]
    torch.testing.assert_close(trained, before, rtol=1e-3, atol=1e-6)


def test_equal_sizes_with_other_ids_are_refused_before_training(
    target: LoadedModel, tmp_path: Path
) -> None:
    """sgl#24051, llama.cpp PR#3812: nothing fails, and acceptance is zero."""
    other = make_tokenizer()
    vocab = other.get_vocab()
    from tokenizers import Tokenizer

    text = other.backend_tokenizer.to_str()
    swapped = text.replace(f'"A":{vocab["A"]}', f'"A":{vocab["B"]}', 1)
    swapped = swapped.replace(f'"B":{vocab["B"]}', f'"B":{vocab["A"]}', 1)
    other._tokenizer = Tokenizer.from_str(swapped)
    assert len(other) == len(target.tokenizer)
    own = saved(tmp_path / "swapped", make_llama(len(other)), other)
    with pytest.raises(PairMismatchError, match="2 of 300 ids differ"):
        initialize(ExistingConfig(model=own), target, seed=0)


def test_a_transplanted_draft_proposes_no_id_the_target_lacks(
    target: LoadedModel, transplanted: Callable[[bool], ExistingConfig]
) -> None:
    """llama.cpp#17480: an id of the draft's own vocabulary reaches the target."""
    draft = initialize(transplanted(False), target, seed=0)
    assert draft.shape.vocab_size == target.shape.vocab_size
    with torch.no_grad():
        logits_BTV = draft.model(input_ids=torch.tensor([[299, 298]])).logits
    assert logits_BTV.shape[-1] == target.shape.vocab_size


def test_a_transplanted_draft_stops_where_the_target_does(
    target: LoadedModel, tmp_path: Path
) -> None:
    """swift#9526: the end of text of the one is an ordinary token of the other."""
    tokenizer = make_tokenizer(260)
    tokenizer.eos_token = "Z"
    model = make_llama(len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    own = saved(tmp_path / "ends-with-z", model, tokenizer)
    with pytest.raises(PairMismatchError, match="eos token"):
        initialize(ExistingConfig(model=own), target, seed=0)
    config = ExistingConfig(model=own, vocabulary="transplanted")
    draft = initialize(config, target, seed=0)
    assert draft.stop_token_ids == target.stop_token_ids
    assert draft.model.config.eos_token_id == target.model.config.eos_token_id


def test_no_token_of_the_new_vocabulary_is_left_out_of_training_as_the_old_padding(
    target: LoadedModel, tmp_path: Path
) -> None:
    """An embedding gives its padding row no gradient, whatever token the row has become."""
    tokenizer = make_tokenizer(260)
    model = make_llama(len(tokenizer))
    model.config.pad_token_id = 50
    own = saved(tmp_path / "pads-with-50", model, tokenizer)
    draft = initialize(ExistingConfig(model=own, vocabulary="transplanted"), target, seed=0).model
    draft.requires_grad_(True)
    draft(input_ids=torch.tensor([[50, 51]])).logits.square().sum().backward()
    gradient_VD = draft.get_input_embeddings().weight.grad
    assert gradient_VD[50].abs().sum() > 0
    assert gradient_VD[51].abs().sum() > 0


# ---------------------------------------------------------------- a start that cannot be repeated


def test_the_undistilled_draft_is_the_one_training_started_from(
    target: LoadedModel, tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    """Importance depends on rows: they are kept, so that measure compares with the same draft."""
    store = ArtifactStore(tmp_path / "artifacts")
    generated = make_generated(store, tiny_pair_dirs[0])
    settings = {
        "target": {"model": str(tiny_pair_dirs[0]), "device": "cpu"},
        "initialization": {
            "kind": "pruned",
            "layers": "importance",
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "sample_tokens": 50,
        },
        "max_steps": 2,
        "warmup_steps": 1,
        "decode_every": None,
        "batch_tokens": 60,
        "micro_batch_tokens": 64,
    }
    config = parse_config(settings, DistillConfig)
    artifact = distill_draft(config, store, inputs={"generate": generated})
    report = artifact.metrics["initialization"]
    assert len(report["layers"]) == 2
    assert len(report["block_influence"]) == 4
    samples = read_samples(generated, 50)
    assert sum(len(row) for row in samples) == 50
    expected = start_draft(config.initialization, target, seed=0, samples=samples)
    assert list(report["layers"]) == expected.report["layers"]
    undistilled = build_undistilled(config, {"distill": artifact}).model.state_dict()
    started = expected.draft.model.state_dict()
    assert all(torch.equal(undistilled[name], started[name]) for name in started)
    assert load_draft(artifact, device="cpu").shape.hidden_size == 32


def test_a_start_without_importance_keeps_no_rows(
    tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    store = ArtifactStore(tmp_path / "artifacts")
    generated = make_generated(store, tiny_pair_dirs[0])
    settings = {
        "target": {"model": str(tiny_pair_dirs[0]), "device": "cpu"},
        "initialization": {"kind": "pruned", "layers": [0, 3]},
        "max_steps": 2,
        "warmup_steps": 1,
        "decode_every": None,
        "batch_tokens": 60,
        "micro_batch_tokens": 64,
    }
    artifact = distill_draft(
        parse_config(settings, DistillConfig), store, inputs={"generate": generated}
    )
    assert artifact.metrics["initialization"] == {"kind": "pruned", "layers": [0, 3]}
    assert "importance_samples.json" not in {entry.path for entry in artifact.manifest.files}
