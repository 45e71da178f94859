"""What lies on the GPU at the fullest moment of a step, by size and place: the allocator's own record."""

from collections import Counter

import torch

LARGEST = 24  # groups that are told


class PeakBlocks:
    """While active, the allocator's events are recorded; `found` then has the largest groups of blocks that
    lived at the peak: those that lay there before, and those that were made meanwhile, with the line of
    Python that made them (none for what autograd's own thread makes)."""

    def __enter__(self):
        torch.cuda.synchronize()
        self._before = [
            block["size"]
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=400_000)
        return self

    def __exit__(self, *_):
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(None)
        now = most = at = 0
        for number, event in enumerate(events):
            now += _change(event)
            if now > most:
                most, at = now, number
        live = {}
        for event in events[: at + 1]:
            if event["action"] == "alloc":
                live[event["addr"]] = event
            elif event["action"] == "free_requested":
                gone = live.pop(event["addr"], None)
                if gone is None and event["size"] in self._before:
                    self._before.remove(event["size"])
        latest = [e for e in events[max(at - 12, 0) : at + 1] if e["action"] == "alloc"]
        self.found = {
            "before": _largest(self._before),
            "made": _largest((event["size"], _line(event)) for event in live.values()),
            "made_bytes": sum(event["size"] for event in live.values()),
            "before_bytes": sum(self._before),
            "last": [[event["size"], _line(event)] for event in latest],
        }


def _change(event):
    return {"alloc": 1, "free_requested": -1}.get(event["action"], 0) * event["size"]


def _line(event):
    """The innermost places of Python outside torch."""
    ours = [f for f in event.get("frames", ()) if "/torch/" not in f["filename"]]
    return " < ".join(f"{f['filename'].rsplit('/', 1)[-1]}:{f['line']}" for f in ours[:3])


def _largest(blocks):
    """[how many, what] by bytes."""
    groups = Counter(blocks)
    size = (lambda what: what[0]) if groups and isinstance(next(iter(groups)), tuple) else (lambda what: what)
    return [[groups[what], what] for what in sorted(groups, key=lambda w: -groups[w] * size(w))[:LARGEST]]
