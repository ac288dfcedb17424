"""Signatures are checked against botocore's own and AWS's published example, and age counts."""

from datetime import UTC, datetime, timedelta

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from lmi_bench.engine.server.sagemaker_routes import SignatureCheck, SignatureError, SignedRequest

CHECK = SignatureCheck("AKIDEXAMPLE", "secret")
URL = "http://localhost:8080/endpoints/{}/invocations"


def signed(body=b"{}", *, name="mine", secret="secret", service="sagemaker", headers=None):
    url = URL.format(name)
    request = AWSRequest("POST", url, data=body, headers=headers or {"Content-Type": "a/b"})
    SigV4Auth(Credentials("AKIDEXAMPLE", secret), service, "eu-west-1").add_auth(request)
    sent = dict(request.headers.items()) | {"Host": "localhost:8080"}
    return SignedRequest("POST", f"/endpoints/{name}/invocations", "", sent, body)


def refusal(request, now=None):
    with pytest.raises(SignatureError) as caught:
        CHECK.verify(request, now)
    return caught.value.code


def test_awss_published_example_is_accepted():
    """`get-vanilla` of the SigV4 test suite: service `service`, us-east-1, 30 August 2015."""
    check = SignatureCheck("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", service="service")
    authorization = (
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, "
        "SignedHeaders=host;x-amz-date, "
        "Signature=5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"
    )
    headers = {"Host": "example.amazonaws.com", "X-Amz-Date": "20150830T123600Z", "Authorization": authorization}
    request = SignedRequest("GET", "/", "", headers, b"")
    check.verify(request, datetime(2015, 8, 30, 12, 40, tzinfo=UTC))


@given(body=st.binary(max_size=50), attribute=st.text("ab =;/  ", max_size=9))
def test_what_botocore_signs_is_accepted(body, attribute):
    headers = {"Content-Type": "a/b", "X-Amzn-SageMaker-Custom-Attributes": attribute}
    CHECK.verify(signed(body, headers=headers))


def test_a_changed_body_path_header_key_or_service_is_refused():
    good = signed()
    assert refusal(SignedRequest("POST", good.path, "", good.headers, b"{ }")) == ("InvalidSignatureException")
    assert refusal(SignedRequest("POST", "/endpoints/other/invocations", "", good.headers, b"{}"))
    changed = {**good.headers, "Content-Type": "x/y"}
    assert refusal(SignedRequest("POST", good.path, "", changed, b"{}"))
    assert refusal(signed(secret="other")) == "InvalidSignatureException"
    assert refusal(signed(service="s3")) == "InvalidSignatureException"


@pytest.mark.parametrize("minutes", [-6, 6])
def test_a_signature_is_good_for_five_minutes(minutes):
    now = datetime.now(UTC)
    CHECK.verify(signed(), now + timedelta(minutes=4))
    assert refusal(signed(), now + timedelta(minutes=minutes)) == "InvalidSignatureException"


@pytest.mark.parametrize(
    ("authorization", "code"),
    [
        ("", "MissingAuthenticationTokenException"),
        ("Bearer abc", "IncompleteSignatureException"),
        ("AWS4-HMAC-SHA256 Credential=a/b, Signature=c", "IncompleteSignatureException"),
        ("AWS4-HMAC-SHA256 Credential=X/20260101/r/sagemaker/aws4_request, Signature=c", "UnrecognizedClientException"),
    ],
)
def test_a_header_that_is_no_signature_says_so(authorization, code):
    headers = {**signed().headers, "Authorization": authorization}
    assert refusal(SignedRequest("POST", "/", "", headers, b"")) == code


def test_a_date_must_be_signed():
    headers = dict(signed().headers)
    headers["Authorization"] = headers["Authorization"].replace(";x-amz-date", "")
    assert refusal(SignedRequest("POST", "/", "", headers, b"{}")) == "InvalidSignatureException"


@pytest.mark.parametrize("odd", ["é", "\udcff"])
@pytest.mark.parametrize("part", ["Signature", "Authorization", "X-Custom", "path"])
def test_bytes_that_are_no_ascii_are_refused_as_a_wrong_signature(part, odd):
    """aiohttp gives the bytes of a header that are no UTF-8 as lone surrogates."""
    good = signed(headers={"Content-Type": "a/b", "X-Custom": "c"})
    headers, path = dict(good.headers), good.path
    if part == "path":
        path += odd
    elif part == "Signature":
        headers["Authorization"] = headers["Authorization"][:-1] + odd
    else:
        headers[part] = headers[part].replace("eu-west-1" if "A" in part else "c", odd)
    request = SignedRequest("POST", path, "", headers, good.body)
    assert refusal(request) == "InvalidSignatureException"
