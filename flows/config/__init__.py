"""Configuration of experiments: from YAML documents to validated experiments and trials."""
