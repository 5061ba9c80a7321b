"""Several processes on one build, prompts that changed after a kill, settings that were mixed.

Fault classes met here: resume keyed on row index (reordered or filtered input redoes or skips the
wrong rows), a rerun that silently starts anew, shards whose number changes the result.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from distill.artifacts import Artifact, ArtifactStore
from distill.backends.base import Unanswered
from distill.corpus import CorpusConfig
from distill.errors import ArtifactStaleError, ConfigError, DiskSpaceError, ShardsPendingError
from distill.models import ModelConfig
from distill.sampling import SamplingConfig
from distill.stages import completions as storage
from distill.stages import generate as stage
from distill.stages.generate import GenerateConfig, generate, generate_key
from distill.stages.generate_plan import Shard, shard_of
from distill.stages.generate_resume import find_stored_answers
from tests.fork_helpers import exit_code, start_forked
from tests.generate_helpers import hashes_of, rows_of, scripted_config, use_script
from tests.helpers import make_corpus_rows, make_tokenizer, write_jsonl

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def config(
    tiny_pair_dirs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> GenerateConfig:
    rows = [*make_corpus_rows(20), {"id": "long", "turns": ["sea " * 600]}]
    return GenerateConfig(
        target=ModelConfig(model=str(tiny_pair_dirs[1]), device="cpu"),
        corpus=CorpusConfig(path=write_jsonl(tmp_path_factory.mktemp("corpus") / "p.jsonl", rows)),
        samplings=(SamplingConfig(temperature=1.0),),
        max_new_tokens=6,
        batch_size=4,
        chunk_size=4,
    )


@pytest.fixture(scope="module")
def expected(config: GenerateConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return hashes_of(generate(config, ArtifactStore(tmp_path_factory.mktemp("whole"))))


def part(config: GenerateConfig, shard: str | None) -> GenerateConfig:
    return config.model_copy(update={"shard": shard})


def run_and_die(
    config: GenerateConfig, store: ArtifactStore, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that dies once so many chunks are stored."""
    real, done = stage.run_chunk, 0

    def run(*args: Any) -> int:
        nonlocal done
        if done == chunks:
            raise RuntimeError("killed")
        done += 1
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "run_chunk", run)
        with pytest.raises(RuntimeError, match="killed"):
            generate(config, store)


def count_asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of prompts of each call of the backend from now on."""
    from distill.backends.local import LocalBackend

    asked: list[int] = []
    real = LocalBackend.generate

    def counted(self: LocalBackend, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(len(prompts))
        return real(self, prompts, *args, **kwargs)

    monkeypatch.setattr(LocalBackend, "generate", counted)
    return asked


# ---------------------------------------------------------------- shards


@pytest.mark.parametrize("order", ["12", "21", "312", "54321"])
def test_the_number_and_order_of_shards_change_no_byte(
    order: str, config: GenerateConfig, expected: dict[str, str], tmp_path: Path
) -> None:
    count = len(order)
    store = ArtifactStore(tmp_path)
    for number in order[:-1]:
        with pytest.raises(ShardsPendingError, match=rf"shard {number}/{count} is done"):
            generate(part(config, f"{number}/{count}"), store)
    artifact = generate(part(config, f"{order[-1]}/{count}"), store)
    assert hashes_of(artifact) == expected
    assert not list(tmp_path.glob("generate/*.partial"))
    assert generate(part(config, f"1/{count}"), store).path == artifact.path
    assert generate(config, store).path == artifact.path


def test_a_run_without_a_shard_puts_together_what_shards_left_and_does_the_rest(
    config: GenerateConfig,
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = ArtifactStore(tmp_path)
    with pytest.raises(ShardsPendingError, match="2 of 5 chunks are still to come"):
        generate(part(config, "1/2"), store)
    asked = count_asked(monkeypatch)
    assert hashes_of(generate(config, store)) == expected
    assert asked == [4, 4]


def test_shards_of_two_machines_are_copied_into_one_folder(
    config: GenerateConfig, expected: dict[str, str], tmp_path: Path
) -> None:
    stores = [ArtifactStore(tmp_path / name) for name in ("here", "there")]
    for index, store in enumerate(stores, start=1):
        with pytest.raises(ShardsPendingError):
            generate(part(config, f"{index}/2"), store)
    here, there = (store.partial_dir(generate_key(config, store)) for store in stores)
    shutil.copytree(there, here, dirs_exist_ok=True)
    artifact = generate(config, stores[0])
    assert hashes_of(artifact) == expected
    assert artifact.metrics["num_chunks_resumed"] == 5


def test_ranks_of_torchrun_share_the_chunks(
    config: GenerateConfig, expected: dict[str, str], tmp_path: Path
) -> None:
    def check(artifact: Artifact) -> None:
        assert hashes_of(artifact) == expected

    assert run_ranks(config, tmp_path, check) == [0, 0]
    logs = sorted(path.name.partition("-shard-")[2] for path in (tmp_path / "logs").iterdir())
    assert logs == ["1-of-2.jsonl", "2-of-2.jsonl"]


def run_ranks(
    config: GenerateConfig, root: Path, check: Callable[[Artifact], None] = lambda artifact: None
) -> list[int]:
    """The exit codes of two ranks on one folder."""

    def body(rank: str) -> None:
        os.environ.update(RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank)
        check(generate(config, ArtifactStore(root)))

    children = [start_forked(lambda rank=rank: body(rank)) for rank in ("0", "1")]
    return [exit_code(child) for child in children]


OPENING = "<|im_start|>user\n"
WRITTEN = CorpusConfig(kind="self_synthesis", num_prompts=12)


def test_prompts_that_the_target_writes_are_written_by_one_rank_alone(
    tiny_pair_dirs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0

    def script(text: str, sample: int) -> str:
        nonlocal count
        count += 1
        time.sleep(0.01)  # both ranks would be writing
        return f"Number {count} of {os.getpid()}?" if text == OPENING else "fine"

    use_script(monkeypatch, script)
    config = scripted_config(tiny_pair_dirs[1], WRITTEN)
    assert run_ranks(config, tmp_path) == [0, 0]
    artifact = generate(config, ArtifactStore(tmp_path))
    texts = [make_tokenizer().decode(row["prompt_token_ids"]) for row in rows_of(artifact)]
    assert len(set(texts)) == 12
    assert len({text.partition(" of ")[2] for text in texts}) == 1


def test_answers_to_prompts_that_two_machines_wrote_differently_are_not_mixed(
    tiny_pair_dirs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = scripted_config(tiny_pair_dirs[1], WRITTEN)
    stores = [ArtifactStore(tmp_path / name) for name in ("here", "there")]
    for index, store in enumerate(stores, start=1):
        numbers = iter(range(100))

        def script(text: str, sample: int, index: int = index, numbers: Any = numbers) -> str:
            return f"Number {next(numbers)} of {index}?" if text == OPENING else "fine"

        use_script(monkeypatch, script)
        with pytest.raises(ShardsPendingError):
            generate(part(config, f"{index}/2"), store)
    here, there = (store.partial_dir(generate_key(config, store)) for store in stores)
    for path in (there / "work").glob("shard-*"):
        shutil.copy(path, here / "work")
    with pytest.raises(ArtifactStaleError, match=r"shard-00001.*corpus_sha256 .* -> "):
        generate(config, stores[0])


def test_what_is_missing_of_all_ranks_has_to_fit_on_their_disk(
    tiny_pair_dirs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_script(monkeypatch, lambda text, sample: "fine")
    path = write_jsonl(tmp_path / "p.jsonl", make_corpus_rows(12))
    config = scripted_config(tiny_pair_dirs[1], path, max_new_tokens=1_000_000)
    # of three chunks rank 0 answers two: 128 MB, 141 with the margin; all are 192, 211 with it
    usage = shutil.disk_usage(tmp_path)._replace(free=180 * 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def wait(seconds: float) -> None:
        raise RuntimeError("it answered, and waits for the other rank")

    monkeypatch.setattr(time, "sleep", wait)
    with pytest.raises(DiskSpaceError, match="12 completions of up to 1000000 tokens"):
        generate(config, ArtifactStore(tmp_path / "store"))
    monkeypatch.undo()
    use_script(monkeypatch, lambda text, sample: "fine")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ShardsPendingError):  # a shard by hand may be on a machine of its own
        generate(part(config, "1/2"), ArtifactStore(tmp_path / "store"))


def test_a_chunk_is_counted_and_looked_at_once_by_a_process(
    config: GenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    real = storage.is_shard_whole

    def look(path: Path, directory: Path) -> bool:
        looked.append(path.name)
        return real(path, directory)

    monkeypatch.setattr(storage, "is_shard_whole", look)
    store = ArtifactStore(tmp_path)
    with pytest.raises(ShardsPendingError):
        generate(part(config, "1/2"), store)
    assert looked == []
    artifact = generate(part(config, "2/2"), store)
    assert artifact.metrics["num_chunks_resumed"] == 3
    assert looked == [f"shard-{number:05d}.parquet" for number in (0, 2, 4)]


def test_the_environment_of_torchrun_names_the_shard() -> None:
    assert shard_of(None, {}) is None
    assert shard_of(None, {"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert shard_of("2/3", {}) == Shard(1, 3, is_rank=False)
    assert shard_of(None, {"RANK": "2", "WORLD_SIZE": "4"}) == Shard(2, 4, is_rank=True)
    with pytest.raises(ConfigError, match=r"'1/4', and this is rank 2 of 4.*leave generate\.shard"):
        shard_of("1/4", {"RANK": "2", "WORLD_SIZE": "4"})


def test_shards_from_the_command_line_end_well_and_the_last_one_goes_on(
    tiny_run_config: Path, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from distill import cli

    command = ["run", str(tiny_run_config), "--until", "generate", "--artifacts", str(tmp_path)]
    first = CliRunner().invoke(cli.app, [*command, "--shard", "2/2"])
    assert first.exit_code == 0
    assert "distill: shard 2/2 is done" in first.stderr
    assert "error" not in first.stderr
    last = CliRunner().invoke(cli.app, [*command, "--shard", "1/2"])
    assert last.exit_code == 0
    assert last.stdout.startswith(f"generate: {tmp_path}")
    wrong = CliRunner().invoke(cli.app, [*command, "--shard", "3/2"])
    assert wrong.exit_code == 2
    assert "write i/n with i from 1 to n" in wrong.stderr


# ---------------------------------------------------------------- prompts that changed


def test_reordered_prompts_resume_the_same_build(
    config: GenerateConfig,
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = ArtifactStore(tmp_path)
    run_and_die(config, store, 3, monkeypatch)
    rows = [{"id": "long", "turns": ["sea " * 600]}, *make_corpus_rows(20)[::-1]]
    path = write_jsonl(tmp_path / "shuffled.jsonl", rows)
    shuffled = config.model_copy(update={"corpus": config.corpus.model_copy(update={"path": path})})
    artifact = generate(shuffled, store)
    assert hashes_of(artifact) == expected
    assert artifact.metrics["num_chunks_resumed"] == 3


def test_filtered_prompts_take_over_what_was_answered(
    config: GenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_corpus_rows(20)
    fewer = write_jsonl(tmp_path / "fewer.jsonl", [row for n, row in enumerate(rows) if n % 3])
    filtered = config.model_copy(
        update={"corpus": config.corpus.model_copy(update={"path": fewer})}
    )
    fresh = generate(filtered, ArtifactStore(tmp_path / "fresh"))
    store = ArtifactStore(tmp_path / "store")
    run_and_die(config, store, 3, monkeypatch)
    killed = store.partial_dir(generate_key(config, store))
    asked = count_asked(monkeypatch)
    artifact = generate(filtered, store)
    stored = rows_of(artifact)
    assert len(stored) == 13
    assert 0 < sum(asked) < 13
    columns = ("row_id", "completion_token_ids", "seed", "status", "target_offset")
    assert [[row[c] for c in columns] for row in stored] == [
        [row[c] for c in columns] for row in rows_of(fresh)
    ]
    from safetensors.torch import load_file

    for entry in fresh.manifest.files:
        if entry.path.endswith(".safetensors"):
            ours, theirs = load_file(artifact.file(entry.path)), load_file(fresh.file(entry.path))
            torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.01)
    assert killed.is_dir()  # what it holds is still its own build's


def test_each_chunk_of_another_build_is_judged_by_its_own_settings(
    config: GenerateConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = ArtifactStore(tmp_path)
    other = config.model_copy(update={"samplings": (SamplingConfig(temperature=0.5),)})
    for each in (config, other):
        run_and_die(each, store, 4, monkeypatch)
    ours, theirs = (store.partial_dir(generate_key(each, store)) for each in (config, other))
    for name in ("work/shard-00002.parquet", "hidden-00002.safetensors"):
        shutil.copy(theirs / name, ours / name)
    shutil.rmtree(theirs)
    damaged = ours / "work" / "shard-00000.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    fewer = write_jsonl(tmp_path / "fewer.jsonl", make_corpus_rows(20)[:19])
    changed = config.model_copy(update={"corpus": config.corpus.model_copy(update={"path": fewer})})
    asked = count_asked(monkeypatch)
    generate(changed, store)
    # of 19 rows, two whole chunks of four are known; one of those may hold the row that is gone
    assert 19 - 8 <= sum(asked) <= 19 - 7
    assert "shard-00000.parquet is damaged; nothing is taken from it" in caplog.text
    assert "differs from it in: config.samplings" in caplog.text


def test_answers_of_a_build_that_is_finished_meanwhile_are_asked_instead(
    config: GenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ArtifactStore(tmp_path)
    run_and_die(config, store, 3, monkeypatch)
    killed = store.partial_dir(generate_key(config, store))
    (row, *_) = pq.read_table(killed / "work" / "shard-00000.parquet").to_pylist()
    settings = generate_key(config, store).parts
    for gone in ("shard", "states"):
        found = find_stored_answers(killed.with_name("own.partial"), settings)
        asked = (row["row_id"], row["prompt_token_ids"], row["seed"])
        if gone == "states":
            assert found.get(*asked) is not None
            for path in killed.glob("hidden-*"):
                path.unlink()
        else:
            killed.rename(tmp_path / "published")
        assert found.get(*asked) is None
        if gone == "shard":
            (tmp_path / "published").rename(killed)


# ---------------------------------------------------------------- rows that failed


def failing(monkeypatch: pytest.MonkeyPatch, num_failing: int) -> list[int]:
    """The first rows of the local backend get no answer; returns how many each call was asked."""
    from distill.backends.local import LocalBackend

    asked: list[int] = []
    real = LocalBackend.generate

    def generate_some(self: LocalBackend, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(len(prompts))
        for outcome in real(self, prompts, *args, **kwargs):
            is_lost = sum(asked[:-1]) + outcome.prompt_index < num_failing
            yield (
                Unanswered(outcome.prompt_index, outcome.sample_index, "failed", "gone")
                if is_lost
                else outcome
            )

    monkeypatch.setattr(LocalBackend, "generate", generate_some)
    return asked


def same_answers(first: Artifact, second: Artifact) -> bool:
    names = ("row_id", "completion_token_ids", "seed", "status", "target_file", "target_offset")
    return all(
        [one[name] for name in names] == [other[name] for name in names]
        for one, other in zip(rows_of(first), rows_of(second), strict=True)
    )


def test_failed_rows_of_a_killed_build_are_asked_again_and_no_others(
    config: GenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = generate(config, ArtifactStore(tmp_path / "fresh"))
    store = ArtifactStore(tmp_path / "store")
    with monkeypatch.context() as patch:
        failing(patch, 2)
        run_and_die(config, store, 3, patch)
    asked = count_asked(monkeypatch)
    artifact = generate(config, store)
    assert asked == [2, 4, 4]
    assert artifact.metrics["num_failed"] == 0
    assert artifact.metrics["num_chunks_resumed"] == 2
    assert same_answers(artifact, fresh)


def test_failed_rows_of_a_finished_build_are_asked_again_on_request(
    config: GenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = generate(config, ArtifactStore(tmp_path / "fresh"))
    store = ArtifactStore(tmp_path / "store")
    with monkeypatch.context() as patch:
        failing(patch, 3)
        before = generate(config, store)
    assert before.metrics["num_failed"] == 3
    asked = count_asked(monkeypatch)
    assert generate(config, store).metrics["num_failed"] == 3
    assert asked == []
    again = config.model_copy(update={"retry_failed": True})
    assert generate_key(again, store) == generate_key(config, store)
    artifact = generate(again, store)
    assert asked == [3]
    assert artifact.metrics["num_failed"] == 0
    assert same_answers(artifact, fresh)
    assert generate(again, store).metrics == artifact.metrics
    assert asked == [3]


def test_an_answer_to_other_ids_is_not_taken_over(
    config: GenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ArtifactStore(tmp_path)
    run_and_die(config, store, 3, monkeypatch)
    edited = [{**row, "turns": [f"{row['turns'][0]} Why?"]} for row in make_corpus_rows(20)]
    path = write_jsonl(tmp_path / "edited.jsonl", edited)
    changed = config.model_copy(update={"corpus": config.corpus.model_copy(update={"path": path})})
    asked = count_asked(monkeypatch)
    generate(changed, store)
    assert sum(asked) == 20


# ---------------------------------------------------------------- settings that changed


def test_an_unfinished_build_of_other_settings_is_named_with_the_difference(
    config: GenerateConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = ArtifactStore(tmp_path)
    run_and_die(config, store, 1, monkeypatch)
    other = config.model_copy(update={"max_new_tokens": 5})
    generate(other, store)
    assert "differs from it in: config.max_new_tokens 6 -> 5" in caplog.text


def test_rows_of_other_settings_are_refused_with_the_differing_key(
    config: GenerateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ArtifactStore(tmp_path)
    other = config.model_copy(update={"seed": 7})
    for each in (config, other):
        run_and_die(each, store, 2, monkeypatch)
    ours, theirs = (store.partial_dir(generate_key(each, store)) for each in (config, other))
    name = "work/shard-00001.parquet"
    shutil.copy(theirs / name, ours / name)
    with pytest.raises(ArtifactStaleError, match=r"shard-00001.*config\.seed 7 -> 0.*not mixed"):
        generate(config, store)


def test_damaged_chunks_are_answered_again(
    config: GenerateConfig,
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = ArtifactStore(tmp_path)
    run_and_die(config, store, 4, monkeypatch)
    partial = store.partial_dir(generate_key(config, store))
    states = partial / "hidden-00001.safetensors"
    states.write_bytes(states.read_bytes()[:-1] + b"\0")
    (partial / "hidden-00002.safetensors").unlink()
    rows = partial / "work" / "shard-00000.parquet"
    rows.write_bytes(rows.read_bytes()[:-20])
    artifact = generate(config, store)
    assert hashes_of(artifact) == expected
    assert artifact.metrics["num_chunks_resumed"] == 1


def test_conversations_resume_and_shard_like_single_turns(
    tiny_pair_dirs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_script(monkeypatch, lambda text, sample: f"said {len(text)}")
    rows = [{"id": f"r{n}", "turns": [f"a{n}", "b", "c"][: 1 + n % 3]} for n in range(12)]
    corpus = write_jsonl(tmp_path / "p.jsonl", rows)
    config = scripted_config(tiny_pair_dirs[1], corpus, num_samples=2)
    whole = generate(config, ArtifactStore(tmp_path / "whole"))
    assert whole.metrics["num_rows"] == 2 * (4 * 1 + 4 * 2 + 4 * 3)
    store = ArtifactStore(tmp_path / "parts")
    for number in (3, 1):
        with pytest.raises(ShardsPendingError):
            generate(part(config, f"{number}/3"), store)
    assert hashes_of(generate(part(config, "2/3"), store)) == hashes_of(whole)
