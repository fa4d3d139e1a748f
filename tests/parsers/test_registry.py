"""Names, plug-ins, and what chat templates decide."""

from __future__ import annotations

import pytest

from streamllm.errors import ConfigError
from streamllm.parsers import registry
from streamllm.parsers.events import ToolCallStart
from streamllm.parsers.registry import choose_reasoning_parser, choose_tool_parser, load_plugin, tool_parser
from streamllm.parsers.tools import Tool
from streamllm.text.tokenizer import Tokenizer

NAMES = [
    "hermes", "llama3_json", "llama4_json", "llama4_pythonic", "pythonic", "mistral", "qwen3_coder",
    "qwen3_xml", "deepseek_v3", "deepseek_v31", "openai", "granite", "granite4", "granite-20b-fc",
    "phi4_mini_json", "jamba", "internlm",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_name_gives_a_parser(name):
    assert name in (tool_parser(name).name, *tool_parser(name).aliases)


def test_an_unknown_name_is_answered_with_all_names():
    with pytest.raises(ConfigError) as caught:
        tool_parser("herms")
    assert all(name in str(caught.value) for name in NAMES) and "--tool-parser-plugin" in str(caught.value)


PLUGIN = """
from streamllm.parsers.json_calls import JsonCallParser
from streamllm.parsers.registry import register_tool_parser

@register_tool_parser
class ShoutParser(JsonCallParser):
    name = "shout"
    marks = ("CALL!",)

    @classmethod
    def grammar(cls, rules):
        raise NotImplementedError
"""


def test_a_plugin_registers_a_parser(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_TOOL_PARSERS", dict(registry._TOOL_PARSERS))
    (tmp_path / "shout.py").write_text(PLUGIN)
    load_plugin(tmp_path / "shout.py")
    parser = tool_parser("shout")([Tool("f")])
    (start,) = (e for e in parser.feed('CALL!{"name": "f", "arguments": {}}') if isinstance(e, ToolCallStart))
    assert start.name == "f"


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("absent.py", None, "no such file"),
        ("broken.py", "1 / 0", "ZeroDivisionError: division by zero"),
        ("syntax.py", "def", "SyntaxError"),
        ("plugin.txt", "", "named \\*.py"),
        ("other.py", "from streamllm.parsers.registry import *\nregister_tool_parser(int)", "no tool parser"),
    ],
)
def test_a_plugin_that_fails_says_why(tmp_path, file, text, reason):
    if text is not None:
        (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load_plugin(tmp_path / file)


# The lines of published templates that write calls (or tell the model how to), and reasoning.
HERMES = r"""For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>"""  # noqa: E501
QWEN3 = (
    HERMES
    + r"""{{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}
{%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\n\n</think>\n\n' }}{%- endif %}"""
)
SMOLLM3 = (
    HERMES + """{%- if reasoning_mode == "/no_think" -%}{{- "<think>\\n\\n</think>\\n" -}}{%- endif %}"""
)
QWEN3_CODER = r"""{{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}
{{- '<parameter=' + args_name + '>\n' }}{{- '\n</parameter>\n' }}{{- '</function>\n</tool_call>' }}"""
GLM = (
    r"""{{ '\n<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value></tool_call>"""
)
LLAMA3 = r"""{{- 'Respond in the format {"name": function name, "parameters": ' }}
{{- 'dictionary of argument name and its value}.' }}
{{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}{{- "<|python_tag|>" + tool_call.name + ".call(" }}"""
LLAMA4 = LLAMA3.replace("<|start_header_id|>", "<|header_start|>").replace("python_tag", "python_start")
LLAMA4_PYTHONIC = (
    r"""{{- '<|header_start|>' }}- Use exact format: [func_name1(param1=value1, param2=value2)]"""
)
LLAMA32_PYTHONIC = (
    r"""should be in the format [func_name1(params_name1=params_value1)]{{- '<|start_header_id|>' }}"""
)
MISTRAL = r"""{{- "[TOOL_CALLS] [" }}{%- for tool_call in tool_calls %}{{- tool_call.function|tojson }}"""
MAGISTRAL = r"""{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}
{{- '[THINK]' + block['thinking'] + '[/THINK]' }}"""
DEEPSEEK_TOKENS = "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>"
DEEPSEEK_V3 = (
    f"{{{{'{DEEPSEEK_TOKENS}' + tool['type'] + tool['function']['name'] + '\\n' + '```json' + '\\n'}}}}"
)
DEEPSEEK_R1 = DEEPSEEK_V3 + "{% set content = content.split('</think>')[-1] %}{{'<think>\\n'}}"
DEEPSEEK_V31 = f"{{{{'{DEEPSEEK_TOKENS}'+ tool['function']['name'] }}}}{{{{'</think>'}}}}"
GPT_OSS = (
    """{{- "<|start|>assistant to=functions." + tool_call.name + "<|channel|>commentary json<|message|>" }}"""
)
GRANITE3 = "{{- '<|start_of_role|>assistant_tool_call<|end_of_role|><|tool_call|>' + message['content'] }}"
GRANITE32 = (
    GRANITE3 + "Write your thoughts after 'Here is my thought process:' and then 'Here is my response:'"
)
GRANITE4 = "{{- '<|start_of_role|>' }}" + HERMES
GRANITE_20B = "<|function_call_library|> please output <function_call> {"
PHI4_MINI = (
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}"
)
PHI4_FUNCTOOLS = 'formatted as functools[{"name": [function name], "arguments": ...}]'
INTERNLM = r"""{{- '<|action_start|><|plugin|>\n' }}{{- tool_call.function|tojson }}{{- '<|action_end|>' }}"""
JAMBA = r"""{{- "<tool_calls>[\n" }}{%- for tool_call in message["tool_calls"] %}{{- "]</tool_calls>" }}"""
CHATML = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (HERMES, "hermes", None),
        (QWEN3, "hermes", "qwen3"),
        (SMOLLM3, "hermes", "smollm3"),
        (QWEN3_CODER, "qwen3_coder", None),
        (GLM, None, None),
        (LLAMA3, "llama3_json", None),
        (LLAMA4, "llama4_json", None),
        (LLAMA4_PYTHONIC, "llama4_pythonic", None),
        (LLAMA32_PYTHONIC, "pythonic", None),
        (MISTRAL, "mistral", None),
        (MAGISTRAL, "mistral", "mistral"),
        (DEEPSEEK_V3, "deepseek_v3", None),
        (DEEPSEEK_R1, "deepseek_v3", "deepseek_r1"),
        (DEEPSEEK_V31, "deepseek_v31", "deepseek_r1"),
        (GPT_OSS, "openai", "openai_gptoss"),
        (GRANITE3, "granite", None),
        (GRANITE32, "granite", "granite"),
        (GRANITE4, "hermes", None),
        (GRANITE_20B, "granite-20b-fc", None),
        (PHI4_MINI, "phi4_mini_json", None),
        (PHI4_FUNCTOOLS, "phi4_mini_json", None),
        (INTERNLM, "internlm", None),
        (JAMBA, "jamba", None),
        (CHATML, None, None),
        ("", None, None),
    ],
)
def test_a_template_decides(template, tools, reasoning):
    assert choose_tool_parser(template) == tools
    assert choose_reasoning_parser(template) == reasoning


def test_the_default_models_template_knows_no_tools(default_model_path):
    template = Tokenizer.from_gguf(default_model_path).chat_template
    assert "<|im_start|>" in template and choose_tool_parser(template) is None
    assert choose_reasoning_parser(template) is None
    assert tool_parser(registry.FALLBACK_TOOL_PARSER).name == "hermes"
