"""JupyterLab's settings for `make lab`: a notebook is saved as git keeps it, without outputs and without what the editor noted."""


def clean_on_save(model, **_):
    "Before a notebook is written: take out outputs, counts and metadata that the repository does not keep."
    if model["type"] != "notebook":
        return
    from nbdev.clean import clean_nb
    for cell in model["content"]["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = []
    clean_nb(model["content"], allowed_cell_metadata_keys=["tags", "mystnb"])


c = get_config()  # noqa: F821 (given by Jupyter)
c.FileContentsManager.pre_save_hook = clean_on_save
