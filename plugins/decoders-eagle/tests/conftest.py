"""Sets one thread for torch, which is fastest for the kit's tiny models."""

import torch

torch.set_num_threads(1)
