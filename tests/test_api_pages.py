"""Pages of the API: classes first, encoders before other classes; a drawing of the shapes; links from each page to what it defines."""
import re
import sys
import xml.etree.ElementTree as ET

import pytest

from tests.browsing import ROOT
from tests.test_site import PAGES, SITE, built  # noqa: F401

sys.path.insert(0, str(ROOT / "_ext"))
import api  # noqa: E402
import defined  # noqa: E402

MODULES = api.module_names(ROOT / "rvnnbook")


def test_encoders_stand_before_other_classes():
    assert api.public_classes(MODULES["rvnnbook.encoders.crvnn"])[:3] == ["CRvNNParts", "CRvNN", "FixedTreeCRvNN"]
    assert api.public_classes(MODULES["rvnnbook.layers.topk"]) == []


@pytest.mark.parametrize("name", [name for name in MODULES if not (SITE / "index.html").exists() or (SITE / "api" / f"{name}.html").exists()])
def test_classes_come_first_and_nothing_stands_twice(built, name):    # noqa: F811
    page, classes = (SITE / "api" / f"{name}.html").read_text(), api.public_classes(MODULES[name])
    shown = [found for found in re.findall(rf'<dt class="sig sig-object py" id="{re.escape(name)}\.(\w+)"', page)]
    assert len(shown) == len(set(shown)) and [found for found in shown if found in classes] == shown[:sum(found in classes for found in shown)]
    assert [found for found in classes if found in shown] == shown[:sum(found in classes for found in shown)]


def test_shapes_are_drawn_and_described(built):    # noqa: F811
    svg = ET.fromstring(re.search("<svg.*</svg>", api.shapes_figure())[0])
    assert all(name in svg.get("aria-label") and shape in svg.get("aria-label") for name, shape in api.SHAPES)
    assert 'id="fig-api-shapes"' in (SITE / "api" / "index.html").read_text()


def test_pages_link_what_they_define(built):    # noqa: F811
    modules = defined.sources(ROOT / "rvnnbook")
    assert modules["nbs/crvnn"] == "rvnnbook.reference.crvnn" and len(modules) > 50
    linked = 0
    for page in (page for page in PAGES if page in modules and (SITE / "api" / f"{modules[page]}.html").exists()):
        said = re.search(r'<p class="defined">.*?</p>', (SITE / f"{page}.html").read_text())
        documented = re.findall(rf'<dt class="sig sig-object py" id="({re.escape(modules[page])}\.\w+)"', (SITE / "api" / f"{modules[page]}.html").read_text())
        assert sorted(re.findall(r'\.html#([\w.]+)"', said[0] if said else "")) == sorted(documented), page
        linked += bool(said)
    assert linked
