"""The agents: a planner, workers, a reviewer and a reporter, who read a document together.

    headrace agent run swarm:planner           each in a process of its own, in this folder

The planner makes sections of the document and questions of each section. A worker answers a question by a governed call
of the model and asks the reviewer, who accepts the answer or sends it back; then the worker asks the model again. The
reporter has the report when it has a finding for every question. Nothing in it depends on who was first: findings are
in the order of their questions, and no id and no time is in it.
"""

from __future__ import annotations

from diary import Diary, noting
from msgspec import Struct, field

from headrace.agent import Agent, Context

WORKERS = 2
ROUNDS = 3
"""How often the model is asked about one question at most."""
LEAST_WORDS = 4
MAX_TOKENS = 40
ASKED = (
    "What does the text say about this? Answer in one sentence.",
    "Why does it matter? Answer in one sentence.",
    "What can go wrong there? Answer in one sentence.",
)


class Document(Struct):
    """A text in sections, each with a title after `## `."""

    text: str


class Section(Struct):
    """One section; `number` counts from 0."""

    number: int
    title: str
    text: str


class Outline(Struct):
    """What the reporter has to wait for."""

    titles: list[str]
    questions: int


class Question(Struct):
    """What is to be answered out of a section; `number` is its place in the report."""

    number: int
    section: Section
    text: str


class Draft(Struct):
    """An answer that waits for its review, in round 1 to `ROUNDS`. `whole`: the model ended it by itself."""

    question: Question
    answer: str
    whole: bool
    round: int


class Verdict(Struct):
    """The reviewer's word; `why` is empty for what is accepted."""

    why: str


class Finding(Struct):
    """What stands in the report about a question."""

    number: int
    section: int
    question: str
    answer: str
    rounds: int
    objection: str


class Findings(Diary):
    """The reporter's state; `report` is empty until it is complete."""

    outline: Outline | None = None
    findings: list[Finding] = field(default_factory=list)
    report: str = ""


planner = Agent("planner", state=Diary, description="Splits a document into questions")
workers = [Agent(f"worker-{n}", state=Diary, description="Answers questions with the model") for n in (1, 2)]
worker_1, worker_2 = workers
reviewer = Agent("reviewer", state=Diary, description="Accepts answers or sends them back")
reporter = Agent("reporter", state=Findings, description="Writes the report")


def sections(text: str) -> list[Section]:
    """The sections of a document; what stands before the first title is left out."""
    parts = f"\n{text}".split("\n## ")[1:]
    found = [part.partition("\n") for part in parts]
    return [
        Section(number, title.strip(), " ".join(body.split()))
        for number, (title, _, body) in enumerate(found)
    ]


@noting(planner, "document")
async def split(ctx: Context[Diary], msg: Document) -> None:
    """Split a document into sections, each a message to itself, so that no step is a large one."""
    found = sections(msg.text)
    for section in found:
        ctx.send("planner", "section", section)
    ctx.send("reporter", "outline", Outline([s.title for s in found], len(found) * len(ASKED)))


@noting(planner, "section")
async def question(ctx: Context[Diary], msg: Section) -> None:
    """Ask about a section, worker by worker."""
    for n, text in enumerate(ASKED):
        number = msg.number * len(ASKED) + n
        ctx.send(workers[number % len(workers)].name, "question", Question(number, msg, text))


async def draft(ctx: Context[Diary], asked: Question, round_: int) -> None:
    """Ask the model, and then the reviewer: durably, so the next question is taken meanwhile."""
    section = asked.section
    prompt = f"{section.title}: {section.text}\n\n{asked.text}"
    if round_ > 1:
        prompt += f"\nBe brief and end your sentence. This is try {round_}."
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    called = await ctx.call("generate", body)
    choice = called.body["choices"][0]
    answer = " ".join(choice["message"]["content"].split())
    made = Draft(asked, answer, choice["finish_reason"] == "stop", round_)
    ctx.record("draft", {"question": asked.number, "round": round_})
    await ctx.ask("reviewer", "draft", made, then="verdict", state=made)


async def answer(ctx: Context[Diary], msg: Question) -> None:
    """Answer a question."""
    await draft(ctx, msg, 1)


async def decided(ctx: Context[Diary], msg: Verdict) -> None:
    """Go on after a review: to the reporter, or to the model again."""
    made: Draft = ctx.saved_as(Draft)
    if msg.why and made.round < ROUNDS:
        await draft(ctx, made.question, made.round + 1)
        return
    asked = made.question
    finding = Finding(asked.number, asked.section.number, asked.text, made.answer, made.round, msg.why)
    ctx.send("reporter", "finding", finding)


for _worker in workers:
    noting(_worker, "question")(answer)
    noting(_worker, "verdict")(decided)


@noting(reviewer, "draft")
async def review(ctx: Context[Diary], msg: Draft) -> None:
    """Accept an answer, or say what is wrong with it."""
    ctx.reply(Verdict(objection(msg)))


def objection(made: Draft) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if not made.whole:
        return "is cut off"
    if len(made.answer.split()) < LEAST_WORDS:
        return "says too little"
    if made.question.text in made.answer:
        return "repeats the question"
    return ""


@noting(reporter, "outline")
async def begin(ctx: Context[Findings], msg: Outline) -> None:
    """Learn what the report is to have."""
    ctx.state.outline = msg
    finish(ctx.state)


@noting(reporter, "finding")
async def collect(ctx: Context[Findings], msg: Finding) -> None:
    """Take a finding; with the last one the report is there."""
    ctx.state.findings.append(msg)
    finish(ctx.state)


def finish(state: Findings) -> None:
    """Write the report if everything is there."""
    outline = state.outline
    if outline is None or len(state.findings) < outline.questions:
        return
    lines: list[str] = ["# Report", ""]
    for number, title in enumerate(outline.titles):
        lines += [f"## {title}", ""]
        for finding in sorted(state.findings, key=lambda f: f.number):
            if finding.section == number:
                doubt = f" [{finding.objection}]" if finding.objection else ""
                lines += [f"**{finding.question}** {finding.answer}{doubt}", ""]
    state.report = "\n".join(lines)
