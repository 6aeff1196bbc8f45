"""Text to tokens and back, with a hard line between trusted markup and foreign text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Slot:
    """A place for foreign text in trusted text.

    The trusted text up to the nearest markup on both sides is encoded together with what fills the
    slot, for tokens may reach across: a full stop and the newline after it are one token of many
    tokenizers. So a filled slot has the tokens of the whole text.
    """

    encoder: TextEncoder
    open: list[int]
    head: str
    tail: str
    close: list[int]

    def fill(self, text: str) -> list[int]:
        """Return the tokens between ``open`` and ``close``, none of which is markup."""
        return self.encoder.plain(self.head + text + self.tail)


class TextEncoder:
    """Encodes text either as markup, or as plain text that cannot produce a markup token.

    Args:
        tokenizer: a fast tokenizer of transformers. One that was set up with ``slots_apart`` (a key
            of ``tokenizer_config.json``) belongs to a model that was taught to read what fills a
            slot apart from the text around it; others get the tokens of the whole text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.slots_apart = bool(tokenizer.init_kwargs.get("slots_apart", False))
        # Some tokenizers add runs of spaces or newlines as tokens; those are text, not markup.
        added = {
            int(i): token.content
            for i, token in tokenizer.added_tokens_decoder.items()
            if token.special or len(token.content.strip()) > 1
        }
        self.markup_ids = frozenset(added)
        """Ids of special tokens and of merely added ones such as ``<tool_call>``."""
        # Longest first, so that a literal which contains another is met as a whole.
        literals = sorted((text for text in added.values() if text), key=len, reverse=True)
        self._literal = re.compile("|".join(map(re.escape, literals)) or r"(?!)")

    def markup(self, text: str) -> list[int]:
        """Return trusted text as tokens; markup literals become their own tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def plain(self, text: str) -> list[int]:
        """Return foreign text as tokens, none of which is markup.

        The tokenizer's own switch covers special tokens but not added ones, so literals are cut
        after their first character and their halves are encoded apart. Nothing of the text is lost,
        except a single character that is itself a special token.
        """
        ids: list[int] = []
        start = 0
        for match in self._literal.finditer(text):
            cut = match.start() + 1
            ids += self._unspecial(text[start:cut])
            start = cut
        ids += self._unspecial(text[start:])
        return ids

    def slot(self, before: str, after: str) -> Slot:
        """Return a place for foreign text between two trusted ones."""
        if self.slots_apart:
            return Slot(self, self.markup(before), "", "", self.markup(after))
        literals = list(self._literal.finditer(before))
        begin = literals[-1].end() if literals else 0
        literal = self._literal.search(after)
        end = literal.start() if literal else len(after)
        return Slot(
            self, self.markup(before[:begin]), before[begin:], after[:end], self.markup(after[end:])
        )

    def _unspecial(self, text: str) -> list[int]:
        ids = self.markup(text)
        if self.markup_ids.isdisjoint(ids):
            return ids
        if len(text) == 1:
            return []
        middle = len(text) // 2
        return self._unspecial(text[:middle]) + self._unspecial(text[middle:])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def split(self, opening: str, answer: str) -> tuple[list[int], list[int]]:
        """Return the tokens of two texts as they stand one after the other.

        They are encoded together, as the policy would have written them, unless a token reaches
        across the border. A space at the end of the opening that is one token with the answer's
        first letters belongs to the answer. Markup in the answer stays plain text.
        """
        encoded = self._tokenizer(
            opening + answer, add_special_tokens=False, return_offsets_mapping=True
        )
        border = len(opening)
        offsets = encoded["offset_mapping"]
        count = sum(stop <= border for _, stop in offsets)
        shared = opening[offsets[count][0] :] if count < len(offsets) else ""
        ids = list(encoded["input_ids"])
        if shared.strip() or not self.markup_ids.isdisjoint(ids[count:]):
            return self.markup(opening), self.plain(answer)
        return ids[:count], ids[count:]
