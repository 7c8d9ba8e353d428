"What several test files draw and compare."
import os

import torch
from torch.testing import assert_close

from rvnnbook.core import length_mask, pad_batch
from rvnnbook.layers.tree_search import encode_with_search

DIM = 6                                      # width in the tests of searches


def batch_of(sizes, seed):
    "Sentences of these lengths, padded, and their mask."
    generator = torch.Generator().manual_seed(seed)
    return pad_batch([torch.randn(n, DIM, generator=generator, dtype=torch.float64) for n in sizes])


def answers(encoder, x, mask, form, seed=0):
    "Root and the gradients of its product with fixed numbers, in the token vectors and in every parameter."
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    root = encode_with_search(encoder, x, mask, form, torch.Generator().manual_seed(seed)).root
    weight = torch.linspace(-1, 1, root.numel(), dtype=root.dtype).view_as(root)
    return root, *torch.autograd.grad((root * weight).sum(), [x, *encoder.parameters()], materialize_grads=True)


def assert_same(found, expected, tolerance=1e-9):
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.isfinite().all()
        assert_close(mine, theirs, rtol=0, atol=tolerance * max(1.0, float(theirs.detach().abs().max())))


def batch(lengths, dim=3, seed=0):
    "Token vectors, NaN on padding, and their mask."
    mask = length_mask(torch.tensor(lengths))
    x = torch.randn(*mask.shape, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(mask[..., None], x, torch.nan), mask


def slopes(found, inputs, seed=0):
    "Gradients of the product with fixed numbers."
    push = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed), dtype=found.dtype)
    return torch.autograd.grad((found * push).sum(), inputs, materialize_grads=True)


def without(folder, *names):
    "A PYTHONPATH under which these cannot be imported, in any process."
    for name in names:
        (folder / "hidden").mkdir(exist_ok=True)
        (folder / "hidden" / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r}, name={name!r})")
    return os.pathsep.join([str(folder / "hidden"), *filter(None, [os.environ.get("PYTHONPATH")])])


JUPYTER = "papermill", "nbclient", "ipykernel", "IPython", "matplotlib", "ipywidgets"
