"""Updates off the device (ZeRO-Offload): state in host memory or on the disk, and who updates it.

`place` builds it: `part` has the state of one bucket, `form` its arrays. `updates` decides when a part is
updated and whether that stands, by `outlook` while the norm is not known; `due` has what waits, `crew`
carries it out. `eligible` says whose updates can go this way; gradients of others come to rest on the
host (`landing`).
"""
