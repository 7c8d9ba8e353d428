"""Check golden files: `python -m tests.golden FILE...`, one line a file, exit status 1 if any fails.

A golden file holds inputs, parameters and outputs recorded from the papers' published code (safetensors, the configuration in
its metadata). `build` makes our module for a model and a configuration, `evaluate` runs it on the inputs."""
import json
import sys
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F

from rvnnbook.core import EncoderOutput
from rvnnbook.encoders.balanced import BalancedTree
from rvnnbook.encoders.crvnn import CRvNN, halt_penalty
from rvnnbook.encoders.beam_tree import BeamTree
from rvnnbook.encoders.efficient_beam import EfficientBeam
from rvnnbook.encoders.mega import MEGA
from rvnnbook.encoders.ndr import NDR
from rvnnbook.encoders.ordered_memory import OrderedMemory
from rvnnbook.encoders.recurrent_grc import RecurrentGRC
from rvnnbook.encoders.s4d_stack import S4DStack
from rvnnbook.encoders.rir import RIR
from rvnnbook.encoders.rir_beam import RIRBeam, _cut_level, nested_search
from rvnnbook.literal import beam_step, crvnn_literal
from rvnnbook.layers.attention import geometric_attention
from rvnnbook.layers.cells import ACTIVATIONS
from rvnnbook.layers.neighbors import neighbor_weights
from rvnnbook.layers.s4d import S4DLayer
from rvnnbook.layers.topk import EPSILON, choice_matrix, one_soft
from rvnnbook.layers.tree_search import propose_pairs, prune_beam, search_and_replay
from rvnnbook.tasks.classify import Classifier
from rvnnbook.tasks.pair import PairClassifier, pair_up
from tests.helpers import on_page, recorded_draws

ordered_memory_literal = on_page(
    "implementations/ordered_memory", "slot_sums", "memory_step", "slot_shares", "match_slots", "ordered_memory_literal")[-1]
stochastic_topk, = on_page("topk", "stochastic_topk")

OUTPUTS, GRADIENTS = 1e-5, 1e-4        # largest absolute error; largest error as a share of the largest gradient


class Neighbors(nn.Module):
    "The two neighbor matrices of a batch of existences."
    def forward(self, exists):
        return {side: neighbor_weights(exists, side) for side in ("left", "right")}


class MaskedMean(nn.Module):
    "Stands in for an encoder in the files that test the heads alone."
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x, mask, **_):
        return EncoderOutput((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def topk(k, logits, mask):
    "The choice of the k best of some places, and the logarithms of their shares."
    shares, picks = stochastic_topk(logits, mask, k)
    return {"out.soft_scores": shares, "out.select_idx": picks.int(), "out.select_mask": F.one_hot(picks, mask.shape[1]).float(),
            "out.log_scores": (shares.gather(1, picks) + EPSILON).log()}


def attention(normalize, logits, mask):
    "Weights of the nearest match."
    return {"out.attention": geometric_attention(logits, mask, normalize)}


class OfLogits(nn.Module):
    "What a function computes from logits and a mask; the last output has a recorded gradient."
    def __init__(self, compute, option):
        super().__init__()
        self.forward = partial(compute, option)


class Selection(nn.Module):
    "One selection step of a beam: which candidates fill the slots, and the nodes that they leave."
    def __init__(self, beam, dim, choose):
        super().__init__()
        self.beam, self.choose, self.scorer = beam, choose, nn.ModuleList([nn.Linear(dim, 1)])

    def forward(self, states, parents, pairs, scores, taken):
        scores, logits = scores.masked_fill(~taken, -torch.inf), self.scorer[0](parents).squeeze(-1)
        after, kept, *_ = beam_step(states, scores, parents, logits, pairs, self.beam, self.choose)
        candidates, picks = propose_pairs(scores, logits, pairs, self.beam)
        origin = prune_beam(candidates, self.beam, self.choose)[0].unflatten(-1, picks.shape[1:]).sum(-1)
        return {"out.new_state": after, "out.old_state": torch.einsum("bsk,bkmd->bsmd", origin, states), "out.beam_scores": kept,
                "out.beam_mask": (kept > -torch.inf).float()}


class PreChunk(nn.Module):
    "The layer before the chunks, under the name that it has in an encoder; with the published gradient block and without."
    def __init__(self, dim, state_size, norm):
        super().__init__()
        self.s4d = S4DLayer(dim, state_size, norm)

    def forward(self, x, mask, w):
        found = {}
        for key, frozen in (("grad.x", True), ("grad.x_full", False)):
            self.s4d.freeze_backward, x = frozen, x.clone().requires_grad_()
            found["out.root"] = self.s4d(x, mask)
            found[key], = torch.autograd.grad((found["out.root"] * w).sum(), x)
        return found


class SharedNorm(CRvNN):
    "CRvNN with one layer norm for leaves and parents, as in the code that came with its paper."
    def __init__(self, dim, cell="grc", **options):
        if cell != "grc":
            raise ValueError("a shared norm belongs to the GRC; the Tree-LSTM cell has no norm")
        super().__init__(dim, cell, **options)
        self.norm, self.leaf_norm, self.grc.norm = nn.LayerNorm(dim), nn.Identity(), nn.Identity()

    def leaves(self, x):
        return self.norm(super().leaves(x))

    @property
    def cell(self):
        return lambda left, right: self.norm(self.grc(left, right))


class PublishedRounds(CRvNN):
    "Takes as many rounds as the published rule gives, which depend on padding."
    def forward(self, x, mask, **options):
        self.granted = crvnn_literal(self, x, mask)[2]
        return super().forward(x, mask, **options)

    def max_rounds(self, mask):
        return self.granted


def build_crvnn(model: str, config: dict, case: str) -> CRvNN:
    original = model == "crvnn_original"
    cell = {"gelu": "gelu_tanh", "relu": "relu"}[config["hidden_activation"]] if original else "gelu"
    encoder = (SharedNorm if original else CRvNN)(
        config["hidden_size"], hidden=config.get("cell_hidden_size") or config["cell_size"], activation=cell,
        threshold=config["stop_threshold"], transition_dim=config["small_d"] if config.get("recurrent_momentum") else 0,
        modulation="none" if config.get("no_modulation") else "exponentials", penalty=config.get("entropy_gamma", 0.0))
    encoder.scorer.activation = ACTIVATIONS["gelu_tanh" if original else "gelu"]
    encoder.needs_literal = case == "batch_max_quirk"            # recorded with a defect of the published code
    return encoder


def evaluate_crvnn(module: CRvNN, inputs: dict, mask: torch.Tensor) -> dict:
    """The encoder takes the numbers of rounds that the published rule gives, which depend on padding. In the first code sentences
    that have halted pay no penalty."""
    x = inputs["x"].clone().requires_grad_()
    states, exists, rounds = crvnn_literal(module, x, mask)
    unhalted = (exists > module.threshold).sum(1) > 1
    if not module.needs_literal:
        module.max_rounds = lambda mask: rounds
        out = module(x, mask, trace=True)
        states, exists = out.states, out.trace["existence"][-1]
        unhalted = (exists >= module.threshold).sum(1) > 1 if isinstance(module, SharedNorm) else torch.ones_like(unhalted)
    root, nats = states[torch.arange(len(x)), mask.sum(1) - 1], halt_penalty(exists, mask)
    return {"out.root": root, "out.sequence": states, "out.halting_steps": rounds, "out.final_exist_probs": exists,
            "out.nll_before_termination_mask": nats, "out.halt_penalty": module.penalty * nats * unhalted,
            "grad.x": torch.autograd.grad((root * inputs["w"]).sum(), x)[0]}


def build_beam_tree(model: str, config: dict) -> BeamTree | EfficientBeam:
    if model == "ebt_grc":
        encoder = EfficientBeam(config["hidden_size"], config["beam_size"], score_dim=config["scorer_dim"],
                                hidden=config["cell_size"], dropout=config["dropout"])
        encoder.recorded_in_training = False
        return encoder
    encoder = BeamTree(config["hidden_size"], config["beam_size"], hidden=config["cell_size"], dropout=config["dropout"],
                         soft=model == "bt_grc_os")
    encoder.recorded_in_training = config["mode"] != "eval"
    return encoder


def evaluate_beam(module: nn.Module, inputs: dict, mask: torch.Tensor) -> dict:
    "Root and gradient, and the hypotheses at the end; no score and no weight where a slot is empty."
    x = inputs["x"].clone().requires_grad_()
    out = module.train(module.recorded_in_training)(x, mask, trace=True)
    scores, weights = out.trace["scores"], out.trace["weights"]
    return {"out.root": out.root, "out.beam_scores": scores, "out.beam_weights": weights, "out.beam_states": out.trace["roots"],
            "out.beam_mask": (scores > -torch.inf).float(), "grad.x": torch.autograd.grad((out.root * inputs["w"]).sum(), x)[0]}


def build_rir_beam(config: dict) -> RIRBeam:
    return RIRBeam(config["hidden_size"], config["beam_size"], config["model_chunk_size"], "beam" if config["RBA"] else "string",
                   "nested" if config["chunk_mode_inference"] else "flat", "late", "s4d" if config["pre_SSM"] else None,
                   hidden=config["cell_size"], dropout=config["dropout"])


def read_alone(module: RIRBeam, x: torch.Tensor, inputs: dict, mask: torch.Tensor) -> tuple:
    """Leaves, and final scores and roots of sentences that are read one by one. The published code takes every sentence through the levels
    of the longest one and draws anew after each of them: here they get their recorded draws, and are drawn anew as often as there."""
    leaves, found, counts, width = module.leaf_norm(module.leaf(module.s4d(x, mask) if module.s4d else x)), [], [], mask.shape[1]
    while width > 1 and "rba_idx.0" in inputs:
        counts.append(int(_cut_level(torch.tensor([width]), module.arity, "late")[1]))
        width = counts[-1]
    draws = [inputs[f"rba_idx.{level}"].long().view(len(x), count, -1) for level, count in enumerate(counts[:-1])]
    for row, length in enumerate(mask.sum(1)):
        given, widths = [], length[None]
        for drawn in draws:
            widths = _cut_level(widths, module.arity, "late")[1]
            given.append(drawn[row, :int(widths)])
        search = nested_search if module.inference == "nested" else search_and_replay
        with recorded_draws(given):
            states, scores, _ = search(module, leaves[row:row + 1, :length], length[None])
        for drawn in given:
            if len(drawn) == 1:                            # the sentence had one node left, and another one had more
                slots = torch.cat([torch.zeros(1, dtype=torch.int64), drawn[0]])
                states, scores = states[:, slots], scores[:, slots]
        found.append((scores[0], scores[0].softmax(-1) @ states[0]))
    return leaves, *(torch.stack(column) for column in zip(*found))


def evaluate_rir_beam(module: RIRBeam, inputs: dict, mask: torch.Tensor) -> dict:
    "Root and final hypotheses; the gradient with and without what the layer in front hears from the right."
    x, found = inputs["x"].clone().requires_grad_(), {}
    for name, frozen in (("grad.x_full", False), ("grad.x", True)):
        if module.s4d:
            module.s4d.freeze_backward = frozen
        leaves, scores, roots = read_alone(module, x, inputs, mask)
        found[name], = torch.autograd.grad((roots * inputs["w"]).sum(), x)
    return found | {"out.root": roots, "out.sequence": leaves, "out.beam_scores": scores, "out.beam_weights": scores.softmax(-1),
                    "out.beam_mask": (scores > -torch.inf).float()}


def build_ndr(config: dict) -> NDR:
    router = NDR(config["d_model"], config["n_layers"], heads=config["nhead"], hidden=config["dim_feedforward_effective"],
                 scalar_gate=config["scalar_gate"], gate_dropout=config["p_gate_drop"], dropout=config["dropout"], readout="last")
    router.attn.normalize = config["normalize_score"]
    return router


def evaluate_ndr(module: NDR, inputs: dict, mask: torch.Tensor) -> dict:
    "Root and gradient, and the states after one layer and after all; the root is read at the last token, and at the first beside it."
    x = inputs["x"].clone().requires_grad_()
    out = module(x, mask)
    return {"out.root": out.root, "out.root_first": out.states[:, 0], "out.sequence": out.states,
            "out.after_layer_1": module.layer(x, mask)[0],
            "grad.x": torch.autograd.grad((out.root * inputs["w"]).sum(), x)[0]}


def norm_place(norm: str, before: bool) -> str:
    "Where a layer of the published code has its layer norm."
    return "none" if norm == "skip" else "pre" if before else "post"


def evaluate_states(module: nn.Module, inputs: dict, mask: torch.Tensor) -> dict:
    "Root, states and gradient."
    x = inputs["x"].clone().requires_grad_()
    out = module(x, mask)
    return {"out.root": out.root, "out.sequence": out.states, "grad.x": torch.autograd.grad((out.root * inputs["w"]).sum(), x)[0]}


def build_rir(model: str, config: dict) -> RIR:
    "Published code folds from zeros, cuts late, and has no transition features in its CRvNN."
    inner = model.removeprefix("rir_")
    options = {"grc": {"start": "zero"}, "crvnn": {"transition_dim": 0, "modulation": "exponentials", "threshold": 0.1},
               "om": {"slots": config.get("memory_slots"), "activation": "gelu"}}
    encoder = RIR(config["hidden_size"], inner, config["model_chunk_size"], rule="late", hidden=config["cell_size"], dropout=config["dropout"],
                  inference="nested" if config["chunk_mode_inference"] else "flat", options=options[inner])
    if inner == "crvnn":
        encoder.inner.__class__ = PublishedRounds
    return encoder


def evaluate_rir(module: RIR, inputs: dict, mask: torch.Tensor) -> dict:
    "Root, what the layer before the cut gives, and gradients: as in published code, and with the half that reads from right to left."
    found = {}
    for name, frozen in (("grad.x", True), ("grad.x_full", False)):
        x = inputs["x"].clone().requires_grad_()
        module.s4d.freeze_backward = frozen
        found |= {"out.sequence": module.s4d(x, mask), "out.root": module(x, mask).root}
        found[name], = torch.autograd.grad((found["out.root"] * inputs["w"]).sum(), x)
    return found
def build_memory(config: dict) -> nn.ModuleDict:
    "The two codes have two names for the same options."
    dim, slots = (config.get(name) or config[other] for name, other in (("hidden_size", "slot_size"), ("memory_slots", "nslot")))
    return nn.ModuleDict({"om": OrderedMemory(dim, slots, hidden=config.get("cell_size"), activation=config["activation"],
                                              dropout=config["dropout"])})


def evaluate_memory(memory: OrderedMemory, inputs: dict, mask: torch.Tensor) -> dict:
    "A sentence behind padding on the left begins on an empty slot: that is the literal form's, with the tokens put first."
    x = inputs["x"].clone().requires_grad_()
    lengths, sentences = mask.sum(1), torch.arange(len(x))
    if mask[:, 0].all():
        out = memory(x, mask, trace=True)
        root, found = out.root, {"out.sequence": out.states, "out.probs": out.trace["slots"]}
    else:
        places = (torch.arange(mask.shape[1]) + mask.shape[1] - lengths[:, None]) % mask.shape[1]      # tokens first
        back = places.argsort(1)
        first = x.gather(1, places[..., None].expand_as(x))
        full = mask.all(1)[:, None, None]
        states, shares = (torch.where(full, *parts) for parts in zip(*(ordered_memory_literal(memory, first, start)
                                                                      for start in ("first", "zero"))))
        root, shares = states[sentences, lengths - 1], shares.gather(1, back[..., None].expand_as(shares))
        found = {"out.probs": torch.where(mask[..., None], shares, 0)}
    return found | {"out.root": root, "grad.x": torch.autograd.grad((root * inputs["w"]).sum(), x)[0]}


def build(model: str, config: dict, case: str = "") -> nn.Module:
    "Our module for a model's name and the file's configuration."
    if model == "ops" and case.startswith("stochastic_topk"):
        return OfLogits(topk, config["k"])
    if model == "ops" and case.startswith("geometric_attention"):
        return OfLogits(attention, config["normalize"])
    if model == "ops" and case.startswith("onesoft"):
        return Selection(config["beam_size"], 8, one_soft if case.endswith("train") else choice_matrix)
    if model in ("bt_grc", "bt_grc_os", "ebt_grc"):
        return build_beam_tree(model, config)
    if model == "ops" and case.startswith("crvnn_neighbor"):
        return Neighbors()
    if model in ("ordered_memory", "ordered_memory_original"):
        return build_memory(config)
    if model == "recurrent_grc":
        return RecurrentGRC(config["hidden_size"], directions=2, readout="mean", dropout=config["dropout"])
    if model == "bbt_grc":
        return BalancedTree(config["hidden_size"], hidden=config["cell_size"], dropout=config["dropout"])
    if model == "ndr":
        return build_ndr(config)
    if model == "mega":
        return MEGA(config["hidden_size"], config["num_encoder_layers"], config["z_dim"], config["n_dim"], config["max_positions"],
                    "pre" if config["normalize_before"] else "post")
    if model == "s4d_stack":
        return S4DStack(config["hidden_size"], config["layers"], config["d_state"], norm_place(config["norm"], config["prenorm"]), lag=1)
    if model == "s4d_layer":
        return PreChunk(config["hidden_size"], config["d_state"], norm_place(config["norm"], config["prenorm"]))
    if model in ("rir_grc", "rir_crvnn", "rir_om"):
        return build_rir(model, config)
    if model == "rir_ebt_grc":
        return build_rir_beam(config)
    if model in ("crvnn", "crvnn_original"):
        return build_crvnn(model, config, case)
    if model == "heads" and case.startswith("classifier"):
        return Classifier(MaskedMean(config["hidden_size"]), 15, config["n_classes"], config["embd_dim"],
                          layers=2 if config["classifier_mlp"] else 1)
    if model == "heads" and case.startswith("siamese"):
        return PairClassifier(MaskedMean(config["hidden_size"]), 15, config["n_classes"],
                              layers=2 if config["classifier_mlp"] else 1, features="code", embedding_dim=config["embd_dim"])
    raise LookupError(f"no module yet for {model}/{case}")


def evaluate(model: str, module: nn.Module, inputs: dict) -> dict:
    "Outputs and gradients, under the names they have in the file."
    module.eval()
    if isinstance(module, PairClassifier):
        return evaluate_pair(module, inputs)
    mask = inputs["mask"].bool()
    if isinstance(module, RIRBeam):
        return evaluate_rir_beam(module, inputs, mask)
    if isinstance(module, BeamTree | EfficientBeam):
        return evaluate_beam(module, inputs, mask)
    if isinstance(module, Selection):
        return module(inputs["old_state"], inputs["new_state"], mask, inputs["beam_scores"], inputs["beam_mask"].bool())
    if isinstance(module, OfLogits):
        logits = inputs["logits"].clone().requires_grad_()
        found = module(logits, mask)
        pushed = list(found.values())[-1]
        return found | {"grad.logits": torch.autograd.grad((pushed * inputs["w"]).sum(), logits)[0]}
    if model == "ops":
        exists = (inputs["exist_probs"] * mask).requires_grad_()
        weights = module(exists)
        found = {f"out.{side}": weight for side, weight in weights.items()}
        if "w_left" in inputs:
            loss = sum((weights[side] * inputs[f"w_{side}"]).sum() for side in weights)
            found["grad.exist_probs"], = torch.autograd.grad(loss, exists)
        return found
    if isinstance(module, BalancedTree):
        x = inputs["x"].clone().requires_grad_()
        root = module(x, mask).root
        return {"out.root": root, "grad.x": torch.autograd.grad((root * inputs["w"]).sum(), x)[0]}
    if isinstance(module, PreChunk):
        return module(inputs["x"], mask, inputs["w"])
    if isinstance(module, S4DStack | MEGA | RecurrentGRC):
        return evaluate_states(module, inputs, mask)
    if isinstance(module, RIR):
        return evaluate_rir(module, inputs, mask)
    if isinstance(module, NDR):
        return evaluate_ndr(module, inputs, mask)
    if isinstance(module, nn.ModuleDict):
        return evaluate_memory(module["om"], inputs, mask)
    if isinstance(module, CRvNN):
        return evaluate_crvnn(module, inputs, mask)
    ids = inputs["tokens"].long()
    x = module.in_proj(module.embedding(ids))
    return {"out.embedded": x * mask[..., None], "out.root": module.encoder(x, mask).root, "out.logits": module(ids, mask).logits}


def evaluate_pair(module: PairClassifier, inputs: dict) -> dict:
    "The two sides alone, and the pair."
    sides = [(inputs[f"tokens{side}"].long(), inputs[f"mask{side}"].bool()) for side in (1, 2)]
    found = {f"out.root{side}": module.encoder(module.in_proj(module.embedding(ids)), mask).root
             for side, (ids, mask) in enumerate(sides, 1)}
    return found | {"out.logits": module(*map(pair_up, *sides)).logits}


def not_compared(tensors: dict) -> set:
    "What the published code returned where it multiplies rounding errors by a million; the root without that is recorded beside it."
    return {"out.root_reference", "out.beam_weights"} if "out.root_reference" in tensors else set()


def rows_that_mean_something(name: str, value: torch.Tensor, inputs: dict, expected: dict) -> torch.Tensor:
    """Neighbor matrices, an NDR's states and what stands before a cut have rows for padding positions, and nobody reads them. Of hypotheses
    those count that have weight."""
    if (name in ("out.left", "out.right") or name == "out.sequence" and "grad.x_full" in expected
            or "out.root_first" in expected and name in ("out.sequence", "out.after_layer_1")):
        return value[inputs["mask"].bool()]
    if "grad.x_full" in expected and value.shape[:2] == inputs["mask"].shape and name == "out.root":
        return value[inputs["mask"].bool()]                # here the "root" is a sequence
    if name in ("out.select_idx", "out.select_mask"):      # picks beyond the valid places are in any order
        return value[torch.arange(value.shape[1]) < inputs["mask"].sum(1, keepdim=True)]
    if name in ("out.beam_scores", "out.beam_states", "out.beam_mask") and "out.beam_weights" in expected:
        if name == "out.beam_scores":                      # sentences that are done go on to lose a constant there, and so do chunks
            done = (inputs["mask"].sum(1, keepdim=True) < inputs["mask"].shape[1]) | ("out.beam_states" not in expected)
            value = torch.where(done, value - value[:, :1], value)
        return value[expected["out.beam_weights"] > 1e-6]
    return value


def check(path: str) -> list[str]:
    "What is wrong with our results for one file; empty if nothing is."
    with safe_open(path, framework="pt") as file:
        about, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}
    model = about["model"]
    module = build(model, json.loads(about["config"]), about["case"])
    parameters = {key[6:]: value.float() for key, value in tensors.items() if key.startswith("param.")}
    if isinstance(module, RIR):            # recorded without a name for the inner model as a whole
        parameters = {key if key.startswith(("s4d.", "leaf")) else f"inner.{key.removeprefix('om.')}": value for key, value in parameters.items()}
    module.load_state_dict(parameters)
    inputs = {key[3:]: value for key, value in tensors.items() if key.startswith("in.")}
    found, wrong = evaluate(model, module, inputs), []
    expected = {key: value for key, value in tensors.items() if key.startswith(("out.", "grad."))}
    if not expected:
        wrong.append("records no outputs")
    if missing := expected.keys() - found.keys() - not_compared(expected):
        wrong.append(f"not computed: {', '.join(sorted(missing))}")
    for key in (expected.keys() & found.keys()) - not_compared(expected):
        if found[key].shape != expected[key].shape:
            wrong.append(f"{key}: shape {tuple(found[key].shape)}, expected {tuple(expected[key].shape)}")
            continue
        ours, theirs = (rows_that_mean_something(key, value, inputs, expected) for value in (found[key], expected[key]))
        scale = theirs.abs().max().clamp(min=1e-30) if key.startswith("grad.") else 1.0
        error = float(((ours - theirs).abs() / scale).max().detach())
        if not error <= (GRADIENTS if key.startswith("grad.") else OUTPUTS):
            wrong.append(f"{key}: error {error:.1e}")
    return wrong


def main(paths: list[str]) -> int:
    status = 0
    for path in paths:
        try:
            wrong = check(path)
        except Exception as error:      # a file we cannot read or have no module for is a failed file, not the end
            wrong = [f"{type(error).__name__}: {error}"]
        status |= bool(wrong)
        print(f"{'FAIL' if wrong else 'ok  '} {Path(path).parent.name}/{Path(path).name}" + "".join(f"  {w}" for w in wrong))
    return status


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m tests.golden FILE...")
    sys.exit(main(sys.argv[1:]))
