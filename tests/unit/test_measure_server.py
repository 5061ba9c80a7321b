"""Owns the tests of measuring a pair over HTTP: our own server, and a page as vLLM writes it.

Refuses to reach beyond this machine.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from distill.artifacts import ArtifactStore
from distill.backends.settings import HttpSettings
from distill.corpus import CorpusConfig
from distill.drafters.causal_lm import CausalLMDrafter
from distill.errors import BackendUnavailableError, ConfigError
from distill.models import load_target
from distill.report import served_table
from distill.runtime.decode import DecodeEngine, DecodeRequest
from distill.runtime.speculative import decode_batch
from distill.sampling import SamplingConfig
from distill.server.app import create_app
from distill.server.prompts import ServedPair
from distill.server.running import RunningServer
from distill.server.scheduler import Scheduler
from distill.stages import measure_server
from distill.stages.measure_pair import is_pair_config, load_pair_config
from distill.stages.measure_runs import HeldOutPrompt
from distill.stages.measure_server import ServedConfig, measure_served
from pipelines import pair
from tests import http_helpers
from tests import measure_helpers as given

K = 3


@pytest.fixture(scope="module")
def server(tiny_pair_dirs: tuple[Path, Path]) -> Iterator[RunningServer]:
    """Our own server with the tiny pair, three draft tokens a call."""
    target, draft = (load_target(given.model_config(path)) for path in tiny_pair_dirs)
    length = target.shape.max_position_embeddings

    def make_engine() -> DecodeEngine:
        return DecodeEngine(
            target.model,
            CausalLMDrafter(draft.model),
            num_draft_tokens=K,
            max_batch_size=2,
            max_length=length,
            tokenizer=target.tokenizer,
        )

    scheduler = Scheduler(make_engine, target.tokenizer, max_batch_size=2, max_waiting=8)
    served = ServedPair(
        model_id="target",
        tokenizer=target.tokenizer,
        stop_token_ids=target.stop_token_ids,
        vocabulary_size=len(target.tokenizer),
        max_length=length,
        num_draft_tokens=K,
    )
    with RunningServer(
        create_app(served, scheduler), scheduler, host="127.0.0.1", port=0
    ) as running:
        running.start()
        yield running


def _config(url: str, corpus: Path, **changes: Any) -> ServedConfig:
    settings: dict[str, Any] = {
        "server": HttpSettings(base_urls=(url,), model="target"),
        "corpus": CorpusConfig(path=corpus),
        "temperatures": (0.0, 1.0),
        "max_new_tokens": 12,
        "max_prompts_per_task": 2,
    }
    return ServedConfig(**{**settings, **changes})


def _url(server: RunningServer) -> str:
    return f"http://127.0.0.1:{server.port}"


PROMPTS = [HeldOutPrompt(f"p{n}", "chat", (5 + n, 40, 41), {}) for n in range(3)]


def test_our_own_server_counts_what_the_runtime_counts(
    server: RunningServer, tiny_pair_dirs: tuple[Path, Path], tiny_corpus: Path
) -> None:
    target_dir, _ = tiny_pair_dirs
    found = measure_served(
        _config(_url(server), tiny_corpus, temperatures=(0.0,)),
        given.model_config(target_dir),
        PROMPTS,
    )
    target, draft = (load_target(given.model_config(path)) for path in tiny_pair_dirs)
    engine = DecodeEngine(
        target.model,
        CausalLMDrafter(draft.model),
        num_draft_tokens=K,
        max_batch_size=1,
        max_length=64,
        tokenizer=target.tokenizer,
    )
    greedy = SamplingConfig(temperature=0.0)
    results = decode_batch(
        engine,
        [DecodeRequest(p.token_ids, 12, greedy, 0, target.stop_token_ids) for p in PROMPTS],
    )
    for row, result in zip(found["records"], results, strict=True):
        assert row["num_rounds"] == result.stats.num_rounds
        assert row["num_proposed"] == result.stats.num_proposed
        assert row["num_accepted"] == result.stats.num_accepted
        # The server counts rounds with a draft only: a plain step is in none of its counts.
        num_plain = result.stats.num_target_calls - result.stats.num_rounds
        assert row["num_emitted"] == result.stats.num_emitted - num_plain
        # An answer that ends at an accepted token is counted one test too high: see counts_of.
        assert row["num_tested"] - result.stats.num_tested in (0, 1)
    assert found["num_foreign_tokens"] == 0
    cell = found["cells"][0]
    expected = results.stats.num_accepted / results.stats.num_proposed
    assert cell["draft_acceptance_rate"]["value"] == pytest.approx(expected)
    assert cell["num_prompts"] == 3


def test_a_served_pair_is_measured_from_its_file(
    server: RunningServer, tiny_pair_dirs: tuple[Path, Path], tiny_corpus: Path, tmp_path: Path
) -> None:
    content = {
        "name": "over-http",
        "target": {"model": str(tiny_pair_dirs[0])},
        "served": {
            "server": {"kind": "http", "base_urls": [_url(server)], "model": "target"},
            "corpus": {"path": str(tiny_corpus)},
            "temperatures": [1.0],
            "max_new_tokens": 6,
            "max_prompts_per_task": 1,
        },
    }
    path = tmp_path / "served.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    assert is_pair_config(path)
    report, (written_to,) = pair.run(load_pair_config(path), ArtifactStore(tmp_path))
    assert written_to == tmp_path / "reports" / "over-http" / "served.json"
    written = json.loads(written_to.read_text())
    assert written == json.loads(json.dumps(report))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(served_table(report))
    text = " ".join(console.export_text().split())
    assert "block efficiency" in text
    assert "from the server's counters" in text
    assert "approximate: a round that ends" in text
    assert written["num_prompts"] == 3
    assert written["cells"][0]["block_efficiency"]["value"] >= 1.0


def _fake_pages(monkeypatch: pytest.MonkeyPatch, pages: list[str]) -> None:
    readings = iter(pages)

    def reader(url: str, settings: HttpSettings) -> Any:
        assert url.endswith("/metrics")
        return lambda: measure_server.read_counters(next(readings))

    monkeypatch.setattr(measure_server, "_reader", reader)


def _page(drafts: int, proposed: int, by_position: tuple[int, ...], generated: int) -> str:
    names = 'engine="0",model_name="target"'
    lines = [
        f"vllm:spec_decode_num_drafts_total{{{names}}} {drafts}",
        f"vllm:spec_decode_num_draft_tokens_total{{{names}}} {proposed}",
        f"vllm:spec_decode_num_accepted_tokens_total{{{names}}} {sum(by_position)}",
        f"vllm:generation_tokens_total{{{names}}} {generated}",
    ]
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{names},position="{i}"}} {n}'
        for i, n in enumerate(by_position)
    ]
    return "\n".join(lines)


def test_a_vllm_server_is_read_before_and_after_each_prompt(
    tiny_pair_dirs: tuple[Path, Path], tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = PROMPTS[0]

    def answer(number: int, body: Any) -> http_helpers.Reply:
        return http_helpers.Reply(http_helpers.vllm_answer([7] * 9, list(prompt.token_ids)))

    vllm = http_helpers.ScriptedServer(answer)
    # Three rounds that accept 2, 0 and 4 of 4; another client's two tokens come in between.
    before, after = _page(10, 40, (9, 8, 7, 6), 100), _page(13, 52, (11, 10, 8, 7), 111)
    _fake_pages(monkeypatch, [before, after])
    try:
        found = measure_served(
            _config(vllm.url, tiny_corpus, temperatures=(1.0,), max_new_tokens=9),
            given.model_config(tiny_pair_dirs[0]),
            [prompt],
        )
    finally:
        vllm.close()
    cell = found["cells"][0]
    assert found["num_draft_tokens"] == 4
    assert cell["acceptance_rate"]["value"] == 6 / 8
    assert cell["draft_acceptance_rate"]["value"] == 6 / 12
    assert cell["block_efficiency"]["value"] == 3.0
    assert found["num_foreign_tokens"] == 2


def test_two_servers_cannot_be_told_apart(
    tiny_pair_dirs: tuple[Path, Path], tiny_corpus: Path
) -> None:
    urls = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    config = _config(urls[0], tiny_corpus, server=HttpSettings(base_urls=urls))
    with pytest.raises(ConfigError, match="list one"):
        measure_served(config, given.model_config(tiny_pair_dirs[0]), PROMPTS)


def test_a_server_without_metrics_names_the_way_out(
    server: RunningServer, tiny_pair_dirs: tuple[Path, Path], tiny_corpus: Path
) -> None:
    config = _config(_url(server), tiny_corpus, metrics_path="/nowhere")
    with pytest.raises(BackendUnavailableError, match="metrics_path"):
        measure_served(config, given.model_config(tiny_pair_dirs[0]), PROMPTS)
