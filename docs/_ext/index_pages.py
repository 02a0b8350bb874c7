"""Navigation of the site, from the links of its index pages, which are plain Markdown so that GitHub shows them too."""

import posixpath
import re

# Pages of the same folder, and index pages of the folders in it.
LINK = re.compile(r"\]\(((?:\w+/index|\w+)\.(?:md|ipynb))(?:#[\w-]*)?\)")


def add_hidden_toctree(app, docname, source):
    if posixpath.basename(docname) == "index" and "{toctree}" not in source[0]:
        pages = "\n".join(dict.fromkeys(LINK.findall(source[0])))
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


def setup(app):
    app.connect("source-read", add_hidden_toctree)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
