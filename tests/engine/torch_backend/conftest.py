"""Tiny models that several tests share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.engine.torch_backend.tiny_models import TinyModel
from tests.engine.torch_backend.trained_model import write_trained_model


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyModel]:
    """Build a tiny model of a family with changes to its config; equal ones are built once."""
    built: dict[str, TinyModel] = {}

    def make(family: str, **changes: object) -> TinyModel:
        key = repr((family, sorted(changes.items())))
        if key not in built:
            built[key] = TinyModel(tmp_path_factory.mktemp(family), family, **changes)
        return built[key]

    return make


@pytest.fixture(scope="session")
def make_llama(make_model: Callable[..., TinyModel]) -> Callable[..., TinyModel]:
    """As `make_model`, of the Llama family."""
    return partial(make_model, "Llama")


@pytest.fixture(scope="session")
def llama(make_llama: Callable[..., TinyModel]) -> TinyModel:
    """The plain one: every query head has its own keys."""
    return make_llama()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that has learnt a text."""
    return write_trained_model(tmp_path_factory.mktemp("trained"))
