"""An agent as its author writes it: a name, a state, and one handler for each kind of message.

    agent = Agent("planner", state=Plan)

    @agent.on("document")
    async def split(ctx: Context[Plan], msg: Document) -> None:
        ctx.send("worker", "question", Question(text=...))

A handler is a plain function: what it does to the world it does through its context, and all of that happens once, or
not at all, whatever dies meanwhile.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from headrace.contracts.errors import InvalidInput, NotFound, Undecodable
from headrace.contracts.mail import GATEWAY, Kind
from headrace.contracts.names import check_token

Function = Callable[..., Awaitable[None]]
_ARGUMENTS: Final = 2
_kind = msgspec.json.Decoder(Kind)


class Handler(Struct, frozen=True, kw_only=True):
    """The function for one kind of message. `body_type` is what its body is decoded to."""

    kind: str
    fn: Function
    body_type: Any
    takes_body: bool
    doc: str
    decode: Callable[[bytes], Any]

    def read(self, body: Raw) -> Any:
        """The body as the handler wants it. Raise `Undecodable`, which names the field and quotes nothing."""
        try:
            data = bytes(body)
            if not data.isascii():
                data.decode("utf-8")
            return self.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as e:
            why = "not UTF-8" if isinstance(e, UnicodeDecodeError) else str(e)[:300]
            msg = f"the body does not fit the kind {self.kind!r}: {why}"
            raise Undecodable(msg) from None


class Agent:
    """A name, the type of a state, and handlers.

    `state` is a type that can be made without arguments (a `msgspec.Struct` with defaults, or `dict`). `escalate_to`
    names the agent that is told when a message of this one dies. `max_tries` is instead of the setting.
    """

    def __init__(
        self,
        name: str,
        *,
        state: type[Any] = dict,
        description: str = "",
        escalate_to: str | None = None,
        max_tries: int | None = None,
        version: str = "1",
    ) -> None:
        self.name = check_token("agent", name)
        if name == GATEWAY:
            raise InvalidInput(
                f"no agent may be called {GATEWAY!r}: answers to calls come from it", field="agent"
            )
        self.description = description
        self.version = version
        self.escalate_to = None if escalate_to is None else check_token("agent", escalate_to)
        self.max_tries = max_tries
        self.state_type = state
        self.handlers: dict[str, Handler] = {}
        self._decode_state = msgspec.json.Decoder(state).decode

    def on(self, kind: str, *, body: Any = None) -> Callable[[Function], Function]:
        """Register a handler `async def h(ctx, msg)` for messages of `kind`.

        The annotation of `msg` says what the body is decoded to (`body` does, where the annotation cannot be looked
        up); without one it is JSON as it comes. A body that does not fit is a dead letter at once.
        """
        try:
            _kind.decode(msgspec.json.encode(kind))
        except msgspec.MsgspecError:
            msg = f"kind {str(kind)[:80]!r} is not valid: use 1 to 128 of the characters A-Z a-z 0-9 _ . -"
            raise InvalidInput(msg, field="kind", code="invalid_name") from None
        if kind in self.handlers:
            raise InvalidInput(f"agent {self.name} has two handlers for {kind!r}", field="kind")

        def register(fn: Function) -> Function:
            self.handlers[kind] = _handler(kind, fn, body)
            return fn

        return register

    def new_state(self, stored: Raw) -> Any:
        """The state as stored, or a fresh one. Raise `Undecodable` if what is stored does not fit the type."""
        data = bytes(stored)
        if data == b"null":
            return self.state_type()
        try:
            return self._decode_state(data)
        except (msgspec.MsgspecError, ValueError) as e:
            msg = f"the stored state of {self.name} does not fit {self.state_type.__name__}: {str(e)[:300]}"
            raise Undecodable(msg, code="state_mismatch") from None


def _handler(kind: str, fn: Function, body: Any) -> Handler:
    if not inspect.iscoroutinefunction(fn):
        raise InvalidInput(f"the handler of {kind!r} has to be an `async def`", field="handler")
    parameters = list(inspect.signature(fn).parameters.values())
    if not 1 <= len(parameters) <= _ARGUMENTS:
        raise InvalidInput(f"the handler of {kind!r} takes (ctx) or (ctx, msg)", field="handler")
    takes = len(parameters) == _ARGUMENTS
    if body is None and takes and parameters[1].annotation is not inspect.Parameter.empty:
        try:
            body = typing.get_type_hints(fn)[parameters[1].name]
        except NameError as e:
            msg = (
                f"the type of a body of {kind!r} cannot be looked up ({e}): say `@agent.on({kind!r}, body=…)`"
            )
            raise InvalidInput(msg, field="handler") from None
    type_: Any = Any if body is None else body
    decode = msgspec.json.Decoder(type_).decode
    return Handler(
        kind=kind, fn=fn, body_type=type_, takes_body=takes, doc=inspect.getdoc(fn) or "", decode=decode
    )


def load_agent(where: str) -> Agent:
    """The agent that `pkg.mod:name` names. Raise `InvalidInput` or `NotFound`, naming what is wrong."""
    module, colon, name = where.partition(":")
    if not colon or not module or not name:
        raise InvalidInput(f"{where[:200]!r} names no agent: write package.module:agent", field="agent")
    try:
        found = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as e:
        raise NotFound(f"{where}: {e}", code="unknown_agent") from None
    except AttributeError:
        raise NotFound(f"{where}: {module} has no {name!r}", code="unknown_agent") from None
    if not isinstance(found, Agent):
        raise InvalidInput(f"{where} is no Agent but a {type(found).__name__}", field="agent")
    return found
