"""A small server that describes one SageMaker endpoint as AWS does, for botocore's own clients."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ARN = "arn:aws:sagemaker:us-east-1:000000000000:"
IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.33.0-lmi15.0.0-cu128"


@contextmanager
def control_plane(instances: Callable[[int], int], *, model: str = "toy") -> Iterator[str]:
    """The address; `instances` says how many ml.g5.2xlarge run at the n-th question, from 1."""
    asked = 0

    def describe(operation):
        nonlocal asked
        when = time.time()
        if operation == "DescribeEndpoint":
            asked += 1
            count = instances(asked)
            variant = {"VariantName": "AllTraffic", "CurrentWeight": 1.0}
            variant |= {"CurrentInstanceCount": count, "DesiredInstanceCount": count}
            return {
                "EndpointName": "mine",
                "EndpointArn": ARN + "endpoint/mine",
                "EndpointConfigName": "config-1",
                "EndpointStatus": "InService",
                "ProductionVariants": [variant],
                "CreationTime": when,
                "LastModifiedTime": when,
            }
        if operation == "DescribeEndpointConfig":
            variant = {"VariantName": "AllTraffic", "ModelName": "model-1"}
            variant |= {"InstanceType": "ml.g5.2xlarge", "InitialInstanceCount": 1}
            return {
                "EndpointConfigName": "config-1",
                "EndpointConfigArn": ARN + "endpoint-config/config-1",
                "ProductionVariants": [variant],
                "CreationTime": when,
            }
        if operation == "DescribeModel":
            return {
                "ModelName": "model-1",
                "ModelArn": ARN + "model/model-1",
                "PrimaryContainer": {"Image": IMAGE, "Environment": {"HF_MODEL_ID": model}},
                "CreationTime": when,
            }
        return {"ScalableTargets": [], "ScalingPolicies": []}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            assert "AWS4-HMAC-SHA256" in self.headers["Authorization"]
            data = json.dumps(describe(self.headers["X-Amz-Target"].partition(".")[2])).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
