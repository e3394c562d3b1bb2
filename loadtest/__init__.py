"""Sends the same load to Inflight and to what it replaces, or to any two endpoints, and reports both.

    python -m loadtest run --scenario lognormal      both models on one server, then report.html
    python -m loadtest run --url A --url B           two endpoints side by side
    locust -f loadtest/locustfile.py ...             only the users, with Locust's web UI

Modules, in the order of the data: `inflight_tools.workload` defines the requests (`options` and `prompts`
add what only a server needs); `exchange` times a request, and `triton_clients` and `openai_client` send it; `users`,
`shapes` and `locustfile` do so under Locust; `server`, `targets`, `monitor` and `runner` perform a measured run;
`analysis` turns its records into numbers, `remarks`, `charts` and `report` into a page.
"""
