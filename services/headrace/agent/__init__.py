"""Agents: handlers with a name, durable mailboxes, and effects that happen once."""

from headrace.agent.agent import Agent, load_agent
from headrace.agent.context import Context
from headrace.agent.errors import (
    AskFailed,
    AskTimeout,
    CallConflict,
    CallError,
    CallFailed,
    CallInDoubt,
    CallRefused,
    RetryLater,
)
from headrace.agent.ports import Called

__all__ = [
    "Agent",
    "AskFailed",
    "AskTimeout",
    "CallConflict",
    "CallError",
    "CallFailed",
    "CallInDoubt",
    "CallRefused",
    "Called",
    "Context",
    "RetryLater",
    "load_agent",
]
