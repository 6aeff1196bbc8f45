"""Fixtures that several test folders share: a tiny random Qwen3 with its own tokenizer."""

import os
from collections.abc import Iterator
from pathlib import Path

import forked_servers
import hypothesis
import processes
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHAT_TEMPLATE = Path(__file__).parent / "rollout" / "chat" / "chat_template.jinja"
VOCAB_SIZE = 512

_TEXTS = (
    "Who founded the company that built the tower in the town of Arden?",
    '<tool_call>\n{"name": "search", "arguments": {"query": "Arden"}}\n</tool_call>',
    "[1] Arden - Arden is a town by the river. Its tower was built in 1902.",
    "I start from the town. Result 1 is Arden. <answer>Mira Holt</answer>",
)
_TAGS = ("think", "tool_call", "tool_response")


# Time says something about the machine, nothing about what is tested.
hypothesis.settings.register_profile(
    "tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")


def pytest_configure() -> None:
    """Compute on one thread, here and in the processes that tests start."""
    # Tensors here are tiny and test processes many: more threads only wait for each other.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that none of them is left for one process."""
    slow = ("integration", "engines", "commands", "plan", "tasks")
    items.sort(key=lambda item: item.path.parent.name not in slow)


@pytest.fixture(autouse=True)
def _no_process_outlives_its_test():
    """What a fixture of a wider scope started ends with the session at the latest."""
    before = processes.started()
    yield
    processes.end_all(since=before)


@pytest.fixture(scope="session")
def server_address(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where vLLM's servers are forked."""
    address = tmp_path_factory.mktemp("servers") / "socket"
    processes.Run(forked_servers.serve, str(address)).wait_for(address.exists)
    return address


@pytest.fixture
def forks_servers(server_address: Path) -> Iterator[None]:
    """Start vLLM's servers as forks."""
    with forked_servers.instead_of_interpreters(server_address):
        yield


def pytest_sessionfinish() -> None:
    """End what is left."""
    processes.end_all()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with Qwen's markup: chat tokens special, tags merely added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tags = [AddedToken(text, special=False) for tag in _TAGS for text in (f"<{tag}>", f"</{tag}>")]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", *tags],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE.read_text(),
    )


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The tiny model's tokenizer."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved random Qwen3 of about 0.2 million parameters with tied embeddings."""
    folder = tmp_path_factory.mktemp("tiny_qwen3")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
