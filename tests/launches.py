"""Launches and waits of every encoder: `python -m tests.launches` counts them and appends a record to nbs/results."""
import time
from multiprocessing import get_context

import torch

from rvnnbook.data.listops import collate_listops, unique_draws
from rvnnbook.lab.records import append, new_record
from rvnnbook.layers import kernels  # noqa: F401     recorded with the other modules
from rvnnbook.origin import code_hashes
from rvnnbook.registry import create_encoder, list_encoders
from tests.pretend_device import PretendDevice

DIM, COUNT, LEAST, MOST = 64, 8, 41, 100


def expressions(least, most, count):
    "The first expressions of the draws with `least` to `most` tokens."
    drawn = [one for one in unique_draws(3000, seed=0) if least <= len(one.tokens) <= most]
    return collate_listops(drawn[:count])


def run_encoder(encoder, x, batch, move):
    "Root and gradient in the token vectors."
    x = move(x).requires_grad_()
    root = encoder(x, move(batch.mask), trees=move(batch.trees), generator=torch.Generator().manual_seed(0)).root
    root.sum().backward()
    return [root, x.grad]


def count_launches(name):
    "Results on the CPU, results on the pretend device, and its counts, of a forward and a backward pass with new weights."
    torch.manual_seed(0)
    batch, encoder = expressions(LEAST, MOST, COUNT), create_encoder(name, dim=DIM).double().eval()
    x = torch.randn(*batch.mask.shape, DIM, dtype=torch.float64)
    expected = run_encoder(encoder, x, batch, lambda tensor: tensor.clone())
    with PretendDevice() as device:
        found = run_encoder(device.upload(encoder), x, batch, device.upload)
        counts = {"launches": device.launches, "waits": device.waits}
        return expected, [device.download(one) for one in found], counts


def counts_of(name):
    return count_launches(name)[-1]


if __name__ == "__main__":
    started, modules, names = time.monotonic(), code_hashes(), list_encoders()
    with get_context("spawn").Pool(2, maxtasksperchild=1) as pool:        # a process for each: nothing is cached
        metrics = dict(zip(names, pool.map(counts_of, names, chunksize=1)))
    asked = {"dim": DIM, "count": COUNT, "least": LEAST, "most": MOST, "slots": create_encoder("ordered_memory", dim=DIM).slots}
    append(new_record("bench_launches", asked, profile="cpu", seed=0, modules=modules, metrics=metrics,
                      rule="counts of one forward and backward pass", wall_s=round(time.monotonic() - started, 1)))
