"""Agents that run in processes of their own, and are killed there: each keeps what it did in its state."""

from __future__ import annotations

from msgspec import Raw, Struct

from headrace.agent import Agent, Context


class Number(Struct):
    n: int


class Sums(Struct):
    seen: list[int] = []
    sent: int = 0
    answers: list[str] = []


relay = Agent("relay", state=Sums)
"""Gets numbers, and sends each on, twice and in order."""
sink = Agent("sink", state=Sums)
caller = Agent("caller", state=Sums)
"""Makes a governed call for each message, and answers with what it heard."""
asker = Agent("asker", state=Sums)
"""Asks the sink, durably and at once."""


@relay.on("number")
async def pass_on(ctx: Context[Sums], msg: Number) -> None:
    ctx.state.seen.append(msg.n)
    ctx.send("sink", "number", Number(2 * msg.n))
    ctx.send("sink", "number", Number(2 * msg.n + 1))
    ctx.state.sent += 2


@sink.on("number")
async def take(ctx: Context[Sums], msg: Number) -> None:
    ctx.state.seen.append(msg.n)


@sink.on("double")
async def double(ctx: Context[Sums], msg: int) -> None:
    ctx.state.seen.append(msg)
    ctx.reply(2 * msg)


@caller.on("ask")
async def ask(ctx: Context[Sums], msg: dict[str, object]) -> None:
    called = await ctx.call(str(msg["callee"]), Raw(_body(str(msg["id"]), str(msg.get("behave", "answers")))))
    ctx.state.answers.append(str(msg["id"]))
    ctx.reply({"state": called.answer.state})


def _body(id_: str, behave: str) -> bytes:
    said = (id_.encode(), behave.encode())
    return b'{"messages": [{"role": "user", "content": "hi"}], "id": "%b", "behave": "%b"}' % said


@asker.on("durable")
async def durable(ctx: Context[Sums], msg: int) -> None:
    ctx.state.sent += 1
    await ctx.ask("sink", "double", msg, then="doubled", state={"was": msg})


@asker.on("doubled")
async def doubled(ctx: Context[Sums], msg: int) -> None:
    ctx.state.answers.append(f"{ctx.saved['was']}*2={msg}")
    ctx.reply(msg)


@asker.on("now")
async def now(ctx: Context[Sums], msg: int) -> None:
    answer = await ctx.ask_now("sink", "double", msg, type=int, timeout_s=20.0)
    ctx.state.answers.append(f"{msg}*2={answer}")
    ctx.reply(answer)
