"""The prompts: read, checked, named, filtered, mixed, split, and turned into token ids.

Refuses to know what answers them.
"""

from distill.corpus.config import CorpusConfig, SynthesisConfig
from distill.corpus.prompts import Corpus, Prompt, hash_fraction
from distill.corpus.read import is_local, is_reachable, read_corpus, stated_size, unread_revision
from distill.corpus.templates import prompt_token_ids

__all__ = [
    "Corpus",
    "CorpusConfig",
    "Prompt",
    "SynthesisConfig",
    "hash_fraction",
    "is_local",
    "is_reachable",
    "prompt_token_ids",
    "read_corpus",
    "stated_size",
    "unread_revision",
]
