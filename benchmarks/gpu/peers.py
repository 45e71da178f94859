"""The other systems of the GPU tables, each set up as its documentation says: `make(args, batch)` gives the
step, the norms it reports, and its statistics, as in `one.py`.

- `fsdp2`, `fsdp2-offload`: torch's fully_shard, bf16 compute, fp32 reduction and master; its CPU offload.
- `ds2-offload`, `ds3-offload`: DeepSpeed's ZeRO with the optimizer on the host (DeepSpeedCPUAdam).
- `ao-offload`, `ao-offload-fp32`: torchao's CPUOffloadOptimizer with gradients offloaded. It cannot clip. The
  first keeps weights and state in bf16; the second in fp32, computing under autocast.
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

LR, CLIP = 1e-4, 1.0


def none():
    return {}


def torch_loop(model, optimizer, args, batch, clip=True, autocast=False, quiet=nullcontext):
    """The plain loop; without `clip` for an optimizer that has taken the gradients away. All but the last
    micro-batch of a step go backward inside `quiet()`."""
    norms = []

    def step(i):
        total = 0.0
        for k in range(args.accum):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = model(*batch(i * args.accum + k))
            with quiet() if k < args.accum - 1 else nullcontext():
                (loss / args.accum).backward()
            total += loss.detach() / args.accum
        if clip:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step, norms, none


def fsdp2(args, batch, build):
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    away = args.system.endswith("offload")
    dist.init_process_group(
        "cuda:nccl,cpu:gloo", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    model = build(args.size, torch.float32, args.device)
    policy = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if away else OffloadPolicy(),
    }
    for block in model.blocks:
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    if away:
        model.cpu()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return torch_loop(model, optimizer, args, batch)


def torchao(args, batch, build):
    from torchao.optim import CPUOffloadOptimizer

    wide = args.system.endswith("fp32")
    model = build(args.size, torch.float32 if wide else torch.bfloat16, args.device)
    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, lr=LR
    )
    return torch_loop(model, optimizer, args, batch, clip=False, autocast=wide)


def deepspeed(args, batch, build):
    from llama import LM

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = "0"  # any free one
    import deepspeed as ds

    stage = int(args.system[2])
    config = {
        "train_micro_batch_size_per_gpu": args.mbs,
        "gradient_accumulation_steps": args.accum,
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
    }
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    ds.init_distributed("nccl", auto_mpi_discovery=False)
    if stage == 3:
        torch.manual_seed(0)
        with ds.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
            model = LM(args.size)
    else:
        model = build(args.size, torch.bfloat16, args.device)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    norms = []

    def step(i):
        total = 0.0
        for k in range(args.accum):
            loss = engine(*batch(i * args.accum + k))
            engine.backward(loss)
            engine.step()
            total += loss.detach() / args.accum
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        return total

    return step, norms, none


MAKERS = {
    "fsdp2": fsdp2,
    "fsdp2-offload": fsdp2,
    "ao-offload": torchao,
    "ao-offload-fp32": torchao,
    "ds2-offload": deepspeed,
    "ds3-offload": deepspeed,
}
