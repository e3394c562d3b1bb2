"""The engine on a virtual clock: what a load would see on a machine whose steps were measured.

`engine` is the very core, scheduler, pool and policies over a runner that computes nothing; `profile`
says what a step costs; `simulation` sends the load through a `router` to replicas; `report` sums up;
`sweep` tries settings.  `calibrate` and `check` alone need torch and a checkpoint.
"""
