"""Train the small router of the chapter on the Neural Data Router, and write its weights.

About five minutes of one core: python nbs/results/train_router.py
Expressions of MAX and MIN, at first flat ones, then two and three levels; 20 tokens at most.
"""
import math
import random
from pathlib import Path
from time import process_time

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from rvnnbook.encoders.ndr import NDR

VOCABULARY = [*"0123456789", "[MAX", "[MIN", "]"]
DIM, HEADS, LAYERS, STEPS, LONGEST = 48, 4, 6, 8000, 20


def draw(rng, depth):
    "Tokens and value of an expression of at most this depth."
    operator = rng.choice(("[MAX", "[MIN"))
    tokens, values = [operator], []
    for _ in range(rng.randint(2, 4)):
        if depth > 1 and rng.random() < .4:
            part, value = draw(rng, depth - 1)
        else:
            value = rng.randrange(10)
            part = [str(value)]
        tokens += part
        values.append(value)
    return tokens + ["]"], (max if operator == "[MAX" else min)(values)


def draw_batch(rng, depth, count, longest):
    "Token ids, mask and values of a batch."
    drawn = []
    while len(drawn) < count:
        tokens, value = draw(rng, rng.randint(1, depth))
        if len(tokens) <= longest:
            drawn.append((tokens, value))
    length = max(len(tokens) for tokens, _ in drawn)
    ids = torch.zeros(count, length, dtype=torch.long)
    mask = torch.zeros(count, length, dtype=torch.bool)
    for row, (tokens, _) in enumerate(drawn):
        ids[row, :len(tokens)] = torch.tensor([VOCABULARY.index(token) for token in tokens])
        mask[row, :len(tokens)] = True
    return ids, mask, torch.tensor([value for _, value in drawn])


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    encoder = NDR(DIM, layers=LAYERS, heads=HEADS, hidden=DIM, readout="end",
                  gate_bias=-2.)
    embedding, head = nn.Embedding(len(VOCABULARY), DIM), nn.Linear(DIM, 10)
    parameters = [p for part in (encoder, embedding, head) for p in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=1e-2)
    rng, start = random.Random(0), process_time()
    for step in range(STEPS):
        depth = 1 if step < .15 * STEPS else 2 if step < .4 * STEPS else 3
        rate = 3e-3 * min(1, (step + 1) / 100) * (.5 + .5 * math.cos(math.pi * step / STEPS))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, mask, values = draw_batch(rng, depth, 64, {1: 9, 2: 13, 3: LONGEST}[depth])
        logits = head(encoder(embedding(ids), mask).root)
        loss = F.cross_entropy(logits, values)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.)
        optimizer.step()
        if step % 500 == 499:
            accuracy = (logits.argmax(-1) == values).float().mean()
            print(step + 1, f"loss {loss.item():.3f} accuracy {accuracy:.2f}", flush=True)
    weights = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    weights |= {"embedding.weight": embedding.weight, "head.weight": head.weight,
                "head.bias": head.bias}
    settings = {"dim": DIM, "heads": HEADS, "layers": LAYERS, "steps": STEPS, "longest": LONGEST,
                "minutes": round((process_time() - start) / 60, 1)}
    save_file({name: value.detach().contiguous() for name, value in weights.items()},
              Path(__file__).with_name("router.safetensors"),
              {name: str(value) for name, value in settings.items()})


if __name__ == "__main__":
    main()
