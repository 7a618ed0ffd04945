"""Pages about runs: curves, aggregates, what a run was and where its time went, in one HTML file for offline use."""
