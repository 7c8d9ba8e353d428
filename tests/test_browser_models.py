"""The models in the page, in a real browser, against PyTorch: answers, rounds, trees, messages, and the player.

PyTorch computes in double precision as the page does: where CRvNN is undecided, one rounding in single
precision can change the number of rounds, in PyTorch as in the page."""
import json
import random
import shutil
import sys

import pytest
import torch

from rvnnbook.data.listops import VOCABULARY, ListOpsError, collate_listops, draw_expression, evaluate, make_split, tokenize
from rvnnbook.reference.beam_tree import Hypothesis
from rvnnbook.reference.ebt_grc import EBTGRC
from rvnnbook.registry import read_weights
from rvnnbook.tasks.classify import load_pretrained
from tests.browsing import ROOT, serving

sys.path.insert(0, str(ROOT / "_ext"))
from players import wanted_weights, weight_script, write_weights  # noqa: E402

START = "[MAX 2 9 [MIN 4 7 ] 0 ]"
HARD = ["[SM 5 5 5 ]", "[MED 1 8 ]"]
BOX = """<div class="model-player" data-weights="{weights}" data-title="{title}" data-start="{start}">
<figure class="drawn" id="fig-{weights}"><div class="drawing" tabindex="0"><svg id="still-{weights}" viewBox="0 0 9 9" width="9" role="img" aria-label="a still"></svg></div>
<figcaption>A tree.</figcaption></figure><script type="application/json">{hard}</script></div>"""
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>t</title><link rel="icon" href="data:,"><link rel="stylesheet" href="_static/book.css"><link rel="stylesheet" href="_static/player.css"><link rel="stylesheet" href="_static/models.css">
<script defer src="_static/player.js"></script><script defer src="_static/models.js"></script><script defer src="_static/play.js"></script></head>
<body><article class="bd-article"><h1>h</h1>{boxes}</article></body></html>"""
NAMES = {"crvnn-listops": "CRvNN", "ebt_grc-listops": "EBT-GRC"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A page with both players, as the site has them."
    made = tmp_path_factory.mktemp("site")
    (made / "_static").mkdir()
    for name in ("player.js", "models.js", "play.js", "player.css", "models.css", "book.css"):
        shutil.copy(ROOT / "_assets" / name, made / "_static")
    write_weights(made / "_static" / "weights", [*NAMES, "crvnn-sst5", "ebt_grc-sst5"])
    boxes = "".join(BOX.format(weights=weights, title=title, start=START, hard=json.dumps(HARD)) for weights, title in NAMES.items())
    (made / "page.html").write_text(PAGE.format(boxes=boxes))
    boxes = "".join(BOX.format(weights=weights, title="t", start="a fine film .", hard=json.dumps(HARD)) for weights in ("crvnn-sst5", "ebt_grc-sst5"))
    (made / "sentences.html").write_text(PAGE.format(boxes=boxes))
    return made


def opened(browser, address, **options):
    "A page and the list of what went wrong in it; nothing may be requested from elsewhere."
    context = browser.new_context(**{"viewport": {"width": 390, "height": 844}, **options})
    page, wrong = context.new_page(), []
    page.on("request", lambda request: None if request.url.startswith((address.rsplit("/", 1)[0], "data:", "blob:")) else wrong.append(request.url))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.set_default_timeout(120_000)
    page.goto(address)
    return page, wrong


@pytest.fixture(scope="module")
def page(browser, folder):
    "The page, opened from the disk."
    page, wrong = opened(browser, (folder / "page.html").as_uri())
    yield page
    assert wrong == []
    page.context.close()


def ready(page, weights, turn):
    "Wait until a player has computed for the given time; return its box."
    page.locator(f"[data-weights={weights}]").scroll_into_view_if_needed()
    page.wait_for_selector(f"[data-weights={weights}][data-ready='{turn}']")
    return page.locator(f"[data-weights={weights}]")


def in_page(page, weights, cases):
    "Results of the page's model for pairs of an expression and a beam width."
    return page.evaluate("""async ([weights, cases]) => {
        const found = [];
        for (const [text, beam] of cases) found.push(await rvnnPlay.run(weights, rvnnPlay.parse(text).words, beam));
        return found; }""", [weights, cases])


def samples(count, seed):
    "Expressions of the data set's generator: one in three of any length, the others of 10 to 60 or 100 tokens."
    parts = make_split(count // 3, seed), make_split(count // 3, seed + 1, length=(10, 60)), make_split(count - 2 * (count // 3), seed + 2, length=(1, 100))
    return [example for part in parts for example in part if len(example.tokens) <= 100]


def by_length(examples, size=25):
    "Batches of examples of similar lengths, with their indices."
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].tokens))
    return [order[at:at + size] for at in range(0, len(order), size)]


def test_crvnn_computes_as_pytorch(page):
    examples = samples(520, 100)
    assert len(examples) >= 500
    found = in_page(page, "crvnn-listops", [[" ".join(tokens), 5] for _, tokens in examples])
    model = load_pretrained("crvnn", "listops").double()
    for rows in by_length(examples):
        batch = collate_listops([examples[i] for i in rows])
        with torch.no_grad():
            output = model(batch.ids, batch.mask, trace=True)
        trace, chances = output.encoding.trace, output.logits.softmax(-1)
        for row, i in enumerate(rows):
            one, n, taken = found[i], len(examples[i].tokens), int(trace["rounds"][row])
            assert one["value"] == chances[row].argmax() and one["rounds"] == taken, examples[i]
            assert one["steps"] == trace["trees"][row, :n].tolist(), examples[i]
            torch.testing.assert_close(torch.tensor(one["probabilities"]).double(), chances[row], atol=1e-3, rtol=0)
            e, c = (torch.tensor(one[name]).double() for name in ("existence", "composition"))
            torch.testing.assert_close(e, trace["existence"][:taken + 1, row, :n].double(), atol=1e-3, rtol=0)
            if taken:
                there = trace["existence"][:taken, row, :n]
                torch.testing.assert_close(there * c, there * trace["composition"][:taken, row, :n], atol=1e-3, rtol=0)


@torch.no_grad()
def least_gap(model, ids, beam):
    "The least difference of two scores that decides what the beam keeps and in which order, by the chapter's model."
    reference = EBTGRC(model.encoder.dim, beam).double().eval()
    reference.load_state_dict(model.encoder.state_dict())
    x = model.in_proj(model.embedding(ids))
    hypotheses, gap = [Hypothesis(reference.leaf_norm(reference.leaf(x)), x.new_zeros(()))], float("inf")
    for _ in ids[1:]:
        scores = torch.cat([one.score + reference.scorer(one.nodes) for one in hypotheses]).sort(descending=True).values[:beam + 1]
        gap = min([gap, *(scores[:-1] - scores[1:]).tolist()])
        hypotheses = reference.step(hypotheses)
    return gap


def test_beam_search_computes_as_pytorch(page):
    """Hypotheses are compared one by one, unless two scores of the search are equal up to rounding:
    then either may be kept. Such ties are few, and each is proved by the chapter's model."""
    examples, widths, tied = samples(312, 200), {}, 0
    assert len(examples) >= 300
    for number, rows in enumerate(by_length(examples, 12)):
        widths |= dict.fromkeys(rows, 1 + number % 8)
    found = in_page(page, "ebt_grc-listops", [[" ".join(tokens), widths[i]] for i, (_, tokens) in enumerate(examples)])
    assert len(set(widths.values())) == 8
    model = load_pretrained("ebt_grc", "listops").double()
    for rows in by_length(examples, 12):
        batch, model.encoder.beam = collate_listops([examples[i] for i in rows]), widths[rows[0]]
        with torch.no_grad():
            output = model(batch.ids, batch.mask, trace=True)
        trace, chances = output.encoding.trace, output.logits.softmax(-1)
        for row, i in enumerate(rows):
            one, n = found[i], len(examples[i].tokens)
            real = [k for k, score in enumerate(trace["scores"][row].tolist()) if score > -float("inf")]
            assert one["value"] == chances[row].argmax() and one["rounds"] == n - 1, examples[i]
            if [h["steps"] for h in one["hypotheses"]] != [trace["beams"][row, k, :n].tolist() for k in real]:
                assert least_gap(model, batch.ids[row, :n], widths[i]) < 1e-12, examples[i]
                tied += 1
                continue
            torch.testing.assert_close(torch.tensor([float(h["weight"]) for h in one["hypotheses"]]).double(), trace["weights"][row, real], atol=1e-6, rtol=0)
            torch.testing.assert_close(torch.tensor(one["probabilities"]).double(), chances[row], atol=1e-6, rtol=0)
    assert tied <= 3


def test_sentiment_is_computed_as_by_pytorch(page):
    "Random words of the vocabulary, frequent ones more often, and unknown ones."
    rng = random.Random(5)
    for name in ("crvnn", "ebt_grc"):
        vocabulary = json.loads(read_weights(name, "sst5")[1]["vocabulary"])
        rows, tied = {word: i for i, word in enumerate(vocabulary)}, 0
        sentences = ["i did not like a single minute of this film .".split(), ["good"], ["zzz", "film"]]
        sentences += [[rng.choice(vocabulary[1:rng.choice((60, 600, 8217))] + ["zzz"]) for _ in range(rng.randint(2, 40))] for _ in range(60)]
        found = page.evaluate("""async ([name, sentences]) => {
            const found = [];
            for (const words of sentences) found.push(await rvnnPlay.run(name, words, 5));
            return found; }""", [f"{name}-sst5", sentences])
        model = load_pretrained(name, "sst5").double()
        for words, one in zip(sentences, found):
            ids = torch.tensor([[rows.get(word, 0) for word in words]])
            with torch.no_grad():
                output = model(ids, torch.ones_like(ids, dtype=torch.bool), trace=True)
            trace, chances = output.encoding.trace, output.logits.softmax(-1)[0]
            if name == "crvnn":
                assert one["rounds"] == int(trace["rounds"][0])
            elif [h["steps"] for h in one["hypotheses"]] != [beam.tolist() for beam, score in zip(trace["beams"][0], trace["scores"][0]) if score > -float("inf")]:
                assert least_gap(model, ids[0], 5) < 1e-12, words
                tied += 1
                continue
            assert one["value"] == chances.argmax() and one["steps"] == trace["trees"][0].tolist(), words
            torch.testing.assert_close(torch.tensor(one["probabilities"]).double(), chances, atol=1e-3 if name == "crvnn" else 1e-6, rtol=0)
        assert tied <= 3


def test_sentences_are_split_as_in_the_treebank(page):
    cases = {"I didn't like it.": "i did n't like it .", "It's fun, isn't it?": "it 's fun , is n't it ?", "You can't say they\u2019re bad\u2026": "you ca n't say they 're bad ...",
             "A well-made (old-fashioned) film -- really!": "a well-made ( old-fashioned ) film -- really !", "zzyzx": "zzyzx"}
    found = page.evaluate("""async texts => {
        const {vocabulary} = await rvnnPlay.modelHere("crvnn-sst5");
        return texts.map(text => rvnnPlay.readSentence(text, vocabulary)); }""", list(cases))
    assert [" ".join(one["words"]) for one in found] == list(cases.values())
    assert found[-1]["unknown"] == ["zzyzx"] and not found[0]["unknown"]


@pytest.mark.parametrize("weights", ["crvnn-sst5", "ebt_grc-sst5"])
def test_a_typed_sentence_gets_a_grade_and_a_tree(browser, folder, weights):
    page, wrong = opened(browser, (folder / "sentences.html").as_uri())
    box = ready(page, weights, 1)
    assert box.get_by_role("button", name="Random expression").count() == 0
    field = box.get_by_role("textbox", name="Sentence")
    field.fill("A zzyzx delight, and very funny!")
    field.press("Enter")
    ready(page, weights, 2)
    said = box.locator(".player-status[role=status]").inner_text()
    assert "positive with probability" in said and "8 tokens" in said and said.endswith("Not in the vocabulary: zzyzx.")
    assert "very positive: 0." in box.locator(".player-bars").get_attribute("aria-label")
    assert box.locator(".drawing svg text.leaf").all_text_contents() == "a zzyzx delight , and very funny !".split()
    field.fill("   ")
    field.press("Enter")
    page.wait_for_function("name => document.querySelector(`[data-weights=${name}] .player-error`).textContent === 'the sentence is empty'", arg=weights)
    box.get_by_role("button", name="Example sentence").click()
    ready(page, weights, 4)
    assert field.input_value() == HARD[0] and wrong == []
    page.context.close()


def test_messages_and_values_as_in_python(page):
    rng, texts = random.Random(3), ["", "  ", "()", "( )", "1", "7 ]", "[MAX ]", "[MAX 1 2", "[MAX [MIN 1 ]", "] 1", "max 1 2 ]", "[MAX 1 , 2 ]",
                                    "[MAX 1 it's ]", "[MAX 1 it's\"so\" ]", "[MAX 1 a\\b ]", "[MAX\u00a01\u30002 ]", "1\u200b", "\ufeff1", "[MAX 1 \U0001f600\U000e0001 ]",
                                    "[MAX 1 \x01\x7f\xad ]", "x" * 50, "\U0001f600" * 30, "[MAX 1\x1c2 ]", "[MAX 1\x852 ]", "10", "[MAX 1 2 ] 3", "[MAX ( 1 ) 2 ) ]", "[Max 1 2 ]"]
    for _ in range(400):
        texts.append(" ".join(rng.choice([*VOCABULARY, "(", "]", "]", "x", "[MAXI"]) for _ in range(rng.randint(1, 9))))
    for _ in range(300):
        texts.append(" ".join(draw_expression(rng)))
    expected = []
    for text in texts:
        try:
            expected.append(evaluate(tokenize(text)))
        except ListOpsError as problem:
            expected.append(str(problem))
    found = page.evaluate("texts => texts.map(text => { try { return rvnnPlay.parse(text).value; } catch (error) { return error.message; } })", texts)
    assert dict(zip(texts, found)) == dict(zip(texts, expected))
    assert len({type(one) for one in expected}) == 2


def test_the_wrong_token_is_selected_and_named(page):
    box = ready(page, "crvnn-listops", page.locator("[data-weights=crvnn-listops]").get_attribute("data-ready") or "1")
    field = box.get_by_label("ListOps expression")
    field.fill("[MAX 2 nine ]")
    field.press("Enter")
    assert box.get_by_role("alert").inner_text() == "token 2 is 'nine', which is none of " + " ".join(VOCABULARY)
    assert field.get_attribute("aria-invalid") == "true"
    assert field.evaluate("e => e.value.slice(e.selectionStart, e.selectionEnd)") == "nine"
    before = int(box.get_attribute("data-ready"))
    field.fill("[MAX 2 9 ]")
    field.press("Enter")
    ready(page, "crvnn-listops", before + 2)
    assert field.get_attribute("aria-invalid") is None and box.get_by_role("alert").inner_text() == ""
    field.fill("1 " * 400)
    field.press("Enter")
    assert "stands after the end" in box.get_by_role("alert").inner_text()
    field.fill("[MAX " + "1 " * 400 + "]")
    field.press("Enter")
    assert "402 tokens; the page computes at most 300" in box.get_by_role("alert").inner_text()


@pytest.mark.parametrize("weights", NAMES)
def test_player_by_keys_and_buttons(browser, folder, weights):
    page, wrong = opened(browser, (folder / "page.html").as_uri())
    box = ready(page, weights, 1)
    assert f"{NAMES[weights]} computes 9" in box.locator(".player-status[role=status]").inner_text() and page.locator(f"#still-{weights}").count() == 0
    slider = box.get_by_role("slider", name="round" if "crvnn" in weights else "step")
    last = int(slider.get_attribute("max"))
    assert last > 3 and slider.input_value() == str(last)
    unit, drawn = "round" if "crvnn" in weights else "step", box.locator(".drawing svg")
    seen = set()
    slider.focus()
    page.keyboard.press("Home")
    for step in range(last + 1):
        text = f"after {unit} {step} of {last}" if step else f"before the first {unit}"
        assert slider.get_attribute("aria-valuetext") == text == box.locator(".player-steps output").inner_text()
        seen.add(drawn.get_attribute("aria-label"))
        page.keyboard.press("ArrowRight")
    assert len(seen) >= last - 1
    box.get_by_role("button", name="Back").click()
    assert slider.input_value() == str(last - 1)
    box.get_by_role("button", name="Forward").click()
    assert slider.input_value() == str(last) and box.get_by_role("button", name="Forward").is_disabled()
    slider.focus()
    page.keyboard.press("Home")
    box.get_by_role("button", name="Play").click()
    page.wait_for_function("name => document.querySelector(`[data-weights=${name}] .player-steps input`).value > 0", arg=weights)
    box.get_by_role("button", name="Pause").click()
    field = box.get_by_label("ListOps expression")
    for turn, text in enumerate([*HARD, HARD[0]], 2):
        box.get_by_role("button", name="Hard expression").click()
        ready(page, weights, turn)
        assert field.input_value() == text
    drawn_texts = set()
    for turn in range(5, 11):
        box.get_by_role("button", name="Random expression").click()
        ready(page, weights, turn)
        text = field.input_value()
        value, said = evaluate(tokenize(text)), box.locator(".player-status[role=status]").inner_text()
        assert 8 <= len(text.split()) <= 60
        assert (f"computes {value} " in said and ": right." in said) or f"wrong, the value is {value}." in said
        drawn_texts.add(text)
    assert len(drawn_texts) == 6
    if "ebt" in weights:
        width = box.get_by_role("slider", name="Beam width K")
        width.focus()
        page.keyboard.press("Home")
        ready(page, weights, 11)
        assert box.locator("tbody tr").count() == 1
    assert wrong == []
    page.context.close()


@pytest.mark.parametrize("weights", NAMES)
def test_no_sideways_scrolling_and_readable_in_both_themes(browser, folder, weights):
    page, wrong = opened(browser, (folder / "page.html").as_uri())
    box = ready(page, weights, 1)
    box.get_by_label("ListOps expression").fill("[MAX " + "[MIN 1 2 3 4 5 ] " * 12 + "]")
    box.get_by_role("button", name="Compute").click()
    ready(page, weights, 2)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert box.locator(".drawing").evaluate("e => e.tabIndex === 0")
    small = box.locator("button:visible").evaluate_all("all => all.filter(e => e.offsetHeight < 24 || e.offsetWidth < 24 || !(e.ariaLabel || e.textContent).trim()).length")
    assert small == 0 and wrong == []
    page.context.close()


def test_reduced_motion_has_no_play_button(browser, folder):
    page, wrong = opened(browser, (folder / "page.html").as_uri(), reduced_motion="reduce")
    box = ready(page, "crvnn-listops", 1)
    assert box.get_by_role("button", name="Forward").count() == 1 and box.get_by_role("button", name="Play").count() == 0
    assert wrong == []
    page.context.close()


def test_without_scripts_the_still_remains(browser, folder):
    page, _ = opened(browser, (folder / "page.html").as_uri(), java_script_enabled=False)
    assert page.locator("figure svg[role=img]").count() == 2 and page.locator("textarea").count() == 0
    page.context.close()


@pytest.mark.parametrize("refusal", ["", "delete window.Worker", "window.Worker = function () { throw new Error('refused'); }",
                                     "window.Worker = class { postMessage() { setTimeout(() => this.onerror(new Event('error', {cancelable: true}))); } }"],
                         ids=["worker", "none", "refused", "fails"])
def test_worker_and_its_fallback_agree(browser, folder, refusal):
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.add_init_script(refusal)
    page.goto((folder / "page.html").as_uri())
    ready(page, "crvnn-listops", 1)
    one, = in_page(page, "crvnn-listops", [[START, 5]])
    assert one["value"] == 9 and page.evaluate("rvnnPlay.workerUsed()") == (not refusal)
    context.close()


def test_served_page_loads_weights_only_for_players_that_are_near(browser, folder):
    (folder / "long.html").write_text((folder / "page.html").read_text().replace("</figure>", '</figure><div style="height: 4000px"></div>'))
    loaded = "performance.getEntriesByType('resource').map(e => e.name.split('/').pop()).filter(name => name.includes('-listops'))"
    with serving(folder) as base:
        page, wrong = opened(browser, f"{base}/long.html")
        ready(page, "crvnn-listops", 1)
        assert page.evaluate(loaded) == ["crvnn-listops.js"]
        ready(page, "ebt_grc-listops", 1)
        assert page.evaluate(loaded) == ["crvnn-listops.js", "ebt_grc-listops.js"] and wrong == []
        page.context.close()


def test_missing_weights_are_reported_and_the_still_remains(browser, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "_static" / "weights" / "crvnn-listops.js").unlink()
    page, _ = opened(browser, (tmp_path / "copy" / "page.html").as_uri())
    page.wait_for_function("document.querySelector('.player-error').textContent")
    assert page.locator(".player-error").first.inner_text() == "the weights crvnn-listops could not be loaded"
    assert page.locator("#still-crvnn-listops").count() == 1
    page.context.close()


def test_scripts_hold_the_committed_weights(folder):
    data = (ROOT / "rvnnbook" / "weights" / "crvnn-listops.safetensors").read_bytes()
    assert (folder / "_static" / "weights" / "crvnn-listops.js").read_text() == weight_script("crvnn-listops", data)
    assert wanted_weights(BOX.format(weights="crvnn-listops", title="t", start="1", hard="[]")) == {"crvnn-listops"}
    assert wanted_weights("<p>data-weights</p>") == set()
