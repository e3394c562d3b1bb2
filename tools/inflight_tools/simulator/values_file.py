"""The values file of the Helm chart for a size that `inflight simulate` found."""

from __future__ import annotations

from inflight_tools.simulator.sizing import Size

__all__ = ["values_yaml"]


def values_yaml(size: Size, load: str, slo: str) -> str:
    """YAML with the chart's keys, and in comments where each number comes from.

    Args:
        load: the load in words, one line.
        slo: the SLO in words, one line.
    """
    report = size.report
    lost = f" with {size.survive} of them lost" if size.survive else ""
    return f"""\
# From inflight simulate --find-replicas: {size.replicas} replicas meet the SLO{lost}.
# Load: {load}
# SLO:  {slo}
# Seen: {100 * report.attainment:.1f}% good, TTFT p99 {report.ttft.p99:.3f} s, ITL p99 {report.itl.p99:.3f} s
replicaCount: {size.replicas}
autoscaling:
  # The replicas for half of the load, and for twice the load.
  minReplicas: {size.minimum}
  maxReplicas: {size.maximum}
  # The thresholds are means over replicas and time at the edge, the highest load at which {size.needed} replicas meet
  # the SLO: {size.edge:.2f} times this one.  Above them another replica is due.
  # Waiting requests per replica were {size.at_edge.waiting:.2f}; rounded down, at least 1.
  waitingPerReplica: {size.waiting_per_replica}
  # The share of KV blocks in use was {size.at_edge.kv_cache_usage:.4f}; rounded down, 0.01 to 0.95.
  kvCacheUsage: {size.kv_cache_usage:.2f}
"""
