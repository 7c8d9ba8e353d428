"""Every encoder computes what it computed before the second edition's renames."""
import json

import pytest

from tests import snapshot

KNOWN = json.loads(snapshot.FILE.read_text())
CASES = dict(snapshot.cases())


def test_snapshot_covers_every_encoder_in_both_modes():
    assert set(KNOWN) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_outputs_losses_and_gradients_match_the_snapshot(name):
    now, then = CASES[name](), KNOWN[name]
    assert set(now) == set(then)
    for key in ("root", "loss", "gradient.x"):
        assert now[key]["sums"] == pytest.approx(then[key]["sums"], rel=1e-9, abs=1e-11), key
