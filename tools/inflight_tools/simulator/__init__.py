"""The engine on a virtual clock: what a load would see on a machine whose steps were measured.

`engine` runs the real core, scheduler, pool and policies over a runner that computes nothing; `profile`
has the cost of a step; `simulation` sends the load through a `router` to replicas; `report` summarises;
`sweep` tries settings; `comparison` compares replicas that compute only prompts (`handover`) with as many that do
both.  Only `calibrate` and `check` need torch and a checkpoint.
"""
