"""In place of torch's wrapper of the same name: the import changes, and the training loop stays.

from zeroshard.parallel import DistributedDataParallel as DDP

model = DDP(model, device_ids=[local_rank], stage=3) optimizer = torch.optim.Adam(model.parameters())
"""

from .wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
