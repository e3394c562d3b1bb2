"""The schema of the values knows the model's settings, and the chart's README all values."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import helm_python
import jsonschema
import pytest
import yaml
from charts import CHART, render

from inflight.config import ConfigError, EngineConfig

_SPEC = importlib.util.spec_from_file_location("generate", CHART.parent / "generate.py")
assert _SPEC and _SPEC.loader
generate: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(generate)
AGAIN = "run `python deploy/helm/generate.py`"
SCHEMA = jsonschema.Draft7Validator(generate.settings_schema())


def test_the_schema_of_the_settings_is_current() -> None:
    assert generate.values_schema() == generate.SCHEMA.read_text(), AGAIN


def test_the_table_of_values_is_current_and_complete() -> None:
    assert generate.readme() == generate.README.read_text(), AGAIN
    named = set(re.findall(r"(?m)^\| `([\w.]+)` \|", generate.README.read_text()))

    def leaves(values: dict[str, Any], path: str = "") -> list[str]:
        groups = {key: value for key, value in values.items() if isinstance(value, dict) and value}
        below = [leaf for key, value in groups.items() for leaf in leaves(value, f"{path}{key}.")]
        return [f"{path}{key}" for key in values if key not in groups] + below

    for leaf in leaves(yaml.safe_load(generate.VALUES.read_text())):
        assert any(leaf == one or leaf.startswith(f"{one}.") for one in named), leaf


def test_the_schema_knows_every_default_value_and_nothing_more() -> None:
    """At every level of the chart's own values; what Kubernetes defines is Kubernetes' to check."""

    def check(values: dict[str, Any], schema: dict[str, Any], path: str) -> None:
        if "additionalProperties" not in schema:  # a part of a pod
            return
        if schema["additionalProperties"] is not False:  # labels and annotations
            return
        assert set(values) == set(schema["properties"]) - {"global"}, path
        for key, value in values.items():
            if isinstance(value, dict) and key != "settings":
                check(value, schema["properties"][key], f"{path}.{key}")

    schema = generate.json.loads(generate.SCHEMA.read_text())
    free = {key for key, one in schema["properties"].items() if one.get("type") == "object" and "properties" not in one}
    assert free - {"global"} == {"podAnnotations", "podLabels", "podSecurityContext", "securityContext"}
    check(yaml.safe_load(generate.VALUES.read_text()), schema, "values")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_num_seq": 8}, "max_num_seq"),
        ({"kernel_config": {"split": True}}, "split"),
        ({"tenants": {"gold": {"weigth": 2}}}, "weigth"),
        ({"speculative_config": {"metod": "ngram"}}, "speculative_config"),
        ({"dtype": "bf16"}, "dtype"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"gpu_memory_utilization": 90}, "gpu_memory_utilization"),
    ],
)
def test_a_misspelt_setting_is_refused_before_a_pod_starts(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(helm_python.HelmValuesError, match=said):
        render({"model": {"settings": settings}})
    with pytest.raises(ConfigError):
        EngineConfig.from_dict({"model": "x", **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "half", "kv_cache_dtype": "fp8_e4m3", "tensor_parallel_size": 1, "disable_log_requests": True},
        {"kv_cache_memory_bytes": 2**30, "async_scheduling": None, "max_model_len": None},
        {
            "priority_classes": {"2": {"max_queue_size": 64}},
            "tenants": {"*": {"per_name": True}, "gold": {"weight": 4}},
        },
        {"speculative_config": {"method": "suffix"}, "kernel_config": {"split_k": True}, "seed": 2**63 - 1},
        {"step_trace": 100, "stream_interval": "auto", "swap_space": 0.5, "shared_step_rows": None},
    ],
)
def test_what_the_backend_takes_passes(settings: dict[str, Any]) -> None:
    EngineConfig.from_dict({"model": "x", **settings})
    SCHEMA.validate(settings)
    render({"model": {"settings": settings}})


def test_every_default_of_the_backend_passes() -> None:
    import msgspec

    defaults = msgspec.to_builtins(EngineConfig(model="x"))
    SCHEMA.validate(defaults)
    assert set(defaults) == set(EngineConfig.__struct_fields__)
