"""Spans without a broker: switches, contexts, sampling, attributes; exported to a real receiver."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, messaging_attributes
from opentelemetry.semconv.attributes import error_attributes

from headrace.contracts.generation import Generation
from headrace.contracts.messages import Choice, ItemError, Result, Task, TextPrompt, Usage
from headrace.mesh import semconv, spans, tracing

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = SAMPLED[:-2] + "00"
SECRET = "the prompt that nobody may see"


def a_task(index: int = 0) -> Task:
    return Task(job="j", index=index, function="generate", prompt=TextPrompt(text=SECRET))


def a_delivery(traceparent: str | None, delivered: int = 1):
    headers = {"traceparent": traceparent} if traceparent else None
    return SimpleNamespace(
        headers=headers, stream="HR_TASKS", consumer="generate-normal-t6", delivered=delivered, stream_seq=7
    )


def submit(**more):
    return spans.submit_span(
        job="j", function="generate", tenant="default", lane="normal", stream="HR_TASKS", **more
    )


@pytest.fixture
def on(receiver, monkeypatch):
    """Tracing switched on in this process."""
    for name, value in receiver.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TRACEPARENT", raising=False)
    tracing.setup_tracing("test")
    yield receiver
    tracing.shutdown_tracing()


def flush(receiver):
    tracing.shutdown_tracing()
    return receiver.spans()


# --- off ------------------------------------------------------------------------------------------------


def test_off_unless_an_endpoint_is_configured():
    assert not tracing.configured({})
    assert not tracing.configured({"OTEL_EXPORTER_OTLP_ENDPOINT": ""})
    assert tracing.configured({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"})
    assert tracing.configured({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x:4318/v1/traces"})
    assert not tracing.configured({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "True"})
    assert not tracing.configured({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"})


def test_while_off_every_call_gives_none_and_headers_pass_through(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    tracing.setup_tracing("test")
    assert not tracing.enabled()
    assert submit() is None
    assert spans.process_span(a_delivery(SAMPLED), a_task(), client="w") is None
    assert spans.chat_span(None, Generation(), chat=True, engine="e", model="m", max_tokens=1) is None
    assert tracing.carry({"traceparent": SAMPLED}, None) == SAMPLED
    assert tracing.carry(None, None) is None
    assert tracing.carry({"traceparent": "garbage\r\nX: y"}, None) is None
    spans.landed([(a_delivery(SAMPLED), Result(job="j", index=0, function="f", status="ok"))], started_ns=1)
    tracing.shutdown_tracing()


def test_while_off_nothing_of_the_sdk_is_imported_and_no_socket_is_opened():
    code = """
        import os, socket, sys
        for name in [n for n in os.environ if n.startswith("OTEL_")]:
            del os.environ[name]
        def refuse(*a, **k):
            raise AssertionError("a connection was tried")
        socket.socket.connect = refuse
        from headrace.mesh import spans, tracing
        tracing.setup_tracing("test")
        assert spans.submit_span(job="j", function="f", tenant="t", lane="normal", stream="S") is None
        tracing.shutdown_tracing()
        loaded = [m for m in sys.modules if m.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
        assert not loaded, loaded
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


# --- contexts -------------------------------------------------------------------------------------------


@given(st.text() | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}.?", fullmatch=True))
def test_a_traceparent_is_read_or_ignored_and_never_raises(value):
    context = tracing.parse_traceparent(value)
    if context is not None:
        assert tracing.trace_id(value) == f"{context.trace_id:032x}"
        assert tracing.parse_traceparent(tracing.inject(context)) is not None


@pytest.mark.parametrize(
    "bad",
    [
        None,
        "",
        "garbage",
        SAMPLED.upper(),
        SAMPLED + "-more",
        SAMPLED + "\n",
        "ff" + SAMPLED[2:],
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        "x" * 1_000_000,
    ],
)
def test_a_malformed_traceparent_is_ignored(bad):
    assert tracing.parse_traceparent(bad) is None
    assert tracing.trace_id(bad) is None


def test_a_later_version_may_say_more():
    assert tracing.parse_traceparent("01" + SAMPLED[2:] + "-more") is not None


# --- spans ----------------------------------------------------------------------------------------------


def test_one_item_from_submit_to_land(on):
    job = submit()
    sent = job.send(a_task(), size=300)
    process = spans.process_span(a_delivery(sent), a_task(), client="worker-1")
    chat = spans.chat_span(
        process, Generation(temperature=0.5, seed=3), chat=True, engine="vllm", model="tiny", max_tokens=16
    )
    choices = [Choice(text=SECRET, finish_reason="length")]
    chat.answered(model="tiny-1", usage=Usage(prompt_tokens=5, completion_tokens=16), choices=choices)
    carried = tracing.carry({"traceparent": sent}, process)
    process.end()
    again = spans.process_span(a_delivery(sent, delivered=2), a_task(), client="worker-2")
    again.end(error="dead")
    job.stored(1)
    job.end(count=1)
    result = Result(job="j", index=0, function="generate", status="failed", error=ItemError(type="too_long"))
    spans.landed([(a_delivery(carried), result)], started_ns=1)

    got = flush(on)
    by_name = {s["name"]: s for s in got if s["attributes"].get("headrace.delivery.attempt") != 2}
    redelivered = next(s for s in got if s["attributes"].get("headrace.delivery.attempt") == 2)
    assert set(by_name) == {"submit", "send HR_TASKS", "process HR_TASKS", "chat tiny", "land HR_TASKS"}
    assert len({s["trace_id"] for s in got}) == 1
    assert tracing.trace_id(carried) == got[0]["trace_id"]
    send, process = by_name["send HR_TASKS"], by_name["process HR_TASKS"]
    assert send["parent_id"] == by_name["submit"]["span_id"]
    for one in (process, redelivered):
        assert one["parent_id"] == send["span_id"]
        assert [link["span_id"] for link in one["links"]] == [send["span_id"]]
    assert redelivered["attributes"]["error.type"] == "dead"
    assert redelivered["status"] == 2
    assert [link["span_id"] for link in by_name["land HR_TASKS"]["links"]] == [process["span_id"]]
    chat = by_name["chat tiny"]
    assert chat["parent_id"] == process["span_id"]
    assert chat["attributes"] == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 16,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.response.model": "tiny-1",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 16,
    }
    assert [s["kind"] for s in (by_name["submit"], send, process, chat)] == [1, 4, 5, 3]
    assert send["resource"]["service.name"] == "headrace-test"
    assert send["resource"]["service.instance.id"]
    assert SECRET not in str(got)


def test_of_a_large_job_the_first_items_have_spans_and_the_rest_the_trace_id(on, monkeypatch):
    monkeypatch.setenv("HEADRACE_TRACE_ITEMS_PER_JOB", "2")
    job = submit()
    headers = [job.send(a_task(index)) for index in range(5)]
    assert [h[-2:] for h in headers] == ["01", "01", "00", "00", "00"]
    assert {tracing.trace_id(h) for h in headers} == {tracing.trace_id(job.traceparent)}
    assert spans.process_span(a_delivery(headers[3]), a_task(3), client="w") is None
    assert tracing.carry({"traceparent": headers[3]}, None) == headers[3]
    job.stored(5)
    job.end(count=5)
    assert len([s for s in flush(on) if s["name"].startswith("send")]) == 2


def test_a_job_that_is_not_sampled_carries_nothing(receiver, monkeypatch):
    for name, value in receiver.environ(
        OTEL_TRACES_SAMPLER="parentbased_traceidratio", OTEL_TRACES_SAMPLER_ARG="0.0"
    ).items():
        monkeypatch.setenv(name, value)
    tracing.setup_tracing("test")
    job = submit()
    assert job.send(a_task()) is None
    job.end()
    assert flush(receiver) == []


def test_a_resumed_submit_stays_in_its_trace_and_keeps_its_sampling(on):
    first = submit()
    first.end()
    assert tracing.trace_id(submit(stored=first.traceparent).traceparent) == tracing.trace_id(
        first.traceparent
    )
    assert submit(stored=UNSAMPLED).send(a_task()) is None


def test_a_submit_joins_the_trace_of_who_started_it(on, monkeypatch):
    monkeypatch.setenv("TRACEPARENT", SAMPLED)
    assert tracing.trace_id(submit().traceparent) == tracing.trace_id(SAMPLED)


def test_what_was_not_acknowledged_says_so(on):
    job = submit()
    job.send(a_task(0))
    job.send(a_task(1))
    job.stored(1)
    job.end(count=1, error="unavailable")
    states = {s["attributes"].get("headrace.index"): s["attributes"].get("error.type") for s in flush(on)}
    assert states == {0: None, 1: "unavailable", None: "unavailable"}


def test_a_receiver_that_is_down_delays_the_end_by_the_time_out_only(monkeypatch):
    import time

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    tracing.setup_tracing("test")
    submit().end()
    began = time.monotonic()
    tracing.shutdown_tracing(0.5)
    assert time.monotonic() - began < 2


def test_names_are_those_of_the_installed_conventions():
    installed = {
        value
        for module in (gen_ai_attributes, messaging_attributes, error_attributes)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str)
    }
    ours = {value for name, value in vars(semconv).items() if name.isupper() and isinstance(value, str)}
    assert ours <= installed
    assert len(ours) > 20
