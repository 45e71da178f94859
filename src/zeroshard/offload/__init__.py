"""Updates off the device (ZeRO-Offload): state in host memory or on the disk, and who updates it.

`build` makes the offload groups: a `group` has the state of one bucket. `updates` decides when a group is
updated and whether that stands, also while the norm is not known; `work` is what an update is made of, and
`native_executor` or `python_executor` carries it out. `eligible` says whose updates can go this way; in a
loop that clips by itself gradients are handles until its step (`deferred`).
"""
