"""An endpoint over TLS: a bad certificate is one line, with nothing sent; a good one is used."""

from __future__ import annotations

import asyncio
import ssl
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lmi_bench.core.run_store import load_run
from tests.end_to_end.commands import lmi_bench
from tests.end_to_end.proxy import pump
from tests.loadgen.aws.runtime_server import runtime_server


def certificate(folder, *, host="localhost", days=1):
    """A PEM file of a key and a self-signed certificate that ends so many days from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=10))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "certificate.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


@contextmanager
def over_tls(url, pem):
    """An https address on this machine that passes all bytes on to a plain one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    to = urlsplit(url)
    started, where = threading.Event(), []

    async def passed_on(reader, writer):
        behind = await asyncio.open_connection(to.hostname, to.port)
        await asyncio.gather(pump(reader, behind[1]), pump(behind[0], writer))

    async def main():
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)  # refused handshakes are what is tested
        server = await asyncio.start_server(passed_on, "127.0.0.1", 0, ssl=context)
        where.extend((server.sockets[0].getsockname()[1], loop, stop))
        started.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert started.wait(120)
    port, loop, stop = where
    try:
        yield f"https://localhost:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)


def sweep(url, out, *options, **more):
    load = ("--isl", "8", "--osl", "4", "--concurrency", "1", "--requests-per-user", "3")
    return lmi_bench("sweep", url, *load, *options, "--out", out, **more)


@pytest.mark.parametrize(
    ("made", "is_trusted", "says"),
    [
        ({}, False, "self-signed certificate; SSL_CERT_FILE=FILE, or sweep --cacert FILE, trusts"),
        ({"days": -1}, True, "certificate has expired"),
        ({"host": "example.org"}, True, "certificate is not valid for 'localhost'"),
    ],
    ids=["self-signed", "expired", "of another host"],
)
def test_a_bad_certificate_is_one_line(tmp_path, monkeypatch, made, is_trusted, says):
    pem = certificate(tmp_path, **made)
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    with over_tls("http://127.0.0.1:9", pem) as url:
        done = sweep(url, tmp_path / "run", expect=2)
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert line.startswith(f"error: TLS with {url.removeprefix('https://')} failed")
    assert says in line
    assert not (tmp_path / "run").exists()


def test_a_private_authority_is_trusted_by_its_file(tmp_path, monkeypatch):
    pem = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    with runtime_server(signed=False) as plain, over_tls(plain, pem) as url:
        done = sweep(url, tmp_path / "run")
    assert "concurrency 1" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_private_authority_is_trusted_by_its_option(tmp_path, workers):
    pem = certificate(tmp_path)
    with runtime_server(signed=False) as plain, over_tls(plain, pem) as url:
        done = sweep(url, tmp_path / "run", "--cacert", pem, "--workers", workers)
        metrics = f"{url}/metrics"
    assert "concurrency 1" in done.stderr
    assert "not checked" not in done.stderr
    (level,) = load_run(tmp_path / "run").levels
    assert level.server.sources == [metrics]  # read with the same trust


def test_a_scenario_names_the_authority_beside_its_own_file(tmp_path, monkeypatch):
    folder = tmp_path / "scenarios"
    folder.mkdir()
    certificate(folder)
    with runtime_server(signed=False) as plain, over_tls(plain, folder / "certificate.pem") as url:
        (folder / "one.yaml").write_text(
            f"target: {url}\nclient: {{cacert: certificate.pem}}\n"
            "workload: {input_tokens: 8, output_tokens: 4}\n"
            "load: {concurrency: [1], requests_per_user: 3}\n"
        )
        monkeypatch.chdir(tmp_path)
        done = lmi_bench("sweep", folder / "one.yaml", "--out", tmp_path / "run")
    assert "concurrency 1" in done.stderr


def test_an_unchecked_certificate_is_said_in_the_terminal_and_the_report(tmp_path):
    """One that has expired, is of another host, and that nothing vouches for."""
    pem = certificate(tmp_path, days=-1, host="example.org")
    with runtime_server(signed=False) as plain, over_tls(plain, pem) as url:
        done = sweep(url, tmp_path / "run", "--insecure")
    assert "concurrency 1" in done.stderr
    assert "the server's certificate is not checked" in done.stderr
    lmi_bench("report", tmp_path / "run", "--out", tmp_path / "page.html")
    assert "not checked (--insecure)" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(("name", "why"), [("none.pem", "No such file"), ("x.pem", "is no PEM")])
def test_a_file_that_holds_no_certificate_is_one_line(tmp_path, name, why):
    (tmp_path / "x.pem").write_text("nothing")
    options = ("--cacert", tmp_path / name)
    done = sweep("https://127.0.0.1:9", tmp_path / "run", *options, expect=2)
    assert f"--cacert {tmp_path / name}: {why}" in done.stderr.replace("\n", " ")
