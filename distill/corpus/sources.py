"""Owns the files and data sets rows are read from: each gives (place, row), one after the other.

Refuses to know what a row means.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distill.corpus.config import GivenSourceConfig
from distill.errors import CorpusError

Row = tuple[str, Mapping[str, Any]]
"""(place for messages, the row)"""

_HUB_TIMEOUT_S = 5.0


def source_name(config: GivenSourceConfig) -> str:
    """What a source is called in a message."""
    return str(config.name if config.kind == "datasets" else config.path)


def source_rows(config: GivenSourceConfig) -> Iterator[Row]:
    """Every row of a source, in its order.

    Raises:
        CorpusError: it cannot be read; names file and line.
    """
    if config.kind == "datasets":
        return _dataset_rows(config)
    assert config.path is not None
    if config.kind == "text":
        return _text_rows(config.path, config.glob, config.chunk_characters)
    readers = {"jsonl": _jsonl_rows, "parquet": _parquet_rows, "csv": _csv_rows}
    return readers[config.kind](config.path)


def is_source_reachable(config: GivenSourceConfig) -> bool:
    """Whether it can be read now: a dataset on a hub needs the hub, a file does not."""
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


def _jsonl_rows(path: Path) -> Iterator[Row]:
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


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        number = 0
        for batch in pq.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                yield f"{path}, row {number}", row
                number += 1
    except (OSError, pa.ArrowException) as error:
        raise CorpusError(f"cannot read the corpus {path} as parquet: {error}") from error


def _csv_rows(path: Path) -> Iterator[Row]:
    """Comma-separated values with a header line; an empty cell is an absent one."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            names = reader.fieldnames or []
            if len(set(names)) < len(names):
                raise CorpusError(
                    f"{path}: two columns have one name ({', '.join(names)}); rename one"
                )
            for row in reader:
                place = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    raise CorpusError(
                        f"{place}: the row does not have the {len(names)} cells of the header; "
                        "a text with a comma or a line end stands in double quotes"
                    )
                yield place, {name: cell or None for name, cell in row.items()}
    except csv.Error as error:
        raise CorpusError(
            f"{path}:{reader.line_num + 1}: not CSV ({error}); quote texts with double quotes, "
            "or write long ones as jsonl"
        ) from error
    except OSError as error:
        raise CorpusError(f"cannot read the corpus {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from error


def _text_rows(path: Path, pattern: str, chunk_characters: int | None) -> Iterator[Row]:
    """A prompt a file, or one a chunk; ids are the file's name, so they survive new files."""
    files = sorted(file for file in path.glob(pattern) if file.is_file()) if path.is_dir() else []
    if path.is_file():
        files = [path]
    if not files:
        raise CorpusError(
            f"{path}: no file of a text corpus is here ({pattern}); set `path` to a text file or "
            "a folder, and `glob` to what its files are called"
        )
    for file in files:
        name = file.relative_to(path).as_posix() if path.is_dir() else file.name
        try:
            text = file.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise CorpusError(f"cannot read the corpus {file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise CorpusError(f"{file} is not UTF-8 ({error}); save it as UTF-8") from error
        if chunk_characters is None:
            yield str(file), {"id": name, "prompt": text}
            continue
        for number, chunk in enumerate(_chunks(text, chunk_characters)):
            yield f"{file}, chunk {number}", {"id": f"{name}#{number}", "prompt": chunk}


def _chunks(text: str, size: int) -> Iterator[str]:
    """Pieces of at most ``size`` characters, cut after white space where there is some."""
    start = 0
    while start < len(text):
        end = min(len(text), start + size)
        if end < len(text):
            end = next((n for n in range(end, start, -1) if text[n - 1].isspace()), end)
        if text[start:end].strip():
            yield text[start:end]
        start = end


def _dataset_rows(config: GivenSourceConfig) -> Iterator[Row]:
    import datasets
    import httpx2
    import pyarrow as pa
    from datasets.exceptions import DatasetsError

    assert config.name is not None
    broken = (OSError, ValueError, DatasetsError, pa.ArrowException, httpx2.HTTPError)
    try:
        dataset = datasets.load_dataset(
            config.name, config.subset, split=config.split, streaming=config.streaming
        )
    except broken as error:
        raise CorpusError(
            f"cannot load split {config.split!r} of the dataset {config.name!r}: {error}. "
            "Check name, subset and split; or download it and give its file as jsonl or parquet"
        ) from error
    number = 0
    try:
        for row in dataset:  # a streamed one downloads and decodes as it goes
            yield f"{config.name}[{config.split}], row {number}", row
            number += 1
    except broken as error:
        raise CorpusError(
            f"{config.name}[{config.split}], row {number} cannot be read: {error}. Run again; if "
            "it stays, set `limit` to the rows before it, or download the dataset and give its "
            "file as jsonl or parquet"
        ) from error
