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
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "mathml",
    "public_names",
    "generated_reference",
    "checked_links",
    "index_pages",
]
exclude_patterns = ["requirements.txt", "tutorials/*.py"]
highlight_language = "text"  # of blocks that name none: output, mostly
default_role = "literal"  # `name` in a docstring is an argument, shown as code
nitpicky = True
# Types in the annotations of other libraries, whose pages may not be asked for while ours are built.
nitpick_ignore_regex = [("py:.*", r"(?!gp\.|gluon_parallel\.).*")]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "attrs_block", "attrs_inline"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature would be longer than the docstring, which names the types that matter
autodoc_inherit_docstrings = False
napoleon_use_rtype = False
napoleon_numpy_docstring = False

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
