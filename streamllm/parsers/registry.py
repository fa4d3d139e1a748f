"""Parsers by name, and which one a model's chat template calls for."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from streamllm.errors import ConfigError
from streamllm.parsers.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from streamllm.parsers.events import OutputParser
from streamllm.parsers.harmony import HarmonyParser
from streamllm.parsers.json_calls import (
    Granite20bParser,
    GraniteParser,
    HermesParser,
    InternLMParser,
    JambaParser,
    Phi4MiniParser,
)
from streamllm.parsers.llama_json import Llama3JsonParser, Llama4JsonParser
from streamllm.parsers.mistral import MistralParser
from streamllm.parsers.pythonic import Llama4PythonicParser, PythonicParser
from streamllm.parsers.qwen3_coder import Qwen3CoderParser
from streamllm.parsers.reasoning import ChainedParser, PlainParser, ReasoningFormat
from streamllm.parsers.tool_call_parser import ToolCallParser
from streamllm.parsers.tools import Tool

_TOOL_PARSERS: dict[str, type[ToolCallParser]] = {}

FALLBACK_TOOL_PARSER = "hermes"
"""For a choice that is forced by grammar where the template knows no tools: the model has learnt no format,
and this one is the most common."""

HARMONY_REASONING = "openai_gptoss"

_THINK = ("<think>",), ("</think>",)
_REASONING_FORMATS = {
    tags.name: tags
    for tags in (
        ReasoningFormat("deepseek_r1", *_THINK, opened=True),
        ReasoningFormat("qwen3", *_THINK),
        ReasoningFormat("smollm3", *_THINK),
        ReasoningFormat("mistral", begins=("[THINK]",), ends=("[/THINK]",)),
        ReasoningFormat(
            "granite",
            begins=("Here is my thought process:", "Here's my thought process:"),
            ends=("Here is my response:", "Here's my response:"),
        ),
    )
}


def register_tool_parser(parser: type[ToolCallParser]) -> type[ToolCallParser]:
    """Make a format known under its name and aliases; one that has them already is replaced.

    A file given with ``--tool-parser-plugin`` calls it, also as a decorator.

    Raises:
        ConfigError: it is no :class:`ToolCallParser` with a name.
    """
    if not (isinstance(parser, type) and issubclass(parser, ToolCallParser) and hasattr(parser, "name")):
        raise ConfigError(
            f"{parser!r} is no tool parser: it must be a subclass of ToolCallParser with a name."
        )
    for name in (parser.name, *parser.aliases):
        _TOOL_PARSERS[name] = parser
    return parser


for _parser in (
    HermesParser,
    Llama3JsonParser,
    Llama4JsonParser,
    Llama4PythonicParser,
    PythonicParser,
    MistralParser,
    Qwen3CoderParser,
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    HarmonyParser,
    GraniteParser,
    Granite20bParser,
    Phi4MiniParser,
    JambaParser,
    InternLMParser,
):
    register_tool_parser(_parser)


def tool_parser(name: str) -> type[ToolCallParser]:
    """The format that ``--tool-call-parser`` names.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in _TOOL_PARSERS:
        raise ConfigError(
            f"--tool-call-parser {name} is not known; there are {_listed(_TOOL_PARSERS)}. Others come with "
            "--tool-parser-plugin FILE.py."
        )
    return _TOOL_PARSERS[name]


def reasoning_format(name: str) -> ReasoningFormat | None:
    """The tags that ``--reasoning-parser`` names: a family, or any two tags as ``BEGIN,END``.

    Returns:
        ``None`` for ``openai_gptoss``: the ``openai`` tool parser reads that reasoning.

    Raises:
        ConfigError: there is none of that name.
    """
    if name == HARMONY_REASONING:
        return None
    if name in _REASONING_FORMATS:
        return _REASONING_FORMATS[name]
    begin, comma, end = name.partition(",")
    if comma and begin.strip() and end.strip():
        return ReasoningFormat(name, begins=(begin.strip(),), ends=(end.strip(),))
    known = _listed([*_REASONING_FORMATS, HARMONY_REASONING])
    raise ConfigError(
        f"--reasoning-parser {name} is not known; there are {known}, and two tags with a comma between them, "
        "such as '<think>,</think>'."
    )


def load_plugin(path: str | Path) -> None:
    """Run a file that registers tool parsers.

    Raises:
        ConfigError: it cannot be read, or fails.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"--tool-parser-plugin {path}: there is no such file.")
    spec = importlib.util.spec_from_file_location(f"streamllm_tool_parser_plugin_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--tool-parser-plugin {path}: it must be a Python file, named *.py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"--tool-parser-plugin {path} fails: {type(error).__name__}: {error}") from error


def output_parser(
    tool_format: type[ToolCallParser] | None,
    reasoning: ReasoningFormat | None,
    tools: Sequence[Tool],
    *,
    parallel: bool = True,
    prompt: str | None = None,
) -> OutputParser:
    """The parser for one text.

    Args:
        tool_format: the model's; it is used if there are tools, or if it reads reasoning too.
        reasoning: the model's tags; without effect if the tool format reads reasoning.
        tools: those of the request that may be called; none for the choice ``"none"``, which leaves calls in
            the content.
        parallel: ``False``: calls after the first are dropped.
        prompt: what was rendered for the model; reasoning may have been opened at its end.
    """
    use_tools = tool_format is not None and (tools or tool_format.handles_reasoning)
    calls = tool_format(tools, parallel=parallel) if tool_format is not None and use_tools else None
    if reasoning is None or (calls is not None and calls.handles_reasoning):
        return calls or PlainParser()
    thoughts = reasoning.parser(opened=None if prompt is None else reasoning.is_opened_by(prompt))
    return thoughts if calls is None else ChainedParser(thoughts, calls)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


# -- by chat template --------------------------------------------------------------------------------------


def choose_tool_parser(template: str) -> str | None:
    """The format in which a chat template writes the calls of earlier turns, or tells the model to write
    them; ``None``: it knows no tools, or writes them in a format that is not known.

    The more particular a mark, the earlier it is asked for: several families share ``<tool_call>``.

    Args:
        template: the Jinja source.
    """

    def has(*marks: str) -> bool:
        return all(mark in template for mark in marks)

    if has("<|channel|>", "<|message|>"):
        return "openai"
    if has("<｜tool▁calls▁begin｜>"):  # noqa: RUF001
        return "deepseek_v3" if has("```json") else "deepseek_v31"
    if has("[TOOL_CALLS]"):
        return "mistral"
    if has("<|start_of_role|>"):  # Granite 3 (a list) and 4 (Hermes's object)
        return _granite(template)
    if has("<|function_call_library|>") or has("<function_call>"):
        return "granite-20b-fc"
    if has("functools") or has("<|tool|>", "<|/tool|>"):
        return "phi4_mini_json"
    if has("<|action_start|>", "<|plugin|>"):
        return "internlm"
    if has("<tool_call>"):
        return _tool_call_tag(template)
    if has("<tool_calls>"):
        return "jamba"
    return _llama(template)


def _granite(template: str) -> str | None:
    if "<tool_call>\\n{" in template or "<tool_call>\n{" in template:
        return "hermes"
    return "granite" if "tool" in template else None


def _tool_call_tag(template: str) -> str | None:
    """``<tool_call>`` holds an object with a name, or Qwen3-Coder's tags, or what only GLM reads."""
    if "<function=" in template and "<parameter=" in template:
        return "qwen3_coder"
    return "hermes" if '"name"' in template or '\\"name\\"' in template else None


def _llama(template: str) -> str | None:
    """Llama's templates say in words which of its formats the model is to use."""
    is_llama4 = "<|header_start|>" in template
    if "[func_name1(" in template or "func_name1(param" in template:
        return "llama4_pythonic" if is_llama4 else "pythonic"
    if '"parameters": ' in template and '{"name": ' in template:
        return "llama4_json" if is_llama4 else "llama3_json"
    return None


def choose_reasoning_parser(template: str) -> str | None:
    """How the model of a chat template marks its reasoning; ``None``: not at all."""
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY_REASONING
    if "[THINK]" in template:
        return "mistral"
    if "Here is my thought process:" in template:
        return "granite"
    if "think>" not in template:
        return None
    if "/no_think" in template and "reasoning_mode" in template:
        return "smollm3"
    return "qwen3" if "enable_thinking" in template else "deepseek_r1"
