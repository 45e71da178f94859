"""Will it fit, and how? From shapes and a machine's figures to a plan. Nothing here trains.

A `planning_problem` leaves ways to run open; `candidates` lists them, each priced in bytes
(`zeroshard.layout`) and seconds (`pricing`), `choice` takes one or says why none fits, and `plan` is the
record that comes out. `answer` has `zs.plan()`, which asks all of them. A model becomes numbers by its
`signatures` and a `trace` of one step on fake tensors, with its `operations`.
"""
