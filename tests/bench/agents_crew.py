"""The agents of the benchmark: each sends to its neighbours, and keeps count of what it gets from each of them."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from headrace.agent import Agent, Context

FAN_OUT: Final = 10
"""Messages that a burst sends, each to another neighbour."""


class Tally(Struct):
    """What came from a sender, by numbers that it counts up for each receiver."""

    count: int = 0
    last: int = 0


class Counts(Struct):
    """State of an agent: enough to find any message that is lost, doubled, or out of order."""

    sent: int = 0
    bursts: int = 0
    numbers: dict[str, Tally] = {}
    wrong: int = 0
    """Numbers that did not follow the one before."""
    asked: int = 0
    answered: int = 0


class Burst(Struct):
    """Send one number to each neighbour among `agents`; `n` counts up."""

    n: int
    agents: int


class Number(Struct):
    """One more number of a sender."""

    n: int


class Chain(Struct):
    """Ask `left` questions, one after the other's answer."""

    to: str
    left: int


def name(number: int) -> str:
    """Agent 7 is `a007`."""
    return f"a{number:03d}"


def neighbours(number: int, agents: int) -> list[str]:
    """Whom an agent sends to: those behind it, round the ring."""
    return [name((number + step) % agents) for step in range(1, min(FAN_OUT, agents - 1) + 1)]


async def burst(ctx: Context[Counts], msg: Burst) -> None:
    """Send a number to each neighbour."""
    state = ctx.state
    state.wrong += msg.n != state.bursts + 1
    state.bursts += 1
    state.sent += 1
    for to in neighbours(int(ctx.agent[1:]), msg.agents):
        ctx.send(to, "number", Number(state.sent))


async def number(ctx: Context[Counts], msg: Number) -> None:
    """Count a number."""
    tally = ctx.state.numbers.setdefault(ctx.message.sender, Tally())
    ctx.state.wrong += msg.n != tally.last + 1
    tally.count += 1
    tally.last = msg.n


async def chain(ctx: Context[Counts], msg: Chain) -> None:
    """Ask the first question."""
    await _ask(ctx, msg)


async def question(ctx: Context[Counts], msg: int) -> None:
    """Answer with the number itself."""
    ctx.reply(msg)


async def answer(ctx: Context[Counts], msg: int) -> None:
    """Take an answer and ask the next question."""
    asked: Chain = ctx.saved_as(Chain)
    ctx.state.answered += 1
    ctx.state.wrong += msg != asked.left
    if asked.left > 1:
        await _ask(ctx, Chain(asked.to, asked.left - 1))


async def _ask(ctx: Context[Counts], asked: Chain) -> None:
    ctx.state.asked += 1
    await ctx.ask(asked.to, "question", asked.left, then="answer", state=asked)


def make(agent: str) -> Agent:
    """One of them."""
    made = Agent(agent, state=Counts)
    made.on("burst")(burst)
    made.on("number")(number)
    made.on("chain")(chain)
    made.on("question")(question)
    made.on("answer")(answer)
    return made
