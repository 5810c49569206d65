"""Context parallelism: sequences split over ranks, attention with all-to-all (Ulysses)."""
