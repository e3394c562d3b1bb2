"""What a load consists of: which requests (`scenarios`, `traces`), when (`arrivals`), with which tokens
(`prompts`), and all of it as options (`load`).

Plain data and arithmetic: the load test sends it, the simulator computes with it.
"""
