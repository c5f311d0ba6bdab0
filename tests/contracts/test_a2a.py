"""Our messages as A2A 1.0's JSON: the names are the specification's, and what goes there and back is the same."""

from __future__ import annotations

import doctest

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from headrace.contracts import a2a, agents
from headrace.contracts.a2a import Message, Part, body_of, failed_task_of, message_of, parts_of, task_of
from headrace.contracts.agents import AgentAnswer
from headrace.contracts.errors import InvalidInput, Refused
from headrace.contracts.mail import Mail

# As the specification's protobuf definitions map to JSON.
SENT = b"""{"messageId": "m-1", "contextId": "c-1", "taskId": "t-1", "role": "ROLE_USER", "parts": [
  {"text": "look at this"}, {"raw": "aGk=", "filename": "a.txt", "mediaType": "text/plain"},
  {"url": "https://example.com/b.png", "mediaType": "image/png"}, {"data": {"n": 1}, "metadata": {"k": "v"}}],
  "metadata": {"lang": "en"}, "extensions": ["urn:x"], "referenceTaskIds": ["t-0"]}"""


def test_a_message_of_the_specification_is_read_and_written_whole() -> None:
    message = msgspec.json.decode(SENT, type=Message)
    assert msgspec.json.decode(msgspec.json.encode(message)) == msgspec.json.decode(SENT)
    assert message.parts[1].raw == b"hi"


def test_a_mail_carries_it_there_and_back() -> None:
    message = msgspec.json.decode(SENT, type=Message)
    mail = Mail(
        id=message.message_id,
        to="a",
        sender="s",
        kind="prompt",
        body=body_of(message),
        conversation="c-1",
        task="t-1",
    )
    back = message_of(mail)
    assert (back.parts, back.metadata) == (message.parts, message.metadata)
    assert (back.message_id, back.context_id, back.task_id, back.role) == ("m-1", "c-1", "t-1", "ROLE_USER")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_any_body_survives_as_parts(value: object) -> None:
    parts, metadata = parts_of(msgspec.json.encode(value))
    message = Message(message_id="m", role="ROLE_AGENT", parts=parts, metadata=metadata)
    back = msgspec.json.decode(body_of(msgspec.json.decode(msgspec.json.encode(message), type=Message)))
    assert back == ({"prompt": value} if isinstance(value, str) else value)


def test_what_is_only_called_parts_is_data() -> None:
    for body in (
        b'{"parts": 5}',
        b'{"parts": []}',
        b'{"parts": [{}]}',
        b'{"parts": [{"text": "a", "url": "b"}]}',
    ):
        parts, _ = parts_of(body)
        assert parts == [Part(data=msgspec.json.decode(body))]
    with pytest.raises(ValueError, match="exactly one"):
        Part()
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"text": "a", "data": null}', type=Part)


def test_what_the_front_door_says_is_a_task() -> None:
    waiting = AgentAnswer(request="r", agent="a", state="accepted", conversation="r", fetch="…")
    assert msgspec.to_builtins(task_of(waiting, at_us=1_764_547_200_000_000)) == {
        "id": "r",
        "contextId": "r",
        "status": {"state": "TASK_STATE_WORKING", "timestamp": "2025-12-01T00:00:00.000Z"},
        "metadata": {"agent": "a"},
    }
    done = task_of(AgentAnswer(request="r", agent="a", state="answered", answer=Raw(b'{"x":1}')))
    assert done.status.state == "TASK_STATE_COMPLETED"
    assert msgspec.to_builtins(done.artifacts) == [{"artifactId": "r-answer", "parts": [{"data": {"x": 1}}]}]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (Refused("full", code="mailbox_full"), "TASK_STATE_REJECTED"),
        (InvalidInput("bad"), "TASK_STATE_REJECTED"),
        (Refused("it raised", code="handler_failed"), "TASK_STATE_FAILED"),
        (Refused("over", code="expired"), "TASK_STATE_FAILED"),
        (Refused("stop", code="cancelled"), "TASK_STATE_CANCELED"),
    ],
)
def test_an_error_is_a_task_that_ended_by_it(error: Refused, state: str) -> None:
    task = failed_task_of("r", error)
    assert task.status.state == state
    assert task.status.message is not None
    assert task.status.message.parts == [Part(text=str(error))]


def test_examples_of_the_modules() -> None:
    assert doctest.testmod(a2a).failed == 0
    assert doctest.testmod(agents).failed == 0
