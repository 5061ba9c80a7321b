"""Owns scripts/bench_distill: its options, the interleaved rounds, peak memory, the table.
Refuses to know how a system trains.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from distill import ArtifactStore, generate, load_config
from distill.errors import ConfigError, DistillError
from distill.initialization import initialize
from distill.losses import LOSSES
from distill.metrics import timing
from distill.models import load_target
from distill.target_store import knowledge_of
from distill.training.config import TrainingConfig
from distill.training.data import Row, read_rows
from distill.training.vocabulary import choose_vocabulary
from scripts.benchmarks import measuring
from scripts.benchmarks.distill_report import GKD, ON_POLICY, PLAIN, goals, text
from scripts.benchmarks.measuring import PeakMemory, Sample
from scripts.benchmarks.pairs import describe
from scripts.benchmarks.training import (
    LIVE,
    STORES,
    Contest,
    OursTraining,
    PlainLoop,
    Scoring,
    TimedSystem,
    TrlDistillation,
    TrlGkd,
)

DESCRIPTION = """Times distillation by our loop, each loss and each target store, beside TRL's
DistillationTrainer and GKDTrainer and a plain loop on whole logits: equal rows, equal batch,
interleaved. Peak memory is of a process that runs that system alone.

The target's forward pass is counted twice over. "One epoch": each token trained on is scored once.
"All epochs": as often as the config trains on an answer. A store scores it in the first epoch
alone, and the rivals, which keep nothing, in each. "subset": of the draft's head only the config's
vocabulary_size is trained, as the config does; the rivals have no such thing.

By default: the pair of configs/quickstart.yaml, whose answers are generated first where they are
not in the store yet. About 15 minutes on 2 cores, most of it for peak memory."""

RIVALS: Mapping[str, Callable[[Contest], TimedSystem]] = {
    PLAIN: PlainLoop,
    GKD: TrlGkd,
    ON_POLICY: TrlDistillation,
}
SUBSET, SUBSET_LOSSES, SUBSET_STORE = ", subset", ("forward_kl", "acceptance"), "final_hidden"


@dataclass(frozen=True)
class Settings:
    """One run; every number that a reader needs to repeat it."""

    batch_rows: int = 8
    steps: int = 2
    rounds: int = 3
    epochs: float = 1.0


def system_names(only: Sequence[str] = (), *, has_subset: bool = False) -> list[str]:
    """Ours as "ours LOSS @STORE" for every loss a store allows, then the rivals.

    ``only``: parts of names; empty for all. ``has_subset``: the config names a vocabulary size.
    """
    subset = [f"ours {loss}{SUBSET} @{SUBSET_STORE}" for loss in SUBSET_LOSSES if has_subset]
    names = [
        f"ours {loss} @{store}"
        for loss in LOSSES.names()
        for store in STORES
        if LOSSES.get(loss)().why_not(knowledge_of("none" if store == LIVE else store)) is None  # type: ignore[arg-type]
    ]
    names += [*subset, *RIVALS]
    chosen = [name for name in names if not only or any(part in name for part in only)]
    if not chosen:
        raise ConfigError(f"no system has {' or '.join(only)} in its name; there are: {names}")
    return chosen


def make(name: str, contest: Contest) -> TimedSystem:
    """A system by its name, ready to run."""
    if name in RIVALS:
        return RIVALS[name](contest)
    loss, store = loss_and_store(name)
    return OursTraining(contest, loss.removesuffix(SUBSET), store, is_subset=loss.endswith(SUBSET))


def scoring_of(name: str) -> str | None:
    """The scoring that a system takes its knowledge from; None: it scores in its steps."""
    if name in RIVALS:
        return None
    loss, store = loss_and_store(name)
    if store == LIVE:
        return None
    return f"scoring @{store}{SUBSET if loss.endswith(SUBSET) else ''}"


def loss_and_store(name: str) -> tuple[str, str]:
    """What one of our names says."""
    loss, _, store = name.removeprefix("ours ").partition(" @")
    return loss, store


def run_rounds(
    systems: Mapping[str, TimedSystem], rounds: int, tell: Callable[[str], None]
) -> dict[str, list[Sample]]:
    """Each system once a round, in rotated order, on the round's rows, after a warm-up of all."""
    for name, system in systems.items():
        tell(f"warm-up: {name}")
        system(0)
    samples: dict[str, list[Sample]] = {name: [] for name in systems}
    for turn in range(rounds):
        tell(f"round {turn + 1} of {rounds}")
        for name in measuring.rotated(list(systems), turn):
            samples[name].append(systems[name](turn))
    return samples


def run_bench(
    contest: Contest,
    settings: Settings,
    names: Sequence[str],
    peak_bytes_of: Callable[[str], int | None],
) -> dict[str, Any]:
    """Everything that is measured, as JSON-able values; :func:`text` prints it."""
    tell = measuring.Narrator("bench_distill")
    with measuring.quiet_libraries():
        systems: dict[str, TimedSystem] = {name: make(name, contest) for name in names}
        scoring = {
            scored: Scoring(contest, loss_and_store(name)[1], is_subset=scored.endswith(SUBSET))
            for name in names
            if (scored := scoring_of(name)) is not None
        }
        samples = run_rounds({**systems, **scoring}, settings.rounds, tell)
    peaks = {}
    for name in names:
        tell(f"peak memory: {name}")
        peaks[name] = peak_bytes_of(name)
    rows = [_row(name, samples, peaks[name], settings.epochs) for name in names]
    rivals = [row for row in rows if row["system"] in RIVALS]
    for row in rows:
        for key in ("one_epoch", "all_epochs"):
            best = max((rival[f"{key}_tokens_per_s"] for rival in rivals), default=None)
            row[f"{key}_ratio"] = None if best is None else row[f"{key}_tokens_per_s"] / best
    return {
        "conditions": timing.conditions(contest.target.device, contest.target.dtype),
        "target": describe(contest.target),
        "draft": describe(contest.draft),
        "settings": asdict(settings),
        "training": contest.config.model_dump(mode="json"),
        "tokens_a_step": [sum(r.num_positions for r in rows_) for rows_ in contest.turns],
        "rows": rows,
    }


def _row(
    name: str,
    samples: Mapping[str, Sequence[Sample]],
    peak_bytes: int | None,
    epochs: float,
) -> dict[str, Any]:
    mine = samples[name]
    loss, store = (name, "-") if name in RIVALS else loss_and_store(name)
    rate = measuring.throughput(mine)
    scored = scoring_of(name)
    scoring_s = 0.0 if scored is None else 1.0 / measuring.throughput(samples[scored]).median
    return {
        "system": name,
        "loss": loss,
        "store": store,
        "tokens_per_s": rate.to_dict(),
        # a token costs its share of a step and its share of the target's forward pass
        "one_epoch_tokens_per_s": 1.0 / (1.0 / rate.median + scoring_s),
        "all_epochs_tokens_per_s": 1.0 / (1.0 / rate.median + scoring_s / epochs),
        "peak_bytes": peak_bytes,
        "seconds": [sample.seconds for sample in mine],
        "num_tokens": [sample.run.num_tokens for sample in mine],
    }


# ------------------------------------------------------------------------------ the command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="bench_distill",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", type=Path, default=Path("configs/quickstart.yaml"), help="names the pair")
    add("--set", action="append", default=[], metavar="A.B=C", help="override a key of it")
    add("--artifacts", type=Path, default=Path("artifacts"), help="has the target's answers")
    add("--systems", nargs="+", default=[], metavar="PART", help="only names with such a part")
    add("--batch-rows", type=measuring.positive, default=default.batch_rows)
    add("--steps", type=measuring.positive, default=default.steps, help="in a round")
    add("--rounds", type=measuring.positive, default=default.rounds)
    add("--no-memory", action="store_true", help="leave out the processes for peak memory")
    add("--device", default="auto")
    add("--threads", type=measuring.positive, default=measuring.default_threads())
    add("--json", type=Path, metavar="OUT", help="write every number there")
    add("--peak-of", metavar="SYSTEM", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def prepare(options: argparse.Namespace) -> Contest:
    """Load the pair, and the first rows of the target's own answers, a batch for each round.

    Raises:
        ConfigError: too few answers.
    """
    config = load_config(options.config, options.set)
    measuring.pin_threads(options.threads)
    answers = generate(config.generate, ArtifactStore(options.artifacts))
    target = load_target(config.target.model_copy(update={"device": options.device}))
    draft = initialize(config.distill.initialization, target, seed=config.distill.seed)
    rows = read_rows(answers, "train", max_length=draft.shape.max_position_embeddings)
    needed = options.rounds * options.batch_rows
    if len(rows) < needed:
        raise ConfigError(
            f"{answers.path} has {len(rows)} answers to train on and {needed} are wanted; lower "
            f"--rounds or --batch-rows"
        )
    options.epochs = num_epochs(config.distill, rows)
    turns = [
        rows[start : start + options.batch_rows] for start in range(0, needed, options.batch_rows)
    ]
    contest = Contest(target, draft, turns, step_config(config.distill, turns, options.steps))
    size = config.distill.vocabulary_size
    if size is None:
        return contest
    chosen = choose_vocabulary(
        answers, size, num_tokens=contest.target_head.num_rows, always=target.stop_token_ids
    )
    return replace(contest, token_ids_V=torch.tensor(chosen.token_ids))


def num_epochs(config: TrainingConfig, rows: Sequence[Row]) -> float:
    """How often training as configured passes over the rows; at least once."""
    num_positions = sum(row.num_positions for row in rows)
    return max(1.0, config.max_steps * config.batch_tokens / num_positions)


def step_config(
    config: TrainingConfig, turns: Sequence[Sequence[Row]], steps: int
) -> TrainingConfig:
    """Our settings, made so that one step takes all rows of a turn in one forward pass."""
    padded = max(len(rows) * max(row.length for row in rows) for rows in turns)
    return TrainingConfig(
        max_steps=steps,
        batch_tokens=sum(row.num_positions for rows in turns for row in rows) + 1,
        micro_batch_tokens=padded,
        warmup_steps=0,
        eval_every=steps,
        eval_max_tokens=1,
        decode_every=None,
        trackers=(),
        learning_rate=config.learning_rate,
        max_grad_norm=config.max_grad_norm,
        compute_dtype=config.compute_dtype,
        train_embeddings=config.train_embeddings,
        seed=config.seed,
    )


def peak_of(contest: Contest, name: str) -> int | None:
    """Peak memory of this process while it trains with one system."""
    with measuring.quiet_libraries():
        system = make(name, contest)
        if name not in RIVALS and loss_and_store(name)[1] != LIVE:
            contest.target.model.to("meta")  # what is known of it is in the store
        with PeakMemory(contest.draft.device) as peak:
            system(0)
    return peak.peak_bytes


def _peak_in_another_process(arguments: Sequence[str], name: str) -> int | None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peak.json"
        command = [sys.executable, "-m", "scripts.benchmarks.distill", *arguments]
        command += ["--peak-of", name, "--json", str(out)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise ConfigError(f"{name} failed alone in a process: {done.stderr.strip()[-500:]}")
        peak: int | None = json.loads(out.read_text(encoding="utf-8"))["peak_bytes"]
        return peak


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; 2 for a mistake that the message explains."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(arguments)
    try:
        contest = prepare(options)
        if options.peak_of is not None:
            peak = peak_of(contest, options.peak_of)
            measuring.write_json(options.json, {"peak_bytes": peak})
            return 0
        settings = Settings(options.batch_rows, options.steps, options.rounds, options.epochs)
        results = run_bench(
            contest,
            settings,
            system_names(options.systems, has_subset=contest.token_ids_V is not None),
            lambda name: None if options.no_memory else _peak_in_another_process(arguments, name),
        )
    except DistillError as error:
        print(f"bench_distill: {error}", file=sys.stderr)
        return 2
    print(text(results))
    measuring.write_json(options.json, results | {"goals": goals(results)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
