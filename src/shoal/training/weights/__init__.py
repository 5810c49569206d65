"""Pretrained weights: Hugging Face directories, read and written in shards."""
