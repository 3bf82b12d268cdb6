"""Fragment arithmetic: split, delta, merge, outer step, encodings."""
