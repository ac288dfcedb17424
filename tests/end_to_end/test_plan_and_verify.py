"""A plan from its question to its verification, as a person runs it."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest

from lmi_bench.analysis.results import latency
from lmi_bench.cli.main import main
from lmi_bench.core.errors import InputError
from lmi_bench.core.steadiness import SpeedStep
from lmi_bench.jobs import verify
from lmi_bench.jobs.settings.plan import VerifySettings
from lmi_bench.jobs.sweep import levels
from tests.end_to_end.commands import lmi_bench

ASK = ("--model", "llama-2-7b", "--input-tokens", "256", "--output-tokens", "64")
LIMITS = ("--slo", "itl_p90<=150ms", "--slo", "ttft_p90<=2s")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "rec.json"
    done = lmi_bench(
        "recommend",
        *ASK,
        *LIMITS,
        "--instance",
        "ml.g5.2xlarge",
        "--rate",
        "6",
        "--availability",
        "n+1",
        "--purchase",
        "savings-plan",
        "--commit-discount",
        "0.25",
        "--vary",
        "rate=2..12",
        "--explain",
        "--json",
        path,
    )
    return path, done.stdout


def test_a_plan_names_price_purchase_spares_failure_unit_and_what_would_change_it(plan):
    path, text = plan
    assert "USD 1.515 a machine and hour (Hosting, us-east-1, 2026-08-17)" in text
    assert "savings-plan, 25% off" in text
    assert "more than 75% of the hours" in text
    assert "1 more add USD 1.14 per hour" in text  # 1.515 * 0.75
    assert "failure unit: one ml.g5.2xlarge" in text
    assert " simulated, random routing" in text
    assert "What would change the answer:\n  " in text
    content = json.loads(path.read_text())
    assert content["vary"]["intervals"][0]["from_per_s"] == 2.0
    assert {item["what"] for item in content["sensitivity"]} >= {"load", "itl_p90<=150ms"}


def test_a_verified_plan_keeps_its_slos_and_exits_0(plan, tmp_path):
    path, _ = plan
    result = tmp_path / "verified.json"
    done = lmi_bench("verify", path, "--target", "sim:ml.g5.2xlarge", "--out", tmp_path / "run", "--json", result)
    first, second, third, *_ = done.stdout.splitlines()  # the answer, then what was measured
    assert first.endswith("figures inside their intervals")
    assert (second.partition(":")[0], third.partition(":")[0]) == ("SLO itl_p90<=150ms", "SLO ttft_p90<=2000ms")
    assert "\nLevels\n" in done.stdout
    content = json.loads(result.read_text())
    assert {slo["verdict"] for slo in content["slos"]} == {"pass"}
    verdicts = [figure["verdict"] for figure in content["figures"]]
    assert verdicts.count("inside") >= 0.8 * len(verdicts)


def test_a_slower_target_than_planned_exits_99(plan, tmp_path):
    """An L4 reads half as fast as an A10G: 13.5 GB of weights over 300 GB/s are 45 ms alone."""
    strict = json.loads(plan[0].read_text())
    strict["slos"] = ["itl_p90<=44ms"]
    path = tmp_path / "strict.json"
    path.write_text(json.dumps(strict))
    done = lmi_bench(
        "verify", path, "--target", "sim:ml.g6.2xlarge", "--requests", "60", "--out", tmp_path / "run", expect=99
    )
    assert "outside" in done.stdout
    assert "SLO itl_p90<=44ms: fail" in done.stdout


@pytest.mark.parametrize(
    ("slo", "more", "code", "said"),
    [
        ("ttft_p90<=30ms", ["--requests", "400"], 99, "stopped after "),
        ("e2e_p99<=9s", ["--requests", "60"], 2, "SLO e2e_p99<=9000ms: not measured, "),
        (
            "itl_p90<=1s",
            ["--requests", "60", "--model", "mistral-7b"],
            0,
            "the plan is for llama-2-7b, but the target says that it serves mistral-7b",
        ),
    ],
    ids=["certain miss", "too few", "another model"],
)
def test_a_verification_says_what_it_is_not(plan, tmp_path, monkeypatch, capsys, slo, more, code, said):
    strict = json.loads(plan[0].read_text()) | {"slos": [slo]}
    (tmp_path / "strict.json").write_text(json.dumps(strict))
    monkeypatch.chdir(tmp_path)
    arguments = ["verify", "strict.json", "--target", "sim:ml.g5.2xlarge", *more]
    monkeypatch.setattr(sys, "argv", ["lmi-bench", *arguments])
    with pytest.raises(SystemExit) as exited:
        main()
    shown = capsys.readouterr()
    assert exited.value.code == code
    assert said in " ".join((shown.out + shown.err).split())


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"expert_parallel": True, "dp_attention": True}, "EP, DP attention"),
        ({"pipeline": 2}, "PP 2"),
        ({"hosts": 2}, "2 hosts a copy"),
        ({"speculation": {"draft": "mtp", "draft_tokens": 3, "draft_acceptance": 0.65}}, "mtp"),
        ({"cuda_graphs": False}, "cuda_graphs"),
    ],
)
def test_an_engine_that_is_not_simulated_is_not_verified_by_another(plan, tmp_path, setting, named):
    content = json.loads(plan[0].read_text())
    content["recommended"]["setting"] |= setting
    (tmp_path / "rec.json").write_text(json.dumps(content))
    asked = VerifySettings(tmp_path / "rec.json", target="sim:ml.g5.2xlarge", out=tmp_path / "run")
    with pytest.raises(InputError, match=f"sim: cannot be set to the plan's .*{named}: verify on"):
        verify.verify(asked)
    with pytest.raises(InputError, match="--update-profile: the plan's engine differs"):
        verify.verify(replace(asked, update_profile=tmp_path / "p.json"))
    assert [each.name for each in tmp_path.iterdir()] == ["rec.json"]


def test_a_plan_is_held_to_the_steady_attempt_of_its_load(plan, tmp_path, monkeypatch):
    """The target warms up in the first attempt and is throttled in the third."""
    step, seen = SpeedStep(at_s=1.0, change=0.3), []
    steps, compare = iter([step, None, step]), verify.compare_figures
    monkeypatch.setattr(latency, "speed_step", lambda *_, **__: next(steps))
    monkeypatch.setattr(levels, "SIMULATED_PREFIX", "none:")  # else simulated ones never repeat
    monkeypatch.setattr(
        verify,
        "compare_figures",
        lambda candidate, question, line, **kept: seen.append(line) or compare(candidate, question, line, **kept),
    )
    target = {"target": "sim:ml.g5.2xlarge", "requests": 60, "out": tmp_path / "run"}
    verify.verify(VerifySettings(plan[0], **target))
    assert [(line.attempt, line.attempts_left_out) for line in seen] == [(2, ["1 (not steady)", "3 (not steady)"])]


def test_a_day_is_planned_from_a_recommendation(plan, tmp_path):
    result = tmp_path / "day.json"
    done = lmi_bench(
        "plan-day",
        plan[0],
        "--shape",
        "office",
        "--peak",
        "30",
        "--start-up",
        "460",
        "--commit-discount",
        "0.3",
        "--json",
        result,
    )
    assert "chosen: scaling" in done.stdout
    assert "commit to" in done.stdout
    content = json.loads(result.read_text())
    assert content["scaled"]["machine_hours"] < content["flat"]["machine_hours"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan-day", "--capacity", "2", "--peak", "9"), "--start-up is missing"),
        (("plan-day", "--start-up", "60", "--peak", "9"), "--capacity"),
        (("plan-day", "--capacity", "2", "--start-up", "60"), "--peak is missing"),
        (("verify", "nothing.json", "--target", "engine"), "cannot read nothing.json"),
        (("recommend", *ASK, "--purchase", "spot", "--commit-discount", "0.6"), "--platform ec2"),
        (("recommend", *ASK, "--purchase", "savings-plan"), "--commit-discount D"),
        (("recommend", *ASK, "--purchase", "reserved"), "by savings plan only; add --platform ec2"),
        (("recommend", *ASK, "--availability", "az:1"), "az:K"),
        (("recommend", *ASK, "--vary", "rate=3"), r"rate=A..B"),
    ],
)
def test_what_a_user_can_mend_ends_in_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lmi-bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_verification_teaches_the_profile(plan, tmp_path):
    """One copy's share of a load on a machine that the plan takes for another: the L4's times."""
    path, _ = plan
    learnt = tmp_path / "learnt.json"
    done = lmi_bench(
        "verify",
        path,
        "--target",
        "sim:ml.g6.2xlarge",
        "--requests",
        "60",
        "--out",
        tmp_path / "run",
        "--update-profile",
        learnt,
        expect=(0, 99),
    )
    fitted = json.loads(learnt.read_text())
    planned = json.loads(path.read_text())["profile_document"]
    shares = [each["parameters"]["bandwidth_share"] for each in (planned, fitted)]
    assert shares[1] < 0.9 * shares[0]  # an L4 reads half as fast as the A10G of the plan
    off = re.search(r"latency_ms_per_token: predicted (-[\d.]+)% .*, ([+-][\d.]+)% after", done.stdout)
    assert off is not None, done.stdout
    assert abs(float(off[2])) < 0.5 * abs(float(off[1]))
    again = lmi_bench(
        "recommend", *ASK, *LIMITS, "--instance", "ml.g5.2xlarge", "--rate", "6", "--profile", learnt, expect=(0, 99)
    )
    assert "then 1 levels of llama-2-7b" in again.stdout


def test_a_profile_learns_from_one_copy_only(plan, tmp_path):
    done = lmi_bench(
        "verify",
        plan[0],
        "--target",
        "sim:ml.g5.2xlarge",
        "--share",
        "1",
        "--update-profile",
        tmp_path / "p.json",
        expect=2,
    )
    assert "needs the load of one copy" in done.stderr
    assert "--share" in done.stderr


def test_a_plan_that_counts_on_a_prefix_cache_is_not_held_to_prompts_without_one(tmp_path):
    path = tmp_path / "rec.json"
    lmi_bench(
        "recommend", *ASK, *LIMITS, "--instance", "ml.g5.2xlarge", "--rate", "2", "--prefix-hit", "0.5", "--json", path
    )
    done = lmi_bench("verify", path, "--target", "sim:ml.g5.2xlarge", expect=2)
    assert "finds 50% of the prompt tokens in a prefix cache" in done.stderr
    assert not (tmp_path / "runs").exists()
