"Predictions: the same alone and in a list, in the given order, in bounded memory; and what is refused."
import copy
import json
import math
import pickle
import subprocess
import sys
from itertools import count, islice
from threading import Thread

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rvnnbook.cli import main
from rvnnbook.core import simple_tree
from rvnnbook.data.batches import BucketLoader, Vocabulary, read_sentence, token_batches
from rvnnbook.data.listops import VOCABULARY, bracketed, collate_listops, make_split, tokenize, write_listops
from rvnnbook.optimization import evaluate_classifier
from rvnnbook.registry import create_encoder
from rvnnbook.show.trees import bracket_string, tree_drawing, tree_spans
from rvnnbook.tasks.classify import (
    Classifier, Predictor, _class_probabilities, accuracy, cross_entropy, load_pretrained, predict_labels)
from rvnnbook.tasks.pair import PairClassifier
from rvnnbook.tasks.seq2seq import Seq2Seq
from rvnnbook.tasks.tokens import TokenClassifier
from tests.pretend_device import PretendDevice
from tests.test_encoders import GIVEN_TREES, NAMES, every, make
from tests.training import EXAMPLES, TEST, make_model

FINDS_TREES = {"rvnn", "tree_lstm", "crvnn", "gumbel_tree", "bt_grc", "bt_grc_os", "ebt_grc", "bbt_grc", "rir_grc", "ordered_memory",
               "rir_ebt_grc"}
SENTENCES = [[3, 1, 4], [5], [9, 2, 6, 5, 3, 5, 8], [9, 7], [9, 3, 2, 3], [8, 4, 6], [2, 6, 4, 3, 3, 8, 3, 2, 7]]
TREES = [simple_tree("balanced", len(ids)) for ids in SENTENCES]
SPOKEN = Vocabulary(VOCABULARY, split=tokenize)


def model_of(name, classes=4, vocabulary=10, kind=Classifier):
    return kind(make(name), vocabulary, classes).double()


def watched(model):
    "The shapes of the batches that a model computes, and its modes then."
    seen, forward = [], model.forward
    def record(ids, mask, **options):
        seen.append((tuple(ids.shape), model.training, torch.is_grad_enabled()))
        return forward(ids, mask, **options)
    model.forward = record
    return seen


def assert_same(found, expected):
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected):
        assert mine.label == theirs.label and mine.tree == theirs.tree
        assert mine.probabilities == pytest.approx(theirs.probabilities, abs=1e-9)


# ---- equal to one sentence at a time

@every
@pytest.mark.parametrize("batch_tokens", [1, 12, 8192])
def test_lists_as_single_sentences(name, batch_tokens):
    model = model_of(name).train()
    options = {"trees": TREES, "return_trees": name in FINDS_TREES}
    found = model.predict(SENTENCES, batch_tokens=batch_tokens, **options)
    assert_same(found, [model.predict([ids], trees=[tree], return_trees=options["return_trees"])[0]
                        for ids, tree in zip(SENTENCES, TREES)])
    model.eval()
    for prediction, ids, tree in zip(found, SENTENCES, TREES):
        row, mask, steps = torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool), torch.tensor([tree])
        out = model(row, mask, trees=steps, trace=True)
        assert prediction.probabilities == pytest.approx(out.logits[0].softmax(0).tolist(), abs=1e-9)
        assert prediction.label == int(out.logits.argmax()) and sum(prediction.probabilities) == pytest.approx(1)
        assert prediction.tree == (out.encoding.trace["trees"][0].tolist() if name in FINDS_TREES else None)
        if name in GIVEN_TREES:
            assert prediction.tree == tree
        if prediction.tree:
            assert len(list(tree_spans(prediction.tree))) == len(ids) - 1


@pytest.mark.parametrize("name", sorted(set(NAMES) - FINDS_TREES))
def test_encoders_without_trees_are_named(name):
    with pytest.raises(ValueError, match=f"{type(make(name)).__name__} finds no trees"):
        model_of(name).predict(SENTENCES, return_trees=True)


@pytest.mark.parametrize("name", ["rvnn", "crvnn", "lstm"])
def test_pairs_as_single_pairs(name):
    model = model_of(name, 3, kind=PairClassifier)
    pairs, trees = list(zip(SENTENCES, SENTENCES[::-1])), list(zip(TREES, TREES[::-1]))
    options = {"return_trees": name in FINDS_TREES}
    found = model.predict(pairs, trees=trees, batch_tokens=20, **options)
    assert_same(found, [model.predict([pair], trees=[tree], **options)[0] for pair, tree in zip(pairs, trees)])
    if name in FINDS_TREES:
        assert [list(map(len, one.tree)) for one in found] == [list(map(len, pair)) for pair in pairs]
    swapped = model.predict([pair[::-1] for pair in pairs], trees=[tree[::-1] for tree in trees])
    assert max(abs(one.probabilities[0] - other.probabilities[0]) for one, other in zip(found, swapped)) > 1e-6


@pytest.mark.parametrize("name", ["ebt_grc", "crvnn", "transformer", "rvnn"])
def test_another_device(name):
    model = model_of(name)
    expected = model.predict(SENTENCES, trees=TREES)
    with PretendDevice() as device:
        assert_same(device.upload(model).predict(SENTENCES, trees=TREES), expected)


# ---- order, modes, memory

@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 80))
def test_batches_of_bounded_size(lengths, most):
    batches = token_batches(lengths, most)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    order = [lengths[i] for batch in batches for i in batch]
    assert order == sorted(lengths) and all(len(b) == 1 or len(b) * lengths[b[-1]] <= most for b in batches)
    for batch, after in zip(batches, batches[1:]):            # none could have been longer
        assert (len(batch) + 1) * lengths[after[0]] > most


def test_batches_have_at_most_the_given_number_of_positions():
    for kind, sentences in ((Classifier, SENTENCES), (PairClassifier, list(zip(SENTENCES, SENTENCES[::-1])))):
        model = model_of("lstm", kind=kind)
        seen = watched(model)
        model.predict(sentences, batch_tokens=36)
        shapes = [shape for shape, *_ in seen]
        assert sum(shape[0] for shape in shapes) == len(sentences) and 1 < len(shapes) < len(sentences)
        assert all(np.prod(shape) <= 36 for shape in shapes)


def test_evaluation_mode_without_gradients_and_modes_restored():
    model = Classifier(create_encoder("lstm", dim=8), 10, 4, dropout_in=0.5).train()
    model.head.eval()
    modes, seen = [module.training for module in model.modules()], watched(model)
    first, again = model.predict(SENTENCES), model.predict(SENTENCES)
    assert first == again and seen == [((7, 9), False, False)] * 2
    assert [module.training for module in model.modules()] == modes and torch.is_grad_enabled()
    model.forward = lambda *args, **options: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model.predict(SENTENCES)
    assert [module.training for module in model.modules()] == modes


def test_threads_that_share_a_model():
    "All evaluate, and the last one restores the modes."
    model = Classifier(create_encoder("ebt_grc", dim=8, dropout=0.3), 10, 4, dropout_in=0.5).train()
    expected, found = model.predict(SENTENCES), []
    threads = [Thread(target=lambda: found.extend(model.predict(SENTENCES) for _ in range(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == 80 * [expected] and all(module.training for module in model.modules())


def test_streams_are_read_as_far_as_needed():
    model, taken = model_of("lstm"), []
    seen = watched(model)
    def stream():
        for number in count():
            taken.append(number)
            yield [number % 10] * (1 + number % 3)
    found = model.predict_stream(stream())
    assert not taken and len(list(islice(found, 1024))) == 1024 == len(taken)
    next(found)
    assert len(taken) == 2048
    expected = model.predict([number % 10] * (1 + number % 3) for number in range(1500))
    assert_same(list(islice(model.predict_stream(stream()), 1500)), expected)
    assert all(np.prod(shape) <= 8192 for shape, *_ in seen)


def test_nothing_gives_nothing():
    model = model_of("lstm")
    assert model.predict([]) == model.predict(iter(())) == model.predict([], trees=[], return_trees=True) == []


def test_two_classes_have_two_probabilities():
    model = model_of("lstm", classes=2)
    for one, ids in zip(model.predict(SENTENCES), SENTENCES):
        score = float(model(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool)).logits.detach().sigmoid())
        assert one.probabilities == pytest.approx([1 - score, score]) and one.label == (score > .5)
    scores = torch.randn(5, 1)
    assert _class_probabilities(scores).argmax(1).equal(predict_labels(scores))


# ---- sentences

def test_forms_of_a_sentence():
    text, tokens = "[MAX 2 9 [MIN 4 7 ] 0 ]", tokenize("[MAX 2 9 [MIN 4 7 ] 0 ]")
    ids = SPOKEN.encode(tokens)
    for form in (text, bracketed(tokens), tokens, list(tokens), ids, tuple(ids), torch.tensor(ids), np.array(ids), list(np.array(ids))):
        assert read_sentence(form, SPOKEN, 15) == ids
    assert read_sentence(iter(ids), None, 15) == ids


@pytest.mark.parametrize("sentence, error, told", [
    ("", ValueError, "at least one token"), ([], ValueError, "at least one token"), ("[MAX 2 x ]", ValueError, "token 2 is 'x'"),
    (["2", "[MAZ"], ValueError, r"token 1 is '\[MAZ', which is not in the vocabulary; the nearest is '\[MAX'"),
    ([1, 15], ValueError, r"token 1 is 15; token ids are in \[0, 15\)"), ([-1], ValueError, "token 0 is -1"),
    ([1, 2.0], TypeError, "token 1 is 2.0, not an integer"), ([1, "2"], TypeError, "token 1 is '2', not an integer"),
    ([[1, 2]], TypeError, r"token 0 is \[1, 2\], not an integer"), (7, TypeError, "expected a text, tokens or token ids, got 7"),
    (None, TypeError, "expected a text, tokens or token ids, got None"), (b"[MAX 2 9 ]", TypeError, "got b'"),
    (torch.tensor(7), TypeError, r"expected a text, tokens or token ids, got tensor\(7\)")])
def test_sentences_that_are_refused(sentence, error, told):
    model = Classifier(create_encoder("lstm", dim=8), SPOKEN, 10)
    with pytest.raises(error, match=f"^sentence 1: .*{told}"):
        model.predict(["[MAX 2 9 ]", sentence])


def test_an_error_of_an_own_tokenizer_names_the_sentence():
    "Its class may need other arguments than a text."
    words = Vocabulary(["a", "b"], split=json.loads)
    model = Classifier(create_encoder("lstm", dim=8), words, 10)
    with pytest.raises(ValueError, match="^sentence 1: Expecting value: line 1 column 1"):
        model.predict(['["a", "b"]', "no JSON"])


def test_lists_that_are_refused():
    model, pairs, given_trees = model_of("lstm"), model_of("lstm", kind=PairClassifier), model_of("rvnn")
    with pytest.raises(TypeError, match="expected a list of sentences, got a single text"):
        model.predict("[MAX 2 9 ]")
    with pytest.raises(TypeError, match="sentence 0: expected a text, tokens or token ids, got 1"):
        model.predict([1, 2])
    with pytest.raises(TypeError, match="sentence 0: a model without vocabulary takes token ids"):
        model.predict(["[MAX 2 9 ]"])
    with pytest.raises(ValueError, match="sentence 0: expected a pair of sentences, got 3"):
        pairs.predict([([1], [2], [3])])
    with pytest.raises(ValueError, match="needs at least one token"):
        pairs.predict([([1], [])])
    with pytest.raises(TypeError, match="^sentence 0: expected a pair of sentences, got a single text$"):
        pairs.predict(["1 2"])
    with pytest.raises(ValueError, match="this encoder is given its trees"):
        given_trees.predict(SENTENCES)
    for wrong in ([0], [1, 0], [1, 2, 3, 0], [1, 1, 0], [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]):      # of the first sentence, with three tokens
        for several in (1, len(SENTENCES)):
            with pytest.raises(ValueError, match="trees"):
                given_trees.predict(SENTENCES[:several], trees=[wrong, *TREES[1:several]])
    for number, trees in ((6, TREES[:-1]), (7, [*TREES, [0]]), (0, [])):
        with pytest.raises(ValueError, match=f"^sentence {number}: trees must have composition steps for each sentence$"):
            given_trees.predict(SENTENCES, trees=trees)
    for trees in (TREES[:1], np.zeros((1, 3), dtype=int)):
        with pytest.raises(ValueError, match="given its trees: pass trees=, a tensor of composition steps"):
            given_trees(torch.tensor(SENTENCES[:1]), torch.ones(1, 3, dtype=torch.bool), trees=trees)
    with pytest.raises(ValueError, match="^batch_tokens must be a whole number from 1, got 0$"):
        model.predict(SENTENCES, batch_tokens=0)


def test_models_with_a_vocabulary_are_copied_and_pickled():
    model = Classifier(create_encoder("lstm", dim=8), SPOKEN, 10)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.predict(["[MAX 2 9 ]"]) == model.predict(["[MAX 2 9 ]"])
    plain = Classifier(create_encoder("lstm", dim=8), len(SPOKEN), 10)
    plain.load_state_dict(model.state_dict())
    assert isinstance(plain, Predictor) and plain.predict([SPOKEN.encode(("2",))]) == model.predict(["2"])


@pytest.mark.parametrize("kind", [Classifier, PairClassifier])
def test_a_list_of_tokens_is_a_vocabulary(kind):
    model = kind(create_encoder("lstm", dim=4), ["a", "b", "c"], 3)
    assert model.vocabulary.tokens == ("a", "b", "c") and model.embedding.num_embeddings == 3
    text, ids = ("b c a", [1, 2, 0]) if kind is Classifier else (("b", "c a"), ([1], [2, 0]))
    assert model.predict([text]) == model.predict([ids])
    with pytest.raises(TypeError, match=r"^tokens must be a list of strings \(a set has no fixed order\), got '10'$"):
        kind(create_encoder("lstm", dim=4), "10", 3)


@pytest.mark.parametrize("kind", [Classifier, PairClassifier])
@pytest.mark.parametrize("classes", [0, 1, -3, "10", True, 2.0, None])
def test_numbers_of_classes_that_are_refused(kind, classes):
    with pytest.raises(ValueError, match=f"^classes must be a whole number from 2, got {0 if classes is None else classes!r}$"):
        kind(create_encoder("lstm", dim=4), 5, classes, layers=1)
    assert kind(create_encoder("lstm", dim=4), 5, np.int64(3)).head[-1].out_features == 3


@pytest.mark.parametrize("kind", [Classifier, PairClassifier])
@pytest.mark.parametrize("options, said", [
    ({"vocabulary": 0}, "vocabulary must be a whole number from 1, got 0"), ({"vocabulary": []}, "vocabulary must be"),
    ({"embedding_dim": 0}, "embedding_dim must be a whole number from 1, got 0"), ({"layers": 3}, "unknown number of layers 3; known: 1, 2")])
def test_sizes_that_are_refused(kind, options, said):
    with pytest.raises(ValueError, match=said):
        kind(create_encoder("lstm", dim=4), **{"vocabulary": 5, "classes": 3, **options})


@pytest.mark.parametrize("kind", [Classifier, PairClassifier, TokenClassifier, lambda encoder, vocabulary, _: Seq2Seq(encoder, vocabulary)])
def test_an_encoder_is_expected_where_a_name_is_given(kind):
    with pytest.raises(TypeError, match=r"^expected an encoder, such as create_encoder\('crvnn', dim=64\), got str$"):
        kind("crvnn", 5, 3)


def test_ids_and_labels_out_of_range():
    model, mask = model_of("lstm"), torch.ones(1, 2, dtype=torch.bool)
    for ids, said in (([[3, 10]], r"token ids must be in \[0, 10\), got 10"), ([[-1, 2]], "got -1"), ([[1.0, 2.0]], "must be a tensor of integers")):
        with pytest.raises(ValueError, match=said):
            model(torch.tensor(ids), mask)
    for label in (4, -1):
        with pytest.raises(ValueError, match=rf"labels must be in \[0, 4\), got {label}"):
            model(torch.tensor([[1, 2]]), mask, labels=torch.tensor([label]))


def test_accuracy_needs_batches():
    model, examples = model_of("lstm", vocabulary=15), make_split(4, seed=0, length=(5, 20))
    with pytest.raises(TypeError, match="^expected batches with ids, mask, trees and labels, as BucketLoader yields them; got Example$"):
        accuracy(model, examples)
    with pytest.raises(ValueError, match="^there is no batch$"):
        accuracy(model, [])


# ---- pretrained

def test_pretrained_models_evaluate_text():
    assert "list_pretrained()" in load_pretrained.__doc__
    sample = make_split(30, seed=3, length=(5, 60))
    found = load_pretrained("ebt_grc", "listops").predict([bracketed(e.tokens) for e in sample], batch_tokens=300)
    assert sum(one.label == e.label for one, e in zip(found, sample)) >= 29


@pytest.mark.parametrize("text, told", [("[MAX 2 9", r"token 0, \[MAX, is never closed"), ("2 9", "token 1, 9, stands after the end"), ("", "empty"),
                                        ("[MAX ]", r"token 0, \[MAX, has no argument"), ("[MAX 2 10 ]", "token 2 is '10'")])
def test_text_that_is_no_expression_is_refused(text, told):
    model = load_pretrained("crvnn", "listops")
    with pytest.raises(ValueError, match=f"^sentence 1: .*{told}"):
        model.predict(["[MAX 2 9 ]", text])
    assert len(model.predict([[1, 6, 13], ["[MAX", "2", "9"]])) == 2                   # token ids and tokens are taken as they are


def test_pretrained_models_read_english():
    model = load_pretrained("ebt_grc", "sst5")
    bad, good = model.predict(["This is a dull, tedious and awful film.", "a wonderful and charming film"], return_trees=True)
    assert bad.label < 2 < good.label and len(bad.tree) == 10 and len(good.tree) == 5


def test_the_command_labels_lines(tmp_path, capsys):
    sample = make_split(4, seed=5, length=(5, 20))
    path = write_listops(tmp_path / "sample.tsv", sample)                 # with labels, tabs and parentheses
    assert main(["predict", "ebt_grc", "listops", str(path), "--trees"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    found = load_pretrained("ebt_grc", "listops").predict([e.tokens for e in sample], return_trees=True)
    assert lines == [[str(one.label), f"{max(one.probabilities):.4f}", bracket_string(one.tree, e.tokens)] for one, e in zip(found, sample)]
    path.write_text("[MAX 2 9 ]\n\n")
    assert main(["predict", "ebt_grc", "listops", str(path)]) == 2
    assert capsys.readouterr().err == f"rvnnbook: {path}, line 2: the expression is empty\n"
    assert main(["predict", "ebt_grc", "listops", "--trees", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"rvnnbook: there is no file {str(tmp_path / 'none')!r}\n"
    path.write_bytes(b"[MAX 2 \xff ]\n")
    assert main(["predict", "ebt_grc", "listops", str(path)]) == 2
    assert capsys.readouterr().err == f"rvnnbook: {path} is not text in UTF-8\n"
    done = subprocess.run([sys.executable, "-m", "rvnnbook", "predict", "crvnn", "listops", "-"], input="[MAX 2 9 ]\n7\n8 8", text=True,
                          capture_output=True)
    assert done.stderr == "rvnnbook: standard input, line 3: token 1, 8, stands after the end of the expression\n", done.stderr
    done = subprocess.run([sys.executable, "-m", "rvnnbook", "predict", "crvnn", "listops", "-"], input="[MAX 2 9 ]\n7", text=True,
                          capture_output=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["9", "7"], done.stderr


def test_composition_steps_must_fit_their_sentence():
    model = Classifier(create_encoder("rvnn", dim=4), 5, 3)
    with pytest.raises(ValueError, match=r"^sentence 1: \[3\] tokens, but \[2\] steps in trees$"):
        model.predict([[1, 2], [1, 2, 3]], trees=[[1, 0], [1, 0]])
    with pytest.raises(ValueError, match="^sentence 1: trees must have composition steps for each sentence$"):
        model.predict([[1, 2], [1, 2, 3]], trees=[[1, 0], None])
    with pytest.raises(ValueError, match="^sentence 2: trees: step 0 at position 1 of 3"):       # it is not the longest
        model.predict([[1, 2, 3, 4], [1, 2], [1, 2, 3]], trees=[[3, 2, 1, 0], [1, 0], [1, 0, 0]])
    steps = model.predict([[1, 2, 3]], trees=[torch.tensor([1, 2, 0])])
    assert steps == model.predict([np.array([1, 2, 3], np.uint8)], trees=[[1, 2, 0]])


def test_labels_of_two_classes_are_checked():
    with pytest.raises(ValueError, match=r"labels must be in \[0, 2\), got 2"):
        cross_entropy(torch.zeros(2, 1), torch.tensor([1, 2]))
    assert cross_entropy(torch.zeros(2, 1), torch.tensor([1, 0])).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("draw", [bracket_string, tree_drawing])
def test_drawings_need_a_step_for_each_token(draw):
    with pytest.raises(ValueError, match="^2 composition steps, but 3 tokens; split the text first$"):
        draw([1, 0], "7 8")
    with pytest.raises(ValueError, match="^2 composition steps, but 3 tokens$"):
        draw([1, 0], ["7", "8", "9"])
    with pytest.raises(ValueError, match="^3 composition steps, but 2 tokens$"):
        draw([1, 2, 0], ["7", "8"])
    with pytest.raises(ValueError, match=r"^there is no tree; use predict\(..., return_trees=True\)$"):
        draw(None, ["7", "8"])
    assert draw([1, 0, 0], ["7", "8"]) == draw([1, 0], ["7", "8"])


def test_evaluation_weighs_sentences_not_batches():
    model = make_model()
    batches, (box,) = list(BucketLoader(EXAMPLES[:30], 7, collate_listops)), TEST
    found, at_once = evaluate_classifier(model, batches), evaluate_classifier(model, [box])
    assert found["accuracy"] == at_once["accuracy"] == accuracy(model, [box])
    assert found["nll"] == pytest.approx(at_once["nll"], rel=1e-6)
