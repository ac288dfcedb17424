"""`catalog refresh` against a stand-in that botocore's own validators check, and the tables."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import botocore.session
import pytest
from botocore.validate import ParamValidator

from lmi_bench.analysis.model.builtin_profiles import TGI_2023
from lmi_bench.catalog import fresh_prices
from lmi_bench.catalog.instances import all_instances
from lmi_bench.catalog.prices import on_platform
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT
from lmi_bench.jobs.catalog import catalog_table, refresh
from lmi_bench.jobs.settings.setup import CatalogSettings, RefreshSettings

SHAPES = botocore.session.Session().get_service_model("pricing").operation_model("GetProducts")
EC2 = {"operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA"}
EC2["capacitystatus"] = "Used"


def product(family, usd, unit="Hrs", **attributes):
    """One item of a price list, with the fields that AWS's have."""
    price = {"unit": unit, "pricePerUnit": {"USD": str(usd)}}
    return {
        "product": {"productFamily": family, "attributes": {"regionCode": "eu-west-1"} | attributes},
        "terms": {"OnDemand": {"S.T": {"priceDimensions": {"S.T.R": price}}}},
    }


def hosting(name, usd, component="Hosting", **more):
    return product("ML Instance", usd, instanceName=name, component=component, **more)


LISTS = {
    "AmazonSageMaker": [
        hosting("ml.g5.xlarge", 1.5),
        hosting("ml.g5.xlarge", 9, component="Training"),
        hosting("ml.m5.large", 0.2),  # not in the catalog
        hosting("ml.g5.2xlarge", 0.0),
        hosting("ml.g6.xlarge", 2, regionCode="us-east-1"),
        hosting("ml.g5.4xlarge", 2),
        hosting("ml.g5.4xlarge", 3),  # which one is not known
    ],
    "AmazonEC2": [
        product("Compute Instance", 1.1, instanceType="g5.xlarge", **EC2),
        product("Compute Instance", 9, instanceType="g5.2xlarge", **EC2 | {"tenancy": "Dedicated"}),
    ],
}


@contextmanager
def price_list_api(*, fails_at=None):
    """The address of an API with two products a page, and its requests."""
    asked = []

    def checked(content, shape):
        report = ParamValidator().validate(content, shape)
        assert not report.has_errors(), report.generate_report()
        return content

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.headers["X-Amz-Target"] == "AWSPriceListService.GetProducts"
            asked.append(checked(request, SHAPES.input_shape))
            first = int(request.get("NextToken", "0"))
            items = LISTS[request["ServiceCode"]]
            reply = {"FormatVersion": "aws_v1", "PriceList": []}
            reply["PriceList"] = [json.dumps(each) for each in items[first : first + 2]]
            if first + 2 < len(items):
                reply["NextToken"] = str(first + 2)
            checked(reply, SHAPES.output_shape)
            status = 200
            if len(asked) == fails_at:
                status, reply = 400, {"__type": "AccessDeniedException", "message": "not you"}
            body = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """The user's price file, which is not there yet; AWS is only what the test says."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("LMI_BENCH_DATA", str(tmp_path / "data"))
    forget()
    yield tmp_path / "data" / "prices.json"
    forget()


def forget():
    fresh_prices.fresh_prices.cache_clear()
    all_instances.cache_clear()


def prices(instance):
    """Price, region and date on both platforms, as a later command sees them."""
    forget()
    each = next(each for each in all_instances() if each.instance_type == instance)
    return [(one.price_usd_per_hour, one.price_region, one.price_date) for one in (each, on_platform(each, "ec2"))]


def ask(**stated):
    return refresh(RefreshSettings(region="eu-west-1", **stated), SILENT)


def test_prices_come_in_pages_and_every_later_command_uses_them(monkeypatch, data):
    before = prices("ml.g5.4xlarge")
    with price_list_api() as (url, asked):
        monkeypatch.setenv("AWS_ENDPOINT_URL_PRICING", url)
        done = ask()
    assert done[2] == {"sagemaker": 1, "ec2": 1}
    assert len(asked) == 5
    assert all({"regionCode": "eu-west-1"}.items() <= fields(each).items() for each in asked)
    assert prices("ml.g5.xlarge") == [(1.5, "eu-west-1", done[1]), (1.1, "eu-west-1", done[1])]
    assert prices("ml.g5.4xlarge") == before
    row = catalog_table("prices", CatalogSettings("ml.g5.xlarge", platform="sagemaker"))[0][0]
    assert (row["date"], row["source"]) == (done[1], "AWS price list API")


def fields(request):
    kinds = SHAPES.input_shape.members["Filters"].member.members["Type"].enum
    assert {each["Type"] for each in request["Filters"]} <= set(kinds)
    return {each["Field"]: each["Value"] for each in request["Filters"]}


@pytest.mark.parametrize("page", [1, 3, 5])
def test_a_download_that_breaks_off_changes_nothing(monkeypatch, data, page):
    data.parent.mkdir()
    data.write_text('{"schema": 1, "prices": []}')
    with price_list_api(fails_at=page) as (url, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL_PRICING", url)
        with pytest.raises(InputError, match=r"nothing is changed: AccessDeniedException: not you"):
            ask()
    assert data.read_text() == '{"schema": 1, "prices": []}'


def test_without_credentials_or_network_it_is_one_line(monkeypatch, data):
    monkeypatch.setenv("AWS_ENDPOINT_URL_PRICING", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"nothing is changed: Could not connect"):
        ask()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(InputError, match="no AWS credentials"):
        ask()
    assert not data.exists()


def offer(path, service="AmazonSageMaker", day="2026-11-20T00:00:00Z"):
    """The same products as an offer file has them."""
    items = {str(number): each for number, each in enumerate(LISTS[service])}
    terms = {sku: each["terms"]["OnDemand"] for sku, each in items.items()}
    content = {
        "offerCode": service,
        "publicationDate": day,
        "products": {sku: each["product"] for sku, each in items.items()},
        "terms": {"OnDemand": terms},
    }
    path.write_text(json.dumps(content))
    return path


def test_an_offer_file_does_without_aws_and_keeps_the_other_platform(tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    ask(file=offer(tmp_path / "ec2.json", "AmazonEC2"))
    done = ask(file=offer(tmp_path / "sagemaker.json"))
    assert done[2] == {"sagemaker": 1}
    day = "2026-11-20"
    assert prices("ml.g5.xlarge") == [(1.5, "eu-west-1", day), (1.1, "eu-west-1", day)]


def test_the_newer_of_two_prices_counts(tmp_path):
    before = prices("ml.g5.xlarge")
    ask(file=offer(tmp_path / "old.json", "AmazonEC2", "2020-01-01T00:00:00Z"))
    assert prices("ml.g5.xlarge") == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no offer file"),
        ("[]", "no offer file"),
        ('{"offerCode": "AmazonS3"}', "no offer file"),
        (None, "cannot read"),
    ],
)
def test_another_file_is_refused(tmp_path, data, text, said):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=said):
        ask(file=path)
    assert not data.exists()


def test_a_region_without_prices_is_named(tmp_path):
    with pytest.raises(InputError, match="in mars-1: is it a region"):
        refresh(RefreshSettings(region="mars-1", file=offer(tmp_path / "o.json")), SILENT)


@pytest.mark.parametrize("text", ["{", "[]", '{"prices": [{"instance": 1}]}', "null", '{"prices": 3}'])
def test_a_broken_file_is_one_line_until_it_is_written_again(tmp_path, data, text):
    data.parent.mkdir()
    data.write_text(text)
    with pytest.raises(InputError, match="remove it, or write it again"):
        prices("ml.g5.xlarge")
    ask(file=offer(tmp_path / "o.json"))
    assert prices("ml.g5.xlarge")[0][0] == 1.5


@pytest.mark.parametrize(
    ("name", "settings", "first", "sorted_by"),
    [
        ("models", {"family": "llama"}, "llama-3.2-1b", "B params"),
        ("instances", {"gpu": "h100", "min_memory_gib": 100.0}, "ml.p5.48xlarge", "count"),
        ("instances", {"family": "g5."}, "ml.g5.xlarge", "count"),
        ("accelerators", {"min_memory_gib": 75.0}, "H100-PCIe", "memory GiB"),
        ("prices", {"platform": "ec2", "region": "us-east-1"}, "g6f.large", "USD/h"),
        ("images", {"family": "vllm", "platform": "sagemaker"}, "vllm", "family"),
    ],
)
def test_a_table_has_the_rows_asked_for_in_order_with_a_source(name, settings, first, sorted_by):
    rows, _ = catalog_table(name, CatalogSettings(**settings))
    assert first == next(iter(rows[0].values()))
    values = [row[sorted_by] for row in rows]
    assert values == sorted(values)
    assert all(row["source"] for row in rows)


def test_a_profile_s_name_shows_its_constants_with_their_intervals():
    """tgi-2023: reads at 0.78 of the bandwidth; of the time of a prompt's token a limit is known."""
    rows, _ = catalog_table("profiles", CatalogSettings("TGI-2023"))
    shown = {row["constant"]: row for row in rows}
    bandwidth, prompt = shown["bandwidth_share"], shown["host_per_prompt_token_s"]
    assert bandwidth["value"] == pytest.approx(TGI_2023.parameters.bandwidth_share, rel=1e-3)
    assert bandwidth["high"] / bandwidth["value"] == pytest.approx(bandwidth["value"] / bandwidth["low"], rel=1e-3)
    assert prompt["low"] == 0 < prompt["high"] < TGI_2023.up_to["host_per_prompt_token_s"]
    assert {row["source"] for row in rows} == {TGI_2023.fitted_on}


def test_a_filter_that_a_table_does_not_have_is_refused():
    named = {
        gpu: {row["accelerator"] for row in catalog_table("instances", CatalogSettings(gpu=gpu))[0]}
        for gpu in ("L4", "a100", "B200")
    }
    assert named == {"L4": {"L4", "L4-3Q", "L4-6Q", "L4-12Q"}, "a100": {"A100-40", "A100-80"}, "B200": {"B200"}}
    with pytest.raises(InputError, match="--gpu H100: these rows have no accelerator"):
        catalog_table("models", CatalogSettings(gpu="H100"))


def test_old_prices_are_said_once():
    """Those of g4dn in the catalog are of January 2025."""
    rows, warning = catalog_table("prices", CatalogSettings("g4dn.xlarge", platform="sagemaker"))
    assert "1 of 1 prices are older than 90 days, the oldest of 2025-01-26" in warning
    assert not catalog_table("models", CatalogSettings())[1]
    assert rows[0]["source"]
