"""Expert parallelism: the experts of mixture-of-experts layers are divided over ranks."""
