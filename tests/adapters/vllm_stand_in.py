"""Modules named as vLLM's, with the interface as one of its versions was recorded."""

from __future__ import annotations

import enum
import importlib
import json
import sys
from abc import ABC
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

GOLDEN = Path(__file__).parent.parent / "golden" / "vllm_connector.json"
VERSIONS: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["versions"]
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
STATE = "vllm.distributed.parallel_state"
CONNECTOR = "ess.adapters.vllm.connector"


def function(name: str, parameters: list[str], *, is_abstract: bool) -> Any:
    """A method with this signature that does nothing, but remembers what vLLM's own remembers."""
    made: dict[str, Any] = {}
    bodies = {
        "bind_connector_metadata": "self._connector_metadata = connector_metadata",
        "clear_connector_metadata": "self._connector_metadata = None",
        "get_transfer_results": "return self.get_finished(finished_req_ids)",
    }
    exec(f"def {name}({', '.join(parameters)}):\n    {bodies.get(name, 'return None')}", made)
    made[name].__isabstractmethod__ = is_abstract
    return classmethod(made[name]) if parameters[0] == "cls" else made[name]


def class_of(name: str, methods: dict[str, list[str]], abstract: list[str]) -> type:
    members = {
        key: function(key, parameters, is_abstract=key in abstract)
        for key, parameters in methods.items()
    }
    return type(ABC)(name, (ABC,), members)


def put_vllm(monkeypatch: pytest.MonkeyPatch, version: dict[str, Any], *, rank: int = 0) -> None:
    base, state = ModuleType(BASE), ModuleType(STATE)
    hma = version["hma"]
    base.KVConnectorBase_V1 = class_of(
        "KVConnectorBase_V1", version["methods"], version["abstract"]
    )
    base.SupportsHMA = class_of("SupportsHMA", hma, list(hma))
    base.KVConnectorRole = enum.Enum("KVConnectorRole", {"SCHEDULER": 0, "WORKER": 1})
    for name in ("KVConnectorMetadata", "KVConnectorHandshakeMetadata"):
        setattr(base, name, class_of(name, {}, []))
    state.get_tensor_model_parallel_rank = lambda: rank
    for module in (BASE, STATE):
        parts = module.split(".")
        for count in range(1, len(parts)):
            monkeypatch.setitem(
                sys.modules, ".".join(parts[:count]), ModuleType(".".join(parts[:count]))
            )
    monkeypatch.setitem(sys.modules, BASE, base)
    monkeypatch.setitem(sys.modules, STATE, state)


def connector(monkeypatch: pytest.MonkeyPatch, version: dict[str, Any]) -> Any:
    """Our module, imported as this vLLM imports it; forgotten when the test is over."""
    put_vllm(monkeypatch, version, rank=0)
    monkeypatch.delitem(sys.modules, CONNECTOR, raising=False)
    module = importlib.import_module(CONNECTOR)
    monkeypatch.setitem(sys.modules, CONNECTOR, module)
    monkeypatch.delitem(sys.modules, CONNECTOR)
    return module
