"""Properties of the drawing rooms: any tree, any text."""
import re
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rvnnbook.core import simple_tree, steps_from_tree
from rvnnbook.data.listops import composition_steps, unique_draws
from rvnnbook.show.plots import COLORS, bar_chart, block_diagram, canvas, figure, line_chart, own_ids, side_by_side
from rvnnbook.show.steppers import stepper
from rvnnbook.show.trees import (
    bracket_string,
    genealogy_drawing,
    genealogy_places,
    staircase_drawing,
    tree_drawing,
    tree_layout,
    tree_pair_drawing,
    tree_spans,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "_ext"))

# What XML can carry: no control characters, no surrogates, nothing unassigned.
printable = st.text(st.characters(exclude_categories=["Cc", "Cs", "Cn"]) | st.sampled_from("<>&\"'"), max_size=12)
said = printable.filter(str.strip)


@st.composite
def trees(draw, most=40):
    "A random binary tree over positions 0..n-1, as nested pairs, and its number of leaves."
    n = draw(st.integers(1, most))
    parts = list(range(n))
    while len(parts) > 1:
        i = draw(st.integers(0, len(parts) - 2))
        parts[i:i + 2] = [(parts[i], parts[i + 1])]
    return parts[0], n


def marks(svg, kind):
    return [mark for mark in ET.fromstring(svg).iter() if mark.get("class") == kind]


def brackets(tree):
    return str(tree) if isinstance(tree, int) else f"({brackets(tree[0])} {brackets(tree[1])})"


@given(trees(), st.data())
def test_a_drawing_is_well_formed_and_complete(tree, data):
    tree, n = tree
    tokens = data.draw(st.lists(printable, min_size=n, max_size=n))
    steps = steps_from_tree(tree)
    svg = tree_drawing(steps, tokens)
    assert [mark.text or "" for mark in marks(svg, "leaf")] == tokens
    assert len(marks(svg, "parent")) == n - 1
    assert len(list(ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}path"))) == 2 * (n - 1)
    assert svg == tree_drawing(steps + [0, 0, 0], tokens), "padding changed the drawing"


@given(trees())
def test_brackets_agree_with_the_nested_pairs(tree):
    tree, n = tree
    assert bracket_string(steps_from_tree(tree), range(n)) == brackets(tree)


@given(trees())
def test_layout_keeps_order_and_height(tree):
    steps = steps_from_tree(tree[0])
    places, edges, (width, height) = tree_layout(steps, ["x"] * tree[1])
    assert all(0 < x < width and 0 < y < height for x, y in places.values())
    xs = [places[i, i][0] for i in range(tree[1])]
    assert xs == sorted(set(xs))
    children = {}
    for parent, child in edges:
        assert places[parent][1] < places[child][1]
        children.setdefault(parent, []).append(places[child][0])
    assert all(left < places[parent][0] < right for parent, (left, right) in children.items())
    drop = {round_: places[0, 0][1] - places[first, last][1] for first, _, last, round_ in tree_spans(steps)}
    assert all(abs(drop[round_] - round_ * drop[min(drop)] / min(drop)) < 1e-6 for round_ in drop)


@given(trees(), st.data())
def test_rounds_add_up(tree, data):
    tree, n = tree
    steps = steps_from_tree(tree)
    counts = [len(marks(tree_drawing(steps, range(n), upto=round_), "parent")) for round_ in range(max(steps) + 1)]
    assert counts[0] == 0 and counts[-1] == n - 1
    assert [b - a for a, b in pairwise(counts)] == [steps.count(round_) for round_ in range(1, max(steps) + 1)]


@pytest.mark.parametrize("steps", [[], [1], [0, 0], [1, 1, 0], [-1, 0], [2, 3, 3, 0]])
def test_what_is_no_tree_is_refused(steps):
    with pytest.raises(ValueError):
        tree_spans(steps)


def segments(path):
    "The lines of a path from `elbow` or of straight lines; a rounded corner lies within the box of its three points."
    points = [tuple(map(float, pair)) for pair in re.findall(r"([-\d.]+) ([-\d.]+)", re.sub(r"[HV][-\d.]+", "", path))]
    if "H" not in path:
        return list(pairwise(points))
    start, corner, bend = points
    return [(start, corner), (corner, bend), (bend, (corner[0], float(path.split("V")[1])))]


def passes(line, box):
    "Whether a segment has a point inside a box (Liang and Barsky)."
    (x1, y1), (x2, y2) = line
    left, top, right, bottom = box
    low, high = 0.0, 1.0
    for change, room_before, room_after in ((x2 - x1, left - x1, right - x1), (y2 - y1, top - y1, bottom - y1)):
        if change == 0:
            if not room_before < 0 < room_after:
                return False
        else:
            enters, leaves = sorted((room_before / change, room_after / change))
            low, high = max(low, enters), min(high, leaves)
    return low < high


LONG = next(e.tokens for e in unique_draws(2000, seed=0) if len(e.tokens) == 60)
WRITTEN = {"left chain": (simple_tree("left", 12), ["x"] * 12), "balanced": (simple_tree("balanced", 32), ["x"] * 32),
           "ListOps": (composition_steps(LONG), LONG)}


@pytest.mark.parametrize("text", ["", "9", "0.42", "letters"])
@pytest.mark.parametrize("name", WRITTEN)
def test_no_edge_crosses_another_node(name, text):
    steps, tokens = WRITTEN[name]
    labels = {(first, last): text for first, _, last, _ in tree_spans(steps)} if text else {}
    places, edges, _ = tree_layout(steps, tokens, row=30 if text else 16)
    boxes = {}
    for (first, last), (x, y) in places.items():
        half, high = (4.5 * len(tokens[first]), 8) if first == last else (max(11, 4.5 * len(text) + 6), 11) if text else (3.5, 3.5)
        boxes[first, last] = x - half, y - high, x + half, y + high
    drawn = ET.fromstring(tree_drawing(steps, tokens, labels)).iter("{http://www.w3.org/2000/svg}path")
    crossed = [(edge, node) for edge, path in zip(edges, drawn, strict=True) for node, box in boxes.items()
               if node not in edge and any(passes(line, box) for line in segments(path.get("d")))]
    assert not crossed, f"{len(crossed)} crossings, first {crossed[:3]}"


def test_a_deep_tree_is_drawn():
    deep = list(range(3000, 0, -1)) + [0]
    assert tree_drawing(deep, range(3001)).count('class="parent"') == 3000
    assert bracket_string(deep, range(3001)).endswith(")" * 3000)


@given(said, said, st.text("ab<&c", max_size=5))
def test_alt_and_caption_arrive_as_they_are(alt, caption, label):
    label = {(0, 1): label}
    page = ET.fromstring(figure(tree_drawing([1, 0], ["a", "b"], labels=label), name="fig-a", alt=alt, caption=caption)._repr_html_())
    assert page.find("figcaption").text == caption
    assert page.find(".//*[@role='img']").get("aria-label") == alt


def busy_plot():
    fig, axes = canvas(ncols=2)
    axes[0].plot([0, 1], [1, 0], marker="o", label="falls")
    axes[0].annotate("here < there", (0.5, 0.5))
    axes[0].legend()
    axes[1].imshow([[0, 1], [2, 3]])
    axes[1].fill_between([0, 1], [0, 1], color="black")
    return fig


def test_a_plot_has_no_black_and_no_box():
    import matplotlib.pyplot as plt
    body = figure(busy_plot(), name="fig-a", alt="a", caption="c").body
    assert not plt.get_fignums(), "the figure stayed open"
    texts = [text.text for text in ET.fromstring(body).iter() if text.tag.endswith("}text")]
    assert "here < there" in texts and "falls" in texts
    styles = [part.get("style", "") for part in ET.fromstring(body).iter()]
    assert not [style for style in styles if "#000000" in style or "black" in style]
    assert any(COLORS[0] in style for style in styles) and any("currentColor" in style for style in styles)
    assert "<metadata" not in body and "<!DOCTYPE" not in body
    assert body == figure(busy_plot(), name="fig-a", alt="a", caption="c").body


def test_figures_share_a_page():
    bodies = [figure(busy_plot(), name=name, alt="a", caption="c").body for name in ("fig-a", "fig-b")]
    ids = [[part.get("id") for part in ET.fromstring(body).iter() if part.get("id")] for body in bodies]
    assert ids[0] and len(set(ids[0] + ids[1])) == len(ids[0]) + len(ids[1])
    for body, own in zip(bodies, ids):
        used = [value[1:] for part in ET.fromstring(body).iter() for key, value in part.items() if key.endswith("href") and value[0] == "#"]
        assert used and set(used) <= set(own), "a reference lost its target"


def test_drawings_side_by_side_keep_their_references_and_wrap():
    body = ET.fromstring(figure(side_by_side(busy_plot(), busy_plot()), name="fig-a", alt="a", caption="c").body)
    drawings = list(body.iter("{http://www.w3.org/2000/svg}svg"))
    own = [{part.get("id") for part in drawing.iter() if part.get("id")} for drawing in drawings]
    assert len(own) == 2 and own[0] and not own[0] & own[1]
    for drawing, ids in zip(drawings, own):
        assert {value[1:] for part in drawing.iter() for key, value in part.items() if key.endswith("href") and value[0] == "#"} <= ids
        assert float(re.search(r"min-width:(\d+)px", drawing.get("style"))[1]) == round(.75 * float(drawing.get("width")))
    assert "flex-wrap:wrap" in body[0].get("style")


def test_ids_without_a_reader_go_and_foreign_links_stay():
    assert own_ids('<a href="#away" id="x">a</a><i id="y"/><use href="#y"/>', "n") == '<a href="#away">a</a><i id="n-y"/><use href="#n-y"/>'


@pytest.mark.parametrize("wrong", [{"name": ""}, {"name": "Fig 1"}, {"alt": " "}, {"caption": ""}, {"alt": None}])
def test_a_figure_without_words_is_refused(wrong):
    words = {"name": "fig-a", "alt": "a", "caption": "c", **wrong}
    with pytest.raises(ValueError):
        figure('<svg viewBox="0 0 1 1"/>', **words)
    with pytest.raises(ValueError):
        stepper(['<svg viewBox="0 0 1 1"></svg>'] * 2, **words)


def test_svg_without_viewbox_is_refused():
    with pytest.raises(ValueError, match="viewBox"):
        figure("<svg></svg>", name="fig-a", alt="a", caption="c")


@settings(deadline=None, max_examples=20)
@given(st.lists(said, min_size=2, max_size=5))
def test_a_stepper_holds_each_frame_for_the_page_and_for_notebooks(labels):
    frames = [tree_drawing([1, 0], ["a", str(i)]) for i in range(len(labels))]
    shown = stepper(frames, name="fig-a", alt="alt", caption="caption", labels=labels)
    controls, stack, caption = shown.widget.children
    assert len(stack.children) == len(labels) and stack.selected_index == 0 and caption.value == "caption"
    assert all(child.max == len(labels) - 1 for child in controls.children)
    on_page = ET.fromstring(shown.html).findall("./div/div")
    assert [frame.get("hidden") for frame in on_page] == ["hidden"] * (len(labels) - 1) + [None]
    for i, (live, frame) in enumerate(zip(stack.children, on_page, strict=True)):
        for copy in (ET.fromstring(live.value), frame):
            assert copy.find("p").text == labels[i]
            assert [mark.text for mark in copy.iter() if mark.get("class") == "leaf"] == ["a", str(i)]


def test_a_front_end_without_widgets_gets_the_figure_of_a_stepper():
    shown = stepper([tree_drawing([1, 0], "ab")] * 2, name="fig-a", alt="a", caption="c")
    offered = shown._repr_mimebundle_()
    assert offered["text/html"] == shown.html and offered["text/plain"] == "c"
    assert offered["application/vnd.jupyter.widget-view+json"]["model_id"] == shown.widget.model_id


def test_a_stepper_counts_its_frames():
    frame = tree_drawing([1, 0], "ab")
    for frames, labels in (([frame], None), ([], None), ([frame] * 2, ["one"]), ([frame] * 2, list("abc"))):
        with pytest.raises(ValueError):
            stepper(frames, name="fig-a", alt="a", caption="c", labels=labels)


@given(st.text("ab *_|`\\:.-1", max_size=30))
@example("` `")
def test_docments_become_clean_restructuredtext(text):
    from book import sentence
    from docutils.core import publish_doctree
    text = " ".join(text.split()) or "nothing"
    tree = publish_doctree(f":param x: {sentence(text)}", settings_overrides={"report_level": 1, "halt_level": 5, "warning_stream": False})
    assert not [node for node in tree.findall() if node.tagname in ("system_message", "problematic")]


def test_docments_reach_the_api_page():
    from book import fields
    lines = fields(canvas)
    assert r":param height: \ height of the figure, inches" in lines
    assert lines[-1].startswith(r":returns: \ the figure and its axes")


# Charts and searches

def test_a_chart_draws_every_value():
    fig = line_chart({"a": ([0, 1], [1, 2]), "_b": ([0, 1], [3, 4])}, ylabel="y")
    assert [line.get_ydata().tolist() for line in fig.axes[0].get_lines()] == [[1, 2], [3, 4]]
    assert fig.axes[0].get_legend() is None, "a name with an underscore has no legend"
    assert line_chart({"a": ([0, 1], [1, 2])}, marks=" ").axes[0].get_lines()[0].get_marker() == "None"
    fig = bar_chart({"a": [1, 2], "b": [3, 4]}, ["x", "y"], digits=0)
    assert [text.get_text() for text in fig.axes[0].texts] == ["1", "2", "3", "4"]
    assert [text.get_text() for text in fig.axes[0].get_legend().get_texts()] == ["x", "y"]


def test_boxes_do_not_overlap_their_arrows():
    fig = block_diagram({"a": (0, 0, "one", 0), "b": (2, 0, "two", 1), "c": (2, 1.5, "three", None)},
                        [("a", "b", "right"), ("b", "c", "up", "--")], loop=("b", "a", "again"))
    boxes = {box.get_gid(): box.get_bbox() for box in fig.axes[0].patches if box.get_gid()}
    assert set(boxes) == {"a", "b", "c"}
    for arrow in (text for text in fig.axes[0].texts if hasattr(text, "arrow_patch") and text.arrow_patch):
        for x, y in (arrow.xy, arrow.get_position()):
            assert not any(box.x0 < x < box.x1 and box.y0 < y < box.y1 for box in boxes.values())


@given(trees())
def test_a_pair_of_trees_marks_common_nodes(tree):
    tree, n = tree
    steps = steps_from_tree(tree)
    found, gold = ET.fromstring(tree_pair_drawing(steps, steps, range(n)))
    marked = [sum(mark.get("fill") == COLORS[0] for mark in side.iter() if mark.get("class") == "parent") for side in (found, gold)]
    assert marked == [n - 1, 0]


@given(st.integers(2, 9).flatmap(lambda n: st.tuples(*(st.integers(0, k - 1) for k in range(n - 1, 0, -1)))))
def test_a_staircase_has_a_row_for_every_step(merges):
    n = len(merges) + 1
    numbers = [["1"] * (n - 1 - t) for t in range(n - 1)]
    drawn = staircase_drawing(["x"] * n, merges, numbers)
    assert len(marks(drawn, "node")) == n * (n + 1) // 2
    assert len(marks(drawn, "number")) == n * (n - 1) // 2


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 4), min_size=1, max_size=5, unique=True))
def test_a_genealogy_is_a_tree_of_prefixes(final):
    beams = [sorted({one[:t] for one in final}) for t in range(5)]
    places = genealogy_places(beams)
    assert set(places) == {one for beam in beams for one in beam}
    for one, (x, y) in places.items():
        children = [height for other, (_, height) in places.items() if other[:-1] == one and other]
        assert x == len(one) and (not children or min(children) <= y <= max(children))
    drawn = genealogy_drawing([*beams[:1], [*beams[1], (9,)], *beams[2:]])
    assert len(marks(drawn, "line")) == len(places) - 1 and len(marks(drawn, "stub")) == 1


def test_a_genealogy_refuses_hypotheses_of_the_wrong_length():
    with pytest.raises(ValueError, match="hypothesis of step t has t choices"):
        genealogy_places([[()], [(0, 1)]])
