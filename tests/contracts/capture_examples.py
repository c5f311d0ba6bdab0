"""Examples of what agents record, for the golden bytes."""

from __future__ import annotations

from typing import Any

from msgspec import Raw

from headrace.contracts import codec
from headrace.contracts.capture import CaptureCount, CaptureRecord, CaptureRecords

AT = 1_764_547_200_000_000

EXAMPLES: dict[str, tuple[codec.Schema[Any], Any]] = {
    "capture-1.records": (
        codec.CAPTURE,
        CaptureRecords(
            agent="planner",
            run="c-1",
            life="0" * 32,
            tenant="t",
            trace_id="1" * 32,
            records=[
                CaptureRecord(
                    seq=7,
                    at_us=AT,
                    kind="handled",
                    name="split",
                    message="m-1",
                    peer="reviewer",
                    hop=2,
                    data=Raw(b'{"attempt":1}'),
                )
            ],
        ),
    ),
    "capture-1.records-small": (
        codec.CAPTURE,
        CaptureRecords(agent="a", run="r", life="l", records=[CaptureRecord(seq=1, at_us=AT, kind="note")]),
    ),
    "capture-1.count": (
        codec.CAPTURE,
        CaptureCount(
            agent="a", life="l", number=3, at_us=AT, recorded=9, captured=4, dropped=3, waiting=2, tenant="t"
        ),
    ),
    "capture-1.count-final": (
        codec.CAPTURE,
        CaptureCount(agent="a", life="l", number=4, at_us=AT, recorded=9, captured=6, dropped=3, final=True),
    ),
}
