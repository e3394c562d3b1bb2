"""Loads as data: the requests (`scenarios`, `traces`), their arrivals (`arrivals`), their tokens
(`prompts`), the options of a load (`load`), and what users expect of it (`slo`).

The load test sends these requests to a server; the simulator runs them on a virtual clock.
"""
