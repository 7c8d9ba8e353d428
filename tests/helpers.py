"What several test files draw and compare."
import ast
import importlib
import json
import os
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.testing import assert_close

from rvnnbook.core import length_mask, pad_batch
from rvnnbook.layers.tree_search import encode_with_search

DIM = 6                                      # width in the tests of searches


def published(folder, *files):
    "The folder with one of these published files: in the data folder, or in shared/data beside the checkout."
    places = [os.environ["RVNNBOOK_DATA"]] if os.environ.get("RVNNBOOK_DATA") else []
    for place in (*places, Path(__file__).parents[2] / "shared" / "data"):
        if any((Path(place) / folder / file).exists() for file in files):
            return Path(place) / folder
    pytest.skip(f"{files[0]} is neither in $RVNNBOOK_DATA/{folder} nor in shared/data/{folder} beside the checkout")


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


def recorded_draws(draws):
    "Gives the alignment of each level of chunks but the last these draws, (L, K - 1) each."
    draws = iter(draws)
    return patch.object(torch, "multinomial", lambda *_, **__: next(draws))


def assert_same(found, expected, tolerance=1e-9):
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.isfinite().all()
        assert_close(mine, theirs, rtol=0, atol=tolerance * max(1.0, float(theirs.detach().abs().max())))


def batch(lengths, dim=3, seed=0):
    "Token vectors, NaN on padding, and their mask."
    mask = length_mask(torch.tensor(lengths))
    x = torch.randn(*mask.shape, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(mask[..., None], x, torch.nan), mask


def assert_equal_sentence_by_sentence(encoder, lengths, seed, read):
    "Roots, states and gradients of a batch with NaN on padding, and of `read(trace, b, sentence)`: states of one."
    x, mask = batch(lengths, seed=seed)
    x.requires_grad_()
    out = encoder(x, mask, trace=True)
    states = [read(out.trace, b, x[b, :n]) for b, n in enumerate(lengths)]
    roots, inputs = torch.stack([rows.mean(0) for rows in states]), (x, *encoder.parameters())
    assert_close(out.root, roots)
    assert_close(out.states[mask], torch.cat(states))
    assert not out.states[~mask].any()
    for mine, theirs in zip(slopes(out.root, inputs), slopes(roots, inputs), strict=True):
        assert_close(mine, theirs, rtol=0, atol=1e-9)
    return out, mask


def slopes(found, inputs, seed=0):
    "Gradients of the product with fixed numbers."
    push = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed), dtype=found.dtype)
    return torch.autograd.grad((found * push).sum(), inputs, materialize_grads=True)


def close(found, expected, tolerance):
    assert found.shape == expected.shape and found.isfinite().all()
    assert (found - expected).abs().max() <= tolerance * max(1.0, float(expected.detach().abs().max()))


def padded_sentences(x, lengths):
    "The sentences of a batch as leaves of the graph, and a batch made of them with NaN on padding."
    inputs = [row[:n].clone().requires_grad_() for row, n in zip(x, lengths, strict=True)]
    padding = [row.new_full((max(lengths) - len(row), x.shape[2]), torch.nan) for row in inputs]
    return inputs, torch.stack([torch.cat(parts) for parts in zip(inputs, padding)])


def assert_equal_gradients(found, expected, inputs, mine, theirs):
    "Gradients of two models in the sentences and in every parameter; returns those of the first by parameter."
    mine, theirs = dict(mine), dict(theirs)
    names = sorted(mine)
    assert names == sorted(theirs)
    ours = slopes(found, [*inputs, *(mine[name] for name in names)])
    wanted = slopes(expected, [*inputs, *(theirs[name] for name in names)])
    for one, other in zip(ours, wanted, strict=True):
        close(one, other, 1e-8)
    return dict(zip(names, ours[len(inputs):]))


def assert_equal_in_a_padded_batch(reference, encoder, lengths, dim):
    "Roots and gradients of a reference, sentence by sentence, and of the encoder."
    x, mask = batch(lengths, dim)
    inputs, padded = padded_sentences(x, lengths)
    expected = encoder(padded, mask).root
    found = torch.stack([reference(row)[0] for row in inputs])
    close(found, expected, 1e-9)
    assert_equal_gradients(found, expected, inputs, reference.named_parameters(), encoder.named_parameters())


def assert_equal_batch_gradients(model, encoder, found, expected, leaves, x):
    "Gradients of a model of one sentence and of the encoder of a batch, in the vectors and in every parameter."
    mine, theirs = dict(model.named_parameters()), dict(encoder.named_parameters())
    assert mine.keys() == theirs.keys()
    ours = slopes(found, [*leaves, *mine.values()])
    wanted, *rest = slopes(expected, [x, *(theirs[name] for name in mine)])
    for row, gradient in enumerate(ours[:len(leaves)]):
        assert_close(wanted[row, :len(gradient)], gradient, rtol=0, atol=1e-8)
    for one, other in zip(ours[len(leaves):], rest, strict=True):
        assert_close(one, other, rtol=0, atol=1e-8)


def imported_packages(module):
    "The packages that a module imports, anywhere in it; of a neighbor the module's name."
    nodes = list(ast.walk(ast.parse(Path(module.__file__).read_text())))
    names = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def on_page(page, *names):
    "Functions that a page of the book defines for its lessons, among the names of its module and of the imports that they use."
    cells = json.loads((Path(__file__).parents[1] / "nbs" / f"{page}.ipynb").read_text())["cells"]
    nodes = [node for cell in cells if cell["cell_type"] == "code" for node in ast.parse("".join(cell["source"])).body]
    made = [node for node in nodes if getattr(node, "name", None) in names]
    used = {word.id for node in made for word in ast.walk(node) if isinstance(word, ast.Name)}
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))
               and used & {name.asname or name.name for name in node.names}]
    module = re.search(r"#\| default_exp (\S+)", "".join(cells[0]["source"]))[1]
    found = dict(vars(importlib.import_module(f"rvnnbook.{module}")))
    exec(compile(ast.Module([*imports, *made], []), page, "exec"), found)
    return [found[name] for name in names]


def shake(module, seed=0, by=0.4):
    "Parameters that start at zero or one must not hide."
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return module


def randomize_norms(encoder, scorer, factor):
    "Layer norms with weights and biases that show, and the parameters of a scorer times a factor."
    with torch.no_grad():
        for module in encoder.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.weight.uniform_(0.5, 2)
                module.bias.normal_()
        for parameter in scorer.parameters():
            parameter *= factor
    return encoder


def without(folder, *names):
    "A PYTHONPATH under which these cannot be imported, in any process."
    for name in names:
        (folder / "hidden").mkdir(exist_ok=True)
        (folder / "hidden" / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r}, name={name!r})")
    return os.pathsep.join([str(folder / "hidden"), *filter(None, [os.environ.get("PYTHONPATH")])])


JUPYTER = "papermill", "nbclient", "ipykernel", "IPython", "matplotlib", "ipywidgets"
