"""`coterie replay`: a learner's life, executed again along its flight record (docs/guides/flight-record.md)."""
