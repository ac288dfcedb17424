"""A small server that answers GetMetricData as CloudWatch does, for botocore's own client."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Values = Callable[[str, str, datetime, datetime], dict[datetime, float]]


@contextmanager
def cloudwatch_server(
    values: Values, *, denied: bool = False, page: int | None = None
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address, and what was asked.

    values  of (metric, statistic, start, end) by minute; page: results a reply
    """
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = json.loads(body)
            assert self.headers["X-Amz-Target"].endswith(".GetMetricData")
            assert "AWS4-HMAC-SHA256" in self.headers["Authorization"]
            asked.append(request)
            if denied:
                self.reply(403, {"__type": "AccessDenied", "message": "not authorised"})
                return
            queries = request["MetricDataQueries"]
            first = int(request.get("NextToken", "0"))
            last = len(queries) if page is None else first + page
            results = [self.result(query, request) for query in queries[first:last]]
            more = {"NextToken": str(last)} if last < len(queries) else {}
            self.reply(200, {"MetricDataResults": results, **more})

        def result(self, query, request):
            stat = query["MetricStat"]
            start, end = (datetime.fromtimestamp(request[k], UTC) for k in ("StartTime", "EndTime"))
            found = values(stat["Metric"]["MetricName"], stat["Stat"], start, end)
            return {
                "Id": query["Id"],
                "Label": query["Id"],
                "StatusCode": "Complete",
                "Timestamps": [when.timestamp() for when in found],
                "Values": list(found.values()),
            }

        def reply(self, status, content):
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-amz-json-1.0")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
