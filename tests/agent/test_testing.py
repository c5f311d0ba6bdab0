"""The bench that authors of agents test on: what it says happens is what the mesh would do."""

from __future__ import annotations

import pytest
from msgspec import Struct

from headrace.agent import Agent, AskFailed, CallConflict, CallInDoubt, CallRefused, Context
from headrace.agent.testing import Bench
from headrace.contracts.calls import CallAnswer
from headrace.contracts.errors import InvalidInput, NotFound, Refused, Undecodable
from headrace.contracts.mail import MAX_OUTBOX, MailError

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Plan(Struct):
    open: int = 0
    answers: list[str] = []


class Document(Struct):
    parts: list[str]


class Answer(Struct):
    text: str


planner = Agent("planner", state=Plan)


@planner.on("document")
async def split(ctx: Context[Plan], msg: Document) -> None:
    """Ask a worker for each part."""
    for part in msg.parts:
        await ctx.ask("worker", "question", {"text": part}, then="answered", otherwise="lost", state=part)
        ctx.state.open += 1
    ctx.record("split", {"parts": len(msg.parts)})


@planner.on("answered")
async def answered(ctx: Context[Plan], msg: Answer) -> None:
    ctx.state.open -= 1
    ctx.state.answers.append(f"{ctx.saved}: {msg.text}")
    if not ctx.state.open:
        ctx.reply(ctx.state.answers)


@planner.on("lost")
async def lost(ctx: Context[Plan]) -> None:
    assert ctx.error is not None
    ctx.state.answers.append(f"{ctx.saved}: {ctx.error.code}")
    ctx.state.open -= 1


async def test_a_durable_question_comes_back_with_what_was_saved() -> None:
    bench = Bench(planner)
    done = await bench.deliver("document", Document(parts=["a", "b"]))
    assert [(s.to, s.kind, s.body) for s in done.sent] == [
        ("worker", "question", {"text": "a"}),
        ("worker", "question", {"text": "b"}),
    ]
    assert done.records == [("split", {"parts": 2})]
    assert bench.state.open == 2
    assert not done.replied
    first, second = done.questions
    assert not (await bench.answer(second, Answer("B"))).replied
    last = await bench.answer(first, Answer("A"))
    assert last.replied
    assert last.reply == ["b: B", "a: A"]
    assert bench.questions == {}
    with pytest.raises(NotFound):
        await bench.answer(first, Answer("again"))


async def test_a_question_without_an_answer_runs_the_other_handler() -> None:
    bench = Bench(planner)
    done = await bench.deliver("document", Document(parts=["a"]))
    await bench.refuse(done.questions[0], "expired")
    assert bench.state.answers == ["a: expired"]


async def test_a_handler_that_fails_changes_nothing() -> None:
    agent = Agent("fails", state=Plan)

    @agent.on("x")
    async def x(ctx: Context[Plan]) -> None:
        ctx.state.open = 7
        ctx.send("other", "y")
        raise ValueError("no")

    bench = Bench(agent)
    with pytest.raises(ValueError, match="no"):
        await bench.deliver("x")
    assert bench.state.open == 0


async def test_calls_are_made_once_for_a_message_and_step() -> None:
    agent = Agent("caller")
    wanted = ["one", "two"]

    @agent.on("x")
    async def x(ctx: Context[dict[str, str]]) -> None:
        for prompt in wanted:
            ctx.state[prompt] = (await ctx.call("llm", {"prompt": prompt})).body["text"]

    made: list[str] = []

    def llm(body: dict[str, str]) -> dict[str, str]:
        made.append(body["prompt"])
        return {"text": body["prompt"].upper()}

    bench = Bench(agent, calls={"llm": llm})
    done = await bench.deliver("x")
    assert bench.state == {"one": "ONE", "two": "TWO"}
    assert [call.key for call in done.calls] == ["test-1:1", "test-1:2"]
    again = await bench.deliver("x", again=done.message)
    assert made == ["one", "two"]
    assert all(call.replayed for call in again.calls)
    wanted[0] = "another"
    with pytest.raises(CallConflict):
        await bench.deliver("x", again=done.message)


async def test_calls_that_have_no_outcome_raise() -> None:
    agent = Agent("caller")

    @agent.on("x")
    async def x(ctx: Context[dict[str, str]], msg: str) -> None:
        await ctx.call(msg, {})

    doubt = CallAnswer(call_id="c", state="in_doubt", error={"type": "no_answer", "message": "cut"})
    bench = Bench(agent, calls={"pay": lambda _: doubt})
    with pytest.raises(CallInDoubt) as found:
        await bench.deliver("x", "pay")
    assert found.value.code == "no_answer"
    assert found.value.answer.call_id == "c"
    with pytest.raises(CallRefused) as refused:
        await bench.deliver("x", "nobody")
    assert refused.value.code == "unknown_callee"


async def test_ask_now_gets_the_answer_or_says_why_not() -> None:
    agent = Agent("asker")

    @agent.on("x")
    async def x(ctx: Context[dict[str, int]], msg: int) -> None:
        answer = await ctx.ask_now("worker", "double", msg, type=int)
        ctx.reply(answer)

    asked: list[int] = []

    def worker(n: int) -> int | MailError:
        asked.append(n)
        return 2 * n if n else MailError(code="failed", message="zero")

    bench = Bench(agent, agents={"worker": worker})
    done = await bench.deliver("x", 4)
    assert done.reply == 8
    assert (await bench.deliver("x", 4, again=done.message)).reply == 8
    assert asked == [4]
    with pytest.raises(AskFailed) as failed:
        await bench.deliver("x", 0)
    assert failed.value.code == "failed"


async def test_an_agent_that_waits_cannot_answer_itself() -> None:
    agent = Agent("alone")

    @agent.on("x")
    async def x(ctx: Context[dict[str, int]]) -> None:
        await ctx.ask_now("alone", "y")

    with pytest.raises(InvalidInput, match="use `ask`"):
        await Bench(agent).deliver("x")


async def test_bodies_and_bounds_are_those_of_the_mesh() -> None:
    agent = Agent("bounds", state=dict)
    sends: list[tuple[str, str, object]] = []

    @agent.on("x")
    async def x(ctx: Context[dict[str, str]], msg: Document) -> None:
        for to, kind, body in sends:
            ctx.send(to, kind, body)

    bench = Bench(agent)
    with pytest.raises(Undecodable, match="parts"):
        await bench.deliver("x", {"parts": 3})
    with pytest.raises(NotFound):
        await bench.deliver("unknown")
    for wrong in (("no such name!", "k", 1), ("a.b", "k", 1), ("a", "bad kind", 1)):
        sends[:] = [wrong]
        with pytest.raises(InvalidInput):
            await bench.deliver("x", Document([]))
    sends[:] = [("a", "k", "y" * 500_000)] * 2
    with pytest.raises(Refused) as large:
        await bench.deliver("x", Document([]))
    assert large.value.code == "too_large"
    sends[:] = [("a", "k", 1)] * (MAX_OUTBOX + 1)
    with pytest.raises(Refused) as full:
        await bench.deliver("x", Document([]))
    assert full.value.code == "outbox_full"


async def test_a_message_is_answered_once_and_only_who_asked() -> None:
    agent = Agent("answers")

    @agent.on("once")
    async def once(ctx: Context[dict[str, int]]) -> None:
        ctx.state["told"] = int(ctx.reply(1))

    @agent.on("twice")
    async def twice(ctx: Context[dict[str, int]]) -> None:
        ctx.reply(1)
        ctx.reply(2)

    bench = Bench(agent)
    assert (await bench.deliver("once")).reply == 1
    assert not (await bench.deliver("once", asked=False)).replied
    assert bench.state == {"told": 0}
    with pytest.raises(InvalidInput):
        await bench.deliver("twice")


async def test_what_travels_with_a_conversation() -> None:
    agent = Agent("travels")

    @agent.on("x")
    async def x(ctx: Context[dict[str, int]]) -> None:
        ctx.send("other", "y", deadline_s=1_000.0)

    bench = Bench(agent)
    done = await bench.deliver(
        "x", conversation="c", hops=4, budget="b", task="t", deadline_us=5_000_000_000_000_000
    )
    mail = done.sent[0].mail
    assert (mail.conversation, mail.hops, mail.budget, mail.task, mail.sender) == (
        "c",
        5,
        "b",
        "t",
        "travels",
    )
    assert mail.deadline_us is not None
    assert mail.deadline_us < 5_000_000_000_000_000
    assert mail.id == (await bench.deliver("x", again=done.message)).sent[0].mail.id


def test_wrong_agents_are_refused_where_they_are_written() -> None:
    with pytest.raises(InvalidInput):
        Agent("no name")
    with pytest.raises(InvalidInput, match="gateway"):
        Agent("gateway")
    agent = Agent("fine")
    with pytest.raises(InvalidInput, match="async def"):
        agent.on("x")(lambda ctx: None)  # type: ignore[arg-type, return-value]

    @agent.on("x")
    async def x(ctx: Context[dict[str, int]]) -> None: ...

    with pytest.raises(InvalidInput, match="two handlers"):
        agent.on("x")
    with pytest.raises(InvalidInput, match="kind"):
        agent.on("a kind")

    async def local(ctx: Context[dict[str, int]], msg: Unknown) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(InvalidInput, match="looked up"):
        agent.on("y")(local)
