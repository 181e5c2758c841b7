"""The paper's experiments and your own, on the command line: ``kldwrm --help``."""
