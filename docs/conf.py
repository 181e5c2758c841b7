"""Sphinx's settings; `make docs` builds with warnings as errors."""

import pathlib
import tomllib

import kldwrm_jax

_pyproject = tomllib.loads((pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text())

project = "kldwrm_jax"
author = _pyproject["project"]["authors"][0]["name"]
copyright = author
release = version = kldwrm_jax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx-mathjax-offline",  # formulas are drawn without a network
]
html_theme = "furo"
html_title = f"kldwrm_jax {version}"
html_theme_options = {
    "source_repository": _pyproject["project"]["urls"]["Repository"],
    "source_branch": "main",
    "source_directory": "docs/",
}
exclude_patterns = ["_build", "notebooks/README.md"]

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are committed with their outputs

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature's are enough
napoleon_use_rtype = False
intersphinx_mapping = {}
suppress_warnings = ["config.cache", "mystnb.unknown_mime_type"]
