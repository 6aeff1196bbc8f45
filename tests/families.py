"""Tokenizers with templates in the style of known model families, trained here on a few lines."""

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "rollout" / "chat" / "templates"

# Letters with a mark before them, single digits, marks with the newlines after them, newlines.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEXT = (
    'system\n\nassistant\n\nuser\n\nipython\n\ntool\n"Arden is a town."\n\n {"name": "search"}\n',
    "The tower was built in 1902.\nMira Holt (born 1870)\n\n}\n\n.\n\n)\n",
    "One.\n\n",
    "Two.\n\n",
)
_CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
_TAGS = [f"<{end}{tag}>" for tag in ("tool_call", "tool_response", "think") for end in ("", "/")]


def _newlines_join() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    return pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _newlines_stay_apart() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


_FAMILIES = {
    "qwen3": (_newlines_join, _CHATML, _TAGS),
    "qwen3_thinking": (_newlines_join, _CHATML, _TAGS),
    "smollm2": (_newlines_stay_apart, _CHATML, []),
    "llama3": (_newlines_join, _LLAMA, []),
}
NAMES = tuple(_FAMILIES)


@cache
def _trained(name: str) -> str:
    split, special, tags = _FAMILIES[name]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*special, *(AddedToken(tag, special=False) for tag in tags)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer.to_str()


def family(name: str, old: str = "", new: str = "") -> PreTrainedTokenizerFast:
    """Return the tokenizer of a family; ``old`` in its template is replaced by ``new``."""
    template = (FOLDER / f"{name}.jinja").read_text()
    assert old in template
    special = _FAMILIES[name][1]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(name)),
        bos_token=special[0],
        eos_token=special[-1],
        additional_special_tokens=special[1:-1],
        chat_template=template.replace(old, new) if old else template,
        name_or_path=f"tiny/{name}",
    )
