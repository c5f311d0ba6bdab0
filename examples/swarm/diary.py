"""What each agent of the swarm keeps in its committed state beside its own: the messages that it handled and sent.

A handler's entry is committed with all else that it did, or not at all. So what stands in the diaries of all agents is
what happened, whoever was killed: the harness counts there, and nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct

from headrace.agent import Agent, Context


class Entry(Struct, frozen=True, array_like=True):
    """A message that was handled. `seq` is its sender's own number."""

    id: str
    sender: str
    lane: str
    seq: int


class Diary(Struct, kw_only=True):
    """The part of a state that is the same for all."""

    handled: list[Entry] = []
    sent: list[str] = []
    """Ids of the messages that handlers sent, answers and questions among them."""


Handler = Callable[[Context[Any], Any], Awaitable[None]]


def noting(agent: Agent, kind: str) -> Callable[[Handler], Handler]:
    """`agent.on(kind)` for a handler whose doing is noted in the agent's diary."""

    def register(fn: Handler) -> Handler:
        @functools.wraps(fn)
        async def noted(ctx: Context[Any], msg: Any) -> None:
            await fn(ctx, msg)
            diary: Diary = ctx.state
            mail = ctx.message
            diary.handled.append(Entry(mail.id, mail.sender, mail.lane, mail.seq))
            diary.sent += [sent.id for sent in ctx.effects.mails]

        agent.on(kind)(noted)
        return fn

    return register
