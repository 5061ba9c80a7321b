"""Owns the fixtures every test may ask for, and the walls around a run: offline, own cache.
Refuses to import torch or a stage at collection: helpers do, when a fixture is asked for.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import settings

# Before any test module imports torch or transformers: they read these once, at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests import helpers

# Equal examples in every run: a failure seen in one place can be seen again in another.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep fetched and converted models of tests out of the developer's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTILL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_network() -> Iterator[None]:
    """Refuse every connection but loopback, in this process, for the whole run."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in _LOOPBACK:
            raise AssertionError(f"a test tried to reach the network: {address}")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        yield


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory, tiny_pair_dirs: tuple[Path, Path]) -> Any:
    """Answers of the tiny target, as a training reads them."""
    from distill.artifacts import ArtifactStore
    from tests.distill_helpers import make_generated

    return make_generated(ArtifactStore(tmp_path_factory.mktemp("store")), tiny_pair_dirs[0])


@pytest.fixture(scope="module")
def target(tiny_pair_dirs: tuple[Path, Path]) -> Any:
    """The tiny target, loaded."""
    from distill.models import ModelConfig, load_target

    return load_target(ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu"))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread for a module's computations: its forked children, which have one, round alike."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """Byte-level BPE, about 300 tokens, ChatML template, <|im_end|> as eos and pad."""
    return helpers.make_tokenizer()


@pytest.fixture(scope="session")
def tiny_pair_dirs(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any
) -> tuple[Path, Path]:
    """(target_dir, draft_dir): 4 and 2 layers of width 64, unequal weights, one tokenizer.

    Session-wide: read them, never write into them.
    """
    root = tmp_path_factory.mktemp("pair")
    vocab_size = len(tiny_tokenizer)
    target = helpers.make_llama(vocab_size, layers=4, hidden=64, seed=1)
    draft = helpers.make_llama(vocab_size, layers=2, hidden=64, seed=2)
    return (
        helpers.save_pretrained_dir(root / "target", target, tiny_tokenizer),
        helpers.save_pretrained_dir(root / "draft", draft, tiny_tokenizer),
    )


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSONL file of 24 prompts over three tasks. Session-wide: read it, never write it."""
    path = tmp_path_factory.mktemp("corpus") / "prompts.jsonl"
    return helpers.write_jsonl(path, helpers.make_corpus_rows())


@pytest.fixture(scope="session")
def tiny_run_config(
    tmp_path_factory: pytest.TempPathFactory, tiny_pair_dirs: tuple[Path, Path], tiny_corpus: Path
) -> Path:
    """A YAML file that runs end to end in seconds. Session-wide: read it, never write it."""
    content = {
        "name": "tiny",
        "target": {"model": str(tiny_pair_dirs[0]), "dtype": "float32"},
        "generate": {
            "corpus": {"path": str(tiny_corpus), "held_out_fraction": 0.3},
            "samplings": [{"temperature": 1.0}, {"temperature": 0.0}],
            "max_new_tokens": 12,
            "batch_size": 4,
            "chunk_size": 8,
        },
        "distill": {
            "initialization": {"kind": "pruned", "layers": [0, 3]},
            "vocabulary_size": 200,
            "max_steps": 8,
            "warmup_steps": 2,
            "batch_tokens": 64,
            "micro_batch_tokens": 128,
            "eval_every": 4,
            "checkpoint_every": 2,
            "compute_dtype": "float32",
        },
        "measure": {
            "num_draft_tokens": 3,
            "max_new_tokens": 8,
            "max_prompts_per_task": 2,
            "batch_size": 2,
            "timing": {
                "num_prompts": 1,
                "max_new_tokens": 6,
                "repeats": 2,
                "cost_repeats": 2,
                "max_draft_tokens": 3,
            },
        },
        "serve": {"port": 0},
        "export": {"name": "tiny-draft", "num_draft_tokens": 3},
    }
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path
