"""Builds a model with its weights: whole or one rank's part, quantized or as stored."""

from __future__ import annotations

from pathlib import Path

import torch

from lmi_bench.engine.torch_backend.collectives import Collectives
from lmi_bench.engine.torch_backend.loading import WeightLoader
from lmi_bench.engine.torch_backend.models.build import build_with
from lmi_bench.engine.torch_backend.models.decoder import Decoder
from lmi_bench.engine.torch_backend.parallel import RankCheckpoint, rank_spec
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.quantization.loader import QuantizingLoader
from lmi_bench.engine.torch_backend.quantization.plan import QuantizePlan
from lmi_bench.engine.torch_backend.weights import Checkpoint, Progress
from lmi_bench.models.spec import DecoderSpec


def build_model(
    folder: Path,
    spec: DecoderSpec,
    precision: Precision,
    device: torch.device,
    progress: Progress | None = None,
    collectives: Collectives | None = None,
    plan: QuantizePlan | None = None,
) -> Decoder:
    """Load the model's weights; raises InputError if they cannot be loaded.

    progress     called with the bytes read and all bytes, after each tensor
    collectives  of the ranks that share the model; None: the whole model is here
    plan         how to quantize matrices; None: not at all
    """
    beside = None if plan is None else plan.factors
    if collectives is None:
        opened = Checkpoint(folder, progress, beside=beside)
    else:
        opened = RankCheckpoint(folder, spec, collectives, progress, beside=beside)
        spec = rank_spec(spec, collectives.degree)
    with opened as checkpoint:
        if plan is None:
            load = WeightLoader(spec, checkpoint, precision, device, collectives)
        else:
            load = QuantizingLoader(spec, checkpoint, precision, device, collectives, plan)
        model = build_with(load, folder)
        checkpoint.finish()
    return model
