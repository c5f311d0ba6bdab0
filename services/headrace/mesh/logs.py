"""JSON logs on standard error: one object a line, with the trace id where one is current.

Fields given by `extra={...}` stand beside the message. Payloads and credentials are never logged.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import msgspec
from opentelemetry import trace

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_encode = msgspec.json.Encoder(enc_hook=str).encode


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time (RFC 3339, UTC), level, service, logger, message, extras, error."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return `record` as one line of JSON."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update((k, v) for k, v in vars(record).items() if k not in _STANDARD)
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            line["trace_id"] = f"{span.trace_id:032x}"
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return _encode(line).decode("utf-8", "replace")


def setup_logging(service: str, level: str = "info") -> None:
    """Send all logs of this process as JSON lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # nats-py reports each failed reconnect by itself; ours are one line for each back-off.
    logging.getLogger("nats").setLevel(logging.CRITICAL)
