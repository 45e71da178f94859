"""What a machine can do, in bytes and operations a second. No torch.

The figures of `GPUS` are peak figures of the vendors' public data sheets (dense, without sparsity; links
per direction). What a run reaches is less: `efficiency` is the share of the peak that its matrix products
reach. Figures that you measured are better: `machine("H100", efficiency=0.52, network=40e9)`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from zeroshard.errors import OptionError, did_you_mean
from zeroshard.field_checks import check_fields


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
      takes beside its bytes; `hop`, `node_hop`: those that a shard takes from one device of a ring to the
      next, and to one of another node.
    - `context`: bytes that CUDA and its kernels take of the device before anything of a model is there;
      `channels`: those of NCCL between ranks. Zero unless a limit is the whole of a device (`whole`).
    - `workspace`: bytes that the device's matrix products keep for themselves; `margin`: what its allocator
      takes beside what is asked of it, as a share. Measured (see `measure`), and zero where nothing was,
      unless a limit is the whole of a device.
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
    # This and `node_hop` are what NCCL's tuning model has for rings of LL128 (src/graph/tuning.cc).
    hop: float = 1.9e-6
    node_hop: float = 4.0e-6
    gap: float = 5e-6
    launch: float = 33e-6  # as `drag`: measured on hosts of an H200
    drag: float = 0.3
    margin: float = 0.0
    workspace: int = 0
    context: int = 0
    channels: int = 0
    allocator: str = ""  # the settings that the margin was measured with
    source: str = ""
    gpu: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        for name in _RATES:
            if not getattr(self, name) > 0:
                raise OptionError(f"{name}={getattr(self, name)!r} of a machine must be above zero.")

    def whole(self) -> Machine:
        """The same where a plan may take all of the memory that the device reports, so that what is not for
        tensors counts as well: as measured on an H200, where this has no figures of its own."""
        return replace(
            self,
            context=self.context or _CONTEXT,
            channels=self.channels or _CHANNELS,
            workspace=self.workspace or (_WORKSPACE if self.name in _HOPPER_ON else _SMALL_WORKSPACE),
            margin=self.margin or _MARGIN,
        )


# What times are found by.
_RATES = (
    *("memory", "half", "full", "memory_rate", "pcie", "link", "network", "host_rate", "disk_rate"),
    *("node", "efficiency"),
)


# Measured on an H200 (torch 2.11, CUDA 13.0): after steps of a bf16 layer, and with a communicator of NCCL;
# and what torch's allocator took beside what a stack of blocks asked of it.
_CONTEXT, _CHANNELS, _MARGIN = 768 * 2**20, 560 * 2**20, 0.015
# What cuBLAS keeps for the thread of forward and for that of backward: 32 MiB each from Hopper on (measured),
# else torch's own default of 2 x 4 MiB and 8 x 16 KiB.
_WORKSPACE, _SMALL_WORKSPACE = 2 * 2**25, 2 * (2 * 2**22 + 8 * 2**14)
_HOPPER_ON = ("H100", "H200", "B200")


def _gpu(name: str, gib: float, rates: tuple[float, float, float, float, float], source: str) -> Machine:
    half, full, memory, pcie, link = rates
    return Machine(
        name=name,
        memory=int(gib * 2**30),
        half=half * 1e12,
        full=full * 1e12,
        memory_rate=memory * 1e9,
        pcie=pcie * 1e9,
        link=link * 1e9,
        source=source,
    )


_HALVED = "half of the figures with sparsity"
# name, GiB as torch reports them (the least seen);
# 16-bit and fp32 TFLOP/s, then GB/s: memory, and in one direction PCIe and device link
_TABLE = (
    _gpu("V100", 31.73, (125, 15.7, 900, 16, 150), "NVIDIA V100 data sheet (SXM2)"),
    _gpu("T4", 14.56, (65, 8.1, 320, 16, 16), "NVIDIA T4 data sheet"),
    _gpu("A100-40", 39.39, (312, 19.5, 1555, 32, 300), "NVIDIA A100 data sheet (SXM4)"),
    _gpu("A100", 79.15, (312, 19.5, 2039, 32, 300), "NVIDIA A100 80GB data sheet (SXM4)"),
    _gpu("A10", 21.98, (125, 31.2, 600, 32, 32), "NVIDIA A10 data sheet"),
    _gpu("L4", 21.95, (121, 30.3, 300, 32, 32), f"NVIDIA L4 data sheet ({_HALVED})"),
    _gpu("L40S", 44.39, (362, 91.6, 864, 32, 32), f"NVIDIA L40S data sheet ({_HALVED})"),
    _gpu("RTX3090", 23.56, (71, 35.6, 936, 32, 32), "NVIDIA Ampere GA102 white paper (fp32 accumulation)"),
    _gpu("RTX4090", 23.52, (165, 82.6, 1008, 32, 32), "NVIDIA Ada white paper (fp32 accumulation)"),
    _gpu("H100", 79.1, (989, 67, 3350, 64, 450), f"NVIDIA H100 data sheet (SXM5, {_HALVED})"),
    _gpu("H200", 139.72, (989, 67, 4800, 64, 450), f"NVIDIA H200 data sheet (SXM, {_HALVED})"),
    _gpu("B200", 178.35, (2250, 75, 7700, 64, 900), f"NVIDIA DGX B200 data sheet, an eighth ({_HALVED})"),
    _gpu("MI300X", 191.45, (1307, 163.4, 5300, 64, 448), "AMD Instinct MI300X data sheet"),
)
# Fitted to published runs of Llama 3.1 8 B by torchtitan, eager (docs/planning.md).
FITTED = {"H100": 0.425}
GPUS = {m.name: replace(m, efficiency=FITTED.get(m.name, m.efficiency)) for m in _TABLE}

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
