"""A part's way to the host and back as C code goes it: by addresses, sizes and events. See [Note: without the
interpreter] in `native/trip.py`.
"""

from __future__ import annotations

from zeroshard.native import Copy, Signs
from zeroshard.tier import Copies

from .due import Job, Staged
from .part import Part


def travels(part: Part, copies: Copies) -> bool:
    """Whether C code can carry its updates: nothing has to be done between the copies and the update. A page
    has to be waited for, and padding of 8-bit moments cleared; weights that rest on the host are not sent."""
    near = part.targets[0].device.type == copies.device.type
    return copies.native and part.disk is None and not part.coded and near


def count_of(job: Job) -> int:
    """Calls of a kernel that an update takes; none where this rank has no rows of what was used."""
    return sum(run.start < run.stop for run, _, _ in job.steps())


def ways_of(staged: Staged) -> tuple[list[Copy], list[Copy]]:
    """What is copied out, and what back: nothing where a part holds its weights back."""
    job, part, weight = staged.job, staged.job.part, staged.weight
    assert job.flat.dtype == part.grad_dtype
    start, width = weight.data_ptr(), part.weight_dtype.itemsize

    def sent(used: list[bool]) -> list[Copy]:
        return [
            Copy(strip.target.data_ptr(), start + strip.start * width, (strip.stop - strip.start) * width)
            for strip in part.strips_of(used)
        ]

    out = [Copy(staged.grad.data_ptr(), job.flat.data_ptr(), part.numel * part.grad_dtype.itemsize)]
    if job.reads_weights:
        out += [Copy(here, there, nbytes) for there, here, nbytes in sent([True] * len(part.params))]
    return out, sent(part.used) if part.held is None else []


def signs_of(job: Job, copies: Copies) -> Signs | None:
    """The events of one way. None where nothing runs beside."""
    part = job.part
    if part.signs is None:
        part.signs = copies.mark(), copies.mark()
    arrived, ready = (mark.handle for mark in part.signs)
    if copies.roads is None:
        return None
    assert arrived is not None
    assert ready is not None
    return Signs(copies.roads, job.landed.handle, arrived, ready)
