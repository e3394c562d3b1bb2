"""The number of users over time, as Locust asks for it."""

from __future__ import annotations

from typing import Any

from locust import LoadTestShape
from locust.env import Environment

from inflight_tools.workload.load import Load
from inflight_tools.workload.scenarios import SCENARIOS, find_scenario
from loadtest.ramp import ramp_users

__all__ = ["HELP", "SHAPES", "use"]

SHAPES = ["auto", "constant", "ramp"]
HELP = "constant users, or a ramp up to the number of users, a peak and a ramp down; auto: as the scenario."


def use(environment: Environment) -> None:
    """Have Locust follow the option `--shape`, which the web UI can change between swarms.

    The number of users is by default the scenario's.

    Raises:
        WorkloadError: an unknown scenario.
    """
    options: Any = environment.parsed_options
    if options.num_users is None:
        load = Load(options.scenario, options.trace, arrivals=options.arrivals)
        options.num_users = find_scenario(options.scenario).users if load.process() == "closed" else 1
    if environment.web_ui or _ramp(options):
        shape = ChosenShape()
        shape.runner = environment.runner
        environment.shape_class = shape


def _ramp(options: Any) -> tuple[float, float, float] | tuple[()]:
    """Seconds of the rise, the peak and the fall; empty for constant users and open loops."""
    load = Load(options.scenario, options.trace, arrivals=options.arrivals)
    if options.shape == "constant" or load.process() != "closed":
        return ()
    own = () if options.trace else find_scenario(options.scenario).ramp
    return own or (SCENARIOS["month-end"].ramp if options.shape == "ramp" else ())


class ChosenShape(LoadTestShape):
    """The shape that the options name, until they say that it ends."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        options: Any = self.runner.environment.parsed_options
        seconds, peak = self.get_run_time(), options.num_users or 1
        if options.run_time and seconds >= options.run_time:
            return None
        if not (ramp := _ramp(options)):
            return peak, float(options.spawn_rate or peak)
        users = ramp_users(seconds, peak, ramp)
        return None if users is None else (users, float(peak))
