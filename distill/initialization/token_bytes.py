"""Owns the text of single tokens: the bytes behind an id, and the ids a text is made of.

Refuses to know embeddings. Two alphabets are known: byte-level BPE (GPT-2 and after it Qwen,
Llama 3, SmolLM), which writes each byte as one printable character, and SentencePiece (Llama 2,
Mistral, Gemma), which marks spaces and writes bytes it has no letter for as <0x41>.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from distill.errors import PairMismatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Alphabet = Literal["byte_level", "sentencepiece"]


def _byte_level_alphabet() -> dict[int, str]:
    """Byte -> character: printable ones stand for themselves, the others are moved past 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {byte: chr(256 + position) for position, byte in enumerate(others)}
    return {byte: chr(byte) for byte in printable} | shifted


_CHARACTER_OF = _byte_level_alphabet()
_BYTE_OF = {character: byte for byte, character in _CHARACTER_OF.items()}


@dataclass(frozen=True)
class TokenTexts:
    """What the ids of a tokenizer stand for, and how its model splits a text.

    Ids from `num_rows` on have no row in the model's tables: such a token is as good as absent.

    Raises:
        PairMismatchError: (on first use) a tokenizer without a tokenizer.json, or of another kind.
    """

    tokenizer: PreTrainedTokenizerBase
    num_rows: int | None = None

    def has_row(self, index: int) -> bool:
        """Whether the model's tables reach this id."""
        return self.num_rows is None or index < self.num_rows

    @cached_property
    def num_without_row(self) -> int:
        """How many of the tokenizer's ids the model's tables do not reach."""
        return sum(not self.has_row(index) for index in self.tokenizer.get_vocab().values())

    @cached_property
    def specials(self) -> dict[str, int]:
        """Control tokens (never text) by what they are written as."""
        added = self.tokenizer.added_tokens_decoder.items()
        return {
            token.content: index for index, token in added if token.special and self.has_row(index)
        }

    @cached_property
    def bytes_of(self) -> dict[int, bytes]:
        """The bytes of every id that stands for text."""
        decoder = self.tokenizer.added_tokens_decoder
        specials = {index for index, token in decoder.items() if token.special}
        added = {index: token.content.encode() for index, token in decoder.items()}
        return {
            index: added[index] if index in added else self._decoded(token)
            for token, index in self.tokenizer.get_vocab().items()
            if index not in specials and self.has_row(index)
        }

    @cached_property
    def id_of(self) -> dict[bytes, int]:
        """The id of every text that is one token; of several, a letter before a byte token."""
        is_byte = {
            index: _BYTE_TOKEN.fullmatch(token) is not None
            for token, index in self.tokenizer.get_vocab().items()
        }
        found: dict[bytes, int] = {}
        for index in sorted(self.bytes_of, key=lambda index: (is_byte[index], index)):
            found.setdefault(self.bytes_of[index], index)
        return found

    def split(self, text: bytes) -> list[int]:
        """The ids this tokenizer's model splits a text into, or [] if it cannot write all of it.

        No normaliser and no added begin or space: the text stands inside a longer one.
        """
        if self.alphabet == "byte_level":
            return self._model_split("".join(_CHARACTER_OF[byte] for byte in text))
        try:
            return self._model_split(text.decode().replace(" ", _SPACE_MARK))
        except UnicodeDecodeError:  # part of a character
            ids = [self.id_of.get(bytes([byte])) for byte in text]
            return [index for index in ids if index is not None] if None not in ids else []

    @cached_property
    def alphabet(self) -> Alphabet:
        """How this tokenizer writes bytes."""
        decoder = self._pipeline.get("decoder") or {}
        parts = decoder.get("decoders", [decoder])
        kinds = {part.get("type") for part in parts}
        if "ByteLevel" in kinds:
            return "byte_level"
        has_mark = any(_SPACE_MARK in json.dumps(part, ensure_ascii=False) for part in parts)
        if "Metaspace" in kinds or "ByteFallback" in kinds or has_mark:
            return "sentencepiece"
        raise PairMismatchError(
            f"{_named(self.tokenizer)} decodes by {', '.join(sorted(map(str, kinds)))}, and only "
            "byte-level BPE and SentencePiece tokenizers can be matched token by token. Start the "
            "draft from a model of the target's family"
        )

    @cached_property
    def _backend(self) -> Any:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise PairMismatchError(
                f"{_named(self.tokenizer)} has no tokenizer.json, and tokens are matched by what "
                "is in it. Save the tokenizer as a fast one and put its files beside the weights"
            )
        return backend

    @cached_property
    def _pipeline(self) -> dict[str, Any]:
        pipeline: dict[str, Any] = json.loads(self._backend.to_str())
        return pipeline

    @cached_property
    def _unknown_id(self) -> int | None:
        unknown = self._pipeline["model"].get("unk_token")
        if unknown is not None:
            found: int | None = self._backend.token_to_id(unknown)
            return found
        index: int | None = self._pipeline["model"].get("unk_id")
        return index

    def _model_split(self, text: str) -> list[int]:
        ids = [token.id for token in self._backend.model.tokenize(text)] if text else []
        return ids if self._unknown_id not in ids and all(map(self.has_row, ids)) else []

    def _decoded(self, token: str) -> bytes:
        if self.alphabet == "byte_level":
            # characters outside the alphabet: a token that was added by hand, and stands for itself
            if all(character in _BYTE_OF for character in token):
                return bytes(_BYTE_OF[character] for character in token)
            return token.encode()
        if (found := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes([int(found.group(1), 16)])
        return token.replace(_SPACE_MARK, " ").encode()


def _named(tokenizer: PreTrainedTokenizerBase) -> str:
    return f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__!r}"
