"""The call that a chat template writes against the format that is to read calls."""

import pytest
from conftest import make_tokenizer
from families import FOLDER, family
from scripted import SCHEMA

from trace_pl.engines.transformers import HFEngine
from trace_pl.errors import ConfigError
from trace_pl.rollout.chat.call_check import check_calls
from trace_pl.rollout.chat.call_formats import HermesFormat, LlamaFormat
from trace_pl.rollout.chat.template import ChatTemplate
from trace_pl.rollout.chat.xml_format import XmlFormat
from trace_pl.tasks.closed_web.task import ClosedWebTask
from trace_pl.training.datamodule import RolloutDataModule

HERMES, LLAMA, XML = HermesFormat(), LlamaFormat(), XmlFormat()
QWEN_CALL = "arguments if arguments is string else arguments | tojson"


def check(tokenizer, call_format):
    template = ChatTemplate(tokenizer, [SCHEMA], call_format.describe([SCHEMA]))
    check_calls(template, call_format)


@pytest.mark.parametrize(
    ("name", "call_format"), [("qwen3", HERMES), ("qwen3_thinking", HERMES), ("llama3", LLAMA)]
)
def test_a_format_that_reads_the_templates_own_calls_is_accepted(name, call_format):
    check(family(name), call_format)


@pytest.mark.parametrize(
    ("name", "call_format", "right"),
    [
        ("llama3", HERMES, "LlamaFormat"),
        ("qwen3", LLAMA, "HermesFormat"),
        ("qwen3_thinking", LLAMA, "HermesFormat"),
    ],
)
def test_a_format_that_reads_none_is_refused_with_the_name_of_the_right_one(
    name, call_format, right
):
    with pytest.raises(ConfigError) as refusal:
        check(family(name), call_format)
    assert f"chat template of 'tiny/{name}', such as " in str(refusal.value)
    assert f"got {type(call_format).__name__}, which does not. " in str(refusal.value)
    assert str(refusal.value).endswith(f"Set `data.call_format` to trace_pl.rollout.{right}.")


def test_a_template_that_writes_calls_as_tags_is_read_by_the_format_for_them():
    text = (FOLDER / "qwen3.jinja").read_text()
    start = text.index("{{- ('\\n' if content or not loop.first")
    stop = text.index("{%- endfor %}", start)
    as_tags = """{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for key, value in arguments | items %}
            {{- '<parameter=' + key + '>\\n' + value | string + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}"""
    tokenizer = family("qwen3", text[start:stop], as_tags)
    check(tokenizer, XML)
    with pytest.raises(ConfigError, match=r"<parameter=.*to trace_pl\.rollout\.XmlFormat"):
        check(tokenizer, HERMES)


def test_calls_that_no_shipped_format_reads_are_refused_with_what_to_do():
    old = '<tool_call>\\n{"name": "\' + call.function.name'
    tokenizer = family("qwen3", old, old.replace("<tool_call>\\n", "[TOOL_CALLS]"))
    with pytest.raises(ConfigError, match=r"\[TOOL_CALLS\].*Write a class like trace_pl"):
        check(tokenizer, HERMES)


@pytest.mark.parametrize(
    "arguments",
    [
        "arguments | tojson",  # takes an object
        "arguments",  # takes a text, an object is an error
        "arguments + ''",
        "arguments | tojson | tojson",  # shows an object as a text
    ],
)
def test_a_template_may_take_arguments_as_object_or_as_text(arguments):
    check(family("qwen3", QWEN_CALL, arguments), HERMES)


@pytest.mark.parametrize("content", ["none", "''"])
def test_a_template_may_take_calls_only_without_content_or_with_an_empty_one(content):
    old = "{%- elif message.tool_calls %}"
    refusal = "{{- raise_exception('content') }}"
    new = old + "{%- if message.content != " + content + " %}" + refusal + "{%- endif %}"
    check(family("llama3", old, new), LLAMA)
    with pytest.raises(ConfigError, match="LlamaFormat"):
        check(family("llama3", old, new), HERMES)


@pytest.mark.parametrize("call_format", [HERMES, LLAMA])
def test_nothing_is_refused_where_the_format_itself_describes_the_calls(call_format):
    check(family("smollm2"), call_format)


@pytest.mark.parametrize("call_format", [HERMES, LLAMA])
def test_nothing_is_refused_where_the_template_shows_no_calls_or_refuses_them(call_format):
    check(make_tokenizer(), call_format)
    old = "{%- elif message.tool_calls %}"
    check(family("llama3", old, old + "{{- raise_exception('no calls') }}"), call_format)


def test_a_run_without_tools_is_not_checked():
    check_calls(ChatTemplate(family("llama3")), HERMES)


def test_a_run_is_refused_before_anything_is_sampled(monkeypatch):
    monkeypatch.setattr(
        "trace_pl.training.agent_setup.load_tokenizer", lambda name: family("llama3")
    )
    data = RolloutDataModule(ClosedWebTask((2,)), HFEngine)
    with pytest.raises(ConfigError, match=r"got HermesFormat.*LlamaFormat"):
        data.open()
