"""The kit's models are tiny: one thread each is fastest, and on a busy machine by far."""

import torch

torch.set_num_threads(1)
