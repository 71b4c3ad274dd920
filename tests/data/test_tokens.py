"""What single tokens write: joined it is the decoded text, for both ways in which vocabularies spell bytes."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from finetune.data.tokens import token_texts
from finetune.model.builtin import load_tokenizer
from finetune.model.source import resolve_source

TEXTS = ["What is 1+1?", "  two  spaces\n\n", "naïve 日本 👩‍💻", "<s> a</s>", "tab\tand\r\nline"]


def joined(tokenizer: Any, ids: list[int]) -> str:
    texts = token_texts(tokenizer, ids)
    return b"".join(
        bytes(text) if isinstance(text, list) else text.encode() for text in (texts[one] for one in ids)
    ).decode()


def metaspace_tokenizer() -> Any:
    """A vocabulary as SentencePiece spells it: U+2581 for a space, <0xNN> for bytes, no space at the beginning."""
    words = [
        "<unk>",
        "<s>",
        "\u2581",
        "\u2581the",
        "cat",
        "\u2581cat",
        "s",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    inner = Tokenizer(
        models.BPE(
            {word: place for place, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", unk_token="<unk>")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("model", ["builtin:tiny", "builtin:smollm2-135m"])
def test_a_byte_level_vocabulary(model: str, text: str) -> None:
    tokenizer = load_tokenizer(resolve_source(model))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert joined(tokenizer, ids) == tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_a_vocabulary_of_pieces_and_bytes() -> None:
    tokenizer = metaspace_tokenizer()
    ids = [1, 3, 5, 6, *(7 + byte for byte in "é".encode()), 2, 4]
    assert token_texts(tokenizer, ids)[3] == " the", "the space that a decoder strips from a beginning"
    assert token_texts(tokenizer, ids)[7 + 0xC3] == [0xC3]
    assert joined(tokenizer, ids) == "<s> the catsé cat"
    assert tokenizer.decode(ids) == "<s> the catsé cat"


def test_a_token_that_no_vocabulary_has_and_no_tokens() -> None:
    tokenizer = load_tokenizer(resolve_source("builtin:tiny"))
    assert token_texts(tokenizer, []) == {}
    assert token_texts(tokenizer, [100_000]) == {100_000: ""}
