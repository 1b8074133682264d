"""Small tokenizers of each kind that models use, trained on the spot."""

from __future__ import annotations

from functools import cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from penstock.loadtest.models.make_model import make_tokenizer

WORDS = ["hello world", "water flows", "the pipe, the turbine", "naïve café", "日本 水"] * 20


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: with a control token, a plain added one, and odd contents."""
    tokenizer = make_tokenizer(400)
    tokenizer.add_tokens(
        [
            AddedToken("<think>", special=False, normalized=False),
            AddedToken("é x", special=False, normalized=False),
            AddedToken("日", special=False, normalized=False),
        ]
    )
    return tokenizer


def _byte_fallback_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    letters = [*sorted({c for line in WORDS for c in line if c.isascii() and c != " "}), "▁", "é"]
    merges = [("h", "e"), ("l", "l"), ("▁", "w"), ("▁", "t"), ("▁", "▁"), ("▁t", "he")]
    tokens += letters + [a + b for a, b in merges]
    return {token: number for number, token in enumerate(tokens)}, merges


def llama_2(*, strip: bool = True) -> Tokenizer:
    """SentencePiece BPE with byte fallback: Replace, ByteFallback, Fuse (and Strip)."""
    vocabulary, merges = _byte_fallback_vocabulary()
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=True)])
    return tokenizer


def metaspace(prepend_scheme: str = "first") -> Tokenizer:
    vocabulary, merges = _byte_fallback_vocabulary()
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>")])
    return tokenizer


def unigram(*, byte_fallback: bool = False) -> Tokenizer:
    """SentencePiece's other model, as T5 has it; with bytes, as some multilingual ones."""
    letters = sorted({c for line in WORDS for c in line if c != " "} | {"▁"})
    pieces = ["<unk>", "<s>", "</s>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    scores = {"▁the": -2.0, "▁hello": -2.5, "he": -3.0, "▁w": -3.0, "or": -3.5, "ld": -3.5}
    vocabulary = [(piece, 0.0) for piece in pieces]
    vocabulary += [(letter, -6.0 - n / 100) for n, letter in enumerate(letters)]
    vocabulary += list(scores.items())
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    if byte_fallback:
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>")])
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    return tokenizer


def no_decoder() -> Tokenizer:
    tokenizer = word_piece()
    tokenizer.decoder = None
    return tokenizer


@cache
def zoo() -> dict[str, Tokenizer]:
    return {
        "byte_level": byte_level(),
        "llama_2": llama_2(),
        "llama_2 without strip": llama_2(strip=False),
        "metaspace first": metaspace("first"),
        "metaspace never": metaspace("never"),
        "unigram": unigram(),
        "unigram with bytes": unigram(byte_fallback=True),
        "word_piece": word_piece(),
        "no_decoder": no_decoder(),
    }
