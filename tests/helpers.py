"""Owns the plain test helpers: tiny random models, a tiny tokenizer, a tiny corpus.
Refuses to know any stage, and imports torch only where a model is made: config tests need none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START_TOKEN, END_TOKEN = "<|im_start|>", "<|im_end|>"

_TOKENIZER_TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "user assistant system write a short story about the sea and the wind",
    "what is the sum of the numbers and the name of the city in the north",
    "def add(a, b): return a + b",
]
_QUESTIONS = {
    "chat": "Tell me about the number {n} and the sea.",
    "code": "Write a function that adds {n} to its argument.",
    "math": "What is the sum of {n} and seven?",
}


def make_tokenizer(vocab_size: int = 300) -> Any:
    """A byte-level BPE tokenizer with a ChatML template; <|im_end|> is both eos and pad.

    The two special tokens have ids 0 and 1, the 256 bytes follow, merges fill the rest.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[START_TOKEN, END_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TOKENIZER_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=END_TOKEN,
        additional_special_tokens=[START_TOKEN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_llama(
    vocab_size: int = 300,
    *,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    max_positions: int = 512,
    dtype: Any = None,
    tie_word_embeddings: bool = False,
    eos_token_id: int | None = 1,
    initializer_range: float = 0.2,
) -> Any:
    """A random LlamaForCausalLM in eval mode; equal arguments give equal weights.

    ``initializer_range`` is ten times the usual one: its next-token distributions are far from
    uniform, so that argmax has no near ties and two seeds clearly disagree. The global random
    state is left as it was.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model.to(dtype or torch.float32).eval()


def save_pretrained_dir(directory: Path, model: Any, tokenizer: Any) -> Path:
    """Save a model with its tokenizer, as a user's local model directory would hold them."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_corpus_rows(num_rows: int = 24) -> list[dict[str, Any]]:
    """Rows {id, task, turns} spread evenly over the tasks chat, code and math."""
    tasks = sorted(_QUESTIONS)
    return [
        {
            "id": f"{tasks[n % len(tasks)]}-{n // len(tasks)}",
            "task": tasks[n % len(tasks)],
            "turns": [_QUESTIONS[tasks[n % len(tasks)]].format(n=n)],
        }
        for n in range(num_rows)
    ]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSON lines and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
