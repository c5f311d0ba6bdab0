"""Bodies too large for a record or a message, callees that never end, and gateways that die around an object."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from headrace.contracts.account import view_of
from headrace.contracts.calls import CallAnswer
from headrace.contracts.errors import HeadraceError, Refused
from headrace.contracts.ledger import Completed
from headrace.contracts.messages import Blob
from headrace.contracts.objects import call_blob
from headrace.gateway.call_objects import CallObjects
from headrace.gateway.evidence import EvidenceStream
from headrace.gateway.keys import call_id
from headrace.gateway.ledger import StreamLedger
from headrace.mesh.blobs import BlobStore
from headrace.mesh.connection import Mesh
from headrace.mesh.microservice import call_api
from headrace.mesh.server import NatsServer
from headrace.mesh.settings import Settings
from tests.chaos.processes import Part
from tests.cli.harness import HEADRACE, clean_environment
from tests.gateway.leaky import Leaky, leaky
from tests.gateway.office import Office, office, until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


@pytest.fixture
def anyio_backend() -> object:
    return ("asyncio", {"loop_factory": uvloop.new_event_loop})


@pytest.fixture
async def callee() -> AsyncIterator[Leaky]:
    async with leaky() as made:
        yield made


@pytest.fixture
async def place(mesh: Mesh, settings: Settings, tmp_path: Path) -> AsyncIterator[Office]:
    async with office(mesh, settings, tmp_path) as made:
        yield made


def declared(callee: Leaky, **more: Any) -> dict[str, Any]:
    common = {
        "kind": "openai",
        "effect": "cost_bearing",
        "base_url": callee.url,
        "max_output_tokens": 50,
        "free": True,
    }
    return common | {"timeout_s": 20.0} | more


async def objects(mesh: Mesh) -> list[str]:
    return sorted(await BlobStore(mesh).names())


def text_of(answer: CallAnswer) -> str:
    assert answer.outcome is not None
    return answer.outcome["body"]["choices"][0]["message"]["content"]


# --- large answers --------------------------------------------------------------------------------------


async def test_a_large_answer_lies_beside_the_ledger_and_is_given_out_again(
    place: Office, callee: Leaky
) -> None:
    await place.open(callees={"llm": declared(callee)}, gateway={"outcome_bytes": 10_000})
    small, large = await place.ask("llm", "k1", size=100), await place.ask("llm", "k2", size=60_000)
    assert len(text_of(large)) > 60_000
    assert await objects(place.mesh) == [large.outcome and large.outcome["blob"]["name"]]
    assert small.outcome is not None
    assert "blob" not in small.outcome or small.outcome["blob"] is None
    for first, key, size in ((small, "k1", 100), (large, "k2", 60_000)):
        again = await place.ask("llm", key, size=size)
        assert again.replayed
        assert again.outcome == first.outcome
    end = (await place.show(large.call_id)).records[-1]
    assert end["type"] == "completed"
    assert "body" not in end["outcome"]
    assert len(callee.heard) == 2


async def test_an_answer_larger_than_a_message_is_fetched_by_the_command(
    place: Office, callee: Leaky, nats_server: NatsServer, tmp_path: Path
) -> None:
    await place.open(callees={"llm": declared(callee)})
    asked = await place.ask("llm", "k", size=1_500_000)
    assert asked.state == "completed"
    assert asked.outcome is not None
    assert asked.outcome.get("body") is None
    assert asked.outcome["blob"]["size"] > 1_500_000
    body = {"messages": [{"role": "user", "content": "hi"}], "id": "k", "size": 1_500_000}
    command = [
        *HEADRACE, "call", "llm", "--body", json.dumps(body), "--tenant", "t", "--agent", "a", "--key", "k",
        "--url", nats_server.url, "--json",
    ]  # fmt: skip
    done = await asyncio.to_thread(
        subprocess.run, command, env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=60, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["replayed"], answer["state"]) == (True, "completed")
    assert len(answer["outcome"]["body"]["choices"][0]["message"]["content"]) > 1_500_000
    assert len(callee.heard) == 1


async def test_a_small_broker_takes_smaller_records(mesh: Mesh, place: Office, callee: Leaky) -> None:
    """What stands in a record is bounded by the broker's messages too, whatever the setting says."""
    await place.open(callees={"llm": declared(callee)}, gateway={"outcome_bytes": 900_000})
    answer = await place.ask("llm", "k", size=400_000)
    assert len(text_of(answer)) > 400_000
    assert len(await objects(mesh)) == 1


async def test_a_store_that_is_full_does_not_hold_up_the_accounting(
    nats_server: NatsServer, tmp_path: Path, callee: Leaky
) -> None:
    from headrace.mesh.provision import provision

    settings = Settings(url=nats_server.url, dir=str(tmp_path), durability="relaxed", max_bytes=400_000)
    async with await Mesh.connect(settings, name="test") as mesh:
        await provision(mesh)
        async with office(mesh, settings, tmp_path) as place:
            await place.open(callees={"llm": declared(callee)})
            answer = await place.ask("llm", "k", size=700_000, wait_s=20.0)
            assert answer.state == "completed"
            assert len(text_of(answer)) > 700_000  # the caller has it all the same
            again = await place.ask("llm", "k", size=700_000)
            assert again.replayed
            assert again.outcome is not None
            assert again.outcome["omitted"]
            assert again.outcome["digest"] == (answer.outcome or {})["digest"]


# --- large requests -------------------------------------------------------------------------------------


async def test_a_body_larger_than_a_message_is_refused_with_its_size(place: Office, callee: Leaky) -> None:
    await place.open(callees={"llm": declared(callee)})
    with pytest.raises(Refused, match=r"has \d+ bytes"):
        await place.ask("llm", "k", filler="x" * 1_100_000)
    # A request that fits, and would not with what the gateway adds.
    room = place.mesh.max_payload - 300
    with pytest.raises(Refused, match=r"has \d+ bytes"):
        await place.ask("llm", "k", filler="x" * room)
    assert callee.heard == []
    assert (await place.ask("llm", "k", filler="x" * 900_000)).state == "completed"


async def test_bodies_are_kept_where_that_is_asked_for(place: Office, callee: Leaky) -> None:
    await place.open(
        callees={"llm": declared(callee)}, policy={"capture_requests": True, "redact": ["hid[a-z]+"]}
    )
    answer = await place.ask("llm", "k", what="hidden thing")
    request = (await place.show(answer.call_id)).records[0]["request"]
    data = await BlobStore(place.mesh).get(msgspec.convert(request["body"], Blob))
    assert json.loads(data)["what"] == "[redacted] thing"
    assert callee.heard[0]["what"] == "hidden thing"


# --- callees that never end -----------------------------------------------------------------------------


@pytest.mark.parametrize("behave", ["endless", "endless stream", "endless stream line"])
@pytest.mark.parametrize(
    ("effect", "state"),
    [("read", "failed"), ("idempotent", "completed"), ("cost_bearing", "completed"), ("money", "in_doubt")],
)
async def test_an_answer_without_end_is_cut(
    place: Office, callee: Leaky, behave: str, effect: str, state: str
) -> None:
    """It was done, as its status says; nothing is asked twice, and what was not read is said."""
    price = {"version": "1", "output_micro_per_mtok": 1_000_000}
    settings = declared(callee, effect=effect, max_answer_bytes=300_000, price=price, free=False)
    await place.open(callees={"llm": settings})
    began = time.monotonic()
    answer = await place.ask("llm", "k", behave=behave, stream="stream" in behave, wait_s=15.0)
    assert time.monotonic() - began < 14  # and not at the time-out of 20 s
    assert answer.state == state
    assert len(callee.heard) == 1
    if state == "completed":
        assert answer.outcome is not None
        assert answer.outcome["partial"] is True
        assert answer.usage is not None
        assert answer.usage.source == (
            "estimated" if behave == "endless stream" else "assumed" if behave == "endless" else "estimated"
        )
        if behave == "endless":
            assert (answer.outcome["omitted"], answer.posted_micro) == ("answer_too_large", 50)
    else:
        assert answer.error is not None
        assert answer.error["type"] == "answer_too_large"
        assert "300,000" in answer.error["message"]
    assert (await place.ask("llm", "k", behave=behave, stream="stream" in behave)).state == state
    assert len(callee.heard) == 1


async def test_tool_calls_of_a_stream_are_put_together(place: Office, callee: Leaky) -> None:
    await place.open(callees={"llm": declared(callee)})
    answer = await place.ask("llm", "k", behave="stream", stream=True)
    assert answer.outcome is not None
    (call,) = answer.outcome["body"]["choices"][0]["message"]["tool_calls"]
    assert (call["id"], call["type"], call["function"]["name"]) == ("c1", "function", "f")
    assert json.loads(call["function"]["arguments"])["key"].startswith("SECRET-")


# --- gateways that die, and what they leave --------------------------------------------------------------

TOML = """
url = "{url}"
durability = "relaxed"
ack_wait_s = 1.0

[gateway]
name = "g1"
outcome_bytes = 1000

[policy]
capture_requests = true

[callees.llm]
kind = "openai"
effect = "{effect}"
base_url = "{callee}"
max_output_tokens = 50
free = true
timeout_s = 10.0
"""


@pytest.mark.parametrize(
    ("point", "effect", "state", "heard"),
    [
        ("request-object-stored", "cost_bearing", "completed", 1),
        ("outcome-object-stored", "cost_bearing", "in_doubt", 1),
        ("outcome-object-stored", "read", "completed", 2),
    ],
)
async def test_killed_between_an_object_and_its_record(
    nats_server: NatsServer, mesh: Mesh, tmp_path: Path, callee: Leaky, point: str, effect: str, state: str, heard: int
) -> None:  # fmt: skip
    (tmp_path / "headrace.toml").write_text(
        TOML.format(url=nats_server.url, callee=callee.url, effect=effect)
    )
    gateway = Part("gateway", tmp_path)
    body = {"messages": [], "size": 5_000}
    request = {"callee": "llm", "body": body, "tenant": "t", "agent": "a", "key": "k", "wait_s": 1.0}
    call = call_id("t", "a", "k")

    async def answer() -> CallAnswer | None:
        try:
            return msgspec.json.decode(await call_api(mesh, "call", request, timeout_s=3.0), type=CallAnswer)
        except HeadraceError:
            return None

    async def ended() -> CallAnswer | None:
        said = await answer()
        return said if said is not None and said.state in ("completed", "failed", "in_doubt") else None

    ledger, evidence = StreamLedger(mesh), EvidenceStream(mesh)
    sweeper = CallObjects(mesh, ledger, evidence)
    try:
        gateway.start(crash_at=point)
        await gateway.ready()
        await answer()
        assert await gateway.died(20) == -signal.SIGKILL, gateway.tail()
        left = await objects(mesh)
        assert len(left) == (1 if point == "request-object-stored" else 2)
        gateway.start()
        await gateway.ready()
        said = await until(ended, 60)
        assert said.state == state
        assert len(callee.heard) == heard
        # What is in doubt keeps its object, and what is named stays; that of an attempt before goes.
        assert await sweeper.sweep() == (1 if effect == "read" else 0)
        if state == "in_doubt":
            decision = {"call": call, "verdict": "not-applied", "why": "looked", "by": "ann"}
            await call_api(mesh, "calls.resolve", decision, timeout_s=20.0)
            assert await sweeper.sweep() == 1
            assert [name.rsplit("/", 1)[1].split("-")[0] for name in await objects(mesh)] == ["request"]
        else:
            view = view_of((await ledger.call("t", call)).records)
            assert view is not None
            assert isinstance(view.last.end, Completed)
            assert view.last.end.outcome.blob is not None
            assert view.last.end.outcome.blob.name in await objects(mesh)
            again = await answer()
            assert again is not None
            assert (again.replayed, again.state) == (True, "completed")
            assert len(text_of(again)) > 5_000
    finally:
        gateway.kill()


async def test_what_no_call_names_is_swept_and_nothing_else(place: Office, callee: Leaky) -> None:
    await place.open(callees={"llm": declared(callee)}, gateway={"outcome_bytes": 1_000})
    answer = await place.ask("llm", "k", size=5_000)
    store, mesh = BlobStore(place.mesh), place.mesh
    orphan = call_blob("t", answer.call_id, "outcome-2", b"nobody's")
    refused = call_blob("t", "neverseen", "request", b"of a call that was refused")
    task = Blob(name="job/0@1/input-x", size=1, digest=orphan.digest)
    for blob in (orphan, refused, task):
        await store.put(blob, b"x" * blob.size)
    sweeper = CallObjects(mesh, StreamLedger(mesh), EvidenceStream(mesh))
    assert await sweeper.sweep() == 1
    assert orphan.name not in await objects(mesh)
    assert refused.name in await objects(mesh)  # it may be about to be made
    assert await sweeper.sweep() == 1
    assert await objects(mesh) == sorted([(answer.outcome or {})["blob"]["name"], task.name])
