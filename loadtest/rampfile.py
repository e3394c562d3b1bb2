"""Locust's entry point for scenarios with a ramp, such as month-end; replaces `locustfile.py`.

    locust -f loadtest/rampfile.py GrpcUser --host 127.0.0.1:8001 --model demo --scenario month-end --context 2048

`--users` is the peak, by default the scenario's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from locust import LoadTestShape

from inflight_tools.workload.scenarios import SCENARIOS, find_scenario
from loadtest.locustfile import GrpcUser, OpenAIUser, SseUser
from loadtest.shapes import ramp_users

__all__ = ["GrpcUser", "MonthEnd", "OpenAIUser", "SseUser"]


class MonthEnd(LoadTestShape):
    """Ramps the users up, holds the peak, ramps them down and ends."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        options: Any = self.runner.environment.parsed_options
        scenario = find_scenario(options.scenario)
        ramp = scenario.ramp or SCENARIOS["month-end"].ramp
        assert ramp
        peak = options.num_users or scenario.users
        users = ramp_users(self.get_run_time(), peak, ramp)
        return None if users is None else (users, float(peak))
