"""The options of qsub, which Grid Engine and PBS have in common."""
