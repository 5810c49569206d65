"""Replicas: DDP and its gradient compression, LocalSGD, DiLoCo, nn.DataParallel."""
