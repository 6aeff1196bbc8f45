"""The tiny model's own tokenizer and chat template.

A byte-level BPE whose pre-tokenizer keeps an invented word, a kind ("a town") and a relation
(" hosting ") in one piece each and lets merges run across all other lower-case text and JSON
scaffolding ('{"name": "'). A tool turn is then about 25 tokens, which is what makes reinforcement
learning on a laptop CPU possible. Encoding is lossless for any text.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<answer>", "</answer>",
)  # fmt: skip
"""Structure the policy writes itself, so added but not special: decoding keeps them."""

# A space belongs to the word before it, but for those inside a name: all parts of a name are then
# the same tokens wherever it stands.
_KIND_OR_RELATION = r"\ba [a-z]+| ?\b[a-z]+ing ?"
_PIECES = (
    rf"{_KIND_OR_RELATION}|(?<=[A-Z][a-z]{{4}}) [A-Z][a-z]+|[A-Z][a-z]+|[0-9][^A-Za-z0-9]*"
    rf"|(?:(?!{_KIND_OR_RELATION})[^A-Z0-9])+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 1280) -> PreTrainedTokenizerFast:
    """Train the tokenizer on rendered transcripts and attach the chat template.

    Args:
        texts: Raw text, chat markup included; the markup becomes single tokens.
        vocab_size: Upper bound of the vocabulary, bytes and markup included.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END, *(AddedToken(tag, special=False) for tag in TAGS)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        # Merges run across so much that a result's last words would be other tokens than elsewhere.
        slots_apart=True,
        chat_template=files(__package__).joinpath("chat_template.jinja").read_text(),
    )
