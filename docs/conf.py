"""Sphinx's settings; `make docs` builds with warnings as errors."""

from importlib.metadata import version as _version

project = "kldwrm_jax"
copyright = "the authors of kldwrm_jax"
release = version = _version("kldwrm_jax")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
html_theme = "furo"
html_title = "kldwrm_jax"
exclude_patterns = ["_build", "notebooks/README.md"]

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are committed with their outputs

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature's are enough
napoleon_use_rtype = False
intersphinx_mapping = {}
suppress_warnings = ["config.cache", "mystnb.unknown_mime_type"]
