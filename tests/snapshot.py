"""Seeded outputs, losses and gradients of every encoder and task: the safety net under renames.

`python -m tests.snapshot` compares with `tests/snapshot.json` bit for bit, one line a case, exit status 1 if any differs;
`python -m tests.snapshot --write [NAME...]` records the cases anew, which only a change of results may need."""
import json
import sys
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from rvnnbook.core import simple_tree
from rvnnbook.registry import create_encoder, list_encoders

FILE = Path(__file__).with_name("snapshot.json")
LENGTHS = [9, 1, 6, 2]
OPTIONS = {"ordered_memory": {"slots": 5}, "rir_om": {}, "s4d": {"layers": 2}, "mega": {"layers": 2}, "ndr": {"layers": 4},
           "ndr_halt": {"layers": 4}, "ndr_act": {"layers": 4}}


def tensors_in(value, name=""):
    "All tensors in nested containers, with the path to each."
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from tensors_in(part, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for place, part in enumerate(value):
            yield from tensors_in(part, f"{name}.{place}")


def numbers(tensor):
    "A hash of all bits, and a few sums that survive another processor's rounding."
    tensor = tensor.detach().double().contiguous().flatten()
    ramp = torch.linspace(-1, 1, len(tensor), dtype=torch.float64)
    return {"bits": blake2b(tensor.numpy().tobytes(), digest_size=8).hexdigest(),
            "sums": [float(tensor.sum()), float(tensor.abs().sum()), float((ramp * tensor).sum())]}


def batch():
    "Four sentences of different lengths with balanced trees."
    torch.manual_seed(7)
    x = torch.randn(len(LENGTHS), max(LENGTHS), 8, dtype=torch.float64)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    trees = torch.zeros(mask.shape, dtype=torch.int64)
    for row, length in zip(trees, LENGTHS):
        row[:length] = torch.tensor(simple_tree("balanced", length))
    return x, mask, trees


def encoder_case(name, training):
    "One encoder with new weights: root, states, loss, trace, and the gradients of their sum."
    x, mask, trees = batch()
    torch.manual_seed(3)
    options = {k: v for k, v in OPTIONS.get(name, {}).items()}
    encoder = create_encoder(name, dim=8, **options).double().train(training)
    given = trees if name in ("rvnn", "tree_lstm") else None
    x.requires_grad_()
    out = encoder(x, mask, trees=given, generator=torch.Generator().manual_seed(5), trace=True)
    target = (out.root * torch.linspace(-1, 1, 8, dtype=torch.float64)).sum() + out.loss
    if out.states is not None:
        target = target + (out.states * .1).tanh().sum()
    target.backward()
    found = {f"gradient.{key}": p.grad for key, p in encoder.named_parameters() if p.grad is not None}
    found |= {"root": out.root, "gradient.x": x.grad, "loss": torch.as_tensor(out.loss, dtype=torch.float64)}
    found |= {} if out.states is None else {"states": out.states}
    found |= {f"trace{key}": value for key, value in tensors_in(out.trace)}
    found = {key: numbers(value) for key, value in sorted(found.items())}
    return {key: value if key in ("root", "loss", "gradient.x") else {"bits": value["bits"]} for key, value in found.items()}


def cases():
    "Name of a case -> what computes it."
    for name in list_encoders():
        for training in (False, True):
            yield f"{name}, {'train' if training else 'eval'}", lambda name=name, training=training: encoder_case(name, training)


def same_bits(now, then):
    return {key: value["bits"] for key, value in now.items()} == {key: value["bits"] for key, value in then.items()}


def main(words):
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    failed = 0
    for name, compute in cases():
        now = compute()
        if "--write" in words and (len(words) == 1 or name in words):
            known[name] = now
        ok = name in known and same_bits(now, known[name])
        failed += not ok
        if not ok:
            then = known.get(name, {})
            print(name, "differs in", [k for k in sorted(now.keys() | then.keys()) if now.get(k, {}).get("bits") != then.get(k, {}).get("bits")][:6])
    if "--write" in words:
        FILE.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")
    print(f"{failed} of {len(list(cases()))} cases differ")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
