import random
import re
from dataclasses import replace

import processes
import pytest
import torch

from trace_pl.commands.make_base.architecture import build_model
from trace_pl.commands.make_base.encoded_transcripts import Encoder, similar_lengths
from trace_pl.commands.make_base.training import BaseRecipe, make_transcripts, weighted_loss
from trace_pl.commands.make_base.transcripts import UNKNOWN, Demonstrator, Noise
from trace_pl.models.loading import load_model, load_tokenizer
from trace_pl.models.names import BUILT_IN_BASE
from trace_pl.rollout.chat.answer_formats import AnswerTags
from trace_pl.rollout.chat.call_formats import HermesFormat
from trace_pl.tasks.closed_web.task import ClosedWebTask, web_browser
from trace_pl.tasks.closed_web.world import ClosedWeb

SMALL = BaseRecipe(num_webs=2, num_transcripts=12)


def final_answer(text):
    return AnswerTags().read(HermesFormat().parse(text).message)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(BUILT_IN_BASE)


def test_a_transcript_without_noise_reaches_the_gold_answer():
    web = ClosedWeb()
    guide = Demonstrator(web, web_browser(web))
    for chain in web.chains(3, "train")[:20]:
        transcript = guide.transcript(chain, Noise(), random.Random(0))
        assert (final_answer(transcript.turns[-1][0]),) == web.question(chain).answers
        assert len(transcript.turns) == 2 * 3 + 1


def test_giving_up_answers_with_a_word_that_is_never_gold():
    web = ClosedWeb()
    guide = Demonstrator(web, web_browser(web))
    noise = Noise(give_up=1.0)
    transcript = guide.transcript(web.chains(2, "train")[0], noise, random.Random(0))
    assert final_answer(transcript.turns[0][0]) == UNKNOWN
    assert UNKNOWN not in {entity.name for entity in web.entities.values()}


def test_real_web_transcripts_use_only_the_chains_of_the_base_split():
    asked = {t.question for t in make_transcripts(replace(SMALL, permuted_share=0.0))}
    allowed = {q.text for q in ClosedWeb().questions((1, 2, 3, 4), "base")}
    assert asked <= allowed
    for split in ("train", "validation", "test"):
        assert not asked & {q.text for q in ClosedWeb().questions((1, 2, 3, 4), split)}


def test_all_own_tokens_and_only_they_carry_full_weight(tokenizer):
    encoder = Encoder(tokenizer, 0.05, 10.0)
    row = encoder.transcript(make_transcripts(replace(SMALL, probed_share=0.0))[0])
    own = tokenizer.decode(row.ids_T[row.weights_T == 1.0].tolist())
    assert own.startswith("<think>\n")
    assert "<tool_response>" not in own
    assert own.count("<|im_end|>") == own.count("<think>")
    assert {round(weight, 4) for weight in row.weights_T.tolist()} == {1.0, 0.05}


def test_of_a_probed_answer_only_the_name_is_learned_in_the_words_of_the_prober(tokenizer):
    encoder = Encoder(tokenizer, 0.05, 10.0)
    web = ClosedWeb()
    guide = Demonstrator(web, web_browser(web))
    cuts = set()
    for seed in range(30):
        probed = guide.probed_transcript(web.chains(2, "train")[0], Noise(), random.Random(seed))
        cuts.add(len(probed.turns))
        row = encoder.transcript(probed)
        branch = encoder.template.render("<answer>", probed.probed_answer)
        opening, answer = len(branch.opening_ids), len(branch.answer_ids)
        tail = row.ids_T[-opening - answer :].tolist()
        assert tail == [*branch.opening_ids, *branch.answer_ids]
        assert row.weights_T[-opening - answer :].tolist() == [0.0] * opening + [10.0] * answer
    # Every boundary of four tool turns, none beyond the last.
    assert cuts == {0, 1, 2, 3, 4}


def test_each_decision_of_a_thought_follows_a_word_that_it_followed_before(tokenizer):
    web = ClosedWeb()
    guide = Demonstrator(web, web_browser(web))
    transcript = guide.transcript(
        web.chains(3, "train")[0], Noise(silent_answer=0.0), random.Random(0)
    )
    question = transcript.question
    for action, page in zip(transcript.turns[2::2], transcript.turns[1::2], strict=True):
        found = re.match(
            r"<think>\nIt is( a \w+ \w+ing)((?: [A-Z]\w+)+),( a \w+(?: \w+ing a \w+)?)\.", action[0]
        )
        assert found is not None
        fact, name, clause = found.groups()
        assert fact in question
        assert clause in question
        assert fact.split()[-1] + name in page[1]


def test_batches_of_similar_lengths_hold_every_row_once(tokenizer):
    encoder = Encoder(tokenizer, 0.05, 10.0)
    rows = [encoder.transcript(transcript) for transcript in make_transcripts(SMALL)]
    batches = similar_lengths(rows, 5, random.Random(0))
    assert sorted(id(row) for batch in batches for row in batch) == sorted(map(id, rows))


def test_an_untrained_model_already_looks_at_what_followed_the_same_token_before(tokenizer):
    torch.manual_seed(0)
    model = build_model(tokenizer, 1024).eval()
    model.set_attn_implementation("eager")
    words = torch.randperm(900)[:60] + 20
    ids = torch.cat([words, words])[None]
    first, second = model.model(ids, output_attentions=True).attentions
    assert first[0, 0].diagonal(-1)[2:].min() > 0.8
    followers = second[0, 0].diagonal(-59)
    assert followers[1:].mean() > 10 / ids.shape[1]


def test_the_weighted_loss_is_the_weighted_mean_over_tokens(tokenizer):
    torch.manual_seed(0)
    model = build_model(tokenizer, 1024)
    row = Encoder(tokenizer, 0.05, 10.0).transcript(make_transcripts(SMALL)[0])
    logprobs = model(row.ids_T[None]).logits[0, :-1].log_softmax(-1)
    picked = logprobs.gather(1, row.ids_T[1:, None])[:, 0]
    weights = row.weights_T[1:]
    expected = -(weights * picked).sum() / weights.sum()
    torch.testing.assert_close(weighted_loss(model, [row]), expected)


def test_the_shipped_base_is_a_tiny_qwen3_that_has_a_card_and_a_template_for_tools():
    model = load_model(BUILT_IN_BASE)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert 500_000 < model.num_parameters() < 5_000_000
    tokenizer = load_tokenizer(BUILT_IN_BASE)
    schemas = ClosedWebTask().toolbox().schemas()
    assert "search" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tools=schemas, tokenize=False
    )


def test_every_name_is_the_same_tokens_wherever_it_stands_one_for_each_word(tokenizer):
    for entity in list(ClosedWeb().entities.values())[::10]:
        name = tokenizer.encode(entity.name, add_special_tokens=False)
        assert len(name) == len(entity.name.split())
        for before in ("It is a company suing ", '{"query": "', "<answer>", "\n[1] "):
            ids = tokenizer.encode(before + entity.name + ".", add_special_tokens=False)
            assert ids[-1 - len(name) : -1] == name


def test_one_small_recipe_makes_the_same_folder_twice(tmp_path):
    def make(folder):
        small = ("--recipe.num_transcripts=16", "--recipe.num_webs=2", "--recipe.num_threads=1")
        processes.run("make-base", f"--output={folder}", *small)
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
