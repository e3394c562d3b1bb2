"""Keeps one server under mixed load while engines die and models are loaded again, and checks every answer.

    python -m loadtest.soak --minutes 20               an event every few seconds: reload, kill, unload, kill
    python -m loadtest.soak --turns 100 --no-kills     reloads and unloads only, one right after another

Modules, in the order of the data: `cases` are the requests whose answers are known, `traffic` sends them,
`events` disturbs the server meanwhile, `resources` measures its processes, `run` joins them and judges, `record` keeps
the outcome.
"""
