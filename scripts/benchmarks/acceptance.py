"""Owns scripts/bench_acceptance: drafts trained by each loss for equal wall time, and their alpha.
Refuses to know how a draft is trained and decoded: the stage and the decode loop do both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from distill import ArtifactStore, distill_draft, generate, load_config, speculative_decode
from distill.artifacts import Artifact
from distill.errors import ConfigError
from distill.metrics import timing
from distill.metrics.intervals import Estimate, estimate, ratio, ratio_difference
from distill.models import LoadedModel, load_draft, load_target
from distill.sampling import SamplingConfig
from distill.stages.distill_draft import DistillConfig, build_undistilled
from distill.training.config import TrlConfig
from distill.training.held_out_rows import read_reporting_rows
from distill.training.trl_engine import settings_for_trl
from scripts.benchmarks import measuring
from scripts.benchmarks.acceptance_report import FORWARD_KL, GOALS, TRL, goals, text
from scripts.benchmarks.pairs import describe

DESCRIPTION = """Trains one draft with each loss for equal wall time, several seeds each, and
decodes held-out prompts with it: accepted / tested at temperature 0 and 1, with intervals over
prompts, paired with plain forward KL and with TRL's on-policy trainer. Weights are chosen on one
half of the held-out prompts, and what is decoded is the other half. The system that the goals are
for (--ours) is named before anything is scored: the best of many would look better than it is.

By default: the pair of configs/quickstart.yaml, 10 minutes and 3 seeds a system: about 5 hours.
Trainings are artifacts, so a run that was stopped goes on where it was."""

UNDISTILLED, SCHEDULE = "undistilled", "the config's schedule"
_WARMED: Mapping[str, Any] = {
    "loss": "total_variation",
    "warm_start": {"name": "forward_kl", "fraction": 0.3},
}
SYSTEMS: Mapping[str, Mapping[str, Any] | None] = {
    UNDISTILLED: None,
    "cross_entropy": {"loss": "cross_entropy"},
    FORWARD_KL: {"loss": "forward_kl"},
    "reverse_kl": {"loss": "reverse_kl"},
    "jsd": {"loss": "jsd"},
    "total_variation after forward_kl": _WARMED,
    "acceptance": {"loss": "acceptance"},
    "acceptance_hybrid": {"loss": "acceptance_hybrid"},
    SCHEDULE: {},
    # TRL's own default divergence; it has no vocabulary subset
    TRL: {"engine": "trl", "loss": "reverse_kl", "warm_start": None, "vocabulary_size": None},
}
_LONG_PILOT = 3  # times the short one


@dataclass(frozen=True)
class Settings:
    """One run; every number that a reader needs to repeat it."""

    minutes: float = 10.0
    seeds: int = 3
    ours: str = SCHEDULE
    pilot_steps: int = 8
    num_prompts: int = 32
    new_tokens: int = 64
    num_draft_tokens: int = 4
    temperatures: tuple[float, ...] = (0.0, 1.0)
    trl: TrlConfig = field(default_factory=TrlConfig)


@dataclass(frozen=True)
class Trained:
    """A draft of one system and seed; the last three are None where nothing was trained."""

    draft: LoadedModel
    train_s: float | None = None
    num_steps: int | None = None
    held_out: Mapping[str, float] | None = None


class Bench:
    """Trains and decodes over one pair and the target's answers."""

    def __init__(
        self, config: DistillConfig, generated: Artifact, store: ArtifactStore, settings: Settings
    ) -> None:
        self.config, self.generated, self.store = config, generated, store
        self.settings = settings
        self.target = load_target(config.target)
        rows = read_reporting_rows(generated, max_length=self.target.shape.max_position_embeddings)
        asked = {
            tuple(row.input_ids_T[: int(row.positions_N[0]) + 1].tolist()): None for row in rows
        }
        self.prompts = [list(ids) for ids in list(asked)[: settings.num_prompts]]

    def train(self, name: str, seed: int) -> Trained:
        """A draft that was trained for the time given, or as it starts."""
        changes = SYSTEMS[name]
        if changes is None:
            return Trained(build_undistilled(self.config, self._measured_on()))
        config = self._config({**changes, "seed": self.config.seed + seed})
        lengths = (self.settings.pilot_steps, _LONG_PILOT * self.settings.pilot_steps)
        short, long = (self._distill(self._of_length(config, steps)).metrics for steps in lengths)
        steps = max(2, round(60.0 * self.settings.minutes / step_seconds(short, long)))
        trained = self._distill(self._of_length(config, steps))
        return Trained(
            load_draft(trained, dtype=config.target.dtype, device=config.target.device),
            trained.metrics["train_s"],
            trained.metrics["num_steps"],
            trained.metrics["held_out_after"],
        )

    def _measured_on(self) -> Mapping[str, Artifact] | None:
        """A training that holds the rows importance was measured on, where the start has any."""
        if not self.config.initialization.num_sample_tokens:
            return None
        length = self.settings.pilot_steps
        return {"distill": self._distill(self._of_length(self._config({}), length))}

    def _config(self, changes: Mapping[str, Any]) -> DistillConfig:
        settings = self.config.model_dump(mode="json")
        if changes.get("engine") == "trl":
            settings |= settings_for_trl() | {"trl": self.settings.trl.model_dump()}
        if "loss" in changes:
            settings["warm_start"] = None
        return DistillConfig.model_validate({**settings, "decode_every": None, **changes})

    def _of_length(self, config: DistillConfig, steps: int) -> DistillConfig:
        """The same schedule over so many steps; the best of about eight evaluations is kept."""
        changes = {"max_steps": steps, "warmup_steps": min(config.warmup_steps, steps // 10)}
        if config.engine == "own":
            changes["eval_every"] = max(1, steps // 8)
        return config.model_copy(update=changes)

    def _distill(self, config: DistillConfig) -> Artifact:
        return distill_draft(config, self.store, inputs={"generate": self.generated})

    def counts(self, trained: Trained, temperature: float) -> list[tuple[int, int]]:
        """(accepted, tested) of every prompt."""
        results = speculative_decode(
            self.target,
            trained.draft,
            self.prompts,
            SamplingConfig(temperature=temperature),
            num_draft_tokens=self.settings.num_draft_tokens,
            max_new_tokens=self.settings.new_tokens,
        )
        return [(result.stats.num_accepted, result.stats.num_tested) for result in results]


def step_seconds(short: Mapping[str, Any], long: Mapping[str, Any]) -> float:
    """Seconds a step takes, from two trainings' metrics: what both need to begin cancels out.

    Divided by its steps, one short training would charge its beginning to every step, and TRL,
    which begins inside of its clock, would be given fewer steps than fit into the time.

    Raises:
        ConfigError: the longer one was not slower.
    """
    more_s = long["train_s"] - short["train_s"]
    more_steps = long["num_steps"] - short["num_steps"]
    if more_s <= 0 or more_steps <= 0:
        raise ConfigError(
            f"a pilot of {long['num_steps']} steps took {long['train_s']:.3g} s and one of "
            f"{short['num_steps']} took {short['train_s']:.3g} s: a step's time cannot be told. "
            f"Raise --pilot-steps, and leave the machine to this."
        )
    seconds: float = more_s / more_steps
    return seconds


def run_bench(bench: Bench, names: Sequence[str]) -> dict[str, Any]:
    """Everything that is measured, as JSON-able values; :func:`text` prints it.

    Seeds are the outer loop: after each, every system has been given the same time.
    """
    settings, tell = bench.settings, measuring.Narrator("bench_acceptance")
    trained: dict[str, list[Trained]] = {name: [] for name in names}
    counts: dict[tuple[str, float], list[list[tuple[int, int]]]] = {}
    with measuring.quiet_libraries():
        for seed in range(settings.seeds):
            for name in measuring.rotated(list(names), seed):
                tell(f"seed {seed + 1} of {settings.seeds}: {name}")
                one = bench.train(name, seed)
                trained[name].append(one)
                for temperature in settings.temperatures:
                    counts.setdefault((name, temperature), []).append(
                        bench.counts(one, temperature)
                    )
    rows = [
        _row(name, temperature, trained[name], counts, bench.config.seed)
        for temperature in settings.temperatures
        for name in names
    ]
    return {
        "conditions": timing.conditions(bench.target.device, bench.target.dtype),
        "target": describe(bench.target),
        "settings": asdict(settings) | {"trl": settings.trl.model_dump()},
        "num_prompts": len(bench.prompts),
        "rows": rows,
    }


def _row(
    name: str,
    temperature: float,
    trained: Sequence[Trained],
    counts: Mapping[tuple[str, float], Sequence[Sequence[tuple[int, int]]]],
    seed: int,
) -> dict[str, Any]:
    mine = _by_prompt(counts[name, temperature])
    key = "greedy_agreement" if temperature == 0 else "acceptance"
    analytic = [one.held_out[key] for one in trained if one.held_out is not None]
    differences = {
        other: difference(mine, _by_prompt(counts[other, temperature]), seed=seed).to_dict()
        for other in GOALS
        if other != name and (other, temperature) in counts
    }
    return {
        "system": name,
        "temperature": temperature,
        "acceptance_rate": estimate(mine, ratio, seed=seed).to_dict(),
        "acceptance_rate_by_seed": [
            sum(a for a, _ in one) / max(1, sum(t for _, t in one))
            for one in counts[name, temperature]
        ],
        "differences": differences,
        "analytic": float(np.mean(analytic)) if analytic else None,
        "num_steps": [one.num_steps for one in trained],
        "train_s": [one.train_s for one in trained],
    }


def _by_prompt(seeds: Sequence[Sequence[tuple[int, int]]]) -> np.ndarray[Any, Any]:
    """Counts of each prompt over all seeds: a prompt is what an interval is over."""
    summed: np.ndarray[Any, Any] = np.asarray(seeds, dtype=np.float64).sum(axis=0)
    return summed


def difference(mine: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any], *, seed: int) -> Estimate:
    """Alpha of one system less that of another, over the same prompts."""
    return estimate(np.concatenate([mine, theirs], axis=1), ratio_difference, seed=seed)


# ------------------------------------------------------------------------------ the command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="bench_acceptance",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", type=Path, default=Path("configs/quickstart.yaml"), help="names the pair")
    add("--set", action="append", default=[], metavar="A.B=C", help="override a key of it")
    add("--artifacts", type=Path, default=Path("artifacts"), help="has the target's answers")
    add("--systems", nargs="+", default=[], metavar="PART", help="only names with such a part")
    add("--minutes", type=float, default=default.minutes, help="of training, for each")
    add("--seeds", type=measuring.positive, default=default.seeds)
    add("--ours", choices=candidates(), default=default.ours, help="the system goals are for")
    add(
        "--pilot-steps",
        type=measuring.positive,
        default=default.pilot_steps,
        help=f"of the shorter of two pilots; the other has {_LONG_PILOT} times as many",
    )
    add("--num-prompts", type=measuring.positive, default=default.num_prompts)
    add("--new-tokens", type=measuring.positive, default=default.new_tokens)
    add("--num-draft-tokens", type=measuring.positive, default=default.num_draft_tokens)
    trl = TrlConfig()
    add("--trl-batch-size", type=measuring.positive, default=trl.batch_size, help="prompts")
    add("--trl-new-tokens", type=measuring.positive, default=trl.max_new_tokens)
    add("--threads", type=measuring.positive, default=measuring.default_threads())
    add("--json", type=Path, metavar="OUT", help="write every number there")
    return parser.parse_args(arguments)


def candidates() -> list[str]:
    """The systems that can be named as ours: neither a yardstick nor the untrained draft."""
    return [name for name in SYSTEMS if name not in (UNDISTILLED, *GOALS)]


def chosen_systems(only: Sequence[str]) -> list[str]:
    """The names with one of the parts; all of them for none."""
    names = [name for name in SYSTEMS if not only or any(part in name for part in only)]
    if not names:
        raise ConfigError(
            f"no system has {' or '.join(only)} in its name; there are: {', '.join(SYSTEMS)}"
        )
    return names


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Take the target's answers, then train and decode."""
    names = chosen_systems(options.systems)
    config = load_config(options.config, options.set)
    measuring.pin_threads(options.threads)
    store = ArtifactStore(options.artifacts)
    settings = Settings(
        minutes=options.minutes,
        seeds=options.seeds,
        ours=options.ours,
        pilot_steps=options.pilot_steps,
        num_prompts=options.num_prompts,
        new_tokens=options.new_tokens,
        num_draft_tokens=options.num_draft_tokens,
        trl=TrlConfig(batch_size=options.trl_batch_size, max_new_tokens=options.trl_new_tokens),
    )
    bench = Bench(config.distill, generate(config.generate, store), store, settings)
    return run_bench(bench, names)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; 2 for a mistake that the message explains."""
    options = parse(arguments)
    return measuring.publish("bench_acceptance", lambda: run(options), text, goals, options.json)


if __name__ == "__main__":
    sys.exit(main())
