"""Memory of a GPU."""

import torch


def unused_bytes(device: torch.device) -> int:
    """Memory nobody holds: the driver's, and what torch has reserved but not given out."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
