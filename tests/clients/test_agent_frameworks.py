"""Agents of the OpenAI Agents SDK and of pydantic-ai, run to their end against the default model.

It is too small to choose tools with sense, so grammars make it: a call must be made while the first tool is
offered, then while the second one is. They are part of the extra ``clients``; without one
its tests are skipped.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import openai
import pydantic
import pytest
from asking import MODEL

QUESTION = "What is the weather in Paris?"
APIS = ["chat completions", "responses"]


class Report(pydantic.BaseModel):
    """The answer to the user."""

    sky: Literal["grey", "blue"]
    wind: int = pydantic.Field(ge=0, le=9)


# -- the OpenAI Agents SDK -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdk():
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    return agents


@pytest.fixture(params=APIS)
async def model(sdk, server, request):
    kind = sdk.OpenAIChatCompletionsModel if request.param == APIS[0] else sdk.OpenAIResponsesModel
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield kind(model=MODEL, openai_client=client)


def sdk_tools(sdk: Any, calls: list[tuple[str, Any]], *, in_turn: bool) -> list[Any]:
    """Two tools that write down their calls. ``in_turn``: one is offered until it was called, then the other;
    else both are until there were two calls."""

    def offered(number: int) -> Any:
        return lambda context, agent: len(calls) == number if in_turn else len(calls) < 2

    @sdk.function_tool(is_enabled=offered(0))
    def weather(city: Literal["Paris", "Oslo"]) -> str:
        """The weather in a city."""
        calls.append(("weather", city))
        return "rain"

    @sdk.function_tool(is_enabled=offered(1))
    def report(sky: Literal["grey", "blue"], wind: int) -> str:
        """Answer the user."""
        calls.append(("report", (sky, wind)))
        return f"{sky}, {wind}"

    return [weather, report]


async def run_sdk(sdk: Any, agent: Any, *, streamed: bool) -> Any:
    if not streamed:
        return await sdk.Runner.run(agent, QUESTION, max_turns=4)
    result = sdk.Runner.run_streamed(agent, QUESTION, max_turns=4)
    async for _ in result.stream_events():
        pass
    return result


@pytest.mark.parametrize("streamed", [False, True])
async def test_agents_sdk_uses_two_tools_in_turn(sdk, model, streamed):
    calls: list[tuple[str, Any]] = []
    agent = sdk.Agent(
        name="reporter",
        instructions="Find out, then report.",
        model=model,
        tools=sdk_tools(sdk, calls, in_turn=True),
        tool_use_behavior=sdk.StopAtTools(stop_at_tool_names=["report"]),
        reset_tool_choice=False,
        model_settings=sdk.ModelSettings(
            tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=80
        ),
    )
    result = await run_sdk(sdk, agent, streamed=streamed)
    (first, city), (second, (sky, wind)) = calls
    assert (first, second) == ("weather", "report")
    assert city in ("Paris", "Oslo") and sky in ("grey", "blue") and isinstance(wind, int)
    assert result.final_output == f"{sky}, {wind}"


async def test_agents_sdk_asks_for_a_tool_and_then_for_an_answer(sdk, model):
    """Its own way: the choice is required once, then the model is free to answer."""
    calls: list[tuple[str, Any]] = []
    agent = sdk.Agent(
        name="helper",
        model=model,
        tools=sdk_tools(sdk, calls, in_turn=False),
        model_settings=sdk.ModelSettings(
            tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=60
        ),
    )
    result = await run_sdk(sdk, agent, streamed=False)
    assert calls and isinstance(result.final_output, str)


async def test_agents_sdk_output_types(sdk, model):
    agent = sdk.Agent(
        name="reporter",
        model=model,
        output_type=Report,
        model_settings=sdk.ModelSettings(temperature=0, max_tokens=80),
    )
    assert isinstance((await run_sdk(sdk, agent, streamed=False)).final_output, Report)


# -- pydantic-ai ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pydantic_ai():
    return pytest.importorskip("pydantic_ai")


@pytest.fixture(params=[*APIS, "messages"])
def pydantic_model(pydantic_ai, server, request):
    if request.param == "messages":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=server.url, api_key="none"))
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = OpenAIChatModel if request.param == APIS[0] else OpenAIResponsesModel
    return kind(MODEL, provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key="none"))


@pytest.mark.parametrize("streamed", [False, True])
async def test_pydantic_ai_uses_two_tools_in_turn(pydantic_ai, pydantic_model, streamed):
    from pydantic_ai.capabilities import PrepareOutputTools, PrepareTools

    calls: list[str] = []

    async def while_there_was_no_call(context, tools):
        return [] if calls else tools

    async def once_there_was_a_call(context, tools):
        return tools if calls else []

    agent = pydantic_ai.Agent(
        pydantic_model,
        output_type=pydantic_ai.ToolOutput(Report, name="report"),
        capabilities=[PrepareTools(while_there_was_no_call), PrepareOutputTools(once_there_was_a_call)],
        model_settings={"temperature": 0, "max_tokens": 80, "parallel_tool_calls": False},
    )

    @agent.tool_plain
    def weather(city: Literal["Paris", "Oslo"]) -> str:
        """The weather in a city."""
        calls.append(city)
        return "rain"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if streamed:
            async with agent.run_stream(QUESTION) as result:
                output = await result.get_output()
        else:
            output = (await agent.run(QUESTION)).output
    assert len(calls) == 1 and calls[0] in ("Paris", "Oslo")
    assert isinstance(output, Report)
