"""The check at the start, on templates built like those of known model families."""

import json
import re

import pytest
from families import NAMES, family
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import SCHEMA

from trace_pl.errors import ConfigError
from trace_pl.rollout.chat.call_formats import HermesFormat
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.rollout.chat.template_check import check_template

TOOLS = [SCHEMA]
TOOL_PROMPT = HermesFormat().describe(TOOLS)
TEMPLATES = {name: ChatTemplate(family(name), TOOLS, TOOL_PROMPT) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_pieces_add_up_to_what_the_template_renders(name):
    check_template(TEMPLATES[name])


PARTS = st.sampled_from(["Arden", ".", "\n", " ", '"', "{", "\\", "1902", "\u00e9", ")", "\t"])


def rendered_ids(name, messages, generate=True):
    """The tokens of a full render by transformers itself."""
    return family(name).apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=generate, return_dict=False
    )


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=50)
@given(results=st.lists(st.lists(PARTS).map("".join), min_size=3, max_size=3))
def test_what_is_appended_has_the_tokens_of_a_full_render(name, results):
    template = TEMPLATES[name]
    system = "Be brief."
    if name == "smollm2":
        system += "\n\n" + TOOL_PROMPT
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Who (now)?"}]
    thought = "<think>\nhm\n</think>\n\n" if "qwen" in name else ""
    sampled = thought.removeprefix("<think>\n") if template.thinking_open else thought
    ids = template.prompt_ids("Be brief.", "Who (now)?")
    for number, result in enumerate(results):
        call = f"call {number}"
        messages += [
            {"role": "assistant", "content": thought + call},
            {"role": "tool", "content": result},
        ]
        ids += [*template.generation_header, *template.encode_markup(sampled + call)]
        assert ids == rendered_ids(name, messages[:-1], generate=False)[: len(ids)]
        ids += [template.end_of_turn, *template.observation_open]
        ids += [*template.observation_ids(result), *template.observation_close]
    assert ids + template.generation_header == rendered_ids(name, messages)


def test_each_family_has_its_own_markers():
    found = {
        name: (template.decode([template.end_of_turn]), template.decode(template.generation_header))
        for name, template in TEMPLATES.items()
    }
    assert found == {
        "qwen3": ("<|im_end|>", "<|im_start|>assistant\n"),
        "qwen3_thinking": ("<|im_end|>", "<|im_start|>assistant\n<think>\n"),
        "smollm2": ("<|im_end|>", "<|im_start|>assistant\n"),
        "llama3": ("<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    }
    assert [name for name in NAMES if TEMPLATES[name].thinking_open] == ["qwen3_thinking"]


def test_llama_gets_results_as_json_in_its_own_role():
    template = TEMPLATES["llama3"]
    text = template.decode([*template.observation_open, *template.observation_ids('a "b"\n')])
    assert text == '<|start_header_id|>ipython<|end_header_id|>\n\n"a \\"b\\"\\n"'


def test_tools_that_the_template_leaves_out_stand_in_the_system_prompt(caplog):
    template = ChatTemplate(family("smollm2"), TOOLS, TOOL_PROMPT)
    assert "'tiny/smollm2' does not describe tools: the system prompt does" in caplog.text
    text = template.decode(template.prompt_ids("Be brief.", "Who?"))
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert json.dumps(SCHEMA) in text
    assert TOOL_PROMPT not in TEMPLATES["qwen3"].decode(TEMPLATES["qwen3"].prompt_ids("", "Who?"))


def test_tools_that_nobody_describes_are_refused_with_what_to_do():
    with pytest.raises(ConfigError, match=r"tiny/smollm2.*leaves out \['search'\].*`tool_prompt`"):
        ChatTemplate(family("smollm2"), TOOLS)


# --- templates that break --------------------------------------------------------------------

BETWEEN = "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}"
BROKEN = {
    "drops the newline between turns": ("qwen3", BETWEEN, BETWEEN.replace(
        "'<|im_end|>\\n'", "'<|im_end|>' + ('\\n' if loop.last else '')")),
    "doubles the newline between turns": ("smollm2", "'<|im_end|>' + '\\n'",
        "'<|im_end|>' + ('\\n' if loop.index < 4 else '\\n\\n')"),
    "doubles the newline of the generation header": ("llama3",
        "add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n'",
        "add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n\\n'"),
    "strips results": ("qwen3_thinking", "'\\n<tool_response>\\n' + message.content",
        "'\\n<tool_response>\\n' + message.content | trim"),
    "merges the results of all turns": ("qwen3", "'\\n<tool_response>\\n' + message.content",
        "'\\n<tool_response>\\n' + (messages[:loop.index] | selectattr('role', 'equalto', 'tool')"
        " | map(attribute='content') | join('\\n'))"),
    "drops earlier results": ("smollm2", "message.content + '<|im_end|>'",
        "(message.content if loop.last or message.role != 'tool' else 'old') + '<|im_end|>'"),
    "renders thinking otherwise": ("qwen3_thinking", "'\\n</think>\\n\\n' + content",
        "'</think>\\n' + content"),
    "quotes by halves": ("llama3", "{{- message.content | tojson }}",
        "{{- '\"' + message.content + '\"' }}"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_template_that_breaks_is_refused_with_its_name_and_the_first_differing_token(case):
    name, old, new = BROKEN[case]
    tokenizer = family(name, old, new)
    with pytest.raises(ConfigError) as refusal:
        check_template(ChatTemplate(tokenizer, TOOLS, TOOL_PROMPT))
    pattern = (
        rf"template of 'tiny/{name}' .* three tool turns .* token \d+ is (\d+) \((.+)\) in its own "
        r"rendering, got (\d+) \((.+)\) from the pieces"
    )
    expected, its_text, got, our_text = re.search(pattern, str(refusal.value), re.DOTALL).groups()
    assert expected != got
    assert repr(tokenizer.decode([int(expected)])) == its_text
    assert repr(tokenizer.decode([int(got)])) == our_text


def test_the_named_token_is_the_first_that_differs():
    name, old, new = BROKEN["drops the newline between turns"]
    tokenizer = family(name, old, new)
    with pytest.raises(ConfigError) as refusal:
        check_template(ChatTemplate(tokenizer, TOOLS))
    (at,) = re.search(r"token (\d+) is", str(refusal.value)).groups()
    whole = TEMPLATES[name]
    ids = whole.prompt_ids("", "zqUSERqz?")
    # Of the first turn only its last token, the newline, is missing.
    ids += [*whole.generation_header, *whole.encode_markup("<think>\nzqTHOUGHTqz\n</think>\n\n")]
    ids += [*whole.encode_markup("zqONEqz"), whole.end_of_turn, *whole.observation_open]
    ids += [*whole.observation_ids("zqPAGEqz one."), *whole.observation_close]
    assert int(at) == len(ids) - 1


def test_equal_characters_of_other_tokens_are_refused():
    # One token ends this header, two stand there once a text follows.
    tokenizer = family("smollm2", "message.role + '\\n'", "message.role + '\\n\\n'")
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\\n'", "assistant\\n\\n'")
    assert len(tokenizer.encode("\n\n")) == 1
    assert len(tokenizer.encode("\n\nArden")) > len(tokenizer.encode("Arden")) + 1
    with pytest.raises(ConfigError, match=r"token \d+ is \d+ \('\\n'\) .* got \d+ \('\\n\\n'\)"):
        check_template(ChatTemplate(tokenizer, TOOLS, TOOL_PROMPT))


def test_a_result_within_the_assistants_message_is_refused():
    shown = "'<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n'"
    inside = f"message.content if message.role == 'tool' else {shown.replace(' + ', '~')}"
    inside = inside.replace("'<|im_end|>'", "('' if message.role == 'assistant' else '<|im_end|>')")
    with pytest.raises(ConfigError, match="end-of-turn token after the assistant's text"):
        ChatTemplate(family("smollm2", shown, inside), TOOLS, TOOL_PROMPT)
