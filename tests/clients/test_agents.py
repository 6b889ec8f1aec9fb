"""Agent programs: a chat, a stream, and their own way to structured answers or tools."""

import asyncio
from typing import Any

import dspy
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage as HaystackMessage
from haystack.utils import Secret
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from smolagents import OpenAIServerModel, Tool, ToolCallingAgent

from tests.clients.serving import Serving

ASK = "What is the weather in Paris?"
MAX_TOKENS = 200


class City(BaseModel):
    city: str


def test_pydantic_ai(stack: Serving) -> None:
    provider = OpenAIProvider(base_url=stack.base_url, api_key=stack.key)
    settings: Any = {"max_tokens": MAX_TOKENS}
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(stack.model, provider=provider)
        assert Agent(model, model_settings=settings).run_sync(ASK).output
        structured = Agent(model, output_type=City, model_settings=settings)
        assert isinstance(structured.run_sync("Paris").output, City)
    agent = Agent(OpenAIChatModel(stack.model, provider=provider), model_settings=settings)

    @agent.tool_plain  # type: ignore[untyped-decorator]
    def weather(city: str) -> str:
        return f"sunny in {city}"

    assert agent.run_sync(ASK).output

    async def streamed() -> str:
        async with agent.run_stream(ASK) as run:
            return "".join([piece async for piece in run.stream_text(delta=True)])

    assert asyncio.run(streamed())


def test_llama_index(stack: Serving) -> None:
    model = OpenAILike(
        model=stack.model,
        api_base=stack.base_url,
        api_key=stack.key,
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=MAX_TOKENS,
        context_window=4096,
    )
    asked = [ChatMessage(role="user", content=ASK)]
    assert model.chat(asked).message.content and len(list(model.stream_chat(asked))) > 1

    def weather(city: str) -> str:
        return f"sunny in {city}"

    tool = FunctionTool.from_defaults(fn=weather)
    reply = model.chat_with_tools([tool], ASK, tool_required=True)
    calls = model.get_tool_calls_from_response(reply)
    assert calls and all(set(call.tool_kwargs) == {"city"} for call in calls)
    assert model.chat_with_tools([tool], ASK).message is not None


def test_haystack(stack: Serving) -> None:
    generator = OpenAIChatGenerator(
        api_key=Secret.from_token(stack.key),
        model=stack.model,
        api_base_url=stack.base_url,
        generation_kwargs={"max_tokens": MAX_TOKENS, "response_format": City},
    )
    reply = generator.run([HaystackMessage.from_user(ASK)])["replies"][0]
    City.model_validate_json(reply.text)


class Weather(Tool):  # type: ignore[misc]
    name = "weather"
    description = "The weather of a city."
    inputs = {"city": {"type": "string", "description": "its name"}}  # noqa: RUF012
    output_type = "string"

    def forward(self, city: str) -> str:
        return f"sunny in {city}"


def test_smolagents(stack: Serving) -> None:
    model = OpenAIServerModel(
        model_id=stack.model, api_base=stack.base_url, api_key=stack.key, max_tokens=MAX_TOKENS
    )
    said = model([{"role": "user", "content": [{"type": "text", "text": ASK}]}])
    assert said.content
    agent = ToolCallingAgent(tools=[Weather()], model=model, max_steps=2, verbosity_level=0)
    agent.run(ASK)
    steps = [step for step in agent.memory.steps if getattr(step, "tool_calls", None)]
    assert steps, "every answer of a model that must call is a call"


class KnownModel(dspy.LM):  # type: ignore[misc]
    """DSPy asks those models for a form that its catalogue knows to have any."""

    supports_response_schema = True
    supported_params = frozenset({"response_format", "max_tokens", "temperature"})


def test_dspy(stack: Serving) -> None:
    endpoint = {"api_base": stack.base_url, "api_key": stack.key}
    model = KnownModel(f"openai/{stack.model}", max_tokens=MAX_TOKENS, cache=False, **endpoint)
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        assert model(ASK) and isinstance(dspy.Predict("question -> answer")(question=ASK).answer, str)
