"""Sends the same load to Inflight and to what it replaces, and reports both.

    python -m loadtest run --scenario lognormal      both models on one server, then report.html
    locust -f loadtest/locustfile.py ...             only the users, with Locust's web UI

Modules, in the order of the data: `inflight_tools.workload` defines the requests (`options` and `prompts`
add what only a server needs); `clients` sends and times a request, `users` and the locustfiles do so
under Locust; `server`, `monitor` and `runner` perform a measured run; `analysis` turns its records into
numbers, `charts` and `report` into a page.
"""
