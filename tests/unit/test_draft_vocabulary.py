"""Owns the tests of the tokens a draft may propose travelling with it, whichever way it is reached.

Refuses to train: a tiny random model stands for a draft that was trained on a subset.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.artifacts import Artifact, ArtifactStore
from distill.bundle import copy_bundle
from distill.corpus import CorpusConfig, prompt_token_ids, read_corpus
from distill.drafters.causal_lm import CausalLMDrafter
from distill.errors import ModelNotFoundError
from distill.export import ExportConfig, export_draft
from distill.held_out import reporting_half
from distill.initialization import ExistingConfig, start_draft
from distill.models import (
    DraftVocabulary,
    LoadedModel,
    load_draft,
    load_target,
    model_revision,
    sources,
    write_vocabulary,
)
from distill.runtime.lossless import audit
from distill.runtime.speculative import make_drafter, speculative_decode
from distill.sampling import SamplingConfig
from distill.stages.measure import measure_acceptance
from distill.stages.measure_config import MeasureConfig
from tests import measure_helpers as given

IDS = (1, *range(40, 200))
SIZE = 300
WAYS = ("artifact", "artifact folder", "its draft folder", "bundle", "bundle's artifact")


@pytest.fixture(scope="module")
def target_dir(tiny_pair_dirs: tuple[Path, Path]) -> Path:
    return tiny_pair_dirs[0]


@pytest.fixture(scope="module")
def target(target_dir: Path) -> LoadedModel:
    return load_target(given.model_config(target_dir))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ArtifactStore:
    return ArtifactStore(tmp_path_factory.mktemp("vocabulary") / "artifacts")


@pytest.fixture(scope="module")
def distilled(store: ArtifactStore, target_dir: Path) -> Artifact:
    """The target's own weights: that it may not propose every token is all that makes it fail."""
    return given.distill_artifact(store, target_dir, target_dir, token_ids=IDS)


@pytest.fixture(scope="module")
def ways(
    store: ArtifactStore,
    distilled: Artifact,
    target_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Artifact | Path]:
    config = ExportConfig(target=given.model_config(target_dir), name="tiny")
    exported = export_draft(config, store, inputs={"distill": distilled})
    bundle = copy_bundle(exported, tmp_path_factory.mktemp("bundle") / "shipped")
    found = (distilled, distilled.path, distilled.path / "draft", bundle, exported)
    return dict(zip(WAYS, found, strict=True))


def loaded(source: Artifact | Path) -> LoadedModel:
    return load_draft(source, device="cpu")


# ------------------------------------------------------------------------------ one draft, any way


@pytest.mark.parametrize("way", WAYS)
def test_a_draft_knows_what_it_may_propose_whichever_way_it_is_reached(
    ways: dict[str, Artifact | Path], way: str
) -> None:
    draft = loaded(ways[way])
    assert draft.vocabulary == DraftVocabulary(IDS, 1.0)
    assert draft.vocabulary_token_ids == IDS


def test_a_draft_on_the_hub_brings_the_file_it_was_shipped_with(
    ways: dict[str, Artifact | Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sources.VOCABULARY_FILE.endswith(".json"), "else a snapshot would leave it out"
    monkeypatch.setattr(sources, "hub_snapshot", lambda *_, **__: ways["bundle"])
    config = given.model_config(Path("org/name"))
    assert load_target(config).vocabulary_token_ids == IDS


def test_a_model_without_the_file_may_propose_everything(target_dir: Path) -> None:
    assert load_draft(target_dir, device="cpu").vocabulary is None


def test_a_file_beside_a_model_of_another_name_is_not_its_own(
    tmp_path: Path, target_dir: Path
) -> None:
    shutil.copytree(target_dir, tmp_path / "model")
    shutil.copytree(target_dir, tmp_path / "model" / "draft")
    write_vocabulary(tmp_path, DraftVocabulary(IDS, 1.0))
    write_vocabulary(tmp_path / "model" / "draft", DraftVocabulary(IDS, 1.0))
    assert load_draft(tmp_path / "model", device="cpu").vocabulary is None


def test_with_other_tokens_to_propose_it_is_another_revision(
    tmp_path: Path, target_dir: Path
) -> None:
    shutil.copytree(target_dir, tmp_path / "draft")

    def revision() -> str:
        found = {model_revision(given.model_config(p)) for p in (tmp_path, tmp_path / "draft")}
        (one,) = found  # an artifact, or the folder in it: the same draft
        return one

    revisions = [revision()]
    for ids in (IDS, IDS[1:]):
        write_vocabulary(tmp_path, DraftVocabulary(ids, 1.0))
        revisions.append(revision())
    assert len(set(revisions)) == 3
    assert revisions[0] == model_revision(given.model_config(target_dir))


def test_a_training_that_starts_from_a_shipped_draft_chooses_its_tokens_anew(
    ways: dict[str, Artifact | Path], target: LoadedModel
) -> None:
    bundle = ways["bundle"]
    assert isinstance(bundle, Path)
    start = start_draft(ExistingConfig(model=given.model_config(bundle)), target, seed=0)
    assert start.draft.vocabulary is None


# ------------------------------------------------------------------------------ what drafts by it


@pytest.mark.parametrize("way", WAYS)
def test_no_drafter_of_a_loaded_draft_puts_any_probability_outside(
    ways: dict[str, Artifact | Path], way: str
) -> None:
    drafter: Any = make_drafter(loaded(ways[way]))
    drafter.start(vocabulary_size=SIZE, max_batch_size=2)
    sampling = SamplingConfig(temperature=1.5)
    for handle in (0, 1):
        drafter.join(handle, [5, 6, 7 + handle], sampling, seed=handle)
    proposal = drafter.propose([0, 1], [[5, 6, 7], [5, 6, 8]], [4, 4])
    inside = torch.zeros(SIZE, dtype=torch.bool)
    inside[list(IDS)] = True
    for row, num_tokens in enumerate(proposal.num_tokens_B):
        assert num_tokens > 0
        probs_KV = proposal.probs_BKV[row, :num_tokens]
        assert (probs_KV[:, ~inside] == 0).all()
        torch.testing.assert_close(probs_KV.sum(-1), torch.ones(num_tokens))
        assert set(proposal.tokens_BK[row, :num_tokens].tolist()) <= set(IDS)


def test_the_one_call_proposes_what_the_draft_may_unless_told_otherwise(
    ways: dict[str, Artifact | Path], target: LoadedModel
) -> None:
    def stats(draft: Any, vocabulary_token_ids: Any = None) -> Any:
        return speculative_decode(
            target,
            draft,
            [[5, 6, 7], [9] * 8, [33, 4]],
            max_new_tokens=24,
            vocabulary_token_ids=vocabulary_token_ids,
        ).stats

    whole = loaded(ways["bundle"])
    whole.vocabulary = None
    by_default = stats(loaded(ways["bundle"]))
    assert by_default == stats(whole, IDS)
    assert by_default.acceptance_rate < 1.0
    assert stats(loaded(ways["bundle"]), range(SIZE)) == stats(whole)
    assert stats(whole).acceptance_rate == 1.0  # the target's own weights


def test_an_audit_drafts_as_the_one_call_does(
    ways: dict[str, Artifact | Path], target: LoadedModel
) -> None:
    found = audit(target, loaded(ways["bundle"]), [[5, 6, 7], [9] * 8], max_new_tokens=24)
    assert found.acceptance_rate is not None
    assert found.acceptance_rate < 1.0


def test_a_drafter_made_by_hand_of_a_loaded_draft_has_its_tokens(
    ways: dict[str, Artifact | Path],
) -> None:
    draft = loaded(ways["bundle"])
    for given_ids, expected in ((None, IDS), ([3, 4], (3, 4))):
        drafter: Any = CausalLMDrafter.of(draft, vocabulary_token_ids=given_ids)
        drafter.start(vocabulary_size=SIZE, max_batch_size=1)
        assert tuple(drafter._ids_U.tolist()) == expected


# ------------------------------------------------------------------------------ measured again


@pytest.fixture(scope="module")
def prompts(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prompts a run reports on, as a file: one half of those that were held out."""
    rows = [json.loads(line) for line in tiny_corpus.read_text(encoding="utf-8").splitlines()]
    kept = reporting_half(row["id"] for row in rows)
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [json.dumps(row) + "\n" for row in rows if row["id"] in kept]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def measured(
    store: ArtifactStore, target_dir: Path, inputs: dict[str, Artifact], **changes: Any
) -> dict[str, Any]:
    config = given.measure_config(
        target_dir,
        law_samples=0,
        batch_size=8,
        undistilled=False,
        prompt_lookup=False,
        **changes,
    )
    return given.read_acceptance(measure_acceptance(config, store, inputs=inputs))


@pytest.fixture(scope="module")
def of_the_run(
    store: ArtifactStore,
    target_dir: Path,
    target: LoadedModel,
    tiny_corpus: Path,
    distilled: Artifact,
) -> dict[str, Any]:
    """What a run says of its own draft; it answers the held-out prompts itself, as a pair does."""
    template = given.held_out_rows(target_dir, num_prompts=1, temperatures=(0.7,))[-1]
    rows = []
    for prompt in read_corpus(CorpusConfig(path=tiny_corpus)).prompts:
        ids = prompt_token_ids(target.tokenizer, prompt, is_raw=False)
        length = len(template["completion_token_ids"])
        rows.append(
            {
                **template,
                "row_id": f"{prompt.prompt_id}/0/0",
                "prompt_id": prompt.prompt_id,
                "task": prompt.task,
                "prompt_token_ids": ids,
                "loss_mask": [0] * len(ids) + [1] * length,
            }
        )
    generated = given.generate_artifact(store, target_dir, rows, temperatures=(0.7,))
    return measured(store, target_dir, {"generate": generated, "distill": distilled})


@pytest.mark.parametrize("way", WAYS)
def test_measured_again_on_the_same_prompts_a_draft_has_the_alpha_its_run_gave_it(
    way: str,
    ways: dict[str, Artifact | Path],
    store: ArtifactStore,
    target_dir: Path,
    prompts: Path,
    of_the_run: dict[str, Any],
) -> None:
    source = ways[way]
    path = source.path if isinstance(source, Artifact) else source
    pair = measured(
        store,
        target_dir,
        {},
        draft=given.model_config(path),
        corpus=CorpusConfig(path=prompts),
    )
    assert pair["num_prompts"] == of_the_run["num_prompts"] == 12
    for temperature in (0.0, 1.0):
        again = given.cell(pair, "draft", temperature)
        first = given.cell(of_the_run, "distilled", temperature)
        assert {**again, "draft": ""} == {**first, "draft": ""}
        assert 0.0 < first["acceptance_rate"]["value"] < 1.0
        assert first["analytic_acceptance_rate"]["value"] < 1.0
    assert any(row["lost_to_vocabulary"] > 0.0 for row in pair["diagnosis"])


def test_a_target_that_was_shipped_as_a_draft_still_passes_the_tests_of_itself(
    ways: dict[str, Artifact | Path], store: ArtifactStore, prompts: Path
) -> None:
    bundle = ways["bundle"]
    assert isinstance(bundle, Path)
    config: MeasureConfig = given.measure_config(
        bundle,
        draft=given.model_config(bundle),
        corpus=CorpusConfig(path=prompts),
        law_samples=0,
        prompt_lookup=False,
    )
    found = given.read_acceptance(measure_acceptance(config, store, inputs={}))
    assert [test for test in found["self_tests"] if test["is_passed"] is False] == []
    assert given.cell(found, "draft", 1.0)["analytic_acceptance_rate"]["value"] < 1.0


# ------------------------------------------------------------------------------ the file


def test_the_file_reads_back_as_it_was_written(tmp_path: Path, target_dir: Path) -> None:
    shutil.copytree(target_dir, tmp_path / "model")
    written = DraftVocabulary((0, 7, SIZE - 1), 0.96875)
    write_vocabulary(tmp_path / "model", written)
    assert load_draft(tmp_path / "model", device="cpu").vocabulary == written


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "it is not JSON"),
        ("[1, 2]", "and holds list"),
        ('{"token_ids": [1]}', r"and holds \['token_ids'\]"),
        ('{"token_ids": [1], "coverage": 1.0, "ids": [2]}', "'ids'"),
        ('{"token_ids": [], "coverage": 1.0}', "one or more whole numbers"),
        ('{"token_ids": {"1": 2}, "coverage": 1.0}', "one or more whole numbers"),
        ('{"token_ids": [1.0], "coverage": 1.0}', "one or more whole numbers"),
        ('{"token_ids": [true], "coverage": 1.0}', "one or more whole numbers"),
        ('{"token_ids": [5, 4], "coverage": 1.0}', "4 follows 5"),
        ('{"token_ids": [4, 4], "coverage": 1.0}', "4 follows 4"),
        ('{"token_ids": [-1, 4], "coverage": 1.0}', "are -1 to 4, and the model has 0 to 299"),
        ('{"token_ids": [4, 300], "coverage": 1.0}', "are 4 to 300, and the model has 0 to 299"),
        ('{"token_ids": [4], "coverage": 1.5}', "coverage is 1.5"),
        ('{"token_ids": [4], "coverage": NaN}', "coverage is nan"),
        ('{"token_ids": [4], "coverage": "all"}', "coverage is 'all'"),
    ],
)
def test_a_file_that_says_nothing_clear_is_refused_by_its_path(
    content: str, words: str, tmp_path: Path, target_dir: Path
) -> None:
    shutil.copytree(target_dir, tmp_path / "model")
    path = tmp_path / "model" / "draft_vocabulary.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ModelNotFoundError, match=words) as caught:
        load_draft(tmp_path / "model", device="cpu")
    assert str(path) in str(caught.value)
    assert "export the draft again" in str(caught.value)
