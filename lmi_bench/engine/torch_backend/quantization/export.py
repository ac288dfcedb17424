"""Writes a quantized model as a folder, and measures the quantization error of each matrix.

Grouped 4-bit weights use AWQ's public format, which other engines also read. The other schemes have
no equivalent public format, so their tensors have this program's own names: `int8` and `scale`,
`fp8` and `scale`, `packed_3bit`, `scale` and `zeros`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmi_bench.core.errors import InputError
from lmi_bench.engine.quantization import QuantizeSettings, Scheme
from lmi_bench.engine.torch_backend.convert import ShardWriter, copy_beside
from lmi_bench.engine.torch_backend.precision import Precision, torch_dtype
from lmi_bench.engine.torch_backend.quantization import loader, rounding
from lmi_bench.engine.torch_backend.quantization.calibration import Calibration, prepare
from lmi_bench.engine.torch_backend.quantization.kernels import Kernels, choose_kernels
from lmi_bench.engine.torch_backend.weights import Checkpoint, Tell, read_model
from lmi_bench.models.folder import make_new_folder


def export_quantized(
    folder: Path, out: Path, settings: QuantizeSettings, *, dtype: str = "bfloat16", tell: Tell | None = None
) -> int:
    """Round a model's matrices and write them with the rest of its folder to `out`.

    dtype    storage format of the remaining floats
    returns  bytes of the tensors
    Raises InputError if the folder cannot be quantized or `out` exists.
    """
    if out.exists():
        raise InputError(f"{out} exists: name a new folder")
    source = read_model(folder)
    plan = prepare(Calibration(source, settings, dtype, torch.device("cpu"), tell))
    if plan is None or plan.stored:
        raise InputError(f"{folder.name}: nothing to quantize ({settings.scheme})")
    stored_dtype = torch_dtype(dtype)
    writer = ShardWriter(out)
    with Checkpoint(folder, beside=plan.factors, spec=source.spec) as checkpoint:
        if checkpoint.reformed or source.spec.latent_rank:
            raise InputError(
                f"{folder.name}: {source.spec.family} models cannot be written quantized; quantize "
                "them while loading, with --quantize"
            )
        make_new_folder(out)
        factors = (loader.COLUMN_FACTORS, loader.OUTPUT_DIVISORS, loader.LARGEST_INPUT, "none")
        names = [key for key in sorted(checkpoint.names) if key.rpartition(".")[2] not in factors]
        for number, name in enumerate(names, start=1):
            rounded = checkpoint.whole(name).to(stored_dtype)
            if not name.startswith(f"{source.spec.tensors['layers']}."):
                writer.add({name: rounded})
            else:
                base, _, kind = name.rpartition(".")
                whole = loader.apply_factors(checkpoint, name, rounded.float())
                is_matrix = kind == "weight" and whole.ndim == 2
                if is_matrix and loader.is_quantized_name(base, source.spec):
                    weight = rounding.round_weight(whole, settings, plan.group_size)
                    writer.add({f"{base}.{key}": part for key, part in _tensors(weight).items()})
                    largest = f"{base}.{loader.LARGEST_INPUT}"
                    if largest in checkpoint:
                        writer.add({largest: checkpoint.tensor(largest)})
                else:
                    writer.add({name: whole.to(stored_dtype)})
            if tell is not None:
                tell("tensors", number, len(names))
    copy_beside(folder, out)
    config = {**source.config, "quantization_config": _config(plan), "dtype": dtype}
    config.pop("torch_dtype", None)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return writer.finish()


def _tensors(weight: rounding.QuantizedWeight) -> Mapping[str, Tensor]:
    if weight.bits == 4:
        return rounding.to_awq(weight)
    if weight.zeros is not None:
        return {
            "packed_3bit": rounding.pack_3bit_for_file(weight.values),
            "scale": weight.scale.half(),
            "zeros": weight.zeros,
        }
    return {"fp8" if weight.values.dtype is rounding.FP8 else "int8": weight.values, "scale": weight.scale}


def _config(plan: loader.QuantizePlan) -> dict[str, Any]:
    settings = plan.settings
    if settings.scheme is Scheme.AWQ_INT4:
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": plan.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    stated: dict[str, Any] = {"quant_method": loader.OWN_METHOD, "scheme": settings.scheme.value}
    if settings.scheme.grouped:
        stated["group_size"] = plan.group_size
    if settings.scheme is Scheme.SMOOTHQUANT:
        stated |= {"alpha": settings.alpha, "per_token": settings.per_token, "per_channel": settings.per_channel}
    return stated


def layer_errors(folder: Path, settings: QuantizeSettings, *, dtype: str, tell: Tell | None = None) -> dict[str, float]:
    """|rounded outputs - outputs| / |outputs| of every quantized matrix, by name, for inputs from
    the calibration text, with this machine's kernels."""
    calibration = Calibration(read_model(folder), settings, dtype, torch.device("cpu"), tell)
    plan = prepare(calibration)
    if plan is None or plan.stored:
        return {}
    spec = calibration.source.spec
    precision = Precision(torch.float32, torch.float32)
    kernels = choose_kernels(settings, precision, calibration.device)
    errors = {}
    with Checkpoint(folder, beside=plan.factors) as checkpoint:
        for recorded, inputs in calibration.record().items():
            joined = spec.names(recorded.rpartition(".")[0], "qkv")  # of the same inputs
            for name in joined if recorded in joined else (recorded,):
                if loader.is_quantized_name(name, spec):
                    errors[name] = _error(checkpoint, name, inputs.rows.cpu(), plan, kernels)
    return errors


def _error(checkpoint: Checkpoint, name: str, rows: Tensor, plan: loader.QuantizePlan, kernels: Kernels) -> float:
    kinds = ("weight", loader.COLUMN_FACTORS, loader.LARGEST_INPUT)
    full, factors, fixed = (f"{name}.{kind}" for kind in kinds)
    weight = checkpoint.whole(full).float()
    scaled = loader.apply_factors(checkpoint, full, weight, columns_alone=True)
    seen = rows / checkpoint.tensor(factors, rows.shape[1]) if factors in checkpoint else rows
    largest = [checkpoint.tensor(fixed)] if fixed in checkpoint else []
    rounded = rounding.round_weight(scaled, plan.settings, plan.group_size)
    return loader.relative_error(kernels.make(rounded, None, *largest)(seen), rows @ weight.t())
