"""The figures and tables of the five papers as experiments (`coterie reproduce`)."""
