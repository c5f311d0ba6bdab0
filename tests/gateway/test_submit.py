"""`hr.api.submit` on a real broker, over raw requests, as `nats request` sends them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from headrace.contracts import codec
from headrace.contracts.errors import Unavailable
from headrace.contracts.messages import (
    BlobPrompt,
    FunctionSpec,
    JobOpened,
    JobSealed,
    Row,
    TextPrompt,
    TokenPrompt,
)
from headrace.gateway.service import GatewayService
from headrace.mesh.blobs import BlobStore
from headrace.mesh.jsapi import count_subject, get_message, last_message, stream_info
from headrace.mesh.provision import register_function

pytestmark = pytest.mark.anyio


@pytest.fixture
async def gateway(mesh, settings):
    await register_function(mesh, FunctionSpec(name="generate", engine="echo", model="echo", vocab_size=1000))
    service = GatewayService(settings)
    await service.start()
    yield service
    await service.stop()


async def ask(mesh, body, headers=None):
    """One request with the five seconds of `nats request`; (reply, headers)."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    answer = await mesh.request(mesh.subjects.api("submit"), data, timeout_s=5.0, headers=headers)
    return msgspec.json.decode(answer.data), answer.headers or {}


async def refused(mesh, body, code):
    reply, headers = await ask(mesh, body)
    assert set(reply) == {"error"}
    assert reply["error"]["code"] == code
    assert headers["Nats-Service-Error"]
    assert headers["Nats-Service-Error-Code"].isdigit()
    return reply["error"]


async def tasks_of(mesh, job):
    subjects = (await stream_info(mesh, "HR_TASKS", subjects_filter=mesh.subjects.tasks_of_job(job)))[
        "state"
    ]["subjects"]
    if not subjects:
        return []
    info = await stream_info(mesh, "HR_TASKS")
    found = [await get_message(mesh, "HR_TASKS", n) for n in range(1, info["state"]["last_seq"] + 1)]
    tasks = [codec.TASK.decode(m.data, m.headers) for m in found if m is not None and m.subject in subjects]
    return sorted(tasks, key=lambda task: task.index)


async def test_a_task_is_stored_and_its_receipt_is_the_answer(mesh, gateway):
    receipt, headers = await ask(
        mesh, {"function": "generate", "prompt": "Say hello", "max_tokens": 8, "custom_id": "c"}
    )
    assert "Nats-Service-Error" not in headers
    assert (receipt["index"], receipt["submitted"], receipt["resumed_from"]) == (0, 1, 0)
    (task,) = await tasks_of(mesh, receipt["job"])
    assert (task.prompt, task.params.max_tokens, task.custom_id) == (TextPrompt(text="Say hello"), 8, "c")
    sealed = await last_message(mesh, "HR_JOBS", mesh.subjects.job_event(receipt["job"], "sealed"))
    event = codec.JOB_EVENT.decode(sealed.data)
    assert isinstance(event, JobSealed)
    assert event.count == 1


async def test_a_large_prompt_of_a_request_becomes_an_object(mesh, gateway):
    receipt, _ = await ask(mesh, {"prompt": "x" * 700_000})
    (task,) = await tasks_of(mesh, receipt["job"])
    assert isinstance(task.prompt, BlobPrompt)
    stored = codec.PROMPT.decode(await BlobStore(mesh).get(task.prompt.blob))
    assert stored == TextPrompt(text="x" * 700_000)


async def test_up_to_a_thousand_items_are_one_job(mesh, gateway):
    items = [{"prompt_token_ids": [i % 1000]} for i in range(1000)]
    receipt, _ = await ask(mesh, {"job": "many", "items": items, "lane": "bulk", "tenant": "acme"})
    assert (receipt["job"], receipt["submitted"]) == ("many", 1000)
    assert await count_subject(mesh, "HR_TASKS", "hr.tasks.generate.bulk.*.many") == 1000
    opened = await last_message(mesh, "HR_JOBS", mesh.subjects.job_event("many", "opened"))
    event = codec.JOB_EVENT.decode(opened.data)
    assert isinstance(event, JobOpened)
    assert event.tenant == "acme"
    info = await stream_info(mesh, "HR_TASKS")
    first = await get_message(mesh, "HR_TASKS", info["state"]["first_seq"])
    task = codec.TASK.decode(first.data)
    assert (task.index, task.prompt, task.tenant) == (0, TokenPrompt(ids=[0]), "acme")


async def test_a_row_goes_to_its_function_as_it_is(mesh, gateway):
    receipt, _ = await ask(mesh, {"row": {"a": [1, None]}})
    (task,) = await tasks_of(mesh, receipt["job"])
    assert isinstance(task.prompt, Row)
    assert bytes(task.prompt.value) == b'{"a":[1,null]}'


async def test_the_same_again_is_the_same_receipt_and_another_body_a_conflict(mesh, gateway):
    body = {"job": "once", "prompt": "x", "max_tokens": 4}
    first, _ = await ask(mesh, body)
    again, _ = await ask(mesh, dict(reversed(body.items())) | {"max_tokens": 4})
    assert {**again, "resumed_from": 0, "trace_id": None} == {**first, "trace_id": None}
    assert again["resumed_from"] == 1
    assert len(await tasks_of(mesh, "once")) == 1
    error = await refused(mesh, body | {"max_tokens": 5}, "job_exists")
    assert "once" in error["message"]
    assert (await tasks_of(mesh, "once"))[0].params.max_tokens == 4


async def test_the_same_job_asked_for_at_once_by_many_is_one_job(mesh, gateway):
    body = {"job": "race", "items": [{"prompt": f"p{i}"} for i in range(20)]}
    replies = await asyncio.gather(*(ask(mesh, body) for _ in range(10)))
    assert {reply.get("submitted") for reply, _ in replies} == {20}
    assert [task.index for task in await tasks_of(mesh, "race")] == list(range(20))


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        (b"", "missing_field", "prompt"),
        (b"{", "invalid", None),
        (b'{"prompt":"\xff"}', "invalid_json", None),
        ({"prompt": "x", "tempreature": 1}, "invalid_item", "tempreature"),
        ({"prompt": "x", "top_p": 2}, "invalid_item", "top_p"),
        ({"prompt": ""}, "invalid_item", "prompt"),
        ({"prompt": "x", "messages": []}, "invalid_item", "messages"),
        ({"prompt_token_ids": [5, 1000]}, "invalid_item", "prompt_token_ids[1]"),
        ({"items": [{"prompt": "x"}, {"prompt": 5}]}, "invalid_item", "items[1].prompt"),
        ({"items": [{"prompt": "x", "custom_id": "a"}] * 2}, "invalid_item", "items[1].custom_id"),
        ({"prompt": "x", "job": "a.b"}, "invalid_name", "job"),
        ({"prompt": "x", "function": "nope"}, "unknown_function", None),
    ],
)
async def test_what_is_wrong_is_named_and_nothing_is_stored(mesh, gateway, body, code, field):
    error = await refused(mesh, body, code)
    assert error.get("field") == field
    info = await stream_info(mesh, "HR_TASKS")
    assert info["state"]["messages"] == 0


async def test_an_unknown_function_is_refused_with_the_known_ones(mesh, gateway):
    error = await refused(mesh, {"prompt": "x", "function": "nope"}, "unknown_function")
    assert "generate" in error["message"]


async def test_an_error_does_not_quote_the_prompt(mesh, gateway):
    secret = "nobody may read this"
    for body in (
        {"prompt": secret, "top_p": 2},
        {"prompt": [secret]},
        {"prompt": secret, "messages": [{"role": secret}]},
    ):
        reply, headers = await ask(mesh, body)
        assert secret not in msgspec.json.encode(reply).decode() + str(headers)


async def test_nats_service_finds_it(mesh, gateway):
    """What `nats service ls`, `info` and `stats` ask."""
    await ask(mesh, {"prompt": "x"})
    await ask(mesh, {"prompt": 5})
    for subject in ("$SRV.PING", "$SRV.PING.headrace-gateway"):
        ping = msgspec.json.decode((await mesh.request(subject, b"")).data)
        assert (ping["name"], ping["type"]) == ("headrace-gateway", "io.nats.micro.v1.ping_response")
    info = msgspec.json.decode((await mesh.request("$SRV.INFO.headrace-gateway", b"")).data)
    found = [(e["name"], e["subject"]) for e in info["endpoints"]]
    assert found[0] == ("submit", "hr.api.submit")
    assert {("call", "hr.api.call"), ("agents-prompt", "hr.api.agents.prompt.*")} <= set(found)
    stats = msgspec.json.decode((await mesh.request("$SRV.STATS.headrace-gateway", b"")).data)
    assert stats["endpoints"][0]["num_requests"] == 2


async def test_two_gateways_share_the_work_and_answer_once(mesh, gateway, settings):
    other = GatewayService(settings)
    await other.start()
    try:
        inbox, replies = mesh.inbox(), []

        async def collect(msg):
            replies.append(msg)

        subscription = await mesh.nc.subscribe(inbox, cb=collect)
        for i in range(20):
            await mesh.nc.publish(
                "hr.api.submit", msgspec.json.encode({"job": f"j{i}", "prompt": "x"}), reply=inbox
            )
        for _ in range(100):
            if len(replies) >= 20:
                break
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)  # a second answer would come now
        assert len(replies) == 20
        await subscription.unsubscribe()
    finally:
        await other.stop()


async def test_a_stop_answers_what_is_in_hand(mesh, gateway):
    asked = [asyncio.ensure_future(ask(mesh, {"job": f"j{i}", "prompt": "x"})) for i in range(20)]
    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    await gateway.stop()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    stored = [answer[0]["job"] for answer in answers if isinstance(answer, tuple)]
    assert stored
    for job in stored:
        assert len(await tasks_of(mesh, job)) == 1
    for answer in answers:
        assert isinstance(answer, tuple | Unavailable)


async def test_published_without_a_reply_subject_it_is_passed_over(mesh, gateway):
    await mesh.nc.publish("hr.api.submit", msgspec.json.encode({"job": "silent", "prompt": "x"}))
    await ask(mesh, {"job": "loud", "prompt": "x"})
    assert await tasks_of(mesh, "silent") == []


async def test_a_deadline_and_a_failure_limit_stand_in_the_envelope(mesh, gateway):
    body = {"prompt": "hi", "deadline": "2h", "max_failed": "5%"}
    receipt, _ = await ask(mesh, body)
    opened = await last_message(mesh, "HR_JOBS", mesh.subjects.job_event(receipt["job"], "opened"))
    event = codec.JOB_EVENT.decode(opened.data)
    assert event.max_failed == 0.05
    assert 7_100 < (event.deadline_us - event.at_us) / 1e6 <= 7_200
    (task,) = await tasks_of(mesh, receipt["job"])
    assert task.deadline_us == event.deadline_us
    sealed = await last_message(mesh, "HR_JOBS", mesh.subjects.job_event(receipt["job"], "sealed"))
    assert codec.JOB_EVENT.decode(sealed.data).shapes == {"t9": 1}  # the default of 256 new tokens


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"deadline": "tomorrow"}, "deadline"),
        ({"deadline": "2020-01-01"}, "deadline"),
        ({"max_failed": 7}, "max_failed"),
    ],
)
async def test_a_policy_that_is_wrong_is_refused_by_name(mesh, gateway, fields, field):
    reply, _ = await ask(mesh, {"prompt": "hi", "job": "j"} | fields)
    assert reply["error"]["field"] == field
    assert await last_message(mesh, "HR_JOBS", mesh.subjects.job_event("j", "opened")) is None
