"""The tests' tensors are small: one thread each is fastest, and several would wait for one another on a busy machine."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the programs that the tests start

import torch  # noqa: E402

torch.set_num_threads(1)
