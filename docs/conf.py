"""Sphinx's settings for the documentation; `make docs` builds it."""

import hashlib
import os
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS / "_ext"))

import gluon_parallel as gp  # noqa: E402

project, author, copyright = "gluon_parallel", "the gluon_parallel authors", "the gluon_parallel authors, Apache-2.0"
version = release = gp.__version__

extensions = [
    "myst_nb",
    "sphinx_copybutton",
    "mathml",
    "checked_links",
    "index_pages",
]
exclude_patterns = ["requirements.txt", "tutorials/*.py"]
highlight_language = "text"  # of blocks that name none: output, mostly

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "attrs_block", "attrs_inline"]
myst_heading_anchors = 4

# A notebook runs again when its cells or the package have changed.
_package = hashlib.sha256()
for _path in sorted((ROOT / "gluon_parallel").rglob("*.py")):
    _package.update(_path.read_bytes())
os.environ["PYTHONWARNINGS"] = "default"  # in the kernels; nb_output_stderr reports what they show
nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build" / "docs-notebooks" / _package.hexdigest()[:16])
nb_execution_timeout = 600
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_output_stderr = "warn"
nb_merge_streams = True

html_theme = "furo"
html_title = "gluon_parallel"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"  # browsers draw it themselves: nothing is fetched from another host
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#2a6f97", "color-brand-content": "#22607f"},
    "dark_css_variables": {"color-brand-primary": "#7cc0e4", "color-brand-content": "#8ecbeb"},
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
