"""Agents as others find them: cards, who is there, and prompts at the front door.

A card is an `AgentCard` of A2A 1.0 in its JSON form (camelCase), so that it can be served to A2A clients as it stands.
What A2A has no field for stands in an extension, `MAILBOX_EXTENSION`: the kinds of message that the agent takes, with
JSON Schemas of their bodies, its lanes and its limits.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Raw, Struct, field

from headrace.contracts.errors import InvalidInput
from headrace.contracts.mail import Kind
from headrace.contracts.names import Count, Fingerprint, Micros, ShortText, Token

MAILBOX_EXTENSION: Final = "urn:headrace:mailbox:1"
MAILBOX_BINDING: Final = "urn:headrace:nats-mailbox:1"
A2A_VERSION: Final = "1.0"
FRONT_DOOR: Final = "front-door"
"""Sender of mails that came in as requests of the front door."""
PROMPT: Final = "prompt"
"""Kind of the mail that a prompt becomes."""
MAX_KINDS: Final = 256

_Name = Annotated[str, Meta(max_length=256)]
_Modes = Annotated[list[_Name], Meta(max_length=64)]


class AgentSkill(Struct, frozen=True, kw_only=True, rename="camel"):
    """What an agent can do, in A2A's words: one for each kind of message that it takes."""

    id: _Name
    name: _Name
    description: ShortText
    tags: _Modes = []
    examples: Annotated[list[ShortText], Meta(max_length=64)] = []
    input_modes: _Modes = field(default_factory=lambda: ["application/json"])
    output_modes: _Modes = field(default_factory=lambda: ["application/json"])


class AgentInterface(Struct, frozen=True, kw_only=True, rename="camel"):
    """Where an agent is reached: `url` names the subject of its prompts."""

    url: ShortText
    protocol_binding: _Name = MAILBOX_BINDING
    protocol_version: _Name = A2A_VERSION


class AgentLimits(Struct, frozen=True, kw_only=True, rename="camel"):
    """What an agent bears."""

    max_tries: Count
    max_hops: Count
    mailbox_messages: Count
    """Messages of one sender that one lane of the mailbox holds."""
    ack_wait_s: float


class Mailbox(Struct, frozen=True, kw_only=True, rename="camel"):
    """Parameters of `MAILBOX_EXTENSION`: `kinds` has the JSON Schema of each kind's body."""

    lanes: Annotated[list[Literal["work", "control", "reply"]], Meta(max_length=3)]
    kinds: Annotated[dict[Kind, dict[str, Any]], Meta(max_length=MAX_KINDS)]
    limits: AgentLimits
    escalate_to: Token | None = None


class AgentExtension(Struct, frozen=True, kw_only=True, rename="camel"):
    """An extension of A2A."""

    uri: ShortText
    params: Mailbox
    description: ShortText = ""
    required: bool = False


class AgentCapabilities(Struct, frozen=True, kw_only=True, rename="camel"):
    """Which parts of A2A an agent has: answers come whole, and nobody is called back."""

    extensions: Annotated[list[AgentExtension], Meta(max_length=16)]
    streaming: bool = False
    push_notifications: bool = False


class AgentCard(Struct, frozen=True, kw_only=True, rename="camel"):
    """What an agent is and takes. It stands in the bucket of cards under the agent's name, and outlives its process."""

    name: Token
    description: ShortText
    version: _Name
    supported_interfaces: Annotated[list[AgentInterface], Meta(max_length=16)]
    capabilities: AgentCapabilities
    skills: Annotated[list[AgentSkill], Meta(max_length=MAX_KINDS)]
    default_input_modes: _Modes = field(default_factory=lambda: ["application/json", "text/plain"])
    default_output_modes: _Modes = field(default_factory=lambda: ["application/json"])

    @property
    def mailbox(self) -> Mailbox | None:
        """The parameters of the mailbox extension."""
        return next((e.params for e in self.capabilities.extensions if e.uri == MAILBOX_EXTENSION), None)


class AgentPresence(Struct, frozen=True, kw_only=True):
    """Said by a running agent every few seconds, forgotten soon after. For people: nothing depends on it."""

    agent: Token
    life: Token
    at_us: Micros
    host: _Name = ""
    pid: Count = 0
    started_us: Micros = 0
    stopped: bool = False
    """It was told to stop: it takes no work until it is resumed."""


# --- the front door ---------------------------------------------------------------------------------


class Prompt(Struct, frozen=True, kw_only=True):
    """Body of a prompt that came as plain text: what a handler of `prompt` may be annotated with."""

    prompt: str


class Accepted(Struct, frozen=True, kw_only=True):
    """What the gateway took in, on `hr.replies.<request>.accepted`: the same request with another body is refused."""

    request: Token
    agent: Token
    mail: Token
    fingerprint: Fingerprint
    at_us: Micros


class AgentAnswer(Struct, frozen=True, kw_only=True):
    """Reply of `agents.prompt.<agent>` and `agents.answer`: `answer` where there is one, else how to `fetch` it."""

    request: str
    agent: str
    state: Literal["answered", "accepted"]
    answer: Raw = Raw(b"null")
    conversation: str | None = None
    fetch: str | None = None
    """A command that asks for the answer."""


class AnswerRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of `agents.answer`."""

    request: Token
    wait_s: Annotated[float, Meta(ge=0, le=4)] = 0.0


def prompt_body(data: bytes) -> Raw:
    """The body of the mail that a prompt becomes: an object or an array as it is, anything else `{"prompt": text}`.

    A JSON string is the text that it says. Raise `InvalidInput` for nothing, and for bytes that are no UTF-8.

    >>> bytes(prompt_body(b"say 42")), bytes(prompt_body(b'{"prompt": "x", "n": 1}'))
    (b'{"prompt":"say 42"}', b'{"prompt": "x", "n": 1}')
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise InvalidInput("the prompt is not UTF-8", field="prompt", code="invalid_json") from None
    if not text.strip():
        raise InvalidInput(
            "there is no prompt: send text, or a JSON object", field="prompt", code="missing_field"
        )
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        value = None
    if isinstance(value, dict | list):
        return Raw(data)
    return Raw(msgspec.json.encode({"prompt": value if isinstance(value, str) else text}))
