"""The experiment on translation: its gate, its layers beside PyTorch's, the writer that does not look ahead, and what BLEU says."""
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from rvnnbook.data.algorithms import AlgorithmExample
from rvnnbook.data.text import MissingFileError
from rvnnbook.lab.settings import ParameterError, check_parameters
from rvnnbook.tasks.seq2seq import answer
from tests.helpers import JUPYTER, without

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENT = ROOT / "nbs" / "experiments" / "translation.ipynb"
NOTEBOOK = json.loads(EXPERIMENT.read_text())
VARIANTS = "feed_forward", "self_iru"


@pytest.fixture(scope="module")
def page():
    "What the cells tagged `run` define before the training, in the smoke profile."
    names = {"run": check_parameters(NOTEBOOK, {})}
    for cell in NOTEBOOK["cells"]:
        source = "".join(cell["source"])
        if "run" in cell["metadata"].get("tags", []) and "code_hashes()" not in source:
            if "outcome" in source:              # what comes behind the training: its functions, not its calls
                source = source.partition("\nparts = ")[0] if "def measured" in source else ""
            exec(source, names)
    return SimpleNamespace(**names)


def asked(variant, **changes):
    return SimpleNamespace(**{"variant": variant, "depth": 2, "dim": 8, "heads": 2, "layers": 2, "dropout": 0.0, **changes})


# ---- the gate

@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gate_takes_every_task_and_profile(variant):
    for profile in ("smoke", "cpu", "paper"):
        for task in ("en_vi", "de_en"):
            run = check_parameters(NOTEBOOK, {"variant": variant, "task": task, "profile": profile})
            assert (run.variant, run.task, run.depth, run.penalty) == (variant, task, 2, .6)      # self_iru App. A.2
    base = check_parameters(NOTEBOOK, {"variant": variant, "profile": "paper"})                   # Vaswani et al. 2017, Table 3
    assert (base.dim, base.heads, base.layers, base.dropout, base.smoothing, base.beam) == (512, 8, 6, .1, .1, 4)


@pytest.mark.parametrize("given, said", [
    ({"task": "en_de"}, "task is 'en_de': Input should be 'de_en' or 'en_vi'"), ({"variant": "iru"}, "variant is 'iru'"),
    ({"depth": 4}, "depth is 4: Input should be"), ({"dim": 30}, "a multiple of heads"), ({"dim": 9, "heads": 3}, "dim must be even"),
    ({"base": "lstm"}, "unknown parameter 'base'"), ({"beam": 0}, "beam is 0"), ({"smoothing": 1.0}, "smoothing is 1.0: Input should be")])
def test_the_gate_refuses(given, said):
    with pytest.raises(ParameterError) as error:
        check_parameters(NOTEBOOK, given)
    assert said in str(error.value)


def test_published_sentences_are_read_or_asked_for(page, tmp_path, monkeypatch):
    monkeypatch.setenv("RVNNBOOK_DATA", str(tmp_path))
    for task, small, missing in (("en_vi", True, "get iwslt15_envi"), ("en_vi", False, "add iwslt15_envi_train"), ("de_en", False, "add iwslt14_deen")):
        with pytest.raises(MissingFileError, match=f"Remedy: rvnnbook data {missing}"):
            page.published(task, small)
    for part, size in (("tst2012", 3), ("tst2013", 1268)):
        for side in ("en", "vi"):
            path = tmp_path / "iwslt15_envi" / f"{part}.{side}"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(f"{side} {part} {i}\n" for i in range(size)))
    known, held_out, test = page.published("en_vi", True)
    assert [len(part) for part in (known, held_out, test)] == [3, 634, 634]
    assert known[0] == AlgorithmExample(("en", "tst2012", "0"), ("vi", "tst2012", "0")) and test[0].tokens[2] == "634"


# ---- the language made up

def test_the_language_made_up_follows_its_rule(page):
    parts = page.made()
    assert parts == page.made() and [len(part) for part in parts] == [1000, 100, 100]
    assert len({pair.tokens for part in parts for pair in part}) == 1200, "no sentence twice"
    group = f"(?:the|a)((?: (?:{'|'.join(page.ADJECTIVES)}))*) ({'|'.join(page.NOUNS)})"
    for pair in (pair for part in parts for pair in part):
        first, one, verb, second, other = re.fullmatch(f"{group} ({'|'.join(page.VERBS)}) {group}", " ".join(pair.tokens)).groups()
        back = " ".join(pair.target)[::-1].split()[::-1]                   # the words turned round, their order kept
        assert back == [one, *first.split(), other, *second.split(), verb]


# ---- the layers

def test_the_feed_forward_variant_is_pytorchs_layer(page):
    for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        torch.manual_seed(0)
        ours = page.layer_of(kind, asked("feed_forward")).double()
        torch.manual_seed(0)
        theirs = kind(8, 2, 32, 0.0, batch_first=True, norm_first=True).double()
        inputs = [torch.randn(2, 5, 8).double()] * (1 if kind is nn.TransformerEncoderLayer else 2)
        assert torch.equal(ours(*inputs), theirs(*inputs))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_at_depth_zero_the_second_half_is_the_equation(page, kind, training):
    "Against f * n + o * tanh(z) + n, from the weights themselves."
    torch.manual_seed(0)
    layer = page.layer_of(kind, asked("self_iru", depth=0)).double().train(training)
    x = torch.randn(2, 5, 8).double()
    decodes = kind is nn.TransformerDecoderLayer
    norms = [layer.norm1, layer.norm2, *([layer.norm3] if decodes else [])]
    with torch.set_grad_enabled(training):                                 # without gradients PyTorch may take a faster path
        y = x + layer.self_attn(norms[0](x), norms[0](x), norms[0](x))[0]
        if decodes:
            y = y + layer.multihead_attn(norms[1](y), x, x)[0]
        n = norms[-1](y)
        f, o, z = (part(n) for part in layer.linear1.bases[0].parts)
        expected = y + f.sigmoid() * n + o.sigmoid() * z.tanh() + n
        assert_close(layer(x, x) if decodes else layer(x), expected, rtol=0, atol=1e-12)


# ---- the model

@pytest.fixture(params=VARIANTS)
def model(request, page):
    torch.manual_seed(0)
    return page.translator(asked(request.param), 11).double().eval()


def tokens(*shape, seed=0):
    return torch.randint(2, 11, shape, generator=torch.Generator().manual_seed(seed))


def test_no_word_looks_ahead(model):
    ids, targets = tokens(3, 6), tokens(3, 7, seed=1)
    before = model(ids, ids > 0, targets).states
    for at in range(7):
        changed = targets.clone()
        changed[:, at] = (changed[:, at] - 1) % 9 + 2
        gap = (model(ids, ids > 0, changed).states - before).abs().amax((0, 2))
        assert gap[:at + 1].max() == 0 and (gap[at + 1:] > 0).all(), "a word is seen from the next one on"


def test_padding_does_not_matter(model):
    ids, targets = tokens(2, 4), tokens(2, 5, seed=1)
    wide, mask = torch.cat([ids, tokens(2, 3, seed=2)], 1), torch.arange(7).expand(2, 7) < 4
    longer = torch.cat([targets, torch.ones(2, 2, dtype=torch.long)], 1)
    alone = model(ids, ids > 0, targets).states
    assert_close(model(wide, mask, longer).states[:, :5], alone, rtol=0, atol=1e-12)
    for row in range(2):
        assert_close(model(ids[row:row + 1], ids[row:row + 1] > 0, targets[row:row + 1]).states[0], alone[row], rtol=0, atol=1e-12)
    for found, other in zip(answer(model, ids, ids > 0, 6, 3), answer(model, wide, mask, 6, 3)):
        assert_close(found, other)


def test_a_search_scores_as_one_pass_does(model):
    "Beginnings change their places in a beam, and what was written goes with them."
    ids = tokens(3, 5)
    found = answer(model, ids, ids > 0, 5, 4)
    for beam in range(4):
        words = found.words[:, beam]
        mask = ((words == 1).cumsum(1) - (words == 1).long()) == 0
        logs = model(ids, ids > 0, words).states.log_softmax(-1).gather(2, words[..., None])[..., 0]
        assert_close((logs * mask).sum(1), found.logs[:, beam].to(logs), rtol=0, atol=1e-5)


def test_the_smoothed_loss_is_the_one_without_and_a_share_of_the_mean(page, monkeypatch):
    batch = page.deck(page.test[:5])
    plain, smoothed = page.loss(page.model.eval(), batch), {}
    for share in (.1, .5):
        monkeypatch.setattr(page.run, "smoothing", share)
        smoothed[share] = page.loss(page.model, batch)
    logs = page.model(batch.ids, batch.mask, batch.targets).states.log_softmax(-1).mean(-1)
    blind = -(logs * batch.target_mask).sum(1).mean()
    for share, found in smoothed.items():
        assert_close(found, (1 - share) * plain + share * blind)


# ---- BLEU

def test_a_perfect_answer_has_the_bleu_of_100(page):
    part = page.test[-20:]
    perfect = page.measured(part, [pair.target for pair in part])
    assert math.isclose(perfect["bleu"], 100) and (perfect["words_right"], perfect["fours_right"], perfect["exact_match"]) == (1, 1, 1)
    cut = page.measured(part, [pair.target[:-1] for pair in part])
    written, expected = sum(len(pair.target) - 1 for pair in part), sum(len(pair.target) for pair in part)
    assert math.isclose(cut["bleu"], 100 * math.exp(1 - expected / written)) and cut["exact_match"] == 0 and cut["words_right"] == 1
    silent = page.measured(part, [()] * 20)
    assert (silent["bleu"], silent["exact_match"]) == (0, 0)


def test_what_stands_for_rare_words_is_never_written(page):
    out, unknown = page.model.decoder.out, page.vocabulary.ids["UNKNOWN"]
    with torch.no_grad():
        before = float(out.bias[unknown])
        out.bias[unknown] = 100.0                                          # the model would write nothing else
        said = page.translations(page.test[:5])
        assert out.bias[unknown] == 100 and not any("UNKNOWN" in words for words in said)
        assert answer(page.model, *page.deck(page.test[:5])[:2], 4).words.eq(unknown).all()
        out.bias[unknown] = before


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_smoke_run_without_jupyter_leaves_nothing(tmp_path, tmp_path_factory, variant):
    words = ["run", EXPERIMENT, "--no-notebook", "-p", f"variant={variant}", "-p", "epochs=2"]
    hidden = {**os.environ, "PYTHONPATH": without(tmp_path_factory.mktemp("path"), *JUPYTER)}
    done = subprocess.run([sys.executable, "-m", "rvnnbook", *map(str, words)], cwd=tmp_path, env=hidden, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr
    assert re.search(r"\{'made, validation': [\d.]+, 'made, test': [\d.]+\}", done.stdout), done.stdout
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
