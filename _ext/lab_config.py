"""JupyterLab's settings for `make lab`: a notebook is saved as git keeps it, without outputs and without what the editor noted."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from build import clean_notebook  # noqa: E402


def clean_on_save(model, **_):
    "Before a notebook is written."
    if model["type"] == "notebook":
        clean_notebook(model["content"])


c = get_config()  # noqa: F821 (given by Jupyter)
c.FileContentsManager.pre_save_hook = clean_on_save
