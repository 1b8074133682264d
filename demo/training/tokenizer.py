"""The tokenizer: byte-level BPE of 4,096 entries, learned from the generator's own text."""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.demo.chat import SPECIAL_TOKENS, TAGS, render
from penstock.demo.exchange import Random
from penstock.demo.mixture import conversation

VOCAB_SIZE = 4096
# Words with the space before them, single digits, runs of punctuation.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONVERSATIONS = 40_000


def _texts(seed: int) -> Iterator[str]:
    source = Random(f"tokenizer {seed}")
    for _ in range(_CONVERSATIONS):
        text = "".join(part for part, _ in render(conversation(source)))
        for token in (*SPECIAL_TOKENS, *TAGS):
            text = text.replace(token, "\n")
        yield text


def make_tokenizer(seed: int = 0) -> Tokenizer:
    """Train it (about a minute). Ids: special tokens first, then tags, bytes and merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern=Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(text, special=True) for text in SPECIAL_TOKENS]
    added += [AddedToken(text, special=False) for text in TAGS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=added,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed), trainer)
    # The trainer marks all of its first tokens as special; the tags are text.
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    return tokenizer
