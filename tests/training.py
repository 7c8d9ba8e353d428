"Small training runs for test_train: one to be killed in another process, one to be shared by two processes."
import json
import os
import signal
import sys
from pathlib import Path

import accelerate  # noqa: F401  (here, so that the processes that are killed need not import it each time)
import pytorch_optimizer  # noqa: F401
import torch

from rvnnbook.data.batches import BucketLoader
from rvnnbook.data.listops import VOCABULARY, collate_listops, unique_draws
from rvnnbook.lab.train import train
from rvnnbook.registry import create_encoder
from rvnnbook.optimization import evaluate_classifier
from rvnnbook.tasks.classify import Classifier

torch.set_num_threads(1)
EXAMPLES = [e for e in unique_draws(150, seed=0) if len(e.tokens) <= 30]
TEST = list(BucketLoader(EXAMPLES[:30], 30, collate_listops))


def make_model(dropout=0.1, seed=0):
    torch.manual_seed(seed)
    encoder = create_encoder("rvnn", dim=6, dropout=dropout)
    return Classifier(encoder, len(VOCABULARY), 10, layers=2, dropout_in=dropout, dropout_out=dropout)


def judge(model):
    torch.rand(3)                                        # whoever judges may draw
    return evaluate_classifier(model, TEST)


def go(folder=None, model=None, examples=EXAMPLES[30:70], size=8, judge=judge, **options):
    "Train for 25 steps, checked at every fourth and saved at every one; options change that."
    model = model or make_model()
    options = {"steps": 25, "check_every": 4, "learning_rate": 1e-2, "patience": None, "save_every": 0.0,
               "halve_after": 1, **options}
    return model, train(model, BucketLoader(examples, size, collate_listops, seed=1), judge, folder=folder, **options)


def go_until_killed(folder, count):
    "Train as `go` does, but die before the count-th change below the folder, as in a power cut; unpickle nothing."
    left = [count]

    def watch(event, arguments):
        if event == "pickle.find_class":
            os._exit(3)
        writes = event == "open" and arguments[1] == "w" and str(folder) in str(arguments[0])
        if writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    go(folder)


def go_together(folder):
    "What every process of a launch does: a leg of one step, then the rest; float64, no dropout, a last batch of one row."
    for budget in (0.0, 1e9):
        model = make_model(0.0, seed=int(os.environ.get("RANK", 0))).double()    # the first one's weights count
        model, outcome = go(folder, model, examples=EXAMPLES[30:71], time_budget=budget)
    return model, outcome


if __name__ == "__main__":
    model, outcome = go_together(Path(sys.argv[1]))
    if os.environ.get("RANK", "0") == "0":
        Path(sys.argv[1], "outcome.json").write_text(json.dumps(outcome._asdict()))
