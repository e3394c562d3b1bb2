"""Every series of Triton and the model that the dashboard and the alerts read is on the `/metrics` of a real server.

Those of the gateway are compared in tests/deploy/test_monitoring.py."""

from __future__ import annotations

import re
import urllib.request

from promql import expressions, names_in

from inflight.frontend.operator.metric_specs import ADAPTER_METRICS, METRICS

# Of models with adapters or KV tiers alone: test_adapters.py, test_kv_tiers.py.
ELSEWHERE = tuple(spec.name for spec in (*ADAPTER_METRICS, *METRICS) if spec in ADAPTER_METRICS or spec.engine_labels)


def test_the_server_has_every_series_with_the_labels_that_are_queried(server):
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=10) as response:
        text = response.read().decode()
    # Not with prometheus_client's parser: it adds `_total` to the names of Triton's own counters.
    samples = re.findall(r"^([a-zA-Z_:][\w:]*)\{(.*)\} ", text, re.MULTILINE)
    of_demo = {name for name, labels in samples if 'model="demo"' in labels}
    wanted = {name for _, expression in expressions() for name in names_in(expression)} - {"up"}  # Prometheus' own
    wanted = {name for name in wanted if not name.startswith(("inflight_gateway_", *ELSEWHERE))}
    assert wanted <= of_demo, f"/metrics has no {wanted - of_demo}"
    failures = [labels for name, labels in samples if name == "nv_inference_request_failure"]
    assert failures and all('reason="' in labels for labels in failures)
