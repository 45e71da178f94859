"""Will it fit, and how? From shapes and a machine's figures to a plan, and a run that keeps to it.

A `question` leaves ways to run open; `planner` prices each in bytes (`zeroshard.count`) and seconds
(`pricing`), `choice` takes one or says why none fits, and `plan` is the record that comes out. `answer`
has `zs.plan()`, which asks all of them. A model becomes numbers by its `blueprint` and a `trace` of one
step on fake tensors (`likeness`, `meter`, `traffic`, `fused`, `recurrent`, `widening`); a machine by
`measure`. `promise` holds a run to its plan, `frames` are its picture, `unfit` what nothing can be
planned for.
"""
