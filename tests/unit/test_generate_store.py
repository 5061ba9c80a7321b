"""Owns what generate leaves in each target store: the target's own numbers, byte for byte again.

Refuses to know the packed forms (test_target_store.py) and training (test_distill_stores.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distill.artifacts import Artifact, ArtifactStore
from distill.backends import local
from distill.backends.base import BACKENDS, Completion, Scores, Unscored
from distill.backends.local import LocalBackend
from distill.corpus import CorpusConfig
from distill.errors import BackendUnavailableError, DiskSpaceError
from distill.losses import SampledKnowledge, TopKnowledge
from distill.models import LoadedModel, ModelConfig, load_target
from distill.stages import completions as storage
from distill.stages import generate_chunk
from distill.stages.generate import GenerateConfig, generate, generate_key
from distill.stages.generate_store import TargetKeeping
from distill.target_store import TargetStoreChoice
from distill.target_store.files import StoredTarget
from tests.generate_helpers import hashes_of, rows_of
from tests.helpers import make_corpus_rows, write_jsonl

STORES: list[Any] = ["top_k", {"kind": "top_k", "k": 3}, {"kind": "sampled", "num_draws": 9}]


@pytest.fixture(scope="module")
def target(tiny_pair_dirs: tuple[Path, Path]) -> LoadedModel:
    return load_target(ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [*make_corpus_rows(5), {"id": "long", "turns": ["sea " * 600]}]
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "p.jsonl", rows)


def _config(tiny_pair_dirs: tuple[Path, Path], corpus: Path, **changes: Any) -> GenerateConfig:
    settings: dict[str, Any] = {
        "target": ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu"),
        "corpus": CorpusConfig(path=corpus, held_out_fraction=0.25),
        "max_new_tokens": 6,
        "batch_size": 2,
        "chunk_size": 2,
    }
    return GenerateConfig(**{**settings, **changes})


def _laws(target: LoadedModel, row: dict[str, Any]) -> torch.Tensor:
    ids = row["prompt_token_ids"] + row["completion_token_ids"]
    with torch.no_grad():
        logits_TV = target.model(torch.tensor([ids])).logits[0].float()
    first = len(row["prompt_token_ids"]) - 1
    return logits_TV[first:-1, : len(target.tokenizer)].log_softmax(-1)


def _known(artifact: Artifact, row: dict[str, Any]) -> Any:
    first, count = row["target_offset"], len(row["completion_token_ids"])
    part = (row["target_file"], torch.arange(first, first + count))
    return StoredTarget(artifact).at([part])


def _answered(artifact: Artifact) -> list[dict[str, Any]]:
    return [row for row in rows_of(artifact) if row["status"] in ("completed", "truncated")]


def test_top_k_holds_the_targets_best_tokens_at_every_position_of_an_answer(
    target: LoadedModel, tiny_pair_dirs: tuple[Path, Path], corpus: Path, tmp_path: Path
) -> None:
    config = _config(tiny_pair_dirs, corpus, target_store={"kind": "top_k", "k": 3})
    artifact = generate(config, ArtifactStore(tmp_path))
    tails = []
    for row in _answered(artifact):
        known, law_TV = _known(artifact, row), _laws(target, row)
        assert isinstance(known, TopKnowledge)
        log_probs_TK, ids_TK = law_TV.topk(3)
        assert torch.equal(known.token_ids_NK, ids_TK)
        torch.testing.assert_close(known.log_probs_NK, log_probs_TK, rtol=0, atol=1e-3)
        tails.append(1 - log_probs_TK.exp().sum(-1))
    metrics = artifact.manifest.metrics
    cap = 1 - torch.cat(tails).mean().item()
    assert metrics["top_k_acceptance_cap"]["1"] == pytest.approx(cap, abs=1e-5)
    assert metrics["top_k_acceptance_cap"]["0.7"] > cap


def test_sampled_holds_draws_from_the_law_of_each_position(
    target: LoadedModel, tiny_pair_dirs: tuple[Path, Path], corpus: Path, tmp_path: Path
) -> None:
    config = _config(tiny_pair_dirs, corpus, target_store="sampled")
    artifact = generate(config, ArtifactStore(tmp_path))
    for row in _answered(artifact):
        known, law_TV = _known(artifact, row), _laws(target, row)
        assert isinstance(known, SampledKnowledge)
        weights_TV = torch.zeros_like(law_TV).scatter_add_(-1, known.token_ids_NM, known.weights_NM)
        # systematic draws: each count is 50 p rounded down or up
        assert ((weights_TV - law_TV.exp()).abs() < 1.01 / 50).all()
        torch.testing.assert_close(
            known.entropy_N, torch.special.entr(law_TV.exp()).sum(-1), rtol=2e-3, atol=2e-3
        )


@pytest.mark.parametrize("target_store", STORES, ids=str)
def test_the_answers_do_not_depend_on_what_is_kept_beside_them(
    tiny_pair_dirs: tuple[Path, Path], corpus: Path, tmp_path: Path, target_store: Any
) -> None:
    store = ArtifactStore(tmp_path)
    kept = generate(_config(tiny_pair_dirs, corpus, target_store=target_store), store)
    plain = generate(_config(tiny_pair_dirs, corpus, target_store="none"), store)
    nothing = {"target_file": None, "target_offset": None}
    assert [row | nothing for row in rows_of(kept)] == rows_of(plain)
    assert kept.manifest.metrics["target_store_bytes"] > 0
    assert plain.manifest.metrics["target_store_bytes"] == 0


@pytest.mark.parametrize("target_store", STORES, ids=str)
def test_a_build_interrupted_between_any_two_files_ends_with_the_same_bytes(
    tiny_pair_dirs: tuple[Path, Path],
    corpus: Path,
    tmp_path: Path,
    target_store: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = _config(tiny_pair_dirs, corpus, target_store=target_store)
    expected = hashes_of(generate(config, ArtifactStore(tmp_path / "quiet")))
    store = ArtifactStore(tmp_path / "killed")
    for die_at in (1, 2):  # a chunk's file is written and its rows are not
        calls = []

        def write(*args: Any, calls: list[int] = calls, die_at: int = die_at) -> None:
            calls.append(1)
            if len(calls) == die_at:
                raise RuntimeError("killed")
            storage.write_shard(*args)

        with monkeypatch.context() as patch:
            patch.setattr(
                generate_chunk, "storage", _With(storage, write_shard=write), raising=True
            )
            with pytest.raises(RuntimeError, match="killed"):
                generate(config, store)
    assert hashes_of(generate(config, store)) == expected


class _With:
    """A module with one function replaced; only where it is put."""

    def __init__(self, module: Any, **changes: Any) -> None:
        self._module, self._changes = module, changes

    def __getattr__(self, name: str) -> Any:
        return self._changes.get(name) or getattr(self._module, name)


@pytest.mark.parametrize("target_store", STORES, ids=str)
def test_answers_taken_over_from_another_build_get_the_same_bytes(
    tiny_pair_dirs: tuple[Path, Path], tmp_path: Path, target_store: Any
) -> None:
    """The corpus gained a row: what a killed build answered is scored again, not answered again."""
    rows = make_corpus_rows(4)
    small = write_jsonl(tmp_path / "small.jsonl", rows[:3])
    large = write_jsonl(tmp_path / "large.jsonl", rows)
    config = _config(tiny_pair_dirs, large, target_store=target_store)
    before = _config(tiny_pair_dirs, small, target_store=target_store)
    expected = hashes_of(generate(config, ArtifactStore(tmp_path / "quiet")))
    store = ArtifactStore(tmp_path / "store")
    built = generate(before, store)
    partial = store.partial_dir(generate_key(before, store))
    partial.mkdir(parents=True)
    for path in built.path.iterdir():
        if path.suffix == ".safetensors":
            (partial / path.name).write_bytes(path.read_bytes())
    assert hashes_of(generate(config, store)) == expected


class _FromServer(LocalBackend):
    """Gives the K best tokens along a text and nothing else, like a server."""

    gives: frozenset[Any] = frozenset({"top_k_scores"})

    @property
    def info(self) -> Any:
        return dataclasses.replace(super().info, gives=self.gives)

    def score(
        self, sequences: Sequence[Sequence[int]], *, top_k: int | None = None
    ) -> Iterator[Scores]:
        assert top_k is not None
        return super().score(sequences, top_k=top_k)


def _row(target: LoadedModel) -> tuple[dict[str, Any], Any]:
    ids = tuple(range(5, 12))
    return {"prompt_token_ids": [2, 3, 4], "seed": 1}, Completion(0, 0, ids, "length")


def test_a_server_that_gives_the_best_tokens_fills_top_k_as_the_target_itself_does(
    target: LoadedModel,
) -> None:
    answered = [_row(target)]
    here = TargetKeeping("top_k", LocalBackend(target, max_batch_size=1)).keep(answered).tensors
    there = TargetKeeping("top_k", _FromServer(target, max_batch_size=1)).keep(answered).tensors
    assert torch.equal(here["id_low_NK"], there["id_low_NK"])
    assert torch.equal(here["log_prob_NK"], there["log_prob_NK"])
    assert (there["tail_mass_NT"] >= here["tail_mass_NT"] - 1e-6).all()


@pytest.mark.parametrize("choice", STORES, ids=str)
def test_no_more_than_a_chunk_of_an_answers_laws_exists_at_once_and_none_of_its_prompt(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch, choice: Any
) -> None:
    monkeypatch.setattr(local, "_SCORE_CHUNK_TOKENS", 8)
    rows, vocab_size = [], len(target.tokenizer)

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.ndim == 2 and made.shape[1] == vocab_size:
                rows.append((func.overloadpacket.__name__, made.shape[0]))
            return made

    row = {"prompt_token_ids": list(range(2, 102)), "seed": 1}
    ids = tuple(index % 200 + 5 for index in range(60))
    settings = pydantic.TypeAdapter(TargetStoreChoice).validate_python(choice)
    keeping = TargetKeeping(settings, LocalBackend(target, max_batch_size=1))
    with Watching():
        tensors = keeping.keep([(row, Completion(0, 0, ids, "length"))]).tensors
    assert max(number for _, number in rows) == 8
    assert sum(number for name, number in rows if "log_softmax" in name) == len(ids)
    monkeypatch.undo()
    whole = keeping.keep([(row, Completion(0, 0, ids, "length"))]).tensors
    assert all(torch.equal(tensors[name], whole[name]) for name in whole if "tail" not in name)


class _Refusing(_FromServer):
    """A server that will not score texts of one length."""

    refused_length = 0

    def score(self, sequences: Any, *, top_k: int | None = None) -> Iterator[Any]:
        for index, sequence in enumerate(sequences):
            if len(sequence) == self.refused_length:
                yield Unscored(index, "rejected", "it does not fit the server's context of 8")
            else:
                (scores,) = super().score([sequence], top_k=top_k)
                yield dataclasses.replace(scores, sequence_index=index)


def test_an_answer_a_server_will_not_score_is_rejected_with_the_cause_and_the_build_ends(
    target: LoadedModel,
    tiny_pair_dirs: tuple[Path, Path],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = generate(_config(tiny_pair_dirs, corpus, target_store="top_k"), ArtifactStore(tmp_path))
    answered = _answered(whole)
    lengths = [len(row["loss_mask"]) for row in answered]
    refused = max(set(lengths), key=lengths.count)
    assert 0 < lengths.count(refused) < len(lengths)

    def make(*_: Any, **__: Any) -> LocalBackend:
        backend = _Refusing(target, max_batch_size=2)
        backend.refused_length = refused
        return backend

    monkeypatch.setitem(BACKENDS._items, "refusing", make)
    config = _config(
        tiny_pair_dirs, corpus, target_store="top_k", backend="refusing", chunk_size=100
    )
    artifact = generate(config, ArtifactStore(tmp_path))
    found = {row["row_id"]: row for row in rows_of(artifact)}
    for row in answered:
        mine = found[row["row_id"]]
        if len(row["loss_mask"]) == refused:
            assert (mine["status"], mine["completion_token_ids"]) == ("rejected", [])
            assert "server's context of 8" in mine["reason"]
            assert mine["target_file"] is None
            continue
        assert mine["status"] == row["status"]
        assert torch.equal(_known(artifact, mine).token_ids_NK, _known(whole, row).token_ids_NK), (
            "the places of the others are those of a file without the row"
        )


def test_a_server_that_scores_nothing_ends_the_build(target: LoadedModel) -> None:
    backend = _Refusing(target, max_batch_size=1)
    backend.refused_length = 10
    keeping = TargetKeeping("top_k", backend)
    assert not keeping.keep([_row(target)]).tensors
    with pytest.raises(BackendUnavailableError, match=r"none of 2 .*server's context of 8"):
        keeping.keep([_row(target), _row(target)])


def test_a_backend_that_cannot_give_what_a_store_keeps_is_refused_first(
    target: LoadedModel,
) -> None:
    server = _FromServer(target, max_batch_size=1)
    with pytest.raises(BackendUnavailableError, match=r"sampled.*backend: local"):
        TargetKeeping("sampled", server)
    server.gives = frozenset()
    with pytest.raises(BackendUnavailableError, match=r"top_k.*vllm"):
        TargetKeeping("top_k", server)
    TargetKeeping("none", server)


def test_what_would_not_fit_the_disk_is_refused_with_the_bytes_a_token_takes(
    tiny_pair_dirs: tuple[Path, Path],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from distill.stages import generate as stage

    def refuse(directory: Path, needed: int, *, what: str) -> None:
        raise DiskSpaceError(f"{needed} bytes for {what}")

    monkeypatch.setattr(stage, "require_free_bytes", refuse)
    config = _config(tiny_pair_dirs, corpus, target_store={"kind": "top_k", "k": 10})
    with pytest.raises(DiskSpaceError, match=r"up to 48 bytes.*top_k"):
        generate(config, ArtifactStore(tmp_path))


def test_a_store_is_part_of_the_key(
    tiny_pair_dirs: tuple[Path, Path], corpus: Path, tmp_path: Path
) -> None:
    store = ArtifactStore(tmp_path)
    keys = {
        json.dumps(choice): generate_key(
            _config(tiny_pair_dirs, corpus, target_store=choice), store
        ).fingerprint
        for choice in (*STORES, "none", "final_hidden")
    }
    assert len(set(keys.values())) == 5
