"""Owns scripts/gpu_check: exactness, speed and 100 training steps on a CUDA device, where one is.
Refuses to run anything where there is none; ``--device cpu`` is for testing the checks themselves.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from distill import ArtifactStore, distill_draft, generate, load_config
from distill.metrics import timing
from distill.runtime.speculative import decode_batch
from scripts.benchmarks import measuring, ours, report
from scripts.benchmarks.contest import Contest, Settings
from scripts.benchmarks.ours import Ours, Pair
from scripts.benchmarks.pairs import made_up_pair
from scripts.benchmarks.runtime import run_contest

NOTHING = "no CUDA device: nothing was run"
DESCRIPTION = """Checks this library on a CUDA device in under 8 minutes: exact decoding in float32,
a short bench_runtime on a made-up pair of the quickstart's shape, 100 training steps."""


@dataclass(frozen=True)
class Check:
    """One statement, whether it holds here, and the numbers behind it."""

    name: str
    is_passed: bool
    detail: str


def exact_pair(device: torch.device, *, vocab_size: int = 300) -> Pair:
    """A small float32 pair that agrees on many tokens and disagrees on many."""
    return made_up_pair(
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=vocab_size,
        device=device,
        dtype=torch.float32,
        depth_scale=0.4,
    )


def _engine(pair: Pair, num_draft_tokens: int, *, max_batch_size: int, max_length: int) -> Ours:
    return Ours(
        pair.target,
        pair.make_drafter() if num_draft_tokens else None,
        num_draft_tokens=num_draft_tokens,
        max_batch_size=max_batch_size,
        max_length=max_length,
    )


def check_greedy(device: torch.device, *, new_tokens: int = 256) -> Check:
    """Plain, speculative and transformers' own decoding give the same tokens."""
    pair = exact_pair(device)
    prompts = [[7, 8, 9], list(range(20, 60)), [5], [100, 3] * 9]
    made = {}
    for num_draft_tokens in (0, 4):
        asked = ours.requests(prompts, temperature=0.0, new_tokens=new_tokens, seed=0)
        engine = _engine(pair, num_draft_tokens, max_batch_size=4, max_length=64 + new_tokens)
        results = decode_batch(engine.engine, asked)
        made[num_draft_tokens] = [result.token_ids for result in results]
    stats = engine.engine.stats
    theirs = [_generated(pair.target.model, prompt, new_tokens) for prompt in prompts]
    alpha = stats.acceptance_rate or 0.0
    return Check(
        "greedy: plain = speculative = transformers",
        made[0] == made[4] == theirs and 0.05 < alpha < 0.95,
        f"{len(prompts)} prompts, {new_tokens} tokens each, alpha {alpha:.2f}",
    )


@torch.inference_mode()
def _generated(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    ids_1P = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids_1P,
        attention_mask=torch.ones_like(ids_1P),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def check_ragged_batch(device: torch.device, *, new_tokens: int = 96) -> Check:
    """Rows of unequal lengths, sampled together, give what each gives alone."""
    pair = exact_pair(device)
    prompts = [[3 + n] * (1 + 7 * n) for n in range(7)]
    asked = ours.requests(prompts, temperature=1.0, new_tokens=new_tokens, seed=5)
    together = decode_batch(
        _engine(pair, 3, max_batch_size=3, max_length=64 + new_tokens).engine, asked
    )
    alone = [
        decode_batch(
            _engine(pair, 3, max_batch_size=1, max_length=64 + new_tokens).engine, [request]
        )[0]
        for request in asked
    ]
    same = [a.token_ids == b.token_ids for a, b in zip(together, alone, strict=True)]
    return Check(
        "sampled: rows in a batch = rows alone",
        all(same),
        f"{sum(same)} of {len(same)} rows equal, {new_tokens} tokens each",
    )


def check_sampled_law(device: torch.device, *, num_samples: int = 4000) -> Check:
    """Two tokens drawn speculatively follow the target's joint law (chi-square)."""
    from scipy.stats import chi2

    size, prompt = 12, [1, 2, 3]
    pair = exact_pair(device, vocab_size=size)
    engine = _engine(pair, 2, max_batch_size=200, max_length=8)
    asked = ours.requests([prompt] * num_samples, temperature=1.0, new_tokens=2, seed=11)
    counts = torch.zeros(size, size, dtype=torch.float64)
    for result in decode_batch(engine.engine, asked):
        counts[result.token_ids[0], result.token_ids[1]] += 1
    expected = _joint_law(pair.target.model, prompt, size) * num_samples
    is_common = expected >= 5
    observed = torch.cat((counts[is_common], counts[~is_common].sum().view(1)))
    wanted = torch.cat((expected[is_common], expected[~is_common].sum().view(1)))
    statistic = float(((observed - wanted).square() / wanted.clamp_min(1e-9)).sum())
    p_value = float(chi2.sf(statistic, len(wanted) - 1))
    return Check(
        "sampled: two tokens follow the target's joint law",
        p_value > 1e-4,
        f"chi-square {statistic:.1f} in {len(wanted)} cells, {num_samples} samples, p "
        f"{p_value:.3f}",
    )


@torch.inference_mode()
def _joint_law(model: Any, prompt: list[int], size: int) -> torch.Tensor:
    ids = torch.tensor([[*prompt, token] for token in range(size)], device=model.device)
    probs: torch.Tensor = model(ids).logits.double().softmax(-1).cpu()
    return probs[0, len(prompt) - 1].unsqueeze(1) * probs[:, len(prompt)]


def check_training(device: torch.device, *, num_steps: int = 100) -> Check:
    """Generate with a small target, distill a draft: held-out acceptance rises."""
    from tests import helpers

    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        tokenizer = helpers.make_tokenizer()
        target = helpers.make_llama(len(tokenizer), layers=4, hidden=64, seed=1)
        helpers.save_pretrained_dir(root / "target", target, tokenizer)
        helpers.write_jsonl(root / "prompts.jsonl", helpers.make_corpus_rows(48))
        content = {
            "name": "check",
            "target": {"model": str(root / "target"), "dtype": "float32", "device": str(device)},
            "generate": {
                "corpus": {"path": str(root / "prompts.jsonl"), "held_out_fraction": 0.2},
                "max_new_tokens": 48,
                "batch_size": 16,
            },
            "distill": {
                "initialization": {"kind": "pruned", "layers": [0]},
                "max_steps": num_steps,
                "warmup_steps": min(5, num_steps - 1),
                "batch_tokens": 512,
                "learning_rate": 3e-3,
                "eval_every": num_steps,
            },
        }
        (root / "check.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
        config, store = load_config(root / "check.yaml"), ArtifactStore(root / "artifacts")
        answers = generate(config.generate, store)
        metrics = distill_draft(config.distill, store, inputs={"generate": answers}).metrics
    before = metrics["held_out_before"]["acceptance"]
    after = metrics["held_out_after"]["acceptance"]
    return Check(
        f"training: {num_steps} steps raise held-out acceptance",
        after > before,
        f"{before:.3f} -> {after:.3f}, {metrics['tokens_per_s']:.0f} tokens/s",
    )


CHECKS: tuple[Callable[[torch.device], Check], ...] = (
    check_greedy,
    check_ragged_batch,
    check_sampled_law,
    check_training,
)


def short_bench(device: torch.device) -> dict[str, Any]:
    """bench_runtime on made-up weights of the quickstart target's shape, in bfloat16."""
    pair = made_up_pair(
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        vocab_size=49152,
        device=device,
        dtype=torch.bfloat16,
    )
    settings = Settings(
        new_tokens=64, rounds=2, pilot_tokens=32, assistant_tokens=(2, 4), sweep_tokens=16
    )
    prompts = [[(17 * n + 31 * i) % 49152 for i in range(30 + 5 * n)] for n in range(8)]
    return run_contest(Contest(pair, prompts, settings), empty_bytes=0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every check and print it; 1 where one does not hold."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=DESCRIPTION)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-bench", action="store_true", help="only the checks")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(NOTHING)
        return 0
    started = time.perf_counter()
    conditions = timing.conditions(device, torch.float32)
    print(f"gpu_check on {conditions['device_name']}, torch {conditions['torch']}")
    failed = 0
    with measuring.quiet_libraries():
        for run in CHECKS:
            check = run(device)
            failed += not check.is_passed
            word = "ok  " if check.is_passed else "FAIL"
            print(f"{word}  {check.name}: {check.detail}", flush=True)
    if not options.no_bench:
        print("\n" + report.runtime_text(short_bench(device)))
    print(f"\n{failed} checks failed; {time.perf_counter() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
