collect_ignore = ["preambles"]  # they are imported by programs of their own
