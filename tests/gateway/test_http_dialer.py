"""What an attempt over HTTP is taken for, against a real server in its own process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from headrace.contracts.account import AttemptView, CallView
from headrace.contracts.ledger import CallRequest, CallUsage, Intent
from headrace.gateway.callees import Callee, read_body
from headrace.gateway.dialing import Attempted, Order
from headrace.gateway.http_dialer import HttpDialer
from headrace.gateway.verdicts import Seen
from headrace.mesh.callee_settings import CalleeSettings, ResolverSettings
from headrace.mesh.server import free_port
from tests.gateway.callee_process import CalleeProcess

pytestmark = pytest.mark.anyio


@pytest.fixture
def callee(tmp_path: Path) -> Iterator[CalleeProcess]:
    process = CalleeProcess(tmp_path)
    yield process
    process.stop()


@pytest.fixture
async def dialer() -> AsyncIterator[HttpDialer]:
    made = HttpDialer()
    yield made
    await made.close()


def order(url: str, body: dict[str, Any], *, timeout_s: float = 5.0, **settings: Any) -> Order:
    fields: dict[str, Any] = {
        "kind": "openai",
        "effect": "cost_bearing",
        "base_url": url,
        "max_output_tokens": 50,
    }
    spec = Callee("llm", CalleeSettings(**(fields | settings)))
    raw = Raw(msgspec.json.encode(body))
    return Order(
        call="c1",
        tenant="t",
        attempt=1,
        callee=spec,
        body=read_body(spec, raw),
        remote_key="hr-c1" if spec.effect != "cost_bearing" else None,
        until_us=int((time.time() + timeout_s) * 1e6),
    )


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "id": "7"}


async def test_an_answer_with_its_usage(callee: CalleeProcess, dialer: HttpDialer) -> None:
    got = await dialer.dial(order(callee.url, CHAT))
    assert (got.seen, got.request_sent) == (Seen.ANSWERED, True)
    assert got.outcome is not None
    assert got.outcome.body["choices"][0]["message"]["content"] == "one two three 7"
    assert (got.outcome.finish_reason, got.outcome.response_id) == ("stop", "cmpl-7")
    assert got.outcome.provider_request_id == "req-1"
    assert got.usage == CallUsage(input_tokens=11, output_tokens=4, cached_tokens=2, source="provider")
    assert 0 < got.times.sent_us <= got.times.first_byte_us <= got.times.done_us


@pytest.mark.parametrize(
    ("behave", "seen"),
    [
        ("closes", Seen.BROKEN),
        ("closes before reading", Seen.BROKEN),
        ("half", Seen.BROKEN),
        ("400", Seen.REFUSED),
        ("moved", Seen.REFUSED),
        ("429", Seen.THROTTLED),
        ("500", Seen.SERVER_ERROR),
        ("503", Seen.SERVER_ERROR),
        ("nonsense", Seen.ANSWERED),
    ],
)
async def test_what_is_seen(callee: CalleeProcess, dialer: HttpDialer, behave: str, seen: Seen) -> None:
    got = await dialer.dial(order(callee.url, CHAT | {"behave": behave}))
    assert (got.seen, got.request_sent) == (seen, True)
    assert len(callee.entries()) <= 1
    if seen is Seen.THROTTLED:
        assert got.retry_after_s == 7.0
    if behave in ("400", "429", "500"):
        assert got.error.message == f"said {behave}"
        assert got.error.status == int(behave)


async def test_a_callee_that_hangs_ends_at_the_time_out(callee: CalleeProcess, dialer: HttpDialer) -> None:
    started = time.monotonic()
    got = await dialer.dial(order(callee.url, CHAT | {"behave": "hangs"}, timeout_s=0.5))
    assert (got.seen, got.error.type) == (Seen.BROKEN, "timeout")
    assert time.monotonic() - started < 3
    assert len(callee.entries()) == 1


async def test_nothing_listens(dialer: HttpDialer) -> None:
    got = await dialer.dial(order(f"http://127.0.0.1:{free_port()}", CHAT))
    assert (got.seen, got.request_sent) == (Seen.NOT_SENT, False)


async def test_a_connection_that_never_comes_was_not_sent(dialer: HttpDialer) -> None:
    """A listening socket whose backlog is full: SYN and nothing more."""
    async with _full_backlog() as url:
        got = await dialer.dial(order(url, CHAT, connect_timeout_s=0.3))
    assert (got.seen, got.request_sent, got.error.type) == (Seen.NOT_SENT, False, "timeout")


class _full_backlog:  # noqa: N801  (used like a function)
    async def __aenter__(self) -> str:
        import socket

        self.server = socket.socket()
        self.server.bind(("127.0.0.1", 0))
        self.server.listen(0)
        address = self.server.getsockname()
        self.clients = []
        for _ in range(8):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(address)
            self.clients.append(client)
        return f"http://127.0.0.1:{address[1]}"

    async def __aexit__(self, *_: object) -> None:
        for s in (self.server, *self.clients):
            s.close()


async def test_no_name_and_no_url_were_not_sent(dialer: HttpDialer) -> None:
    for url in ("http://no-such-host.invalid", "nonsense", "http://[", "ftp://127.0.0.1"):
        got = await dialer.dial(order(url, CHAT))
        assert (got.seen, got.request_sent) == (Seen.NOT_SENT, False), url


async def test_a_stream_is_put_together(callee: CalleeProcess, dialer: HttpDialer) -> None:
    got = await dialer.dial(order(callee.url, CHAT | {"behave": "stream", "stream": True}))
    assert got.seen is Seen.ANSWERED
    assert got.outcome is not None
    assert got.outcome.body["choices"][0]["message"]["content"] == "one two three 7 "
    assert (got.outcome.chunks, got.outcome.partial, got.outcome.finish_reason) == (4, False, "stop")
    assert got.usage.source == "provider"


async def test_a_stream_that_is_cut_is_partial_and_estimated(
    callee: CalleeProcess, dialer: HttpDialer
) -> None:
    body = CHAT | {"behave": "cuts", "stream": True}
    sent = order(callee.url, body)
    got = await dialer.dial(sent)
    assert got.seen is Seen.CUT
    assert got.outcome is not None
    assert (got.outcome.chunks, got.outcome.partial) == (4, True)
    assert got.usage == CallUsage(input_tokens=sent.body.input_tokens, output_tokens=4, source="estimated")


async def test_a_model_that_states_no_usage_is_taken_at_its_worst(
    callee: CalleeProcess, dialer: HttpDialer
) -> None:
    sent = order(callee.url, CHAT | {"behave": "silent"})
    got = await dialer.dial(sent)
    assert got.usage == CallUsage(input_tokens=sent.body.input_tokens, output_tokens=50, source="assumed")


async def test_the_key_is_passed_on_and_the_secret_too(
    callee: CalleeProcess, dialer: HttpDialer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOL_KEY", "s3cret")
    sent = order(callee.url, CHAT, effect="idempotent", api_key_env="TOOL_KEY")
    await dialer.dial(sent)
    await dialer.dial(sent)
    assert [(e["call"], e["applied"]) for e in callee.entries()] == [("hr-c1", True), ("hr-c1", False)]
    monkeypatch.delenv("TOOL_KEY")
    got = await dialer.dial(sent)
    assert (got.seen, got.error.type) == (Seen.NOT_SENT, "no_api_key")
    assert "TOOL_KEY" in got.error.message


async def test_resolving(callee: CalleeProcess, dialer: HttpDialer) -> None:
    settings: dict[str, Any] = {"effect": "money", "resolver": ResolverSettings(path="/calls/{key}")}
    sent = order(callee.url, CHAT | {"behave": "closes"}, **settings)
    view = CallView("c1", "t", (AttemptView(_intent(sent)),))
    before = await dialer.resolve(sent.callee, view)
    assert before is not None
    assert before.seen is Seen.NOT_SENT
    assert (await dialer.dial(sent)).seen is Seen.BROKEN
    after = await dialer.resolve(sent.callee, view)
    assert after is not None
    assert after.outcome is not None
    assert (after.seen, after.outcome.response_id) == (Seen.ANSWERED, "cmpl-7")
    callee.stop()
    assert await dialer.resolve(sent.callee, view) is None


def _intent(sent: Order) -> Intent:
    request = CallRequest(callee="llm", effect="money", principal="a", fingerprint="0" * 64)
    return Intent(
        call="c1", tenant="t", attempt=1, owner="g", epoch=1, at_us=1, lease_until_us=2, request=request,
        remote_key=sent.remote_key,
    )  # fmt: skip


async def test_many_at_once_and_one_after_the_other(callee: CalleeProcess, dialer: HttpDialer) -> None:
    got: list[Attempted] = list(
        await asyncio.gather(*(dialer.dial(order(callee.url, CHAT)) for _ in range(60)))
    )
    got += [await dialer.dial(order(callee.url, CHAT)) for _ in range(20)]
    assert {g.seen for g in got} == {Seen.ANSWERED}
    assert len(callee.entries()) == 80
