"""An OTLP/HTTP receiver in its own process: each span it gets becomes one line of JSON in a file.

Points of metrics go to the file beside it that ends in `.metrics`. `python receiver.py FILE` prints the port that it
listens on, then serves until it is killed.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


def _value(value):
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None


def _attributes(pairs) -> dict:
    return {pair.key: _value(pair.value) for pair in pairs}


def spans_of(body: bytes) -> list[dict]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        {
            "resource": _attributes(resource.resource.attributes),
            "name": span.name,
            "kind": span.kind,
            "trace_id": span.trace_id.hex(),
            "span_id": span.span_id.hex(),
            "parent_id": span.parent_span_id.hex(),
            "start_ns": span.start_time_unix_nano,
            "end_ns": span.end_time_unix_nano,
            "status": span.status.code,
            "attributes": _attributes(span.attributes),
            "links": [
                {"trace_id": link.trace_id.hex(), "span_id": link.span_id.hex()} for link in span.links
            ],
        }
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def points_of(body: bytes) -> list[dict]:
    request = ExportMetricsServiceRequest.FromString(body)
    found = []
    for metric in (m for r in request.resource_metrics for s in r.scope_metrics for m in s.metrics):
        data = getattr(metric, metric.WhichOneof("data"))
        for point in data.data_points:
            histogram = hasattr(point, "bucket_counts")
            value = point.sum if histogram else point.as_double or point.as_int
            found.append(
                {
                    "name": metric.name,
                    "unit": metric.unit,
                    "value": value,
                    "count": point.count if histogram else 1,
                    "attributes": _attributes(point.attributes),
                }
            )
    return found


class Handler(BaseHTTPRequestHandler):
    out: Path

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        take = {"/v1/traces": spans_of, "/v1/metrics": points_of}.get(self.path)
        ok = take is not None and self.headers["Content-Type"] == "application/x-protobuf"
        if ok:
            out = self.out if take is spans_of else self.out.with_suffix(".metrics")
            with out.open("a") as file:
                file.writelines(json.dumps(one) + "\n" for one in take(body))
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200 if ok else 404)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    Handler.out = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
