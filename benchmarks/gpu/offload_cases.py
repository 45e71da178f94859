"""The rows of the offload table. Why these budgets: docs/offload.md, "How large a model"."""

from dataclasses import dataclass, replace

CAP = ("--cap-gib", "32")


@dataclass(frozen=True)
class Case:
    """`system`, `size` and `arguments` are those of `one.py`; or `script` is another benchmark, `small` it in
    seconds. `against`: the case that its step is divided by; `bar`: what it has to reach; `seconds`:
    what it may take, start included."""

    title: str
    bar: str
    seconds: int
    system: str = ""
    size: str = ""
    arguments: tuple[str, ...] = ()
    script: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    against: str = ""

    @property
    def is_peer(self):
        return bool(self.system) and not self.system.startswith(("plain", "zs-"))


def auto(device, host, *more):
    return ",".join(["zs-1:optimizer=auto", f"device_bytes={device}", f"host_bytes={host}", *more])


def peer(system, size, seconds, *arguments):
    names = {
        "ao-offload": "torchao, bf16 weights and state, no clipping",
        "ao-offload-fp32": "torchao, fp32 weights and state, no clipping",
        "ds2-offload": "DeepSpeed ZeRO-2, optimizer on the host",
        "ds3-offload": "DeepSpeed ZeRO-3, optimizer on the host",
        "fsdp2-offload": "FSDP2 with CPU offload",
    }
    billions = {"1b": "1.26 B", "7b": "6.74 B, GPU capped at 32 GiB"}[size]
    title = f"{billions}, {names[system]}"
    return Case(title, "–", seconds, system, size, arguments, against=f"plain-{size}")


DISK = "path={disk}"
ALL = "parameters=auto"
# No gradient waits for the norm, so none can be clipped; that of 62 untrained blocks should be about 1.7.
GUARDED = ("undo=False", "clip_norm=8")
CASES = {
    "plain-1b": Case("1.26 B, plain PyTorch", "–", 90, "plain", "1b", ("--steps", "10")),
    "host-1b": Case(
        "1.26 B, optimizer on the host", "≤ 1.25 × plain", 100, "zs-1:optimizer=host", "1b",
        ("--steps", "12"), against="plain-1b",
    ),
    "ao-1b": peer("ao-offload", "1b", 70, "--steps", "8"),
    "ao-fp32-1b": peer("ao-offload-fp32", "1b", 70, "--steps", "8"),
    "ds2-1b": peer("ds2-offload", "1b", 120, "--steps", "6"),
    "fsdp2-1b": peer("fsdp2-offload", "1b", 80, "--steps", "6"),
    "plain-7b": Case("6.74 B, plain PyTorch", "–", 150, "plain", "7b", ("--steps", "7")),
    "host-7b": Case(
        "6.74 B, GPU capped at 32 GiB, optimizer on the host", "≤ 1.3 × plain; ≤ 12.5 host bytes a parameter",
        280, "zs-1:optimizer=host", "7b", ("--steps", "14", *CAP), against="plain-7b",
    ),
    "split-7b": Case(
        "the same, split master", "≤ 1.3 × plain; ≤ 10.6 host bytes a parameter",
        280, "zs-1:optimizer=host,master=split", "7b", ("--steps", "14", *CAP), against="plain-7b",
    ),
    "ao-7b": peer("ao-offload", "7b", 120, "--steps", "6", *CAP),
    "ds3-7b": peer("ds3-offload", "7b", 200, "--steps", "4", *CAP),
    "fsdp2-7b": peer("fsdp2-offload", "7b", 150, "--steps", "4", *CAP),
    "auto-7b": Case(
        "6.74 B, `auto`, the whole GPU", "≤ 1.03 × plain", 200, auto("100GiB", "64GiB"), "7b",
        ("--steps", "7"), against="plain-7b",
    ),
    "13b": Case(
        "13 B, GPU capped at 32 GiB, disk allowed; a guard on the norm at 8", "trains", 580,
        auto("15GiB", "116GiB", "master=split", *GUARDED, ALL, DISK), "13b", ("--steps", "4", *CAP),
    ),
    "13b-clip": Case(
        "13 B, GPU capped at 32 GiB, clipped at 1.0; gradients wait, so more is on the disk", "trains", 580,
        auto("3GiB", "116GiB", "master=split", ALL, DISK), "13b", ("--steps", "3", *CAP),
    ),
    "20b": Case(
        "20.0 B, whole GPU and host, no disk; a guard on the norm at 8, none is clipped", "trains", 580,
        auto("115GiB", "116GiB", "master=split", *GUARDED), "20b", ("--steps", "3"),
    ),
    "20b-clip": Case(
        "20.0 B, clipped at 1.0; what is left over, 24 GiB, on the disk", "trains", 580,
        auto("94GiB", "116GiB", "master=split", DISK), "20b", ("--steps", "3"),
    ),
    "20b-twice": Case(
        "20.0 B, whole GPU and host, no disk, clipped at 1.0; 38 of 62 blocks run backward twice",
        "≤ 10 s; goal 8.5 s", 590,
        auto("112GiB", "118GiB", "master=split", "repeat_backward=38"), "20b", ("--steps", "4"),
    ),
    "24b": Case(
        "24.1 B, a guard on the norm at 8; 47 GiB on the disk", "goal: trains", 590,
        auto("118GiB", "116GiB", "master=split", *GUARDED, DISK), "24b", ("--steps", "2"),
    ),
    "disk-1b": Case(
        "1.26 B, optimizer on the disk", "hidden at 8-fold accumulation", 300,
        "zs-1:optimizer=disk," + DISK, "1b", ("--steps", "4", "--accum", "8"), against="plain-1b-8",
    ),
    "plain-1b-8": Case("1.26 B, plain PyTorch, 8-fold accumulation", "–", 120, "plain", "1b",
                       ("--steps", "4", "--accum", "8")),
    "kernel": Case(
        "host update kernel", "≤ 1.1 × a copy of the same bytes", 240,
        script=("parts/micro_host_update.py", "--threads", "2", "16", "--numel", "67108864", "--peers",
                "--json"),
        small=("parts/micro_host_update.py", "--threads", "1", "--numel", str(1 << 18), "--rounds",
               "2", "--json"),
    ),
    "disk": Case(
        "disk tier, 4 GiB in pages of 256 MiB", "≥ 80 % of plain direct I/O", 150,
        script=("parts/micro_disk.py", "--path", "{disk}", "--gib", "4", "--json"),
        small=("parts/micro_disk.py", "--path", "{disk}", "--gib", "0.03", "--page-mib", "4", "--json"),
    ),
}  # fmt: skip


def dry(case):
    """The same on the CPU with a tiny model: other sizes, the same paths."""
    if case.script:
        return replace(case, script=case.small, seconds=60)
    system = case.system
    roomy = case.size == "7b"  # so that `auto` offloads nothing there either
    near = "18MiB" if DISK in system else "48MiB"  # the second holds the state of all but the blocks
    for name, size in (("device_bytes", "1GiB" if roomy else near), ("host_bytes", "24MiB")):
        system = ",".join(f"{name}={size}" if w.startswith(name) else w for w in system.split(","))
    system = system.replace("repeat_backward=38", "repeat_backward=1")  # of three blocks
    system = system.replace("clip_norm=8", "clip_norm=1000")  # of so few tokens the norm is large
    quick = ("--device", "cpu", "--mbs", "1", "--seq", "8", "--steps", "2")  # the last of equals counts
    return replace(case, system=system, size="tiny", arguments=(*case.arguments, *quick), seconds=60)
