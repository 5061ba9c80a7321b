"""The prompts: read from a file or a dataset, checked, named, split, and turned into token ids.

Refuses to know what answers them. Only the first user turn of a conversation is answered for now;
later turns of a row are left alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from distill.config import Config, ConfigPath, setting
from distill.errors import ConfigError, CorpusError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Split = Literal["train", "held_out"]

_HUB_TIMEOUT_S = 5.0
_PROMPT_COLUMNS = ("turns", "prompt", "messages")
_ROLES = ("system", "user", "assistant", "tool")


class CorpusConfig(Config):
    """Where the prompts are and how they are divided.

    What is read decides the artifact, not where it lies: the rows and their splits are hashed
    (``Corpus.sha256``), the settings that led to them are not.
    """

    kind: Literal["jsonl", "parquet", "datasets"] = setting("jsonl", in_fingerprint=False)
    path: ConfigPath | None = setting(None, in_fingerprint=False, description="jsonl, parquet")
    name: str | None = setting(None, in_fingerprint=False, description="of a `datasets` dataset")
    subset: str | None = setting(None, in_fingerprint=False, description="its configuration")
    split: str = setting("train", in_fingerprint=False, description="which of its splits to read")
    prompt_column: str | None = setting(
        None, in_fingerprint=False, description="the column to read; else turns, prompt, messages"
    )
    held_out_fraction: float = setting(
        0.1,
        ge=0,
        lt=1,
        in_fingerprint=False,
        description="of the rows that name no split themselves: share kept from training",
    )
    limit: int | None = setting(
        None, gt=0, in_fingerprint=False, description="read only the first rows"
    )
    raw: bool = setting(False, description="no chat template: the text as it is (base models)")

    @model_validator(mode="after")
    def _check_source(self) -> CorpusConfig:
        needed = "name" if self.kind == "datasets" else "path"
        if getattr(self, needed) is None:
            raise ConfigError(f"a corpus of kind {self.kind!r} needs `{needed}:`")
        return self


@dataclass(frozen=True)
class Prompt:
    """One row: its messages up to the first user turn, and why it cannot be answered, if so."""

    prompt_id: str
    task: str
    split: Split
    messages: tuple[Mapping[str, str], ...]
    reject_reason: str | None = None

    @property
    def text(self) -> str:
        """The first user turn."""
        return next((m["content"] for m in self.messages if m["role"] == "user"), "")


@dataclass(frozen=True)
class Corpus:
    """All prompts of a source in its order, and the hash of everything that was read."""

    prompts: tuple[Prompt, ...]
    sha256: str


def read_corpus(config: CorpusConfig) -> Corpus:
    """Read, check, name and split the prompts.

    A row is ``{"id"?, "task"?, "split"?, "turns" | "prompt" | "messages"}``; other keys are
    ignored. A row without an id is named by its content; the same content again is kept and
    marked as a duplicate, so that the counts add up. A row's own ``split`` ("train" or
    "held_out") wins over the hash of its id.

    Raises:
        CorpusError: unreadable, empty or malformed (file, line, what), or an id used twice.
    """
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    has_own_split = False
    for place, row in _rows(config):
        if config.limit is not None and len(prompts) == config.limit:
            break
        messages, reason = _messages(row, config.prompt_column, place)
        prompt_id, is_own = _identity(row, messages, place)
        if prompt_id in places:
            if is_own:
                raise CorpusError(
                    f"{place}: id {prompt_id!r} is already used at {places[prompt_id]}; "
                    "give each row its own id, or leave the ids out"
                )
            reason = f"same content as {places[prompt_id]}"
            prompt_id = f"{prompt_id}-{len(prompts)}"
        places[prompt_id] = place
        own_split = _optional_text(row, "split", place)
        if own_split not in (None, "train", "held_out"):
            raise CorpusError(f"{place}: split is {own_split!r}; write 'train' or 'held_out'")
        has_own_split |= own_split is not None
        split: Split = "held_out" if own_split == "held_out" else "train"
        if own_split is None and hash_fraction(prompt_id) < config.held_out_fraction:
            split = "held_out"
        task = _optional_text(row, "task", place) or "default"
        prompts.append(Prompt(prompt_id, task, split, messages, reason))
    if not prompts:
        raise CorpusError(f"{_source(config)} holds no prompt; give at least one row")
    if not has_own_split and config.held_out_fraction > 0:
        prompts = _with_both_splits(prompts)
    return Corpus(tuple(prompts), _content_sha256(prompts))


def hash_fraction(prompt_id: str) -> float:
    """A number in [0, 1) that depends on the id alone: rows keep their split as a corpus grows."""
    digest = hashlib.sha256(f"split\0{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _with_both_splits(prompts: list[Prompt]) -> list[Prompt]:
    """In a very small corpus the hash may leave one side empty: move the nearest row across."""
    if len(prompts) < 2 or len({prompt.split for prompt in prompts}) == 2:
        return prompts
    is_all_train = prompts[0].split == "train"
    pick = min if is_all_train else max
    moved = pick(prompts, key=lambda prompt: hash_fraction(prompt.prompt_id))
    side: Split = "held_out" if is_all_train else "train"
    logger.warning(
        "all %d prompts hash to one split; %r is put in %s", len(prompts), moved.prompt_id, side
    )
    return [
        Prompt(p.prompt_id, p.task, side, p.messages, p.reject_reason) if p is moved else p
        for p in prompts
    ]


def _content_sha256(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        fields = [prompt.prompt_id, prompt.task, prompt.split, [*map(dict, prompt.messages)]]
        line = json.dumps([*fields, prompt.reject_reason], sort_keys=True, ensure_ascii=False)
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


# ---------------------------------------------------------------- rows


def _source(config: CorpusConfig) -> str:
    return str(config.name if config.kind == "datasets" else config.path)


def _rows(config: CorpusConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place for messages, row) of every row of the source."""
    if config.kind == "jsonl":
        assert config.path is not None
        yield from _jsonl_rows(config.path)
    elif config.kind == "parquet":
        assert config.path is not None
        yield from _parquet_rows(config.path)
    else:
        yield from _dataset_rows(config)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                place = f"{path}:{number}"
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise CorpusError(
                        f"{place}: not JSON ({error.msg} at column {error.colno}); "
                        "a .jsonl file holds one JSON object a line"
                    ) from error
                except (ValueError, RecursionError) as error:  # a huge integer, a deep nesting
                    raise CorpusError(f"{place}: cannot be read as JSON ({error})") from error
                if not isinstance(row, dict):
                    raise CorpusError(f"{place}: a {type(row).__name__}, not a JSON object")
                yield place, row
    except OSError as error:
        raise CorpusError(f"cannot read the corpus {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        number = 0
        for batch in pq.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                yield f"{path}, row {number}", row
                number += 1
    except (OSError, pa.ArrowInvalid) as error:
        raise CorpusError(f"cannot read the corpus {path} as parquet: {error}") from error


def is_reachable(config: CorpusConfig) -> bool:
    """Whether the prompts can be read now: a dataset on a hub needs the hub, a file does not."""
    if config.kind != "datasets":
        return True
    import httpx2  # what the hub's client raises
    import huggingface_hub

    assert config.name is not None
    if Path(config.name).exists():
        return True
    try:
        huggingface_hub.HfApi().dataset_info(config.name, timeout=_HUB_TIMEOUT_S)
    except (OSError, ValueError, httpx2.HTTPError):
        return False
    return True


def _dataset_rows(config: CorpusConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import datasets
    from datasets.exceptions import DatasetsError

    assert config.name is not None
    try:
        dataset = datasets.load_dataset(config.name, config.subset, split=config.split)
    except (OSError, ValueError, DatasetsError) as error:
        raise CorpusError(
            f"cannot load split {config.split!r} of the dataset {config.name!r}: {error}. "
            "Check name, subset and split; or download it and give its file as jsonl or parquet"
        ) from error
    for number, row in enumerate(dataset):
        yield f"{config.name}[{config.split}], row {number}", row


def _optional_text(row: Mapping[str, Any], key: str, place: str) -> str | None:
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise CorpusError(f"{place}: {key} is {value!r}; it must be a text")
    return _encodable(value, key, place)


def _encodable(text: str, what: str, place: str) -> str:
    """The text itself; JSON can spell halves of surrogate pairs, which no encoding can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise CorpusError(
            f"{place}: {what} holds {half!r} alone, half of a surrogate pair and no character; "
            "write the whole character, or leave it out"
        ) from error
    return text


def _identity(
    row: Mapping[str, Any], messages: Sequence[Mapping[str, str]], place: str
) -> tuple[str, bool]:
    """(the row's id, whether it is the row's own rather than a hash of its content)."""
    own = _optional_text(row, "id", place)
    if own is not None:
        return own, True
    content = json.dumps([*map(dict, messages)], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()[:16], False


def _messages(
    row: Mapping[str, Any], column: str | None, place: str
) -> tuple[tuple[Mapping[str, str], ...], str | None]:
    """(system message if any and the first user turn, why the row cannot be answered)."""
    columns = (column,) if column else _PROMPT_COLUMNS
    present = [name for name in columns if row.get(name) is not None]
    if len(present) != 1:
        raise CorpusError(
            f"{place}: needs exactly one of {', '.join(columns)}; it has "
            f"{', '.join(present) or 'none of them'} (its keys: {', '.join(map(str, row))})"
        )
    value = row[present[0]]
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, Sequence) or not value:
        raise CorpusError(f"{place}: {present[0]} is {value!r}; a text or a list was expected")
    turns = [_message(entry, present[0], place) for entry in value]
    kept: list[Mapping[str, str]] = []
    for message in turns:
        if message["role"] not in ("system", "user"):
            return tuple(kept), f"the first turn is the {message['role']}'s, not the user's"
        kept.append(message)
        if message["role"] == "user":
            return tuple(kept), None
    return tuple(kept), "it has no user turn"


def _message(entry: Any, column: str, place: str) -> Mapping[str, str]:
    if isinstance(entry, str):
        entry = {"role": "user", "content": entry}
    if not isinstance(entry, Mapping):
        raise CorpusError(f"{place}: {column} holds {entry!r}; a text or a message was expected")
    role, content = entry.get("role"), entry.get("content")
    if role not in _ROLES:
        raise CorpusError(f"{place}: a message has role {role!r}; known: {', '.join(_ROLES)}")
    if not isinstance(content, str):
        raise CorpusError(f"{place}: the content of a {role} message is {content!r}, not a text")
    if role == "user" and not content.strip():
        raise CorpusError(f"{place}: a user turn is empty")
    return {"role": role, "content": _encodable(content, f"a {role} message", place)}


# ---------------------------------------------------------------- token ids


def prompt_token_ids(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    *,
    is_raw: bool,
    system_prompt: str | None = None,
) -> list[int]:
    """What the target reads: the chat template applied once, up to where its answer starts.

    The template writes every special token itself; the tokenizer adds none on top (otherwise the
    text would start with two begin tokens). ``is_raw`` leaves the template out and lets the
    tokenizer add its own. ``system_prompt`` stands in where a row has no system message.

    Raises:
        CorpusError: the tokenizer has no template, the template refuses the messages, or the text
            itself starts with the begin token that is added.
    """
    if is_raw:
        ids = list(tokenizer(prompt.text)["input_ids"])
    else:
        messages = [dict(message) for message in prompt.messages]
        if system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system_prompt})
        ids = _templated(tokenizer, messages, prompt.prompt_id)
    begin = tokenizer.bos_token_id
    if begin is not None and ids[:2] == [begin, begin]:
        raise CorpusError(
            f"prompt {prompt.prompt_id!r} starts with two begin tokens ({tokenizer.bos_token!r}); "
            "its text is already formatted: take the markup out of the row"
        )
    return ids


def _templated(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], prompt_id: str
) -> list[int]:
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise CorpusError(
            "the target's tokenizer has no chat template. For a base model set "
            "`corpus.raw: true`; for a chat model put its chat_template.jinja beside its tokenizer"
        )
    try:
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise CorpusError(
            f"the target's chat template refuses prompt {prompt_id!r} (roles: {roles}): {error}. "
            "If it knows no system role, leave system_prompt and system messages out"
        ) from error
    return list(encoded["input_ids"])
