"""Expert parallelism: the experts of mixture-of-experts layers are distributed over ranks."""
