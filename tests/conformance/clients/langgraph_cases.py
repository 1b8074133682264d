"""LangGraph's agent loop over LangChain's ``ChatOpenAI``."""

from __future__ import annotations

from typing import Any

import pytest
from asked import MAX_TOKENS, OSLO, WEATHER, Weather
from langchain_core.messages import ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition

DESCRIPTION = WEATHER["function"]["description"]


@pytest.fixture
def chat(base_url: str, api_key: str, model: str) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{base_url}/v1",
        api_key=api_key,
        model=model,
        temperature=0,
        max_tokens=MAX_TOKENS,
        max_retries=3,
    )


def tool_of(weather: Weather) -> StructuredTool:
    """Described in a line, as the built-in model knows tools."""
    return StructuredTool.from_function(weather.get_weather, description=DESCRIPTION)


def asked(text: str) -> Any:
    return {"messages": [("user", text)]}


@pytest.mark.calls
def test_an_agent_makes_three_calls_and_answers(chat: ChatOpenAI) -> None:
    weather = Weather()
    agent = create_react_agent(chat, [tool_of(weather)])
    messages = agent.invoke(asked(OSLO))["messages"]
    assert weather.called_three_times()
    assert [one.type for one in messages] == ["human", *["ai", "tool"] * 3, "ai"]
    assert messages[-1].content


@pytest.mark.calls
def test_an_agent_s_stream_of_tokens_says_the_same(chat: ChatOpenAI) -> None:
    weather = Weather()
    agent = create_react_agent(chat, [tool_of(weather)])
    chunks = [chunk for chunk, _ in agent.stream(asked(OSLO), stream_mode="messages")]
    assert weather.called_three_times()
    assert len([one for one in chunks if isinstance(one, ToolMessage)]) == 3
    last = chunks[-1].id
    assert len([one for one in chunks if one.id == last and one.content]) > 1


@pytest.mark.calls
def test_a_conversation_goes_on_where_it_was_kept(chat: ChatOpenAI) -> None:
    weather = Weather()
    weather.NEXT = ()
    agent = create_react_agent(chat, [tool_of(weather)], checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "1"}}
    for city in ("Oslo", "Rome", "Lima"):
        agent.invoke(asked(f"What is the weather in {city}?"), thread)
    assert weather.cities == ["Oslo", "Rome", "Lima"]


def test_a_graph_that_forces_calls_makes_three(chat: ChatOpenAI) -> None:
    weather = Weather()
    tool = tool_of(weather)
    forced = chat.bind_tools([tool], tool_choice="any", parallel_tool_calls=False)

    def ask(state: MessagesState) -> Any:
        model = forced if len(weather.cities) < 3 else chat
        return {"messages": model.invoke(state["messages"])}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode([tool]))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    messages = graph.compile().invoke(asked(OSLO))["messages"]
    assert len(weather.cities) == 3 and weather.cities[0] == "Oslo"
    assert messages[-1].type == "ai" and messages[-1].content
