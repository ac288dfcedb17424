"""boto3, unmodified, and our client against the bundled server, every signature checked by it."""

import asyncio
import json

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from lmi_bench.core.errors import InputError, TargetError
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.core.typed_json import decode, encode
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.loadgen.aws.access import Signer, open_aws_access
from lmi_bench.loadgen.aws.target import Invocation, SageMakerTarget
from lmi_bench.loadgen.http.receive import run_on_sockets
from lmi_bench.loadgen.run.channel import Job
from lmi_bench.loadgen.run.target import Resolved
from lmi_bench.targets.bench import Access
from lmi_bench.targets.open import open_bench
from lmi_bench.wire.format import find_format
from tests.faults.misbehaving import document, serving
from tests.loadgen.aws.runtime_server import ACCESS_KEY, REGION, SECRET_KEY, Dying, runtime_server
from tests.loadgen.sending import measure

REQUEST = PlannedRequest(0, 0.0, input_tokens=4, output_tokens=6, prompt_text="time year way day")
LONG = PlannedRequest(0, 0.0, input_tokens=600, output_tokens=6, prompt_text="time " * 600)


@pytest.fixture(autouse=True)
def aws_environment(monkeypatch, tmp_path):
    """Dummy credentials and nothing of this machine's own settings."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)


def boto3_client(url):
    return boto3.Session().client(  # the default session would keep the first credentials
        "sagemaker-runtime", endpoint_url=url, config=Config(retries={"total_max_attempts": 1}, read_timeout=10)
    )


def with_boto3(url, body, *, stream, **arguments):
    """(the container's bytes, None) or (None, what boto3 says of the failure)."""
    arguments = {"EndpointName": "mine", "ContentType": "application/json"} | arguments
    client = boto3_client(url)
    try:
        if not stream:
            return client.invoke_endpoint(Body=body, **arguments)["Body"].read(), None
        reply = client.invoke_endpoint_with_response_stream(Body=body, **arguments)
        return b"".join(event["PayloadPart"]["Bytes"] for event in reply["Body"]), None
    except ClientError as exc:
        error = exc.response["Error"]["Code"], exc.response.get("OriginalStatusCode")
        return None, error
    finally:
        client.close()


def with_ours(url, request=REQUEST, *, stream=True, protocol="lmi", **invocation):
    """One measured request as its record, and the exchange's text."""

    async def main():
        access = open_aws_access(url)
        target = SageMakerTarget(
            access, Invocation("mine", **invocation), find_format(protocol), model="toy", stream=stream
        )
        async with target:
            await target.open_level(1)
            try:
                exchange = await target.send(request)
            except TargetError as exc:
                return exc, ""
            measured = await measure(Resolved(target).send, request, asyncio.get_running_loop().time())
            return measured.record(), exchange.text

    return run_on_sockets(main())


def text_of(protocol, stream, data):
    """The text in a container's answer, read with nothing but json."""
    if protocol == "lmi":
        if not stream:
            return json.loads(data)["generated_text"]
        return "".join(json.loads(line)["token"]["text"] for line in data.splitlines())
    key = "delta" if stream else "message"
    if not stream:
        choices = json.loads(data)["choices"]
    else:
        events = [event.removeprefix(b"data: ") for event in data.split(b"\n\n") if event]
        choices = [c for e in events if e != b"[DONE]" for c in json.loads(e)["choices"]]
    if protocol == "openai":
        return "".join(choice["text"] for choice in choices)
    return "".join(choice[key].get("content") or "" for choice in choices)


@pytest.mark.parametrize("protocol", ["lmi", "openai", "openai-chat"])
@pytest.mark.parametrize("stream", [True, False])
def test_both_clients_get_the_same_text_over_signed_requests(protocol, stream):
    with runtime_server() as url:
        body = find_format(protocol).request_body(REQUEST, model="toy", stream=stream)
        data, failure = with_boto3(url, body, stream=stream)
        record, text = with_ours(url, stream=stream, protocol=protocol)
    assert failure is None
    assert text == text_of(protocol, stream, data)
    assert len(text.split()) == 6
    assert record.ok
    assert record.output_tokens == 6
    assert record.exchange.streamed is stream
    assert len(record.token_times_s) == (6 if stream else 1)


def test_tokens_are_timed_one_by_one():
    """Five steps of 20 ms or, on a busy machine, more lie between the first and the last token."""
    with runtime_server(step_s=0.02) as url:
        record, _ = with_ours(url)
    spread_s = record.token_times_s[-1] - record.token_times_s[0]
    assert 0.09 < spread_s < 1.0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("protocol", ["lmi", "openai-chat"])
def test_what_the_container_refuses_is_the_same_model_error_for_both(protocol, stream):
    with runtime_server() as url:
        body = find_format(protocol).request_body(LONG, model="toy", stream=stream)
        _, failure = with_boto3(url, body, stream=stream)
        error, _ = with_ours(url, LONG, stream=stream, protocol=protocol)
    assert failure == ("ModelError", 400)
    assert error.kind == "client_error"
    assert "ModelError" in str(error)
    assert "512" in str(error)


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_container_is_overloaded_behind_424(stream):
    """One request runs; the scheduler takes no second one beside it."""
    with runtime_server(step_s=0.4, max_concurrent_requests=1) as url:
        body = find_format("lmi").request_body(REQUEST, model="toy", stream=stream)

        async def main():
            access = open_aws_access(url)
            target = SageMakerTarget(access, Invocation("mine"), find_format("lmi"), model="toy", stream=stream)
            async with target:
                await target.open_level(2)
                running = asyncio.create_task(target.send(REQUEST))
                await asyncio.sleep(0.1)
                refused = await asyncio.to_thread(with_boto3, url, body, stream=stream)
                with pytest.raises(TargetError) as caught:
                    await target.send(REQUEST)
                await running
                return refused, caught.value

        (_, failure), error = run_on_sockets(main())
    assert failure == ("ModelError", 503)
    assert error.kind == "overloaded"


def test_an_engine_that_dies_before_its_first_token_is_a_server_error():
    with runtime_server(executor=Dying(at_step=0)) as url:
        error, _ = with_ours(url)
        body = find_format("lmi").request_body(REQUEST, model="toy")
        _, failure = with_boto3(url, body, stream=True)
    assert failure == ("ModelError", 424)
    assert error.kind == "server_error"


def test_an_engine_that_dies_in_mid_stream_keeps_what_came():
    with runtime_server(executor=Dying(at_step=3)) as url:
        error, _ = with_ours(url)
    assert error.kind == "server_error"
    assert len(error.exchange.token_times_s) == 3


@pytest.mark.parametrize(
    ("variable", "value", "code"),
    [
        ("AWS_SECRET_ACCESS_KEY", "another", "InvalidSignatureException"),
        ("AWS_ACCESS_KEY_ID", "AKIANOTHER", "UnrecognizedClientException"),
    ],
)
def test_a_wrong_key_is_refused_alike(monkeypatch, variable, value, code):
    monkeypatch.setenv(variable, value)
    with runtime_server() as url:
        body = find_format("lmi").request_body(REQUEST, model="toy")
        _, failure = with_boto3(url, body, stream=True)
        error, _ = with_ours(url)
    assert failure == (code, None)
    assert error.kind == "client_error"
    assert code in str(error)
    assert value not in str(error)


def test_component_variant_and_attributes_travel_as_boto3_sends_them():
    """The same header names and values reach the server; ours are covered by the signature."""
    seen = []

    async def main():
        reply = b'{"generated_text": "a"}'
        async with serving(lambda number: [document("200 OK", reply)]) as server:
            url = f"http://127.0.0.1:{server.port}"
            await asyncio.to_thread(
                with_boto3,
                url,
                b"{}",
                stream=False,
                InferenceComponentName="ic-1",
                TargetVariant="blue",
                CustomAttributes="a=b",
            )
            invocation = Invocation("mine", "ic-1", "blue", "a=b")
            target = SageMakerTarget(open_aws_access(url), invocation, find_format("lmi"), model="m", stream=False)
            async with target:
                await target.send(REQUEST)
            seen.extend(server.requests)

    run_on_sockets(main())
    theirs, ours = (
        dict(line.split(b": ", 1) for line in request.split(b"\r\n\r\n")[0].split(b"\r\n")[1:]) for request in seen
    )

    def named(headers):
        return {k.lower(): v for k, v in headers.items() if b"sagemaker" in k.lower()}

    assert named(ours) == named(theirs)
    assert len(named(ours)) == 3
    assert b"x-amzn-sagemaker-inference-component" in ours[b"Authorization"]
    assert [request.split(b" ")[1] for request in seen] == [b"/endpoints/mine/invocations"] * 2


def test_throttling_by_sagemaker_itself_is_its_own_bucket():
    reply = document("400 Bad Request", b"{}", b"x-amzn-ErrorType: ThrottlingException")

    async def main():
        async with serving(lambda number: [reply]) as server:
            url = f"http://127.0.0.1:{server.port}"
            failure = await asyncio.to_thread(with_boto3, url, b"{}", stream=True)
            target = SageMakerTarget(open_aws_access(url), Invocation("mine"), find_format("lmi"), model="m")
            async with target:
                with pytest.raises(TargetError) as caught:
                    await target.send(REQUEST)
            return failure, caught.value

    (_, failure), error = run_on_sockets(main())
    assert failure == ("ThrottlingException", None)
    assert error.kind == "throttled"


def test_no_credentials_and_no_region_are_said_in_one_line(monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(InputError, match="AWS_PROFILE"):
        open_aws_access("http://127.0.0.1:1")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(InputError, match="AWS_REGION"):
        open_aws_access()


def test_awss_own_address_follows_the_region(monkeypatch):
    assert open_aws_access().runtime_url == f"https://runtime.sagemaker.{REGION}.amazonaws.com"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "cn-north-1")
    access = open_aws_access()
    assert access.runtime_url == "https://runtime.sagemaker.cn-north-1.amazonaws.com.cn"
    assert access.is_aws
    assert SECRET_KEY not in repr(access)
    assert not open_aws_access("http://127.0.0.1:8080").is_aws


@pytest.mark.parametrize("name", ["", "a b", "a/b", "-a", "x" * 64, "a?b", "ä"])
def test_what_cannot_name_an_endpoint_is_refused(name):
    with pytest.raises(InputError, match="endpoint"):
        Invocation(name)


class Expiring:
    """Credentials that change with every fetch, as those of a role do."""

    def __init__(self):
        self.fetches = 0

    def refresh_needed(self):
        return False

    def get_frozen_credentials(self):
        from botocore.credentials import ReadOnlyCredentials

        self.fetches += 1
        return ReadOnlyCredentials(f"AK{self.fetches}", "s", f"token-{self.fetches}")


def test_credentials_that_expire_are_fetched_before_a_level_and_in_passing():
    async def main():
        access = open_aws_access("http://127.0.0.1:1")
        object.__setattr__(access, "credentials", Expiring())
        signer = Signer(access, "http://127.0.0.1:1/endpoints/m/invocations", {})
        await signer.refresh()
        fresh = signer.sign(b"{}")
        signer._fetched_s -= 61
        still = signer.sign(b"{}")
        await signer._fetching
        after = signer.sign(b"{}")
        return [headers["X-Amz-Security-Token"] for headers in (fresh, still, after)]

    assert run_on_sockets(main()) == ["token-2", "token-2", "token-3"]


class Refused(Expiring):
    """Credentials of a role that the user may not assume."""

    def get_frozen_credentials(self):
        said = {"Error": {"Code": "AccessDenied", "Message": "not authorized: sts:AssumeRole"}}
        raise ClientError(said, "AssumeRole")


def test_a_role_that_may_not_be_assumed_is_one_line(monkeypatch):
    said = "AWS: AccessDenied: not authorized: sts:AssumeRole"

    async def main():
        access = open_aws_access("http://127.0.0.1:1")
        signer = Signer(access, "http://127.0.0.1:1/endpoints/m/invocations", {})
        object.__setattr__(access, "credentials", Refused())
        with pytest.raises(InputError, match=said):
            await signer.refresh()

    run_on_sockets(main())
    monkeypatch.setattr("botocore.session.Session.create_client", lambda *_, **__: None)
    monkeypatch.setattr("botocore.session.Session.get_credentials", lambda _: Refused())
    with pytest.raises(InputError, match=said):
        open_aws_access("http://127.0.0.1:1")


@pytest.mark.parametrize("retries", [None, "aws-standard"])
def test_a_worker_opens_the_endpoint_from_its_job_and_signs_itself(retries):
    """The job holds no AWS key: the other process resolves the boto3 chain itself."""
    with runtime_server() as url:
        endpoint = {"target": "sagemaker:mine", "protocol": "lmi", "model": "toy"}
        sagemaker, client = {"endpoint_url": url}, {"retries": retries}
        bench = open_bench(parse_scenario(endpoint | {"sagemaker": sagemaker, "client": client}))
        sent = encode(Job(bench.scenario.canonical(), bench.asked, ""))
        job = decode(Job, sent)
        again = open_bench(parse_scenario(dict(job.scenario)), Access(asked=job.asked))

        async def main(target):
            await target.open_level(1)
            return await target.send(REQUEST)

        exchange = again.run(main)
    assert SECRET_KEY.encode() not in sent
    assert len(exchange.token_times_s) == 6
