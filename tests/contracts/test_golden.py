"""One full and one small example of each released message; their bytes are kept in `golden/` for ever.

A new field needs a default, and then these bytes still decode to these values. To release a new message or
version, add examples and run `python tests/contracts/test_golden.py`: it writes what is missing, and never
writes over what is released.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from headrace.contracts import codec
from headrace.contracts.generation import Generation, StructuredOutput
from headrace.contracts.messages import (
    Blob,
    BlobPrompt,
    ChatPrompt,
    Choice,
    DeadLetter,
    FunctionSpec,
    ItemError,
    JobCancelled,
    JobCompleted,
    JobOpened,
    JobRetried,
    JobSealed,
    Manifest,
    Result,
    Row,
    Task,
    TextPrompt,
    Timings,
    TokenPrompt,
    Usage,
    WorkerReport,
)
from headrace.contracts.names import Lane
from headrace.contracts.suspects import Cleared, Suspect
from tests.contracts import (
    capture_examples,
    directory_examples,
    ledger_examples,
    mail_examples,
    pipeline_examples,
)

GOLDEN = Path(__file__).with_name("golden")
AT = 1_764_547_200_000_000
FULL_GENERATION = Generation(
    n=2,
    max_tokens=128,
    min_tokens=1,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    presence_penalty=0.1,
    frequency_penalty=-0.1,
    repetition_penalty=1.1,
    seed=-42,
    stop=["\n\n", "END"],
    stop_token_ids=[2],
    bad_words=["foo"],
    include_stop_str_in_output=True,
    ignore_eos=True,
    logprobs=5,
    prompt_logprobs=1,
    skip_special_tokens=False,
    spaces_between_special_tokens=False,
    truncate_prompt_tokens=512,
    logit_bias={7: -1.5},
    allowed_token_ids=[1, 2, 3],
    structured_outputs=StructuredOutput(regex="[a-z]+"),
    priority=-1,
    lora="adapter",
)
FULL_TASK = Task(
    job="nightly-2026",
    index=41,
    function="generate",
    prompt=TokenPrompt(ids=[1, 5, 31999]),
    params=FULL_GENERATION,
    params_fingerprint="0123456789abcdef",
    tenant="acme",
    generation=2,
    custom_id="row-41",
    model="SmolLM2-135M",
    prompt_tokens=3,
    chat=True,
    sink="call",
    submitted_us=AT,
    deadline_us=AT + 60_000_000,
)
TEXT_TASK = Task(job="j", index=0, function="f", prompt=TextPrompt(text='Grüße, 世界 \u2028 "quoted" \\ 😀'))
CHAT_TASK = Task(
    job="j",
    index=1,
    function="f",
    prompt=ChatPrompt(
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        tools=[{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}],
        tool_choice="auto",
    ),
)
ROW_TASK = Task(job="j", index=2, function="f", prompt=Row(value=Raw(b'{"a":[1,2.5,null,true,"x"]}')))
BLOB = Blob(name="j.3.in", size=5_000_000, digest="SHA-256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU=")
BLOB_TASK = Task(job="j", index=3, function="f", prompt=BlobPrompt(blob=BLOB), prompt_tokens=1_200_000)

EXAMPLES: dict[str, tuple[codec.Schema[Any], Any]] = {
    "task-1.tokens-full": (codec.TASK, FULL_TASK),
    "task-1.text": (codec.TASK, TEXT_TASK),
    "task-1.chat": (codec.TASK, CHAT_TASK),
    "task-1.row": (codec.TASK, ROW_TASK),
    "task-1.blob": (codec.TASK, BLOB_TASK),
    "result-1.ok": (codec.RESULT, Result(job="j", index=0, function="f", status="ok")),
    "result-1.full": (
        codec.RESULT,
        Result(
            job="nightly-2026",
            index=41,
            function="generate",
            status="dead",
            generation=2,
            tenant="acme",
            custom_id="row-41",
            choices=[
                Choice(
                    text="Hello",
                    finish_reason="tool_calls",
                    token_ids=[15496],
                    tool_calls=[{"id": "1", "function": {"name": "now", "arguments": "{}"}}],
                    logprobs={"content": [{"token": "Hello", "logprob": -0.5}]},
                    stop_reason=2,
                ),
                Choice(finish_reason="length", stop_reason="END"),
            ],
            value=Raw(b"[1,2]"),
            usage=Usage(prompt_tokens=3, completion_tokens=1, cached_tokens=2),
            error=ItemError(type="tries_exhausted", message="5 tries", field="prompt"),
            model="SmolLM2-135M",
            engine="llamacpp",
            params_fingerprint="0123456789abcdef",
            worker="w-1",
            attempt=6,
            chat=True,
            timings=Timings(submitted_us=AT, received_us=AT + 1, started_us=AT + 2, finished_us=AT + 3),
            trace_id="0af7651916cd43dd8448eb211c80319c",
            task=FULL_TASK,
        ),
    ),
    "result-1.blob": (
        codec.RESULT,
        Result(
            job="j",
            index=3,
            function="f",
            status="ok",
            usage=Usage(prompt_tokens=1_200_000, completion_tokens=9),
            shape=21,
            blob=Blob(name="j.3.out", size=2_000_000, digest="SHA-256=x"),
            input_blob="j.3.in",
        ),
    ),
    "manifest-1.small": (codec.MANIFEST, Manifest(job="j", input_fingerprint="0" * 16)),
    "manifest-1.full": (
        codec.MANIFEST,
        Manifest(job="j", input_fingerprint="0" * 16, stored=1000, consumed_lines=1002, closed="sealed"),
    ),
    "job-event-1.opened": (
        codec.JOB_EVENT,
        JobOpened(
            job="j",
            function="f",
            input_fingerprint="0" * 16,
            tenant="acme",
            lane=Lane.BULK,
            model="m",
            source="prompts.jsonl",
            at_us=AT,
            traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ),
    ),
    "job-event-1.sealed": (
        codec.JOB_EVENT,
        JobSealed(job="j", count=1000, input_fingerprint="0" * 16, refused=2, at_us=AT),
    ),
    "job-event-1.retried": (
        codec.JOB_EVENT,
        JobRetried(job="j", generation=2, count=10, where="status = 'dead'", at_us=AT),
    ),
    "job-event-1.cancelled": (codec.JOB_EVENT, JobCancelled(job="j", count=1000, reason="a typo", at_us=AT)),
    "job-event-1.opened-policy": (
        codec.JOB_EVENT,
        JobOpened(
            job="j",
            function="generate",
            input_fingerprint="0" * 16,
            at_us=AT,
            deadline_us=AT + 1,
            max_failed=0.05,
        ),
    ),
    "job-event-1.sealed-shapes": (
        codec.JOB_EVENT,
        JobSealed(job="j", count=3, input_fingerprint="0" * 16, at_us=AT, shapes={"t6": 1, "t9": 2}),
    ),
    "job-event-1.cancelled-deadline": (
        codec.JOB_EVENT,
        JobCancelled(
            job="j",
            count=3,
            reason="the deadline passed",
            at_us=AT,
            cause="deadline",
            shapes={"t6": 1, "t9": 2},
        ),
    ),
    "job-event-1.completed-early": (
        codec.JOB_EVENT,
        JobCompleted(
            job="j",
            state="cancelled",
            count=10,
            ok=2,
            cancelled=8,
            at_us=AT,
            generation=2,
            cause="failures",
            reason="stopped early",
        ),
    ),
    "manifest-1.retry": (
        codec.MANIFEST,
        Manifest(job="j", input_fingerprint="0" * 16, stored=3, generation=2, closed="sealed"),
    ),
    "manifest-1.shapes": (
        codec.MANIFEST,
        Manifest(job="j", input_fingerprint="0" * 16, stored=3, consumed_lines=3, shapes={"t6": 1, "t9": 2}),
    ),
    "job-event-1.completed": (
        codec.JOB_EVENT,
        JobCompleted(
            job="j",
            state="completed_with_errors",
            count=10,
            ok=6,
            failed=2,
            dead=1,
            cancelled=1,
            at_us=AT,
        ),
    ),
    "dead-letter-1.full": (
        codec.DEAD_LETTER,
        DeadLetter(
            origin="HR_TASKS",
            subject="hr.tasks.f.normal.t6.j",
            reason="not a task/1: JSON is malformed",
            data=b"\x00\xff not JSON",
            headers={"Headrace-Schema": "task/1"},
            stream="HR_TASKS",
            sequence=7,
            tries=1,
            at_us=AT,
        ),
    ),
    "function-1.full": (
        codec.FUNCTION,
        FunctionSpec(
            name="generate",
            engine="vllm",
            model="tiny",
            max_model_len=4096,
            default_max_tokens=128,
            vocab_size=32000,
            tokenizer="/models/tiny",
            tokenizer_fingerprint="abc",
            lanes=[Lane.NORMAL, Lane.URGENT],
            min_shape=5,
            max_shape=12,
        ),
    ),
    "function-1.small": (codec.FUNCTION, FunctionSpec(name="rows")),
    "function-1.rows": (
        codec.FUNCTION,
        FunctionSpec(
            name="probe",
            engine="python",
            model="pkg.mod:probe@2",
            default_max_tokens=1,
            min_shape=1,
            max_shape=0,
            version="2",
        ),
    ),
    "worker-report-1.full": (
        codec.WORKER_REPORT,
        WorkerReport(
            worker="w-1",
            function="generate",
            engine="sim",
            model="m",
            state="draining",
            running={"j": 3},
            oldest={"j": AT},
            in_flight=3,
            tokens_in_flight=300,
            capacity_tokens=1000,
            slots=8,
            done=5,
            prompt_tokens=50,
            completion_tokens=60,
            at_us=AT,
        ),
    ),
    "suspect-1.full": (
        codec.SUSPECT,
        Suspect(
            stored_us=AT,
            crashes=2,
            alone=True,
            incident="i-2",
            before="i-1",
            error="it broke",
            worker="w-1",
            started_us=AT,
            at_us=AT,
        ),
    ),
    "suspect-1.error": (codec.SUSPECT, Suspect(stored_us=AT, error="RuntimeError: not now")),
    "suspect-1.cleared": (codec.SUSPECT, Cleared(incident="i-1", culprit=7, worker="w-1", at_us=AT)),
}
EXAMPLES |= ledger_examples.EXAMPLES
EXAMPLES |= capture_examples.EXAMPLES
EXAMPLES |= directory_examples.EXAMPLES
EXAMPLES |= mail_examples.EXAMPLES
EXAMPLES |= pipeline_examples.EXAMPLES


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_golden_bytes_decode_to_the_same_message_for_ever(name):
    schema, message = EXAMPLES[name]
    assert (
        schema.decode((GOLDEN / f"{name}.json").read_bytes(), {codec.SCHEMA_HEADER: schema.name}) == message
    )


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_what_is_written_is_stable(name):
    schema, message = EXAMPLES[name]
    assert schema.encode(message) == (GOLDEN / f"{name}.json").read_bytes()


def test_every_message_has_golden_bytes_and_every_golden_file_a_message():
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(EXAMPLES)
    assert {schema.name for schema, _ in EXAMPLES.values()} == {schema.name for schema in codec.SCHEMAS}


def test_each_field_of_a_message_is_set_in_some_example():
    """A field that no example sets could change its name or type unseen."""
    seen: dict[type, set[str]] = {}
    for _, message in EXAMPLES.values():
        _fields_set(message, seen)
    unset = {
        f"{type_.__name__}.{n}"
        for type_, names in seen.items()
        for n in type_.__struct_fields__
        if n not in names
    }
    assert unset == {f"StructuredOutput.{n}" for n in ("json", "choice", "grammar", "json_object")}


def _fields_set(value, seen):
    if isinstance(value, msgspec.Struct):
        names = seen.setdefault(type(value), set())
        for name in value.__struct_fields__:
            one = getattr(value, name)
            names |= {name} if one != _default(type(value), name) else set()
            _fields_set(one, seen)
    elif isinstance(value, list):
        for one in value:
            _fields_set(one, seen)


def _default(type_, name):
    found = next(f for f in msgspec.structs.fields(type_) if f.name == name)
    return found.default_factory() if found.default_factory is not msgspec.NODEFAULT else found.default


if __name__ == "__main__":
    for example, (written_by, value) in EXAMPLES.items():
        path = GOLDEN / f"{example}.json"
        if not path.exists():
            path.write_bytes(written_by.encode(value))
            print("wrote", path)
