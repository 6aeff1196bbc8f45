import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from trace_pl.data.closed_web.architecture import build_model
from trace_pl.data.closed_web.make_base import (
    BaseRecipe,
    make_notes,
    make_transcripts,
    weighted_loss,
)
from trace_pl.data.closed_web.task import ClosedWebTask, web_browser
from trace_pl.data.closed_web.transcripts import UNKNOWN, Demonstrator, Noise
from trace_pl.data.closed_web.weighting import Encoder, similar_lengths
from trace_pl.data.closed_web.world import ClosedWeb
from trace_pl.policy import BUILT_IN_BASE, load_model, load_tokenizer
from trace_pl.search.formats import HermesFormat

SMALL = BaseRecipe(num_webs=2, num_transcripts=12, num_notes=12)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BUILT_IN_BASE)


def test_a_transcript_without_noise_reaches_the_gold_answer():
    web = ClosedWeb()
    guide = Demonstrator(web, web_browser(web))
    for chain in web.chains(3, "train")[:20]:
        transcript = guide.transcript(chain, Noise(), random.Random(0))
        last = HermesFormat().parse(transcript.turns[-1][0])
        assert (last.answer,) == web.question(chain).answers
        assert len(transcript.turns) == 2 * 3 + 1


def test_giving_up_answers_with_a_word_that_is_never_gold():
    web = ClosedWeb()
    guide = Demonstrator(web, web_browser(web))
    noise = Noise(give_up=1.0)
    transcript = guide.transcript(web.chains(2, "train")[0], noise, random.Random(0))
    assert HermesFormat().parse(transcript.turns[0][0]).answer == UNKNOWN
    assert UNKNOWN not in {entity.name for entity in web.entities.values()}


def test_real_web_transcripts_use_only_the_chains_of_the_base_split():
    asked = {t.question for t in make_transcripts(replace(SMALL, permuted_share=0.0))}
    allowed = {q.text for q in ClosedWeb().questions((1, 2, 3, 4), "base")}
    assert asked <= allowed
    for split in ("train", "validation", "test"):
        assert not asked & {q.text for q in ClosedWeb().questions((1, 2, 3, 4), split)}


def test_all_own_tokens_and_only_they_carry_full_weight(tokenizer):
    encoder = Encoder(tokenizer, 0.5, 0.02)
    row = encoder.transcript(make_transcripts(SMALL)[0])
    own = tokenizer.decode(row.ids_T[row.weights_T == 1.0].tolist())
    assert own.startswith("<think>\nI start from ")
    assert "<tool_response>" not in own
    assert own.count("<|im_end|>") == own.count("<think>")
    assert {round(weight, 4) for weight in row.weights_T.tolist()} <= {1.0, 0.5, 0.02}


def test_a_note_restates_its_page(tokenizer):
    encoder = Encoder(tokenizer, 0.5, 0.02)
    for note in make_notes(SMALL):
        assert all(f"Its {relation} is {name}." in note.page for relation, name in note.facts)
        row = encoder.note(note)
        assert tokenizer.decode(row.ids_T[row.weights_T > 0].tolist()) == "".join(
            name for _, name in note.facts
        )


def test_batches_of_similar_lengths_hold_every_row_once(tokenizer):
    encoder = Encoder(tokenizer, 0.5, 0.02)
    rows = [encoder.note(note) for note in make_notes(SMALL)]
    batches = similar_lengths(rows, 5, random.Random(0))
    assert sorted(id(row) for batch in batches for row in batch) == sorted(map(id, rows))


def test_the_first_head_starts_out_on_the_previous_token(tokenizer):
    torch.manual_seed(0)
    model = build_model(tokenizer, 1024).eval()
    model.set_attn_implementation("eager")
    ids = torch.randint(20, 900, (1, 60))
    attention = model.model(ids, output_attentions=True).attentions[0][0, 0]
    assert attention.diagonal(-1)[2:].min() > 0.8


def test_the_weighted_loss_ignores_tokens_without_weight(tokenizer):
    torch.manual_seed(0)
    model = build_model(tokenizer, 1024)
    encoder = Encoder(tokenizer, 0.5, 0.02)
    note = encoder.note(make_notes(SMALL)[0])
    logprobs = model(note.ids_T[None]).logits[0, :-1].log_softmax(-1)
    picked = logprobs.gather(1, note.ids_T[1:, None])[:, 0]
    expected = -picked[note.weights_T[1:] > 0].mean()
    torch.testing.assert_close(weighted_loss(model, [note]), expected)


def test_the_shipped_base_is_a_tiny_qwen3_that_has_a_card_and_a_template_for_tools():
    model = load_model(BUILT_IN_BASE)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert 500_000 < model.num_parameters() < 5_000_000
    tokenizer = load_tokenizer(BUILT_IN_BASE)
    schemas = ClosedWebTask().toolbox().schemas()
    assert "search" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tools=schemas, tokenize=False
    )


def test_every_name_of_the_web_is_two_tokens_wherever_it_stands(tokenizer):
    for entity in list(ClosedWeb().entities.values())[::10]:
        name = tokenizer.encode(entity.name, add_special_tokens=False)
        assert len(name) == 2
        for before in ("Its founder is ", '{"query": "', "<answer>", "[1] "):
            ids = tokenizer.encode(before + entity.name + ".", add_special_tokens=False)
            assert ids[-3:-1] == name


def test_one_small_recipe_makes_the_same_folder_twice(tmp_path):
    def make(folder):
        command = [sys.executable, "-m", "trace_pl.cli", "make-base", f"--output={folder}"]
        small = ["--recipe.num_transcripts=16", "--recipe.num_webs=2", "--recipe.num_notes=80",
                 "--recipe.notes_steps=1", "--recipe.num_threads=1"]  # fmt: skip
        subprocess.run([*command, *small], check=True, capture_output=True)
        return {p.name: p.read_bytes() for p in folder.iterdir()}

    first, second = make(tmp_path / "one"), make(tmp_path / "two")
    assert first == second
    assert {
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "README.md",
    } <= first.keys()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
