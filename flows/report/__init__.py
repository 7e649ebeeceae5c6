"""Reports of an experiment: HTML page, tables on the terminal, figures."""
