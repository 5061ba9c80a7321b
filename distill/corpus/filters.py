"""Owns which prompts are left out: the same content, nearly the same, or known to an evaluation.

Refuses to drop a row: it is marked with its reason. The result does not depend on the rows' order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING

from distill.corpus.config import NearDuplicatesConfig
from distill.corpus.prompts import Prompt

if TYPE_CHECKING:
    from datasketch import MinHash

# Chinese, Japanese, Thai, Lao, Burmese and Khmer put no blanks between words, so that a run of
# letters is a clause: there each letter counts as a word.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003134f"
)
_WORD = re.compile(rf"(?=\w)[{_UNSPACED}]|(?:(?![{_UNSPACED}])\w)+")


def reject_duplicates(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Of rows that ask exactly the same, keep the one whose id sorts first."""
    kept: dict[str, str] = {}
    for prompt in _askable_by_id(prompts):
        kept.setdefault(prompt.content_json, prompt.prompt_id)
    return [
        prompt
        if prompt.reject_reason is not None or kept[prompt.content_json] == prompt.prompt_id
        else prompt.rejected("duplicate", f"same content as {kept[prompt.content_json]!r}")
        for prompt in prompts
    ]


def reject_near_duplicates(prompts: Sequence[Prompt], config: NearDuplicatesConfig) -> list[Prompt]:
    """Keep a row only if no kept row with a smaller id is as similar as ``config.threshold``.

    Two things must be that similar, each by itself: what the user says, and all the rest. One
    instruction shared by all rows makes none of them alike, nor does one question asked about
    many documents.
    """
    users, others = _Likeness(config), _Likeness(config)
    reasons: dict[str, str] = {}
    for prompt in _askable_by_id(prompts):
        user, other = prompt.all_text, prompt.other_text
        # Exact comparisons come last: only rows whose two sketches both agree are compared.
        for name in sorted(users.candidates(user) & others.candidates(other)):
            found = min(users.similarity(name, user), others.similarity(name, other))
            if found >= config.threshold:
                reasons[prompt.prompt_id] = f"{found:.0%} like {name!r}"
                break
        else:
            users.insert(prompt.prompt_id, user)
            others.insert(prompt.prompt_id, other)
    return [
        prompt.rejected("near_duplicate", reasons[prompt.prompt_id])
        if prompt.reject_reason is None and prompt.prompt_id in reasons
        else prompt
        for prompt in prompts
    ]


class _Likeness:
    """Texts by name, and which of them may be as similar to another as the threshold."""

    def __init__(self, config: NearDuplicatesConfig) -> None:
        from datasketch import MinHashLSH

        self._config = config
        # Candidates are compared exactly, so a false one costs time and a missed one a duplicate.
        self._index = MinHashLSH(
            threshold=config.threshold, num_perm=config.num_permutations, weights=(0.1, 0.9)
        )
        self._texts: dict[str, str] = {}
        self._empty: set[str] = set()

    def insert(self, name: str, text: str) -> None:
        self._texts[name] = text
        if text:
            self._index.insert(name, self._sketch(text))
        else:
            self._empty.add(name)

    def candidates(self, text: str) -> Set[str]:
        """Names of the texts that may be alike; an empty one is like empty ones alone."""
        return set(self._index.query(self._sketch(text))) if text else self._empty

    def similarity(self, name: str, text: str) -> float:
        """The exact similarity to the text of that name."""
        size = self._config.ngram_characters
        return jaccard(character_ngrams(text, size), character_ngrams(self._texts[name], size))

    def _sketch(self, text: str) -> MinHash:
        from datasketch import MinHash

        grams = character_ngrams(text, self._config.ngram_characters)
        sketch = MinHash(num_perm=self._config.num_permutations, seed=self._config.seed)
        sketch.update_batch([gram.encode() for gram in sorted(grams)])
        return sketch


def reject_contaminated(
    prompts: Sequence[Prompt], evaluation: Iterable[Prompt], ngram: int
) -> list[Prompt]:
    """Reject rows that share ``ngram`` words in a row with an evaluation prompt.

    A text of fewer words is compared as a whole. Case, punctuation and spacing do not count. In
    scripts without blanks (Chinese, Japanese, Thai) each character is a word.
    """
    owner: dict[tuple[str, ...], str] = {}
    for prompt in evaluation:
        for words in word_ngrams(prompt.all_text, ngram):
            owner[words] = min(owner.get(words, prompt.prompt_id), prompt.prompt_id)
    marked: list[Prompt] = []
    for prompt in prompts:
        shared = _first_shared(prompt, owner, ngram) if prompt.reject_reason is None else None
        if shared is not None:
            reason = f"shares {len(shared)} words with evaluation prompt {owner[shared]!r}"
            prompt = prompt.rejected("contaminated", reason)
        marked.append(prompt)
    return marked


def _first_shared(
    prompt: Prompt, owner: Mapping[tuple[str, ...], str], ngram: int
) -> tuple[str, ...] | None:
    return next((words for words in word_ngrams(prompt.all_text, ngram) if words in owner), None)


def words_of(text: str) -> list[str]:
    """The words of a text, lower case; single characters where a script has no blanks."""
    return _WORD.findall(text.lower())


def word_ngrams(text: str, size: int) -> list[tuple[str, ...]]:
    """All runs of ``size`` words, lower case; the whole text when it is shorter."""
    words = words_of(text)
    if len(words) <= size:
        return [tuple(words)] if words else []
    return [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]


def character_ngrams(text: str, size: int) -> frozenset[str]:
    """All runs of ``size`` characters of the lower-case text, white space as single blanks."""
    plain = " ".join(text.lower().split())
    return frozenset(plain[start : start + size] for start in range(max(1, len(plain) - size + 1)))


def jaccard(first: frozenset[str], second: frozenset[str]) -> float:
    """|A and B| / |A or B|, in [0, 1]."""
    return len(first & second) / len(first | second)


def _askable_by_id(prompts: Sequence[Prompt]) -> list[Prompt]:
    askable = [prompt for prompt in prompts if prompt.reject_reason is None]
    return sorted(askable, key=lambda prompt: prompt.prompt_id)
