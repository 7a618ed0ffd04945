"""The figures and tables of the five papers, and one of our own, as experiments (`coterie reproduce`)."""
