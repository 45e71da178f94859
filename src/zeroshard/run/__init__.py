"""One run: what `shard()` makes of a model and its optimizers, and what goes on around it.

`admission` and `agree` refuse what cannot work, `resting` decides where units rest, `build` makes the
`runtime` with its `wiring`, `supply` and `live` units, and `hooks` ties it to the user's modules and
optimizers. Beside training: `state` and `whole` show it, `loading` refuses what does not fit it, `norm`,
`scaling`, `spans` and `written` serve the loop; `keeper` saves and loads it, from a `snapshot` and by
`resume`, for the handle's `kept`.
"""
