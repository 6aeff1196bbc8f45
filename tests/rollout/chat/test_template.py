import copy
import json
import shutil
from pathlib import Path

import pytest
from conftest import make_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from scripted import SCHEMA

from trace_pl.engines.transformers import HFEngine
from trace_pl.errors import ConfigError, CreditError
from trace_pl.models.loading import load_end_ids, load_tokenizer
from trace_pl.models.names import BUILT_IN_BASE, resolve_model
from trace_pl.rollout.chat.answer_formats import AnswerTags, BoxedAnswer
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.rollout.chat.template_check import check_template
from trace_pl.tasks.closed_web.task import ClosedWebTask
from trace_pl.training.datamodule import RolloutDataModule

TOKENIZER = make_tokenizer()
TEMPLATE = ChatTemplate(TOKENIZER, [SCHEMA])
MARKUP = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_response>"]


def changed(old: str, new: str):
    """The tiny tokenizer with an edited chat template."""
    tokenizer = copy.deepcopy(TOKENIZER)
    assert old in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    return tokenizer


def test_pieces_are_those_of_the_template():
    decode = TEMPLATE.decode
    assert decode(TEMPLATE.generation_header) == "<|im_start|>assistant\n"
    assert decode([TEMPLATE.end_of_turn]) == "<|im_end|>"
    assert decode(TEMPLATE.observation_open) == "\n<|im_start|>user\n<tool_response>"
    assert decode(TEMPLATE.observation_ids("a page")) == "\na page\n"
    assert decode(TEMPLATE.observation_close) == "</tool_response><|im_end|>\n"
    assert not TEMPLATE.thinking_open


def test_a_response_ends_at_the_end_of_turn_the_tokenizers_end_and_the_models_own(caplog):
    assert TEMPLATE.stop_ids == (2,)
    assert ChatTemplate(TOKENIZER, [SCHEMA], end_ids=[2, 0]).stop_ids == (0, 2)
    other = copy.deepcopy(TOKENIZER)
    other.eos_token = "<|endoftext|>"
    assert ChatTemplate(other, [SCHEMA]).stop_ids == (0, 2)
    assert not caplog.records


def test_a_word_ends_no_response_whatever_the_models_settings_say(caplog):
    template = ChatTemplate(TOKENIZER, [SCHEMA], end_ids=[0, 40, 99_999])
    assert template.stop_ids == (0, 2)
    assert "ids [40, 99999], which are no special tokens" in caplog.text


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [2, 0]}}, {0, 2}),
        ({"generation_config.json": {"eos_token_id": 2}, "config.json": {"eos_token_id": 0}}, {2}),
        ({"generation_config.json": {}}, set()),
        ({"config.json": {"eos_token_id": [5, 6]}}, {5, 6}),
        ({"config.json": {}}, set()),
    ],
)
def test_what_ends_a_models_texts_is_read_from_its_files(tmp_path, files, expected):
    for name, content in {"config.json": {}, **files}.items():
        content |= {"model_type": "qwen3"} if name == "config.json" else {}
        (tmp_path / name).write_text(json.dumps(content))
    assert load_end_ids(str(tmp_path)) == expected


def test_a_run_stops_at_what_the_policys_own_settings_name(tmp_path):
    base = Path(resolve_model(BUILT_IN_BASE))
    for file in base.glob("*.j*"):
        shutil.copy(file, tmp_path)
    settings_file = tmp_path / "generation_config.json"
    content = json.loads(settings_file.read_text())
    settings_file.write_text(json.dumps(content | {"eos_token_id": [2, 0]}))
    for name, expected in ((BUILT_IN_BASE, (2,)), (str(tmp_path), (0, 2))):
        data = RolloutDataModule(ClosedWebTask((2,)), HFEngine, model_name=name)
        data.open(starts_engine=False)
        assert data.template.stop_ids == expected


def test_generation_settings_that_can_not_be_read_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="generation settings or a config of model"):
        load_end_ids(str(tmp_path))


def test_prompt_equals_the_templates_own_render():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who built the tower?"},
    ]
    own = TOKENIZER.apply_chat_template(messages, tools=[SCHEMA], tokenize=False)
    assert TEMPLATE.decode(TEMPLATE.prompt_ids("Be brief.", "Who built the tower?")) == own


def test_without_instructions_there_is_no_system_text():
    text = TEMPLATE.decode(TEMPLATE.prompt_ids("", "Who?"))
    assert text.startswith("<|im_start|>system\n# Tools\n<tools>")
    assert text.endswith("<|im_start|>user\nWho?<|im_end|>\n")


def test_pieces_add_up_to_a_dialogue_of_three_turns():
    messages = [{"role": "user", "content": "Who?"}]
    ids = TEMPLATE.prompt_ids("", "Who?")
    for call, result in (("one", "page one"), ("two", "page two"), ("three", "page three")):
        messages += [{"role": "assistant", "content": call}, {"role": "tool", "content": result}]
        ids += [*TEMPLATE.generation_header, *TEMPLATE.encode_markup(call), TEMPLATE.end_of_turn]
        ids += [*TEMPLATE.observation_open, *TEMPLATE.observation_ids(result)]
        ids += TEMPLATE.observation_close
    ids += TEMPLATE.generation_header
    own = TOKENIZER.apply_chat_template(
        messages, tools=[SCHEMA], tokenize=False, add_generation_prompt=True
    )
    assert TEMPLATE.decode(ids) == own
    assert ids.count(TEMPLATE.end_of_turn) == 8  # system, user, and two for each turn


@given(st.lists(st.sampled_from([*MARKUP, "<", "|>", " ", "Arden", "\n", "\u00e9", "<<"])))
def test_foreign_text_keeps_every_character_and_makes_no_markup(parts):
    text = "".join(parts)
    ids = TEMPLATE.observation_ids(text)
    assert TEMPLATE.decode(ids) == f"\n{text}\n"
    assert set(ids).isdisjoint(TOKENIZER.added_tokens_decoder)


def test_markup_in_a_question_stays_text():
    safe = TEMPLATE.prompt_ids("", "Who?")
    odd = TEMPLATE.prompt_ids("", "Who<|im_end|>?")
    assert odd.count(TEMPLATE.end_of_turn) == safe.count(TEMPLATE.end_of_turn) == 2


def test_answers_are_scored_without_their_opening():
    branch = TEMPLATE.render("The answer is", " Mira Holt")
    assert TEMPLATE.decode(branch.opening_ids) == (
        "<|im_start|>assistant\n<think>\n\n</think>\n\nThe answer is"
    )
    assert TEMPLATE.decode(branch.answer_ids) == " Mira Holt"


def test_answer_tokens_are_those_the_policy_would_write_after_the_opening():
    joint = TEMPLATE.encode_markup("Result 1 is Arden")
    branch = TEMPLATE.render("Result 1 is", " Arden")
    assert joint[-len(branch.answer_ids) :] == list(branch.answer_ids)


def test_a_token_across_the_border_is_not_shared():
    # "tower" is one token here, so "to" and "wer" must be encoded apart.
    assert len(TEMPLATE.encode_markup(" tower")) == 1
    branch = TEMPLATE.render(" to", "wer")
    assert TEMPLATE.decode(branch.answer_ids) == "wer"
    assert TEMPLATE.decode(branch.opening_ids).endswith(" to")


def test_a_space_before_an_answer_belongs_to_its_first_token():
    branch = TEMPLATE.render("Result 1 is ", "Arden")
    assert branch == TEMPLATE.render("Result 1 is", " Arden")
    assert len(branch.answer_ids) == len(TEMPLATE.encode_markup(" Arden"))


def test_markup_in_a_gold_answer_stays_text():
    branch = TEMPLATE.render("<answer>", "Mira<|im_end|>")
    assert TEMPLATE.decode(branch.answer_ids) == "Mira<|im_end|>"
    assert TEMPLATE.end_of_turn not in branch.answer_ids
    assert branch.opening_ids == TEMPLATE.render("<answer>", "Mira").opening_ids


def test_the_answer_format_speaks_in_the_prompt_and_opens_the_probed_answer():
    boxed = ChatTemplate(TOKENIZER, [SCHEMA], answer_format=BoxedAnswer("Use a box."))
    assert boxed.decode(boxed.prompt_ids("Be brief.", "Who?")).startswith(
        "<|im_start|>system\nBe brief.\n\nUse a box."
    )
    assert "Use a box." in boxed.decode(boxed.prompt_ids("", "Who?"))
    branch = boxed.render(boxed.answer_opening, "Mira")
    assert boxed.decode(branch.opening_ids).endswith(r"\boxed{")


def test_an_instruction_that_names_a_tool_does_not_describe_it():
    silent = changed("tools", "no_tools")
    instruction = AnswerTags("When your search ends, use tags.")
    template = ChatTemplate(silent, [SCHEMA], "Tools: search.", answer_format=instruction)
    text = template.decode(template.prompt_ids("", "Who?"))
    assert "When your search ends, use tags.\n\nTools: search." in text


def test_an_empty_answer_is_refused():
    with pytest.raises(CreditError, match="at least one answer token"):
        TEMPLATE.render("<answer>", "")


def test_a_header_that_opens_thinking_is_closed_for_the_probe():
    tokenizer = changed(
        "{{- '<|im_start|>assistant\\n' }}{%- endif %}",
        "{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}",
    )
    template = ChatTemplate(tokenizer, [SCHEMA])
    assert template.thinking_open
    assert template.decode(template.generation_header) == "<|im_start|>assistant\n<think>\n"
    branch = template.render("<answer>", "Mira")
    assert template.decode(branch.opening_ids).endswith(
        "assistant\n<think>\n\n</think>\n\n<answer>"
    )


def test_a_template_that_knows_no_thinking_gets_none():
    template = ChatTemplate(changed("</think>", "</x>"), [SCHEMA])
    opening_ids = template.render("", "Mira").opening_ids
    assert template.decode(opening_ids) == "<|im_start|>assistant\n"
    # The policy may think all the same; where it does, its thinking is closed.
    opening_ids = template.render("", "Mira", inside=True).opening_ids
    assert template.decode(opening_ids) == "\n</think>\n\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("message.role == 'tool'", "message.role == 'other'", "exactly once"),
        ("tool | tojson", "'a tool'", r"leaves out \['search'\]"),
        ("content + '<|im_end|>\\n' }}\n{%- elif message.role == 'tool'",
         "content + '.<|im_end|>\\n' }}\n{%- elif message.role == 'tool'", "end-of-turn token"),
        ("{%- elif message.role == 'tool' %}",
         "{%- elif message.role == 'tool' %}{{ raise_exception('no tools here') }}",
         "no tools here"),
        ("'\\n<tool_response>\\n' + message.content",
         "'\\n<tool_response>\\n' + loop.index0|string + message.content", "made of equal pieces"),
    ],
)  # fmt: skip
def test_a_template_that_can_not_carry_tool_turns_is_refused(old, new, message):
    with pytest.raises(ConfigError, match=message):
        check_template(ChatTemplate(changed(old, new), [SCHEMA]))


def test_the_built_in_model_reads_results_apart_from_the_text_around_them():
    """It was taught so, and is lost where a result's full stop and the newline are one token."""
    template = ChatTemplate(load_tokenizer(BUILT_IN_BASE), [SCHEMA])
    found = template.observation_open + template.observation_ids("Arden is a town.")
    found += template.observation_close
    assert found == [
        id_
        for text in ("\n<|im_start|>user\n<tool_response>\n", "Arden is a town.",
                     "\n</tool_response><|im_end|>\n")
        for id_ in template.encode_markup(text)
    ]  # fmt: skip
    assert found != template.encode_markup(template.decode(found))


def test_a_tokenizer_without_a_template_is_refused():
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="Expected a chat template"):
        ChatTemplate(tokenizer, [SCHEMA])
