"""A glossary made from a table: the directive `glossary-table` with the name of a CSV file beside the page."""
import csv
from pathlib import Path

from docutils.statemachine import StringList
from sphinx.domains.std import Glossary


class GlossaryTable(Glossary):
    "A glossary whose terms, definitions and links are the rows of a CSV file."
    has_content = False
    required_arguments = 1

    def run(self):
        relative, path = self.env.relfn2path(self.arguments[0])
        self.env.note_dependency(relative)
        with Path(path).open(encoding="utf-8", newline="") as file:
            entries = [[row["Term"], f"  {row['Definition']} {row['Chapter']}", ""] for row in csv.DictReader(file)]
        self.content = StringList([line for entry in entries for line in entry], source=path)
        return super().run()


def setup(app):
    app.add_directive("glossary-table", GlossaryTable)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
