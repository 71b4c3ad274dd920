"""Text <-> token ids, for texts of which a part was written by a row and a part by a template.

Rule: what a row writes never becomes a control token, whatever it spells; what a template writes may.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken

# Stands inside every control token that a row spells, so that the tokenizer does not see one; it is a token of our
# copy of the tokenizer alone and is taken out of the ids again. It is plain ASCII, which no JSON filter escapes.
BREAK = "=|finetune:text|="


class TokenText:
    """A copy of a tokenizer that can tell spelled control tokens from real ones."""

    def __init__(self, tokenizer: Any) -> None:
        self.control = _control_pattern(tokenizer)
        self.bos_ids = _automatic_bos(tokenizer)
        self.tokenizer = copy.deepcopy(tokenizer)
        self.tokenizer.add_tokens([AddedToken(BREAK, special=True, normalized=False)])
        self._break_id = self.tokenizer.convert_tokens_to_ids(BREAK)

    def ids(self, texts: Iterable[str]) -> dict[str, list[int]]:
        """Return the ids of each distinct text, without a BOS of the tokenizer's own and without our break."""
        distinct = list(dict.fromkeys(texts))
        if not distinct:
            return {}
        encoded = self.tokenizer(
            distinct, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return {
            text: [token for token in ids if token != self._break_id] if BREAK in text else ids
            for text, ids in zip(distinct, encoded, strict=True)
        }

    def decoded(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def neutral(self, value: Any) -> Any:
        """Return a JSON value with every control token that its texts spell broken, so that it stays text."""
        if isinstance(value, str):
            return self.control.sub(lambda match: match[0][0] + BREAK + match[0][1:], value)
        if isinstance(value, list):
            return [self.neutral(item) for item in value]
        if isinstance(value, dict):
            return {self.neutral(name): self.neutral(item) for name, item in value.items()}
        return value


def token_texts(tokenizer: Any, ids: Iterable[int]) -> dict[int, str | list[int]]:
    """Return what each token writes after other text: its text, or its bytes where it is a part of a character.

    Joined they are the decoded text, special tokens included.
    """
    distinct = sorted(set(ids))
    if not distinct:
        return {}  # batch_decode of nothing is one empty text
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    once = tokenizer.batch_decode([[one] for one in distinct], **options)
    twice = tokenizer.batch_decode([[one, one] for one in distinct], **options)
    texts: dict[int, str | list[int]] = {}
    for one, alone, doubled in zip(distinct, once, twice, strict=True):
        # A decoder may strip the space that begins a text: the second of two tokens has it.
        text = doubled[len(alone) :] if doubled.startswith(alone) else alone
        texts[one] = _token_bytes(tokenizer.convert_ids_to_tokens(one), text) if "\ufffd" in text else text
    return texts


def _token_bytes(token: str | None, text: str) -> str | list[int]:
    """Return the bytes of a token that is no whole text, by the two ways in which vocabularies spell them."""
    if token is None:
        return text
    if found := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token):
        return [int(found[1], 16)]
    table = _byte_characters()
    return [table[character] for character in token] if all(c in table for c in token) else text


@functools.cache
def _byte_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for: itself where it prints, else 256 and up."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


def continued(text: str) -> str:
    """Return `text` so that it is encoded as what follows other text: no tokenizer puts a space before it."""
    return BREAK + text


def _control_pattern(tokenizer: Any) -> re.Pattern[str]:
    """Return what finds the text of a control token; one of a single character cannot be broken and stays out."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    names = sorted(
        {name for name in added | set(tokenizer.all_special_tokens) if len(name) > 1}, key=len, reverse=True
    )
    return re.compile("|".join(re.escape(name) for name in names) or "(?!)")


def _automatic_bos(tokenizer: Any) -> list[int]:
    """Return the BOS token as the tokenizer puts it before a text by itself, if it does."""
    bare, full = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    return [tokenizer.bos_token_id] if full[:1] == [tokenizer.bos_token_id] and bare[:1] != full[:1] else []
