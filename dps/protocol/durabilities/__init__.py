"""The kinds of durability, each a module: its settings, and the parts that carry it out."""
