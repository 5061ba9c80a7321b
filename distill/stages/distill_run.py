"""Runs a training for the distill stage: by which engine, who looks on, what is shown meanwhile.

Refuses to know where rows, models and sources come from, and what is saved.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.losses import Head
from distill.models import LoadedModel
from distill.training.loop import evaluate, train
from distill.training.probe import DecodeProbe
from distill.training.processes import Processes
from distill.training.run import Followers, OnStep, TrainingData, TrainingResult
from distill.training.select import Best, HeldOutScore
from distill.training.trackers import open_trackers
from distill.training.trl_engine import train_with_trl

if TYPE_CHECKING:
    from distill.stages.distill_draft import DistillConfig

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 10.0


@dataclass(frozen=True)
class Live:
    """Where a run's trackers write, and under which name."""

    directory: Path
    run_name: str


@dataclass(frozen=True)
class Asked:
    """All a training needs. `target` is None where nothing runs it: its head is enough."""

    config: DistillConfig
    target: LoadedModel | None
    draft: LoadedModel
    target_head: Head
    data: TrainingData
    live: Live
    reference: Any = None


def run_training(asked: Asked, *, work_dir: Path) -> TrainingResult:
    """Train the draft in place with the engine of the config."""
    config = asked.config
    if config.engine == "trl":
        return _run_trl(asked, work_dir)
    processes = Processes(asked.draft.device)
    probe = None
    if config.decode_every is not None and processes.is_main:
        probe = _probe(asked)
    with training_progress(config.max_steps) as on_step:
        return train(
            asked.draft.model,
            target_head=asked.target_head,
            data=asked.data,
            config=config,
            work_dir=work_dir,
            followers=_followers(asked, on_step, probe) if processes.is_main else None,
            processes=processes,
            reference=asked.reference,
        )


def _run_trl(asked: Asked, work_dir: Path) -> TrainingResult:
    """TRL keeps the last weights; both ends are scored as our own loop scores them."""
    config, model, target = asked.config, asked.draft.model, asked.target
    assert target is not None, "TRL runs the target itself"
    with training_progress(config.max_steps) as on_step:
        followers = _followers(asked, on_step, None)
        log: list[dict[str, Any]] = []

        def report(record: dict[str, Any]) -> None:
            log.append(record)
            followers.on_step(record["step"], record)
            for tracker in followers.trackers:
                tracker.log(record)

        def score() -> HeldOutScore:
            return evaluate(model, target_head=asked.target_head, data=asked.data, config=config)

        before = score()
        report({"step": 0, "held_out": asdict(before)})
        prompts = [
            row.input_ids_T[: int(row.positions_N[0]) + 1].tolist() for row in asked.data.rows
        ]
        result = train_with_trl(asked.draft, target, prompts, config=config, work_dir=work_dir)
        name = config.phases[0].name
        for number, told in enumerate(result.log, start=1):
            report(
                {
                    "step": number,
                    "loss_name": name,
                    "loss": told["loss"],
                    "grad_norm": told["grad_norm"],
                    "learning_rate": told["learning_rate"],
                    "num_tokens": round(told["completions/mean_length"] * result.num_rows_a_step),
                }
            )
        after = score()
        report({"step": config.max_steps, "held_out": asdict(after)})
        for tracker in followers.trackers:
            tracker.finish()
    return TrainingResult(
        best=Best(config.max_steps, after, {}),
        before=before,
        log=log,
        num_tokens=result.num_tokens,
        num_epochs=config.max_steps * result.num_rows_a_step / len(asked.data.rows),
        seconds=result.seconds,
    )


def _probe(asked: Asked) -> DecodeProbe:
    assert asked.target is not None, "a real decode runs the target"
    return DecodeProbe(
        asked.target,
        asked.data.held_out_rows,
        asked.config.decode,
        token_ids_V=asked.data.token_ids_V,
        seed=asked.config.seed,
    )


def _followers(asked: Asked, on_step: OnStep, probe: DecodeProbe | None) -> Followers:
    settings = asked.config.model_dump(mode="json")
    trackers = open_trackers(
        asked.config.trackers,
        directory=asked.live.directory,
        run_name=asked.live.run_name,
        settings=settings,
    )
    return Followers(on_step, probe, trackers)


@contextmanager
def training_progress(max_steps: int) -> Iterator[OnStep]:
    """A bar on a terminal, else a line in the log every few seconds; evaluations always logged."""
    from rich.console import Console
    from rich.progress import Progress

    last = time.perf_counter()
    bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    task = bar.add_task("distill", total=max_steps)

    def on_step(step: int, record: dict[str, Any]) -> None:
        nonlocal last
        bar.update(task, completed=step)
        now = time.perf_counter()
        if (score := record.get("held_out")) is not None:
            logger.info(
                "step %d of %d: held-out acceptance %.3f, greedy agreement %.3f",
                step,
                max_steps,
                score["acceptance"],
                score["greedy_agreement"],
            )
            said = f"distill, alpha {score['acceptance']:.3f}"
            for decoded in record.get("decoded", ()):
                said += f", tau {decoded['block_efficiency']:.2f}"
                logger.info(
                    "step %d of %d: decoded at temperature %g: alpha %.3f, tau %.2f",
                    step,
                    max_steps,
                    decoded["temperature"],
                    decoded["acceptance_rate"],
                    decoded["block_efficiency"],
                )
            bar.update(task, description=said)
            last = now
        elif now - last >= _LOG_EVERY_S:
            logger.info(
                "step %d of %d: %s %.4f", step, max_steps, record["loss_name"], record["loss"]
            )
            last = now

    with bar:
        yield on_step
