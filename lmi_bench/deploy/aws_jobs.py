"""Requests for SageMaker's own benchmark and recommendation jobs, to hold a plan against.

A benchmark job runs AIPerf against the endpoint; its archive is read by `lmi-bench import`. Each
file is the input of one command: aws sagemaker create-ai-... --cli-input-json file://FILE.
Source: botocore's service description, and "Set up a workload configuration for generative AI
inference recommendations" of the SageMaker developer guide.
"""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from lmi_bench.analysis.fleet.answer import Question, Recommendation
from lmi_bench.catalog.models import find_model_entry
from lmi_bench.catalog.templates import filled
from lmi_bench.core.errors import InputError
from lmi_bench.core.slo import parse_slo
from lmi_bench.deploy.plan import DeploymentPlan
from lmi_bench.deploy.sagemaker import allowed_values, check_request
from lmi_bench.deploy.settings import EndpointSettings, Server

_MOST_TYPES: Final = 3
_STEM: Final = 48  # a job's name has at most 63 characters
_LEAST_REQUESTS: Final = 300
_REQUESTS_PER_USER: Final = 10
FRAMEWORKS: Final = {"lmi": "LMI", "vllm": "VLLM"}
"""The jobs' names of the servers that they know."""
_TEMPLATE: Final = "deploy/sagemaker.yaml"
_RECOMMEND: Final = "create_ai_recommendation_job"


def job_files(
    plan: DeploymentPlan, answer: Recommendation, endpoint: EndpointSettings, server: Server
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The files by name, and what they leave out.

    endpoint  jobs and workload are named after it
    server    of a kind in `FRAMEWORKS`; without weights on S3 there is no recommendation job

    Raises InputError for what the service would refuse.
    """
    assert endpoint.name is not None
    name, weights_uri = endpoint.name, server.model_data_uri
    known = allowed_values(_RECOMMEND, "ComputeSpec", "InstanceTypes")
    ranked = dict.fromkeys(each.instance for each in answer.candidates)
    stem, types = name[:_STEM].rstrip("-"), [each for each in ranked if each in known][:_MOST_TYPES]
    wanted = ["create_ai_workload_config", "create_ai_benchmark_job"]
    left_out: tuple[str, ...] = ()
    is_prefix = weights_uri is not None and not weights_uri.endswith(".tar.gz")
    if is_prefix and types:
        wanted.append(_RECOMMEND)
    else:
        why = "no recommended machine is among the job's" if is_prefix else "--model-data s3://.../"
        left_out = (f"no request for a recommendation job: it needs the weights on S3 ({why})",)
    question = answer.question
    metric = "throughput" if question.objective == "throughput" else "cost"
    if any(parse_slo(text).metric == "ttft" for text in question.slos):
        metric = "ttft-ms"  # what the job shall improve first
    values = {
        **{part: f"{stem}-{part}" for part in ("workload", "benchmark", "recommendation")},
        "aiperf": _workload(plan, answer.question),
        "endpoint": name,
        "role_arn": endpoint.role_arn,
        "output_uri": endpoint.jobs_output_uri,
        "weights_uri": f"{(weights_uri or '').rstrip('/')}/",
        "metric": metric,
        "framework": FRAMEWORKS[server.kind],
        "machines": types,
    }
    requests = filled(_TEMPLATE, wanted, values)
    for operation, parameters in requests.items():
        check_request(operation, parameters)
    return {
        f"{operation.replace('_', '-')}.json": json.dumps(parameters, indent=2) + "\n"
        for operation, parameters in requests.items()
    }, left_out


def _workload(plan: DeploymentPlan, question: Question) -> str:
    """AIPerf's settings: the plan's lengths, and its requests in flight over all machines."""
    copies = plan.instances * plan.copies
    users = question.users or max(1, math.ceil((plan.concurrency or 1) * copies))
    kinds = [(kind.input_tokens, kind.output_tokens, kind.share) for kind in question.kinds]
    ins, outs, shares = zip(*kinds, strict=True) if kinds else ((), (), ())
    values = {
        "tokenizer": _tokenizer(plan),
        "users": users,
        "requests": max(_LEAST_REQUESTS, _REQUESTS_PER_USER * users),
        "input_tokens": question.input_tokens,
        "input_deviation": _deviation(ins, shares),
        "output_tokens": question.output_tokens,
        "output_deviation": _deviation(outs, shares),
    }
    return json.dumps(filled(_TEMPLATE, ["aiperf"], values)["aiperf"])


def _tokenizer(plan: DeploymentPlan) -> str:
    """The Hub id that has the model's tokenizer: of the weights, else of the model."""
    place, shape = plan.weights.location, plan.setup.shape
    with suppress(InputError):  # a folder is no model of the catalog
        return find_model_entry(shape.name).hf_id if place.startswith(("s3://", "/")) else place
    return place


def _deviation(values: Sequence[float], shares: Sequence[float]) -> int:
    """Standard deviation in tokens; 0 for equal requests."""
    pairs, total = list(zip(values, shares, strict=True)), sum(shares) or 1.0
    mean = sum(value * share for value, share in pairs) / total
    return round(math.sqrt(sum((value - mean) ** 2 * share for value, share in pairs) / total))
