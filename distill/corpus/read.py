"""Owns putting a corpus together: rows named, filtered, mixed by weight, split, hashed.

Refuses to know files, chat templates and models.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from distill.config import Config
from distill.corpus.config import CorpusConfig, GivenSourceConfig, PartConfig, SourceConfig, Split
from distill.corpus.filters import reject_contaminated, reject_duplicates, reject_near_duplicates
from distill.corpus.prompts import Corpus, Prompt, content_sha256, hash_fraction
from distill.corpus.rows import ReadRow, read_row
from distill.corpus.sources import is_source_reachable, source_name, source_rows
from distill.errors import CorpusError

logger = logging.getLogger(__name__)


def read_corpus(config: CorpusConfig) -> Corpus:
    """Read, check, name, filter, mix and split the prompts.

    A row is ``{"id"?, "task"?, "split"?, "tools"?, "turns" | "prompt" | "messages"}``; other keys
    are ignored. A row without an id is named by its content. A row's own ``split`` ("train" or
    "held_out") wins over the hash of its id; rows of equal content are in one split, unless they
    name several. A rejected row stays, with its reason; ``counts`` tell how many rows were read,
    and how many of them a mixture did not take.

    Raises:
        CorpusError: unreadable, empty or malformed (file, line, what), or an id used twice.
    """
    assert config.kind != "self_synthesis", "such a corpus is written by the target, not read"
    parts = given_sources(config)
    rows = _ReadRows()
    for index, part in enumerate(parts):
        rows.read(part, index)
        if rows.part_of.count(index) == 0:
            raise CorpusError(f"{source_name(part)} holds no prompt; give at least one row")
    named = rows.named()
    prompts = _with_splits(named, config.held_out_fraction)
    if config.raw:
        prompts = [_only_raw_text(prompt) for prompt in prompts]
    prompts = filtered(config, prompts)
    counts: dict[str, int] = {}
    part_of: dict[str, str] = {}
    if config.kind == "mixture":
        labels = [part.label or str(index) for index, part in enumerate(config.parts)]
        prompts, counts = _mixed(config, labels, prompts, rows.part_of)
        part_of = {
            row.prompt.prompt_id: labels[index]
            for row, index in zip(named, rows.part_of, strict=True)
        }
    counts |= {"num_read": len(named), "num_left_out": len(named) - len(prompts)}
    has_own = any(row.own_split is not None for row in named)
    if not has_own and config.held_out_fraction > 0:
        prompts = with_both_splits(prompts)
    return Corpus(tuple(prompts), content_sha256(prompts), counts, part_of)


def given_sources(config: CorpusConfig) -> tuple[GivenSourceConfig, ...]:
    """The sources a corpus reads: its parts, itself, or none when the target writes the prompts."""
    if config.kind == "self_synthesis":
        return ()
    if config.kind == "mixture":
        return config.parts
    own = {name: getattr(config, name) for name in SourceConfig.model_fields}
    return (GivenSourceConfig(kind=config.kind, **own),)


def is_reachable(config: CorpusConfig) -> bool:
    """Whether everything that is read can be read now; what the target writes always can."""
    against = config.decontaminate.against if config.decontaminate else ()
    return all(map(is_source_reachable, (*given_sources(config), *against)))


def is_local(config: CorpusConfig) -> bool:
    """Whether reading the corpus downloads nothing and runs no model."""
    against = config.decontaminate.against if config.decontaminate else ()
    sources = given_sources(config)
    return bool(sources) and all(s.kind != "datasets" for s in (*sources, *against))


def stated_size(config: CorpusConfig) -> int | None:
    """How many prompts there are at most, as far as the settings say so."""
    if config.num_prompts is not None:
        return config.num_prompts
    limits = [part.limit for part in given_sources(config)]
    known = [limit for limit in limits if limit is not None]
    return sum(known) if len(known) == len(limits) else None


def unread_revision(config: CorpusConfig) -> str:
    """What stands for a corpus by its settings alone, before a row is read or written.

    For a corpus that the target writes this is its name: the texts follow from settings and
    target. For one on a hub that cannot be reached it stands in until the rows are known.
    """
    if config.kind != "self_synthesis":
        return ", ".join(source_name(source) for source in given_sources(config))
    filters: dict[str, Config | None] = {
        "synthesis": config.synthesis,
        "near_duplicates": config.near_duplicates,
    }
    settings = {
        name: None if value is None else value.model_dump(mode="json")
        for name, value in filters.items()
    }
    settings["more"] = {
        "num_prompts": config.num_prompts,
        "held_out_fraction": config.held_out_fraction,
        "deduplicate": config.deduplicate,
        "against": content_sha256(_evaluation(config)),
        "ngram": config.decontaminate.ngram if config.decontaminate else None,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def filtered(config: CorpusConfig, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Mark what the settings leave out: duplicates, near duplicates, evaluation prompts."""
    marked = list(prompts)
    if config.deduplicate:
        marked = reject_duplicates(marked)
    if config.near_duplicates is not None:
        marked = reject_near_duplicates(marked, config.near_duplicates)
    if config.decontaminate is not None:
        marked = reject_contaminated(marked, _evaluation(config), config.decontaminate.ngram)
    return marked


def with_both_splits(prompts: list[Prompt]) -> list[Prompt]:
    """In a very small corpus the hash may leave one side empty: move the nearest row across.

    Its copies go with it, where duplicates are kept.
    """
    askable = [prompt for prompt in prompts if prompt.reject_reason is None]
    if len({prompt.content_json for prompt in askable}) < 2:
        return prompts
    if len({prompt.split for prompt in askable}) == 2:
        return prompts
    is_all_train = askable[0].split == "train"
    pick = min if is_all_train else max
    moved = pick(askable, key=lambda prompt: hash_fraction(prompt.prompt_id))
    side: Split = "held_out" if is_all_train else "train"
    logger.warning(
        "all %d prompts hash to one split; %r is put in %s", len(askable), moved.prompt_id, side
    )
    return [
        replace(p, split=side)
        if p.reject_reason is None and p.content_json == moved.content_json
        else p
        for p in prompts
    ]


def hashed_split(prompt_id: str, held_out_fraction: float) -> Split:
    """The split of a row that names none."""
    return "held_out" if hash_fraction(prompt_id) < held_out_fraction else "train"


class _ReadRows:
    """Rows of all sources, the part each came from, and unique ids for them."""

    def __init__(self) -> None:
        self.part_of: list[int] = []
        self._rows: list[ReadRow] = []
        self._places: dict[str, str] = {}  # of the rows' own ids

    def read(self, part: GivenSourceConfig, index: int) -> None:
        label = ""
        if isinstance(part, PartConfig) and part.label is not None:
            label = f"{part.label}/"
        # Not a row more is asked for: the next one may be malformed, or cost a download.
        for place, row in itertools.islice(source_rows(part), part.limit):
            read = read_row(
                row, place, column=part.prompt_column, max_turns=part.max_turns, label=label
            )
            self._add(read, place)
            self.part_of.append(index)

    def _add(self, row: ReadRow, place: str) -> None:
        prompt_id = row.prompt.prompt_id
        if row.has_own_id:
            if prompt_id in self._places:
                raise CorpusError(
                    f"{place}: id {prompt_id!r} is already used at {self._places[prompt_id]}; "
                    "give each row its own id, or leave the ids out (parts of a mixture: give "
                    "each a `label`)"
                )
            self._places[prompt_id] = place
        self._rows.append(row)

    def named(self) -> list[ReadRow]:
        """The rows as they were read; those of equal content, and no id, told apart by a count.

        The count follows what the rows state beside their content, so it does not depend on their
        order: rows that are equal in that too are the same row.
        """
        unnamed = [index for index, row in enumerate(self._rows) if not row.has_own_id]
        unnamed.sort(key=self._statement)
        taken, times = set(self._places), Counter[str]()
        rows = list(self._rows)
        for index in unnamed:
            prompt = rows[index].prompt
            name = prompt.prompt_id
            while name in taken:
                times[prompt.prompt_id] += 1
                name = f"{prompt.prompt_id}-{times[prompt.prompt_id]}"
            taken.add(name)
            rows[index] = replace(rows[index], prompt=replace(prompt, prompt_id=name))
        return rows

    def _statement(self, index: int) -> tuple[str, bool, str, str, int]:
        """A split that is stated comes before one that is not: of duplicates the first is kept."""
        row = self._rows[index]
        own_split = row.own_split
        return (
            row.prompt.prompt_id,
            own_split is None,
            own_split or "",
            row.prompt.task,
            self.part_of[index],
        )


def _with_splits(rows: Sequence[ReadRow], held_out_fraction: float) -> list[Prompt]:
    """Rows of equal content that name no split share one: no copy of a held-out row is trained on.

    It is what another copy states (held_out before train), else what the smallest id hashes to.
    """
    stated: dict[str, Split] = {}
    first: dict[str, str] = {}
    for row in rows:
        content, prompt_id = row.prompt.content_json, row.prompt.prompt_id
        first[content] = min(first.get(content, prompt_id), prompt_id)
        if row.own_split is not None:
            stated[content] = min(stated.get(content, row.own_split), row.own_split)
    prompts: list[Prompt] = []
    for row in rows:
        content = row.prompt.content_json
        split = row.own_split or stated.get(content)
        split = split or hashed_split(first[content], held_out_fraction)
        prompts.append(replace(row.prompt, split=split))
    return prompts


def _only_raw_text(prompt: Prompt) -> Prompt:
    """Reject what raw text has no place for, rather than ask less than the row says."""
    if prompt.reject_reason is not None:
        return prompt
    if prompt.later_turns:
        return prompt.rejected(
            "several_raw_turns",
            f"raw text has no template to join its {prompt.num_turns} turns; set max_turns: 1",
        )
    others = [message["role"] for message in prompt.messages if message["role"] != "user"]
    more = [f"{role} message" for role in others] + (["tools"] if prompt.tools else [])
    if not more:
        return prompt
    return prompt.rejected(
        "raw_messages",
        f"raw text has no template to place its {', '.join(more)}; set raw: false, or write all "
        "that is to be read as one text",
    )


def _evaluation(config: CorpusConfig) -> list[Prompt]:
    """The prompts a corpus must not hold; ids may repeat, as nothing is named by them."""
    if config.decontaminate is None:
        return []
    prompts: list[Prompt] = []
    for source in config.decontaminate.against:
        rows = _ReadRows()
        rows.read(source, 0)
        prompts += [row.prompt for row in rows.named()]
    return prompts


def _mixed(
    config: CorpusConfig,
    names: Sequence[str],
    prompts: Sequence[Prompt],
    part_of: Sequence[int],
) -> tuple[list[Prompt], dict[str, int]]:
    """(rows taken by weight and all rejected ones, counts of each part).

    Which rows of a part are taken depends on their ids alone, not on their order.
    """
    askable: list[list[Prompt]] = [[] for _ in names]
    for prompt, part in zip(prompts, part_of, strict=True):
        if prompt.reject_reason is None:
            askable[part].append(prompt)
    sizes = dict(zip(names, map(len, askable), strict=True))
    quotas = mixture_quotas(
        {name: part.weight for name, part in zip(names, config.parts, strict=True)},
        sizes,
        config.num_prompts,
    )
    taken: set[str] = set()
    for name, rows in zip(names, askable, strict=True):
        rows.sort(key=lambda prompt: (hash_fraction(prompt.prompt_id, "mixture"), prompt.prompt_id))
        taken.update(prompt.prompt_id for prompt in rows[: quotas[name]])
    counts: dict[str, int] = {}
    for index, name in enumerate(names):
        counts[f"num_read_of_part/{name}"] = part_of.count(index)
        counts[f"num_rejected_of_part/{name}"] = part_of.count(index) - sizes[name]
        counts[f"num_taken_of_part/{name}"] = quotas[name]
    kept = [p for p in prompts if p.reject_reason is not None or p.prompt_id in taken]
    return kept, counts


def mixture_quotas(
    weights: Mapping[str, float], sizes: Mapping[str, int], total: int | None
) -> dict[str, int]:
    """How many rows each part gives: shares by weight, rounded by largest remainder.

    Without a total: as many as the scarcest part allows.

    Raises:
        CorpusError: a part has fewer rows than its share of the total.
    """
    share = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    if total is None:
        # A hair more than exact, so that a part is not left one row short by rounding.
        total = min(math.floor(sizes[name] / share[name] * (1 + 1e-12)) for name in share)
    exact = {name: share[name] * total for name in share}
    quotas = {name: math.floor(value + 1e-9) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: quotas[name] - exact[name])
    for name in by_remainder[: total - sum(quotas.values())]:
        quotas[name] += 1
    for name, quota in quotas.items():
        if quota > sizes[name]:
            raise CorpusError(
                f"part {name!r} of the mixture has {sizes[name]} prompts to ask, and its weight "
                f"{weights[name]:g} of {total} prompts takes {quota}; lower num_prompts or its "
                "weight, or add rows"
            )
    return quotas
