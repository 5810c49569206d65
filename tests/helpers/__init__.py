"""What several tests need: processes, clusters, models, recordings."""
