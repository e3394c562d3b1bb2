"""Load for Inflight and for what it replaces: the same requests to both, and a report to look at.

    python -m loadtest run --scenario lognormal      both models on one server, then report.html
    locust -f loadtest/locustfile.py ...             the users alone, with Locust's web UI

Modules, in the order of the data: `inflight_tools.workload` says which requests, when and with which tokens
(`options` and `prompts` add what only a server needs); `clients` sends and times one, `users` and the
locustfiles do so as Locust does; `server`, `monitor` and `runner` make a measured run of it, `analysis`
numbers, `charts` and `report` a page.
"""
