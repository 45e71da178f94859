"""What a machine can do, in bytes and operations a second. No torch.

The figures of `GPUS` are peak figures of the vendors' public data sheets (dense, without sparsity; links
per direction). What a run reaches is less: `efficiency` is the share of the peak that its matrix products
reach. Figures that you measured are better: `machine("H100", efficiency=0.52, network=40e9)`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import OptionError, did_you_mean
from .fields import check_fields


@dataclass(frozen=True)
class Machine:
    """One device and its share of what surrounds it.

    - `memory`: bytes of the device. `half`, `full`: operations a second in 16 bits and in fp32.
      `efficiency`: share that a model's matrix products reach; `back_efficiency`: in backward, where it was
      measured.
    - `memory_rate`: bytes a second of the device's memory; `update_rate`: those that its optimizer's step
      touches, where it was measured; `host_rate`: of the host's memory, for all ranks of a node together.
    - `pcie`: bytes a second between host and device, each way. `link`: between devices of a node.
      `network`: a device's share of what its node sends to others. `disk_rate`: bytes a second that a node's
      disk reads or writes.
    - `node`: devices of one node. `cores`: of the host, for each device. `latency`: seconds that an exchange
      takes beside its bytes.
    - `workspace`: bytes that the device's matrix products keep for themselves; `margin`: what its allocator
      takes beside what is asked of it, as a share. Measured (see `measure`), and zero where nothing was.
    - `gap`: seconds that a kernel of the device takes beside its work. `launch`: seconds of the training
      thread to have one launched; `drag`: by which share of that it takes longer while threads of the host
      update, because they share its cores' caches and the way to memory.
    - `gpu`: whether a trace has the kernels of a GPU, or those of the CPU.
    """

    name: str
    memory: int
    half: float
    full: float
    memory_rate: float
    pcie: float
    link: float
    network: float = 50e9
    update_rate: float = 0.0  # not measured: as `memory_rate`
    host_rate: float = 200e9
    disk_rate: float = 3e9
    node: int = 8
    cores: int = 16
    efficiency: float = 0.6  # fitted to runs on an H200
    back_efficiency: float = 0.0  # not measured: as `efficiency`
    latency: float = 20e-6
    gap: float = 5e-6
    launch: float = 33e-6  # as `drag`: measured on hosts of an H200
    drag: float = 0.3
    margin: float = 0.0
    workspace: int = 0
    source: str = ""
    gpu: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        for name in _RATES:
            if not getattr(self, name) > 0:
                raise OptionError(f"{name}={getattr(self, name)!r} of a machine must be above zero.")


# What times are found by.
_RATES = (
    *("memory", "half", "full", "memory_rate", "pcie", "link", "network", "host_rate", "disk_rate"),
    *("node", "efficiency"),
)


def _gpu(name: str, gib: int, rates: tuple[float, float, float, float, float], source: str) -> Machine:
    half, full, memory, pcie, link = rates
    return Machine(
        name=name,
        memory=gib * 2**30,
        half=half * 1e12,
        full=full * 1e12,
        memory_rate=memory * 1e9,
        pcie=pcie * 1e9,
        link=link * 1e9,
        source=source,
    )


_HALVED = "half of the figures with sparsity"
# name, GiB; 16-bit and fp32 TFLOP/s, then GB/s: memory, and in one direction PCIe and device link
_TABLE = (
    _gpu("V100", 32, (125, 15.7, 900, 16, 150), "NVIDIA V100 data sheet (SXM2)"),
    _gpu("T4", 15, (65, 8.1, 320, 16, 16), "NVIDIA T4 data sheet"),
    _gpu("A100-40", 40, (312, 19.5, 1555, 32, 300), "NVIDIA A100 data sheet (SXM4)"),
    _gpu("A100", 80, (312, 19.5, 2039, 32, 300), "NVIDIA A100 80GB data sheet (SXM4)"),
    _gpu("A10", 22, (125, 31.2, 600, 32, 32), "NVIDIA A10 data sheet"),
    _gpu("L4", 22, (121, 30.3, 300, 32, 32), f"NVIDIA L4 data sheet ({_HALVED})"),
    _gpu("L40S", 44, (362, 91.6, 864, 32, 32), f"NVIDIA L40S data sheet ({_HALVED})"),
    _gpu("RTX3090", 24, (71, 35.6, 936, 32, 32), "NVIDIA Ampere GA102 white paper (fp32 accumulation)"),
    _gpu("RTX4090", 24, (165, 82.6, 1008, 32, 32), "NVIDIA Ada white paper (fp32 accumulation)"),
    _gpu("H100", 80, (989, 67, 3350, 64, 450), f"NVIDIA H100 data sheet (SXM5, {_HALVED})"),
    _gpu("H200", 140, (989, 67, 4800, 64, 450), f"NVIDIA H200 data sheet (SXM, {_HALVED})"),
    _gpu("B200", 179, (2250, 75, 7700, 64, 900), f"NVIDIA DGX B200 data sheet, an eighth ({_HALVED})"),
    _gpu("MI300X", 191, (1307, 163.4, 5300, 64, 448), "AMD Instinct MI300X data sheet"),
)
GPUS = {machine.name: machine for machine in _TABLE}

# Bytes a second in one direction of a device's own port.
NETWORKS = {
    "ethernet-10": 1.25e9,
    "ethernet-25": 3.125e9,
    "ethernet-100": 12.5e9,
    "ethernet-400": 50e9,
    "infiniband-hdr": 25e9,
    "infiniband-ndr": 50e9,
}


def machine(name: str = "H100", network: str | float = "infiniband-ndr", **measured: Any) -> Machine:
    """A machine of the table, with figures of your own in place of its.

    >>> machine("A100", "ethernet-100", node=4).network
    12500000000.0
    """
    found = GPUS.get(name.upper().replace(" ", "")) if isinstance(name, str) else None
    if found is None:
        raise OptionError(
            f"machine={name!r} is not in the table.{did_you_mean(str(name), GPUS)} Known: "
            f"{', '.join(GPUS)}. For another one pass zeroshard.machine.Machine(...) with its figures."
        )
    if isinstance(network, str):
        if network not in NETWORKS:
            raise OptionError(
                f"network={network!r} is not in the table.{did_you_mean(network, NETWORKS)} Known: "
                f"{', '.join(NETWORKS)}; or give bytes a second."
            )
        network = NETWORKS[network]
    known = [field.name for field in fields(Machine)]
    for key in measured:
        if key not in known:
            raise OptionError(
                f"a machine has no figure {key!r}.{did_you_mean(key, known)} Known: {', '.join(known)}."
            )
    return replace(found, network=network, **measured)
