"""Context parallelism: sequences divided over ranks, attention by all-to-all (Ulysses)."""
