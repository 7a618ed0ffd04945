"""The flight record of a run: the schedule by which `coterie replay` executes it again."""
