"""A training script of which one rank goes astray: `failing.py SCENARIO TRANSPORT STAGE`."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard as zs

SCENARIO, TRANSPORT, STAGE = sys.argv[1], sys.argv[2], int(sys.argv[3])
RANK = int(os.environ["RANK"])
ASTRAY = RANK == 1
AT = 2  # the step in which it happens
DEVICE = "cuda" if TRANSPORT == "nccl" else "cpu"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.down(torch.tanh(self.up(x)))
        if ASTRAY and self.step == AT:
            if SCENARIO == "raise in forward":
                raise ValueError("the data were bad")
            if SCENARIO in ("raise in backward", "killed in backward"):
                out.register_hook(self.in_backward)
        return out

    @staticmethod
    def in_backward(grad: Tensor) -> None:
        if SCENARIO == "killed in backward":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the gradient was bad")


def misbehave(run: zs.Run) -> None:
    """Between two steps."""
    if SCENARIO == "raise between steps":
        raise ValueError("the disk was full")
    if SCENARIO == "exit between steps":
        os._exit(3)
    if SCENARIO == "gathered alone":
        with run.gathered():
            pass
    if SCENARIO == "ends early":
        sys.exit(0)
    if SCENARIO == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)
    if SCENARIO == "asleep":
        time.sleep(1000)
    if SCENARIO == "slow":
        time.sleep(8)


def cross(others: dist.ProcessGroup) -> None:
    """All ranks call a collective of torch, and rank 1 another one."""
    if SCENARIO == "another group":
        dist.all_reduce(torch.ones(3), group=others if ASTRAY else None)
    elif ASTRAY:
        dist.all_gather([torch.ones(3) for _ in range(dist.get_world_size())], torch.ones(3))
    else:
        dist.all_reduce(torch.ones(3))


def main() -> None:
    print(f"pid {os.getpid()}", flush=True)
    torch.manual_seed(0)
    if TRANSPORT == "nccl":  # on one GPU, which NCCL allows between hosts
        os.environ |= {"NCCL_HOSTID": f"rank {RANK}", "NCCL_SOCKET_IFNAME": "lo"}
        device = torch.device("cuda", RANK % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    model = nn.Sequential(Block(), Block(), Block()).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if ASTRAY and SCENARIO == "raise before shard":
        raise ValueError("no such file")
    stage = {"another stage": 1, "refused": 7}.get(SCENARIO, STAGE) if ASTRAY else STAGE
    node = {"ranks_per_node": 2} if TRANSPORT == "nodes" else {}
    run = zs.shard(model, optimizer, stage=stage, transport=TRANSPORT, **node)
    others = dist.new_group()
    dist.barrier(others)
    for step in range(5):
        for block in model:
            block.step = step
        loss = model(torch.randn(4, 8).to(DEVICE)).pow(2).mean()
        if not (ASTRAY and step == AT and SCENARIO == "skips a backward"):
            loss.backward()
        if not (ASTRAY and step == AT and SCENARIO == "skips a step"):
            optimizer.step()
        optimizer.zero_grad()
        if step == AT and SCENARIO.startswith("another ") and SCENARIO != "another stage":
            cross(others)
        if ASTRAY and step == AT:
            misbehave(run)
    run.close()
    print(f"done {RANK}", flush=True)


main()
