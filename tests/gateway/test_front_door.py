"""The front door as somebody with nothing but `nats request` sees it: work in, answer out, all over raw requests."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest

from headrace.completion.service import CompletionService
from headrace.gateway.service import GatewayService
from headrace.inference_worker.service import WorkerService

pytestmark = pytest.mark.anyio


@pytest.fixture
async def front_door(mesh, settings):
    async with contextlib.AsyncExitStack() as stack:
        for service in (CompletionService(settings), WorkerService(settings), GatewayService(settings)):
            await service.start()
            stack.push_async_callback(service.stop)
        yield


async def request(mesh, subject, text):
    answer = await mesh.request(subject, text.encode(), timeout_s=5.0)
    return msgspec.json.decode(answer.data)


async def test_a_prompt_goes_in_and_its_answer_comes_out(mesh, front_door):
    receipt = await request(mesh, "hr.api.submit", '{"function":"generate","prompt":"Say hello."}')
    asked = f'{{"job":"{receipt["job"]}","index":{receipt["index"]},"wait_s":4}}'
    result = await request(mesh, "hr.api.result", asked)
    assert result["status"] == "ok"
    assert result["choices"][0]["text"] == "Say hello."
    audit = await request(mesh, "hr.api.audit", f'{{"job":"{receipt["job"]}"}}')
    assert (audit["balanced"], audit["ok"], audit["submitted"]) == (True, 1, 1)


async def test_a_conversation_and_a_row_too(mesh, front_door):
    chat = '{"messages":[{"role":"user","content":"Hi"}],"max_tokens":4,"temperature":0}'
    for body, key, want in ((chat, "choices", "Hi"), ('{"row":{"a":1}}', "value", {"a": 1})):
        receipt = await request(mesh, "hr.api.submit", body)
        result = await request(mesh, "hr.api.result", f'{{"job":"{receipt["job"]}","wait_s":4}}')
        got = result[key]
        assert (got[0]["text"] if key == "choices" else got) == want


async def test_service_ls_finds_both_halves(mesh, front_door):
    found, inbox = [], mesh.inbox()

    async def collect(msg):
        found.append(msgspec.json.decode(msg.data)["name"])

    subscription = await mesh.nc.subscribe(inbox, cb=collect)
    await mesh.nc.publish("$SRV.PING", b"", reply=inbox)
    for _ in range(100):
        if len(found) >= 2:
            break
        await asyncio.sleep(0.02)
    await subscription.unsubscribe()
    assert sorted(found) == ["headrace-completion", "headrace-gateway"]
