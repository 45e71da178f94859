"""One sharded model at work: what `shard()` makes of a model and its optimizers, and what goes on around it.

`admission` and `rank_agreement` refuse what cannot work, `placement` decides in which tier units rest,
`build` makes the `runtime` and its `unit`s, `hooks` ties it to the user's modules and optimizers, and
`forward` sees to what the loop gives them; `second_backward` runs that of some units twice. Beside training:
`optimizer_state` and `full_state` show its state, `loading` refuses what does not fit it, `clipping` and
`param_writes` serve the loop, `measure` has the figures of the machine at hand, from which `plan_guard` has a
plan made, and holds the run to it. `saves` saves and loads it, from a `snapshot` and by `resume`; `closing`
gives the plain model back.
"""
