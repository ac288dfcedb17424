"""`deploy check` of vLLM's, SGLang's and TGI's variables: the written pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.analysis.model.builtin_profiles import VLLM_0_19
from lmi_bench.analysis.model.engine_setting import EngineSetting
from lmi_bench.core.errors import InputError
from lmi_bench.deploy.bundle import build_bundle, write_bundle
from lmi_bench.deploy.engine_arguments import engine_arguments
from lmi_bench.deploy.plan import plan_from_layout
from lmi_bench.deploy.settings import EndpointSettings, Server
from lmi_bench.jobs.deploy import check_file


def bundle_of(kind, instance="ml.g6e.xlarge", **server):
    made = plan_from_layout("gemma-2-9b", instance, VLLM_0_19)
    made = replace(made, engine=EngineSetting(kv_dtype="float8", cuda_graphs=False))
    return build_bundle(made, Server(kind, **server), EndpointSettings("test"))


@pytest.mark.parametrize(
    ("kind", "line", "says"),
    [
        ("vllm", "SM_VLLM_GPU_MEMORY_UTILIZATION=1.7", "expected more than 0 and at most 1"),
        ("vllm", "SM_VLLM_KV_CACHE_DTYPE=banana", "expected one of auto"),
        ("vllm", "SM_VLLM_QUANTIZATION=int4", "expected one of awq"),
        ("vllm", "SM_VLLM_SPECULATIVE_CONFIG={bad", "expected JSON"),
        ("vllm", "SM_VLLM_MAX_NUM_SEQ=8", "has no argument max_num_seq; did you mean max-num-seqs"),
        ("vllm", "SM_VLLM_NO_ENABLE_CHUNKED_PREFILL=maybe", "expected true or false"),
        ("sglang", "SM_SGLANG_TP_SIZE=two", "expected a whole number"),
        ("sglang", "SM_SGLANG_CONTEXT_LENGHT=8", "did you mean context-length"),
        ("tgi", "CUDA_MEMORY_FRACTION=1.7", "at most 1"),
        ("tgi", "KV_CACHE_DTYPE=banana", "expected one of fp8_e4m3fn, fp8_e5m2"),
        ("tgi", "MAX_TOTAL_TOKENS=10", "must be above the prompt's limit"),
    ],
)
def test_what_is_written_passes_and_a_changed_line_is_refused(kind, line, says, tmp_path):
    folder = tmp_path / "files"
    write_bundle(bundle_of(kind), folder)
    checked = check_file(folder, "lmi28", ())
    assert checked.server.startswith(kind)
    assert "HF_TOKEN" in checked.settings
    file, name = folder / f"{kind}.env", line.partition("=")[0]
    kept = [each for each in file.read_text().splitlines() if not each.startswith(f"{name}=")]
    file.write_text("\n".join([*kept, line]))
    with pytest.raises(InputError, match=says):
        check_file(file, "lmi28", ())


def test_arguments_of_the_servers_http_part_pass_in_every_version(tmp_path):
    lines = ["SM_VLLM_ENABLE_AUTO_TOOL_CHOICE=true", "SM_VLLM_TOOL_CALL_PARSER=hermes"]
    lines += ["SM_VLLM_HOST=0.0.0.0", "SM_VLLM_CHAT_TEMPLATE=/opt/ml/model/chat.jinja"]
    lines += ["SM_VLLM_REASONING_PARSER=qwen3", "SM_VLLM_LORA_MODULES=a=b"]
    file = tmp_path / "vllm.env"
    file.write_text("\n".join(["SM_VLLM_MODEL=Qwen/Qwen3-8B", *lines]))
    assert len(check_file(file, "lmi28", ()).settings) == 7
    for version in ("0.10.2", "0.28.0", "0.30.0", "0.33.0"):
        known = engine_arguments("vllm", version)
        assert known["tool_call_parser"].part == known["api_key"].part == "frontend"
    (tmp_path / "sglang.env").write_text("SM_SGLANG_TP=2\nSM_SGLANG_EP=2\n")
    assert len(check_file(tmp_path / "sglang.env", "lmi28", ()).settings) == 2


@pytest.mark.parametrize(
    ("instance", "image", "is_set"),
    [
        ("ml.g6e.xlarge", None, True),
        ("ml.g5.12xlarge", None, False),
        ("ml.g6e.xlarge", "2.0.2", False),
    ],
)
def test_tgi_keeps_a_one_byte_cache_where_its_version_and_the_device_can(instance, image, is_set):
    bundle = bundle_of("tgi", instance, image=image)
    assert ("KV_CACHE_DTYPE=fp8_e4m3fn" in bundle.files["tgi.env"]) == is_set
    assert any("kv_dtype float8" in trap for trap in bundle.traps) != is_set


def test_lmis_variables_are_read_as_its_container_reads_them(tmp_path):
    write_bundle(bundle_of("lmi"), tmp_path / "files")
    file = tmp_path / "files" / "lmi.env"
    checked = check_file(file, "lmi28", ()).settings
    assert checked["option.kv_cache_dtype"].value == "fp8"
    assert checked["option.kv_cache_dtype"].origin == "OPTION_KV_CACHE_DTYPE"
    file.write_text("OPTION_GPU_MEMORY_UTILIZATION=1.7\nOPTION_ENGINE=Python\n")
    with pytest.raises(InputError, match="more than 0 and at most 1"):
        check_file(file, "lmi28", ())
    with pytest.raises(InputError, match=r"option\.engine is not read"):
        check_file(file, "0.26.0", ())
