"""Examples of the messages of pipelines, for the golden bytes."""

from __future__ import annotations

from typing import Any

from headrace.contracts import codec
from headrace.contracts.generation import Generation
from headrace.contracts.messages import JobOpened
from headrace.contracts.names import Lane
from headrace.contracts.pipeline import PipelineRecord, PipelineSpec, StageSpec

AT = 1_764_547_200_000_000
STAGES = [
    StageSpec(name="split", function="split"),
    StageSpec(
        name="ask",
        function="generate",
        after="split",
        job="questions",
        lane=Lane.URGENT,
        params=Generation(max_tokens=64),
        chat="Ask about {item.text} of {kept.title}",
        system="You ask.",
        each="value.chunks",
        where="item.text",
        keep=["value.title"],
        max_failed=0.5,
    ),
    StageSpec(name="plain", function="generate", prompt="{text}"),
    StageSpec(name="whole", function="count", collect="parent", row={"text": "text"}),
    StageSpec(name="all", function="count", collect=True),
]

EXAMPLES: dict[str, tuple[codec.Schema[Any], Any]] = {
    "pipeline-1.small": (
        codec.PIPELINE,
        PipelineRecord(spec=PipelineSpec(name="p", stages=STAGES[:1]), fingerprint="0" * 16),
    ),
    "pipeline-1.full": (
        codec.PIPELINE,
        PipelineRecord(
            spec=PipelineSpec(name="probes", stages=STAGES, lane=Lane.BULK, deadline="2h"),
            fingerprint="1" * 16,
            tenant="acme",
            opened_us=AT,
            deadline_us=AT + 1,
        ),
    ),
    "job-event-1.opened-stage": (
        codec.JOB_EVENT,
        JobOpened(
            job="probes-ask", function="generate", input_fingerprint="0" * 16, pipeline="probes", stage="ask"
        ),
    ),
}
