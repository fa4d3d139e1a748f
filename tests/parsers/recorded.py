"""Outputs of models in each format, written from the formats' public descriptions, and what they say."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamllm.parsers.tools import Tool

UNIT = {"enum": ["celsius", "fahrenheit"]}
TOOLS = [
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": UNIT},
            "required": ["city"],
        },
    ),
    Tool("now", {"type": "object", "properties": {}}),
    Tool(
        "save",
        {
            "type": "object",
            "properties": {
                "note": {"type": "object", "additionalProperties": True},
                "tags": {"type": "array", "items": {"type": "string"}},
                "pinned": {"type": "boolean"},
                "reply_to": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        },
    ),
    Tool("any_arguments"),
]


@dataclass(frozen=True)
class Recorded:
    """A text, and the message in it: its calls as (name, arguments)."""

    parser: str
    name: str
    text: str
    calls: list[tuple[str, str]] = field(default_factory=list)
    content: str | None = None
    reasoning: str | None = None

    @property
    def id(self) -> str:
        return f"{self.parser}-{self.name}"


PARIS = '{"city": "Paris"}'
NESTED = '{"note": {"a": [1, {"b": "}]"}], "c": {}}, "tags": ["x", "y"], "pinned": true}'
ESCAPES = r'{"city": "Zürich \"Süd\" \\ \u00e9 😀 {[", "days": -3}'


def hermes(*arguments: tuple[str, str]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in arguments
    )


def objects(*calls: tuple[str, str], key: str = "arguments", separator: str = ", ") -> str:
    return separator.join(f'{{"name": "{name}", "{key}": {text}}}' for name, text in calls)


BAR, SPACE = "\uff5c", "\u2581"


def deepseek_token(words: str) -> str:
    return f"<{BAR}{words.replace(' ', SPACE)}{BAR}>"


BEGIN, END, CALL, CALL_END, SEPARATOR = map(
    deepseek_token, ("tool calls begin", "tool calls end", "tool call begin", "tool call end", "tool sep")
)


def deepseek_v3(*calls: tuple[str, str]) -> str:
    written = (f"{CALL}function{SEPARATOR}{name}\n```json\n{text}\n```{CALL_END}" for name, text in calls)
    return f"{BEGIN}{chr(10).join(written)}{END}"


def deepseek_v31(*calls: tuple[str, str]) -> str:
    return BEGIN + "".join(f"{CALL}{name}{SEPARATOR}{text}{CALL_END}" for name, text in calls) + END


def qwen(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def harmony_call(name: str, text: str, *, kind: str = " <|constrain|>json") -> str:
    return f"<|channel|>commentary to=functions.{name}{kind}<|message|>{text}<|call|>"


WEATHER = ("get_weather", PARIS)
NOW = ("now", "{}")
MARKS_INSIDE = ("get_weather", '{"city": "</tool_call> <|tool_call|> ]}[TOOL_CALLS]<|call|>```"}')
HARD = {
    "one": [WEATHER],
    "parallel": [WEATHER, NOW, ("get_weather", '{"city":"Oslo","days":2}')],
    "nested": [("save", NESTED)],
    "escapes": [("get_weather", ESCAPES)],
    "marks_inside": [MARKS_INSIDE],
    "no_arguments": [NOW],
}

JSON_FORMATS = {
    "hermes": lambda *calls: hermes(*calls),
    "mistral": lambda *calls: f"[TOOL_CALLS] [{objects(*calls)}]",
    "granite": lambda *calls: f"<|tool_call|>[{objects(*calls)}]",
    "granite-20b-fc": lambda *calls: "\n".join(f"<function_call> {objects(call)}" for call in calls),
    "phi4_mini_json": lambda *calls: f"functools[{objects(*calls)}]",
    "jamba": lambda *calls: f"<tool_calls>[{objects(*calls)}]</tool_calls>",
    "internlm": lambda *calls: "\n".join(
        f"<|action_start|><|plugin|>\n{objects(call, key='parameters')}<|action_end|>" for call in calls
    ),
    "llama3_json": lambda *calls: objects(*calls, key="parameters", separator="; "),
    "llama4_json": lambda *calls: objects(*calls, key="parameters", separator=""),
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
}
"""How each format writes calls whose arguments are JSON."""

RECORDED = [
    Recorded(parser, name, write(*calls), calls)
    for parser, write in JSON_FORMATS.items()
    for name, calls in HARD.items()
    if name not in ("nested", "escapes") or parser in ("hermes", "mistral", "llama3_json", "deepseek_v3")
] + [
    # Hermes, and what all formats in JSON share.
    Recorded("hermes", "content", "Let me see.\n" + hermes(WEATHER), [WEATHER], "Let me see."),
    Recorded("hermes", "around", f"\n\nA\n{hermes(WEATHER)}\nB ", [WEATHER], "\n\nA\n\nB"),
    Recorded("hermes", "after", f"\n{hermes(WEATHER)}\n\nDone.", [WEATHER], "Done."),
    Recorded("hermes", "plain", " \nNo call at all. \n", [], " \nNo call at all. \n"),
    Recorded("hermes", "blank", "\n \n", [], "\n \n"),
    Recorded("hermes", "without_end", "<tool_call>" + objects(WEATHER), [WEATHER]),
    Recorded("hermes", "two_without_end", ("<tool_call>" + objects(NOW)) * 2, [NOW, NOW]),
    Recorded(
        "hermes", "order", f'<tool_call>{{"id": 7, "arguments": {PARIS} , "name":"get_weather"}}', [WEATHER]
    ),
    Recorded("hermes", "only_name", '<tool_call>{"name": "now"}</tool_call>', [NOW]),
    Recorded(
        "hermes",
        "members",
        f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}, "x": [1, "}}"], }}</tool_call>!',
        [WEATHER],
        "!",
    ),
    Recorded(
        "hermes",
        "raw_newline",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb\tc\\\nd"}}</tool_call>',
        [("get_weather", r'{"city": "a\nb\tc\nd"}')],
    ),
    Recorded(
        "hermes",
        "missing_brace",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}\n</tool_call>\nNext',
        [WEATHER],
        "Next",
    ),
    Recorded(
        "hermes",
        "broken_arguments",
        '<tool_call>{"name": "get_weather", "arguments": {"city": ["Paris"}}\n</tool_call>' + hermes(NOW),
        [("get_weather", '{"city": ["Paris"'), NOW],
    ),
    Recorded(
        "hermes",
        "broken_by_end",
        '<tool_call>{"name": "get_weather", "arguments": {"city": 1</tool_call>',
        [("get_weather", '{"city": 1')],
    ),
    Recorded("hermes", "list", f"<tool_call>[{objects(WEATHER, NOW)}]</tool_call>", [WEATHER, NOW]),
    *(
        Recorded("hermes", f"lookalike_{index}", text, [], text)
        for index, text in enumerate(
            [
                "<tool_call>",
                "a <tool_cal",
                "if a<tool and b<tool_call:",
                "<tool_call> is how a call begins.",
                hermes(("unknown", PARIS)),
                f"say\n{hermes(('unknown', PARIS))}\nagain ",
                '<tool_call>{"name": "get_weather" "arguments": {}}</tool_call>',
                '<tool_call>{"name": "get_weather", "arguments": "text"}</tool_call>',
                '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
                '<tool_call>{"arguments": {}}</tool_call>',
                '<tool_call>{"name": "get_weather", "argum',
                "<tool_call>{'name': 'now'}</tool_call>",
                '<tool_call>{"a\\x": 1}</tool_call>',
            ]
        )
    ),
    Recorded("hermes", "second_mark", f"<tool_call>{hermes(NOW)}", [NOW], "<tool_call>"),
    Recorded(
        "hermes",
        "unknown_between",
        f"{hermes(NOW)}\n{hermes(('unknown', '{}'))}\n{hermes(NOW)}",
        [NOW, NOW],
        hermes(("unknown", "{}")),
    ),
    # Lists.
    Recorded("mistral", "content", "So:[TOOL_CALLS] [" + objects(WEATHER) + "]", [WEATHER], "So:"),
    Recorded("mistral", "id", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdefghi"}]', [NOW]),
    Recorded("mistral", "named", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]now{{}}", [WEATHER, NOW]),
    Recorded("mistral", "call_id", f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{PARIS}", [WEATHER]),
    Recorded("mistral", "unknown", "[TOOL_CALLS]unknown[ARGS]{}", [], "[TOOL_CALLS]unknown[ARGS]{}"),
    Recorded("mistral", "lookalike", "The token [TOOL_CALLS], see", [], "The token [TOOL_CALLS], see"),
    Recorded("granite", "tag", f"On it.\n<tool_call>[{objects(WEATHER)}]</tool_call>", [WEATHER], "On it."),
    Recorded("granite", "object", hermes(WEATHER, NOW), [WEATHER, NOW]),
    Recorded("phi4_mini_json", "marks", f"<|tool_call|>[{objects(NOW)}]<|/tool_call|>", [NOW]),
    Recorded(
        "phi4_mini_json", "lookalike", "import functools\nfunctools[1]", [], "import functools\nfunctools[1]"
    ),
    Recorded("internlm", "lookalike", "<|action_start|> x", [], "<|action_start|> x"),
    # Llama.
    Recorded("llama3_json", "tag", "<|python_tag|>" + objects(WEATHER, key="parameters"), [WEATHER]),
    Recorded(
        "llama3_json",
        "type",
        '\n{"type": "function", "name": "now", "parameters": {}}',
        [NOW],
    ),
    Recorded("llama3_json", "list", f"[{objects(WEATHER, NOW, key='parameters')}]", [WEATHER, NOW]),
    Recorded("llama3_json", "after", objects(NOW) + " Wait.", [NOW], "Wait."),
    *(
        Recorded("llama3_json", f"answer_{index}", text, [], text)
        for index, text in enumerate(
            [
                '{"city": "Paris", "population": 2}',
                '{"name": "Ada", "parameters": {}}',
                '{"name": "now", "age": 3}',
                '{"name": "now"}',
                "{not json}",
                "[1, 2]",
                "See " + objects(WEATHER, key="parameters"),
            ]
        )
    ),
    Recorded(
        "llama4_json",
        "marks",
        f"<|python_start|>{objects(WEATHER, key='parameters')}<|python_end|>",
        [WEATHER],
    ),
    # DeepSeek.
    Recorded("deepseek_v3", "content", "Sure.\n\n" + deepseek_v3(WEATHER), [WEATHER], "Sure."),
    Recorded("deepseek_v3", "form_31", deepseek_v31(WEATHER, NOW), [WEATHER, NOW]),
    Recorded("deepseek_v31", "form_3", deepseek_v3(WEATHER, NOW), [WEATHER, NOW]),
    Recorded("deepseek_v31", "unknown", deepseek_v31(("zz", "{}")), [], deepseek_v31(("zz", "{}"))),
    Recorded("deepseek_v31", "lookalike", f"{BEGIN} none", [], f"{BEGIN} none"),
    # Python.
    Recorded("pythonic", "one", '[get_weather(city="Paris")]', [WEATHER]),
    Recorded(
        "pythonic",
        "parallel",
        "[get_weather(city='Oslo', days=-2), now(), save(pinned=True,)]",
        [("get_weather", '{"city": "Oslo", "days": -2}'), NOW, ("save", '{"pinned": true}')],
    ),
    Recorded(
        "pythonic",
        "nested",
        "[save(note={'a': [1, (2, 3), {\"b\": 'x)]}'}], 'c': None}, tags=[\"é\"], reply_to=null)]",
        [
            (
                "save",
                '{"note": {"a": [1, [2, 3], {"b": "x)]}"}], "c": null}, "tags": ["é"], "reply_to": null}',
            )
        ],
    ),
    Recorded(
        "pythonic",
        "escapes",
        r"""[get_weather(city='a\'b"c\\d\n\x41\101\u00e9\U0001F600\q', unit="it's")]""",
        [("get_weather", r"""{"city": "a'b\"c\\d\nAAé😀\\q", "unit": "it's"}""")],
    ),
    Recorded(
        "pythonic",
        "surrogates",
        r"[get_weather(city='\ud83d\ude00\ud800')]",
        [("get_weather", r'{"city": "\ud83d\ude00\ud800"}')],
    ),
    Recorded(
        "pythonic",
        "triple",
        '[get_weather(city="""a "quoted"\nline""", unit="")]',
        [("get_weather", r'{"city": "a \"quoted\"\nline", "unit": ""}')],
    ),
    Recorded(
        "pythonic",
        "odd_values",
        "[any_arguments(a=0x10, b=1e999, c=foo, d=1_000, e=.5, f={1, 2}, g=r'\\d')]",
        [
            (
                "any_arguments",
                '{"a": 16, "b": "1e999", "c": "foo", "d": 1000, "e": 0.5, "f": "{1, 2}", "g": "\\\\d"}',
            )
        ],
    ),
    Recorded(
        "pythonic",
        "marks_inside",
        "[get_weather(city='), now()]')] ",
        [("get_weather", '{"city": "), now()]"}')],
    ),
    Recorded("pythonic", "no_arguments", "\n[now( )]\n", [NOW]),
    Recorded("pythonic", "after", "[now()] then", [NOW], "then"),
    Recorded(
        "pythonic",
        "broken",
        "[get_weather(city='Paris', 3), now()]",
        [WEATHER],
        ", 3), now()]",
    ),
    *(
        Recorded("pythonic", f"lookalike_{index}", text, [], text)
        for index, text in enumerate(
            [
                "[1, 2, 3]",
                "[link](https://example.com)",
                "[unknown(a=1)]",
                "[get_weather('Paris')]",
                "Call [now()]",
                "[]",
                "[now",
            ]
        )
    ),
    Recorded("llama4_pythonic", "bare", "[now()]", [NOW]),
    Recorded(
        "llama4_pythonic",
        "marks",
        'First.<|python_start|>[get_weather(city="Paris")]<|python_end|>',
        [WEATHER],
        "First.",
    ),
    # Qwen3-Coder.
    Recorded("qwen3_coder", "one", qwen("get_weather", city="Paris"), [WEATHER]),
    Recorded(
        "qwen3_coder",
        "parallel",
        "I look.\n" + qwen("get_weather", city="Oslo", days="2") + "\n" + qwen("now"),
        [("get_weather", '{"city": "Oslo", "days": 2}'), NOW],
        "I look.",
    ),
    Recorded(
        "qwen3_coder",
        "nested",
        qwen(
            "save",
            note='{"a": [1, {"b": "</parameter>"}]}',
            tags="[]",
            pinned="True",
            reply_to="null",
        ),
        [
            (
                "save",
                '{"note": {"a": [1, {"b": "</parameter>"}]}, "tags": [], "pinned": true, "reply_to": null}',
            )
        ],
    ),
    Recorded(
        "qwen3_coder",
        "strings",
        qwen("get_weather", city='a "b" \\ 😀\n\n  c\n', unit="celsius"),
        [("get_weather", r'{"city": "a \"b\" \\ 😀\n\n  c\n", "unit": "celsius"}')],
    ),
    Recorded(
        "qwen3_coder",
        "marks_inside",
        qwen("get_weather", city="</parameter> a </parameter>\n</function </tool_call>"),
        [("get_weather", r'{"city": "</parameter> a </parameter>\n</function </tool_call>"}')],
    ),
    Recorded("qwen3_coder", "empty", qwen("get_weather", city=""), [("get_weather", '{"city": ""}')]),
    Recorded(
        "qwen3_coder",
        "number_as_text",
        qwen("get_weather", city="12", days="many"),
        [("get_weather", '{"city": "12", "days": "many"}')],
    ),
    Recorded(
        "qwen3_coder",
        "inline",
        "<function=get_weather><parameter=city>Paris</parameter></function>",
        [WEATHER],
    ),
    Recorded("qwen3_coder", "not_listed", qwen("any_arguments", x="1"), [("any_arguments", '{"x": "1"}')]),
    Recorded(
        "qwen3_coder",
        "missing_ends",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</tool_call> Bye",
        [WEATHER],
        "Bye",
    ),
    Recorded(
        "qwen3_coder",
        "ended",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>",
        [WEATHER],
    ),
    *(
        Recorded("qwen3_coder", f"lookalike_{index}", text, [], text)
        for index, text in enumerate(
            [
                "<tool_call>",
                "<tool_call>\nfunction",
                "a<function=b>c",
                "<function=now",
                qwen("unknown", a="1"),
            ]
        )
    ),
    # Harmony.
    Recorded(
        "openai",
        "answer",
        "<|channel|>analysis<|message|>Simple.\n<|end|><|start|>assistant"
        "<|channel|>final<|message|>4. \n<|return|>",
        [],
        "4. \n",
        "Simple.\n",
    ),
    Recorded("openai", "one", harmony_call("get_weather", PARIS), [WEATHER]),
    Recorded("openai", "nested", harmony_call("save", NESTED, kind=" json"), [("save", NESTED)]),
    Recorded("openai", "escapes", harmony_call("get_weather", ESCAPES), [("get_weather", ESCAPES)]),
    Recorded("openai", "marks_inside", harmony_call(*MARKS_INSIDE), [MARKS_INSIDE]),
    Recorded("openai", "no_arguments", harmony_call("now", "{}", kind="<|constrain|>json"), [NOW]),
    Recorded("openai", "empty", harmony_call("now", " ", kind=""), [NOW]),
    Recorded(
        "openai",
        "parallel",
        "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant"
        + harmony_call("get_weather", PARIS)
        + "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}\n<|call|>",
        [WEATHER, NOW],
        None,
        "Two.",
    ),
    Recorded(
        "openai",
        "preamble",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
        + harmony_call("now", "{}"),
        [NOW],
        "I will look.",
        "a\nb",
    ),
    Recorded(
        "openai",
        "unknown",
        "<|channel|>commentary to=functions.zz json<|message|>{}<|end|><|start|>assistant"
        "<|channel|>analysis to=python code<|message|>1+1<|end|>",
        [],
        "{}",
        "1+1",
    ),
    Recorded(
        "openai",
        "broken",
        harmony_call("get_weather", '{"city": Paris)} oh'),
        [("get_weather", '{"city": Paris)} oh')],
    ),
    Recorded("openai", "no_header", "Hello <b>you</b><|end|>", [], "Hello <b>you</b>"),
    Recorded(
        "openai", "not_closed", "<|channel|>final<|message|>One<|channel|>final<|message|>Two", [], "One\nTwo"
    ),
]
